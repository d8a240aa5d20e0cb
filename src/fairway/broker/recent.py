"""What was read a moment ago and is wanted again: seventy groups on one subject read the same batch, one after another,
and the second of them has read and checked it for all that follow.

Only committed batches come here, and those never change. What is asked for once is not kept: a group that has its
subject to itself gains nothing by it. The oldest go first, by a bound on their number and one on their bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from fairway.limits import KIB, MIB
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch

BATCHES_MAX = 4_096  # seen; the bytes of some are kept
BYTES_MAX = 4 * MIB
BATCH_BYTES_MAX = 64 * KIB  # a larger one costs more to send than to read again


class RecentReads:
    """Batches by their position in the log; None for one that was read once."""

    def __init__(self) -> None:
        self._bytes = 0
        self._batches: OrderedDict[int, StoredBatch | None] = OrderedDict()

    def find(self, entries: Sequence[ConsumeLogEntry]) -> list[StoredBatch] | None:
        """All of them, or None."""
        found = []
        for entry in entries:
            batch = self._batches.get(entry.position)
            if batch is None:
                return None
            found.append(batch)
        return found

    def note(self, batches: Iterable[StoredBatch]) -> None:
        """They were read, and are sound."""
        for batch in batches:
            position, size = batch.entry.position, len(batch.data)
            if position not in self._batches:
                self._batches[position] = None
            elif self._batches[position] is None and size <= BATCH_BYTES_MAX:
                self._batches[position] = batch
                self._bytes += size
        while self._bytes > BYTES_MAX or len(self._batches) > BATCHES_MAX:
            _, gone = self._batches.popitem(last=False)
            self._bytes -= 0 if gone is None else len(gone.data)
