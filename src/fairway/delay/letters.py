"""Messages out of one or several batches, as the columns of a new one.

A bucket takes the part of a batch that belongs to it, an intent takes due messages from many pieces. Either way each
message keeps the id it was born with, its key, tags, headers and the time it was made. The same messages in the same
order always come out as the same bytes: an intent that is made again after a crash is the one that may have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway import batch
from fairway.batch import Batch, MessageId

_FEW = 8  # one message by itself costs about eight times its share of a whole column


class Letters:
    """Columns that grow."""

    def __init__(self) -> None:
        self.bytes = 0  # of payloads
        self._payloads: list[bytes] = []
        self._keys: list[str | None] = []
        self._tags: list[list[str]] = []
        self._headers: list[dict[str, str]] = []
        self._created_ms: list[int] = []
        self._ids: list[MessageId] = []

    def __len__(self) -> int:
        return len(self._payloads)

    def take(self, of: Batch, indices: Sequence[int]) -> None:
        """Copy these messages, in this order."""
        payloads, created_ms = of.payloads, of.created_times_ms()
        taken = [payloads[each] for each in indices]
        self._payloads += taken
        self._created_ms += [created_ms[each] for each in indices]
        self.bytes += sum(map(len, taken))
        if len(indices) * _FEW < len(of):
            self._keys += map(of.key, indices)
            self._tags += map(of.tags, indices)
            self._headers += map(of.headers, indices)
            self._ids += map(of.id, indices)
        else:
            keys, tags, headers, ids = of.keys(), of.tag_lists(), of.header_maps(), of.ids()
            self._keys += [keys[each] for each in indices]
            self._tags += [tags[each] for each in indices]
            self._headers += [headers[each] for each in indices]
            self._ids += [ids[each] for each in indices]

    def keep(self, count: int, size: int) -> None:
        """Only the first `count` messages, whose payloads have that size."""
        self.bytes = size
        for column in (self._payloads, self._keys, self._tags, self._headers, self._created_ms, self._ids):
            del column[count:]

    def encode(self, producer_id: int, first_sequence: int, due_ms: Sequence[int] | None = None) -> bytes:
        """The batch. Never compressed: another version of a library would make other bytes of the same messages."""
        created_ms = self._created_ms[0]
        return batch.encode(
            self._payloads,
            producer_id=producer_id,
            first_sequence=first_sequence,
            created_ms=created_ms,
            keys=self._keys,
            tags=self._tags,
            headers=self._headers,
            created_deltas_ms=[each - created_ms for each in self._created_ms],
            due_ms=due_ms,
            ids=self._ids,
        )
