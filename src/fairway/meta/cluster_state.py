"""Cluster state of a meta server: the registry's records, and the version at which each last changed.

The version counts changes. A change of a copy's load matters to tools only. A client that knows version 7 gets every
record with a stamp above 7, and nothing else.

The route table follows: pure functions that compute from the records what clients learn about groups and subjects. A
group of servers is alive while the copy that its record names as master is registered. A group takes messages while it
is alive, is not draining, has enough copies in sync, and its master is not read-only. Producers get the groups that
take messages. Consumers get all groups that hold messages, dead ones included: a consumer waits for a group that is
away, but would count the messages of an unknown group as consumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairway.errors import Code, Refused
from fairway.protocol.route_messages import ClientRole, Copy, GroupRoute, Route, Routed, SubjectRoute
from fairway.registry.layout import GroupRecord, RegisteredCopy, SubjectRecord

ALL_SUBJECTS_MAX = 1_000  # in one answer about all subjects: with the longest names a control message holds them

# What a poll can wait for: a subject, a group, any group of delay servers, or any change at all.
Key = tuple[str, str]
ANY_DELAY: Key = ("delays", "")
ANYTHING: Key = ("all", "")


def subject_key(name: str) -> Key:
    return "subject", name


def group_key(name: str) -> Key:
    return "group", name


def groups_of(record: SubjectRecord) -> list[str]:
    return [*dict.fromkeys((*record.groups, *record.writable))]


class ClusterState:
    """The records, and their stamps. Each change returns the keys of the polls to answer."""

    def __init__(self) -> None:
        self.version = 1  # 0 means: none
        self.subjects: dict[str, SubjectRecord] = {}
        self.carried: Counter[str] = Counter()  # by group: how many subjects it takes new messages of
        self.groups: dict[str, GroupView] = {}
        self.metas: list[str] = []
        self._stamps: dict[Key, int] = {}
        self._names_sorted: list[str] = []  # of all subjects

    # --- changes -----------------------------------------------------------------------------------------------------

    def put_subject(self, name: str, record: SubjectRecord | None) -> list[Key]:
        """Set a subject's record. None: the subject is gone."""
        if self.subjects.get(name) == record:
            return []
        before = self.subjects.get(name)
        self.carried.subtract(() if before is None else before.writable)
        self.carried.update(() if record is None else record.writable)
        if record is None:
            del self.subjects[name]
            del self._names_sorted[bisect_left(self._names_sorted, name)]
        else:
            self.subjects[name] = record
            if before is None:
                insort(self._names_sorted, name)
        return self._stamp(subject_key(name))

    def put_group(self, name: str, record: GroupRecord | None, living: Mapping[str, RegisteredCopy]) -> list[Key]:
        """Set a group's record and live copies. Without both, the group is gone."""
        before = self.groups.get(name)
        after = GroupView(name, record, dict(living)) if record is not None or living else None
        if before == after:
            return []
        if after is None:
            del self.groups[name]
        else:
            self.groups[name] = after
        if _told(before) == _told(after):
            self._grow()
            return [ANYTHING]
        keys = self._stamp(group_key(name))
        is_delay = any(view is not None and view.kind == DELAY for view in (before, after))
        if is_delay:
            self._stamps[ANY_DELAY] = self.version
        return [*keys, ANY_DELAY] if is_delay else keys

    def put_metas(self, addresses: list[str]) -> list[Key]:
        if addresses == self.metas:
            return []
        self.metas = addresses
        self._grow()
        return [ANYTHING]

    def _stamp(self, key: Key) -> list[Key]:
        self._stamps[key] = self._grow()
        return [key, ANYTHING]

    def _grow(self) -> int:
        self.version += 1
        return self.version

    # --- answers -----------------------------------------------------------------------------------------------------

    def keys_of(self, asker: ClientRole, subjects: Iterable[str]) -> set[Key]:
        """The keys that an answer about these subjects depends on."""
        if asker is ClientRole.TOOL:
            return {ANYTHING}
        names = {base_of(name) for name in subjects}
        keys = {subject_key(name) for name in names}
        if asker is ClientRole.SCHEDULER:
            return keys | {ANY_DELAY}
        return keys | {
            group_key(group) for name in names if name in self.subjects for group in groups_of(self.subjects[name])
        }

    def missing(self, route: Route) -> list[str]:
        """The requested subjects that do not exist."""
        return [base for base in dict.fromkeys(map(base_of, route.subjects)) if base not in self.subjects]

    def has_news(self, route: Route) -> bool:
        """Whether anything has changed since the version that the client knows."""
        if route.asker is ClientRole.TOOL:
            return self.version > route.known
        return any(self.has_changed(route.asker, base_of(name), route.known) for name in route.subjects)

    def answer(
        self,
        route: Route,
        names: list[str] | None = None,
        *,
        policy: bool,
        is_old: bool = False,
        trouble_of: Callable[[str], str] = lambda _: "",
    ) -> Routed:
        """The answer to a route request: everything, or what is new to the client. `names`: the new subjects, if the
        caller knows them. `trouble_of`: why a subject cannot be created yet."""
        is_tool = route.asker is ClientRole.TOOL
        has_more = False
        if names is None:
            names, has_more = self._names(route)
        subjects = [self._subject(route, name, policy=policy, trouble_of=trouble_of) for name in names]
        groups = {name: None for subject in subjects for name in (*subject.groups, *subject.writable)}
        if is_tool and not route.subjects:
            groups = dict.fromkeys(self.groups)
        views = [self.groups.get(name) or GroupView(name) for name in sorted(groups)]
        return Routed(
            self.version,
            subjects,
            [group_route(view, with_copies=is_tool) for view in views],
            is_old,
            list(self.metas) if is_tool else [],
            has_more,
        )

    def _names(self, route: Route) -> tuple[list[str], bool]:
        """The names of the subjects for the answer, and whether more follow."""
        if route.asker is ClientRole.TOOL and not route.subjects:
            first = bisect_right(self._names_sorted, route.after)
            names = self._names_sorted[first : first + ALL_SUBJECTS_MAX + 1]
            return names[:ALL_SUBJECTS_MAX], len(names) > ALL_SUBJECTS_MAX
        names = [*dict.fromkeys(route.subjects)]
        if not route.known or route.asker is ClientRole.TOOL:
            return names, False
        return [name for name in names if self.has_changed(route.asker, base_of(name), route.known)], False

    def has_changed(self, asker: ClientRole, subject: str, known: int) -> bool:
        """Whether a client's view of a subject has changed since version `known`."""
        keys = [subject_key(subject)]
        if asker is ClientRole.SCHEDULER:
            keys.append(ANY_DELAY)
        elif subject in self.subjects:
            keys += map(group_key, groups_of(self.subjects[subject]))
        return any(self._stamps.get(key, 0) > known for key in keys)

    def _subject(self, route: Route, name: str, *, policy: bool, trouble_of: Callable[[str], str]) -> SubjectRoute:
        base = base_of(name)
        record = self.subjects.get(base)
        if record is None:
            return missing_subject(name, may_create=route.may_create, policy=policy, trouble=trouble_of(base))
        return subject_route(route.asker, name, record, self.groups)


def _told(view: GroupView | None) -> object:
    """What a group looks like to clients other than tools."""
    return None if view is None else (view.kind, group_route(view))


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
