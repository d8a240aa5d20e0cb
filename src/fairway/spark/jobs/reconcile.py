"""`fairway pipeline reconcile`: compares what was sent, stored, archived, delivered and acked; `run` and `command`.

The sides know nothing of one another: business rows, the log, an archive, and the action log, which has what groups
did. If one side has something that another lacks, that is a finding, named by subject, group, id and sequence. The job
writes only the output that is asked for. `fairway.spark.jobs` names the modules that compare the sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Final

import typer
from pyspark.sql import DataFrame, SparkSession

from fairway.client import core
from fairway.errors import Misuse
from fairway.spark.jobs import job, plots, producer_records, selection
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.findings import DIFFERING, DUPLICATE, LATE, MISSING, STRANGER, STUCK
from fairway.spark.jobs.job import ProgressListener, sentences, unwatched
from fairway.spark.jobs.page import Cell, Column, Figure, FigureStatus, Head, HtmlPage, IdColumn, Section
from fairway.spark.jobs.plots import SECONDS, Series
from fairway.spark.jobs.reconcile_options import MS, Discrepancy, GroupBalance, ReconcileOptions, ReconcileResult
from fairway.spark.jobs.reconciliation import Reconciliation
from fairway.spark.options import DEFAULT_URL, PATIENCE_S

__all__ = ["Discrepancy", "GroupBalance", "ReconcileOptions", "ReconcileResult", "command", "run"]

UNBALANCED: Final = 4  # the exit status of `fairway` commands that find something wrong
_DEFAULT: Final = ReconcileOptions(())


def run(
    spark: SparkSession, options: ReconcileOptions, rows: DataFrame | None = None, watch: ProgressListener = unwatched
) -> ReconcileResult:
    """Compare, and return what is wrong. `rows` are business rows as a frame, instead of `options.sent`."""
    with sentences("reconciling"):
        if options.output is not None and Files(spark, options.output).exists():
            raise Misuse(f"{options.output} is there already: name a new directory for --output")
        if rows is None and options.sent is not None:
            rows = producer_records.load_rows(spark, options.sent, options.sent_format)
        reconciliation = Reconciliation(spark, options, rows, watch)
        try:
            with job.sized(spark, reconciliation.size()):
                result = reconciliation.run()
        finally:
            reconciliation.close()
    if options.html is not None:
        page(result, options).write(options.html)
    return result


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: selection.Subjects,
    archive: Annotated[
        str | None, typer.Option("--archive", metavar="DIR", help="Hold this archive against the log.")
    ] = None,
    since: selection.Since = None,
    until: selection.Until = None,
    window: Annotated[str, typer.Option(metavar="SPAN", help=f"Length of a window: {core.SPAN_HELP}.")] = "1h",
    group: Annotated[
        list[str] | None, typer.Option("--group", metavar="GROUP", help="This group; may be repeated. Else all.")
    ] = None,
    late_after: Annotated[
        str, typer.Option(metavar="SPAN", help="Delivered or acked later than that is late.")
    ] = "60s",
    stuck_after: Annotated[
        str, typer.Option(metavar="SPAN", help="In hand, or without an ack, for longer than that is stuck.")
    ] = "5m",
    sent: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Business rows with id, and perhaps subject and sent_at: Parquet, CSV, JSON."
        ),
    ] = None,
    sent_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Of --sent: any that Spark reads, or table. (by its ending)")
    ] = None,
    outbox: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATABASE", help="What its outbox holds is not sent yet: SQLAlchemy's address; may be repeated."
        ),
    ] = None,
    outbox_table: Annotated[
        str, typer.Option(metavar="[SCHEMA.]NAME", help="Of --outbox: its table.")
    ] = _DEFAULT.outbox_table,
    spool: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="The same of a spool, a directory of this machine; may be repeated."),
    ] = None,
    match: Annotated[
        str, typer.Option(metavar="PART", help="What the id of a row is in a message: id, key or header:NAME.")
    ] = _DEFAULT.match,
    strict: Annotated[
        bool, typer.Option("--strict", help="A message without a business row breaks the balance, too.")
    ] = False,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Name so many findings of each kind.")] = _DEFAULT.top,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write all findings and books there, as Parquet.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """Sent, stored, delivered, acked: what is missing, duplicate, late or stuck. Exit status 4 if the books do not
    balance."""
    with job.failures("reconcile"):
        options = ReconcileOptions(
            tuple(subjects), url, archive, selection.moment(since, "since"), selection.moment(until, "until"),
            tuple(group or ()), _seconds(window), _seconds(late_after), _seconds(stuck_after),
            sent, sent_format, match, strict, top, output, html, patience_s,
            tuple(outbox or ()), outbox_table, tuple(spool or ()),
        )  # fmt: skip
    with job.running("reconcile", master, spark_log, is_quiet=json) as (spark, watch):
        result = run(spark, options, watch=watch)
    job.tell(result, json, _lines(result, options))
    if not result.is_balanced:
        raise typer.Exit(UNBALANCED)


def _seconds(span: str) -> float:
    return core.span(span).total_seconds()


def _lines(result: ReconcileResult, options: ReconcileOptions) -> list[str]:
    counts = ", ".join(f"{kind} {number:,}" for kind, number in result.counts.items())
    lines = [f"{'the books balance' if result.is_balanced else 'the books do not balance'}: {counts}"]
    lines.extend(map(_of_book, result.books))
    lines.extend(f"note: {each}" for each in result.notes)
    for each in result.findings:
        lines.append(f"{each.kind}: {_of_finding(each)}")
        lines.append(f"    {each.remedy}")
    if options.html is not None:
        lines.append(f"{options.html} shows it")
    return lines


def _of_book(book: GroupBalance) -> str:
    stored = f"{book.subject}: sent {book.sent:,}, stored {book.stored:,}, scheduled {book.scheduled:,}"
    stored += f", unsent {book.unsent:,}" if book.unsent else ""
    if book.group is None:
        return f"{stored}; no groups"
    took = "" if book.ack_p50_ms is None else f"; half within {book.ack_p50_ms:,} ms, 99 % within {book.ack_p99_ms:,}"
    return (
        f"{stored}; {book.group}: delivered {book.delivered:,}, acked {book.acked:,}, retried {book.retried:,}, "
        f"dead {book.dead:,}, outstanding {book.outstanding:,}{took}"
    )


def _of_finding(each: Discrepancy) -> str:
    """Where, what, and since when."""
    where = [
        *([each.subject] if each.subject else []),
        *([f"group {each.group}"] if each.group else []),
        *([each.id] if each.id else []),
        *([f"sequence {each.sequence}"] if each.sequence is not None else []),
    ]
    told = [
        each.reason,
        *([each.detail] if each.detail else []),
        *([f"consumer {each.consumer}"] if each.consumer else []),
        *([f"since {each.since:%Y-%m-%dT%H:%M:%S.%f}Z"] if each.since else []),
    ]
    return f"{' '.join(where)}: {', '.join(told)}"


# --- the page ---------------------------------------------------------------------------------------------------------

# What each column of the balances counts.
COUNTS: Final = {
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
_LATENCIES: Final = {f"{of}_{share}_ms": f"{of} {share}" for of in ("ack", "total") for share in ("p50", "p95", "p99")}
_OF_SUBJECT: Final = ("stored", "missing", "duplicates")
_OF_GROUP: Final = ("acked", "dead", "outstanding")
_GROUPS_MAX: Final = 20  # with plots of their own: a page of hundreds is too long to read


def page(result: ReconcileResult, options: ReconcileOptions) -> HtmlPage:
    """The page of a result."""
    about = f"{options.url}, {result.at:%Y-%m-%d %H:%M:%S} UTC, windows of {SECONDS.shown(result.window_s)}"
    made = HtmlPage(f"Books of {', '.join(options.subjects)}", about)
    made.figures(*_figures(result, options))
    for each in result.notes:
        made.warn(each)
    _books(made.section("Books", "Every group of every subject, as a whole."), result.books)
    _findings(made.section("Findings"), result)
    for subject in dict.fromkeys(each.subject for each in result.windows):
        _subject(made, subject, [each for each in result.windows if each.subject == subject], result)
    return made


def _figures(result: ReconcileResult, options: ReconcileOptions) -> Iterable[Figure]:
    if result.is_balanced:
        yield Figure("The books", "balance", "nothing is missing, duplicate, late or stuck", FigureStatus.GOOD)
    else:
        yield Figure("The books", "do not balance", "see the findings", FigureStatus.BAD)
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
    names = [name for name in COUNTS if name in _ALWAYS or any(getattr(each, name) for each in books)]
    zero = [name for name in COUNTS if name not in names]
    left_out = f"Zero everywhere, and left out: {', '.join(zero)}." if zero else ""
    section.table(
        ["subject", "group", *map(Column, names)],
        [[each.subject, each.group, *(getattr(each, name) for name in names)] for each in books],
        f"How many messages. {left_out}".rstrip(),
    )
    section.terms("What the columns count", COUNTS)
    timed = [each for each in books if each.ack_p50_ms is not None]
    section.table(
        ["subject", "group", *(Column(name, SECONDS) for name in _LATENCIES.values())],
        [[each.subject, each.group, *(_in_seconds(getattr(each, name)) for name in _LATENCIES)] for each in timed],
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
        found = [_cells(each) for each in result.findings if (each.kind, each.reason) == (kind, reason)]
        places = [place for place in range(len(_FINDING)) if any(row[place] is not None for row in found)]
        section.table([_FINDING[place] for place in places], [[row[place] for place in places] for row in found])


_FINDING: Final[tuple[Head, ...]] = (
    "subject", "group", IdColumn("id"), "key", IdColumn("sequence"), Column("messages"), "since", "consumer", "detail",
)  # fmt: skip


def _cells(finding: Discrepancy) -> list[Cell]:
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
                    Series(name, [(at, _in_seconds(getattr(each, f"ack_{name}_ms"))) for at, each in _timed(of_group)])
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


def _in_seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / MS


if __name__ == "__main__":
    job.main(command, "reconcile")
