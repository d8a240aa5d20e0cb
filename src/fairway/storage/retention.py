"""Retention: how long a directory keeps messages, and which segments may go.

The file `retention` in the directory records the choice. A broker that begins new logs keeps messages for 168 hours,
and records that. A directory without the file is older than the default, or is a copy of another. It keeps messages for
ever until somebody chooses, so that an upgrade deletes nothing that was kept on purpose. A given choice
(`--keep-hours`) is recorded, and holds until the next one.

A copy that joins a group records nothing by itself: the master decides what goes, and a copy that takes over must not
delete what its group has kept. An empty directory may still become such a copy. So the default is recorded when the
first epoch of the logs begins, not when the directory is opened.

`plan` only decides which segments may go; the store carries the plan out. A segment goes when it is too old, or when
the log is too large without that. A segment with messages that a group has not finished stays, up to a ceiling: a group
that never comes back must not fill the disk. Segments above the ceiling are listed apart, because a group loses them
and an operator has to know.

Ages count from the effective time of a segment's last record (`log`). After a clock that was ahead, nothing is kept
longer than its age from the correction on.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from fairway import limits
from fairway.batch import checksum
from fairway.errors import Code, DiskFull, NoSuchFile, Refused, RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import Disk
from fairway.storage import log
from fairway.storage.segment import Segment

FILE = "retention"
MAGIC = b"FWYRET\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQ")  # magic, version, length of the file, must, may, age in ms; 0: for ever
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size
_HOUR_MS = 3_600_000

UNCHOSEN = (
    "no message is deleted for its age here: this directory was made before there was a default, or as a copy of "
    f"another, and nobody has chosen since; give --keep-hours {limits.KEEP_HOURS}, or --keep-hours forever"
)


class AgeSource(enum.Enum):
    """Where the greatest age of messages comes from."""

    OPTIONS = "options"  # the policy; the file is neither read nor written
    CHOICE = "choice"  # the policy, and the directory records it
    DIRECTORY = "directory"  # the directory's record


def settle(disk: Disk, policy: Policy, source: AgeSource, *, is_new: bool) -> tuple[Policy, list[str]]:
    """The policy in force, and warnings for the operator. `is_new`: the logs are empty and may be begun here; then
    `found` follows."""
    if source is AgeSource.OPTIONS:
        return policy, []
    if source is AgeSource.CHOICE:
        _record(disk, policy.age_ms_max)
        return policy, []
    try:
        return replace(policy, age_ms_max=_read(disk)), []
    except NoSuchFile:
        pass
    except RemoteProtocolError as error:
        return replace(policy, age_ms_max=None), [f"{FILE} is damaged ({error}): {UNCHOSEN}"]
    return replace(policy, age_ms_max=None), [] if is_new else [UNCHOSEN]


def found(disk: Disk, policy: Policy, source: AgeSource) -> tuple[Policy, list[str]]:
    """The same where new logs have just begun: without a choice, record the default and use it."""
    if source is AgeSource.DIRECTORY and FILE not in disk.listing(""):
        age_ms = limits.KEEP_HOURS * _HOUR_MS
        try:
            _record(disk, age_ms)
        except DiskFull as full:
            return policy, [f"{FILE} was not written: {full}; {UNCHOSEN}"]
        return replace(policy, age_ms_max=age_ms), []
    return policy, []


def pack(age_ms: int | None) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, FILE_BYTES, 0, 0, age_ms or 0)
    return covered + seal(covered)


def seal(covered: bytes) -> bytes:
    """The checksum, which goes behind everything else."""
    return _CRC.pack(checksum(covered))


def unpack(data: bytes) -> int | None:
    """The age; `RemoteProtocolError` where the file is damaged, `WrongDirectory` where a newer version wrote it."""
    if len(data) != FILE_BYTES:
        raise RemoteProtocolError("it has another length")
    covered = data[: _COVERED.size]
    magic, version, length, must, _, age_ms = _COVERED.unpack(covered)
    if magic != MAGIC or data[_COVERED.size : FILE_BYTES] != seal(covered):
        raise RemoteProtocolError("it fails its checksum")
    if version != VERSION or must or length != FILE_BYTES:
        raise WrongDirectory(f"{FILE} has format version {version}, this program reads {VERSION}: use a newer one")
    return age_ms or None


def _read(disk: Disk) -> int | None:
    with closing(disk.open(FILE)) as file:
        return unpack(file.read(0, FILE_BYTES))


def _record(disk: Disk, age_ms: int | None) -> None:
    """Write the file only if it changes: a start on a full disk need not write."""
    with suppress(NoSuchFile, RemoteProtocolError):
        if _read(disk) == age_ms:
            return
    disk.publish(FILE, [pack(age_ms)])


_log = logging.getLogger("fairway.store")
_ACTION_SEGMENTS = 3  # fewer action segments are not worth an early completion
_SEGMENTS_OF_AGE = 7  # with 168 hours, a segment of messages is complete after a day at the latest


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and how much to keep. None: without limit."""

    age_ms_max: int | None = None
    bytes_max: int | None = None
    owed_bytes_max: int | None = None  # the ceiling: a larger log drops even what a group still owes

    @property
    def is_limited(self) -> bool:
        """Whether any segment ever goes."""
        return any(each is not None for each in (self.age_ms_max, self.bytes_max, self.owed_bytes_max))


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The bases of the segments to delete, oldest first."""

    doomed: tuple[int, ...] = ()
    lost_to_groups: tuple[int, ...] = ()  # those of them with messages that a group had not finished


def early_completion_ms(policy: Policy, action_segments: int) -> int | None:
    """The age at which a segment of messages is completed although it has room left; None: never."""
    if policy.age_ms_max is None or action_segments < _ACTION_SEGMENTS:
        return None
    return policy.age_ms_max // _SEGMENTS_OF_AGE


def plan(
    segments: Sequence[Segment],
    now_ms: int,
    policy: Policy,
    owed_from: int | None = None,
    *,
    below: int | None = None,
) -> RetentionPlan:
    """Decide which segments go. `owed_from`: the lowest position that any group still owes. The newest segment always
    stays, and so does every segment that ends above `below`."""
    doomed: list[int] = []
    lost: list[int] = []
    for segment, newest_ms in zip(segments[:-1], log.effective_ms(segments), strict=False):
        if below is not None and segment.end > below:
            break
        bytes_left = segments[-1].end - segment.base
        is_old = policy.age_ms_max is not None and now_ms - newest_ms > policy.age_ms_max
        is_surplus = policy.bytes_max is not None and bytes_left > policy.bytes_max
        is_owed = owed_from is not None and segment.end > owed_from
        is_over_ceiling = policy.owed_bytes_max is not None and bytes_left > policy.owed_bytes_max
        if not (is_over_ceiling or ((is_old or is_surplus) and not is_owed)):
            break  # only a prefix can go: the log has no holes
        doomed.append(segment.base)
        if is_owed:
            lost.append(segment.base)
    return RetentionPlan(tuple(doomed), tuple(lost))


def nearly_full() -> Refused:
    """The refusal for producers while the disk has no room."""
    return Refused(Code.READ_ONLY, "the disk is nearly full: make room, or shorten retention", retry_after_ms=1_000)


def note_room(*, before: bool, now: bool) -> bool:
    """Log a change: the disk is nearly full, or has room again. Return `now`."""
    if now and not before:
        _log.warning("the disk has room again: messages are taken")
    elif before and not now:
        _log.warning(
            "the disk is nearly full: messages are refused, acknowledgements are taken; make room, or keep less"
        )
    return now
