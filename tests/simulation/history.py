"""One history: a store on a simulated disk, a few lives long, each with an end of its own, all of it from one seed.

A life opens the store, checks all that must be true, starts the clients and a housekeeper, and ends by a power cut, a
kill, a failed sync, or a close. The power may also go in the middle of the opening. The clients and the model outlive
it. Whatever contradicts the model ends the history, and the seed replays it.
"""

from __future__ import annotations

import asyncio
import enum
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fairway.errors import DiskFull, FairwayError, Refused, StorageFault
from fairway.limits import KIB
from fairway.names import Subject
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.simulation.loop import SimulationFailed
from fairway.storage import retention
from fairway.storage.store import Store, StoreOptions
from tests.simulation import checks, damage
from tests.simulation.clients import Actor, Producer, read_about
from tests.simulation.truth import Invariant, Truth, Violation

HOG = "lost+found/hog"  # another tenant's file on the same disk
KILLED_OPENINGS_MAX = 4


class End(enum.Enum):
    """How a life ends."""

    POWER_CUT = "power cut"
    KILL = "kill"
    CUT_IN_OPERATION = "power cut in an operation"
    CLOSE = "close"
    FAILED_SYNC = "failed sync"


@dataclass(frozen=True)
class Settings:
    """What the seed decides for a whole history."""

    options: StoreOptions
    capacity_bytes: int
    producers: int
    lives: int

    @classmethod
    def draw(cls, rng: SeededRng) -> Settings:
        segment_bytes = (8 * KIB, 16 * KIB, 64 * KIB)[rng.below(3)]
        options = StoreOptions(
            segment_bytes=segment_bytes,
            action_segment_bytes=(2 * KIB, 8 * KIB)[rng.below(2)],
            low_water_bytes=16 * KIB,
            checkpoint_every_bytes=(4 * KIB, 24 * KIB, 96 * KIB)[rng.below(3)],
            retention=retention.Policy(bytes_max=(None, 2 * segment_bytes, 6 * segment_bytes)[rng.below(3)]),
        )
        capacity_bytes = (1 << 20) + rng.below(1 << 20)
        return cls(options, capacity_bytes, producers=2 + rng.below(3), lives=3 + rng.below(6))


@dataclass
class Outcome:
    """What a history came to."""

    seed: int
    lives: int = 0
    acknowledged: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    trace_hash: str = ""


class History:
    """The lives of one store."""

    def __init__(self, world: Simulation, *, syncing: bool = True, damaged: bool = False) -> None:
        self.truth = Truth()
        self.lives = 0
        self.ends: Counter[str] = Counter()
        self._world = world
        self._rng = world.rng.child("history")
        self._settings = Settings.draw(world.rng.child("settings"))
        self.disk = SimDisk(
            world.rng.child("disk"), world.loop.call_later, capacity_bytes=self._settings.capacity_bytes
        )
        self.disk.syncing = syncing
        self._damaged = damaged or self._rng.below(3) == 0
        self._over = asyncio.Event()
        self._alive = False
        self._closed_cleanly = False
        self._tasks: list[asyncio.Task[None]] = []
        self._subjects = [Subject(f"subject-{letter}") for letter in "abcde"[: 2 + self._rng.below(4)]]
        self._producers: list[Producer] = []
        self._actor = Actor(self.truth, world.rng.child("actor"))
        self._reader_rng = world.rng.child("reader")
        self._trouble_rng = world.rng.child("trouble")
        world.loop.set_exception_handler(lambda _, context: self._unhandled(context))

    async def run(self) -> None:
        """All of it; what nobody expected is a contradiction like any other."""
        await self._guarded(self._run())

    async def _run(self) -> None:
        """All lives, one last look, and perhaps some damage."""
        await self.live_on([self._draw_end() for _ in range(self._settings.lives)])
        if not self.truth.is_refuted:
            await self._look_and_close()
        if not self.truth.is_refuted and self._damaged:
            await self._rot()

    async def live_on(self, ends: list[End]) -> None:
        """One life after the other, until the model is contradicted."""
        for end in ends:
            await self._live(end)
            if self.truth.is_refuted:
                return

    async def _look_and_close(self) -> None:
        """Recover, check, close cleanly, cut the power, and see that there is nothing left to recover."""
        self.disk.remove(HOG)
        for _ in range(2):
            store = self._open()
            if store is None or self.truth.is_refuted:
                return
            await store.close()
            self._mark_dead(self.disk.crash, clean=True)

    # --- a life ------------------------------------------------------------------------------------------------------

    def _draw_end(self) -> End:
        return (End.POWER_CUT, End.POWER_CUT, End.KILL, End.KILL, End.CUT_IN_OPERATION, End.CLOSE, End.FAILED_SYNC)[
            self._rng.below(7)
        ]

    async def _live(self, end: End) -> None:
        store = self._open(perilous=True)
        if store is None or self.truth.is_refuted:
            return
        self.ends[end.value] += 1
        self._hire_producers()
        clients = [producer.run(store) for producer in self._producers]
        for work in (*clients, self._actor.run(store), self._read(store), self._make_trouble(store)):
            self._start(work)
        await self._wait(self._rng.below(50) if self._rng.below(8) else 0)
        await self._meet(end, store)
        await self._dismiss()

    def _hire_producers(self) -> None:
        """Most producers go on; now and then one never comes back and a new one takes its place."""
        self._producers = [each for each in self._producers if self._rng.below(6)]
        while len(self._producers) < self._settings.producers:
            producer_id = self._rng.bits(60) + 1
            rng = self._world.rng.child(f"producer-{producer_id}")
            self._producers.append(Producer(self.truth, rng, producer_id, self._subjects))

    def _read(self, store: Store) -> Coroutine[Any, Any, None]:
        return read_about(store, self.truth, self._reader_rng)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._world.loop.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except SimulatedPowerCut:
            self._over.set()
        except Exception as problem:
            self._broke(problem)

    def _unhandled(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, SimulatedPowerCut):
            self._over.set()
        else:
            self._broke(problem if problem is not None else RuntimeError(str(context["message"])))

    def _broke(self, problem: BaseException) -> None:
        where = traceback.extract_tb(problem.__traceback__)
        place = " > ".join(f"{each.name}:{each.lineno}" for each in where[-4:])
        self.truth.blame(Invariant.BROKE, f"{problem!r} in {place}")
        self._over.set()

    async def _wait(self, ms: float) -> bool:
        """Let time pass, until the life is over; whether it is."""
        try:
            await asyncio.wait_for(self._over.wait(), ms / 1_000)
        except TimeoutError:
            return False
        return True

    async def _dismiss(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- trouble -----------------------------------------------------------------------------------------------------

    async def _make_trouble(self, store: Store) -> None:
        """Keep house at odd moments, on a disk that is now slow, now full."""
        rng = self._trouble_rng
        while store.fault is None:
            await asyncio.sleep(rng.below(12_000) / 1_000_000)
            match rng.below(10):
                case 0 | 1:
                    store.checkpoint()
                case 2 | 3:
                    self._retain(store)
                case 4:
                    self.disk.slowness = (0.2, 1.0, 1.0, 5.0, 20.0)[rng.below(5)]
                case 5:
                    self.disk.stall(rng.below(20) / 1_000)
                case 6:
                    self._fill(leaving=rng.below(24 * KIB))
                case 7 | 8:
                    self.disk.remove(HOG)
                case _:
                    self.disk.fail_write(1 + rng.below(8))

    def _retain(self, store: Store) -> None:
        if store.retain().doomed:
            self.truth.floor = max(self.truth.floor, store.messages.log.segments[0].base)

    def _fill(self, leaving: int) -> None:
        self.disk.remove(HOG)
        hog = self.disk.open(HOG, create=True)
        self.disk.reserve(hog, max(0, self.disk.free_bytes() - leaving))
        hog.close()

    # --- ends --------------------------------------------------------------------------------------------------------

    async def _meet(self, end: End, store: Store) -> None:
        match end:
            case End.POWER_CUT:
                self._mark_dead(self.disk.crash)
            case End.KILL:
                self._mark_dead(self.disk.crash_process)
            case End.CUT_IN_OPERATION:
                self.disk.crash_after(1 + self._rng.below(20))
                await self._wait(20)
                self._mark_dead(self._any_crash())
            case End.FAILED_SYNC:
                await self._fail_sync(store)
            case End.CLOSE:
                await self._close(store)

    def _any_crash(self) -> Callable[[], SimDisk]:
        return self.disk.crash if self._rng.below(2) else self.disk.crash_process

    async def _fail_sync(self, store: Store) -> None:
        """Nothing is answered any more, and the process is restarted; perhaps the power goes, too."""
        self.disk.fail_sync(1 + self._rng.below(5))
        for _ in range(20):
            if store.fault is not None or await self._wait(2):
                break
        await self._wait(self._rng.below(4))
        self._mark_dead(self.disk.crash if self._rng.below(4) == 0 else self.disk.crash_process)

    async def _close(self, store: Store) -> None:
        """The power may go while the store is being closed."""
        await self._dismiss()
        closing = self._world.loop.create_task(self._closing(store))
        self._tasks.append(closing)
        if self._rng.below(4) == 0:
            await self._wait(self._rng.below(3_000) / 1_000)
        else:
            await asyncio.wait([closing])
        if closing.done() and self._closed_cleanly:
            self._mark_dead(self._any_crash(), clean=True)
        else:
            self._mark_dead(self._any_crash())

    async def _closing(self, store: Store) -> None:
        try:
            await store.close()
            self._closed_cleanly = store.fault is None
        except (Refused, StorageFault) as reason:
            self._world.loop.note(f"not closed: {type(reason).__name__}")

    def _mark_dead(self, crash: Callable[[], SimDisk], *, clean: bool = False) -> None:
        """The process is gone; what it left is the next one's disk."""
        self._alive = False
        self._closed_cleanly = clean
        self.disk = crash()
        self.disk.slowness = 1.0

    # --- damage ------------------------------------------------------------------------------------------------------

    async def _rot(self) -> None:
        """The disk rots while the store is closed; then the store is opened, read, written to and read again."""
        store = self._try_to_open()
        if store is None:
            return
        names = damage.subject_names(store)
        await store.close()
        self._mark_dead(self.disk.crash)
        hit = damage.strike(self.disk, self._rng, self.truth)
        self.ends["damage"] += 1
        self._world.loop.note(str(hit))
        for time in ("first", "second"):
            checks.check_stable(self.truth, checks.copy_of(self.disk))
            store = self._try_to_open()
            if store is None:
                self.truth.blame(Invariant.BROKE, f"cannot be opened: {hit}")
                return
            missing = damage.check_served(self.truth, hit, checks.read_by_id(store), names)
            if hit.is_provable:
                await self._write_a_little(store)
                names = {**damage.subject_names(store), **names}
            await store.close()
            self._mark_dead(self.disk.crash)
            if time == "first":  # a torn end is reported once, and is gone then
                damage.check_reported(self.truth, self.disk, store, hit, missing)

    async def _write_a_little(self, store: Store) -> None:
        """New messages must not get sequences that damaged ones had."""
        self._producers.clear()
        self._hire_producers()
        for producer in self._producers:
            self._start(producer.run(store))
        await self._wait(5)
        await self._dismiss()

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open(self, *, perilous: bool = False) -> Store | None:
        """Recover and check; None if the store cannot be opened. With `perilous`, openings are killed and fail."""
        for attempt in range(KILLED_OPENINGS_MAX + 2):
            recovered = checks.check_recovery(self.truth, self.disk)
            if perilous and attempt < KILLED_OPENINGS_MAX:
                self._plan_peril()
            store = self._try_to_open()
            if store is not None:
                self.disk.crash_after(0)
                self.disk.fail_sync(0)
                self._look_over(store, recovered)
                return store
        self.truth.blame(Invariant.BROKE, "the store cannot be opened")
        return None

    def _plan_peril(self) -> None:
        draw = self._rng.below(10)
        if draw < 3:
            self.disk.crash_after(1 + self._rng.below(1 + self._rng.below(24)))
        elif draw == 3:
            self.disk.fail_sync(1 + self._rng.below(3))

    def _try_to_open(self) -> Store | None:
        loop = self._world.loop
        self._over.clear()
        self._alive = True
        try:
            return Store.open(
                self.disk,
                self._world.clock,
                self._world.rng.child(f"store-{self.lives}"),
                defer=lambda callback: loop.call_soon(self._unless_dead, self.disk, callback),
                options=self._settings.options,
            )
        except SimulatedPowerCut:
            self._mark_dead(self._any_crash())
        except DiskFull:
            self._mark_dead(self.disk.crash_process)
            self.disk.remove(HOG)
        except StorageFault as fault:
            loop.note(f"not opened: {type(fault).__name__}")
            self._mark_dead(self.disk.crash_process)
        except FairwayError as problem:
            self._broke(problem)
        return None

    def _unless_dead(self, disk: SimDisk, callback: Callable[[], None]) -> None:
        """What a dead process had still meant to do."""
        if self._alive and disk is self.disk:
            callback()

    def _look_over(self, store: Store, recovered: checks.Picture) -> None:
        self.lives += 1
        checks.check_rot(self.truth, store.findings)
        if self._closed_cleanly and store.findings:
            self.truth.blame(Invariant.UNCLEAN, f"found after a clean close: {store.findings[0]}")
        if differing := checks.differences(recovered, checks.picture(store.messages.views)):
            self.truth.blame(Invariant.UNSTABLE, f"the store and a copy arrive at different views: {differing}")
        self.truth.see_all(checks.read_all(store))
        self._world.loop.note(f"recovered to {store.messages.log.end} and {store.actions.log.end}")


def run(seed: int, *, syncing: bool = True, damaged: bool = False) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash. One in three ends with a disk that rots; all
    do if it shall be `damaged`."""
    world = Simulation(seed)
    history = History(world, syncing=syncing, damaged=damaged)
    truth = history.truth
    try:
        with world:
            world.run(history.run())
    except SimulationFailed as stuck:
        truth.blame(Invariant.BROKE, str(stuck))
    return Outcome(seed, history.lives, truth.acknowledged, history.ends, truth.violations, world.trace_hash())
