"""Do the books balance? `fairway pipeline reconcile`, `run`, or this file under `spark-submit`.

What was sent, stored, archived, delivered and acked is counted from sides that know nothing of one another: business
rows, the log, an archive, and what groups did, which is in the action log. Whatever one side has and another lacks is a
finding, named by subject, group, id and sequence. Nothing is written but what is asked for.

    balance    what is asked, and what is answered        scope      which messages, and what the servers say of them
    lives      what became of each in each group          holes      sequences without a message
    sent       business rows against the log              held       what outboxes and spools have not sent yet
    auditing   an archive against the log
    findings   what is wrong, and what to do about it     books      sums per subject, group and window
"""

from __future__ import annotations

from typing import Annotated, Final

import typer
from pyspark.sql import DataFrame, SparkSession

from fairway.client import spans
from fairway.errors import Misuse
from fairway.spark.jobs import picking, program, reconcile_page, sent, shuffle
from fairway.spark.jobs.balance import Discrepancy, GroupBalance, ReconcileOptions, ReconcileResult
from fairway.spark.jobs.failing import sentences
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.reconciling import Reconciling
from fairway.spark.jobs.watching import ProgressListener, unwatched
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

UNBALANCED: Final = 4  # the exit status where something is wrong with what was looked at, as everywhere
_DEFAULT: Final = ReconcileOptions(())


def run(
    spark: SparkSession, options: ReconcileOptions, rows: DataFrame | None = None, watch: ProgressListener = unwatched
) -> ReconcileResult:
    """Look, and say what is wrong. `rows` are business rows that are a frame already, in place of `options.sent`."""
    with sentences("reconciling"):
        if options.output is not None and Files(spark, options.output).exists():
            raise Misuse(f"{options.output} is there already: name a new directory for --output")
        if rows is None and options.sent is not None:
            rows = sent.load(spark, options.sent, options.sent_format)
        reconciling = Reconciling(spark, options, rows, watch)
        try:
            with shuffle.sized(spark, reconciling.size()):
                result = reconciling.run()
        finally:
            reconciling.close()
    if options.html is not None:
        reconcile_page.page(result, options).write(options.html)
    return result


# --- the program ------------------------------------------------------------------------------------------------------


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: picking.Subjects,
    archive: Annotated[
        str | None, typer.Option("--archive", metavar="DIR", help="Hold this archive against the log.")
    ] = None,
    since: picking.Since = None,
    until: picking.Until = None,
    window: Annotated[str, typer.Option(metavar="SPAN", help=f"Length of a window: {spans.HELP}.")] = "1h",
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
    url: program.Url = DEFAULT_URL,
    patience_s: program.Patience = PATIENCE_S,
    master: program.Master = None,
    spark_log: program.SparkLog = program.QUIET,
    json: program.AsJson = False,
) -> None:
    """Sent, stored, delivered, acked: what is missing, duplicate, late or stuck. Exit status 4 if the books do not
    balance."""
    with program.failures("reconcile"):
        options = ReconcileOptions(
            tuple(subjects), url, archive, picking.moment(since, "since"), picking.moment(until, "until"),
            tuple(group or ()), _seconds(window), _seconds(late_after), _seconds(stuck_after),
            sent, sent_format, match, strict, top, output, html, patience_s,
            tuple(outbox or ()), outbox_table, tuple(spool or ()),
        )  # fmt: skip
    with program.running("reconcile", master, spark_log, is_quiet=json) as (spark, watch):
        result = run(spark, options, watch=watch)
    program.tell(result, json, _lines(result, options))
    if not result.is_balanced:
        raise typer.Exit(UNBALANCED)


def _seconds(span: str) -> float:
    return spans.span(span).total_seconds()


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
    program.main(command, "reconcile")
