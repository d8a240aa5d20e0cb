"""Asks brokers for their subjects, groups and inboxes before a job reads.

Asking first makes sure that everything read afterwards is at least as new as the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import Depth, Describe, Described, SubjectDescription
from fairway.spark.connection import BlockingClient
from fairway.spark.events.plan import SparkActionLogReader
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import is_meant, is_pattern
from fairway.spark.plan import SubjectExtent, unknown
from fairway.spark.server_groups import SubjectPart, broker_places, caller_to


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
            _look_at(caller, place.broker_group, picking, groups, consumption, stored)
    for name in picking.subjects:
        is_there = any(part.subject == name for part in consumption.extents)
        if picking.archive is None and not is_pattern(name) and not is_there:
            raise unknown(name, stored, picking.url)
    return consumption


def _look_at(
    caller: BlockingClient,
    broker_group: str,
    picking: Picking,
    groups: frozenset[str] | None,
    consumption: ConsumptionStatus,
    stored: list[str],
) -> None:
    consumption.told_from_ms[broker_group] = SparkActionLogReader(caller, None, is_strict=False).told_from_ms()
    for page in _pages(caller):
        consumption.log_ids[broker_group] = f"{page.broker.log_id:016x}"
        consumption.now_ms.append(page.broker.now_ms)
        for each in page.subjects:
            stored.append(each.name)
            if is_meant(each.name, picking.subjects):
                _note(consumption, each, broker_group, groups)
    _look_into_inboxes(caller, broker_group, consumption)


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


def _pages(caller: BlockingClient) -> Iterator[Described]:
    after = ""
    while True:
        page = caller.ask(Describe(Depth.GROUPS, None, None, after), Described)
        yield page
        if not page.next:
            return
        after = page.next


def _note(
    consumption: ConsumptionStatus, found: SubjectDescription, broker_group: str, groups: frozenset[str] | None
) -> None:
    part = SubjectPart(found.name, broker_group)
    consumption.extents[part] = SubjectExtent(found.first_sequence, found.committed_end)
    for each in found.groups:
        if groups is None or each.name in groups:
            consumption.cursors[part, each.name] = each.cursor
