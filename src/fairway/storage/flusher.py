"""Group commit: the flusher commits one round of appends while the next round gathers.

A *round* holds the bytes of one commit, all for one file. Rounds are committed in order, one at a time, so the
committed end moves forward without gaps. A caller that has appended calls `when_durable(position)`. The flusher
calls back once the committed end has passed the position, or with the reason why it never will.

A round has three endings:

    committed    the committed end moves, the waiters are answered, the next round goes
    disk full    nothing of the round is on disk. The round and everything gathered behind it are undone (`on_full`),
                 and the waiters learn that nothing was appended
    any fault    nobody knows what is on disk, and a second sync could lie. The flusher is poisoned for good: every
                 waiter gets the fault, and nothing is ever answered again

There are two kinds of durability:

    sync         a round is written and synced in one step: committed is synced
    memory       a round is committed when it is written. A sync is a round without bytes. A sync is due when `sync` was
                 called, before another file begins, when too much is unsynced, and behind a round that must be synced
                 before it counts (`add(must_sync=True)`). That round is committed with its sync. A full disk at a sync
                 is a fault, because the bytes that it may have dropped were answered long ago.

Only a successful sync moves the synced end.

A log with replicas is *held* (`hold`): the flusher commits only what the replicas confirm too. The committed end is
then the lower one of the written end and the confirmed end. Waiters are parked behind their round until `confirm`
releases them, in order.
"""

from __future__ import annotations

import asyncio
import enum
from bisect import bisect_right, insort_right
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from fairway import limits
from fairway.errors import Code, DiskFull, FairwayError, Refused, StorageFault, invariant
from fairway.runtime.clock import Clock, ScheduleTimer, Timer
from fairway.runtime.disk import Disk, File, Part, settles

_ENOUGH_BYTES = 64 * limits.KIB  # a round of this size starts at once
_LOOKS_MAX = 8  # turns of the loop that a smaller round may grow for, as long as each turn adds to it
_OPEN_S = 0.02  # for a handler to be done; a crash meanwhile hands these messages out again
_GROWTH_NS_MAX = 500_000  # and the longest growth: eight turns of a busy loop took 16 ms (bench/hostile)

OnDurable: TypeAlias = Callable[[FairwayError | None], None]
Defer: TypeAlias = Callable[[Callable[[], None]], object]


class Durability(enum.Enum):
    """The promise of an answer about the bytes."""

    SYNC = "sync"  # they survive a power cut
    MEMORY = "memory"  # they survive the death of the process; a power cut takes what was not yet synced


class SyncObserver(Protocol):
    """Observes how long syncs take."""

    def begun(self) -> None: ...

    def ended(self) -> None: ...


WatchT = TypeVar("WatchT", bound=SyncObserver)


class _CommitRound:
    """The parts of one commit, and the callbacks that wait for it."""

    __slots__ = ("end", "file", "is_due", "must_sync", "parts", "start", "syncs", "waiters")

    def __init__(self, file: File, start: int, *, syncs: bool) -> None:
        self.syncs = syncs  # this commit ends with a sync of its file
        self.is_due = False  # it has been open for long enough
        self.must_sync = False  # the round counts only after a sync that follows it
        self.file = file
        self.start = start
        self.end = start
        self.parts: list[Part] = []
        self.waiters: list[OnDurable] = []

    def answer(self, outcome: FairwayError | None) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter(outcome)


class Flusher:
    """Commits one log's rounds. Lives on one loop; `defer` is that loop's `call_soon`.

    A round starts at the end of the loop's turn. All requests of one turn then share one sync, and the first of them
    does not pay for a sync of its own.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        synced_end: int,
        *,
        defer: Defer,
        on_full: Callable[[int], None],
        on_progress: Callable[[], None],
        on_synced: Callable[[], None] = lambda: None,
        durability: Durability = Durability.SYNC,
    ) -> None:
        """`on_progress`: the committed end has moved, or the log is poisoned. `on_synced`: the synced end has moved.
        `on_full`: everything from that position on is undone."""
        self.synced_end = synced_end
        self.written_end = synced_end  # committed on this copy, whatever the replicas have
        self.committed_end = synced_end
        self.gathered_end = synced_end
        self.fault: StorageFault | None = None
        self.syncs = 0
        self.undone_from: list[int] = []  # where each undo began, in order of time
        self._is_lazy = durability is Durability.MEMORY
        self._disk = disk
        self._now_ns = clock.monotonic_ns
        self._defer = defer
        self._on_full = on_full
        self._on_progress = on_progress
        self._on_synced = on_synced
        self._watch: SyncObserver | None = None
        self._in_flight: _CommitRound | None = None
        self._gathered: deque[_CommitRound] = deque()
        self._kicked = False
        self._looked_end = synced_end
        self._looks = 0
        self._looks_since_ns = 0
        self._is_shared = False  # several callers waited for the last round
        self._call_later: ScheduleTimer | None = None
        self._open_timer: Timer | None = None  # ends the wait of a round that nobody waits for
        # For a held log only:
        self._is_held = False
        self._confirmed_end = synced_end
        self._parked: list[tuple[int, list[OnDurable]]] = []  # waiters for written and unconfirmed bytes, in order
        # For durability `memory` only:
        self._unsynced_file: File | None = None  # has bytes that were written and not synced
        self._held: _CommitRound | None = None  # written, and committed with the sync that follows
        self._wanted_end = synced_end  # somebody wants everything below it synced
        self._sync_waiters: list[tuple[int, OnDurable]] = []

    @property
    def unsynced_bytes(self) -> int:
        return self.gathered_end - self.synced_end

    @property
    def uncommitted_bytes(self) -> int:
        """Bytes held in memory. Bytes that wait only for replicas are on disk."""
        return self.gathered_end - self.written_end

    def watch(self, watch: WatchT) -> WatchT:
        """Call `watch` when each sync begins and ends."""
        self._watch = watch
        return watch

    def add(self, file: File, part: Part, body: Part = b"", must_sync: bool = False) -> None:
        """Gather bytes that follow directly on the bytes gathered before; `body` goes behind `part`."""
        if self.fault is not None:
            raise self.fault
        gathered = self._gathered
        last = gathered[-1] if gathered else None
        if last is None or last.file is not file:
            last = _CommitRound(file, self.gathered_end, syncs=not self._is_lazy)
            gathered.append(last)
            self._kick_soon()
        last.parts += (part, body) if body else (part,)
        if must_sync:
            last.must_sync = True
            self._end_open()
        self.gathered_end = last.end = self.gathered_end + len(part) + len(body)

    def part(self, file: File, synced_end: int) -> None:
        """Close the open round if it begins below `synced_end`, which the next record names. Only a replica needs this:
        a master's records name its own synced end, and no open round of its own begins below that."""
        if self._gathered and self._gathered[-1].start < synced_end:
            self._gathered.append(_CommitRound(file, self.gathered_end, syncs=not self._is_lazy))

    def _kick_soon(self) -> None:
        if not self._kicked and self._in_flight is None:
            self._kicked = True
            self._defer(self._kick)

    def when_durable(self, position: int, outcome: OnDurable, undos: int | None = None) -> None:
        """Call `outcome(None)` once everything below `position` is committed, at once where it is already.

        After a full disk the same position may hold another record. A caller in a later turn than the append passes
        `undos`, the number of undos by the time of the append: each undo leaves a record either written or undone.
        """
        if undos is not None and undos < len(self.undone_from) and position > self.undone_from[undos]:
            outcome(_undone())
        elif position <= self.committed_end:
            outcome(None)
        elif self.fault is not None:
            outcome(self.fault)
        elif position <= self.written_end:
            self._park(position, [outcome])
        elif self._gathered and position > self._gathered[-1].start:  # the usual case: the caller has just appended
            invariant(position <= self.gathered_end, "nobody waits for what was not appended")
            self._gathered[-1].waiters.append(outcome)
            if self._open_timer is not None:
                self._end_open()
        else:
            self._round_of(position).waiters.append(outcome)

    def when_synced(self, position: int, outcome: OnDurable) -> None:
        """The same for a sync, whatever the durability: for records that name the log elsewhere, as checkpoints do."""
        if not self._is_lazy and not self._is_held:
            self.when_durable(position, outcome)
        elif position <= self.synced_end:
            outcome(None)
        elif self.fault is not None:
            outcome(self.fault)
        else:
            invariant(position <= self.gathered_end, "nobody waits for what was not appended")
            self._sync_waiters.append((position, outcome))
            self._want_sync(position)

    def when_settled(self, position: int, outcome: OnDurable) -> None:
        """The same once everything below is synced and committed, which for a held log are two things."""

        def durable(undone: FairwayError | None) -> None:
            if undone is not None:
                outcome(undone)
            else:
                self.when_synced(position, outcome)

        if self._is_held:
            self.when_durable(position, durable)
        else:
            self.when_synced(position, outcome)

    # --- replicas ----------------------------------------------------------------------------------------------------

    def hold(self, confirmed_end: int) -> None:
        """From now on commit nothing above `confirmed_end` before `confirm` allows it. Nobody was answered yet."""
        self._is_held = True
        self._confirmed_end = confirmed_end
        self.committed_end = min(self.written_end, confirmed_end)

    def confirm(self, end: int) -> None:
        """The replicas have everything below `end`, which may be more than this copy has. It never goes back."""
        if end > self._confirmed_end and self.fault is None:
            self._confirmed_end = end
            self._release()

    def _park(self, position: int, waiters: list[OnDurable]) -> None:
        if waiters:
            insort_right(self._parked, (position, waiters), key=_position)

    def _release(self) -> None:
        """Commit what is both written and confirmed, on a held log."""
        end = min(self.written_end, self._confirmed_end)
        if end <= self.committed_end:
            return
        self.committed_end = end
        count = bisect_right(self._parked, end, key=_position)
        ready, self._parked = self._parked[:count], self._parked[count:]
        for _, waiters in ready:
            for waiter in waiters:
                waiter(None)
        self._on_progress()

    def keep_open(self, call_later: ScheduleTimer) -> None:
        """From now on a round that nobody waits for, such as a handout to a consumer, stays open for 20 ms. Usually
        somebody waits for what comes next, an ack, and one sync does for both. `call_later`: of the loop."""
        self._call_later = call_later

    def use_memory(self) -> None:
        """Switch to durability `memory`. A replica syncs every round until it leads."""
        self._is_lazy = True

    def sync(self) -> None:
        """Sync soon what was gathered so far."""
        if self._is_lazy and self.fault is None:
            self._want_sync(self.gathered_end)

    def _want_sync(self, position: int) -> None:
        self._wanted_end = max(self._wanted_end, position)
        if self._wanted_end > self.synced_end:
            self._kick_soon()

    async def durable(self, position: int, undos: int | None = None) -> None:
        """Return once everything below `position` is committed; raise the reason why it never will be."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.when_durable(position, settles(future), undos)
        await future

    async def synced(self, position: int) -> None:
        """Return once everything below `position` is synced; raise the reason why it never will be."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.when_synced(position, settles(future))
        await future

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _round_of(self, position: int) -> _CommitRound:
        invariant(position <= self.gathered_end, "nobody waits for what was not appended")
        return next(round_ for round_ in self._open_rounds() if position <= round_.end)

    def _open_rounds(self) -> list[_CommitRound]:
        """The rounds that are not committed, in order."""
        return [*(each for each in (self._held, self._in_flight) if each is not None), *self._gathered]

    def start_round(self) -> None:
        """Start the commit of a lone request without waiting for the loop's next turn; a shared round may grow."""
        if self._kicked and not self._is_shared:
            self._kick()

    def _kick(self) -> None:
        self._kicked = False
        if self._in_flight is not None or self.fault is not None:
            return
        if not self._gathered and self._unsynced_file is None:
            return
        if self._is_gathering():
            self._kick_soon()
            return
        if self._stays_open():
            return
        round_ = self._next_round()
        if round_ is not None:
            self._in_flight = round_
            self._is_shared = len(round_.waiters) > 1
            if round_.syncs and self._watch is not None:
                self._watch.begun()
            self._disk.commit(round_.file, round_.parts, self._finished, sync=round_.syncs)

    def _is_gathering(self) -> bool:
        """Whether the next round is small and every turn of the loop adds to it: then it may grow for a few turns. A
        commit costs as much as a few dozen small appends, whatever it carries. A round after one with a single waiter
        goes at once: on a busy loop, an empty turn of this log would still take 2 ms."""
        is_small = len(self._gathered) == 1 and self.gathered_end - self._gathered[0].start < _ENOUGH_BYTES
        has_grown = self.gathered_end > self._looked_end
        is_growing = self._is_shared and is_small and has_grown and self._looks < _LOOKS_MAX
        self._looked_end = self.gathered_end
        if is_growing:
            now_ns = self._now_ns()
            if not self._looks:
                self._looks_since_ns = now_ns
            is_growing = now_ns - self._looks_since_ns < _GROWTH_NS_MAX
        self._looks = self._looks + 1 if is_growing else 0
        return is_growing

    def _stays_open(self) -> bool:
        """Whether the next round waits for somebody to wait for it."""
        call_later, gathered = self._call_later, self._gathered
        if call_later is None or self._is_lazy or len(gathered) != 1 or self._is_held:
            return False
        round_ = gathered[0]
        if round_.waiters or round_.must_sync or round_.is_due or round_.end - round_.start > _ENOUGH_BYTES:
            return False
        if self._open_timer is None:
            self._open_timer = call_later(_OPEN_S, self._end_open)
        return True

    def _end_open(self) -> None:
        """Commit the open round soon."""
        if self._open_timer is not None:
            self._open_timer.cancel()
            self._open_timer = None
            if self._gathered:
                self._gathered[0].is_due = True
                self._kick_soon()

    def _next_round(self) -> _CommitRound | None:
        file = self._unsynced_file
        if file is not None and self._is_sync_due(file):
            return _CommitRound(file, self._held.end if self._held is not None else self.written_end, syncs=True)
        return self._gathered.popleft() if self._gathered else None

    def _is_sync_due(self, file: File) -> bool:
        """Whether a sync of the written bytes comes before the next bytes. Gathered bytes that somebody wants synced
        too are written first, so that one sync serves all."""
        if self._held is not None:
            return True
        if not self._gathered:
            return self._wanted_end > self.synced_end
        following = self._gathered[0]
        is_enough = following.end - self.synced_end > limits.UNSYNCED_BYTES_MAX
        is_wanted = self.written_end >= self._wanted_end > self.synced_end
        return following.file is not file or is_enough or is_wanted

    def _finished(self, fault: StorageFault | None) -> None:
        round_, self._in_flight = self._in_flight, None
        if round_ is None or self.fault is not None:
            return  # poisoned during this commit: its outcome no longer counts
        if round_.syncs and self._watch is not None:
            self._watch.ended()
        if isinstance(fault, DiskFull) and not (self._is_lazy and round_.syncs):
            self._undo(round_, fault)
        elif fault is not None:  # `memory`: also a full disk at a sync, whose bytes were answered long ago
            self.poison(fault, round_)
        elif round_.syncs:
            self._synced(round_)
        else:
            self._written(round_)

    def _synced(self, round_: _CommitRound) -> None:
        held, self._held = self._held, None
        self.synced_end = round_.end
        self._unsynced_file = None
        self.syncs += 1
        self._commit(round_.end, (held, round_) if held is not None else (round_,))

    def _commit(self, end: int, rounds: tuple[_CommitRound, ...]) -> None:
        """Commit these rounds, as far as this copy decides."""
        self.written_end = end
        if self._is_held:
            for each in rounds:
                self._park(each.end, each.waiters)
        else:
            self.committed_end = end
        self._kick()  # before the waiters: the disk works while they are answered
        if not self._is_held:
            for each in rounds:
                each.answer(None)
        if self.synced_end == end:
            if self._sync_waiters:
                self._answer_synced()
            self._on_synced()
        if self._is_held:
            self._release()
        else:
            self._on_progress()

    def _answer_synced(self) -> None:
        waiters = self._sync_waiters
        self._sync_waiters = [each for each in waiters if each[0] > self.synced_end]
        for position, outcome in waiters:
            if position <= self.synced_end:
                outcome(None)

    def _written(self, round_: _CommitRound) -> None:
        """Durability `memory`: the kernel has the bytes."""
        self._unsynced_file = round_.file
        if round_.must_sync:
            self._held = round_
            self._kick()
            return
        self._commit(round_.end, (round_,))

    def _undo(self, round_: _CommitRound, fault: DiskFull) -> None:
        undone = [round_, *self._gathered]
        unsynced = [each for each in self._sync_waiters if each[0] > round_.start]
        self._sync_waiters = [each for each in self._sync_waiters if each[0] <= round_.start]
        self._wanted_end = min(self._wanted_end, round_.start)
        self._gathered.clear()
        self.gathered_end = round_.start
        self.undone_from.append(round_.start)
        self._on_full(round_.start)
        for each in undone:
            each.answer(_undone(f" ({fault})"))
        for _, outcome in unsynced:
            outcome(_undone(f" ({fault})"))

    def poison(self, fault: StorageFault, round_: _CommitRound | None = None) -> None:
        """Never answer again, because nobody knows what is on disk."""
        self.fault = self.fault or fault
        if self._open_timer is not None:
            self._open_timer.cancel()
            self._open_timer = None
        undone = [*([round_] if round_ is not None else []), *self._open_rounds()]
        parked, self._parked = self._parked, []
        unsynced, self._sync_waiters = self._sync_waiters, []
        self._gathered.clear()
        for waiter in (each for _, waiters in parked for each in waiters):
            waiter(self.fault)
        for each in undone:
            each.answer(self.fault)
        for _, outcome in unsynced:
            outcome(self.fault)
        self._on_progress()


def _position(parked: tuple[int, list[OnDurable]]) -> int:
    return parked[0]


def _undone(why: str = "") -> Refused:
    return Refused(Code.READ_ONLY, f"the disk is full, nothing was appended{why}", retry_after_ms=1_000)
