"""Route table: computes what clients learn about groups and subjects from the registry's records. Pure functions.

A group of servers is alive while the copy that its record names as master is registered. A group takes messages while
it is alive, is not draining, has enough copies in sync, and its master is not read-only. Producers get the groups that
take messages. Consumers get all groups that hold messages, dead ones included: a consumer waits for a group that is
away, but would count the messages of an unknown group as consumed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairway.errors import Code, Refused
from fairway.protocol.route_messages import ClientRole, Copy, GroupRoute, SubjectRoute
from fairway.registry.layout import GroupRecord, RegisteredCopy, SubjectRecord

BROKER = "broker"
DELAY = "delay"


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group of servers, as the registry has it."""

    name: str
    record: GroupRecord | None = None
    living: Mapping[str, RegisteredCopy] = field(default_factory=dict)  # by directory

    @property
    def kind(self) -> str:
        if self.record is not None:
            return self.record.kind
        return next((member.kind for member in self.living.values()), BROKER)  # its node does not exist yet, or is lost

    @property
    def master(self) -> RegisteredCopy | None:
        return None if self.record is None else self.living.get(self.record.master)

    @property
    def is_draining(self) -> bool:
        return self.record is not None and self.record.is_draining

    @property
    def is_done(self) -> bool:
        return self.record is not None and self.record.is_done

    def why_closed(self) -> str:
        """Why the group takes no messages; empty: it does."""
        record, master = self.record, self.master
        if record is None and any(any(member.ends) for member in self.living.values()):
            remedy = f"`fairway broker promote {self.name} --to DIR-ID --accept-data-loss` makes it anew from one"
            return f"the registry does not know who leads group {self.name}, and its copies wait: {remedy}"
        if record is None:
            return f"group {self.name} has never been led: start its servers"
        if master is None:
            return f"group {self.name} has no master: {_copies(len(self.living))} of it here, start the others"
        if record.is_draining:
            return f"group {self.name} is being drained"
        if len(record.in_sync) < record.min_in_sync:
            return f"group {self.name} has {_copies(len(record.in_sync))} in sync and needs {record.min_in_sync}"
        return f"group {self.name} is read-only: {master.why_read_only}" if master.why_read_only else ""


def address_of(member: RegisteredCopy) -> str:
    """`HOST:PORT`, as people and clients write it."""
    host = f"[{member.host}]" if ":" in member.host else member.host
    return f"{host}:{member.port}"


def group_route(view: GroupView, *, with_copies: bool = False) -> GroupRoute:
    """What clients learn about a group."""
    master, why = view.master, view.why_closed()
    others = [member for directory, member in sorted(view.living.items()) if member is not master]
    return GroupRoute(
        view.name,
        view.kind,
        0 if view.record is None else view.record.epoch,
        "" if master is None else address_of(master),
        [address_of(member) for member in others],
        is_writable=not why,
        why=why,
        is_draining=view.is_draining,
        min_in_sync=1 if view.record is None else view.record.min_in_sync,
        copies=_copies_of(view) if with_copies else [],
    )


def _copies_of(view: GroupView) -> list[Copy]:
    """Every copy that is or was in the group: the master first, then by name."""
    record = view.record
    known = set(view.living) | (set() if record is None else {*record.members, *record.in_sync, record.master} - {""})
    first = "" if record is None else record.master
    return [_copy(view, directory) for directory in sorted(known, key=lambda each: (each != first, each))]


def _copy(view: GroupView, directory: str) -> Copy:
    is_in_sync = view.record is not None and directory in view.record.in_sync
    member = view.living.get(directory)
    if member is None:
        return Copy(directory, "", "away", is_in_sync=is_in_sync)
    return Copy(
        directory, address_of(member), member.role, member.epoch, list(member.ends), is_in_sync, member.name,
        member.http_port, dict(member.load), member.started_ms,
    )  # fmt: skip


def base_of(subject: str) -> str:
    """The subject that a dead-letter or inbox subject belongs to. Both are on that subject's groups."""
    return subject.rpartition(":")[2]


def subject_route(asker: ClientRole, name: str, record: SubjectRecord, groups: Mapping[str, GroupView]) -> SubjectRoute:
    """What a client learns about an existing subject."""
    delays = delay_groups(groups.values())
    if asker is ClientRole.SCHEDULER:
        held, open_to = delays, delays
    else:
        held, open_to = list(record.groups), list(record.writable)
    views = [groups.get(each) or GroupView(each) for each in open_to]
    writable = [] if record.is_read_only else [view.name for view in views if not view.why_closed()]
    return SubjectRoute(
        name,
        held,
        writable,
        record.is_read_only,
        record.is_ordered,
        list(record.paused),
        "" if writable else _why_nowhere(asker, name, record, views),
        dict(record.options),
    )


def delay_groups(views: Iterable[GroupView]) -> list[str]:
    return sorted(view.name for view in views if view.kind == DELAY)


def _why_nowhere(asker: ClientRole, name: str, record: SubjectRecord, views: Sequence[GroupView]) -> str:
    if record.is_read_only:
        return f"subject {name} is read-only by command: `fairway subject read-only {name} --off` opens it"
    if asker is ClientRole.SCHEDULER and not views:
        return "no delay server is registered: start one with --registry (`fairway delay serve`)"
    if not views:
        return f"no group takes messages of {name}: `fairway subject extend {name}` gives it one"
    return "; ".join(view.why_closed() for view in views)


def missing_subject(name: str, *, may_create: bool, policy: bool, trouble: str = "") -> SubjectRoute:
    """What a client learns about a missing subject."""
    if not may_create:
        why = f"there is no subject {name} yet: it comes with its first message, or by `fairway subject create {name}`"
    elif not policy:
        why = f"there is no subject {name}, and none is made on first use here: `fairway subject create {name}`"
    else:
        why = trouble or f"subject {name} is being made"
    return SubjectRoute(name, [], [], why=why)


# --- which groups ----------------------------------------------------------------------------------------------------


def choose(
    views: Iterable[GroupView], carried: Mapping[str, int], number: int, without: Collection[str] = ()
) -> list[str]:
    """Choose the broker groups with the least load that take messages; `Refused` if there are not enough. `carried`:
    how many subjects each group takes new messages of.

    The load of a group is its share of the incoming bytes plus its share of the subjects. Without traffic, subjects are
    spread evenly; with traffic, they go where there is less."""
    able = [view for view in views if view.name not in without and is_able(view)]
    if len(able) < number:
        asked = f"{number} {'more ' if without else ''}broker {'group is' if number == 1 else 'groups are'} asked for"
        takes = f"{len(able)} {'takes' if len(able) == 1 else 'take'} messages now"
        remedy = "start brokers (`fairway broker --registry ... --group NAME`), or ask for fewer"
        raise Refused(Code.READ_ONLY, f"{asked} and {takes}: {remedy}", retry_after_ms=1_000)
    flow = {view.name: _bytes_per_s(view) for view in able}
    all_flow, all_carried = sum(flow.values()) or 1.0, sum(carried.get(name, 0) for name in flow) or 1

    def load_of(name: str) -> tuple[float, str]:
        return flow[name] / all_flow + carried.get(name, 0) / all_carried, name

    return sorted(sorted(flow, key=load_of)[:number])


def is_able(view: GroupView) -> bool:
    """Whether the group can get a new subject."""
    return view.kind == BROKER and not view.why_closed()


def _bytes_per_s(view: GroupView) -> float:
    return 0.0 if view.master is None else max(view.master.load.get("bytes_per_s", 0.0), 0.0)


def check_names(groups: Sequence[str], views: Mapping[str, GroupView]) -> list[str]:
    """Check broker groups that an operator has named; `Refused` names a group that does not exist."""
    for name in groups:
        view = views.get(name)
        if view is None or view.record is None:
            known = ", ".join(sorted(each.name for each in views.values() if each.kind == BROKER)) or "none"
            raise Refused(Code.BAD_REQUEST, f"there is no broker group {name}: there are {known} (`fairway cluster`)")
        if view.kind != BROKER:
            raise Refused(Code.BAD_REQUEST, f"group {name} is of delay servers, which hold no subjects")
    return list(dict.fromkeys(groups))


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"
