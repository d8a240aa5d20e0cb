"""`fairway pipeline reconcile`: compares what was sent, stored, archived, delivered and acked; `run` and `command`.

The sides know nothing of one another: business rows, the log, an archive, and the action log, which has what groups
did. If one side has something that another lacks, that is a finding, named by subject, group, id and sequence. The job
writes only the output that is asked for.

    reconcile_options  options and result                    reconciliation   one run
    scope              which messages, and servers' counts   message_lifecycle  what became of each in each group
    business_rows      business rows against the log         producer_buffers   what outboxes and spools still hold
    audit              an archive against the log; holes     findings           what is wrong, and the remedies
    balances           sums per subject, group and window    reconcile_page     the HTML page
"""

from __future__ import annotations

from typing import Annotated, Final

import typer
from pyspark.sql import DataFrame, SparkSession

from fairway.client import core
from fairway.errors import Misuse
from fairway.spark.jobs import business_rows, job, reconcile_page, selection
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.job import ProgressListener, sentences, unwatched
from fairway.spark.jobs.reconcile_options import Discrepancy, GroupBalance, ReconcileOptions, ReconcileResult
from fairway.spark.jobs.reconciliation import Reconciling
from fairway.spark.options import DEFAULT_URL, PATIENCE_S

__all__ = ["Discrepancy", "GroupBalance", "ReconcileOptions", "ReconcileResult", "command", "run"]

Outboxes = Annotated[
    list[str] | None,
    typer.Option(
        "--outbox",
        metavar="DATABASE",
        help="What its outbox holds is not sent yet: SQLAlchemy's address; may be repeated.",
    ),
]
OutboxTable = Annotated[str, typer.Option(metavar="[SCHEMA.]NAME", help="Of --outbox: its table.")]
Spools = Annotated[
    list[str] | None,
    typer.Option("--spool", metavar="DIR", help="The same of a spool, a directory of this machine; may be repeated."),
]

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
            rows = business_rows.load(spark, options.sent, options.sent_format)
        reconciling = Reconciling(spark, options, rows, watch)
        try:
            with job.sized(spark, reconciling.size()):
                result = reconciling.run()
        finally:
            reconciling.close()
    if options.html is not None:
        reconcile_page.page(result, options).write(options.html)
    return result


# --- the program ------------------------------------------------------------------------------------------------------


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
    outbox: Outboxes = None,
    outbox_table: OutboxTable = _DEFAULT.outbox_table,
    spool: Spools = None,
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


if __name__ == "__main__":
    job.main(command, "reconcile")
