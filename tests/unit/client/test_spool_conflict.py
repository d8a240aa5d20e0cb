"""What a spool does about a place that is taken: it drops a batch only if the broker names exactly that batch."""

from __future__ import annotations

import logging

import pytest

from fairway import batch
from fairway.batch import MessageId
from fairway.batch.identity import derived_secret
from fairway.client.spool.drain import SpoolDrain
from fairway.client.spool.journal import Journal
from fairway.errors import Code, Refused, StoredRange
from fairway.protocol.line import Answer, Ask
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk

KEY = bytes(range(16))
STORED = Answer(Produced(0, 1, 0, False, 1))
NUMBER, STREAM = 0xABC, 77


class Stage:
    """A journal with three batches of one stream, which may have been sent before, and a line to a broker."""

    def __init__(self, key: bytes = KEY) -> None:
        self._timers: list[tuple[float, object, tuple[object, ...]]] = []
        self._disk = SimDisk(SeededRng("spool"), self._later)
        self._key = key
        journal = Journal(self._disk, NUMBER, ManualClock(), key=key)
        journal.keep([Handed("orders", 1, True, data(number)) for number in range(3)], lambda _: None)
        self.settle()
        self.begin()

    def _later(self, seconds: float, callback: object, *args: object) -> None:
        self._timers.append((seconds, callback, args))

    def settle(self) -> None:
        while self._timers:
            _, callback, args = self._timers.pop(0)
            callback(*args)  # type: ignore[operator]

    def begin(self) -> None:
        """Another process takes the journal over."""
        self._disk = self._disk.crash_process()
        self.journal = Journal.open(self._disk, NUMBER, ManualClock())
        self.draining = SpoolDrain(SeededRng("drain"), on_change=lambda: None, on_success=lambda: None)
        self.draining.add(self.journal)

    def asks(self) -> list[Ask]:
        for _ in range(4):
            asks = list(self.draining.asks(16, 0))
            self.settle()
            if asks:
                return asks
        return []

    def tell(self, ask: Ask, outcome: Answer | Refused) -> None:
        self.draining.answered(ask.token, outcome, 0)
        self.settle()


def data(number: int) -> bytes:
    return batch.encode([b"%d" % number], producer_id=STREAM, first_sequence=number, created_ms=0)


def range_of(ask: Ask) -> StoredRange:
    header = batch.peek(bytes(ask.attachments[0]))
    return StoredRange(header.first_sequence, header.count, header.crc)


def sent(ask: Ask) -> tuple[int, int, bytes, MessageId]:
    opened = batch.decode(bytes(ask.attachments[0]))
    return opened.header.producer_id, opened.header.first_sequence, opened.payloads[0], opened.id(0)


def test_each_batch_goes_with_the_secret_of_its_stream() -> None:
    for key in (b"", KEY):
        asks = Stage(key).asks()
        assert [ask.message for ask in asks] == [
            Produce("orders", is_pinned=True, secret=derived_secret(key, STREAM))
        ] * 3


def test_a_conflict_with_exactly_this_batch_is_a_receipt() -> None:
    stage = Stage()
    for ask in stage.asks():
        stage.tell(ask, Refused(Code.SEQUENCE_CONFLICT, "taken", stored=(range_of(ask),)))
    assert stage.journal.is_empty
    assert stage.draining.duplicates == 3


@pytest.mark.parametrize("key", [b"", KEY], ids=["of an older version", "with secrets"])
@pytest.mark.parametrize(
    "refused",
    [
        Refused(Code.SEQUENCE_CONFLICT, "taken, says a broker that cannot tell by what"),
        Refused(Code.SEQUENCE_CONFLICT, "taken", stored=(StoredRange(1, 1, 0xBAD),)),
        Refused(Code.SEQUENCE_CONFLICT, "taken", stored=()),
        Refused(Code.FOREIGN_STREAM, "a stranger's"),
    ],
    ids=["not known", "other bytes", "nothing", "a stranger's stream"],
)
@pytest.mark.parametrize("is_killed", [False, True])
def test_any_other_leaves_the_batch_to_a_new_stream_and_the_others_in_theirs(
    refused: Refused, is_killed: bool, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(key)
    first, second, third = stage.asks()
    stage.tell(first, STORED)
    stage.tell(third, STORED)
    with caplog.at_level(logging.WARNING):
        stage.tell(second, refused)
    assert "restored from a backup" in caplog.text
    assert (stage.journal.entries, stage.draining.asides) == (1, 0), "nothing is dropped, nothing set aside"
    if is_killed:
        stage.begin()
    [again] = stage.asks()
    producer_id, place, payload, message_id = sent(again)
    assert (place, payload, message_id) == (0, b"1", MessageId(STREAM, 1)), "it keeps the id of its receipt"
    assert producer_id != STREAM
    assert isinstance(again.message, Produce)
    assert again.message == Produce("orders", again.message.is_pinned, derived_secret(key, producer_id))
    stage.tell(again, STORED)
    assert stage.journal.is_empty
