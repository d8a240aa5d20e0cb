"""The HTML page of a report: a section for each question that it answers, with a guide to reading each plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from fairway.spark.jobs import plots
from fairway.spark.jobs.page import Column, Figure, FigureStatus, HtmlPage, Section
from fairway.spark.jobs.plots import COUNT, RATE, SECONDS, SHARE, HistogramBin, Series

if TYPE_CHECKING:
    from fairway.spark.jobs.capacity import GroupCapacity
    from fairway.spark.jobs.report import GroupWindow, ReportResult

_LATE_S = 1.0  # lateness that people notice


def page(found: ReportResult) -> HtmlPage:
    """The page of a result."""
    made = HtmlPage("Isolation and capacity", f"{found.url}, {plots.moment(found.at)}{_time(found)}")
    made.figures(*_figures(found))
    for remark in found.remarks:
        made.text(remark)
    _isolation(made.section("Isolation"), found)
    _lag(made.section("Lag"), found)
    _throughput(made.section("Throughput"), found)
    _delayed(made.section("Delayed messages"), found)
    return made


def _time(found: ReportResult) -> str:
    if found.since is None or found.until is None:
        return ""
    over = plots.span(found.since.timestamp(), found.until.timestamp())
    return f"; over time: {over}, in windows of {SECONDS.shown(found.window_s)}"


def _figures(found: ReportResult) -> Iterable[Figure]:
    lag = sum(each.lag for each in found.groups)
    yield Figure("Groups", f"{len(found.groups):,}", f"on {_several(len(found.subjects), 'subject')}")
    busiest = found.groups[0] if found.groups else None
    if busiest is not None and busiest.share is not None:
        yield Figure("Busiest group", SHARE.shown(busiest.share), f"{_name(busiest)}, of the broker's time")
    yield Figure("Lag", COUNT.shown(lag), "messages not handed out, all groups together")
    lost = sum(each.lost for each in found.groups)
    if lost:
        yield Figure("Lost", COUNT.shown(lost), "taken by retention before a group had them", FigureStatus.BAD)
    if found.delayed.overdue is not None:
        due = sum(each.messages for each in found.delayed.forecast)
        yield Figure("Due to come", COUNT.shown(due), f"in {_several(len(found.delayed.forecast) - 1, 'hour')}")
    if found.delayed.late_mean_s is not None:
        late = sum(each.messages for each in found.delayed.lateness if each.seconds is None or each.seconds > _LATE_S)
        note = f"of delayed messages, {COUNT.shown(late)} by more than {SECONDS.shown(_LATE_S)}"
        yield Figure("Lateness, mean", SECONDS.shown(found.delayed.late_mean_s), note)


def _isolation(section: Section, found: ReportResult) -> None:
    meanwhile = f"in the {SECONDS.shown(found.observed_s)} that were watched" if found.observed_s else "on its account"
    section.text(
        f"The time of the broker's loop that each group had {meanwhile}. While all have work, shares are as their "
        "weights are; a group that needs less leaves the rest to others. So a long bar does no harm by itself: it does "
        "if the lag of other groups grows meanwhile."
    )
    shares = {_name(each): each.share for each in found.groups if each.share is not None}
    rest = 1 - sum(shares.values())
    if shares and rest > 1e-6:
        shares["all groups of other subjects"] = rest
    section.plot(plots.bars("Share of the broker's time, by group.", shares, SHARE))
    cold = {_name(each): each.cold_share for each in found.groups if each.busy_s or each.cold_s}
    caption = "Cold share: of the group's own time, what was spent on reads that missed the page cache."
    if any(cold.values()):
        section.plot(plots.bars(caption, cold, SHARE))
        section.text(
            "A group that is far behind reads cold; its reads wait in threads, and others do not wait for them."
        )
    else:
        section.text("No group has read cold: all that was handed out was in the page cache.")
    head: list[str | Column] = [
        "subject", "group", Column("share", SHARE), Column("time", SECONDS), Column("cold share", SHARE),
        Column("weight", RATE), Column("consumers"), Column("acked"), "state",
    ]  # fmt: skip
    section.table(
        head,
        (
            (
                each.subject, each.group, each.share, each.busy_s, each.cold_share, each.weight, each.consumers,
                each.acked, "paused" if each.is_paused else "",
            )
            for each in found.groups
        ),
        "Groups, the busiest first.",
    )  # fmt: skip


def _lag(section: Section, found: ReportResult) -> None:
    section.plot(
        plots.lines(
            "Stored and not done with, by group, at the end of each window.",
            _series(found, lambda each: each.lag),
            COUNT,
            "messages",
        )
    )
    section.text(
        "A line that stays low keeps up. One that rises and does not fall again takes less than comes in: it needs "
        "more consumers, or a larger weight. A line begins where the group does; a sudden step is a seek."
    )
    head: list[str | Column] = [
        "subject", "group", Column("not handed out"), Column("in flight"), Column("again later"),
        Column("most over time"), Column("oldest", SECONDS), Column("dead"), Column("lost"),
    ]  # fmt: skip
    behind = sorted(found.groups, key=lambda each: -each.owed)
    section.table(
        head,
        (
            (
                each.subject, each.group, each.lag, each.in_flight, each.waiting, each.lag_most, each.oldest_s,
                each.dead, each.lost,
            )
            for each in behind
        ),
        "As it is now, the largest first.",
    )  # fmt: skip


def _throughput(section: Section, found: ReportResult) -> None:
    by = f", in windows of {SECONDS.shown(found.window_s)}" if found.window_s else ""
    section.plot(
        plots.lines(
            f"Acked by each group, a second{by}.",
            _series(found, lambda each: each.acked / found.window_s),
            RATE,
            "messages/s",
        )
    )
    section.plot(
        plots.columns(
            f"Stored, by subject{by}.",
            _stored(found),
            found.window_s or 1,
            COUNT,
            "messages",
        )
    )
    section.text(
        "Acks as high as what is stored are a group that keeps up. Acks that stay flat below it are one at the end of "
        "its strength: the flat height is what it can do. The first and the last window may be cut short. Subjects "
        "that nobody consumes are not drawn."
    )


def _delayed(section: Section, found: ReportResult) -> None:
    delayed = found.delayed
    if delayed.overdue is None:
        section.text("There is no forecast: the sentence at the top says why.")
    else:
        due = [(each.at, float(each.messages)) for each in delayed.forecast]
        caption = "Forecast: messages that are due in each hour to come."
        section.plot(plots.columns(caption, [Series("due", due)], plots.HOUR_S, COUNT, "messages"))
        section.text(
            "Each bar comes on top of what is sent without a time: hold the highest one against what groups can do a "
            "second. What is scheduled from now on is not in it."
        )
        if delayed.overdue:
            section.warn(f"{delayed.overdue:,} messages are due and not delivered: a broker does not take them.")
    if delayed.lateness:
        section.plot(
            plots.histogram(
                "How late delayed messages were, since the delay server was started.",
                _buckets(found),
                SECONDS,
                COUNT,
                "messages",
            )
        )
        section.text(
            "From a message's due time to the broker's receipt; buckets grow from left to right. Most should be within "
            "some ten milliseconds. Bars far to the right are messages whose broker was away, or a delay server that "
            "has too much to do."
        )
    else:
        section.text("There is no plot of lateness: the sentence at the top says why.")


def _buckets(found: ReportResult) -> list[HistogramBin]:
    """The bins up to the last that is not empty."""
    made, low = [], 0.0
    for each in found.delayed.lateness:
        made.append(HistogramBin(low, each.seconds, each.messages))
        low = each.seconds if each.seconds is not None else low
    while len(made) > 1 and not made[-1].count:
        made.pop()
    return made


def _series(found: ReportResult, value: Callable[[GroupWindow], float | None]) -> list[Series]:
    """One series for each group, always in the same order, so that few groups keep their colours on all plots."""
    of = {key: list(spans) for key, spans in groupby(found.spans, lambda each: (each.subject, each.group))}
    return [
        Series(_name(each), [(span.at, value(span)) for span in of.get((each.subject, each.group), ())])
        for each in found.groups
    ]


def _stored(found: ReportResult) -> list[Series]:
    """One series for each subject, from any of its groups: all of them have the same counts."""
    of: dict[str, Series] = {}
    for (subject, _), spans in groupby(found.spans, lambda each: (each.subject, each.group)):
        if subject not in of:
            of[subject] = Series(subject, [(span.at, float(span.stored)) for span in spans])
    return list(of.values())


def _name(group: GroupCapacity) -> str:
    return f"{group.group} on {group.subject}"


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
