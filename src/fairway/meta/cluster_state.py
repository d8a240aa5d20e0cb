"""Cluster state of a meta server: the registry's records, and the version at which each last changed.

The version counts changes. A change of a copy's load matters to tools only. A client that knows version 7 gets every
record with a stamp above 7, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from fairway.meta.route_table import DELAY, GroupView, base_of, group_route, missing_subject, subject_route
from fairway.protocol.route_messages import ClientRole, Route, Routed, SubjectRoute
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
        return keys | {group_key(group) for name in names if name in self.subjects for group in self._held(name)}

    def _held(self, subject: str) -> list[str]:
        record = self.subjects[subject]
        return list(dict.fromkeys((*record.groups, *record.writable)))

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
            keys += map(group_key, self._held(subject))
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
