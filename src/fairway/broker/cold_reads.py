"""Cold reads: threads fetch bytes that are not in memory, and the actor that wants them pays for the time.

    process ── not in memory ──► actor.suspend, `start`, AGAIN ──► a reader thread ──► charge, resume ──► process again
    process ── from the `FetchCache` ──► an answer, `rest` ──► suspended for a while ──► process the next one

Only `at_once` fetches run at a time. No fetch jumps the queue. An actor is suspended while it waits, so it has one
`_FetchJob` at most. A job of many reads goes to the back of the queue after each read. A group far behind slows itself,
not the others.

Fair shares of the loop are not enough. A group that drains a backlog also keeps the device, the interpreter and the
other cores busy, so everybody waits a little longer for everything. So while others are at work, an actor rests after
each answer, `REST_FACTOR` times as long as its slices took of the loop. How long it waited for the device or for its
turn does not count: a loop that is busy for others must not make the rest longer. Rests of less than 1 ms add up to
one. An operator gives weight to a group with an urgent backlog, which shortens its rests. With nobody else at work,
there is no rest.

A fetch or an answer about to begin also stands aside for 1 ms after the slice of another actor. The kernel likes to
wake the client of that answer on the core that sent it, where the client would wait until the loop sleeps.

A `FetchCache` keeps the fetched bytes for the actor's next read, for any of its requests: those that wait get the same
range. All caches together have a bound, and the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.limits import MIB
from fairway.runtime.clock import Clock
from fairway.runtime.disk import ReadCompletion
from fairway.scheduling import Actor, Scheduler
from fairway.storage.index_file import IndexRun

CACHES_BYTES_MAX = 16 * MIB  # fetched and not yet used, of all actors; an actor that loses its bytes fetches again

# The p99 of hot pulls is 0.31 to 0.36 ms alone. Beside a cold reader that rests for twice the time that its answers
# took of the loop it is 0.60 to 0.73 ms, and the cold one has 67,000 to 77,000 messages/s of 1,000 bytes. With a rest
# of four times the time it is 0.53 ms and 49,000, with half the time 0.94 ms and 134,000. A plain queue gives 6 to 7
# ms, and 620,000 to 740,000 (bench/fairness).
REST_FACTOR = 2
_TOOK_NS_MAX = 5_000_000  # beyond this the group was waiting, not working
_BUSY_NS = 50_000_000  # an actor that had a slice within this time is at work
_REST_NS_MIN = 1_000_000  # uvloop has no shorter timer: several short answers are followed by one rest
_REST_NS_MAX = 50_000_000  # ahead, however many actors are behind
_ASIDE_NS = 1_000_000  # after another actor's slice: its next request has often come by then
_ASIDE_NS_MAX = 3_000_000  # beyond the rest: others may never pause
_TIMER_S_MIN = 0.001  # uvloop rounds to milliseconds: a shorter timer would fire at once, over and over
_SERVED_MAX = 1_000  # actors whose last rest is known

_FAULT_RETRY_MS = 1_000  # a failing device does not recover by frequent reads
# no read-ahead for so long after a fault: the failing bytes may be ones that nobody has asked for
_WARY_NS = 60_000_000_000

Begin: TypeAlias = Callable[[ReadCompletion], None]
KeepBytes: TypeAlias = Callable[[bytes], None]
CallLater: TypeAlias = Callable[[float, Callable[[], None]], object]


class FetchedRange(NamedTuple):
    """A part of the log: `data` is shorter than `size` only where the log's file ends too early."""

    position: int
    size: int
    data: bytes


@dataclass(slots=True)
class FetchCache:
    """The bytes that were fetched for one actor."""

    pieces: list[FetchedRange] = field(default_factory=list)
    runs: list[tuple[int, IndexRun, bytes]] = field(default_factory=list)  # of the index, by subject
    fault: StorageFault | None = None
    size_bytes: int = 0

    def keep(self, position: int, size: int, data: bytes) -> None:
        self.pieces.append(FetchedRange(position, size, data))
        self.size_bytes += len(data)

    def keep_run(self, subject_id: int, run: IndexRun, data: bytes) -> None:
        self.runs.append((subject_id, run, data))
        self.size_bytes += len(data)

    def reaches_beyond(self, position: int) -> bool:
        """Whether the cache has bytes from `position` on."""
        return any(piece.position + piece.size > position for piece in self.pieces)

    def piece(self, position: int, size: int) -> FetchedRange | None:
        """The part that the cache has of `size` bytes from `position` on, if any."""
        for piece in self.pieces:
            offset = position - piece.position
            if 0 <= offset < piece.size:
                data = piece.data if offset == 0 else piece.data[offset : offset + size]
                return FetchedRange(position, min(size, piece.size - offset), data)
        return None


@dataclass(slots=True)
class _FetchJob:
    actor: Actor
    reads: deque[tuple[Begin, KeepBytes]]
    fetch_cache: FetchCache


class ColdReads:
    """All cold reads of one broker. Lives on its loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock, call_later: CallLater, at_once: int) -> None:
        self._scheduler = scheduler
        self._now_ns = clock.monotonic_ns
        self._call_later = call_later
        self._rest_until_ns = 0
        self._due_rest_ns = 0  # and not yet begun
        self._is_resting = False
        self._wary_until_ns = 0
        self._at_once = at_once
        self._under_way = 0
        self._queue: deque[_FetchJob] = deque()  # a suspended actor is in this queue, or under way,
        self._sated: deque[Actor] = deque()  # or in this one: its cache has the bytes, and it waits for its time
        self._served_ns: dict[Hashable, int] = {}  # what each actor had used of the loop when it last began to rest
        self._caches: OrderedDict[Hashable, FetchCache] = OrderedDict()
        self._cached_bytes = 0
        self.count = 0

    # --- fetched bytes -----------------------------------------------------------------------------------------------

    def fetch_cache(self, actor: Actor) -> FetchCache | None:
        """The actor's cache. `Refused` if its read failed: a retry may succeed."""
        fetch_cache = self._caches.get(actor.key)
        if fetch_cache is not None and fetch_cache.fault is not None:
            self.clear(actor)
            raise Refused(
                Code.BUSY, f"the messages cannot be read now: {fetch_cache.fault}", retry_after_ms=_FAULT_RETRY_MS
            )
        return fetch_cache

    def clear(self, actor: Actor) -> None:
        """Drop the actor's cache: its bytes are used, or useless."""
        self._drop(self._caches.pop(actor.key, None))

    def take_runs(self, actor: Actor) -> list[tuple[int, IndexRun, bytes]]:
        """Take the fetched runs of the index; the pieces of the log stay."""
        fetch_cache = self._caches.get(actor.key)
        if fetch_cache is None or not fetch_cache.runs:
            return []
        runs, fetch_cache.runs = fetch_cache.runs, []
        taken_bytes = sum(len(data) for _, _, data in runs)
        fetch_cache.size_bytes -= taken_bytes
        self._cached_bytes -= taken_bytes
        return runs

    def ahead_bytes(self, most: int) -> int:
        """How much to read ahead: all caches together have a bound."""
        if self._now_ns() < self._wary_until_ns:
            return 0
        return min(most, CACHES_BYTES_MAX // 2 // (len(self._caches) + 1))

    def _put(self, key: Hashable, fetch_cache: FetchCache) -> None:
        self._caches[key] = fetch_cache
        self._cached_bytes += fetch_cache.size_bytes
        while self._cached_bytes > CACHES_BYTES_MAX and len(self._caches) > 1:
            self._drop(self._caches.popitem(last=False)[1])

    def _drop(self, fetch_cache: FetchCache | None) -> None:
        if fetch_cache is not None:
            self._cached_bytes -= fetch_cache.size_bytes

    # --- jobs --------------------------------------------------------------------------------------------------------

    def start(self, actor: Actor, fetch_cache: FetchCache, reads: Sequence[tuple[Begin, KeepBytes]]) -> None:
        """Suspend the actor until all reads are done; its processor returns AGAIN. `reads` fill `fetch_cache`."""
        self.clear(actor)
        actor.is_background = True
        actor.suspend()
        self._is_rest_due(actor)
        self._queue.append(_FetchJob(actor, deque(reads), fetch_cache))
        self._begin()

    def rest(self, actor: Actor) -> None:
        """Let the actor's next request wait a while if others are at work. The actor was just served from its cache."""
        if self._is_rest_due(actor):
            actor.suspend()
            self._sated.append(actor)
            self._begin()

    def _is_rest_due(self, actor: Actor) -> bool:
        """Add `REST_FACTOR` times what the actor has used of the loop since the last time to the rest that is due, and
        begin that rest once it is long enough."""
        took_ns = min(actor.served_ns - self._served_ns.pop(actor.key, actor.served_ns), _TOOK_NS_MAX)
        self._served_ns[actor.key] = actor.served_ns
        if len(self._served_ns) > _SERVED_MAX:
            del self._served_ns[next(iter(self._served_ns))]
        now_ns = self._now_ns()
        self._rest_until_ns = max(self._rest_until_ns, now_ns)
        self._due_rest_ns += int(REST_FACTOR * took_ns / max(actor.weight, 1.0))
        if not self._others_are_at_work():
            self._due_rest_ns = 0
        if self._due_rest_ns < _REST_NS_MIN:
            return False
        self._rest_until_ns = min(self._rest_until_ns + self._due_rest_ns, now_ns + _REST_NS_MAX)
        self._due_rest_ns = 0
        return True

    def _others_are_at_work(self) -> bool:
        return self._now_ns() - self._scheduler.busy_ns <= _BUSY_NS

    def _must_rest(self) -> bool:
        """Whether others are at work and the rest is not over. If so, a timer calls `_begin` later."""
        if not self._others_are_at_work():
            return False
        aside_until_ns = min(self._scheduler.busy_ns + _ASIDE_NS, self._rest_until_ns + _ASIDE_NS_MAX)
        left_ns = max(self._rest_until_ns, aside_until_ns) - self._now_ns()
        if left_ns <= 0:
            return False
        if not self._is_resting:
            self._is_resting = True
            self._call_later(max(left_ns / 1e9, _TIMER_S_MIN), self._line_up)
        return True

    def _line_up(self) -> None:
        """Go on behind requests that have come meanwhile: the loop is about to serve them, and then this stands
        aside."""
        self._call_later(0, self._go_on)

    def _go_on(self) -> None:
        self._is_resting = False
        self._begin()

    def _begin(self) -> None:
        while (self._sated or (self._queue and self._under_way < self._at_once)) and not self._must_rest():
            if self._sated:
                self._resume(self._sated.popleft())
            else:
                self._fetch(self._queue.popleft())

    def _resume(self, actor: Actor) -> None:
        self._rest_until_ns = self._now_ns() + _REST_NS_MIN
        self._scheduler.resume(actor)

    def _fetch(self, task: _FetchJob) -> None:
        now_ns = self._now_ns()
        begin, keep = task.reads.popleft()
        self._under_way += 1
        self.count += 1
        fetched = partial(self._on_fetched, task, keep, now_ns)
        try:
            begin(fetched)
        except StorageFault as fault:
            fetched(fault)
        except FairwayError:
            fetched(b"")  # the segment is gone; the read that follows reports that

    def _on_fetched(self, task: _FetchJob, keep: KeepBytes, started_ns: int, found: bytes | StorageFault) -> None:
        now_ns = self._now_ns()
        self._under_way -= 1
        task.actor.charge(elapsed_ns=now_ns - started_ns)
        if isinstance(found, StorageFault):
            task.fetch_cache.fault = found
            task.reads.clear()
            self._wary_until_ns = now_ns + _WARY_NS
        else:
            keep(found)
        if task.reads:
            self._queue.append(task)
        else:
            self._put(task.actor.key, task.fetch_cache)
            self._sated.append(task.actor)
        self._begin()
