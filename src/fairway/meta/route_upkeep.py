"""Route upkeep: keeps routes in step with what brokers hold. It removes unused routes, and repairs missing ones.

Each client that asks for a subject has its route created, even if the client never sends. So a client could fill the
registry. A route that was created on first use expires if all of these conditions hold:

- No operator has created or changed the subject since, and clients may create subjects on first use.
- This meta server has seen the route, unchanged, for an hour of its monotonic clock. A restart begins the hour again.
- No client of this meta server waits for a change of the route: that client would have the route created again at once.
- The master of every broker group in the route says that it has no such subject. Brokers themselves remove subjects
  that were never written and have no groups, after an hour (`fairway.broker.maintenance`), so the meta server removes
  nothing from brokers. If a master cannot be asked, the upkeep asks again an hour later.

These are the steps of an expiry:

    1. read the node, fresh       its version is the one that may be removed
    2. ask the masters            none has the subject
    3. read the groups, fresh     the same masters lead under the same epochs, so no deposed master has answered
    4. remove by version          an operator's change since 1 makes the removal fail
    5. ask the masters again      a group that has the subject by now, or does not answer, gets the route back

A producer with the old route may send to its broker group at any time. The group creates the subject and acknowledges.
Before 2, step 2 sees the subject. Between 2 and 5, step 5 sees the subject and gives the route back. After 5, or if
this meta server stops between 4 and 5, no step sees the subject. A producer keeps its route for as long as it reaches
no meta server, so no order of these steps helps. Two meta servers can lose a route, too: one removes the route, a
client has it created on another group with version 0, and the second meta server removes it, because it read the first
route.

Therefore expiry needs the audit. For as long as a meta server runs, the audit reads the subjects of every broker group,
a page at a time. If a group holds a message of a subject and the subject's route does not name the group, the audit
adds the group to the route, or creates the route. So every acknowledged message has a route one round of the audit
later, and consumers that wait for the subject learn of it. `fairway subject remove` relies on the audit, too.

The audit may read a page before an operator removes a subject, and act after that. So it asks for the subject again
right before it acts. A route that comes back needlessly even then expires again later.

One meta server does all this: the first by name of the registered ones. Two at once do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from fairway import limits
from fairway.errors import FairwayError, RemoteProtocolError
from fairway.meta.admin import ClusterAdmin
from fairway.meta.cluster_state import BROKER, ClusterState, GroupView, Key, base_of, groups_of
from fairway.meta.decommission_check import Masters
from fairway.protocol.admin_messages import SubjectDescription
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, SubjectRecord
from fairway.registry.port import Registry
from fairway.runtime.clock import Clock
from fairway.runtime.service import cancel

_ROUND_S = 1.0
_MS_NS = 1_000_000

_Holders = dict[str, dict[str, SubjectDescription] | None]  # by group: the subjects that it has; None: no answer


class RouteUpkeep:
    """Removes unused routes, and gives a route to messages without one, on the meta server whose turn it is."""

    def __init__(
        self,
        registry: Registry,
        cluster_state: ClusterState,
        admin: ClusterAdmin,
        masters: Masters,
        clock: Clock,
        is_awaited: Callable[[str], bool],
        *,
        may_expire: bool,
        is_turn: Callable[[], bool],
    ) -> None:
        self.expired = 0
        self.repaired = 0
        self._registry = registry
        self._cluster_state = cluster_state
        self._admin = admin
        self._masters = masters
        self._clock = clock
        self._is_awaited = is_awaited
        self._may_expire = may_expire
        self._is_turn = is_turn
        self._since_ns: OrderedDict[str, int] = OrderedDict()  # by subject: unchanged since then; the oldest first
        self._after: dict[str, str] = {}  # by group: the last subject of the previous page of the audit
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fairway-meta-route-upkeep")

    async def stop(self) -> None:
        await cancel([self._task])

    async def _run(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(_ROUND_S)
            if not self._is_turn():
                continue
            rounds += 1
            with contextlib.suppress(FairwayError):  # the registry, or room for subjects: the next round tries again
                if self._may_expire:
                    await self.expire_unused()
            if rounds * _ROUND_S * 1_000 >= limits.ROUTES_AUDITED_EVERY_MS:
                rounds = 0
                await self._audit()

    # --- unused routes -----------------------------------------------------------------------------------------------

    def note(self, keys: Sequence[Key]) -> None:
        """Note changed subjects."""
        for kind, name in keys:
            if kind == "subject":
                record = self._cluster_state.subjects.get(name)
                self._since_ns.pop(name, None)
                if record is not None and record.is_on_first_use:
                    self._since_ns[name] = self._clock.monotonic_ns()

    async def expire_unused(self) -> None:
        """Check the next few routes that are old enough. A route whose subject has messages is not checked again unless
        it changes."""
        names = [name for name in self._due() if not self._is_awaited(name)]
        routes = {name: node for name in names if (node := await self._read(name)) is not None}
        if not routes:
            return
        records = {name: record for name, (record, _) in routes.items()}
        holders = await self._holders(records)
        for name, (record, version) in routes.items():
            if _is_held(name, record, holders) is False and await self._admin.expire(name, version):
                self.expired += 1
            else:
                del records[name]
                if any(_is_stored(held[name]) for held in holders.values() if held and name in held):
                    self._since_ns.pop(name, None)
        await self._look_again(records)

    def _due(self) -> list[str]:
        """The routes that are old enough. They are due again after another hour."""
        now_ns = self._clock.monotonic_ns()
        oldest = islice(self._since_ns.items(), limits.ROUTES_EXPIRED_AT_ONCE)
        due = [name for name, since_ns in oldest if now_ns - since_ns >= limits.SUBJECT_UNUSED_MS * _MS_NS]
        for name in due:
            self._since_ns[name] = now_ns
            self._since_ns.move_to_end(name)
        return due

    async def _read(self, subject: str) -> tuple[SubjectRecord, int] | None:
        """The route and its version, if the route may expire."""
        path = layout.subject_path(subject)
        node = await self._registry.get(path, fresh=True)
        if node is None or not node.value:
            return None
        try:
            record = layout.unpack(SubjectRecord, path, node.value)
        except RemoteProtocolError:
            return None  # `RegistryWatcher` remarks on it
        return (record, node.version) if record.is_on_first_use else None

    async def _holders(self, records: dict[str, SubjectRecord]) -> _Holders:
        """What the groups of these routes say about the subjects."""
        asked: dict[str, list[str]] = {}
        for name, record in records.items():
            for group in groups_of(record):
                asked.setdefault(group, []).append(name)
        return {group: await self._ask(group, names) for group, names in asked.items()}

    async def _ask(self, group: str, names: Sequence[str]) -> dict[str, SubjectDescription] | None:
        view = self._cluster_state.groups.get(group)
        if view is None or view.record is None:
            return None
        path = layout.group_path(group)
        try:
            found = await self._masters.subjects(view, names)
            node = await self._registry.get(path, fresh=True)
            now = None if node is None else layout.unpack(GroupRecord, path, node.value)
        except FairwayError:
            return None
        was = view.record
        return found if now is not None and (now.master, now.epoch) == (was.master, was.epoch) else None

    async def _look_again(self, removed: dict[str, SubjectRecord]) -> None:
        """Give routes back to subjects that were created meanwhile, or whose groups do not answer."""
        holders = await self._holders(removed)
        for name, record in removed.items():
            groups = [group for group in groups_of(record) if _holds(name, holders[group]) is not False]
            if groups:
                self.expired -= 1
                with contextlib.suppress(FairwayError):  # the audit will see stored messages
                    await self._admin.adopt(name, groups)

    # --- the audit ---------------------------------------------------------------------------------------------------

    async def _audit(self) -> None:
        """Audit the next page of each broker group."""
        views = [view for view in self._cluster_state.groups.values() if _is_audited(view)]
        self._after = {view.name: self._after.get(view.name, "") for view in views}
        for view in views:
            with contextlib.suppress(FairwayError):  # the next round asks again
                await self._look_at(view)

    async def _look_at(self, view: GroupView) -> None:
        page = await self._masters.page(view, self._after[view.name], limits.ROUTES_AUDITED_AT_ONCE)
        stored = [each.name for each in page.subjects if _is_stored(each)]
        lacking = [name for name in stored if self._is_lacking(base_of(name), view.name)]
        for name in stored:
            self._since_ns.pop(base_of(name), None)
        self._after[view.name] = page.next
        for name in lacking:
            with contextlib.suppress(FairwayError):  # no room, or a name that is not allowed: go on with the others
                again = await self._masters.subjects(view, [name])
                if any(map(_is_stored, again.values())) and await self._admin.adopt(base_of(name), [view.name]):
                    self.repaired += 1

    def _is_lacking(self, subject: str, group: str) -> bool:
        record = self._cluster_state.subjects.get(subject)
        return record is None or group not in record.groups


def _holds(subject: str, held: dict[str, SubjectDescription] | None) -> bool | None:
    return None if held is None else subject in held


def _is_held(subject: str, record: SubjectRecord, holders: _Holders) -> bool | None:
    """Whether any group of the route has the subject; None: some group does not answer."""
    said = [_holds(subject, holders[group]) for group in groups_of(record)]
    return None if None in said else any(said)


def _is_stored(state: SubjectDescription) -> bool:
    return state.committed_end > state.first_sequence


def _is_audited(view: GroupView) -> bool:
    """Whether to audit a group. A closed group is being given up, and was asked already."""
    record = view.record
    return view.kind == BROKER and record is not None and not record.is_done and not record.is_closed
