"""Messages that a consumer has and the program has not begun.

They leave in the order in which they came, and only while certainly nobody else has them (`lease`). A message whose
lease may have run out is released. Where the broker cannot be asked whether it still knows of a handout, the message
waits.

A batch is decoded when its first message is handed out. One `take` hands out no more raw bytes than the consumer's
budget for decoded batches, however many messages were asked for: a few batches of 2 KiB may hold gigabytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from fairway import limits
from fairway.protocol.consumption import ConsumerCounts
from fairway.protocol.delivery import Message
from fairway.protocol.lots import ACK, OPEN, RELEASE
from fairway.protocol.page import LazyBatch
from fairway.protocol.unpacking import MessageRun


class PrefetchBuffer:
    """Runs of messages, the oldest first. Called under the lock of the line's owner, but for `has_ready`."""

    def __init__(self, counts: ConsumerCounts, taken_bytes_max: int = limits.DECODED_BYTES_MAX) -> None:
        self._runs: deque[MessageRun] = deque()
        self._counts = counts
        self._taken_bytes_max = taken_bytes_max
        self.count = 0  # messages

    def put(self, runs: Sequence[MessageRun]) -> None:
        self._runs.extend(runs)
        self.count += sum(run.end - run.first for run in runs)

    @property
    def has_ready(self) -> bool:
        """Whether `take` would hand out some. From any thread, without a lock."""
        try:
            return not self._runs[0].lot.is_detached
        except IndexError:
            return False

    def take(self, most: int | None, now_ns: int) -> list[Message]:
        """At most so many, for the program; those that others may have by now are released instead. Fewer where they
        are of large batches; RemoteProtocolError if the columns of a batch are not sound."""
        taken: list[Message] = []
        left = self.count if most is None else most
        taken_bytes = 0
        last_page: LazyBatch | None = None
        while left > 0 and self.has_ready:
            lot, page, first, end = self._runs.popleft()
            if lot.is_over(now_ns):
                lot.say(first, end, RELEASE)
                self.count -= end - first
                self._counts.lapsed += end - first
                continue
            if page is not last_page:
                taken_bytes += page.raw_bytes
                if taken and taken_bytes > self._taken_bytes_max:
                    self._runs.appendleft(MessageRun(lot, page, first, end))
                    break
                last_page = page
            if end - first > left:
                self._runs.appendleft(MessageRun(lot, page, first + left, end))
                end = first + left
            lot.fill(first - lot.first, end - lot.first, OPEN)
            at = page.first_sequence
            payloads = page.batch.payloads[first - at : end - at]
            taken += map(Message, payloads, range(first, end), repeat(lot), repeat(page))
            left -= end - first
        self.count -= len(taken)
        self._counts.handed_out += len(taken)
        return taken

    def give_back(self, behind: Iterable[MessageRun], *, is_last: bool) -> int:
        """Release all that is here, and what waits `behind` it; how many messages that is. What cannot be released is
        kept, or forgone if this is the last time."""
        released = 0
        kept: deque[MessageRun] = deque()
        for run in (*self._runs, *behind):
            length = run.end - run.first
            if not run.lot.is_final:
                run.lot.say(run.first, run.end, RELEASE)
                released += length
            elif is_last:
                run.lot.say(run.first, run.end, ACK)
                self._counts.forgone += length
            else:
                kept.append(run)
        self._runs = kept
        self.count = sum(run.end - run.first for run in kept)
        return released

    def clear(self) -> None:
        self._runs.clear()
        self.count = 0
