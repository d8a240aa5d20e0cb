"""The HTML page of a reconciliation: whether all is in order, what came when, how long it took, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from fairway.spark.jobs import plots
from fairway.spark.jobs.findings import DIFFERING, DUPLICATE, LATE, MISSING, STRANGER, STUCK
from fairway.spark.jobs.page import Cell, Column, Figure, FigureStatus, Head, HtmlPage, IdColumn, Section
from fairway.spark.jobs.plots import SECONDS, Series
from fairway.spark.jobs.reconcile_options import MS, Discrepancy, GroupBalance, ReconcileOptions, ReconcileResult

# What each column of the balances counts.
_COUNTS: Final = {
    "sent": "business rows; without them what is stored, what left a hole, and what is unsent",
    "stored": "messages in the log",
    "scheduled": "messages that wait at the delay server",
    "unsent": "messages that outboxes and spools hold",
    "missing": "messages that should be there, and are not",
    "duplicates": "messages that are there more often than once",
    "delivered": "messages that the group was handed at least once",
    "acked": "messages that the group is done with",
    "retried": "messages that a consumer gave back as failed, once or more",
    "dead": "messages in dead letter",
    "outstanding": "messages that the group is owed: waiting, in hand, returned, retrying, dying",
    "skipped": "messages that are not for the group: before its beginning, without its tags, passed over by a seek",
    "lost": "messages that retention took before the group had them",
    "late": "findings of that kind in the group",
    "stuck": "findings of that kind in the group",
}
_ALWAYS: Final = frozenset({"sent", "stored", "delivered", "acked", "outstanding"})  # shown even if they are all zero
_LATENCIES: Final = {
    "ack_p50_ms": "ack p50",
    "ack_p95_ms": "ack p95",
    "ack_p99_ms": "ack p99",
    "total_p50_ms": "total p50",
    "total_p95_ms": "total p95",
    "total_p99_ms": "total p99",
}
_OF_SUBJECT: Final = ("stored", "missing", "duplicates")
_OF_GROUP: Final = ("acked", "dead", "outstanding")
_GROUPS_MAX: Final = 20  # with plots of their own: a page of hundreds is too long to read


def page(result: ReconcileResult, options: ReconcileOptions) -> HtmlPage:
    """The page of a result."""
    about = f"{options.url}, {result.at:%Y-%m-%d %H:%M:%S} UTC, windows of {SECONDS.shown(result.window_s)}"
    made = HtmlPage(f"Books of {', '.join(options.subjects)}", about)
    made.figures(_balance(result), *_figures(result, options))
    for each in result.notes:
        made.warn(each)
    _books(made.section("Books", "Every group of every subject, as a whole."), result.books)
    _findings(made.section("Findings"), result)
    for subject in dict.fromkeys(each.subject for each in result.windows):
        _subject(made, subject, [each for each in result.windows if each.subject == subject], result)
    return made


def _balance(result: ReconcileResult) -> Figure:
    if result.is_balanced:
        return Figure("The books", "balance", "nothing is missing, duplicate, late or stuck", FigureStatus.GOOD)
    return Figure("The books", "do not balance", "see the findings", FigureStatus.BAD)


def _figures(result: ReconcileResult, options: ReconcileOptions) -> Iterable[Figure]:
    meanings = {
        MISSING: "should be there, and is not",
        DUPLICATE: "is there more often than once",
        LATE: f"delivered or acked more than {SECONDS.shown(options.late_after_s)} after it was stored",
        STUCK: f"in hand, or waiting, for more than {SECONDS.shown(options.stuck_after_s)}",
        STRANGER: "stored, and no business row says so",
        DIFFERING: "the log, and the archive or the broker, disagree",
    }
    for kind, number in result.counts.items():
        state = FigureStatus.BAD if number else FigureStatus.PLAIN
        yield Figure(kind.capitalize(), f"{number:,}", meanings.get(kind, ""), state)


def _books(section: Section, books: Sequence[GroupBalance]) -> None:
    names = [name for name in _COUNTS if name in _ALWAYS or any(getattr(each, name) for each in books)]
    zero = [name for name in _COUNTS if name not in names]
    left_out = f"Zero everywhere, and left out: {', '.join(zero)}." if zero else ""
    section.table(
        ["subject", "group", *map(Column, names)],
        [[each.subject, each.group, *(getattr(each, name) for name in names)] for each in books],
        f"How many messages. {left_out}".rstrip(),
    )
    section.terms("What the columns count", _COUNTS)
    timed = [each for each in books if each.ack_p50_ms is not None]
    section.table(
        ["subject", "group", *(Column(name, SECONDS) for name in _LATENCIES.values())],
        [[each.subject, each.group, *(_seconds(getattr(each, name)) for name in _LATENCIES)] for each in timed],
        "How long it took half (p50), 95 % and 99 % of what was acked. ack: from storing to the ack; total: from "
        "creation to the ack.",
    )


def _findings(section: Section, result: ReconcileResult) -> None:
    """A table for each reason, with the remedy above it; columns without a value are left out."""
    if not any(result.counts.values()):
        section.text("There are none.")
        return
    section.text("The first of each kind; the figures at the top count all of them.")
    for kind, reason, remedy in dict.fromkeys((each.kind, each.reason, each.remedy) for each in result.findings):
        section.heading(f"{kind.capitalize()}: {reason}")
        section.text(f"What to do: {remedy}.")
        found = [_told(each) for each in result.findings if (each.kind, each.reason) == (kind, reason)]
        places = [place for place in range(len(_FINDING)) if any(row[place] is not None for row in found)]
        section.table([_FINDING[place] for place in places], [[row[place] for place in places] for row in found])


_FINDING: Final[tuple[Head, ...]] = (
    "subject", "group", IdColumn("id"), "key", IdColumn("sequence"), Column("messages"), "since", "consumer", "detail",
)  # fmt: skip


def _told(finding: Discrepancy) -> list[Cell]:
    """A row under `_FINDING`. The number of messages is left out if it is 1."""
    sequence = None if finding.sequence is None else str(finding.sequence)
    messages = finding.messages if finding.messages != 1 else None
    return [
        finding.subject, finding.group, finding.id, finding.key, sequence, messages, finding.since, finding.consumer,
        finding.detail,
    ]  # fmt: skip


def _subject(made: HtmlPage, subject: str, windows: Sequence[GroupBalance], result: ReconcileResult) -> None:
    """The section of a subject: what came when, and for each group what became of it, and how long it took."""
    section = made.section(subject)
    once = {each.window: each for each in windows}  # every group's row repeats the subject's counts
    section.plot(
        plots.columns(
            "Stored in each window, and what is missing or double there.",
            [_series(once.values(), name) for name in _OF_SUBJECT],
            result.window_s,
            unit="messages",
        )
    )
    groups = [each for each in dict.fromkeys(each.group for each in windows) if each is not None]
    for group in groups[:_GROUPS_MAX]:
        of_group = [each for each in windows if each.group == group]
        section.plot(
            plots.columns(
                f"{group}: what became of the messages of each window.",
                [_series(of_group, name) for name in _OF_GROUP],
                result.window_s,
                unit="messages",
            )
        )
        section.plot(
            plots.lines(
                f"{group}: from storing to the ack, for half, 95 % and 99 % of the messages of a window.",
                [
                    Series(name, [(at, _seconds(getattr(each, f"ack_{name}_ms"))) for at, each in _timed(of_group)])
                    for name in ("p50", "p95", "p99")
                ],
                SECONDS,
            )
        )
    if len(groups) > _GROUPS_MAX:
        section.text(f"{len(groups) - _GROUPS_MAX} more groups are in the table above alone.")


def _series(books: Iterable[GroupBalance], name: str) -> Series:
    return Series(name, [(at, getattr(each, name)) for at, each in _timed(books)])


def _timed(books: Iterable[GroupBalance]) -> list[tuple[datetime, GroupBalance]]:
    return [(each.window, each) for each in books if each.window is not None]


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / MS
