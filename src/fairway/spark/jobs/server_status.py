"""What servers say when a job asks: subjects, groups and inboxes before it reads, and their own counts afterwards.

`look` asks brokers first, so everything that is read afterwards is at least as new as the answers.

`counts` and `scheduled` check balances that are made from the log alone. Brokers count the messages that a group holds
and has not settled. Delay servers count the messages that are scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fairway.errors import Code, Refused
from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import (
    Depth,
    Describe,
    Described,
    GroupDescription,
    Retrace,
    Retraced,
    SubjectDescription,
)
from fairway.protocol.delay_messages import DelayTally, Tallied, Which
from fairway.protocol.messages import Whence
from fairway.spark.connection import BlockingClient
from fairway.spark.events.plan import SparkActionLogReader
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import is_meant, is_pattern
from fairway.spark.plan import SubjectExtent, unknown
from fairway.spark.server_groups import SubjectPart, broker_places, caller_to, delay_places


class ConsumptionStatus(NamedTuple):
    """The answers of all broker groups."""

    extents: dict[SubjectPart, SubjectExtent]  # inboxes included
    cursors: dict[tuple[SubjectPart, str], int]  # by subject and group: the next to be handed out for the first time
    inboxes: dict[str, str]  # the subject that each belongs to
    told_from_ms: dict[str, int]  # since when each action log has events; 0: from the beginning
    log_ids: dict[str, str]  # of message logs, in the form that an archive records
    now_ms: list[int]  # by the clocks of the brokers

    @property
    def parts(self) -> list[SubjectPart]:
        """The subjects in their broker groups, without inboxes."""
        return [part for part in self.extents if part.subject not in self.inboxes]

    @property
    def subjects(self) -> list[str]:
        """The names of the subjects, without inboxes."""
        return list(dict.fromkeys(part.subject for part in self.parts))

    @property
    def names(self) -> list[str]:
        """The names of all subjects, inboxes included."""
        return list(dict.fromkeys(part.subject for part in self.extents))


def look(picking: Picking, groups: frozenset[str] | None = None) -> ConsumptionStatus:
    """Ask for the subjects that are meant, with their groups (some or all) and inboxes."""
    stored: list[str] = []
    consumption = ConsumptionStatus({}, {}, {}, {}, {}, [])
    for place in broker_places(picking.url, picking.patience_s):
        with caller_to(place) as caller:
            group = place.broker_group
            consumption.told_from_ms[group] = SparkActionLogReader(caller, None, is_strict=False).told_from_ms()
            for page in described(caller, Depth.GROUPS):
                consumption.log_ids[group] = _id(page.broker.log_id)
                consumption.now_ms.append(page.broker.now_ms)
                stored += [each.name for each in page.subjects]
                for each in page.subjects:
                    if is_meant(each.name, picking.subjects):
                        _note(consumption, each, group, groups)
            _look_into_inboxes(caller, group, consumption)
    for name in picking.subjects:
        is_there = any(part.subject == name for part in consumption.extents)
        if picking.archive is None and not is_pattern(name) and not is_there:
            raise unknown(name, stored, picking.url)
    return consumption


def _look_into_inboxes(caller: BlockingClient, broker_group: str, consumption: ConsumptionStatus) -> None:
    """Describe the inboxes. A broker describes an inbox only if asked by its name; all are asked for at once."""
    owners = {
        str(Subject.inbox(GroupName(group), Subject(part.subject))): part.subject
        for part, group in consumption.cursors
        if part.broker_group == broker_group
    }
    tickets = {name: caller.put(Describe(Depth.GROUPS, name)) for name in owners}
    for name, ticket in tickets.items():
        for each in caller.take(ticket, Described)[0].subjects:
            consumption.inboxes[name] = owners[name]
            _note(consumption, each, broker_group, None)


def described(caller: BlockingClient, depth: Depth) -> Iterator[Described]:
    """The broker's description of all its subjects, page by page."""
    after = ""
    while True:
        page = caller.ask(Describe(depth, None, None, after), Described)
        yield page
        if not page.next:
            return
        after = page.next


def _note(
    consumption: ConsumptionStatus, found: SubjectDescription, broker_group: str, groups: frozenset[str] | None
) -> None:
    part = SubjectPart(found.name, broker_group)
    consumption.extents[part] = SubjectExtent.of(found)
    for each in found.groups:
        if groups is None or each.name in groups:
            consumption.cursors[part, each.name] = each.cursor


@dataclass(frozen=True)
class Scheduled:
    """The messages that delay servers hold."""

    is_there: bool  # whether there is a delay server
    messages: Mapping[str, int] = field(default_factory=dict)  # by subject
    # By subject and the start of a window, in ms. Subjects with more windows than a delay server counts are missing.
    windows: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass
class Counts:
    """The counts of brokers."""

    now_ms: int = 0  # by the broker's clock
    positions: dict[str, int] = field(default_factory=dict)  # ends of action logs: while they stay, no group has acted
    extents: dict[SubjectPart, SubjectExtent] = field(default_factory=dict)
    log_ids: dict[str, str] = field(default_factory=dict)  # of message logs, in the form that an archive records
    # By subject and group: what is handed out, and neither acked nor dead; how many broker groups have the group.
    owed: Counter[tuple[str, str]] = field(default_factory=Counter)
    spread: Counter[tuple[str, str]] = field(default_factory=Counter)


def log_ids(url: str, patience_s: int) -> dict[str, str]:
    """The id of the message log of each broker group, in the form that an archive records."""
    found = {}
    for place in broker_places(url, patience_s):
        with caller_to(place) as caller:
            page = caller.ask(Describe(Depth.SUBJECTS, items_max=1), Described)
            found[place.broker_group] = _id(page.broker.log_id)
    return found


def counts(url: str, patience_s: int, subjects: Iterable[str]) -> Counts:
    """The counts of every group on these subjects. `positions` are no later than the rest."""
    wanted, found = set(subjects), Counts()
    for place in broker_places(url, patience_s):
        with caller_to(place) as caller:
            found.positions[place.broker_group] = caller.ask(Retrace(Whence.LATEST, 0, 0, None), Retraced).committed_end
            for page in described(caller, Depth.GROUPS):
                found.now_ms = max(found.now_ms, page.broker.now_ms)
                found.log_ids[place.broker_group] = _id(page.broker.log_id)
                for each in (each for each in page.subjects if each.name in wanted):
                    found.extents[SubjectPart(each.name, place.broker_group)] = SubjectExtent.of(each)
                    for group in each.groups:
                        found.owed[each.name, group.name] += group.in_flight + waiting_in(group)
                        found.spread[each.name, group.name] += 1
    return found


def _id(log_id: int) -> str:
    return f"{log_id:016x}"


def waiting_in(group: GroupDescription) -> int:
    """Messages that were handed out, and are to be handed out again or to become dead letters."""
    return group.returned + group.retrying + group.dying


def scheduled(url: str, patience_s: int, subjects: Iterable[str], window_ms: int) -> Scheduled:
    """How many messages are scheduled, and in which windows they are due."""
    messages, windows, is_there, names = Counter[str](), Counter[tuple[str, int]](), False, list(subjects)
    for place in delay_places(url, patience_s):
        with caller_to(place) as caller:
            try:
                total = caller.ask(DelayTally(Which()), Tallied).count
            except Refused as refused:
                if refused.code in _NO_DELAY:
                    continue
                raise
            is_there = True
            for name in names if total else ():
                counted = _tallied(caller, name, window_ms)
                messages[name] += counted.count
                windows.update({(name, each.start_ms): each.count for each in counted.stretches})
    return Scheduled(is_there, messages, windows)


# The refusals of a broker that keeps no delayed messages, or does not know the request.
_NO_DELAY: Final = frozenset({Code.BAD_REQUEST, Code.UNSUPPORTED})


def _tallied(caller: BlockingClient, subject: str, window_ms: int) -> Tallied:
    try:
        return caller.ask(DelayTally(Which(subject), window_ms), Tallied)
    except Refused as refused:
        if refused.code is not Code.TOO_LARGE:
            raise
        return caller.ask(DelayTally(Which(subject)), Tallied)
