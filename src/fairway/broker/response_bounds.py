"""Bounds on one pull's answer: the bytes that the consumer asked for, and the bytes that its frames hold.

The bytes that a consumer asks for apply twice: to batches as stored, and to batches before compression, since a batch
of 2 KiB may hold 64 MiB. Batches go out whole, so at least one goes out, however large. A batch that is too large for
the consumer's frames does not go out: that counts as a failed attempt (docs/internals/protocol.md, PULL).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from sys import maxsize

from msgspec.structs import replace

from fairway.batch.layout import raw_length
from fairway.groups import Handout, Range
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch

# The worst case of an answer without its batches: a number in MessagePack has up to 9 bytes.
_FRAME_BYTES = 48  # the frame's header, the answer's own fields, padding
_LOT_BYTES = 29
_SPAN_BYTES = 16
_BATCH_BYTES = 24
ALONE_BYTES = _FRAME_BYTES + _LOT_BYTES + _SPAN_BYTES + _BATCH_BYTES  # beside a batch that has a frame to itself


def fitting(
    lots: Sequence[Handout], entries: Sequence[ConsumeLogEntry], bytes_max: int, frame_bytes_max: int
) -> int | None:
    """How many messages of the lots, from the first on, one answer can carry; None: all. `entries` hold them, in
    order."""
    total = sum([entry.size for entry in entries])
    spans = sum([len(lot.ranges) for lot in lots])
    beside = _FRAME_BYTES + _LOT_BYTES * len(lots) + _SPAN_BYTES * spans + _BATCH_BYTES * len(entries)
    if total <= bytes_max and total + beside <= frame_bytes_max:
        return None
    firsts = [entry.first_sequence for entry in entries]
    carried: set[int] = set()
    count = size = 0
    frame = _FRAME_BYTES
    for lot in lots:
        frame += _LOT_BYTES
        for first, messages in lot.ranges:
            frame += _SPAN_BYTES
            if carried and frame > frame_bytes_max:
                return count
            for entry in _holding(entries, firsts, first, messages):
                if entry.first_sequence in carried:
                    continue
                size += entry.size
                frame += entry.size + _BATCH_BYTES
                if carried and (size > bytes_max or frame > frame_bytes_max):
                    return count + max(entry.first_sequence - first, 0)
                carried.add(entry.first_sequence)
            count += messages
    return None


def fitting_raw(lots: Sequence[Handout], batches: Sequence[StoredBatch], bytes_max: int) -> int | None:
    """How many messages of the lots, from the first on, have at most `bytes_max` before compression; None: all."""
    if len(batches) < 2 or sum([raw_length(each.data) for each in batches]) <= bytes_max:
        return None
    weighed = [replace(each.entry, size=raw_length(each.data)) for each in batches]
    return fitting(lots, weighed, bytes_max, maxsize)


def fitting_batches(batches: Sequence[StoredBatch], bytes_max: int) -> int:
    """How many batches, from the first on and at least one, have at most `bytes_max` before compression."""
    sums = list(accumulate(raw_length(each.data) for each in batches))
    return max(bisect_right(sums, bytes_max), 1)


def _holding(
    entries: Sequence[ConsumeLogEntry], firsts: Sequence[int], first: int, messages: int
) -> Iterable[ConsumeLogEntry]:
    at = max(bisect_right(firsts, first) - 1, 0)
    while at < len(entries) and entries[at].first_sequence < first + messages:
        if entries[at].end_sequence > first:
            yield entries[at]
        at += 1


def beyond(lots: Iterable[Handout], count: int) -> list[Handout]:
    """The part of the lots behind their first `count` messages."""
    rest = []
    for lot in lots:
        ranges = []
        for first, messages in lot.ranges:
            kept = min(messages, count)
            count -= kept
            if kept < messages:
                ranges.append((first + kept, messages - kept))
        if ranges:
            rest.append(Handout(lot.first, lot.attempt, tuple(ranges)))
    return rest


def missing(lots: Sequence[Handout], batches: Sequence[StoredBatch]) -> list[Handout]:
    """The part of the lots in none of the batches: it is unreadable."""
    return _outside(lots, [each.entry for each in batches])


def too_large(lots: Sequence[Handout], batches: Sequence[StoredBatch], frame_bytes_max: int) -> list[Handout]:
    """The part of the lots in batches that the consumer's frames cannot hold."""
    small = [each.entry for each in batches if len(each.data) + ALONE_BYTES <= frame_bytes_max]
    return _outside(lots, small) if len(small) < len(batches) else []


def _outside(lots: Iterable[Handout], entries: Iterable[ConsumeLogEntry]) -> list[Handout]:
    """The part of the lots in none of these entries, which are in order."""
    begins: list[int] = []  # of runs without a gap
    ends: list[int] = []
    for entry in entries:
        first, end = entry.first_sequence, entry.first_sequence + entry.count
        if ends and ends[-1] == first:
            ends[-1] = end
        else:
            begins.append(first)
            ends.append(end)
    outside = []
    for lot in lots:
        first, (last, length) = lot.ranges[0][0], lot.ranges[-1]
        if not _left(first, last + length, begins, ends):
            continue
        left = [part for first, count in lot.ranges for part in _left(first, first + count, begins, ends)]
        if left:
            outside.append(lot._replace(ranges=tuple(left)))
    return outside


def _left(first: int, end: int, begins: Sequence[int], ends: Sequence[int]) -> Sequence[Range]:
    """The part of [first, end) in no run; usually one run holds all of it."""
    at = max(bisect_right(begins, first) - 1, 0)
    if at < len(begins) and begins[at] <= first and end <= ends[at]:
        return ()
    left = []
    while first < end:
        begin = begins[at] if at < len(begins) else end
        if begin > first:
            left.append((first, min(begin, end) - first))
        first = max(first, ends[at] if at < len(ends) else end)
        at += 1
    return left
