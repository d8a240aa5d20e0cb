"""A master and a copy of it on simulated disks, on one loop: what tests of copies have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from fairway.group_events import ActionKind, GroupEvent
from fairway.limits import GIB
from fairway.names import Subject
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.storage import replica_directory
from fairway.storage.action_log import Action
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store, StoreOptions
from tests.simulation.checks import ActionNumbers
from tests.unit.storage.helpers import ORDERS, SMALL, batch_of, content

T = TypeVar("T")
LOGS = ("messages", "actions")
CHUNK_BYTES = 1_500


class Side:
    """One data directory, through its lives."""

    def __init__(self, sim: Simulation, name: str, options: StoreOptions, capacity_bytes: int = GIB) -> None:
        self.sim = sim
        self.clock = sim.clock  # of its machine; another one, if a test wants that
        self.name = name
        self.options = options
        self.disk = SimDisk(sim.rng.child(f"disk of {name}"), sim.loop.call_later, capacity_bytes=capacity_bytes)
        self.view = ActionNumbers()
        self._life = 0
        self._opened: Store | None = None

    @property
    def store(self) -> Store:
        assert self._opened is not None
        return self._opened

    def open(self, *, follows: bool = False, adopt: DirectoryIdentity | None = None, epoch: int | None = None) -> Store:
        self.view = ActionNumbers()
        self._opened = Store.open(
            self.disk,
            self.clock,
            self.sim.rng.child(f"{self.name} {self._life} {self.sim.loop.now_ns()}"),
            defer=self._defer,
            options=self.options,
            action_view=self.view,
            follows=follows,
            adopt=adopt,
            epoch=epoch,
        )
        return self._opened

    def _defer(self, callback: Callable[[], None]) -> None:
        life = self._life
        self.sim.loop.call_soon(lambda: callback() if self._life == life else None)

    def end(self, how: Callable[[SimDisk], SimDisk] = SimDisk.crash) -> None:
        """The power goes, or the process dies."""
        self._life += 1
        self.disk = how(self.disk)
        self._opened = None

    def abandon(self) -> None:
        self.store.abandon()
        self.end(SimDisk.crash_process)

    def cut(self, messages_at: int, actions_at: int) -> None:
        """Abandon, cut, open again as a copy."""
        self.abandon()
        replica_directory.cut(self.disk, messages_at, actions_at)
        self.open(follows=True)


class Pair:
    """A master that is held, and a copy that follows it."""

    def __init__(
        self, seed: int | str = 0, *, options: StoreOptions = SMALL, copy_bytes: int = GIB, opened: bool = True
    ) -> None:
        self.sim = Simulation(seed)
        self.master = Side(self.sim, "master", options)
        self.copy = Side(self.sim, "copy", options, copy_bytes)
        self.sequences: dict[int, int] = {}
        if opened:
            self.master.open(epoch=1)
            self.master.store.hold()
            self.copy.open(follows=True, adopt=self.master.store.identity)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.sim.run(main)

    def wait(self, seconds: float = 1.0) -> None:
        self.run(asyncio.sleep(seconds))

    def send(self, payloads: list[bytes], subject: Subject = ORDERS, producer: int = 1) -> AppendReceipt:
        first = self.sequences.get(producer, 0)
        receipt = self.master.store.produce(subject, batch_of(payloads, producer=producer, first=first))
        self.sequences[producer] = first + len(payloads)
        return receipt

    def act(self, *numbers: int) -> int:
        self.master.view.found.extend(numbers)  # as a broker's groups do: they decide, then it is written
        return self.master.store.act([action(number) for number in numbers]).end

    def pass_on(self, bytes_max: int = CHUNK_BYTES, chunks_max: int = 1_000_000) -> int:
        """Hand the copy what the master has synced and it lacks; how many chunks that was."""
        chunks = 0
        for log in range(len(LOGS)):
            while chunks < chunks_max:
                chunk = self.master.store.read_chunk(log, _end(self.copy.store, log), bytes_max)
                if chunk is None:
                    break
                self.copy.store.follow(log, *chunk)
                chunks += 1
        return chunks

    def confirm(self) -> None:
        """The copy says how far it is synced, and hears from the master what is committed."""
        self.master.store.confirm(*self.copy.store.ends())
        self.copy.store.confirm(*self.master.store.committed_ends())

    def settle(self) -> None:
        """Until both have everything, and know it."""
        for _ in range(3):
            self.wait()
            self.pass_on()
            self.wait()
            self.confirm()
        self.wait()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sim.__exit__(kind, problem, traceback)


def action(number: int) -> Action:
    """One that `ActionNumbers` tells from all others."""
    detail = b"d" * (number % 90)
    return Action(1, 1, GroupEvent(ActionKind.ACK, 1_700_000_000_000, lot=number, ranges=((number, 1),), detail=detail))


def _end(store: Store, log: int) -> int:
    return (store.messages.log, store.actions.log)[log].end


def bytes_of(side: Side) -> dict[str, bytes]:
    """All segments, by name."""
    names = [f"{log}/{name}" for log in LOGS for name in side.disk.listing(log) if name.endswith(".log")]
    return {name: content(side.disk, name) for name in names}
