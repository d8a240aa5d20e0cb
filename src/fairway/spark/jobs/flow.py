"""Messages over time, from `fairway.events`: per window what was stored in a subject, what each group did, and how much
it was not done with at the end of the window. Spark sums up the events (`summed`), one row for a group and a window;
what follows from the sums is reckoned here (`over_time`).

What a group is not done with follows from where it began. A group begins with a seek, and every further seek makes it
begin anew: from then on it owes `end of the subject - where it was sought to - what it is done with since`, and done is
what was acked, went to dead letter, was not wanted or was lost to retention. A report that begins after the last seek
goes back from what the group owes now, instead. A group that asks for no acks is done with what it is handed; if it was
configured before the report begins, it is known by the lack of them.

Each broker group of a cluster counts by itself, and so does a group of consumers there; `together` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.groups.config import Mode
from fairway.spark.places import BROKER_GROUP

COLUMNS: Final = (
    "event", "subject", "broker_group", "group", "first_sequence", "count", "at", "position", "detail"
)  # fmt: skip  # of events
_DONE: Final = ("acked", "dead", "declined", "skipped", "lost")
_SETTLED: Final = ("acked", "retried", "released", "rejected", "doubted", "expired", "dead")


class Sum(NamedTuple):
    """What happened in one window: to a subject, or to a group between two seeks. Counts are messages."""

    subject: str
    group: str | None  # None: the subject itself
    epoch: int  # how many seeks there were so far
    number: int  # of the window, since 1970
    start: int | None  # where the last seek led to
    first: int | None  # stored from here
    end: int | None  # to here
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
    """What the broker says of a group now."""

    subject: str
    group: str
    owed: int
    in_flight: int
    end: int  # of the subject
    broker_group: str = BROKER_GROUP  # all of it is there


class GroupFlow(NamedTuple):
    """A group in one window."""

    number: int
    stored: int
    pulled: int
    acked: int
    retried: int
    dead: int
    lag: int | None  # at its end; None: nobody can know


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
        _counted(*_DONE).alias("done"),
        _counted(*_SETTLED).alias("settled"),
    )


def _counted(*events: str) -> Column:
    return F.sum(F.when(F.col("event").isin(*events), F.col("count")).otherwise(0))


def over_time(
    rows: Iterable[Row | Sum], groups: Iterable[Known], begin: int, windows: int
) -> Iterator[tuple[Known, list[GroupFlow]]]:
    """For each group what it did in so many windows from `begin` on. Sums of later windows may be there, too."""
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
    """One group of consumers in several broker groups, window by window."""
    return [_sum(each) for each in zip(*many, strict=True)]


def _sum(flows: Sequence[GroupFlow]) -> GroupFlow:
    stored, pulled, acked, retried, dead = (sum(each) for each in zip(*(flow[1:-1] for flow in flows), strict=True))
    lags = [flow.lag for flow in flows]
    lag = None if None in lags else sum(filter(None, lags))
    return GroupFlow(flows[0].number, stored, pulled, acked, retried, dead, lag)


def _flows(known: Known, stored: Sequence[Sum], acts: Sequence[Sum], windows: range) -> Iterator[GroupFlow]:
    stand = _Stand(known, stored, acts)
    in_subject = {each.number: each for each in stored}
    in_group: dict[int, list[Sum]] = {}
    for each in acts:
        in_group.setdefault(each.number, []).append(each)
    for number in windows:
        new, did = in_subject.get(number), in_group.get(number, [])
        stand.go_on(new, did)
        yield GroupFlow(
            number,
            0 if new is None else new.stored,
            sum(each.pulled for each in did),
            sum(each.acked for each in did),
            sum(each.retried for each in did),
            sum(each.dead for each in did),
            stand.lag,
        )


class _Stand:
    """Where a group stands, window by window."""

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
        """To the end of the next window."""
        if new is not None and new.end is not None:
            self._end = max(new.end, self._end)
        for each in did:
            if each.epoch != self._epoch:
                self._epoch, self._start, self._done = each.epoch, each.start or 0, 0
            self._done += self._done_in(each)

    @property
    def lag(self) -> int | None:
        """Never below zero: what was stored and what was done are read one after the other."""
        if self._epoch:
            return max(self._end - self._start - self._done, 0)
        if self._epochs:  # there is a seek to come, and nobody knows what it put an end to
            return None
        return max(self._known.owed - (self._known.end - self._end) + self._all_done - self._done, 0)
