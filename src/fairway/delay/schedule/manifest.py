"""Manifest of the schedule log: which buckets there are, and how far the message log is in them. Also the calendar.

The manifest is one small file, replaced as a whole. It is kept twice, written one after the other, and nothing that
rests on a manifest is done before both are written. So each of the two is valid by itself after a crash at any time,
and a start uses the one that can be read. If a start has no room for the copy, it removes the old copy and goes on.

A bucket that the manifest does not name does not exist: a start deletes its file. Therefore a split is one step, a
manifest that names the new buckets and not the old one. Therefore also `moved_end` is sound: everything in the message
log below it is in buckets that this manifest names, synced. A start moves only what lies above.

The calendar divides time into spans in UTC: hours soon, then days, then months. It is a pure function of the clock.
Each span has one bucket, so about a hundred buckets hold two years. A month is split into days when its first day comes
near, a day into hours. Spans only become finer: what belongs to a day now belongs to an hour of the same day later. UTC
has no summer time, so no hour is missing or doubled.

    month   begins at least DAYS_AHEAD_MS from now      at most 24 + 1 of them in two years
    day     begins at least HOURS_AHEAD_MS from now     the rest of this month, and the next month in its last days
    hour    everything else: today and tomorrow         at most 48, and past hours that are not finished yet
"""

from __future__ import annotations

import enum
import struct
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fairway.batch import checksum
from fairway.delay.schedule.batch_arrays import split_by
from fairway.errors import Code, DiskFull, NoSuchFile, Refused, RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import Disk, Part, contents

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
HOURS_AHEAD_MS = DAY_MS
DAYS_AHEAD_MS = 8 * DAY_MS


class Grain(enum.IntEnum):
    """The length of a span."""

    HOUR = 1
    DAY = 2
    MONTH = 3


class TimeRange(NamedTuple):
    """One span of time, its end exclusive."""

    grain: Grain
    start_ms: int
    end_ms: int


def span_of(due_ms: int, now_ms: int) -> TimeRange:
    """The span for a message with that due time. A message past its due time goes into the current span."""
    at_ms = max(due_ms, now_ms)
    month = _month(at_ms)
    if month.start_ms >= now_ms + DAYS_AHEAD_MS:
        return month
    day = _floor(at_ms, Grain.DAY, DAY_MS)
    if day.start_ms >= now_ms + HOURS_AHEAD_MS:
        return day
    return _floor(at_ms, Grain.HOUR, HOUR_MS)


class Calendar:
    """The spans from now on, in order, for many due times at once.

    The spans change only on the hour: every span begins on one, and is split a whole number of days before it begins.
    """

    def __init__(self) -> None:
        self._hour_ms = -1
        self._spans: list[TimeRange] = []
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)

    def sort(self, due_ms: NDArray[np.int64], now_ms: int) -> list[tuple[TimeRange, NDArray[np.int64]]]:
        """The spans of these due times, each with the indices of its messages."""
        at_ms = np.maximum(due_ms, now_ms)
        self._turn(now_ms, int(at_ms.max()))
        which = np.searchsorted(self._starts, at_ms, side="right") - 1
        return [(self._spans[number], part) for number, part in split_by(np.arange(len(which)), which)]

    def _turn(self, now_ms: int, until_ms: int) -> None:
        hour_ms = now_ms - now_ms % HOUR_MS
        if hour_ms != self._hour_ms:
            self._hour_ms = hour_ms
            self._spans = [span_of(now_ms, now_ms)]
        elif self._spans[-1].end_ms > until_ms:
            return
        while self._spans[-1].end_ms <= until_ms:
            self._spans.append(span_of(self._spans[-1].end_ms, now_ms))
        self._starts = np.array([each.start_ms for each in self._spans], np.int64)


def is_to_split(span: TimeRange, now_ms: int) -> bool:
    """Whether messages of that span belong to finer spans by now. A past span stays as it is."""
    return span.end_ms > now_ms and span_of(span.start_ms, now_ms).grain < span.grain


def check_horizon(due_ms: int, now_ms: int, horizon_ms: int) -> None:
    """`Refused` for a due time too far ahead. The server never shortens a due time silently."""
    if due_ms > now_ms + horizon_ms:
        days = horizon_ms // DAY_MS
        raise Refused(Code.BAD_REQUEST, f"due at {_say(due_ms)}: at most {days} days ahead are allowed")


def _say(at_ms: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).isoformat()


def _floor(at_ms: int, grain: Grain, length_ms: int) -> TimeRange:
    start_ms = at_ms - at_ms % length_ms
    return TimeRange(grain, start_ms, start_ms + length_ms)


def _month(at_ms: int) -> TimeRange:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    first = datetime(at.year, at.month, 1, tzinfo=UTC)
    start_ms = int(first.timestamp()) * 1_000
    if (at.year, at.month) == (9999, 12):  # datetime cannot express the month after it
        return TimeRange(Grain.MONTH, start_ms, start_ms + 31 * DAY_MS)
    following = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    return TimeRange(Grain.MONTH, start_ms, int(following.timestamp()) * 1_000)


DIRECTORY = "schedule"
NAME = f"{DIRECTORY}/manifest"
COPY = f"{DIRECTORY}/manifest.copy"
DAMAGED = f"{DIRECTORY}/manifest.damaged"  # a damaged manifest, kept for people to look at
MAGIC = b"FWYSCH\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQII")  # magic, version, header length, must, may, body length, body CRC, zero
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _COVERED.size + _CRC.size


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """One bucket file."""

    number: int
    log_id: int
    grain: int
    start_ms: int
    end_ms: int
    synced_end: int  # the file was synced up to here: damage below it is rot
    catalogue_at: int = 0  # where its newest catalogue lies; 0: none

    @property
    def span(self) -> TimeRange:
        return TimeRange(Grain(self.grain), self.start_ms, self.end_ms)


class Manifest(msgspec.Struct, frozen=True):
    """What a start needs to know of the schedule log."""

    messages_id: int  # the message log that sequences and `moved_end` refer to
    moved_end: int
    next_number: int  # of bucket files; a number is never used again
    buckets: list[BucketEntry]


def pack(manifest: Manifest) -> list[Part]:
    body = msgspec.msgpack.encode(manifest)
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, len(body), checksum(body), 0)
    return [covered, _CRC.pack(checksum(covered)), body]


def unpack(data: bytes) -> Manifest:
    """Raises `RemoteProtocolError` if the bytes are not valid, and `WrongDirectory` if a newer version wrote them."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("cut short")
    covered, body = data[: _COVERED.size], data[HEADER_BYTES:]
    magic, version, header_bytes, must, _, body_bytes, body_crc, _ = _COVERED.unpack(covered)
    if magic != MAGIC or data[_COVERED.size : HEADER_BYTES] != _CRC.pack(checksum(covered)):
        raise RemoteProtocolError("the header fails its checksum")
    if version != VERSION or must or header_bytes != HEADER_BYTES:
        raise WrongDirectory(
            f"{NAME} has format version {version}, newer than this program, which reads {VERSION}: "
            "use the version that wrote it"
        )
    if len(body) != body_bytes or checksum(body) != body_crc:
        raise RemoteProtocolError("the body fails its checksum")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the body cannot be read: {error}") from error


class Read(NamedTuple):
    """One of the two files, as it is on disk."""

    data: bytes
    manifest: Manifest | None  # None: not valid
    why: str = ""


def read(disk: Disk, name: str) -> Read | None:
    """None: the file does not exist."""
    try:
        data = contents(disk, name)
    except NoSuchFile:
        return None
    try:
        return Read(data, unpack(data))
    except RemoteProtocolError as error:
        return Read(data, None, str(error))


class Recovered(NamedTuple):
    """The manifest that a start uses."""

    manifest: Manifest
    why: str = ""  # what was wrong with the first file, if anything
    is_full: bool = False  # one of the two found no room: the next manifest repairs that
    name: str = NAME  # the file that it was read from


def read_or_make(disk: Disk, messages_id: int, messages_base: int) -> Recovered:
    """The manifest of this message log, which begins at `messages_base`. A first start writes an empty manifest, before
    there is a bucket, and before the message log has dropped anything. A full disk stops no later start."""
    first, copy = read(disk, NAME), read(disk, COPY)
    if first is not None and first.manifest is not None:
        found = _checked(disk, first.manifest, messages_id, messages_base)
        if found is not first.manifest or (copy is not None and copy.data == first.data):
            return Recovered(found)
        is_full = not _published(disk, COPY, first.data)
        if is_full:  # A start next deletes files that the old copy may still name: no copy is better than an old one.
            disk.remove(COPY)
        return Recovered(found, is_full=is_full)
    if copy is not None and copy.manifest is not None:
        return _restored(disk, first, copy, messages_id, messages_base)
    if first is not None:
        raise WrongDirectory(f"{NAME} is damaged ({first.why}), and so is its copy: restore it from a copy")
    if any(name.endswith(".log") for name in disk.listing(DIRECTORY)):
        raise WrongDirectory(f"{NAME} is missing but there are buckets: restore it from a copy")
    if messages_base > 0:
        raise WrongDirectory(
            f"{NAME} is missing, and the message log does not go back to the beginning: restore the folder "
            f"`{DIRECTORY}` from a copy"
        )
    return Recovered(_make(disk, messages_id))


def _restored(disk: Disk, first: Read | None, copy: Read, messages_id: int, messages_base: int) -> Recovered:
    """Use the copy, and put it in place of the first file as soon as there is room. Every bucket that it names must
    exist: an older version of this program may have gone on without writing the copy."""
    if copy.manifest is None:
        raise WrongDirectory(f"{COPY} is damaged")
    why = "it is missing" if first is None else f"it is damaged ({first.why})"
    names = disk.listing(DIRECTORY)
    lost = [each.number for each in copy.manifest.buckets if f"{each.number:020}.log" not in names]
    if lost:
        raise WrongDirectory(f"{NAME} cannot be used: {why}, and its copy names a bucket that is gone: restore it")
    if first is not None:
        _published(disk, DAMAGED, first.data)  # only people need it
    is_full = not _published(disk, NAME, copy.data)
    found = _checked(disk, copy.manifest, messages_id, messages_base)
    if is_full:
        return Recovered(found, f"{why}: its copy is used, and takes its place when there is room", is_full, COPY)
    return Recovered(found, f"{why}: its copy took its place")


def _published(disk: Disk, name: str, data: bytes) -> bool:
    """Publish a file; False if the disk is full."""
    try:
        disk.publish(name, [data])
    except DiskFull:
        return False
    return True


def _checked(disk: Disk, found: Manifest, messages_id: int, messages_base: int) -> Manifest:
    if found.messages_id == messages_id:
        return found
    if messages_base == 0 and found == _first(found.messages_id):  # it has taken over a group's logs
        return _make(disk, messages_id)
    raise WrongDirectory(
        f"{NAME} belongs to another message log: give the delay server the directory it has always had"
    )


def _first(messages_id: int) -> Manifest:
    return Manifest(messages_id, 0, 1, [])


def _make(disk: Disk, messages_id: int) -> Manifest:
    for name in (NAME, COPY):
        disk.publish(name, pack(_first(messages_id)))
    return _first(messages_id)
