"""Asks servers for their figures: how the broker's time was divided among groups, each group's lag, delayed messages.

If a server does not give a figure, a sentence takes its place.

The broker's time is that of its loop. Each group has an account there, which begins anew when the group was idle for a
minute. So a share is of what the accounts hold now, or, with an observation period, of what was used in that period. In
a cluster each broker group is asked, and a group of consumers has one figure: the sum over them.

`scraped_page` and `histogram` read a server's `/metrics` once, for a job that wants one of its figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from fairway.client import url as urls
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse
from fairway.protocol.admin_messages import Depth, GroupDescription
from fairway.redaction import without_password
from fairway.runtime.net import WireCut, http_get
from fairway.spark.jobs.server_status import described, waiting_in
from fairway.spark.options import hint, is_meant, is_pattern
from fairway.spark.server_groups import DELAY, ServerGroups, broker_places, caller_to

PAGE_BYTES_MAX: Final = 64 << 20
_PATIENCE_S: Final = 10.0
_SAMPLE: Final = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?")
_LE: Final = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True)
class ScrapedHistogram:
    """Counts of values: each is of values up to its bound, and above the bound before. The last bound is infinite."""

    bounds: list[float]
    counts: list[int]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class NoFigures(FairwayError):
    """No server shows figures there; the message says why."""


def scraped_page(url: str) -> str:
    """The text of the page now."""
    try:
        status, page = http_get(*place(url), _PATIENCE_S, PAGE_BYTES_MAX)
    except WireCut as problem:
        raise NoFigures(f"{without_password(url)} has not answered: {problem}") from problem
    if status != 200:
        raise NoFigures(
            f"{without_password(url)} has no figures: it says {status}; name the page /metrics of the server"
        )
    return page.decode("utf-8", "replace")


def histogram(text: str, name: str) -> ScrapedHistogram | None:
    """The histogram of that name on a page; None: the page has none."""
    below: list[tuple[float, int]] = []
    total = 0.0
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        if found["name"] == f"{name}_bucket" and (bound := _LE.search(found["labels"] or "")):
            below.append((float(bound[1]), int(float(found["value"]))))
        elif found["name"] == f"{name}_sum":
            total = float(found["value"])
    if not below:
        return None
    below.sort()
    counts = [here - before for (_, here), (_, before) in zip(below, [(0.0, 0), *below], strict=False)]
    return ScrapedHistogram([bound for bound, _ in below], counts, total)


def together(many: Iterable[ScrapedHistogram]) -> ScrapedHistogram:
    """The sum of several servers' histograms, by bounds: servers of another release may have other bounds."""
    counts: Counter[float] = Counter()
    total = 0.0
    for each in many:
        counts.update(dict(zip(each.bounds, each.counts, strict=True)))
        total += each.total
    bounds = sorted(counts)
    return ScrapedHistogram(bounds, [counts[bound] for bound in bounds], total)


def place(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL; `Misuse` says how to write it."""
    found = urlsplit(url)
    if found.scheme != "http" or not found.hostname:
        shown = without_password(url)
        raise Misuse(f"--metrics {shown!r}: write http://HOST:PORT/metrics, as `--http-port` of the server opens it")
    try:
        port = found.port or 80
    except ValueError as error:
        raise Misuse(f"--metrics {without_password(url)!r}: {error}") from None
    return found.hostname, port, found.path if found.path.strip("/") else "/metrics"


LATENESS: Final = "fairway_delay_lateness_seconds"
HOUR: Final = timedelta(hours=1)
ALL: Final = "*"


@dataclass
class GroupCapacity:
    """A group on a subject. Counts are of messages."""

    subject: str
    group: str
    share: float | None  # of the time that all groups used; None: no group used any
    busy_s: float  # time of the broker's loop
    cold_s: float  # time of reads that missed the page cache
    cold_share: float  # cold reads in the group's own time, loop and cold reads together
    lag: int  # not handed out yet
    in_flight: int
    waiting: int  # handed back, to be retried, or on their way to dead letters
    dead: int
    lost: int
    oldest_s: float | None  # age of the oldest message that is not settled
    consumers: int
    weight: float
    is_paused: bool
    stored: int = 0  # in its subject, within the time of the report
    acked: int = 0  # within the time of the report
    lag_most: int | None = None  # the most messages stored and not settled, within the time of the report

    @property
    def owed(self) -> int:
        """The messages that the group has not settled."""
        return self.lag + self.in_flight + self.waiting


@dataclass(frozen=True)
class Due:
    """How many messages are due in the hour that begins at `at`."""

    at: datetime
    messages: int


@dataclass(frozen=True)
class Late:
    """How many delayed messages were late by up to `seconds`, and more than the bound before; None: no upper bound."""

    seconds: float | None
    messages: int


@dataclass
class DelayCapacity:
    """Pending delayed messages, and how late delivered ones were."""

    overdue: int | None = None  # due, and not delivered yet
    forecast: list[Due] = field(default_factory=list)
    lateness: list[Late] = field(default_factory=list)
    late_mean_s: float | None = None


@dataclass
class Seen:
    """The answers of brokers at one moment. Each figure is kept by the broker group that gave it."""

    now_ms: int
    ends: dict[str, dict[str, int]]  # of subjects
    groups: dict[tuple[str, str], dict[str, GroupDescription]]  # by subject and group

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.now_ms / 1_000, UTC)


def look(url: str, patience_s: int) -> Seen:
    """Ask a broker, or all broker groups of a cluster, for all subjects and groups."""
    seen = Seen(0, {}, {})
    for place in broker_places(url, patience_s):
        with caller_to(place) as caller:
            for page in described(caller, Depth.CONSUMERS):
                seen.now_ms = max(seen.now_ms, page.broker.now_ms)
                for subject in page.subjects:
                    seen.ends.setdefault(subject.name, {})[place.broker_group] = subject.committed_end
                    for each in subject.groups:
                        seen.groups.setdefault((subject.name, each.name), {})[place.broker_group] = each
    return seen


def meant(asked: Sequence[str], stored: Iterable[str], where: str) -> list[str]:
    """The subjects that are named, or match a pattern; internal subjects match only patterns with a colon."""
    there = sorted(stored)
    for each in asked:
        if not is_pattern(each) and each not in there:
            more = hint(each, there, f"there are {', '.join(there) or 'none'}")
            raise Misuse(f"no subject {each!r} on {where}: {more}")
    return [name for name in there if is_meant(name, tuple(asked) or (ALL,))]


# --- the broker's time ------------------------------------------------------------------------------------------------


def groups(seen: Seen, before: Seen | None, subjects: Iterable[str]) -> list[GroupCapacity]:
    """The groups of some subjects, the busiest first. Shares are of the time of all groups, also of those not shown."""
    used_ns: dict[tuple[str, str], tuple[int, int]] = {}  # of the loops and of cold reads, in all broker groups
    for key, states in seen.groups.items():
        old = {} if before is None else before.groups.get(key, {})
        used = [_used_there_ns(state, old.get(name)) for name, state in states.items()]
        used_ns[key] = sum(served_ns for served_ns, _ in used), sum(cold_ns for _, cold_ns in used)
    all_ns = sum(served_ns for served_ns, _ in used_ns.values())
    shown = set(subjects)
    found = [
        _group(key, [*states.values()], *used_ns[key], all_ns, seen.now_ms)
        for key, states in seen.groups.items()
        if key[0] in shown
    ]  # fmt: skip
    return sorted(found, key=lambda each: (-each.busy_s, each.subject, each.group))


def remarks(seen: Seen, before: Seen | None, shown: Sequence[GroupCapacity]) -> Iterator[str]:
    """Sentences about gaps in the figures."""
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


def _used_there_ns(state: GroupDescription, before: GroupDescription | None) -> tuple[int, int]:
    """The time that a group used in one broker group."""
    now = _account_ns(state)
    if before is None:
        return now
    old = _account_ns(before)
    if now[0] < old[0]:  # the account was closed meanwhile, and opened again
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
        consumers=max(state.consumers_count for state in states),  # each consumer is in all broker groups
        weight=max(state.weight for state in states),
        is_paused=any(state.is_paused for state in states),
    )


# --- delayed messages -------------------------------------------------------------------------------------------------


def forecast(
    client: Client, subjects: Sequence[str] | None, now: datetime, hours: int, into: DelayCapacity
) -> Iterator[str]:
    """Fill in the messages due in each coming hour, of some subjects or of all; yields a sentence if that is
    unknown."""
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
    """Fill in how late messages were, from the figures of delay servers; yields a sentence if there are none."""
    if not pages:
        yield (
            "How late delayed messages were is known to the delay server alone, which shows it at its /metrics: start "
            "it with --http-port PORT, and name it here with --metrics http://HOST:PORT/metrics."
        )
        return
    known: list[ScrapedHistogram] = []
    for page in pages:
        try:
            found = histogram(scraped_page(page), LATENESS)
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
        late = together(counted)
        into.lateness = [
            Late(None if math.isinf(bound) else bound, count)
            for bound, count in zip(late.bounds, late.counts, strict=True)
        ]
        into.late_mean_s = late.total / late.count


def metrics_of(url: str, patience_s: int) -> list[str]:
    """The `/metrics` pages of the leading delay servers of a cluster, as far as meta servers know them."""
    if not urls.parse_any(url).meta:
        return []
    with ServerGroups(url, patience_s) as server_groups:
        groups = server_groups.groups(DELAY).values()
    leading = [copy for each in groups for copy in each.copies if each.master and copy.address == each.master]
    return [f"http://{copy.address.rpartition(':')[0]}:{copy.http_port}/metrics" for copy in leading if copy.http_port]
