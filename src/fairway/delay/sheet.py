"""A batch as arrays over its own bytes: for whoever takes many messages out of many batches.

`decode` makes an object of every payload. A sheet makes none: it knows where each column lies, and what is taken from
it is a slice for each run of neighbours. Needs numpy, and so a server.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.batch import section
from fairway.batch.check import Strings, locate
from fairway.batch.layout import BatchHeader

Numbers: TypeAlias = NDArray[np.int64]


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
    """A column of lists: those of message i are the items from offsets[i] to offsets[i + 1] of each text."""

    offsets: NDArray[np.int32]
    view: memoryview
    texts: tuple[Text, ...]


class BatchArrays:
    """The columns of a batch that was checked, and whose bytes are known to be the same."""

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
        section.due_times_ms(data, header),
        section.key_hashes(data, header),
        section.explicit_ids(data, header),
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
