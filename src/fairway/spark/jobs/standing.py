"""Where brokers stand before a job reads: subjects, the groups on each, and the inboxes of these. Asked first, so that
whatever is read afterwards knows at least as much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway.names import GroupName, Subject
from fairway.protocol.admin import Depth, Describe, Described, SubjectDescription
from fairway.spark.brokers import SubjectExtent
from fairway.spark.calling import BlockingClient
from fairway.spark.event_log import SparkActionLogReader
from fairway.spark.event_options import is_meant
from fairway.spark.jobs.picking import Picking
from fairway.spark.looking import unknown
from fairway.spark.options import is_pattern
from fairway.spark.places import SubjectPart, broker_places, caller_to


class ConsumptionStatus(NamedTuple):
    """What the broker groups said."""

    extents: dict[SubjectPart, SubjectExtent]  # inboxes included
    cursors: dict[tuple[SubjectPart, str], int]  # by subject and group: the next that is handed out for the first time
    inboxes: dict[str, str]  # whose subject they belong to
    told_from_ms: dict[str, int]  # since when each action log tells what happens; 0: from the beginning
    log_ids: dict[str, str]  # of messages, as an archive notes it
    now_ms: list[int]  # by their clocks

    @property
    def parts(self) -> list[SubjectPart]:
        """Without inboxes."""
        return [part for part in self.extents if part.subject not in self.inboxes]

    @property
    def subjects(self) -> list[str]:
        """The same, whichever broker groups hold them."""
        return list(dict.fromkeys(part.subject for part in self.parts))

    @property
    def names(self) -> list[str]:
        """Of all that is looked at, inboxes included."""
        return list(dict.fromkeys(part.subject for part in self.extents))


def look(picking: Picking, groups: frozenset[str] | None = None) -> ConsumptionStatus:
    """The subjects that are meant, and what belongs to them; of some groups, or of all."""
    stored: list[str] = []
    standing = ConsumptionStatus({}, {}, {}, {}, {}, [])
    for place in broker_places(picking.url, picking.patience_s):
        with caller_to(place) as caller:
            _look_at(caller, place.broker_group, picking, groups, standing, stored)
    for name in picking.subjects:
        is_there = any(part.subject == name for part in standing.extents)
        if picking.archive is None and not is_pattern(name) and not is_there:
            raise unknown(name, stored, picking.url)
    return standing


def _look_at(
    caller: BlockingClient,
    broker_group: str,
    picking: Picking,
    groups: frozenset[str] | None,
    standing: ConsumptionStatus,
    stored: list[str],
) -> None:
    standing.told_from_ms[broker_group] = SparkActionLogReader(caller, None, is_strict=False).told_from_ms()
    for page in _pages(caller):
        standing.log_ids[broker_group] = f"{page.broker.log_id:016x}"
        standing.now_ms.append(page.broker.now_ms)
        for each in page.subjects:
            stored.append(each.name)
            if is_meant(each.name, picking.subjects):
                _note(standing, each, broker_group, groups)
    _look_into_inboxes(caller, broker_group, standing)


def _look_into_inboxes(caller: BlockingClient, broker_group: str, standing: ConsumptionStatus) -> None:
    """An inbox is described only to who asks for it by its name; all are asked for at once."""
    owners = {
        str(Subject.inbox(GroupName(group), Subject(part.subject))): part.subject
        for part, group in standing.cursors
        if part.broker_group == broker_group
    }
    tickets = {name: caller.put(Describe(Depth.GROUPS, name)) for name in owners}
    for name, ticket in tickets.items():
        for each in caller.take(ticket, Described)[0].subjects:
            standing.inboxes[name] = owners[name]
            _note(standing, each, broker_group, None)


def _pages(caller: BlockingClient) -> Iterator[Described]:
    after = ""
    while True:
        page = caller.ask(Describe(Depth.GROUPS, None, None, after), Described)
        yield page
        if not page.next:
            return
        after = page.next


def _note(
    standing: ConsumptionStatus, found: SubjectDescription, broker_group: str, groups: frozenset[str] | None
) -> None:
    part = SubjectPart(found.name, broker_group)
    standing.extents[part] = SubjectExtent(found.first_sequence, found.committed_end)
    for each in found.groups:
        if groups is None or each.name in groups:
            standing.cursors[part, each.name] = each.cursor
