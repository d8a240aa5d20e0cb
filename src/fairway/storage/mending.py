"""Mending a log: what has rotted here, another copy still has, byte for byte.

A span that rotted holds nothing of worth, so the right bytes are written over it in place: killed on the way, it is as
rotten as before, and is mended again. What is intact is never touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.storage import following, record, segment
from fairway.storage.checkpoint import RotMark
from fairway.storage.log import Damaged, Log
from fairway.storage.record import BadRecord, Record, RecordHeader
from fairway.storage.scan import MISSING, STALE, SegmentScan, check_segment_header
from fairway.storage.segment import Segment


class DamagedRange(NamedTuple):
    """Bytes of a log, by its number, that this copy has lost."""

    log: int
    start: int
    end: int


class Patch(NamedTuple):
    """Bytes that belong there."""

    records: list[Record]
    data: bytes


def spans(number: int, log: Log, rotten: Iterable[RotMark]) -> list[DamagedRange]:
    """What has to be mended in a log, in order; each begins where a record or a segment should, and may go on over
    several segments."""
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
    """Where the end of a segment is missing, its last record may have lost only a part: that is lost whole."""
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
    """How far the damage goes that a reader met there; `position` itself if there is none any more."""
    try:
        of = log.segment_at(position)
    except Damaged:
        later = [each.base for each in log.segments if each.base > position]
        return later[0] if later else log.end
    if position < of.base + segment.HEADER_BYTES:
        return of.base + segment.HEADER_BYTES
    header = _header_at(log, position)
    if header is not None and header.end <= of.end:  # most often only the body is damaged, and a scan would read more
        is_sound = record.is_sound_body(log.read(header.body_at, header.body_bytes), header.body_crc)
        return position if is_sound else header.end
    seen = next(iter(SegmentScan(log.file(of), of.base, position, log.log_id, limit=of.end)), None)
    return position if seen is None or isinstance(seen, Record) else seen.end


def _header_at(log: Log, position: int) -> RecordHeader | None:
    """The header of the record that begins there, if that much of it is sound."""
    try:
        return record.parse_header(log.read(position, record.HEADER_BYTES), 0, position, log.log_id)
    except (Damaged, BadRecord, WrongDirectory):
        return None


def check(log: Log, span: DamagedRange, position: int, data: bytes) -> Patch:
    """What of the data belongs into the span: whole records, and a segment's header where one begins.
    `RemoteProtocolError` where that is nothing, or another record than the one that was lost."""
    data = data[: max(span.end - position, 0)]
    at = 0
    if data.startswith(segment.MAGIC):
        if segment.parse_header(data) != (log.log_id, position):
            raise RemoteProtocolError(f"the segment at {position} of {log.directory} belongs to another log or place")
        at = segment.HEADER_BYTES
    records: list[Record] = []
    while len(data) - at >= record.HEADER_BYTES:
        size = following.size_of(log, data, at, position + at)
        if at + size > len(data):
            break
        records.append(following.record_of(log, data, at, position + at))
        _check_same(log, records[-1].header)
        at += size
    if at == 0:
        raise RemoteProtocolError(f"nothing came that could mend {log.directory} at {position}")
    return Patch(records, data[:at])


def _check_same(log: Log, header: RecordHeader) -> None:
    """Where the header of what was lost is still sound, it must be this one; one of an earlier epoch was never part of
    the log."""
    known = _header_at(log, header.position)
    if known is not None and known.epoch >= header.epoch and known != header:
        raise RemoteProtocolError(f"another record than the one of {log.directory} came for {header.position}")


def left(marks: Iterable[RotMark], log: Log, start: int, end: int) -> list[RotMark]:
    """The rotten spans that are known, once [start, end) of a log is mended."""
    found: list[RotMark] = []
    for mark in marks:
        mark_end = max(mark.end, mark.start + 1)
        if mark.log != log.directory or mark.start >= end or mark_end <= start:
            found.append(mark)
            continue
        if mark.start < start:
            found.append(RotMark(mark.log, mark.start, start, mark.why))
        if mark.end > end:
            found.append(RotMark(mark.log, end, mark.end, mark.why))
    return found


def is_whole(log: Log, mark: RotMark) -> bool:
    """Whether what was rotten is mended, and nobody lived to write that down."""
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
    """The records that begin in a span that is whole, by segment."""
    end = max(mark.end, mark.start + 1)
    for of in log.segments:
        begin = max(mark.start, of.base + segment.HEADER_BYTES)
        if begin < min(of.end, end):
            scan = SegmentScan(log.file(of), of.base, begin, log.log_id, limit=of.end)
            records = (each for each in scan if isinstance(each, Record))
            yield of, takewhile(lambda each: each.header.position < end, records)


def place(log: Log, position: int, patch: Patch) -> int:
    """The base of the segment that a patch goes into: a new one, where its header is among the bytes."""
    if patch.data.startswith(segment.MAGIC):
        return position
    index = bisect_right(log.segments, position, key=lambda each: each.base) - 1
    if index < 0 or log.segments[index].end < position:
        raise RemoteProtocolError(f"what comes before {position} in {log.directory} has to be mended first")
    return log.segments[index].base
