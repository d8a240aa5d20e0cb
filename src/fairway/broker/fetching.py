"""Cold reads: bytes that are not in memory are fetched off the loop, and the actor that wants them pays.

    process ── not in memory ──► actor.suspend, `start`, AGAIN ──► a reader thread ──► charge, resume ──► process again

A few fetches at a time, and none jumps the queue: an actor is suspended while it waits, so it has one errand at most,
and an errand of many reads goes to the back of the queue after each. A group far behind slows itself, not the others.

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
from fairway.storage.index_file import Run
from fairway.world.clock import Clock
from fairway.world.disk import Fetched

SHELVES_BYTES_MAX = 16 * MIB  # fetched and not yet used, of all actors; one that lost its own fetches again

_FAULT_RETRY_MS = 1_000  # a device that fails does not get better by being asked often

Begin: TypeAlias = Callable[[Fetched], None]
Keep: TypeAlias = Callable[[bytes], None]


class Piece(NamedTuple):
    """A part of the log: `data` is shorter than `size` only where the log's file ends too early."""

    position: int
    size: int
    data: bytes


@dataclass(slots=True)
class Shelf:
    """What was fetched for one actor."""

    pieces: list[Piece] = field(default_factory=list)
    runs: list[tuple[int, Run, bytes]] = field(default_factory=list)  # of the index, by subject
    fault: StorageFault | None = None
    size_bytes: int = 0

    def keep(self, position: int, size: int, data: bytes) -> None:
        self.pieces.append(Piece(position, size, data))
        self.size_bytes += len(data)

    def keep_run(self, subject_id: int, run: Run, data: bytes) -> None:
        self.runs.append((subject_id, run, data))
        self.size_bytes += len(data)

    def piece(self, position: int, size: int) -> Piece | None:
        """What lies here of `size` bytes from `position` on, if anything."""
        for piece in self.pieces:
            offset = position - piece.position
            if 0 <= offset < piece.size:
                data = piece.data if offset == 0 else piece.data[offset : offset + size]
                return Piece(position, min(size, piece.size - offset), data)
        return None


@dataclass(slots=True)
class _Errand:
    actor: Actor
    reads: deque[tuple[Begin, Keep]]
    shelf: Shelf


class Fetches:
    """All cold reads of one broker. Lives on its loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock, at_once: int) -> None:
        self._scheduler = scheduler
        self._now_ns = clock.monotonic_ns
        self._at_once = at_once
        self._under_way = 0
        self._queue: deque[_Errand] = deque()  # at most one per actor
        self._shelves: OrderedDict[Hashable, Shelf] = OrderedDict()
        self._shelved_bytes = 0
        self.count = 0

    def shelf(self, actor: Actor) -> Shelf | None:
        """What lies there for the actor. `Refused` if it could not be read: whoever asks again may be luckier."""
        shelf = self._shelves.get(actor.key)
        if shelf is not None and shelf.fault is not None:
            self.clear(actor)
            raise Refused(Code.BUSY, f"the messages cannot be read now: {shelf.fault}", retry_after_ms=_FAULT_RETRY_MS)
        return shelf

    def clear(self, actor: Actor) -> None:
        """It was used, or is of no use."""
        self._drop(self._shelves.pop(actor.key, None))

    def start(self, actor: Actor, shelf: Shelf, reads: Sequence[tuple[Begin, Keep]]) -> None:
        """Suspend the actor until all is read; its processor returns AGAIN. `shelf` is what `reads` keep theirs on."""
        self.clear(actor)
        actor.suspend()
        self._queue.append(_Errand(actor, deque(reads), shelf))
        self._begin()

    def _begin(self) -> None:
        while self._queue and self._under_way < self._at_once:
            errand = self._queue.popleft()
            begin, keep = errand.reads.popleft()
            self._under_way += 1
            self.count += 1
            fetched = partial(self._on_fetched, errand, keep, self._now_ns())
            try:
                begin(fetched)
            except StorageFault as fault:
                fetched(fault)
            except FairwayError:
                fetched(b"")  # gone meanwhile: whoever reads it will find that out, and say so

    def _on_fetched(self, errand: _Errand, keep: Keep, started_ns: int, found: bytes | StorageFault) -> None:
        self._under_way -= 1
        errand.actor.charge(elapsed_ns=self._now_ns() - started_ns)
        if isinstance(found, StorageFault):
            errand.shelf.fault = found
            errand.reads.clear()
        else:
            keep(found)
        if errand.reads:
            self._queue.append(errand)
        else:
            self._put(errand.actor.key, errand.shelf)
            self._scheduler.resume(errand.actor)
        self._begin()

    def _put(self, key: Hashable, shelf: Shelf) -> None:
        self._shelves[key] = shelf
        self._shelved_bytes += shelf.size_bytes
        while self._shelved_bytes > SHELVES_BYTES_MAX and len(self._shelves) > 1:
            self._drop(self._shelves.popitem(last=False)[1])

    def _drop(self, shelf: Shelf | None) -> None:
        if shelf is not None:
            self._shelved_bytes -= shelf.size_bytes
