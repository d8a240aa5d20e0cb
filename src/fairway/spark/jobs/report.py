"""`fairway pipeline report`: whether every group gets its share of the broker and keeps up, and what is to come.

The present shares, cold reads and lags are the brokers' own figures (`capacity`). Lag and throughput over time come
from `fairway.events`; due messages come from the delay server, and their lateness from its `/metrics`. If a server does
not give a figure, a sentence in `remarks` says so. `report_page` makes a page of the result.

For figures over time, Spark sums up the events per group and window (`summed`). `over_time` derives the rest on the
driver: per window what was stored in a subject, what each group did, and how much the group owed at its end.

The debt of a group follows from where it began. A group begins with a seek, and each further seek is a new beginning.
From then on the group owes `end of the subject - the sequence sought - what is done since`. Done is what was acked,
became a dead letter, was declined or skipped, or was lost to retention. A report that begins after the last seek
calculates backwards from what the group owes now. An at-most-once group is done with what it is handed. If such a group
was configured before the report begins, the absence of acks identifies it.

Each broker group of a cluster counts by itself, and so does a group of consumers there; `together` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from typing import Annotated, Final, NamedTuple

import typer
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client import core
from fairway.client.delayed_messages import moment_of
from fairway.client.message_states import DONE_BY
from fairway.client.sync import client as sync
from fairway.client.url import parse_any as parse_url
from fairway.errors import Misuse
from fairway.groups.config import Mode
from fairway.runtime import host
from fairway.spark.jobs import capacity, job, plots, report_page, selection
from fairway.spark.jobs.capacity import ALL, DelayCapacity, GroupCapacity, Seen
from fairway.spark.jobs.job import Point, ProgressListener, sentences, unwatched
from fairway.spark.jobs.server_status import waiting_in
from fairway.spark.options import DEFAULT_URL, PATIENCE_S
from fairway.spark.server_groups import BROKER_GROUP

COLUMNS: Final = (
    "event", "subject", "broker_group", "group", "first_sequence", "count", "at", "position", "detail"
)  # fmt: skip  # of events
_SETTLED: Final = ("acked", "retried", "released", "rejected", "doubted", "expired", "dead")


class Sum(NamedTuple):
    """What happened in one window to a subject, or to a group between two seeks. Counts are of messages."""

    subject: str
    group: str | None  # None: the subject itself
    epoch: int  # the number of seeks so far
    number: int  # of the window, since 1970
    start: int | None  # the sequence of the last seek
    first: int | None  # the first sequence stored
    end: int | None  # the end of what was stored
    mode: str | None  # how the group was configured
    stored: int = 0
    pulled: int = 0
    acked: int = 0
    retried: int = 0
    dead: int = 0
    done: int = 0
    settled: int = 0
    broker_group: str = BROKER_GROUP


class Known(NamedTuple):
    """The broker's present figures of a group."""

    subject: str
    group: str
    owed: int
    in_flight: int
    end: int  # of the subject
    broker_group: str = BROKER_GROUP  # the one that all figures are from


class GroupFlow(NamedTuple):
    """A group in one window."""

    number: int
    stored: int
    pulled: int
    acked: int
    retried: int
    dead: int
    lag: int | None  # at its end; None: unknown


def summed(events: DataFrame, window_ms: int) -> DataFrame:
    """One row for each `Sum`."""
    in_order = Window.partitionBy("broker_group", "subject", "group").orderBy("position")
    is_seek = F.col("event") == "sought"
    is_stored = F.col("event") == "produced"
    epochs = events.select(
        "*",
        F.expr(f"unix_millis(at) div {window_ms}").alias("number"),
        F.sum(is_seek.cast("int")).over(in_order).alias("epoch"),
        F.last(F.when(is_seek, F.col("first_sequence")), ignorenulls=True).over(in_order).alias("start"),
    )
    return epochs.groupBy("broker_group", "subject", "group", "epoch", "number").agg(
        F.max("start").alias("start"),
        F.min(F.when(is_stored, F.col("first_sequence"))).alias("first"),
        F.max(F.when(is_stored, F.col("first_sequence") + F.col("count"))).alias("end"),
        F.max_by("detail", F.when(F.col("event") == "configured", F.col("position"))).alias("mode"),
        _counted("produced").alias("stored"),
        *(_counted(name).alias(name) for name in ("pulled", "acked", "retried", "dead")),
        _counted(*DONE_BY).alias("done"),
        _counted(*_SETTLED).alias("settled"),
    )


def _counted(*events: str) -> Column:
    return F.sum(F.when(F.col("event").isin(*events), F.col("count")).otherwise(0))


def over_time(
    rows: Iterable[Row | Sum], groups: Iterable[Known], begin: int, windows: int
) -> Iterator[tuple[Known, list[GroupFlow]]]:
    """For each group what it did in `windows` windows from `begin` on. Sums of later windows may be among the rows."""
    of: dict[tuple[str, str, str | None], list[Sum]] = {}
    for each in rows:
        one = each if isinstance(each, Sum) else Sum(**each.asDict())
        of.setdefault((one.broker_group, one.subject, one.group), []).append(one)
    for known in groups:
        subject = known.broker_group, known.subject
        stored = sorted(of.get((*subject, None), ()), key=lambda each: each.number)
        acts = sorted(of.get((*subject, known.group), ()), key=lambda each: (each.number, each.epoch))
        yield known, list(_flows(known, stored, acts, range(begin, begin + windows)))


def together(many: Sequence[Sequence[GroupFlow]]) -> list[GroupFlow]:
    """The sums of one group of consumers over several broker groups, window by window."""
    merged = []
    for flows in zip(*many, strict=True):
        counts = (sum(each) for each in zip(*(flow[1:-1] for flow in flows), strict=True))
        lags = [flow.lag for flow in flows]
        lag = None if None in lags else sum(filter(None, lags))
        merged.append(GroupFlow._make((flows[0].number, *counts, lag)))
    return merged


def _flows(known: Known, stored: Sequence[Sum], acts: Sequence[Sum], windows: range) -> Iterator[GroupFlow]:
    stand = _Stand(known, stored, acts)
    in_subject = {each.number: each for each in stored}
    in_group: dict[int, list[Sum]] = {}
    for each in acts:
        in_group.setdefault(each.number, []).append(each)
    for number in windows:
        new, did = in_subject.get(number), in_group.get(number, [])
        stand.go_on(new, did)
        counts = (sum(getattr(each, name) for each in did) for name in ("pulled", "acked", "retried", "dead"))
        yield GroupFlow._make((number, 0 if new is None else new.stored, *counts, stand.lag))


class _Stand:
    """The debt of a group, carried from window to window."""

    def __init__(self, known: Known, stored: Sequence[Sum], acts: Sequence[Sum]) -> None:
        self._known = known
        mode = next((each.mode for each in reversed(acts) if each.mode is not None), None)
        has_no_acks = not known.in_flight and not any(each.settled for each in acts)
        self._is_done_when_pulled = mode == Mode.AT_MOST_ONCE.value if mode is not None else has_no_acks
        self._epochs = max((each.epoch for each in acts), default=0)
        self._all_done = sum(map(self._done_in, acts))
        firsts = [each.first for each in stored if each.first is not None]
        self._end = min(firsts, default=known.end)  # of the subject, before the first window
        self._epoch = 0
        self._start = 0
        self._done = 0  # since the last seek

    def _done_in(self, act: Sum) -> int:
        return act.done + (act.pulled if self._is_done_when_pulled else 0)

    def go_on(self, new: Sum | None, did: Iterable[Sum]) -> None:
        """Advance to the end of the next window."""
        if new is not None and new.end is not None:
            self._end = max(new.end, self._end)
        for each in did:
            if each.epoch != self._epoch:
                self._epoch, self._start, self._done = each.epoch, each.start or 0, 0
            self._done += self._done_in(each)

    @property
    def lag(self) -> int | None:
        """What the group owes; at least zero, because stored and done messages are read one after the other."""
        if self._epoch:
            return max(self._end - self._start - self._done, 0)
        if self._epochs:  # a later seek ended a state that is unknown
            return None
        return max(self._known.owed - (self._known.end - self._end) + self._all_done - self._done, 0)


WINDOWS: Final = 120  # for windows that the report chooses: as many as a plot shows well
WINDOWS_MAX: Final = 10_000
SPANS_MAX: Final = 1_000_000  # windows of all groups together: what fits into a driver
SPANS: Final = (
    "subject string, group string, at timestamp, stored long, pulled long, acked long, retried long, dead long, "
    "lag long"
)
AHEAD: Final = timedelta(hours=24)
AHEAD_MAX: Final = timedelta(days=365)


@dataclass(frozen=True)
class ReportOptions:
    url: str = DEFAULT_URL
    subjects: tuple[str, ...] = ()  # names or patterns; empty: all but internal subjects
    since: datetime | None = None  # of lag and throughput over time; None: as far back as events go
    until: datetime | None = None
    window: timedelta | None = None  # None: chosen, so that there are about a hundred
    observe: timedelta = timedelta(0)  # how long to observe the broker's time; 0: what its accounts hold
    ahead: timedelta = AHEAD
    metrics: str | None = None  # URLs of delay servers' `/metrics`, separated by commas, for lateness
    output: str | None = None  # a directory for one row per group and window, as Parquet
    patience_s: int = PATIENCE_S

    def __post_init__(self) -> None:
        parse_url(self.url)
        for page in self.pages:
            capacity.place(page)
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise Misuse(f"from {self.since} until {self.until} there is no time: --since is the earlier one")
        if self.window is not None and self.window < timedelta(seconds=1):
            raise Misuse(f"windows of {self.window.total_seconds():g} s: one second is the shortest")
        if not timedelta(hours=1) <= self.ahead <= AHEAD_MAX:
            raise Misuse(f"--ahead is one hour at least, and {AHEAD_MAX.days} days at most")

    @property
    def pages(self) -> list[str]:
        """The `/metrics` pages of delay servers, as they were given."""
        return [] if self.metrics is None else [each.strip() for each in self.metrics.split(",")]


@dataclass(frozen=True)
class GroupWindow:
    """A group in a window of time. Counts are of messages."""

    subject: str
    group: str
    at: datetime  # when the window begins
    stored: int  # in the subject
    pulled: int
    acked: int
    retried: int
    dead: int
    lag: int | None  # at its end: stored, and not settled. None: unknown


@dataclass
class ReportResult:
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
    remarks: list[str] = field(default_factory=list)  # what is unknown, and why


def run(spark: SparkSession, options: ReportOptions, watch: ProgressListener = unwatched) -> ReportResult:
    """Ask the brokers for their figures, and read their events."""
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
        with job.sized(spark, messages):
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
    # The events up to now, even if the report ends earlier: past debts are calculated from the present ones. If
    # retention takes a part of the log meanwhile, the report is about the rest.
    of = options.url, options.patience_s, options.subjects or (ALL,), options.since
    events = selection.events(spark, *of, failOnDataLoss="false").select(*COLUMNS).persist()
    try:
        since_ms = None if options.since is None else _ms(options.since)
        (first_event,) = events.select(F.unix_millis(F.min("at"))).collect()
        begin_ms = max((each for each in (first_event[0], since_ms) if each is not None), default=None)
        if begin_ms is None or begin_ms >= end_ms:
            found.remarks.append("Nothing has happened in this time: there is no event to draw.")
            return
        window_ms = _window_ms(options, begin_ms, end_ms, len(found.groups))
        sums = summed(events, window_ms).collect()
    finally:
        events.unpersist()
    first = begin_ms // window_ms
    windows = -(-end_ms // window_ms) - first
    found.window_s, found.since = window_ms / 1_000, moment_of(first * window_ms)
    found.until = moment_of((first + windows) * window_ms)
    named = sorted(found.groups, key=lambda each: (each.subject, each.group))
    known = [each for group in named for each in _known(group, seen)]
    told = over_time(sums, known, first, windows)
    for _, of_group in groupby(told, key=lambda each: each[0][:2]):  # one at a time: all flows may be millions
        same = list(of_group)
        merged = together([flows for _, flows in same])
        subject, group = same[0][0][:2]
        found.spans.extend(
            GroupWindow(subject, group, moment_of(each.number * window_ms), *each[1:]) for each in merged
        )
    by_name = {(each.subject, each.group): each for each in found.groups}
    for span in found.spans:
        capacity_of = by_name[span.subject, span.group]
        capacity_of.stored += span.stored
        capacity_of.acked += span.acked
        if span.lag is not None:
            capacity_of.lag_most = max(capacity_of.lag_most or 0, span.lag)
    if options.output is not None:
        rows = spark.createDataFrame([astuple(each) for each in found.spans], SPANS)
        rows.write.mode("errorifexists").parquet(options.output)


def _known(group: GroupCapacity, seen: Seen) -> Iterator[Known]:
    """A group's figures in each broker group that holds the subject. Without a consumer there, it owes nothing."""
    states = seen.groups[group.subject, group.group]
    for name, end in seen.ends[group.subject].items():
        state = states.get(name)
        if state is None:
            yield Known(group.subject, group.group, 0, 0, end, name)
        else:
            owed = state.lag + state.in_flight + waiting_in(state)
            yield Known(group.subject, group.group, owed, state.in_flight, end, name)


def _window_ms(options: ReportOptions, begin_ms: int, end_ms: int, groups: int) -> int:
    if options.window is None:
        return plots.step_s((end_ms - begin_ms) / 1_000 / WINDOWS) * 1_000
    window_ms = round(options.window.total_seconds() * 1_000)
    most = max(min(WINDOWS_MAX, SPANS_MAX // max(groups, 1)), WINDOWS)
    if (end_ms - begin_ms) // window_ms >= most:
        raise Misuse(
            f"windows of {options.window.total_seconds():g} s from {moment_of(begin_ms)} on are more than {most:,}, "
            f"which is the most for {groups:,} groups: choose a longer --window, or a later --since"
        )
    return window_ms


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
        str | None, typer.Option(metavar="SPAN", help=f"In windows so long: {core.SPAN_HELP}; chosen, unless given.")
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
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """Isolation and capacity: share of the broker's time, cold reads, lag, lateness, and what is due to come."""
    with job.failures("report"):
        options = ReportOptions(
            url=url,
            subjects=tuple(subjects or ()),
            since=selection.moment(since, "since"),
            until=selection.moment(until, "until"),
            window=None if window is None else core.span(window),
            observe=core.span(observe),
            ahead=core.span(ahead),
            metrics=metrics,
            output=output,
            patience_s=patience_s,
        )
    with job.running("report", master, spark_log, is_quiet=json) as (spark, watch):
        found = run(spark, options, watch)
        if html is not None:
            report_page.page(found).write(html)
    job.tell(found, json, [*_lines(found), *([f"the page is {html}"] if html is not None else [])])


def _lines(found: ReportResult) -> list[str]:
    lines = []
    for each in found.groups:
        share = "no share" if each.share is None else f"{each.share:.0%}"
        lines.append(
            f"{each.subject} {each.group}: {share} of the broker's time, {each.cold_share:.0%} of it cold, lag "
            f"{each.lag:,} ({each.in_flight:,} in flight, {each.waiting:,} to be tried again later), {each.acked:,} "
            "acked"
        )
    if found.delayed.overdue is not None:
        due = sum(each.messages for each in found.delayed.forecast)
        lines.append(f"delayed: {due:,} due in the hours to come, {found.delayed.overdue:,} due and not delivered")
    if found.delayed.late_mean_s is not None:
        lines.append(f"delayed: {plots.SECONDS.shown(found.delayed.late_mean_s)} late on average")
    return [*lines, *found.remarks]


if __name__ == "__main__":
    job.main(command, "report")
