"""The books as a page: is everything in order, what came when, how long it took, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from fairway.spark.jobs import plots
from fairway.spark.jobs.balance import MS, Book, Options, Result
from fairway.spark.jobs.page import Column, Figure, Page, Section, State
from fairway.spark.jobs.plots import Series
from fairway.spark.jobs.scales import SECONDS

_COUNTS: Final = (
    "sent", "stored", "scheduled", "unsent", "missing", "duplicates", "delivered", "acked", "retried", "dead",
    "outstanding", "skipped", "lost", "late", "stuck",
)  # fmt: skip
_OF_SUBJECT: Final = ("stored", "missing", "duplicates")
_OF_GROUP: Final = ("acked", "dead", "outstanding")
_GROUPS_MAX: Final = 20  # with plots of their own: a page of hundreds is read by nobody


def page(result: Result, options: Options) -> Page:
    """All of a result."""
    about = f"{options.url}, {result.at:%Y-%m-%d %H:%M:%S} UTC, windows of {SECONDS.shown(result.window_s)}"
    made = Page(f"Books of {', '.join(options.subjects)}", about)
    made.figures(_balance(result), *_figures(result))
    for each in result.notes:
        made.warn(each)
    _books(made.section("Books", "Every group of every subject, as a whole."), result.books)
    _findings(made.section("Findings"), result)
    for subject in dict.fromkeys(each.subject for each in result.windows):
        _subject(made, subject, [each for each in result.windows if each.subject == subject], result)
    return made


def _balance(result: Result) -> Figure:
    if result.is_balanced:
        return Figure("The books", "balance", "nothing is missing, duplicate, late or stuck", State.GOOD)
    return Figure("The books", "do not balance", "see the findings", State.BAD)


def _figures(result: Result) -> Iterable[Figure]:
    for kind, number in result.counts.items():
        yield Figure(kind.capitalize(), f"{number:,}", state=State.BAD if number else State.PLAIN)


def _books(section: Section, books: Sequence[Book]) -> None:
    latencies = ("ack_p50_ms", "ack_p95_ms", "ack_p99_ms", "total_p50_ms", "total_p95_ms", "total_p99_ms")
    head: list[str | Column] = [
        "subject",
        "group",
        *(Column(name) for name in _COUNTS),
        *(Column(name.removesuffix("_ms").replace("_p", " p"), SECONDS) for name in latencies),
    ]
    rows = [
        [
            each.subject,
            each.group,
            *(getattr(each, name) for name in _COUNTS),
            *(_seconds(getattr(each, name)) for name in latencies),
        ]
        for each in books
    ]
    section.table(head, rows, "ack: from storing to the ack; total: from creation to the ack.")


def _findings(section: Section, result: Result) -> None:
    if not any(result.counts.values()):
        section.text("There are none.")
        return
    head = ["kind", "reason", "subject", "group", "id", "sequence", "since", "consumer", "detail", "remedy"]
    rows = [
        [
            each.kind, each.reason, each.subject, each.group, each.id,
            None if each.sequence is None else str(each.sequence), each.since, each.consumer, each.detail, each.remedy,
        ]
        for each in result.findings
    ]  # fmt: skip
    section.table(head, rows, "The first of each kind; the figures above count all of them.")


def _subject(made: Page, subject: str, windows: Sequence[Book], result: Result) -> None:
    """What came when; and for each group what became of it, and how long it took."""
    section = made.section(subject)
    once = {each.window: each for each in windows}  # what is counted of the subject is in every group's row
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


def _series(books: Iterable[Book], name: str) -> Series:
    return Series(name, [(at, getattr(each, name)) for at, each in _timed(books)])


def _timed(books: Iterable[Book]) -> list[tuple[datetime, Book]]:
    return [(each.window, each) for each in books if each.window is not None]


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / MS
