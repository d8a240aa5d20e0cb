"""Copies of a log: what a master reads for its replicas, and what a replica checks before it appends.

A master reads chunks of a segment as they are on disk, and marks to compare single records by. Only synced bytes are
read: a full disk may undo the rest.

A replica checks that the bytes continue its own log (`check`). The bytes are those of the master's file, so that a
replica is a byte-identical prefix: whole records, with a segment's header before its first record. Bytes that do not
fit are refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

from fairway import batch, limits
from fairway.errors import RemoteProtocolError, StorageFault, WrongDirectory
from fairway.group_events import ActionKind
from fairway.storage import action_log, dedupe, record, segment, subjects
from fairway.storage.checkpoint import RotMark
from fairway.storage.log import Damaged, Log
from fairway.storage.record import BadRecord, Record, RecordHeader, RecordKind
from fairway.storage.segment import STALE, Damage, SegmentScan

# --- on the master ---------------------------------------------------------------------------------------------------

_RECENT_BYTES = 16 * limits.MIB  # of the log's end: taken to be in memory where the disk cannot tell
_TAIL_BYTES = limits.MIB  # of the log's end, whose records are compared one by one, whatever a checkpoint covers
_HEADERS_BYTES = segment.HEADER_BYTES + record.HEADER_BYTES  # the least to read: enough to tell the first record's size
NO_MARK = (0, 0)
ROTTEN_MARK = (0, 1)  # a record may have begun there, and has rotted


class SegmentChunk(NamedTuple):
    """A stretch of one segment: whole records; the segment's header comes before its first."""

    base: int
    position: int
    data: bytes


ChunkRead: TypeAlias = Callable[[SegmentChunk | Damaged | StorageFault], None]


def read_chunk(log: Log, position: int, bytes_max: int) -> SegmentChunk | None:
    """Synced records from `position` on: one at least, and as many as fit. None: nothing yet. `Damaged` where no intact
    record begins, or none is stored any more."""
    if position >= log.synced_end:
        return None
    base, limit = _extent(log, position)
    data = log.read(position, min(max(bytes_max, _HEADERS_BYTES), limit))
    size = _whole_bytes(log, base, position, data)
    if size == 0 and len(data) < limit:
        data = log.read(position, min(_bytes_of_first(log, base, position, data), limit))
        size = _whole_bytes(log, base, position, data)
    if size == 0:
        raise Damaged(position, "cut short")
    return SegmentChunk(base, position, data[:size])


def read_warm_chunk(log: Log, position: int, bytes_max: int) -> SegmentChunk | None:
    """The same without waiting for the device: as many records as memory holds. None: no record, or nothing yet."""
    if position >= log.synced_end:
        return None
    base, limit = _extent(log, position)
    read = log.read_recent if position >= log.synced_end - _RECENT_BYTES else log.read_cached
    wanted = min(max(bytes_max, _HEADERS_BYTES), limit)
    data = read(position, wanted) or b""
    size = _whole_bytes(log, base, position, data)
    if size == 0 and len(data) == wanted < limit:  # memory had everything asked for, but the first record is larger
        data = read(position, min(_bytes_of_first(log, base, position, data), limit)) or b""
        size = _whole_bytes(log, base, position, data)
    return SegmentChunk(base, position, data[:size]) if size else None


def fetch_chunk(log: Log, position: int, bytes_max: int, done: ChunkRead) -> None:
    """`read_chunk` for synced bytes, off the loop; then call `done` with the chunk or the error."""
    base, limit = _extent(log, position)

    def fetched(found: bytes | StorageFault, *, is_again: bool = False) -> None:
        if isinstance(found, StorageFault):
            done(found)
            return
        try:
            size = _whole_bytes(log, base, position, found)
            if size == 0 and (is_again or len(found) >= limit):
                raise Damaged(position, "cut short")
            if size == 0:  # the first record is larger
                wanted = min(_bytes_of_first(log, base, position, found), limit)
                log.fetch(position, wanted, partial(fetched, is_again=True))
                return
        except Damaged as damaged:
            done(damaged)
            return
        done(SegmentChunk(base, position, found[:size]))

    log.fetch(position, min(max(bytes_max, _HEADERS_BYTES), limit), fetched)


def _extent(log: Log, position: int) -> tuple[int, int]:
    """The base of the segment there, and how many bytes are synced from `position` on."""
    of = log.segment_at(position)
    return of.base, min(of.end, log.synced_end) - position


def _whole_bytes(log: Log, base: int, position: int, data: bytes) -> int:
    """How many bytes are whole records, up to the first damaged one; `Damaged` if the first is damaged."""
    at = first = _header_bytes(log, base, position, data)
    while len(data) - at >= record.HEADER_BYTES:
        try:
            header = record.parse_header(data, at, position + at, log.log_id)
            end = at + record.HEADER_BYTES + header.body_bytes
            if end > len(data):
                break
            record.check_body(header, data[at + record.HEADER_BYTES : end])
        except BadRecord as bad:
            if at == first:
                raise Damaged(position + at, bad.why) from bad
            break
        at = end
    return at if at > first else 0


def _header_bytes(log: Log, base: int, position: int, data: bytes) -> int:
    if position != base:
        return 0
    if len(data) >= segment.HEADER_BYTES:
        try:
            is_sound = segment.parse_header(data) == (log.log_id, base)
        except RemoteProtocolError:
            is_sound = False
        if not is_sound:
            raise Damaged(position, "segment header")
    return segment.HEADER_BYTES


def _bytes_of_first(log: Log, base: int, position: int, data: bytes) -> int:
    """How many bytes from `position` on hold the first record there, whose header is in the data."""
    skip = segment.HEADER_BYTES if position == base else 0
    return skip + record.HEADER_BYTES + _header_in(log, data[skip:], position + skip).body_bytes


def _header_in(log: Log, data: bytes, position: int) -> RecordHeader:
    try:
        return record.parse_header(data, 0, position, log.log_id)
    except (BadRecord, WrongDirectory) as bad:
        raise Damaged(position, str(bad)) from bad


def mark(log: Log, position: int) -> tuple[int, int]:
    """Epoch and header checksum of the record that begins there; (0, 0) if no record does, or it is not synced."""
    try:
        data = log.read(position, record.HEADER_BYTES)
        header = _header_in(log, data, position)
    except Damaged:
        return NO_MARK
    return (header.epoch, int.from_bytes(data[-4:], "little")) if header.end <= log.synced_end else NO_MARK


def marks(log: Log, places: Iterable[int], rotten: Iterable[RotMark]) -> list[tuple[int, int]]:
    """The marks at several positions; `ROTTEN_MARK` where a known rotten span has none. Taken for a difference, that
    would cost another copy the bytes that only it still has."""
    spans = [each for each in rotten if each.log == log.directory]
    found = [(position, mark(log, position)) for position in places]
    return [
        ROTTEN_MARK if seen == NO_MARK and any(each.touches(position, position + 1) for each in spans) else seen
        for position, seen in found
    ]


def positions(log: Log, start: int, end: int) -> list[int]:
    """Where records begin, from `start` to before `end`. Neither need be the start of a record."""
    found: list[int] = []
    for each in log.segments:
        begin, limit = max(start, each.base + segment.HEADER_BYTES), min(end, each.end, log.synced_end)
        if begin < limit:
            scan = SegmentScan(log.file(each), each.base, begin + -begin % record.ALIGNMENT, log.log_id, limit=each.end)
            found += _before(scan, limit)
    return found


def _before(scan: SegmentScan, limit: int) -> Iterable[int]:
    for each in scan:
        if each.header is None or (isinstance(each, Damage) and each.why == STALE):
            continue
        if each.header.position >= limit:
            return
        yield each.header.position


def tail_positions(log: Log, covered_end: int) -> list[int]:
    """Own records to compare with another copy's, to find the last shared one: every record from `covered_end` on and
    from 1 MiB before the end; of earlier segments, the first record of each."""
    start = min(covered_end, max(log.synced_end - _TAIL_BYTES, 0))
    firsts = [each.base + segment.HEADER_BYTES for each in log.segments if each.base + segment.HEADER_BYTES < start]
    return [each for each in firsts if mark(log, each) != NO_MARK] + positions(log, start, log.synced_end)


# --- on the replica --------------------------------------------------------------------------------------------------

_ACTION_KINDS = frozenset(int(kind) for kind in ActionKind)


class AcceptedBytes(NamedTuple):
    """Bytes of a master that continue this copy's log."""

    header_bytes: int  # of the segment's header, where a segment begins
    records: list[Record]


def check(log: Log, base: int, position: int, data: bytes) -> AcceptedBytes:
    """The records in `data`, which must continue this log; `RemoteProtocolError` says why they do not."""
    if position != log.end:
        raise RemoteProtocolError(
            f"bytes of {log.directory} at {position} do not follow on a copy that ends at {log.end}"
        )
    header_bytes = _check_place(log, base, position, data)
    records: list[Record] = []
    at, epoch = header_bytes, log.epoch
    while at < len(data):
        found = record_of(log, data, at, position + at)
        if found.header.epoch < epoch:
            raise RemoteProtocolError(f"the record at {position + at} is of epoch {found.header.epoch}, after {epoch}")
        _check_content(log, found)
        epoch = found.header.epoch
        at += record.HEADER_BYTES + found.header.body_bytes
        records.append(found)
    if not records:
        raise RemoteProtocolError(f"no record came for {log.directory} at {position}")
    return AcceptedBytes(header_bytes, records)


def _check_place(log: Log, base: int, position: int, data: bytes) -> int:
    """The length of the segment header in front; 0 where the bytes continue the newest segment."""
    if position == base:
        if segment.parse_header(data) != (log.log_id, base):
            raise RemoteProtocolError(f"the segment at {base} of {log.directory} belongs to another log or place")
        return segment.HEADER_BYTES
    newest = log.segments[-1] if log.segments else None
    if newest is None or newest.base != base:
        raise RemoteProtocolError(f"there is no segment {base} at the end of {log.directory} to go on with")
    if newest.end != position:
        raise RemoteProtocolError(
            f"{log.directory} lacks what lies from {newest.end} to {position}: mend it before it goes on"
        )
    return 0


def size_of(log: Log, data: bytes, at: int, position: int) -> int:
    """The length of the record at `at` of the data, from its header, which must belong at `position`."""
    try:
        return record.HEADER_BYTES + record.parse_header(data, at, position, log.log_id).body_bytes
    except (BadRecord, WrongDirectory) as bad:
        raise RemoteProtocolError(f"no record of {log.directory} came for {position}: {bad}") from bad


def record_of(log: Log, data: bytes, at: int, position: int) -> Record:
    """The record at `at` of the data, which must belong at `position`."""
    try:
        return record.parse(data, at, position, log.log_id)
    except BadRecord as bad:
        raise RemoteProtocolError(f"no intact record of {log.directory} came for {position}: {bad.why}") from bad
    except WrongDirectory as newer:
        raise RemoteProtocolError(f"the master is of a newer version: {newer}") from newer


def _check_content(log: Log, found: Record) -> None:
    """Check that the views will be able to read the record."""
    check_body = _CHECKS.get(log.directory, {}).get(found.header.kind)
    if check_body is None:
        raise RemoteProtocolError(f"a record of kind {found.header.kind} does not belong into {log.directory}")
    check_body(found)


def _check_batch(found: Record) -> None:
    if batch.peek(found.body).count != found.header.count:
        raise RemoteProtocolError(f"the record at {found.header.position} does not hold {found.header.count} messages")


def _check_actions(found: Record) -> None:
    unknown = [each.kind for each in action_log.walk(found.body) if each.kind not in _ACTION_KINDS]
    if unknown:
        raise RemoteProtocolError(
            f"action kind {unknown[0]} is not known here: use the master's version, or a newer one"
        )


_CHECKS: dict[str, dict[int, Callable[[Record], object]]] = {
    "messages": {
        RecordKind.DATA: _check_batch,
        RecordKind.SUBJECT: lambda found: list(subjects.unpack(found.body)),
        RecordKind.STREAM: lambda found: dedupe.unpack_statement(found.body),
        RecordKind.REMOVED: lambda found: subjects.unpack_removal(found.body),
        RecordKind.EPOCH: lambda _: None,  # it is empty
    },
    "actions": {
        RecordKind.ACTIONS: _check_actions,
        RecordKind.NAMES: _check_actions,
        RecordKind.GROUPS: lambda found: action_log.unpack_groups(found.body),
        RecordKind.DISPATCH: lambda _: None,  # only the delay server can check it
        RecordKind.EPOCH: lambda _: None,
    },
}
