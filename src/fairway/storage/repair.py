"""Repair: finds what a log has lost to rot, and writes another copy's bytes over it.

`lost_ranges` tells which holes in a subject's sequences are lost messages. A reader steps over a hole, and a group has
to count the messages that it missed. Not every hole is a loss:

    a batch that the index knows and that was found damaged     lost, if the group's filter wants it
    a gap in the index around a rotten span of the log          lost
    any other gap                                               never held a message that was acknowledged: with
                                                                durability `memory` a power cut skips sequences

Between two batches of a subject the number is exact. Where rot took a record's header too, and the subject had no batch
behind it, nobody knows how many messages were there. Recovery then skips as many sequences as there may have been, and
all of them count as lost.

The rest of the module repairs a log: another copy still has the rotten bytes. A rotten span holds nothing of worth, so
the right bytes go over it in place. After a kill halfway, the span is as rotten as before and is repaired again. Intact
bytes are never touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from fairway.errors import RemoteProtocolError
from fairway.storage import log_copies, message_log, record, segment
from fairway.storage.checkpoint import RotMark
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.log import Damaged, Log
from fairway.storage.message_log import MessageLog
from fairway.storage.record import Record, RecordHeader
from fairway.storage.segment import MISSING, STALE, Segment, SegmentScan, check_segment_header


def lost_ranges(
    messages: MessageLog,
    rotten: Iterable[RotMark],
    subject_id: int,
    first: int,
    end: int,
    is_wanted: Callable[[ConsumeLogEntry], bool] = lambda _: True,
) -> list[tuple[int, int]]:
    """The messages in [first, end) that the disk has lost, as (first, count), in order. Costs nothing where nothing has
    rotted."""
    marks = [each for each in rotten if each.log == message_log.DIRECTORY]
    if not marks or first >= end:
        return []
    committed_end = messages.log.committed_end
    found: list[tuple[int, int]] = []
    at, above = first, 0  # the next sequence to explain, and the lowest position where it can lie
    for entry in messages.views.entries.entries(subject_id, max(first - 1, 0), committed_end):
        if entry.first_sequence > at and any(each.touches(above, entry.position) for each in marks):
            _add(found, at, min(entry.first_sequence, end))
        if entry.first_sequence >= end:
            return found
        if messages.is_damaged(entry.position) and is_wanted(entry):
            _add(found, max(entry.first_sequence, at), min(entry.end_sequence, end))
        at, above = max(at, entry.end_sequence), entry.position + entry.size
    if at < end and any(each.touches(above, committed_end) for each in marks):
        _add(found, at, end)
    return found


def _add(found: list[tuple[int, int]], first: int, end: int) -> None:
    if first >= end:
        return
    if found and sum(found[-1]) == first:
        first = found.pop()[0]
    found.append((first, end - first))


class DamagedRange(NamedTuple):
    """Bytes that this copy has lost, of the log with this number."""

    log: int
    start: int
    end: int


class Patch(NamedTuple):
    """Bytes that fit into a rotten span, and their records."""

    records: list[Record]
    data: bytes


def spans(number: int, log: Log, rotten: Iterable[RotMark]) -> list[DamagedRange]:
    """The ranges to repair in a log, in order. Each begins where a record or a segment should, and may span several
    segments."""
    found: list[DamagedRange] = []
    for mark in sorted((each for each in rotten if each.log == log.directory), key=lambda each: each.start):
        start = _start_of(log, mark)
        end = mark.end if mark.end > mark.start else end_of(log, mark.start)
        if found and start <= found[-1].end:
            start, end = found[-1].start, max(end, found.pop().end)
        if start < end:
            found.append(DamagedRange(number, start, end))
    return found


def _start_of(log: Log, mark: RotMark) -> int:
    """The start of the range. Where a segment's end is missing, its last record may be cut: then it is lost whole."""
    cut = next((each for each in log.segments if each.end == mark.start), None) if mark.why == MISSING else None
    if cut is None:
        return mark.start
    whole_end = cut.base
    for found in SegmentScan(log.file(cut), cut.base, cut.base + segment.HEADER_BYTES, log.log_id, limit=cut.end):
        if isinstance(found, Record):
            whole_end = found.header.end
        elif found.end < cut.end:
            whole_end = found.end
    return whole_end


def end_of(log: Log, position: int) -> int:
    """The end of the damage that a reader met at `position`; `position` itself if there is none any more."""
    try:
        of = log.segment_at(position)
    except Damaged:
        later = [each.base for each in log.segments if each.base > position]
        return later[0] if later else log.end
    if position < of.base + segment.HEADER_BYTES:
        return of.base + segment.HEADER_BYTES
    header = log.header_at(position)
    if header is not None and header.end <= of.end:  # usually only the body is damaged, and a scan would read more
        is_sound = record.is_sound_body(log.read(header.body_at, header.body_bytes), header.body_crc)
        return position if is_sound else header.end
    seen = next(iter(SegmentScan(log.file(of), of.base, position, log.log_id, limit=of.end)), None)
    return position if seen is None or isinstance(seen, Record) else seen.end


def check(log: Log, span: DamagedRange, position: int, data: bytes) -> Patch:
    """The part of the data that fits into the span: whole records, and a segment's header where one begins.
    `RemoteProtocolError` if nothing fits, or another record came than the lost one."""
    data = data[: max(span.end - position, 0)]
    at = 0
    if data.startswith(segment.MAGIC):
        if segment.parse_header(data) != (log.log_id, position):
            raise RemoteProtocolError(f"the segment at {position} of {log.directory} belongs to another log or place")
        at = segment.HEADER_BYTES
    records: list[Record] = []
    while len(data) - at >= record.HEADER_BYTES:
        size = log_copies.size_of(log, data, at, position + at)
        if at + size > len(data):
            break
        records.append(log_copies.record_of(log, data, at, position + at))
        _check_same(log, records[-1].header)
        at += size
    if at == 0:
        raise RemoteProtocolError(f"nothing came that could mend {log.directory} at {position}")
    return Patch(records, data[:at])


def _check_same(log: Log, header: RecordHeader) -> None:
    """Compare with the lost record's header where that is still sound. A header of an earlier epoch was never part of
    the log."""
    known = log.header_at(header.position)
    if known is not None and known.epoch >= header.epoch and known != header:
        raise RemoteProtocolError(f"another record than the one of {log.directory} came for {header.position}")


def left(marks: Iterable[RotMark], log: Log, start: int, end: int) -> list[RotMark]:
    """The marks that remain once [start, end) of a log is repaired."""
    found: list[RotMark] = []
    for mark in marks:
        if mark.log != log.directory or not mark.touches(start, end):
            found.append(mark)
            continue
        if mark.start < start:
            found.append(RotMark(mark.log, mark.start, start, mark.why))
        if mark.end > end:
            found.append(RotMark(mark.log, end, mark.end, mark.why))
    return found


def is_whole(log: Log, mark: RotMark) -> bool:
    """Whether a rotten span is repaired, by a process that died before it recorded that."""
    if mark.why == STALE:
        return False  # such records look sound
    at, end = mark.start, mark.end
    if at == end:
        return end_of(log, at) == at
    while at < end:
        try:
            of = log.segment_at(at)
        except Damaged:
            return False
        file = log.file(of)
        if at == of.base and check_segment_header(file, of.base, log.log_id) is not None:
            return False
        begin = max(at, of.base + segment.HEADER_BYTES)
        if any(
            not isinstance(each, Record)
            for each in SegmentScan(file, of.base, begin, log.log_id, limit=min(of.end, end))
        ):
            return False
        at = of.end
    return True


def within(log: Log, mark: RotMark) -> Iterator[tuple[Segment, Iterator[Record]]]:
    """The records that begin in a repaired span, by segment."""
    end = max(mark.end, mark.start + 1)
    for of in log.segments:
        begin = max(mark.start, of.base + segment.HEADER_BYTES)
        if begin < min(of.end, end):
            scan = SegmentScan(log.file(of), of.base, begin, log.log_id, limit=of.end)
            records = (each for each in scan if isinstance(each, Record))
            yield of, takewhile(lambda each: each.header.position < end, records)


def place(log: Log, position: int, patch: Patch) -> int:
    """The base of the segment for a patch: a new one, if the patch begins with a segment header."""
    if patch.data.startswith(segment.MAGIC):
        return position
    index = bisect_right(log.segments, position, key=lambda each: each.base) - 1
    if index < 0 or log.segments[index].end < position:
        raise RemoteProtocolError(f"what comes before {position} in {log.directory} has to be mended first")
    return log.segments[index].base
