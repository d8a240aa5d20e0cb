"""From the bytes of a batch back to messages: payloads at once, all other columns on demand.

A consumer reads every payload but rarely every header. So payloads are sliced eagerly in one comprehension, and the
other columns stay in place. `decode` checks all that `check` checks. After that no accessor can fail on the bytes, as
long as nobody changes them. A reader that decodes later than it receives calls `verify` first and `decode_verified`
when it needs the messages.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fairway.batch import layout
from fairway.batch.check import BatchColumns, Strings, open_columns, open_verified
from fairway.batch.identity import MessageId
from fairway.batch.layout import BatchHeader
from fairway.runtime.buffers import Bytes

if TYPE_CHECKING:
    import pyarrow


def decode(view: Bytes) -> Batch:
    """Decode a batch that is sound in every byte; RemoteProtocolError otherwise. The result uses the memory of
    `view`."""
    return Batch(open_columns(view))


def decode_verified(view: Bytes, header: BatchHeader) -> Batch:
    """Decode a batch that `verify` has passed and that has not changed since."""
    return Batch(open_verified(view, header))


class Batch:
    """A decoded batch. The singular methods take a message's index; the plural ones answer for all messages at once."""

    __slots__ = ("_columns", "header", "payloads")

    header: BatchHeader
    payloads: list[bytes]

    def __init__(self, columns: BatchColumns) -> None:
        self._columns = columns
        self.header = columns.header
        self.payloads = columns.slices(columns.payloads)

    def __len__(self) -> int:
        return self.header.count

    def key(self, index: int) -> str | None:
        self._within(index)
        strings = self._columns.keys
        if strings is None or not self._columns.raw[self._columns.validity_at + index // 8] >> index % 8 & 1:
            return None
        return self._texts(strings, index, index + 1)[0]

    def key_hashes(self) -> list[int]:
        """The key hashes of all messages; 0 without a key."""
        hashes = layout.key_hashes(self._columns.view, self.header)
        return [0] * len(self) if hashes is None else hashes.tolist()

    def tags(self, index: int) -> list[str]:
        self._within(index)
        strings = self._columns.tags
        return [] if strings is None else self._texts(strings, *self._range(self._columns.tag_lists_at, index))

    def headers(self, index: int) -> dict[str, str]:
        self._within(index)
        names, values = self._columns.names, self._columns.values
        if names is None or values is None:
            return {}
        start, end = self._range(self._columns.header_lists_at, index)
        return dict(zip(self._texts(names, start, end), self._texts(values, start, end), strict=True))

    def id(self, index: int) -> MessageId:
        """The explicit id if the message carries one, otherwise its place in the producer's stream."""
        self._within(index)
        ids = layout.explicit_ids(self._columns.view, self.header)
        if ids is not None and ids[2 * index]:
            return MessageId(ids[2 * index], ids[2 * index + 1])
        return MessageId(self.header.producer_id, self.header.first_sequence + index)

    def created_ms(self, index: int) -> int:
        self._within(index)
        at = self._columns.created_at
        delta: int = 0 if at is None else self._columns.raw[at + 8 * index : at + 8 * index + 8].cast("q")[0]
        return self.header.created_ms + delta

    def due_ms(self, index: int) -> int:
        """The due time of the message; 0: at once."""
        self._within(index)
        due = layout.due_times_ms(self._columns.view, self.header)
        return 0 if due is None else due[index]

    def keys(self) -> list[str | None]:
        strings = self._columns.keys
        if strings is None:
            return [None] * len(self)
        texts = self._texts(strings, 0, strings.count)
        return [text if there else None for text, there in zip(texts, self._columns.present(), strict=True)]

    def tag_lists(self) -> list[list[str]]:
        strings = self._columns.tags
        if strings is None:
            return [[] for _ in range(len(self))]
        texts = self._texts(strings, 0, strings.count)
        return [
            texts[start:end] for start, end in pairwise(self._columns.offsets(self._columns.tag_lists_at, len(self)))
        ]

    def header_maps(self) -> list[dict[str, str]]:
        names, values = self._columns.names, self._columns.values
        if names is None or values is None:
            return [{} for _ in range(len(self))]
        pairs = list(zip(self._texts(names, 0, names.count), self._texts(values, 0, values.count), strict=True))
        offsets = self._columns.offsets(self._columns.header_lists_at, len(self))
        return [dict(pairs[start:end]) for start, end in pairwise(offsets)]

    def ids(self) -> list[MessageId]:
        first = self.header.first_sequence
        own = [MessageId(self.header.producer_id, sequence) for sequence in range(first, first + len(self))]
        explicit = layout.explicit_ids(self._columns.view, self.header)
        if explicit is None:
            return own
        pairs = zip(own, explicit[::2], explicit[1::2], strict=True)
        return [MessageId(producer, sequence) if producer else one for one, producer, sequence in pairs]

    def created_times_ms(self) -> list[int]:
        at, created_ms = self._columns.created_at, self.header.created_ms
        if at is None:
            return [created_ms] * len(self)
        return [created_ms + delta for delta in self._columns.raw[at : at + 8 * len(self)].cast("q")]

    def due_times_ms(self) -> list[int]:
        due = layout.due_times_ms(self._columns.view, self.header)
        return [0] * len(self) if due is None else due.tolist()

    def to_arrow(self) -> pyarrow.RecordBatch:
        """The columns as Arrow, over the same memory; needs pyarrow."""
        from fairway.batch.arrow import record_batch

        return record_batch(self._columns)

    def _within(self, index: int) -> None:
        if not 0 <= index < self.header.count:
            raise IndexError(f"message {index} of a batch of {self.header.count}")

    def _range(self, lists_at: int, index: int) -> tuple[int, int]:
        """The items of a list column that belong to the message, as a range."""
        at = lists_at + 4 * index
        start, end = self._columns.raw[at : at + 8].cast("i")
        return start, end

    def _texts(self, strings: Strings, start: int, end: int) -> list[str]:
        """The items from `start` to `end` of a text column."""
        raw, data_at = self._columns.raw, strings.data_at
        offsets = self._columns.offsets(strings.offsets_at + 4 * start, end - start)
        data = bytes(raw[data_at + offsets[0] : data_at + offsets[-1]])
        if not data.isascii():
            base = offsets[0]
            return [str(data[left - base : right - base], "utf-8") for left, right in pairwise(offsets)]
        text, base = data.decode(), offsets[0]
        return [text[left - base : right - base] for left, right in pairwise(offsets)]
