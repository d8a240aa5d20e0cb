"""Batches as numpy columns, and a new batch from messages of several batches.

`BatchArrays` shows a checked batch as arrays over its own bytes. `decode` makes an object of each payload; this class
makes none. It knows where each column lies, and hands out one slice per run of neighbours. The module needs numpy, and
so a server.

`BatchComposer` copies messages out of such batches into a new batch. A bucket takes its part of a batch this way, and
an intent takes due messages from many bucket records. Each message keeps its id, key, tags, headers and creation time.
The same messages in the same order always give the same bytes, those that `batch.encode` makes. So an intent that is
made again after a crash equals the batch that the broker may have.

No column is copied message by message, except for a handful of messages: each run of neighbours is one slice, and
lengths and ids are arrays.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairway.batch import layout
from fairway.batch.check import Strings, locate
from fairway.batch.checksum import tag_filter_of
from fairway.batch.encode import add_column, sealed
from fairway.batch.layout import BatchHeader, Codec

Numbers: TypeAlias = NDArray[np.int64]
IntegerT = TypeVar("IntegerT", np.int64, np.uint64)


class Text(NamedTuple):
    """A column of byte strings: item i is data[offsets[i]:offsets[i + 1]]."""

    offsets: NDArray[np.int32]
    view: memoryview  # the same numbers, faster one by one
    data: memoryview

    def lengths(self, items: Numbers) -> NDArray[np.int32]:
        return self.offsets[items + 1] - self.offsets[items]

    def item(self, index: int) -> bytes:
        return bytes(self.data[self.view[index] : self.view[index + 1]])


class Lists(NamedTuple):
    """A column of lists: message i has the items offsets[i] to offsets[i + 1] of each text."""

    offsets: NDArray[np.int32]
    view: memoryview
    texts: tuple[Text, ...]


class BatchArrays:
    """The columns of a batch that was checked and has not changed since."""

    __slots__ = (
        "created_ms",
        "data",
        "due_ms",
        "hashes",
        "header",
        "headers",
        "id_high",
        "id_low",
        "ids",
        "keys",
        "payloads",
        "present",
        "tags",
    )

    def __init__(self, data: bytes) -> None:
        columns = locate(data)
        self.data = data
        self.header: BatchHeader = columns.header
        raw, count = columns.raw, columns.header.count

        def text(of: Strings) -> Text:
            view = raw[of.offsets_at : of.offsets_at + 4 * (of.count + 1)].cast("i")
            return Text(np.frombuffer(view, np.int32), view, raw[of.data_at : of.data_end])

        def lists(at: int, *of: Strings | None) -> Lists | None:
            texts = tuple(text(each) for each in of if each is not None)
            view = raw[at : at + 4 * (count + 1)].cast("i")
            return Lists(np.frombuffer(view, np.int32), view, texts) if texts else None

        self.payloads = text(columns.payloads)
        self.keys = None if columns.keys is None else text(columns.keys)
        self.present: NDArray[np.bool_] | None = None
        if columns.keys is not None:
            bits = np.frombuffer(raw, np.uint8, (count + 7) // 8, columns.validity_at)
            self.present = np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)
        self.tags = lists(columns.tag_lists_at, columns.tags)
        self.headers = lists(columns.header_lists_at, columns.names, columns.values)
        self.created_ms: NDArray[np.int64] | None = None
        if columns.created_at is not None:
            self.created_ms = np.frombuffer(raw, np.int64, count, columns.created_at) + self.header.created_ms
        self.due_ms, self.hashes, self.id_high, self.id_low = section_of(data, self.header)
        self.ids = self.id_high.data, self.id_low.data  # the same numbers, faster one by one

    def __len__(self) -> int:
        return self.header.count

    def key(self, index: int) -> str | None:
        if self.keys is None or self.present is None or not self.present[index]:
            return None
        return self.keys.item(index).decode()


def section_of(
    data: bytes, header: BatchHeader
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Due times (0: at once), key hashes (0: none) and both halves of the ids."""
    count = header.count
    due, keys, ids = (
        layout.due_times_ms(data, header),
        layout.key_hashes(data, header),
        layout.explicit_ids(data, header),
    )
    high = np.full(count, header.producer_id, np.uint64)
    low = np.arange(count, dtype=np.uint64) + np.uint64(header.first_sequence)
    if ids is not None:
        pairs = np.frombuffer(ids, np.uint64)
        is_own = pairs[::2] == 0
        high, low = np.where(is_own, high, pairs[::2]), np.where(is_own, low, pairs[1::2])
    return (
        np.zeros(count, np.int64) if due is None else np.frombuffer(due, np.int64),
        np.zeros(count, np.uint64) if keys is None else np.frombuffer(keys, np.uint64),
        high,
        low,
    )


_FEW = 6  # messages of one batch: up to so many, copying one by one is faster than arrays


def runs_of(numbers: NDArray[IntegerT]) -> tuple[NDArray[IntegerT], NDArray[IntegerT]]:
    """Where each run of neighbours begins and ends; the end is exclusive."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and bool((np.diff(numbers) == 1).all()):
        return numbers[:1], numbers[-1:] + 1
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate(([0], breaks))]
    return firsts, numbers[np.concatenate((breaks, [len(numbers)])) - 1] + 1


def expand(firsts: NDArray[IntegerT], ends: NDArray[IntegerT]) -> NDArray[IntegerT]:
    """All numbers from each first to its end."""
    if len(firsts) == 1:
        return np.arange(firsts[0], ends[0], dtype=firsts.dtype)
    lengths = ends - firsts
    before = np.cumsum(lengths, dtype=firsts.dtype) - lengths
    expanded = np.repeat(firsts - before, lengths.astype(np.int64))  # unsigned numbers wrap around, and back
    expanded += np.arange(len(expanded), dtype=firsts.dtype)
    return expanded


def split_by(chosen: Numbers, values: NDArray[np.uint32] | Numbers) -> list[tuple[int, Numbers]]:
    """Group the chosen numbers by value, in order."""
    if bool((values == values[0]).all()):
        return [(int(values[0]), chosen)]
    order = np.argsort(values, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return [(int(values[part[0]]), chosen[part]) for part in parts]


class _Column:
    """A growing column of byte strings."""

    __slots__ = ("_chunks", "_is_copying", "lengths")

    def __init__(self, is_copying: bool) -> None:
        self._is_copying = is_copying
        self._chunks: list[bytes | memoryview] = []
        self.lengths = array("i")

    def take_one(self, text: Text, item: int) -> None:
        start, stop = text.view[item], text.view[item + 1]
        self._chunks.append(bytes(text.data[start:stop]) if self._is_copying else text.data[start:stop])
        self.lengths.append(stop - start)

    def take(self, text: Text, firsts: Numbers, ends: Numbers, items: Numbers) -> None:
        starts, stops = text.offsets[firsts].tolist(), text.offsets[ends].tolist()
        slices = [text.data[start:stop] for start, stop in zip(starts, stops, strict=True)]
        self._chunks += [b"".join(slices)] if self._is_copying else slices
        self.lengths.frombytes(text.lengths(items).tobytes())

    def skip(self, count: int) -> None:
        """Add empty strings."""
        self.lengths.frombytes(bytes(4 * count))

    def data(self) -> bytes:
        return b"".join(self._chunks)


class _Listing:
    """A growing column of lists of strings, with as many texts as each list has columns."""

    __slots__ = ("lengths", "texts")

    def __init__(self, texts: int, is_copying: bool) -> None:
        self.lengths = array("i")
        self.texts = tuple(_Column(is_copying) for _ in range(texts))

    def take(self, lists: Lists | None, messages: Numbers) -> None:
        if lists is None:
            self.lengths.frombytes(bytes(4 * len(messages)))
            return
        firsts, ends = runs_of(messages)
        offsets = lists.offsets
        self.lengths.frombytes((offsets[messages + 1] - offsets[messages]).tobytes())
        first_items, end_items = offsets[firsts].astype(np.int64), offsets[ends].astype(np.int64)
        items = expand(first_items, end_items)
        for column, text in zip(self.texts, lists.texts, strict=True):
            column.take(text, first_items, end_items, items)


class BatchComposer:
    """Builds a batch. With `is_copying`, it does not keep the source batches alive."""

    def __init__(self, *, is_copying: bool = False) -> None:
        self.bytes = 0  # of payloads
        self._count = 0
        self._payloads = _Column(is_copying)
        self._keys = _Column(is_copying)
        self._present = bytearray()
        self._hashes = array("Q")
        self._tags = _Listing(1, is_copying)
        self._headers = _Listing(2, is_copying)
        self._created_ms = array("q")
        self._ids = array("Q")
        self._has = 0  # flags of `layout`: which columns any source batch had

    def __len__(self) -> int:
        return self._count

    def take(self, of: BatchArrays, messages: Numbers) -> None:
        """Copy these messages, in this order."""
        flags = of.header.flags
        self._has |= flags
        if flags & (layout.TAGS | layout.HEADERS) or self._has & (layout.TAGS | layout.HEADERS):
            self._take_lists(of, messages)
        if len(messages) <= _FEW:
            for message in messages.tolist():
                self._take_one(of, message)
        else:
            self._take_many(of, messages)

    def _take_lists(self, of: BatchArrays, messages: Numbers) -> None:
        """Copy tags and headers. Messages before the first that has any get empty lists."""
        for listing, lists in ((self._tags, of.tags), (self._headers, of.headers)):
            listing.lengths.frombytes(bytes(4 * (self._count - len(listing.lengths))))
            listing.take(lists, messages)

    def _take_one(self, of: BatchArrays, message: int) -> None:
        self._count += 1
        self._payloads.take_one(of.payloads, message)
        self.bytes += self._payloads.lengths[-1]
        high, low = of.ids
        self._ids.append(high[message])
        self._ids.append(low[message])
        if of.keys is None or of.present is None:
            self._keys.lengths.append(0)
            self._present.append(0)
            self._hashes.append(0)
        else:
            self._keys.take_one(of.keys, message)
            self._present.append(bool(of.present[message]))
            self._hashes.append(int(of.hashes[message]))
        self._created_ms.append(of.header.created_ms if of.created_ms is None else int(of.created_ms[message]))

    def _take_many(self, of: BatchArrays, messages: Numbers) -> None:
        firsts, ends = runs_of(messages)
        count, before = len(messages), len(self._payloads.lengths)
        self._count += count
        self._payloads.take(of.payloads, firsts, ends, messages)
        self.bytes += sum(self._payloads.lengths[before:])
        self._ids.frombytes(np.stack((of.id_high[messages], of.id_low[messages]), axis=1).tobytes())
        if of.keys is None or of.present is None:
            self._keys.skip(count)
            self._present += bytes(count)
            self._hashes.frombytes(bytes(8 * count))
        else:
            self._keys.take(of.keys, firsts, ends, messages)
            self._present += of.present[messages].tobytes()
            self._hashes.frombytes(of.hashes[messages].tobytes())
        created_ms = of.created_ms
        times = np.full(count, of.header.created_ms, np.int64) if created_ms is None else created_ms[messages]
        self._created_ms.frombytes(times.tobytes())

    def encode(self, producer_id: int, first_sequence: int, due_ms: NDArray[np.int64] | None = None) -> bytes:
        """The batch, never compressed: another version of a compression library would give other bytes."""
        flags, tag_filter = layout.IDS, 0
        section: list[bytes] = []
        columns: list[bytes] = []
        _add_text(columns, self._payloads)
        if self._has & layout.KEYS and any(self._present):
            flags |= layout.KEYS
            section.append(self._hashes.tobytes())
            add_column(columns, np.packbits(np.frombuffer(self._present, np.uint8), bitorder="little").tobytes())
            _add_text(columns, self._keys)
        if due_ms is not None and due_ms.any():
            flags |= layout.DUE
            section.append(due_ms.astype(np.int64).tobytes())
        section.append(self._ids.tobytes())
        if self._has & layout.TAGS and _add_lists(columns, self._tags):
            flags |= layout.TAGS
            tags = self._tags.texts[0]
            data, offsets = tags.data(), list(accumulate(tags.lengths, initial=0))
            tag_filter = tag_filter_of({data[start:end] for start, end in pairwise(offsets)})
        if self._has & layout.HEADERS and _add_lists(columns, self._headers):
            flags |= layout.HEADERS
        first_ms = self._created_ms[0]
        if self._created_ms.count(first_ms) < self._count:
            flags |= layout.CREATED
            columns.append((np.frombuffer(self._created_ms, np.int64) - first_ms).tobytes())
        body_bytes = sum(map(len, columns))
        size = layout.HEADER_BYTES + sum(map(len, section)) + body_bytes
        head = layout.HEADER.pack(
            layout.MAGIC, 0, layout.VERSION, layout.HEADER_BYTES, Codec.NONE, self._count, flags, 0, size, body_bytes,
            body_bytes, 0, 0, 0, producer_id, first_sequence, first_ms, tag_filter,
        )  # fmt: skip
        return sealed([head[layout.PREFIX_BYTES :], *section, *columns])


def _add_text(columns: list[bytes], text: _Column) -> None:
    _add_offsets(columns, text.lengths)
    add_column(columns, text.data())


def _add_lists(columns: list[bytes], lists: _Listing) -> bool:
    """False if every list is empty; then the column is left out."""
    if not any(lists.lengths):
        return False
    _add_offsets(columns, lists.lengths)
    for text in lists.texts:
        _add_text(columns, text)
    return True


def _add_offsets(columns: list[bytes], lengths: array[int]) -> None:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.frombuffer(lengths, np.int32), out=offsets[1:])
    add_column(columns, offsets.tobytes())
