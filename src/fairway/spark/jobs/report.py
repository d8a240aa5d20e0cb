"""Isolation and capacity: does every group get its share of the broker, does it keep up, and what is to come.

Shares, cold reads and lag as they are now come from the broker's own words (`capacity`), lag and throughput over time
from its events (`flow`), what is due from the delay server, how late that was from its `/metrics`. Whatever a server
does not say is a sentence in `remarks`. `report_page` makes a page of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Annotated, Final

import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client import spans, sync
from fairway.client.url import parse_any as parse_url
from fairway.errors import Misuse
from fairway.spark.jobs import capacity, flow, picking, program, report_page, scales, scraping, shuffle
from fairway.spark.jobs.capacity import ALL, DelayCapacity, GroupCapacity, Seen
from fairway.spark.jobs.failing import sentences
from fairway.spark.jobs.flow import GroupFlow, Known
from fairway.spark.jobs.watching import Point, ProgressListener, unwatched
from fairway.spark.options import DEFAULT_URL, PATIENCE_S
from fairway.world import host

WINDOWS: Final = 120  # of a report that chooses them: as many as a plot shows well
WINDOWS_MAX: Final = 10_000
SPANS_MAX: Final = 1_000_000  # windows of all groups together: what a driver bears, and more than anybody reads
SPANS: Final = (
    "subject string, group string, at timestamp, stored long, pulled long, acked long, retried long, dead long, "
    "lag long"
)
AHEAD: Final = timedelta(hours=24)
AHEAD_MAX: Final = timedelta(days=365)


@dataclass(frozen=True)
class ReportOptions:
    """What is to be looked at."""

    url: str = DEFAULT_URL
    subjects: tuple[str, ...] = ()  # names or patterns; none: all but the broker's own
    since: datetime | None = None  # of lag and throughput over time; None: as far back as events go
    until: datetime | None = None
    window: timedelta | None = None  # None: chosen, so that there are about a hundred
    observe: timedelta = timedelta(0)  # watch the broker's time for so long; 0: what its accounts hold
    ahead: timedelta = AHEAD
    metrics: str | None = None  # the delay server's, for lateness; several with commas between them
    output: str | None = None  # a directory for one row per group and window, as Parquet
    patience_s: int = PATIENCE_S

    def __post_init__(self) -> None:
        parse_url(self.url)
        for page in self.pages:
            scraping.place(page)
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise Misuse(f"from {self.since} until {self.until} there is no time: --since is the earlier one")
        if self.window is not None and self.window < timedelta(seconds=1):
            raise Misuse(f"windows of {self.window.total_seconds():g} s: one second is the shortest")
        if not timedelta(hours=1) <= self.ahead <= AHEAD_MAX:
            raise Misuse(f"--ahead is one hour at least, and {AHEAD_MAX.days} days at most")

    @property
    def pages(self) -> list[str]:
        """Of delay servers, as they were named."""
        return [] if self.metrics is None else [each.strip() for each in self.metrics.split(",")]


@dataclass(frozen=True)
class GroupWindow:
    """A group in a window of time. Counts are messages."""

    subject: str
    group: str
    at: datetime  # when the window begins
    stored: int  # in the subject
    pulled: int
    acked: int
    retried: int
    dead: int
    lag: int | None  # at its end: stored, and not done with. None: nobody can know


@dataclass
class ReportResult:
    """What a report has found."""

    url: str
    at: datetime  # by the broker's clock
    observed_s: float
    window_s: float = 0.0
    since: datetime | None = None
    until: datetime | None = None
    subjects: list[str] = field(default_factory=list)
    groups: list[GroupCapacity] = field(default_factory=list)  # the busiest first
    spans: list[GroupWindow] = field(default_factory=list)  # by subject, group and time
    delayed: DelayCapacity = field(default_factory=DelayCapacity)
    remarks: list[str] = field(default_factory=list)  # what is not known, and why


def run(spark: SparkSession, options: ReportOptions, watch: ProgressListener = unwatched) -> ReportResult:
    """Look at a broker, and at what its events say."""
    with sentences("reporting"), sync.connect(options.url, patience=options.patience_s) as client:
        before = capacity.look(options.url, options.patience_s) if options.observe else None
        host.sleep(options.observe.total_seconds())
        seen = capacity.look(options.url, options.patience_s)
        found = ReportResult(options.url, seen.now, options.observe.total_seconds())
        found.subjects = capacity.meant(options.subjects, seen.ends, options.url)
        found.groups = capacity.groups(seen, before, found.subjects)
        found.remarks.extend(capacity.remarks(seen, before, found.groups))
        messages = sum(sum(seen.ends[name].values()) for name in found.subjects)
        watch(Point("report: events", messages))
        with shuffle.sized(spark, messages):
            _over_time(spark, options, seen, found)
        asked = None if not options.subjects or ALL in options.subjects else found.subjects
        hours = -(-options.ahead // timedelta(hours=1))
        found.remarks.extend(capacity.forecast(client, asked, seen.now, hours, found.delayed))
    pages = options.pages or capacity.metrics_of(options.url, options.patience_s)
    found.remarks.extend(capacity.lateness(pages, found.delayed))
    return found


# --- over time --------------------------------------------------------------------------------------------------------


def _over_time(spark: SparkSession, options: ReportOptions, seen: Seen, found: ReportResult) -> None:
    if not found.subjects:
        found.remarks.append("No subject is meant that anything was ever sent to: there is nothing to draw.")
        return
    end_ms = seen.now_ms + 1 if options.until is None else _ms(options.until)
    events = _events(spark, options).persist()
    try:
        begin_ms = _begin_ms(events, options)
        if begin_ms is None or begin_ms >= end_ms:
            found.remarks.append("Nothing has happened in this time: there is no event to draw.")
            return
        window_ms = _window_ms(options, begin_ms, end_ms, len(found.groups))
        sums = flow.summed(events, window_ms).collect()
    finally:
        events.unpersist()
    first = begin_ms // window_ms
    windows = -(-end_ms // window_ms) - first
    found.window_s, found.since = window_ms / 1_000, _moment(first * window_ms)
    found.until = _moment((first + windows) * window_ms)
    named = sorted(found.groups, key=lambda each: (each.subject, each.group))
    known = [each for group in named for each in _known(group, seen)]
    told = flow.over_time(sums, known, first, windows)
    for _, of_group in groupby(told, key=lambda each: each[0][:2]):  # one at a time: all of them may be millions
        same = list(of_group)
        merged = flow.together([flows for _, flows in same])
        found.spans.extend(_span(same[0][0], each, window_ms) for each in merged)
    _sum_up(found)
    if options.output is not None:
        rows = spark.createDataFrame([astuple(each) for each in found.spans], SPANS)
        rows.write.mode("errorifexists").parquet(options.output)


def _known(group: GroupCapacity, seen: Seen) -> Iterator[Known]:
    """In each broker group that holds the subject. Where nobody has joined the group yet, it owes nothing."""
    states = seen.groups[group.subject, group.group]
    for name, end in seen.ends[group.subject].items():
        state = states.get(name)
        if state is None:
            yield Known(group.subject, group.group, 0, 0, end, name)
        else:
            owed = state.lag + state.in_flight + capacity.waiting_in(state)
            yield Known(group.subject, group.group, owed, state.in_flight, end, name)


def _events(spark: SparkSession, options: ReportOptions) -> DataFrame:
    """Up to now, whatever the end of the report: what a group owed then is known by what it owes now."""
    subjects = ",".join(options.subjects or (ALL,))
    told = {"url": options.url, "subject": subjects, "patienceSeconds": str(options.patience_s)}
    if options.since is not None:
        told["starting"] = options.since.astimezone(UTC).isoformat()
    # A report on a log of which retention takes a part meanwhile is a report on the rest.
    read = spark.read.format("fairway.events").options(**told, failOnDataLoss="false").load()
    return read.select(*flow.COLUMNS)


def _begin_ms(events: DataFrame, options: ReportOptions) -> int | None:
    """When the report begins: with the first event, or when it was told to, whichever is later; None: with neither."""
    since_ms = None if options.since is None else _ms(options.since)
    (first,) = events.select(F.unix_millis(F.min("at"))).collect()
    return max((each for each in (first[0], since_ms) if each is not None), default=None)


def _window_ms(options: ReportOptions, begin_ms: int, end_ms: int, groups: int) -> int:
    if options.window is None:
        return scales.step_s((end_ms - begin_ms) / 1_000 / WINDOWS) * 1_000
    window_ms = round(options.window.total_seconds() * 1_000)
    most = max(min(WINDOWS_MAX, SPANS_MAX // max(groups, 1)), WINDOWS)
    if (end_ms - begin_ms) // window_ms >= most:
        raise Misuse(
            f"windows of {options.window.total_seconds():g} s from {_moment(begin_ms)} on are more than {most:,}, "
            f"which is the most for {groups:,} groups: choose a longer --window, or a later --since"
        )
    return window_ms


def _span(group: Known, of: GroupFlow, window_ms: int) -> GroupWindow:
    return GroupWindow(group.subject, group.group, _moment(of.number * window_ms), *of[1:])


def _sum_up(found: ReportResult) -> None:
    of = {(each.subject, each.group): each for each in found.groups}
    for span in found.spans:
        group = of[span.subject, span.group]
        group.stored += span.stored
        group.acked += span.acked
        if span.lag is not None:
            group.lag_most = max(group.lag_most or 0, span.lag)


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1_000)


# --- the program ------------------------------------------------------------------------------------------------------


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUBJECT]...", help="Subjects, or patterns such as 'orders.*'; all, unless given."),
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with plots there.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Lag and throughput from then on: 2026-03-01T12:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="And before this time.")] = None,
    window: Annotated[
        str | None, typer.Option(metavar="SPAN", help=f"In windows so long: {spans.HELP}; chosen, unless given.")
    ] = None,
    observe: Annotated[
        str, typer.Option(metavar="SPAN", help="Watch the broker for so long, and report the shares of that time.")
    ] = "0s",
    ahead: Annotated[str, typer.Option(metavar="SPAN", help="Forecast for so long.")] = "24h",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="/metrics of the delay server, which knows how late messages were; several with commas between them.",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write one row per group and window there, as Parquet.")
    ] = None,
    url: program.Url = DEFAULT_URL,
    patience_s: program.Patience = PATIENCE_S,
    master: program.Master = None,
    spark_log: program.SparkLog = program.QUIET,
    json: program.AsJson = False,
) -> None:
    """Isolation and capacity: share of the broker's time, cold reads, lag, lateness, and what is due to come."""
    with program.failures("report"):
        options = ReportOptions(
            url=url,
            subjects=tuple(subjects or ()),
            since=picking.moment(since, "since"),
            until=picking.moment(until, "until"),
            window=None if window is None else spans.span(window),
            observe=spans.span(observe),
            ahead=spans.span(ahead),
            metrics=metrics,
            output=output,
            patience_s=patience_s,
        )
    with program.running("report", master, spark_log, is_quiet=json) as (spark, watch):
        found = run(spark, options, watch)
        if html is not None:
            report_page.page(found).write(html)
    program.tell(found, json, [*_lines(found), *([f"the page is {html}"] if html is not None else [])])


def _lines(found: ReportResult) -> list[str]:
    lines = [
        f"{each.subject} {each.group}: {_share(each)}, {each.cold_share:.0%} of it cold, lag {each.lag:,} "
        f"({each.in_flight:,} in flight, {each.waiting:,} to be tried again later), {each.acked:,} acked"
        for each in found.groups
    ]
    if found.delayed.overdue is not None:
        due = sum(each.messages for each in found.delayed.forecast)
        lines.append(f"delayed: {due:,} due in the hours to come, {found.delayed.overdue:,} due and not delivered")
    if found.delayed.late_mean_s is not None:
        lines.append(f"delayed: {scales.SECONDS.shown(found.delayed.late_mean_s)} late on average")
    return [*lines, *found.remarks]


def _share(group: GroupCapacity) -> str:
    return "no share of the broker's time" if group.share is None else f"{group.share:.0%} of the broker's time"


if __name__ == "__main__":
    program.main(command, "report")
