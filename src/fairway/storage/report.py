"""What a survey of a data directory says: plain values, in the shape that `fairway inspect --json` prints.

The shape is a promise to programs: a field may be added, none changes its meaning or goes away without a new `shape`
number. Positions count bytes of a log, times are milliseconds since 1970, ids of directories and logs are 16
hexadecimal digits (a JSON number cannot hold 64 bits everywhere). `docs/operations.md` explains it to operators.
"""

from __future__ import annotations

import msgspec

SHAPE = 1

ROTTEN = "rotten"  # below the synced end: the disk has lost what it once had
TORN = "torn"  # above it: a crash left an unfinished tail, which the next start cuts and keeps aside
INVALID = "invalid"  # the checksums hold, but the content breaks its format: no disk does that


class SegmentReport(msgspec.Struct):
    """One file of a log; what it holds of records is None where it holds none."""

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
    """One log. What lies from a torn tail on is not counted: the next start cuts it off."""

    id: str
    first_base: int
    end: int
    synced_end: int
    records: dict[str, int] = {}  # by kind
    segments: list[SegmentReport] = []


class SubjectReport(msgspec.Struct):
    """One subject. `first_sequence` is that of the oldest batch that is still there; None if there is no batch."""

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
    """A file beside the logs that is not what it should be. No message is lost with it."""

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
    """A torn tail that an earlier start cut off and kept."""

    file: str
    bytes: int


class DirectorySurvey(msgspec.Struct):
    """All of it."""

    shape: int
    format_version: int
    directory_id: str | None  # None: the identity is lost, the next start makes a new one
    owner: int | None  # the process that uses the directory; 0 where it did not say which one it is
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
