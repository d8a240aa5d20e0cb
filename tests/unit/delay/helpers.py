"""A delay server's engine on a simulated disk, through as many lives as a test wants, and a broker that stores what it
is sent and complains of everything a real one would refuse."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.engine import DelayOptions, Engine
from fairway.delay.pending_messages import PendingDecision
from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS
from fairway.limits import KIB
from fairway.names import Subject
from fairway.protocol.delay_messages import Fate
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.storage import retention
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import StoreOptions

T = TypeVar("T")

ORDERS = Subject("orders")
BILLS = Subject("bills")
STORE = StoreOptions(
    segment_bytes=4 * KIB,
    action_segment_bytes=4 * KIB,
    low_water_bytes=0,
    checkpoint_every_bytes=4 * KIB,
    retention=retention.Policy(bytes_max=0),
    keeps_actions=False,
)
OPTIONS = DelayOptions(store=STORE, messages_per_step=2, hold_ms=20, catalogue_messages=32)
SECOND_MS = 1_000
YEAR_MS = 365 * DAY_MS
__all__ = ["DAY_MS", "HOUR_MS", "Fate", "MessageId"]


@dataclass(slots=True)
class Delivery:
    id: MessageId
    payload: bytes
    at_ms: int
    latest_ms: int  # the latest time that the wall clock had shown by then


@dataclass(slots=True)
class SimBroker:
    """Stores batches stream by stream: in order, without gaps, each once, the same bytes when it comes again."""

    streams: dict[int, list[bytes]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    repeats: int = 0

    def store(self, intent: Intent, at_ms: int, latest_ms: int) -> None:
        stored = self.streams.setdefault(intent.producer_id, [])
        header = batch.check(intent.data)
        assert (header.producer_id, header.first_sequence) == (intent.producer_id, intent.first_sequence)
        for data in stored:
            if batch.peek(data).first_sequence == intent.first_sequence:
                assert data == intent.data, "an intent comes again with the bytes that it had"
                self.repeats += 1
                return
        end = batch.peek(stored[-1]).first_sequence + batch.peek(stored[-1]).count if stored else 0
        assert intent.first_sequence == end, "a stream has no gaps"
        stored.append(intent.data)
        opened = batch.decode(intent.data)
        assert not opened.header.has_due
        for message_id, payload in zip(opened.ids(), opened.payloads, strict=True):
            self.deliveries.append(Delivery(message_id, payload, at_ms, latest_ms))

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.deliveries]


class Surroundings(ABC):
    """What is around a delay server, or around two copies of one: time, clients, and brokers."""

    def __init__(self, seed: int | str, options: DelayOptions, made: type[Engine]) -> None:
        self.sim = Simulation(seed, steps_max=50_000_000)
        self.options = options
        self.made = made
        self.brokers: dict[str, SimBroker] = {}
        self.routes: dict[Subject, str | None] = {}
        self.sequences: dict[int, int] = {}
        self.latest_ms = 0  # that the clock of one that led has shown: what was due by that is sent by the next one too

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """That leads."""

    @property
    @abstractmethod
    def now_ms(self) -> int:
        """By its clock."""

    def route(self, subject: Subject) -> str | None:
        return self.routes.get(subject, "east")

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.sim.run(main)

    def sleep(self, ms: float) -> None:
        self.run(asyncio.sleep(ms / 1_000))

    # --- what clients do ---------------------------------------------------------------------------------------------

    def send(
        self,
        payloads: list[bytes],
        due_ms: list[int],
        *,
        subject: Subject = ORDERS,
        producer: int = 1,
        keys: list[str | None] | None = None,
    ) -> list[MessageId]:
        """Schedule the producer's next batch; nobody has answered yet."""
        first = self.sequences.get(producer, 0)
        data = batch.encode(
            payloads, producer_id=producer, first_sequence=first, created_ms=self.now_ms, due_ms=due_ms, keys=keys
        )
        self.receipt: AppendReceipt = self.engine.schedule(subject, data)
        self.sequences[producer] = first + len(payloads)
        return [MessageId(producer, first + index) for index in range(len(payloads))]

    @abstractmethod
    def await_receipt(self) -> None:
        """Wait until the last batch may be answered."""

    def schedule(
        self,
        payloads: list[bytes],
        due_ms: list[int],
        *,
        subject: Subject = ORDERS,
        producer: int = 1,
        keys: list[str | None] | None = None,
    ) -> list[MessageId]:
        """The same, and wait until it is answered."""
        ids = self.send(payloads, due_ms, subject=subject, producer=producer, keys=keys)
        self.await_receipt()
        return ids

    # --- what time does ----------------------------------------------------------------------------------------------

    def look(self) -> list[Intent]:
        """At the clock; nothing is sent yet."""
        self.latest_ms = max(self.latest_ms, self.now_ms)
        return self.engine.on_time()

    def deliver(self, intent: Intent) -> None:
        """The target stores it; whether anybody learns of that is another question."""
        self.brokers.setdefault(intent.target, SimBroker()).store(intent, self.now_ms, self.latest_ms)

    @abstractmethod
    def settle(self) -> None:
        """Until nothing more happens."""

    def advance(self, ms: float) -> None:
        self.sleep(ms)
        self.settle()

    @property
    def broker(self) -> SimBroker:
        return self.brokers.setdefault("east", SimBroker())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sim.__exit__(kind, problem, traceback)


class World(Surroundings):
    """One delay server and the machine it is on."""

    def __init__(
        self, seed: int | str = 0, *, options: DelayOptions = OPTIONS, apart: bool = False, made: type[Engine] = Engine
    ) -> None:
        super().__init__(seed, options, made)
        self.clock = self.sim.clock
        self.disk = self._new_disk("disk")
        self.schedule_disk = self._new_disk("schedule disk") if apart else None
        self._life = 0
        self._engine = self.open()

    def _new_disk(self, name: str) -> SimDisk:
        return SimDisk(self.sim.rng.child(name), self.sim.loop.call_later)

    def open(self) -> Engine:
        rng = self.sim.rng.child(f"engine {self._life}")
        self._engine = self.made(
            self.disk,
            self.clock,
            rng,
            defer=self._defer,
            route=self.route,
            schedule_disk=self.schedule_disk,
            options=self.options,
        )
        return self._engine

    def _defer(self, callback: Callable[[], None]) -> None:
        life = self._life
        self.sim.loop.call_soon(lambda: callback() if self._life == life else None)

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    # --- what clients do ---------------------------------------------------------------------------------------------

    def await_receipt(self) -> None:
        self.run(self.engine.store.durable(self.receipt))

    def count(self, subject: Subject | None = None, **which: Any) -> int:
        """How many messages are pending."""
        return self.run(self.engine.tally(self.engine.filter(subject, **which))).count

    def decide(self, decision: PendingDecision) -> Fate:
        """Wait until the answer may be given."""
        self.run(self.engine.store.actions.log.flusher.durable(decision.end))
        return decision.answer

    # --- what time does ----------------------------------------------------------------------------------------------

    def tick(self) -> list[Intent]:
        """One look at the clock; what comes out is stored and noted as sent."""
        intents = self.look()
        for intent in intents:
            self.deliver(intent)
            self.engine.sent(intent.number)
        return intents

    def settle(self) -> None:
        quiet = 0
        for _ in range(1_000):
            is_idle = not self.tick() and self.engine.is_idle
            quiet = quiet + 1 if is_idle else 0
            if quiet >= 3:
                return
            self.sleep(5)
        raise AssertionError("the engine never comes to rest")

    @property
    def files(self) -> list[str]:
        return [name for name in (self.schedule_disk or self.disk).listing("schedule") if name.endswith(".log")]

    # --- room --------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Somebody else takes all the room on the disk of the schedule log."""
        disk = self.schedule_disk or self.disk
        file = disk.open("else/where", create=True)
        disk.reserve(file, file.size + disk.free_bytes())
        file.close()

    def make_room(self) -> None:
        (self.schedule_disk or self.disk).remove("else/where")

    # --- lives -------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The power goes."""
        self._life += 1
        self.disk = self.disk.crash()
        if self.schedule_disk is not None:
            self.schedule_disk = self.schedule_disk.crash()

    def kill(self) -> None:
        """The process dies, the machine lives on."""
        self._life += 1
        self.disk = self.disk.crash_process()
        if self.schedule_disk is not None:
            self.schedule_disk = self.schedule_disk.crash_process()

    def close(self) -> None:
        self.run(self.engine.close())
        self.kill()

    def reopen(self) -> Engine:
        self.close()
        return self.open()
