"""Cold reads: bytes that are not in memory are fetched off the loop, and the actor that wants them pays.

    process ── not in memory ──► actor.suspend, `start`, AGAIN ──► a reader thread ──► charge, resume ──► process again
    process ── from the shelf ──► an answer, `rest` ──► suspended for a while ──► process the next one

A few fetches at a time, and none jumps the queue: an actor is suspended while it waits, so it has one errand at most,
and an errand of many reads goes to the back of the queue after each. A group far behind slows itself, not the others.

Fair shares of the loop are not enough: a group that drains a backlog also keeps the device, the interpreter and the
other cores busy, so that everybody waits a little longer for everything. So while others are at work, each answer is
followed by a rest, many times as long as it took until then; a group whose backlog is urgent is given weight, and rests
the less. Nobody there, no rest. And what is about to begin, a fetch or an answer, stands aside for a moment after
somebody else was served: the kernel likes to wake whoever gets an answer on the core that sent it, and there he would
wait until the loop sleeps.

What was fetched lies on the actor's shelf until its next read, whichever of its requests that is: those that wait are
handed the same range. It dies there if nobody comes for it: shelves have a bound, and the oldest is cleared first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.limits import MIB
from fairway.scheduling import Actor, Scheduler
from fairway.storage.index_file import IndexRun
from fairway.world.clock import Clock
from fairway.world.disk import ReadCompletion

SHELVES_BYTES_MAX = 16 * MIB  # fetched and not yet used, of all actors; one that lost its own fetches again

# Hot pulls beside a cold reader, p99 against that alone: 3.5 without a rest, 2.1 with one of twice the time and a fetch
# for every answer, 1.2 to 1.4 with several answers to a fetch and the loop standing aside, 1.15 to 1.4 with a rest of
# eight times the time, 1.21 to 1.33 with 16 times, 1.06 to 1.21 with 24 times, which costs the cold reader a third of
# the rate that it has with 16 (bench/fairness).
REST_FACTOR = 24
_TOOK_NS_MAX = 5_000_000  # longer than that the group was waiting, not working
_BUSY_NS = 50_000_000  # others who had a slice within this time are at work
_REST_NS_MIN = 1_000_000  # also before it is known how long it takes
_REST_NS_MAX = 50_000_000  # ahead, however many are behind
_ASIDE_NS = 1_000_000  # after somebody else's slice: what he asks for next has often come by then
_ASIDE_NS_MAX = 3_000_000  # beyond the rest: others may never pause
_TIMER_S_MIN = 0.001  # uvloop rounds to milliseconds: less would ring at once, over and over
_BEGUN_MAX = 1_000  # of which it is known when their last fetch began

_FAULT_RETRY_MS = 1_000  # a device that fails does not get better by being asked often
_WARY_NS = 60_000_000_000  # so long after a fault nobody reads ahead: what fails may be what nobody has asked for

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
    """What was fetched for one actor."""

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
        """Whether something lies here from `position` on."""
        return any(piece.position + piece.size > position for piece in self.pieces)

    def piece(self, position: int, size: int) -> FetchedRange | None:
        """What lies here of `size` bytes from `position` on, if anything."""
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
    shelf: FetchCache


class ColdReads:
    """All cold reads of one broker. Lives on its loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock, call_later: CallLater, at_once: int) -> None:
        self._scheduler = scheduler
        self._now_ns = clock.monotonic_ns
        self._call_later = call_later
        self._rest_until_ns = 0
        self._is_resting = False
        self._wary_until_ns = 0
        self._at_once = at_once
        self._under_way = 0
        self._queue: deque[_FetchJob] = deque()  # a suspended actor is here, or under way,
        self._sated: deque[Actor] = deque()  # or here: what it wants is on its shelf, and it waits for its time
        self._began_ns: dict[Hashable, int] = {}
        self._shelves: OrderedDict[Hashable, FetchCache] = OrderedDict()
        self._shelved_bytes = 0
        self.count = 0

    # --- shelves -----------------------------------------------------------------------------------------------------

    def shelf(self, actor: Actor) -> FetchCache | None:
        """What lies there for the actor. `Refused` if it could not be read: whoever asks again may be luckier."""
        shelf = self._shelves.get(actor.key)
        if shelf is not None and shelf.fault is not None:
            self.clear(actor)
            raise Refused(Code.BUSY, f"the messages cannot be read now: {shelf.fault}", retry_after_ms=_FAULT_RETRY_MS)
        return shelf

    def clear(self, actor: Actor) -> None:
        """It was used, or is of no use."""
        self._drop(self._shelves.pop(actor.key, None))

    def take_runs(self, actor: Actor) -> list[tuple[int, IndexRun, bytes]]:
        """What was fetched of the index; the pieces of the log stay."""
        shelf = self._shelves.get(actor.key)
        if shelf is None or not shelf.runs:
            return []
        runs, shelf.runs = shelf.runs, []
        taken_bytes = sum(len(data) for _, _, data in runs)
        shelf.size_bytes -= taken_bytes
        self._shelved_bytes -= taken_bytes
        return runs

    def ahead_bytes(self, most: int) -> int:
        """How much may be fetched that nobody has asked for yet: all shelves together have a bound."""
        if self._now_ns() < self._wary_until_ns:
            return 0
        return min(most, SHELVES_BYTES_MAX // 2 // (len(self._shelves) + 1))

    def _put(self, key: Hashable, shelf: FetchCache) -> None:
        self._shelves[key] = shelf
        self._shelved_bytes += shelf.size_bytes
        while self._shelved_bytes > SHELVES_BYTES_MAX and len(self._shelves) > 1:
            self._drop(self._shelves.popitem(last=False)[1])

    def _drop(self, shelf: FetchCache | None) -> None:
        if shelf is not None:
            self._shelved_bytes -= shelf.size_bytes

    # --- errands -----------------------------------------------------------------------------------------------------

    def start(self, actor: Actor, shelf: FetchCache, reads: Sequence[tuple[Begin, KeepBytes]]) -> None:
        """Suspend the actor until all is read; its processor returns AGAIN. `shelf` is what `reads` keep theirs on."""
        self.clear(actor)
        actor.is_background = True
        actor.suspend()
        self._lengthen_rest(actor)
        self._queue.append(_FetchJob(actor, deque(reads), shelf))
        self._begin()

    def rest(self, actor: Actor) -> None:
        """The actor was served with what had been fetched: if others are at work, its next request waits a while."""
        if self._others_are_at_work():
            actor.suspend()
            self._lengthen_rest(actor)
            self._sated.append(actor)
            self._begin()
        else:
            self._note_begin(actor.key, self._now_ns())

    def _lengthen_rest(self, actor: Actor) -> None:
        """It wants more: let all rest for as long as its last errand kept the machine busy, and longer."""
        now_ns = self._now_ns()
        took_ns = min(now_ns - self._began_ns.pop(actor.key, now_ns), _TOOK_NS_MAX)
        rest_until_ns = max(self._rest_until_ns, now_ns) + int(REST_FACTOR * took_ns / max(actor.weight, 1.0))
        self._rest_until_ns = min(rest_until_ns, now_ns + _REST_NS_MAX)

    def _others_are_at_work(self) -> bool:
        return self._now_ns() - self._scheduler.busy_ns <= _BUSY_NS

    def _must_rest(self) -> bool:
        """Whether others are at work, and it is not yet time; then `_begin` is called when it is."""
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
        """Behind those whose requests have come meanwhile: they are about to be served, and then it stands aside."""
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
        now_ns = self._now_ns()
        self._note_begin(actor.key, now_ns)
        self._rest_until_ns = now_ns + _REST_NS_MIN
        self._scheduler.resume(actor)

    def _note_begin(self, key: Hashable, now_ns: int) -> None:
        self._began_ns[key] = now_ns
        if len(self._began_ns) > _BEGUN_MAX:
            del self._began_ns[next(iter(self._began_ns))]

    def _fetch(self, errand: _FetchJob) -> None:
        now_ns = self._now_ns()
        self._note_begin(errand.actor.key, now_ns)
        begin, keep = errand.reads.popleft()
        self._under_way += 1
        self.count += 1
        fetched = partial(self._on_fetched, errand, keep, now_ns)
        try:
            begin(fetched)
        except StorageFault as fault:
            fetched(fault)
        except FairwayError:
            fetched(b"")  # gone meanwhile: whoever reads it will find that out, and say so

    def _on_fetched(self, errand: _FetchJob, keep: KeepBytes, started_ns: int, found: bytes | StorageFault) -> None:
        now_ns = self._now_ns()
        self._under_way -= 1
        errand.actor.charge(elapsed_ns=now_ns - started_ns)
        if isinstance(found, StorageFault):
            errand.shelf.fault = found
            errand.reads.clear()
            self._wary_until_ns = now_ns + _WARY_NS
        else:
            keep(found)
        if errand.reads:
            self._queue.append(errand)
        else:
            self._put(errand.actor.key, errand.shelf)
            self._sated.append(errand.actor)
        self._begin()
