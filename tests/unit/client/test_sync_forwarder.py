"""The process-forward producer: bounded, in the background, durable where asked, and clean at its end."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fairway
import fairway.aio
from fairway import Outgoing
from tests.unit.client.broker import WAIT_S, Running, run_program

QUICK = {"backoff_first_ms": 1, "backoff_most_ms": 5}


def payloads(client: fairway.Client, subject: str) -> list[bytes]:
    return [bytes(each) for page in client.scan(subject) for each in page.batch.payloads]


def echo(subject: str) -> Callable[[bytes], Outgoing]:
    return lambda item: Outgoing(subject, item)


def ids(client: fairway.Client, subject: str) -> list[fairway.MessageId]:
    with client.consumer(subject, group="ids") as consumer:
        return [message.id for message in consumer.take(100, WAIT_S)]


def test_items_are_processed_and_sent_on(client: fairway.Client, subject: str) -> None:
    def process(item: int) -> Iterator[Outgoing]:
        for part in range(item % 3):
            yield Outgoing(subject, b"%d.%d" % (item, part), key=str(item))

    with fairway.Forwarder(client, process, workers=3) as forwarder:
        for number in range(100):
            forwarder.accept(number)
    expected = [b"%d.%d" % (number, part) for number in range(100) for part in range(number % 3)]
    assert sorted(payloads(client, subject)) == sorted(expected)
    counts = forwarder.counts
    assert (counts.accepted, counts.forwarded, counts.messages, counts.waiting) == (100, 100, 99, 0)


def test_one_worker_keeps_the_order(client: fairway.Client, subject: str) -> None:
    with fairway.Forwarder(client, echo(subject), workers=1) as forwarder:
        for number in range(50):
            forwarder.accept(b"%d" % number)
    assert payloads(client, subject) == [b"%d" % number for number in range(50)]


class Slow:
    """A `process` that waits until it may go on."""

    def __init__(self, subject: str) -> None:
        self.may_go_on = threading.Event()
        self._subject = subject

    def __call__(self, item: bytes) -> Outgoing:
        assert self.may_go_on.wait(WAIT_S)
        return Outgoing(self._subject, item)


def test_a_full_forwarder_raises_if_told_to(client: fairway.Client, subject: str) -> None:
    slow = Slow(subject)
    with fairway.Forwarder(client, slow, workers=1, capacity=5, when_full="raise") as forwarder:
        for number in range(5):
            forwarder.accept(b"%d" % number)
        with pytest.raises(fairway.BufferFull, match=r"5 items wait.*capacity=5"):
            forwarder.accept(b"one too many")
        slow.may_go_on.set()
    assert len(payloads(client, subject)) == 5


def test_a_full_forwarder_waits_for_room_and_no_longer_than_told(client: fairway.Client, subject: str) -> None:
    slow = Slow(subject)
    with fairway.Forwarder(client, slow, workers=1, capacity=1) as forwarder:
        forwarder.accept(b"0")
        with pytest.raises(fairway.BufferFull):
            forwarder.accept(b"1", timeout=0.05)
        threading.Timer(0.05, slow.may_go_on.set).start()
        forwarder.accept(b"2")
    assert payloads(client, subject) == [b"0", b"2"]


def test_a_full_forwarder_with_a_journal_takes_all_and_keeps_the_order(
    client: fairway.Client, subject: str, tmp_path: Path
) -> None:
    slow = Slow(subject)
    with fairway.Forwarder(
        client, slow, workers=1, capacity=10, when_full="spool", journal=str(tmp_path / "spool")
    ) as forwarder:
        for number in range(100):
            forwarder.accept(b"%d" % number, timeout=WAIT_S)
        forwarder.persist(WAIT_S)
        assert forwarder.counts.on_disk == 100
        slow.may_go_on.set()
        assert forwarder.flush(WAIT_S)
    assert payloads(client, subject) == [b"%d" % number for number in range(100)]
    assert [each.name for each in (tmp_path / "spool" / "forwarder").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"persist_after": 0.05}, "time"), ({"persist_after": 3_600, "persist_items": 3}, "count")],
    ids=["time", "count"],
)
def test_items_that_wait_are_written_down_by_time_and_by_count(
    client: fairway.Client, subject: str, tmp_path: Path, settings: dict[str, float], why: str
) -> None:
    slow = Slow(subject)
    with fairway.Forwarder(client, slow, workers=1, journal=str(tmp_path), **settings) as forwarder:
        for number in range(4):
            forwarder.accept(b"%d" % number)
        until(lambda: forwarder.counts.on_disk == 4)
        slow.may_go_on.set()
    assert len(payloads(client, subject)) == 4, why


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S * 100)):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to be so")


DIES = """
import os, sys, fairway
client = fairway.connect(sys.argv[1])
def process(item):
    import time
    time.sleep(3600)
forwarder = fairway.Forwarder(client, process, workers=2, journal=sys.argv[2])
for number in range(20):
    forwarder.accept(b"%d" % number)
forwarder.persist()
os._exit(9)
"""


def test_accepted_items_survive_a_crash(client: fairway.Client, broker: Running, subject: str, tmp_path: Path) -> None:
    died = run_program(DIES, broker.url, str(tmp_path / "spool"))
    assert died.returncode == 9, died.stderr
    with fairway.Forwarder(client, echo(subject), workers=1, journal=str(tmp_path / "spool")) as forwarder:
        forwarder.accept(b"new")
        assert forwarder.flush(WAIT_S)
    assert payloads(client, subject) == [*(b"%d" % number for number in range(20)), b"new"]


def test_what_is_not_done_at_the_stop_is_kept_and_its_messages_keep_their_ids(
    client: fairway.Client, subject: str, tmp_path: Path
) -> None:
    sent = threading.Event()

    def twice(item: bytes) -> Iterator[Outgoing]:
        yield Outgoing(subject, item)
        if not sent.is_set():
            sent.set()
            raise RuntimeError("after the first message")

    with fairway.Forwarder(client, twice, workers=1, journal=str(tmp_path), backoff_first_ms=60_000,
                           backoff_most_ms=60_000) as forwarder:  # fmt: skip
        forwarder.accept(b"a")
        assert sent.wait(WAIT_S)
        until(lambda: forwarder.counts.retries == 1)
        forwarder.stop(0.01)
    with fairway.Forwarder(client, twice, workers=1, journal=str(tmp_path)) as forwarder:
        assert forwarder.flush(WAIT_S)
    found = ids(client, subject)
    assert len(found) == 2, "at least once"
    assert found[0] == found[1], "and known by the same name"


def test_a_process_that_fails_is_called_again_and_then_the_item_is_set_aside(
    client: fairway.Client, subject: str, tmp_path: Path
) -> None:
    calls: list[bytes] = []

    def process(item: bytes) -> Outgoing:
        calls.append(item)
        if item == b"bad" or calls.count(item) < 2:
            raise LookupError(f"no {item!r}")
        return Outgoing(subject, item)

    with fairway.Forwarder(client, process, workers=1, attempts=3, journal=str(tmp_path), **QUICK) as forwarder:
        forwarder.accept(b"bad")
        forwarder.accept(b"good")
    assert payloads(client, subject) == [b"good"]
    assert calls.count(b"bad") == 3
    [aside] = forwarder.set_aside
    assert (aside.item, str(aside.error)) == (b"bad", "no b'bad'")
    from fairway.client.spool.spool_directory import survey
    from fairway.runtime.clock import RealClock

    [journal] = survey(str(tmp_path / "forwarder"), RealClock()).journals
    assert [each.reason for each in journal.set_aside] == ["LookupError: no b'bad'"]


def test_items_of_any_kind_can_be_written_down(client: fairway.Client, subject: str, tmp_path: Path) -> None:
    def increment(item: int) -> Outgoing:
        return Outgoing(subject, b"%d" % (item + 1))

    with fairway.Forwarder(
        client,
        increment,
        journal=str(tmp_path),
        persist_items=0,
        encode=lambda item: b"%d" % item,
        decode=int,
    ) as forwarder:
        forwarder.accept(41)
    assert payloads(client, subject) == [b"42"]


def test_without_a_journal_what_is_left_at_the_stop_is_named(client: fairway.Client, subject: str) -> None:
    slow = Slow(subject)
    forwarder = fairway.Forwarder(client, slow, workers=1)
    forwarder.accept(b"a")
    forwarder.accept(b"b")
    with pytest.raises(TimeoutError, match=r"2 items are not sent on.* a journal would keep them"):
        forwarder.stop(0.05)
    slow.may_go_on.set()
    with pytest.raises(fairway.Misuse, match="stopped"):
        forwarder.accept(b"c")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": 0}, "workers"),
        ({"when_full": "spool"}, "needs a journal"),
        ({"when_full": "explode"}, "'block', 'raise' or 'spool'"),
        ({"encode": bytes}, "go together"),
        ({"attempts": 0}, "attempts"),
    ],
)
def test_bad_settings_are_refused(client: fairway.Client, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(fairway.Misuse, match=sentence):
        fairway.Forwarder(client, Slow("unused"), **settings)


def test_the_same_on_a_loop(broker: Running, subject: str, tmp_path: Path) -> None:
    failed: list[bytes] = []

    async def process(item: bytes) -> Outgoing:
        await asyncio.sleep(0)
        if item == b"7" and not failed:
            failed.append(item)
            raise LookupError("once")
        return Outgoing(subject, item)

    async def main() -> None:
        async with fairway.aio.connect(broker.url) as client:
            async with fairway.aio.Forwarder(
                client, process, workers=4, capacity=8, journal=str(tmp_path), persist_items=2, **QUICK
            ) as forwarder:
                for number in range(100):
                    await forwarder.accept(b"%d" % number)
                with pytest.raises(fairway.BufferFull):
                    deque(map(forwarder.accept_nowait, [b"x"] * 100))
            found = [bytes(each) async for page in client.scan(subject) for each in page.batch.payloads]
            numbers = [each for each in found if each != b"x"]
            assert sorted(numbers, key=int) == [b"%d" % number for number in range(100)]
            assert forwarder.counts.retries == 1
            assert forwarder.counts.forwarded == forwarder.counts.accepted

    asyncio.run(main())
