"""What servers say of themselves when they are asked: how the broker's time was divided among groups, how far each is
behind, what waits for its time and how late that was. Where one gives no such figure, a sentence stands in its place.

The broker's time is that of its loop. Each group has an account there, which begins anew when the group was idle for a
minute; so a share is of what the accounts hold now, or, where somebody watches for a while, of what was used meanwhile.
In a cluster each broker group is asked, and a group of consumers has one figure: the sum over them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from fairway.client import url as urls
from fairway.client.sync import Client
from fairway.errors import FairwayError, Misuse
from fairway.protocol.admin import Depth, Describe, Described, GroupDescription
from fairway.spark.event_options import is_meant
from fairway.spark.jobs import scraping
from fairway.spark.options import is_pattern
from fairway.spark.places import DELAY, ServerGroupAddress, ServerGroups, broker_places, caller_to

LATENESS: Final = "fairway_delay_lateness_seconds"
HOUR: Final = timedelta(hours=1)
ALL: Final = "*"


@dataclass
class GroupCapacity:
    """A group on a subject. Counts are messages."""

    subject: str
    group: str
    share: float | None  # of the time that all groups had; None: none had any
    busy_s: float  # time of the broker's loop
    cold_s: float  # time of reads that missed the page cache
    cold_share: float  # of the group's own time, both together
    lag: int  # not handed out yet
    in_flight: int
    waiting: int  # handed back, to be tried again, on their way to dead letter
    dead: int
    lost: int
    oldest_s: float | None  # age of the oldest that it is not done with
    consumers: int
    weight: float
    is_paused: bool
    stored: int = 0  # in its subject, within the time of the report
    acked: int = 0  # within the time of the report
    lag_most: int | None = None  # within the time of the report: stored and not done with

    @property
    def owed(self) -> int:
        """What the group is not done with."""
        return self.lag + self.in_flight + self.waiting


@dataclass(frozen=True)
class Due:
    """How many messages are due in the hour that begins then."""

    at: datetime
    messages: int


@dataclass(frozen=True)
class Late:
    """How many delayed messages were at most so late, and later than the bound before; None: later than that."""

    seconds: float | None
    messages: int


@dataclass
class DelayCapacity:
    """What waits for its time, and how late what had its time was."""

    overdue: int | None = None  # due, and not delivered yet
    forecast: list[Due] = field(default_factory=list)
    lateness: list[Late] = field(default_factory=list)
    late_mean_s: float | None = None


@dataclass
class Seen:
    """What brokers said at one moment. Each figure by the broker group that gave it."""

    now_ms: int
    ends: dict[str, dict[str, int]]  # of subjects
    groups: dict[tuple[str, str], dict[str, GroupDescription]]  # by subject and group

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.now_ms / 1_000, UTC)


def look(url: str, patience_s: int) -> Seen:
    """All subjects and groups of a broker, or of all broker groups of a cluster."""
    seen = Seen(0, {}, {})
    for place in broker_places(url, patience_s):
        for page in _pages(place):
            seen.now_ms = max(seen.now_ms, page.broker.now_ms)
            for subject in page.subjects:
                seen.ends.setdefault(subject.name, {})[place.broker_group] = subject.committed_end
                for each in subject.groups:
                    seen.groups.setdefault((subject.name, each.name), {})[place.broker_group] = each
    return seen


def _pages(place: ServerGroupAddress) -> Iterator[Described]:
    after = ""
    with caller_to(place) as caller:
        while True:
            page = caller.ask(Describe(Depth.CONSUMERS, None, None, after), Described)
            yield page
            after = page.next
            if not after:
                return


def meant(asked: Sequence[str], stored: Iterable[str], where: str) -> list[str]:
    """The subjects that were named, or match a pattern; the broker's own only where a pattern says so."""
    there = sorted(stored)
    for each in asked:
        if not is_pattern(each) and each not in there:
            near = difflib.get_close_matches(each, there, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there) or 'none'}"
            raise Misuse(f"no subject {each!r} on {where}: {hint}")
    return [name for name in there if is_meant(name, tuple(asked) or (ALL,))]


# --- the broker's time ------------------------------------------------------------------------------------------------


def groups(seen: Seen, before: Seen | None, subjects: Iterable[str]) -> list[GroupCapacity]:
    """Those of some subjects, the busiest first. Shares are of the time of all groups, also of those not shown."""
    used_ns = {key: _used_ns(seen, before, key) for key in seen.groups}
    all_ns = sum(served_ns for served_ns, _ in used_ns.values())
    shown = set(subjects)
    found = [
        _group(key, [*states.values()], *used_ns[key], all_ns, seen.now_ms)
        for key, states in seen.groups.items()
        if key[0] in shown
    ]  # fmt: skip
    return sorted(found, key=lambda each: (-each.busy_s, each.subject, each.group))


def remarks(seen: Seen, before: Seen | None, shown: Sequence[GroupCapacity]) -> Iterator[str]:
    """What the figures do not say."""
    if not shown:
        yield "Nobody consumes these subjects: there is no group to speak of."
        return
    if shown[0].share is None:
        yield (
            "No group has used the broker's time of late, so there are no shares: look while there is work, or watch "
            "for a while (--observe 30s)."
        )
        return
    forgotten = sum(
        all(state.actor is None for state in seen.groups[each.subject, each.group].values()) for each in shown
    )
    if before is None and forgotten:
        yield (
            f"{forgotten} of {len(shown)} groups were idle for a minute or more: the broker has closed their accounts, "
            "and their share shows as 0."
        )


def _used_ns(seen: Seen, before: Seen | None, key: tuple[str, str]) -> tuple[int, int]:
    """Of the loops, and of cold reads."""
    old = {} if before is None else before.groups.get(key, {})
    used = [_used_there_ns(state, old.get(name)) for name, state in seen.groups[key].items()]
    return sum(served_ns for served_ns, _ in used), sum(cold_ns for _, cold_ns in used)


def _used_there_ns(state: GroupDescription, before: GroupDescription | None) -> tuple[int, int]:
    """In one broker group."""
    now = _account_ns(state)
    if before is None:
        return now
    old = _account_ns(before)
    if now[0] < old[0]:  # the account was closed meanwhile, and opened anew
        return now
    return now[0] - old[0], max(now[1] - old[1], 0)


def _account_ns(state: GroupDescription) -> tuple[int, int]:
    return (0, 0) if state.actor is None else (state.actor.served_ns, state.actor.cold_ns)


def _group(
    key: tuple[str, str], states: Sequence[GroupDescription], served_ns: int, cold_ns: int, all_ns: int, now_ms: int
) -> GroupCapacity:  # fmt: skip
    oldest_ms = min((state.oldest_ms for state in states if state.oldest_ms is not None), default=None)
    return GroupCapacity(
        *key,
        share=served_ns / all_ns if all_ns else None,
        busy_s=served_ns / 1e9,
        cold_s=cold_ns / 1e9,
        cold_share=cold_ns / (served_ns + cold_ns) if cold_ns else 0.0,
        lag=sum(state.lag for state in states),
        in_flight=sum(state.in_flight for state in states),
        waiting=sum(map(waiting_in, states)),
        dead=sum(state.dead for state in states),
        lost=sum(state.lost for state in states),
        oldest_s=None if oldest_ms is None else max(now_ms - oldest_ms, 0) / 1_000,
        consumers=max(state.consumers_count for state in states),  # each is in all broker groups
        weight=max(state.weight for state in states),
        is_paused=any(state.is_paused for state in states),
    )


def waiting_in(state: GroupDescription) -> int:
    """Messages that were handed out, and are to be once more, or to be dead letters."""
    return state.returned + state.retrying + state.dying


# --- delayed messages -------------------------------------------------------------------------------------------------


def forecast(
    client: Client, subjects: Sequence[str] | None, now: datetime, hours: int, into: DelayCapacity
) -> Iterator[str]:
    """What is due in each hour to come, of some subjects or of all; gives a sentence where nobody knows."""
    due: dict[datetime, int] = {}
    overdue = 0
    try:
        for subject in (None,) if subjects is None else subjects:
            overdue += client.delayed.count(subject, between=(None, now))
            found = client.delayed.histogram(HOUR, subject, between=(now, now + hours * HOUR))
            for at, messages in found.items():
                due[at] = due.get(at, 0) + messages
    except FairwayError as error:
        yield f"There is no forecast, since no delay server answers: {error}."
        return
    into.overdue = overdue
    first = now.replace(minute=0, second=0, microsecond=0)
    into.forecast = [Due(first + hour * HOUR, due.get(first + hour * HOUR, 0)) for hour in range(hours + 1)]


def lateness(pages: Sequence[str], into: DelayCapacity) -> Iterator[str]:
    """How late messages were, from the figures of delay servers; gives a sentence where there are none."""
    if not pages:
        yield (
            "How late delayed messages were is known to the delay server alone, which shows it at its /metrics: start "
            "it with --http-port PORT, and name it here with --metrics http://HOST:PORT/metrics."
        )
        return
    known: list[scraping.ScrapedHistogram] = []
    for page in pages:
        try:
            found = scraping.histogram(scraping.page(page), LATENESS)
        except FairwayError as error:
            yield f"How late delayed messages were is not known: {error}."
            continue
        if found is None:
            yield f"How late delayed messages were is not known: {page} belongs to a server without delayed messages."
        else:
            known.append(found)
    counted = [each for each in known if each.count]
    if known and not counted:
        yield "No delayed message has had its time since the delay server was started."
    if counted:
        late = scraping.together(counted)
        into.lateness = [
            Late(scraping.seconds(bound), count) for bound, count in zip(late.bounds, late.counts, strict=True)
        ]
        into.late_mean_s = late.total / late.count


def metrics_of(url: str, patience_s: int) -> list[str]:
    """Where the delay servers of a cluster that lead show their figures, as far as meta servers know."""
    if not urls.parse_any(url).meta:
        return []
    with ServerGroups(url, patience_s) as atlas:
        groups = atlas.groups(DELAY).values()
    leading = [copy for each in groups for copy in each.copies if each.master and copy.address == each.master]
    return [f"http://{_host(copy.address)}:{copy.http_port}/metrics" for copy in leading if copy.http_port]


def _host(address: str) -> str:
    return address.rpartition(":")[0]
