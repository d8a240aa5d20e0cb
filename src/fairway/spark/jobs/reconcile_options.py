"""The options and the result of `reconcile`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from fairway.errors import Misuse
from fairway.spark.options import DEFAULT_URL, PATIENCE_S

ID, KEY, HEADER = "id", "key", "header:"  # parts of a message that may hold the id of its business row
MS: Final = 1_000


@dataclass(frozen=True)
class ReconcileOptions:
    """What to compare, and what counts as wrong."""

    subjects: tuple[str, ...]  # names, and patterns such as orders.*
    url: str = DEFAULT_URL
    archive: str | None = None  # to compare with the log
    since: datetime | None = None  # messages that were stored then or later
    until: datetime | None = None  # and before
    groups: tuple[str, ...] = ()  # empty: all
    window_s: float = 3_600.0
    late_after_s: float = 60.0
    stuck_after_s: float = 300.0
    sent: str | None = None  # business rows: a path, or a table
    sent_format: str | None = None  # None: by the ending of the path
    match: str = ID
    is_strict: bool = False  # a message without a business row breaks the balance, too
    top: int = 20  # findings of each kind to name
    output: str | None = None  # a directory for all findings and balances, as Parquet
    html: str | None = None
    patience_s: int = PATIENCE_S
    # SQLAlchemy's addresses of databases, whose outboxes hold unsent messages; not shown, as they contain passwords
    outboxes: tuple[str, ...] = field(default=(), repr=False)
    outbox_table: str = "fairway_outbox"
    spools: tuple[str, ...] = ()  # directories on the driver's machine that hold unsent messages

    def __post_init__(self) -> None:
        if self.window_s < 1:
            raise Misuse(f"a window of {self.window_s:g} s: it is a second at least")
        for name, value in (("late_after_s", self.late_after_s), ("stuck_after_s", self.stuck_after_s)):
            if value < 0:
                raise Misuse(f"{name} of {value:g}: it is 0 at least")
        if self.match not in {ID, KEY} and not (needs_headers(self.match) and self.match != HEADER):
            raise Misuse(f"--match {self.match!r}: rows are found by id, by key, or by header:NAME")

    @property
    def window_ms(self) -> int:
        return round(self.window_s * MS)

    @property
    def late_after_ms(self) -> int:
        return round(self.late_after_s * MS)

    @property
    def stuck_after_ms(self) -> int:
        return round(self.stuck_after_s * MS)


@dataclass(frozen=True)
class Discrepancy:
    """A finding."""

    kind: str  # missing, duplicate, late, stuck, stranger, differing
    reason: str
    subject: str | None
    group: str | None
    id: str | None
    key: str | None
    sequence: int | None
    messages: int
    since: datetime | None
    consumer: str | None
    detail: str | None
    remedy: str


@dataclass(frozen=True)
class GroupBalance:
    """One group of a subject (None: the subject has no groups), in total or in one window. The page
    `docs/how-to/reconcile.md` says what each field counts."""

    subject: str
    group: str | None
    window: datetime | None
    sent: int
    stored: int
    scheduled: int
    unsent: int
    missing: int
    duplicates: int
    delivered: int
    acked: int
    retried: int
    dead: int
    outstanding: int
    skipped: int
    lost: int
    late: int
    stuck: int
    ack_p50_ms: int | None
    ack_p95_ms: int | None
    ack_p99_ms: int | None
    total_p50_ms: int | None
    total_p95_ms: int | None
    total_p99_ms: int | None


@dataclass
class ReconcileResult:
    is_balanced: bool
    at: datetime  # by the broker's clock
    window_s: float
    counts: dict[str, int]  # by kind of finding: messages for `missing`, findings for the others
    rows: dict[str, int] = field(default_factory=dict)  # by fate: the business rows
    books: list[GroupBalance] = field(default_factory=list)  # totals
    windows: list[GroupBalance] = field(default_factory=list)
    findings: list[Discrepancy] = field(default_factory=list)  # the first of each kind
    notes: list[str] = field(default_factory=list)


def needs_headers(match: str) -> bool:
    return match.startswith(HEADER)
