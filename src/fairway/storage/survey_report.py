"""The report of a survey of a data directory: plain values, in the shape that `fairway inspect --json` prints.

The shape is a promise to programs. A field may be added; none changes its meaning or goes away without a new `shape`
number. Positions count bytes of a log. Times are milliseconds since 1970. Ids of directories and logs are 16
hexadecimal digits, because a JSON number cannot hold 64 bits everywhere. `docs/how-to/operations.md` explains the
report to operators.
"""

from __future__ import annotations

import msgspec

SHAPE = 1

ROTTEN = "rotten"  # below the synced end: the disk has lost what it once had
TORN = "torn"  # above the synced end: a crash left an unfinished tail, which the next start cuts and keeps aside
INVALID = "invalid"  # the checksums hold, but the content breaks its format: no disk does that


class SegmentReport(msgspec.Struct):
    """One file of a log. The fields about records are None where it holds no record."""

    file: str
    base: int
    end: int
    records: int = 0
    first_appended_ms: int | None = None
    last_appended_ms: int | None = None
    first_epoch: int | None = None
    last_epoch: int | None = None
    index: str | None = None  # sound, none (not due yet), missing, stale, unreadable, lying; None in the action log


class LogReport(msgspec.Struct):
    """One log. Records from a torn tail on are not counted: the next start cuts them off."""

    id: str
    first_base: int
    end: int
    synced_end: int
    records: dict[str, int] = {}  # by kind
    segments: list[SegmentReport] = []


class SubjectReport(msgspec.Struct):
    """One subject. `first_sequence` is that of the oldest stored batch; None if there is no batch."""

    id: int
    name: str
    next_sequence: int = 0
    first_sequence: int | None = None
    batches: int = 0
    messages: int = 0
    bytes: int = 0


class GroupReport(msgspec.Struct):
    """One group, as far as the action log knows it."""

    id: int
    first_ms: int
    last_ms: int
    actions: dict[str, int] = {}  # by kind
    subjects: list[int] = []


class CheckpointReport(msgspec.Struct):
    """One checkpoint; the ends are how far it covers each log."""

    file: str
    why_unreadable: str | None = None
    epoch: int | None = None
    messages_end: int | None = None
    actions_end: int | None = None


class DamageReport(msgspec.Struct):
    """A damaged span of a log. Subject, sequence and count are known where the record's header survived."""

    log: str
    file: str
    start: int
    end: int
    verdict: str
    why: str
    is_known: bool = False  # a checkpoint lists it already
    subject: str | None = None
    first_sequence: int | None = None
    messages: int | None = None


class FlawReport(msgspec.Struct):
    """A file beside the logs that is not as it should be. No message is lost with it."""

    file: str
    why: str
    remedy: str


class RecordReport(msgspec.Struct):
    """One record of a log."""

    log: str
    position: int
    bytes: int
    kind: str
    epoch: int
    synced_end: int
    appended_ms: int
    count: int
    subject: str | None = None
    first_sequence: int | None = None


class AsideReport(msgspec.Struct):
    """A file in `aside/`: a tail that was cut off, or a segment of a replica that was reset."""

    file: str
    bytes: int


class DirectorySurvey(msgspec.Struct):
    """The whole report."""

    shape: int
    format_version: int
    directory_id: str | None  # None: the identity is lost, the next start makes a new one
    owner: int | None  # the process that uses the directory; 0 if that process did not give its id
    is_verified: bool  # batches were opened and views compared, not only checksums
    is_sound: bool
    bytes_read: int
    messages: LogReport
    actions: LogReport
    subjects: list[SubjectReport] = []
    groups: list[GroupReport] = []
    checkpoints: list[CheckpointReport] = []
    damages: list[DamageReport] = []
    flaws: list[FlawReport] = []
    aside: list[AsideReport] = []
    remarks: list[str] = []  # worth knowing, nothing wrong
    records: list[RecordReport] = []  # the newest ones, as many as were asked for
    delay: DirectorySurvey | None = None  # of the delay server inside, in the folder `delay`
