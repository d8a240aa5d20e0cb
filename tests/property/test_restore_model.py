"""A delay server whose disk is put back to a backup, however often and whenever: what it acknowledges is delivered.

The broker is a real store, which goes on meanwhile and remembers what it was sent. Answers get lost, processes die, and
a stranger who reads producer ids tries to take the places of what comes next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.dispatch.dispatcher import Dispatcher, Intent
from fairway.delay.dispatch.log import DispatchStream
from fairway.delay.dispatch.sender import TargetSender
from fairway.delay.engine import DelayOptions, Engine
from fairway.errors import Code, FairwayError, Refused
from fairway.names import Subject
from fairway.protocol import resend
from fairway.protocol.line import Answer, Ask, ConnectionLost, RequestOutcome
from fairway.protocol.messages import Produce, Produced
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.helpers import content, messages

ORDERS = Subject("orders")
STORE = StoreOptions(segment_bytes=4_096, action_segment_bytes=4_096, low_water_bytes=0)
DIRECTORIES = ("messages", "actions", "index", "checkpoints", "schedule")
STEPS = st.lists(
    st.sampled_from(["schedule", "run", "run", "lose", "die", "backup", "restore", "stranger"]), min_size=3, max_size=25
)


class World:
    """One delay server, one broker group, one backup."""

    def __init__(self) -> None:
        self.sim = Simulation("restore")
        self.numbers = count()
        self.owed: set[bytes] = set()  # acknowledged, and not undone by a restored backup
        self.has_strangers = self.has_gone_back = False
        self._lives = count()
        self.broker = Store.open(
            self._new_disk(), self.sim.clock, SeededRng("broker"), defer=self.sim.loop.call_soon, options=STORE
        )
        self.disk = self._new_disk()
        self.backup = dict[str, bytes](), set[bytes]()
        self.begin()

    def _new_disk(self) -> SimDisk:
        return SimDisk(self.sim.rng.child(f"disk {next(self._lives)}"), self.sim.loop.call_later)

    def begin(self) -> None:
        """A life of the delay server."""
        life = self._life = next(self._lives)
        rng = SeededRng(f"life {life}")

        def defer(callback: Callable[[], None]) -> None:
            self.sim.loop.call_soon(lambda: callback() if self._life == life else None)

        self.target_sender = TargetSender(rng, on_sent=self._sent, on_open=lambda: None)
        options = DelayOptions(store=STORE, hold_ms=0, remembered_max=0)
        self.engine = Engine(self.disk, self.sim.clock, rng, defer=defer, route=lambda _: "east", options=options)

    def _sent(self, intent: Intent, _: Produced | None) -> None:
        self.engine.sent(intent.number)

    def wait(self, seconds: float = 0.2) -> None:
        self.sim.run(asyncio.sleep(seconds))

    # --- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        number = next(self.numbers)
        payload = b"message %d" % number
        data = batch.encode(
            [payload],
            producer_id=10_000 + number,
            first_sequence=0,
            created_ms=self.sim.clock.wall_ms(),
            due_ms=[self.sim.clock.wall_ms() + 300],
            ids=[MessageId(77, number)],
        )
        receipt = self.engine.schedule(ORDERS, data)
        self.sim.run(self.engine.store.durable(receipt))
        self.owed.add(payload)

    def run(self, *, is_deaf: bool = False, rounds: int = 8) -> None:
        """Let what is due go out. Deaf: the broker stores it, and no answer arrives."""
        for _ in range(rounds):
            for intent in self.engine.on_time():
                self.target_sender.send(intent)
            for ask in list(self.target_sender.asks(64, self.sim.loop.now_ns())):
                outcome = self._ask(ask)
                told: RequestOutcome = ConnectionLost("cut") if is_deaf else outcome
                self.target_sender.answered(ask.token, told, self.sim.loop.now_ns())
            self.wait()
            if is_deaf:
                self.target_sender.opened(self.sim.loop.now_ns())

    def _ask(self, ask: Ask) -> RequestOutcome:
        assert isinstance(ask.message, Produce)
        told: list[RequestOutcome] = []

        def conflicted(_: FairwayError | None, answer: AppendReceipt | PlaceTaken) -> None:
            told.append(answer if isinstance(answer, PlaceTaken) else Answer(_produced(answer)))

        try:
            receipt = self.broker.produce(ORDERS, bytes(ask.attachments[0]), secret=ask.message.secret)
        except PlaceTaken as taken:
            self.broker.when_taken(taken, conflicted)
            self.wait()
            return told[0]
        except Refused as refused:
            return refused
        self.sim.run(self.broker.durable(receipt))
        return Answer(_produced(receipt))

    def die(self) -> None:
        self.disk = self.disk.crash_process()
        self.begin()

    def back_up(self) -> None:
        """The directory of a server that is stopped."""
        self.wait(1.0)
        self.disk = self.disk.crash_process()
        names = [f"{folder}/{name}" for folder in DIRECTORIES for name in self.disk.listing(folder)] + ["identity"]
        self.backup = {name: content(self.disk, name) for name in names}, set(self.owed)
        self.begin()

    def restore(self) -> None:
        files, owed = self.backup
        if not files:
            return
        self.disk.crash_process()
        self.disk = self._new_disk()
        for name, data in files.items():
            self.disk.publish(name, [data])
        self.owed = set(owed)
        self.has_gone_back = True
        self.begin()

    def stranger(self) -> None:
        """Somebody reads the producer ids that every consumer sees, and goes on with their streams."""
        self.has_strangers = True
        subject = self.broker.messages.views.subjects.find(ORDERS)
        ends: dict[int, int] = {}
        for entry in self.broker.messages.readable(subject.id, 0) if subject is not None else ():
            ends[entry.producer_id] = entry.producer_sequence + entry.count
        for producer_id, end in ends.items():
            data = batch.encode([b"a stranger's"], producer_id=producer_id, first_sequence=end, created_ms=0)
            for secret in (b"", bytes(16)):
                with pytest.raises(Refused):
                    self.broker.produce(ORDERS, data, secret=secret)

    # --- the end -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.wait(1.0)
        self.run(rounds=40)
        self.wait(1.0)
        found = Counter(messages(self.broker, ORDERS).values())
        assert not self.owed - found.keys(), "acknowledged, and never delivered"
        assert found[b"a stranger's"] == 0
        if not self.has_gone_back:
            assert set(found.values()) <= {1}, "stored twice, though nothing was undone"
        self.sim.__exit__(None, None, None)


def _produced(receipt: AppendReceipt) -> Produced:
    return Produced(receipt.first_sequence, receipt.count, receipt.appended_ms, receipt.is_duplicate, 1)


def story(steps: list[str]) -> None:
    world = World()
    for step in steps:
        match step:
            case "schedule":
                world.schedule()
            case "run":
                world.run()
            case "lose":
                world.run(is_deaf=True, rounds=3)
            case "die":
                world.die()
            case "backup":
                world.back_up()
            case "restore":
                world.restore()
            case _:
                world.stranger()
    world.check()


FOUND = ["schedule", "run", "backup", "schedule", "run", "restore", "schedule", "run"]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_what_is_acknowledged_is_delivered_whatever_is_restored(steps: list[str]) -> None:
    story(steps)


@pytest.mark.parametrize("steps", [FOUND, [*FOUND, "stranger", "schedule"], ["backup", "lose", *FOUND, "restore"]])
def test_the_story_that_lost_messages(steps: list[str]) -> None:
    story(steps)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a server goes on with the streams that its disk knows of."""

    def stream_of(self: Dispatcher, subject_id: int, target: str, now_ms: int) -> DispatchStream:
        return self._journal.streams.get((subject_id, target)) or DispatchStream(self._rng.bits(63) or 1, 0, now_ms)

    monkeypatch.setattr(Dispatcher, "_stream", stream_of)


@pytest.mark.usefixtures("careless")
def test_one_that_takes_any_conflict_for_a_receipt_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend, "is_receipt", lambda refused, _: refused.code is Code.SEQUENCE_CONFLICT)
    with pytest.raises(AssertionError, match="never delivered"):
        story(FOUND)


@pytest.mark.usefixtures("careless")
def test_one_that_looks_at_what_is_there_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    story(FOUND)
    assert "restored from a backup" in caplog.text
