"""Cluster administration: changes of the registry for clients and operators. Each change is compare-and-set.

Each change can be repeated: made twice, it has the same result as made once. So after a lost answer, the administration
makes the change again. A change that is impossible raises `Refused` before anything was changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from fairway import limits
from fairway.errors import Code, Refused
from fairway.meta.cluster_state import BROKER, DELAY, ClusterState, GroupView, Key, check_names, choose, is_able
from fairway.meta.decommission_check import Debt, Masters
from fairway.names import GroupName, Subject
from fairway.protocol.route_messages import Govern, Governed, RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, SubjectRecord
from fairway.registry.port import AnswerLost, Exists, Missing, Registry, SessionOver, VersionMismatch
from fairway.replication.leadership import NotPromoted, change_master

_PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)  # one before each attempt: others change the same
# node at the same moment, which passes at once; a lost registry connection is back within seconds
_RETRY_AFTER_MS = 1_000

_CLOSED_S = 10.0  # for a master to report that it takes nothing any more
_LOOK_S = 0.05
_PROMOTED_S = 10.0  # for the registry to show the result of a promotion

RecordT = TypeVar("RecordT", GroupRecord, SubjectRecord)


class ClusterAdmin:
    """Changes records in the registry and in the cluster state. The caller sees a change at once, others when their
    watch fires."""

    def __init__(
        self,
        registry: Registry,
        cluster_state: ClusterState,
        told: Callable[[list[Key]], None],
        masters: Masters,
        spread: int,
    ) -> None:
        self._registry = registry
        self._cluster_state = cluster_state
        self._told = told
        self._masters = masters
        self._spread = spread

    async def govern(self, asked: Govern) -> Governed:
        """Carry out an operator's decision."""
        return await _CHANGES[asked.change](self, asked)

    # --- subjects ----------------------------------------------------------------------------------------------------

    async def create(
        self, name: str, groups: Sequence[str] = (), number: int = 0, *, is_on_first_use: bool = False
    ) -> Governed:
        """Create a subject. An existing subject stays as it is, and must be on the requested groups."""
        subject = str(Subject.parse(name))
        wanted = check_names(groups, self._cluster_state.groups)
        self._check_room(subject)
        chosen = wanted or (self._choose(number) if number else self._choose_new())
        record = SubjectRecord(chosen, chosen, is_on_first_use=is_on_first_use)
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self._registry.create(layout.subject_path(subject), layout.pack(record))
            except Exists:
                return await self._existing(subject, wanted)
            except (AnswerLost, SessionOver):
                continue
            self._told(self._cluster_state.put_subject(subject, record))
            return Governed(f"subject {subject} is on {', '.join(chosen)}", chosen)
        raise _silent()

    async def _existing(self, subject: str, wanted: Sequence[str]) -> Governed:
        record = await self._read(SubjectRecord, layout.subject_path(subject))
        if record is None:
            raise _busy(subject)
        if wanted and not set(wanted) <= set(record.groups):
            raise Refused(
                Code.BAD_REQUEST,
                f"subject {subject} exists, on {', '.join(record.groups)}: "
                f"`fairway subject extend {subject} --to {' --to '.join(wanted)}` brings it to more groups",
            )
        self._told(self._cluster_state.put_subject(subject, record))
        return Governed("", list(record.groups))

    async def _create(self, asked: Govern) -> Governed:
        done = await self.create(asked.name, asked.groups, asked.number)
        if asked.options:
            return await self._options(asked)
        if self._cluster_state.subjects[asked.name].is_on_first_use:
            await self._change_subject(asked.name, lambda before: before, "is on")
        return done

    async def adopt(self, subject: str, holders: Sequence[str]) -> bool:
        """Name broker groups that hold messages of a subject in its route. Return whether the route has changed."""
        path = layout.subject_path(str(Subject.parse(subject)))

        def named(before: SubjectRecord) -> SubjectRecord:
            return msgspec.structs.replace(before, groups=[*dict.fromkeys((*before.groups, *holders))])

        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            before, after = await self._change(SubjectRecord, path, named)
            if after is not None:
                self._told(self._cluster_state.put_subject(subject, after))
                return before != after
            self._check_room(subject)
            views = [self._cluster_state.groups.get(each) or GroupView(each) for each in holders]
            able = [view.name for view in views if is_able(view)] or self._choose_new()
            record = SubjectRecord([*dict.fromkeys((*holders, *able))], able, is_on_first_use=True)
            try:
                await self._registry.create(path, layout.pack(record))
            except (Exists, AnswerLost, SessionOver):
                continue
            self._told(self._cluster_state.put_subject(subject, record))
            return True
        raise _silent()

    async def expire(self, subject: str, version: int) -> bool:
        """Remove a route if its node has this version. Return whether the route may be gone now."""
        try:
            await self._registry.remove(layout.subject_path(subject), version)
        except (Missing, VersionMismatch, SessionOver):
            return False
        except AnswerLost:
            return True
        self._told(self._cluster_state.put_subject(subject, None))
        return True

    async def _extend(self, asked: Govern) -> Governed:
        wanted = check_names(asked.groups, self._cluster_state.groups)
        for name in wanted:
            if why := self._cluster_state.groups[name].why_closed():
                raise Refused(Code.READ_ONLY, f"{why}: choose another group, or wait")

        if not wanted and not asked.number:
            raise Refused(Code.BAD_REQUEST, "name the groups to extend to, or how many it shall be in all")

        def extended(before: SubjectRecord) -> SubjectRecord:
            more = asked.number - len(before.writable)
            return _with(before, wanted or (self._choose(more, before.writable) if more > 0 else []))

        return await self._change_subject(asked.name, extended, "is on")

    async def _retreat(self, asked: Govern) -> Governed:
        leaving = check_names(asked.groups, self._cluster_state.groups)
        without = partial(self._without, asked.name, leaving=leaving, is_forced=asked.is_forced)
        return await self._change_subject(asked.name, without, "takes new messages on")

    def _without(
        self, subject: str, before: SubjectRecord, leaving: Collection[str], *, is_forced: bool
    ) -> SubjectRecord:
        """Stop new messages to these groups. If none is left, another group takes their place."""
        writable = [group for group in before.writable if group not in leaving]
        if writable or not before.writable:
            return msgspec.structs.replace(before, writable=writable)
        try:
            others = self._choose(1, leaving)
        except Refused as refused:
            if is_forced:
                return msgspec.structs.replace(before, writable=[])
            sentence = f"nobody else would take messages of {subject}: {refused.sentence}; --force does it anyway"
            raise Refused(refused.code, sentence) from refused
        return _with(msgspec.structs.replace(before, writable=[]), others)

    async def _read_only(self, asked: Govern) -> Governed:
        switched = partial(msgspec.structs.replace, is_read_only=asked.is_on)
        said = "is read-only, on" if asked.is_on else "takes messages again, on"
        return await self._change_subject(asked.name, switched, said)

    async def _pause(self, asked: Govern) -> Governed:
        groups = [str(GroupName.parse(each)) for each in asked.groups]
        if not groups:
            raise Refused(Code.BAD_REQUEST, "no consumer group is named: say which one to pause or to resume")

        def switched(before: SubjectRecord) -> SubjectRecord:
            rest = [each for each in before.paused if each not in groups]
            return msgspec.structs.replace(before, paused=sorted({*rest, *groups}) if asked.is_on else rest)

        said = f"hands {'nothing' if asked.is_on else 'messages again'} to {', '.join(groups)}, on"
        return await self._change_subject(asked.name, switched, said)

    async def _options(self, asked: Govern) -> Governed:
        is_ordered = asked.options.get("ordered")
        if is_ordered not in {None, "", "true", "false"}:
            raise Refused(Code.BAD_REQUEST, f"option ordered is true or false, not {is_ordered!r}")
        others = {name: value for name, value in asked.options.items() if name != "ordered"}

        def changed(before: SubjectRecord) -> SubjectRecord:
            options = {name: value for name, value in {**before.options, **others}.items() if value}
            ordered = before.is_ordered if is_ordered is None else is_ordered == "true"
            return msgspec.structs.replace(before, options=options, is_ordered=ordered)

        return await self._change_subject(asked.name, changed, "has new options, on")

    async def _change_subject(
        self, name: str, change: Callable[[SubjectRecord], SubjectRecord], said: str, *, keeps_origin: bool = False
    ) -> Governed:
        """`keeps_origin`: the decision is about a group of servers, so the subject stays marked as created on first
        use."""
        subject = str(Subject.parse(name))

        def changed(before: SubjectRecord) -> SubjectRecord:
            is_on_first_use = before.is_on_first_use and keeps_origin
            return msgspec.structs.replace(change(before), is_on_first_use=is_on_first_use)

        before, after = await self._change(SubjectRecord, layout.subject_path(subject), changed)
        if after is None or before is None:
            raise Refused(
                Code.NO_SUCH_SUBJECT, f"there is no subject {subject}: `fairway subject create {subject}` makes it"
            )
        self._told(self._cluster_state.put_subject(subject, after))
        where = after.writable if said.startswith("takes") else after.groups
        is_same = after == msgspec.structs.replace(before, is_on_first_use=after.is_on_first_use)
        return Governed("" if is_same else f"subject {subject} {said} {', '.join(where)}", list(after.groups))

    async def _remove_subject(self, asked: Govern) -> Governed:
        """Forget where a subject is. A later request creates the subject again."""
        subject = str(Subject.parse(asked.name))
        path = layout.subject_path(subject)
        existed = await self._registry.get(path, fresh=True) is not None
        await self._remove(path)
        self._told(self._cluster_state.put_subject(subject, None))
        return Governed(f"subject {subject} is removed" if existed else "")

    def _check_room(self, subject: str) -> None:
        known = self._cluster_state.subjects
        if subject not in known and (why := Subject(subject).why_not_new):
            raise Refused(Code.BAD_NAME, why)
        if subject not in known and len(known) >= limits.SUBJECTS_MAX:
            raise Refused(
                Code.TOO_LARGE,
                f"this cluster has {limits.SUBJECTS_MAX} subjects and makes no more: "
                "remove some (fairway subject remove SUBJECT)",
            )

    def _choose_new(self) -> list[str]:
        """The groups for a new subject: as many as configured, or as many as there are."""
        able = [view for view in self._cluster_state.groups.values() if is_able(view)]
        return self._choose(min(self._spread, len(able)) or 1)

    def _choose(self, number: int, without: Collection[str] = ()) -> list[str]:
        return choose(self._cluster_state.groups.values(), self._cluster_state.carried, number, without)

    # --- groups of servers -------------------------------------------------------------------------------------------

    def _group(self, name: str) -> GroupView:
        view = self._cluster_state.groups.get(name)
        if view is not None and view.record is None:  # servers of a forgotten group, or of one that never had a master
            raise Refused(
                Code.BAD_REQUEST,
                f"group {name} of servers is not in the registry, though servers of it run and wait: stop them. "
                "`fairway cluster --check` says how the group is made anew",
            )
        if view is None:
            known = (
                ", ".join(sorted(each.name for each in self._cluster_state.groups.values() if each.record)) or "none"
            )
            raise Refused(Code.BAD_REQUEST, f"there is no group {name} of servers: there are {known}")
        return view

    async def _drain(self, asked: Govern) -> Governed:
        name = self._group(asked.name).name
        if asked.is_on:
            self._check_successor(name, is_forced=asked.is_forced)
        before, after = await self._change_group(name, is_draining=asked.is_on, is_done=False, is_closed=False)
        if before is None or after is None:
            raise Refused(Code.BAD_REQUEST, f"group {name} of servers is gone")
        moved = 0
        for subject, record in sorted(self._cluster_state.subjects.items()):
            if name in (record.writable if asked.is_on else record.groups):
                moved += await self._drain_subject(subject, name, asked)
        if before == after and not moved:
            return Governed("")
        if not asked.is_on:
            return Governed(f"group {name} takes messages again, of {_subjects(moved)}")
        return Governed(f"group {name} is being drained: new messages of {_subjects(moved)} go elsewhere from now on")

    async def _drain_subject(self, subject: str, group: str, asked: Govern) -> bool:
        def changed(before: SubjectRecord) -> SubjectRecord:
            if asked.is_on:
                return self._without(subject, before, [group], is_forced=True)
            return _with(before, [group]) if group in before.groups else before

        return bool((await self._change_subject(subject, changed, "is on", keeps_origin=True)).sentence)

    def _check_successor(self, name: str, *, is_forced: bool) -> None:
        """Refuse if this group alone takes messages of some subject, and no other group can."""
        alone = [
            subject for subject, record in sorted(self._cluster_state.subjects.items()) if record.writable == [name]
        ]
        if alone and not is_forced:
            self._without(alone[0], self._cluster_state.subjects[alone[0]], [name], is_forced=False)

    async def _decommission(self, asked: Govern) -> Governed:
        if asked.name not in self._cluster_state.groups and await self._forget_name(asked.name):
            return Governed(f"group {asked.name} is forgotten: nobody has ever led it")
        view = self._group(asked.name)
        if asked.groups:
            return await self._forget_copies(view, asked.groups)
        holding = [
            subject for subject, record in sorted(self._cluster_state.subjects.items()) if view.name in record.groups
        ]
        if not asked.is_forced:
            if not view.is_draining:
                raise Refused(
                    Code.BAD_REQUEST, f"group {view.name} is in use: `fairway cluster drain {view.name}` first"
                )
            is_asked = not view.is_done and (bool(holding) or view.kind != BROKER)
            await self._check_owed(view, is_asked=is_asked)
        elif not view.is_draining:
            await self._drain(Govern(RouteChange.DRAIN, view.name, is_forced=True))
        if view.living:
            await self._mark(view, is_closed=True, is_done=True)
            return Governed(
                f"group {view.name} owes nothing and takes nothing any more: stop its servers, "
                f"then `fairway cluster decommission {view.name}` once more, and it is forgotten"
            )
        for subject in holding:  # not before: until then senders of unconfirmed batches must find the group
            await self._let_go(subject, view.name)
        for path in (layout.members_path(view.name), layout.group_path(view.name)):
            await self._remove(path)
        self._told(self._cluster_state.put_group(view.name, None, {}))
        return Governed(f"group {view.name} is forgotten; its data directories are as they were")

    async def _forget_name(self, name: str) -> bool:
        """Remove the empty folders of a group without record and members. Return whether there were any."""
        group = str(GroupName.parse(name))
        node = await self._registry.get(layout.group_path(group), fresh=True)
        if node is None or node.value or await self._registry.children(layout.members_path(group)):
            return False
        for path in (layout.members_path(group), layout.group_path(group)):
            await self._remove(path)
        return True

    async def _check_owed(self, view: GroupView, *, is_asked: bool) -> None:
        """`Refused` while messages would be lost with the group. `is_asked`: its master must be asked.

        A draining group still takes batches that it may have stored already, because their senders can send them
        nowhere else. So the group is closed to those before anybody is asked: nothing can arrive after the answers. A
        batch that is refused meanwhile counts as outstanding at a delay server, or stays with its sender.

        A group that was done opens again if something is outstanding after all, as after a restore of a delay server
        from a backup: the remedy is to start the group's servers, which must then answer."""
        is_closing, is_clear = bool(view.living) and not view.is_done, False
        debt = Debt()
        try:
            if is_closing:
                debt = await self._close(view)
            if not debt.sentence and view.kind == BROKER:
                debt = await self._masters.bound_for(view.name, self._delays())
            if not debt.sentence and (is_asked or is_closing):
                debt = await self._masters.owed(self._group(view.name))
            is_clear = not debt.sentence
        finally:
            if not is_clear and (is_closing or (debt.sentence and debt.is_known)):
                await self._mark(view, is_closed=False)
        if debt.sentence:
            raise Refused(Code.BUSY, f"group {view.name} is not done: {debt.sentence}", retry_after_ms=_RETRY_AFTER_MS)

    def _delays(self) -> list[GroupView]:
        """The groups of delay servers that may have something outstanding: not those that are stopped and done."""
        views = self._cluster_state.groups.values()
        return [each for each in views if each.kind == DELAY and (each.living or not each.is_done)]

    async def _close(self, view: GroupView) -> Debt:
        """Close a group, and return once its master has confirmed that. The result has a sentence if the master does
        not."""
        await self._mark(view, is_closed=True)
        for _ in range(int(_CLOSED_S / _LOOK_S)):
            master = self._group(view.name).master
            if master is None or master.is_closed:
                return Debt()  # without a master, nobody can be asked, either
            await asyncio.sleep(_LOOK_S)
        sentence = "its master does not say that it has closed: ask again, and if it is of an older version, upgrade it"
        return Debt(sentence, is_known=False)

    async def _mark(self, view: GroupView, *, is_closed: bool, is_done: bool = False) -> None:
        """`is_done`: nothing is outstanding, and nobody can be asked once the servers are stopped."""
        await self._change_group(view.name, is_closed=is_closed, is_done=is_done)

    async def _change_group(self, name: str, **fields: object) -> tuple[GroupRecord | None, GroupRecord | None]:
        return await self._change_record_of(name, lambda before: msgspec.structs.replace(before, **fields))

    async def _change_record_of(
        self, name: str, change: Callable[[GroupRecord], GroupRecord]
    ) -> tuple[GroupRecord | None, GroupRecord | None]:
        before, after = await self._change(GroupRecord, layout.group_path(name), change)
        view = self._cluster_state.groups.get(name)
        if after is not None:
            self._told(self._cluster_state.put_group(name, after, {} if view is None else view.living))
        return before, after

    async def _let_go(self, subject: str, group: str) -> None:
        def without(before: SubjectRecord) -> SubjectRecord:
            rest = self._without(subject, before, [group], is_forced=True)
            return msgspec.structs.replace(rest, groups=[each for each in rest.groups if each != group])

        await self._change_subject(subject, without, "is on", keeps_origin=True)

    async def _forget_copies(self, view: GroupView, copies: Sequence[str]) -> Governed:
        """Forget copies that will not come back."""
        record = view.record
        for copy in copies:
            if copy in view.living:
                raise Refused(Code.BAD_REQUEST, f"copy {copy} of group {view.name} lives: stop its server first")
            if record is not None and copy in record.in_sync:
                sentence = f"copy {copy} of group {view.name} counts as in sync: wait until its master lets go of it"
                raise Refused(Code.BUSY, sentence, retry_after_ms=_RETRY_AFTER_MS)

        def without(before: GroupRecord) -> GroupRecord:
            return msgspec.structs.replace(before, members=[each for each in before.members if each not in copies])

        before, after = await self._change_record_of(view.name, without)
        return Governed("" if before == after else f"group {view.name} has forgotten {', '.join(copies)}")

    async def _promote(self, asked: Govern) -> Governed:
        """Make another copy master. `is_forced`: even a copy that may lack acknowledged messages."""
        if len(asked.groups) > 1:
            raise Refused(Code.BAD_REQUEST, f"{len(asked.groups)} copies are named: one leads")
        group, to = str(GroupName.parse(asked.name)), asked.groups[0] if asked.groups else None
        try:
            async with asyncio.timeout(_PROMOTED_S):
                return Governed(await change_master(self._registry, group, to, accepts_data_loss=asked.is_forced))
        except NotPromoted as error:
            raise Refused(Code.BAD_REQUEST, str(error)) from error
        except TimeoutError:
            raise _silent() from None

    # --- the registry ------------------------------------------------------------------------------------------------

    async def _read(self, kind: type[RecordT], path: str) -> RecordT | None:
        node = await self._registry.get(path, fresh=True)
        return None if node is None or not node.value else layout.unpack(kind, path, node.value)

    async def _change(
        self, kind: type[RecordT], path: str, change: Callable[[RecordT], RecordT]
    ) -> tuple[RecordT | None, RecordT | None]:
        """Change a record. Return the record before and after; both None if there is none."""
        first: RecordT | None = None
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                node = await self._registry.get(path, fresh=True)
                if node is None or not node.value:  # a group that never had a master
                    return None, None
                before = layout.unpack(kind, path, node.value)
                first = before if first is None else first
                after = change(before)
                if after != before:
                    await self._registry.put(path, layout.pack(after), node.version)
            except (VersionMismatch, AnswerLost, SessionOver):
                continue
            except Missing:
                return None, None
            return first, after
        raise _silent()

    async def _remove(self, path: str) -> None:
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self._registry.remove(path)
            except Missing:
                return
            except (AnswerLost, SessionOver):
                continue
            return
        raise _silent()


_CHANGES: dict[RouteChange, Callable[[ClusterAdmin, Govern], Awaitable[Governed]]] = {
    RouteChange.CREATE: ClusterAdmin._create,
    RouteChange.EXTEND: ClusterAdmin._extend,
    RouteChange.RETREAT: ClusterAdmin._retreat,
    RouteChange.READ_ONLY: ClusterAdmin._read_only,
    RouteChange.PAUSE: ClusterAdmin._pause,
    RouteChange.OPTIONS: ClusterAdmin._options,
    RouteChange.DRAIN: ClusterAdmin._drain,
    RouteChange.DECOMMISSION: ClusterAdmin._decommission,
    RouteChange.PROMOTE: ClusterAdmin._promote,
    RouteChange.REMOVE: ClusterAdmin._remove_subject,
}


def _with(record: SubjectRecord, more: Sequence[str]) -> SubjectRecord:
    """Add groups to a subject."""
    groups = [*record.groups, *(each for each in more if each not in record.groups)]
    writable = [*record.writable, *(each for each in more if each not in record.writable)]
    return msgspec.structs.replace(record, groups=groups, writable=writable)


def _subjects(number: int) -> str:
    return "1 subject" if number == 1 else f"{number} subjects"


def _busy(name: str) -> Refused:
    return Refused(Code.BUSY, f"{name} changes all the time: ask again", retry_after_ms=_RETRY_AFTER_MS)


def _silent() -> Refused:
    return Refused(
        Code.OTHER,
        "the registry does not answer, so whether the change was made is not known: ask again, twice does no harm",
        retry_after_ms=_RETRY_AFTER_MS,
    )
