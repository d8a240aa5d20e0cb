"""Where a broker stands before a job reads: subjects, the groups on each, and the inboxes of these. Asked first, so
that whatever is read afterwards knows at least as much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway.client import url
from fairway.names import Group, Subject
from fairway.protocol.admin import Depth, Describe, Described, SubjectState
from fairway.spark.calling import Caller
from fairway.spark.event_log import Trail
from fairway.spark.event_options import is_meant
from fairway.spark.jobs.picking import Picking
from fairway.spark.looking import Extent, unknown
from fairway.spark.options import is_pattern


class Standing(NamedTuple):
    """What the broker said."""

    extents: dict[str, Extent]  # by subject, inboxes included
    cursors: dict[tuple[str, str], int]  # by subject and group: the next that is handed out for the first time
    inboxes: dict[str, str]  # whose subject they belong to
    told_from_ms: int  # since when the action log tells what happens; 0: from the beginning
    log_id: str  # of messages, as an archive notes it
    now_ms: int  # by its clock

    @property
    def subjects(self) -> list[str]:
        """Without inboxes."""
        return [name for name in self.extents if name not in self.inboxes]


def look(picking: Picking, groups: frozenset[str] | None = None) -> Standing:
    """The subjects that are meant, and what belongs to them; of some groups, or of all."""
    with Caller(url.parse(picking.url).brokers, picking.patience_s) as caller:
        stored: list[str] = []
        standing = Standing({}, {}, {}, Trail(caller, None, is_strict=False).told_from_ms(), "", 0)
        for page in _pages(caller):
            standing = standing._replace(log_id=f"{page.broker.log_id:016x}", now_ms=page.broker.now_ms)
            for each in page.subjects:
                stored.append(each.name)
                if is_meant(each.name, picking.subjects):
                    _note(standing, each, groups)
        for name in picking.subjects:
            if picking.archive is None and not is_pattern(name) and name not in standing.extents:
                raise unknown(name, stored, caller.where)
        _look_into_inboxes(caller, standing)
    return standing


def _look_into_inboxes(caller: Caller, standing: Standing) -> None:
    """An inbox is described only to who asks for it by its name; all are asked for at once."""
    owners = {str(Subject.inbox(Group(group), Subject(subject))): subject for subject, group in standing.cursors}
    tickets = {name: caller.put(Describe(Depth.GROUPS, name)) for name in owners}
    for name, ticket in tickets.items():
        for each in caller.take(ticket, Described)[0].subjects:
            standing.inboxes[name] = owners[name]
            _note(standing, each, None)


def _pages(caller: Caller) -> Iterator[Described]:
    after = ""
    while True:
        page = caller.ask(Describe(Depth.GROUPS, None, None, after), Described)
        yield page
        if not page.next:
            return
        after = page.next


def _note(standing: Standing, found: SubjectState, groups: frozenset[str] | None) -> None:
    standing.extents[found.name] = Extent(found.first_sequence, found.committed_end)
    for each in found.groups:
        if groups is None or each.name in groups:
            standing.cursors[found.name, each.name] = each.cursor
