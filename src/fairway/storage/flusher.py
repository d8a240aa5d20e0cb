"""Group commit: one sync in flight, everything that arrives meanwhile gathered for the next.

A *round* is what one commit carries: parts for one file. Rounds are committed in order, one at a time, so the synced
end only moves forward and never skips. Whoever appended asks `when_durable(position)` and is called when the synced
end has passed it, or with the reason why it never will.

A round that has grown large is handed over at once, behind the one that the disk is at work on: it would gain little by
growing further, and the disk need not wait for a busy loop between the two.

Three endings of a round:

    synced       the synced end moves, the waiters are answered, the next round goes
    disk full    nothing of the round is on disk; it and all that came behind it are undone (`on_full`), and the waiters
                 are told that nothing was appended
    any fault    nobody knows what is on disk: the flusher is poisoned for good, every waiter is told so, and nothing is
                 ever answered again; a second sync could lie
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from fairway import limits
from fairway.errors import Code, DiskFull, FairwayError, Refused, StorageFault, invariant
from fairway.world.disk import Disk, File, Part

Outcome: TypeAlias = Callable[[FairwayError | None], None]
Defer: TypeAlias = Callable[[Callable[[], None]], object]


class _Round:
    """The parts of one commit, and who waits for it."""

    __slots__ = ("end", "file", "parts", "start", "waiters")

    def __init__(self, file: File, start: int) -> None:
        self.file = file
        self.start = start
        self.end = start
        self.parts: list[Part] = []
        self.waiters: list[Outcome] = []

    @property
    def is_large(self) -> bool:
        return self.end - self.start >= limits.ROUND_BYTES_LARGE

    def answer(self, outcome: FairwayError | None) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter(outcome)


class Flusher:
    """Commits one log's rounds. Lives on one loop; `defer` is that loop's `call_soon`.

    The start of a round is deferred to the end of the loop's turn, so that all requests that arrived in one turn share
    one sync instead of the first of them paying for a sync of its own.
    """

    def __init__(
        self,
        disk: Disk,
        synced_end: int,
        *,
        defer: Defer,
        on_full: Callable[[int], None],
        on_progress: Callable[[], None],
    ) -> None:
        self.synced_end = synced_end
        self.gathered_end = synced_end
        self.fault: StorageFault | None = None
        self.syncs = 0
        self.undone_from: list[int] = []  # where each undo began, in order of time
        self._disk = disk
        self._defer = defer
        self._on_full = on_full
        self._on_progress = on_progress
        self._in_flight: _Round | None = None
        self._ahead: _Round | None = None  # handed over too: the disk's next
        self._refused_ahead = (
            0  # of those that were undone with the one before them, how many the disk has yet to refuse
        )
        self._gathered: deque[_Round] = deque()
        self._kicked = False

    @property
    def unsynced_bytes(self) -> int:
        return self.gathered_end - self.synced_end

    def add(self, file: File, part: Part, body: Part = b"") -> None:
        """Gather bytes that follow directly on what was gathered before; `body` goes behind `part`."""
        if self.fault is not None:
            raise self.fault
        last = self._gathered[-1] if self._gathered else None
        if last is None or last.file is not file:
            last = _Round(file, self.gathered_end)
            self._gathered.append(last)
        last.parts.append(part)
        if body:
            last.parts.append(body)
        self.gathered_end += len(part) + len(body)
        last.end = self.gathered_end
        if last.is_large:
            self._kick()
        elif not self._kicked and self._in_flight is None:
            self._kicked = True
            self._defer(self._kick)

    def when_durable(self, position: int, outcome: Outcome, undos: int | None = None) -> None:
        """Call `outcome(None)` once everything below `position` is synced, at once where it is already.

        After a full disk the same position may hold something else. Whoever asks in a later turn than that of the
        append says how many undos there had been by then: each undo leaves everything either synced or undone.
        """
        if undos is not None and undos < len(self.undone_from):
            outcome(None if position <= self.undone_from[undos] else _undone())
        elif position <= self.synced_end:
            outcome(None)
        elif self.fault is not None:
            outcome(self.fault)
        else:
            self._round_of(position).waiters.append(outcome)

    async def durable(self, position: int, undos: int | None = None) -> None:
        """Return once everything below `position` is synced; raise the reason why it never will be."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(outcome: FairwayError | None) -> None:
            if future.done():  # the waiting task was cancelled
                return
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

        self.when_durable(position, settle, undos)
        await future

    def _round_of(self, position: int) -> _Round:
        invariant(position <= self.gathered_end, "nobody waits for what was not appended")
        return next(round_ for round_ in [*self._handed_over(), *self._gathered] if position <= round_.end)

    def _handed_over(self) -> list[_Round]:
        return [round_ for round_ in (self._in_flight, self._ahead) if round_ is not None]

    def _kick(self) -> None:
        self._kicked = False
        if self.fault is None and self._gathered and self._in_flight is None:
            self._in_flight = self._hand_over()
        if self.fault is None and self._gathered and self._ahead is None and self._may_go_ahead(self._gathered[0]):
            self._ahead = self._hand_over()

    def _may_go_ahead(self, round_: _Round) -> bool:
        """Of the same file: if the one in flight finds no room, the disk refuses this one too."""
        return round_.is_large and self._in_flight is not None and self._in_flight.file is round_.file

    def _hand_over(self) -> _Round:
        round_ = self._gathered.popleft()
        self._disk.commit(round_.file, round_.parts, self._finished)
        return round_

    def _finished(self, fault: StorageFault | None) -> None:
        if self._refused_ahead and isinstance(fault, DiskFull):
            self._refused_ahead -= 1
            return
        round_, self._in_flight, self._ahead = self._in_flight, self._ahead, None
        if round_ is None or self.fault is not None:
            return  # poisoned while this commit was under way: its answer no longer counts
        if fault is None:
            self.synced_end = round_.end
            self.syncs += 1
            self._kick()  # before the waiters: the disk works while they are answered
            round_.answer(None)
            self._on_progress()
        elif isinstance(fault, DiskFull):
            self._undo(round_, fault)
        else:
            self.poison(fault, round_)

    def _undo(self, round_: _Round, fault: DiskFull) -> None:
        undone = [round_, *self._handed_over(), *self._gathered]
        self._refused_ahead += len(self._handed_over())
        self._in_flight = None
        self._gathered.clear()
        self.gathered_end = round_.start
        self.undone_from.append(round_.start)
        self._on_full(round_.start)
        for each in undone:
            each.answer(_undone(f" ({fault})"))

    def poison(self, fault: StorageFault, round_: _Round | None = None) -> None:
        """Never answer again: what is on disk is unknown."""
        self.fault = self.fault or fault
        undone = [*([round_] if round_ else []), *self._handed_over(), *self._gathered]
        self._gathered.clear()
        for each in undone:
            each.answer(self.fault)
        self._on_progress()


def _undone(why: str = "") -> Refused:
    return Refused(Code.READ_ONLY, f"the disk is full, nothing was appended{why}", retry_after_ms=1_000)
