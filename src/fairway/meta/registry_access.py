"""Access rules of the registry of a meta server: one table says what clients may do with REGISTER.

    node                               act      who                                   value
    /fairway/groups/G                  PUT      the first copy that is registered     the record of a new group, led by
                                                in G, if the node is empty            that copy alone
                                                the master                            another in-sync set, same epoch
                                                a copy of the in-sync set             itself as master, later epoch
                                                a copy that is registered in G        the node's current value
    /fairway/groups/G/members/D-S[-N]  CREATE   session S, if nobody else is D        a `RegisteredCopy` of directory D
                                       PUT      the session that created it           a `RegisteredCopy` of directory D
                                       REMOVE   the session that created it; anybody, -
                                                once its connection is gone
    /fairway/careers/C/W-n_            CREATE   anybody, ephemeral and numbered       empty
    /fairway/careers/C/W-n_N           REMOVE   the session that created it           -

Clients may read everything below /fairway. Everything else is refused. Operators decide about subjects, removal of
groups and promotion by hand; the meta server carries out these decisions itself (GOVERN).

A registered copy is a member node. A member node belongs to a session, and only the session's opener has its secret
(`fairway.meta.registry_requests`). So a client must register in a group before it can change the group, and can then do
what copies do. The rules refuse any value that no copy would write: an epoch that goes back, a master that is not in
sync, a new copy in the in-sync set that is not registered.

A group's node is created with its first member, and is empty until a copy leads. Every change is compare-and-set. The
check reads the version that the change names, so nothing can come between check and change. A copy that does not know
the result of a change writes the current value once more, and so fences that change (`fairway.replication.leadership`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fairway import limits
from fairway.errors import Code, Refused, RemoteProtocolError
from fairway.names import GroupName
from fairway.protocol.route_messages import Act, Register
from fairway.registry import layout
from fairway.registry.layout import NAME_SEPARATOR, GroupRecord, RegisteredCopy
from fairway.registry.port import Registry
from fairway.registry.sqlite import SqliteSession
from fairway.registry.tree import checked_path, is_below
from fairway.replication.leadership import BROKER, DELAY
from fairway.runtime.net import PORT_MAX

CAREERS = f"{layout.ROOT}/careers"
_NAME = r"[^/]+"
_DIRECTORY = r"[0-9a-f]{16}"
_GROUP = re.compile(rf"{layout.GROUPS}/(?P<group>{_NAME})")
_MEMBER = re.compile(
    rf"{layout.GROUPS}/(?P<group>{_NAME})/members/(?P<directory>{_DIRECTORY})-(?P<session>[0-9a-f]{{1,16}})(?:-\d{{1,9}})?"
)
_CANDIDACY = re.compile(rf"{CAREERS}/(?P<career>{_NAME})/[0-9a-f]{{24}}-n_")
_CANDIDATE = re.compile(rf"{_CANDIDACY.pattern}\d{{10}}")
_READS = frozenset({Act.GET, Act.CHILDREN, Act.WATCH, Act.FEED})
_WRITES = frozenset({Act.CREATE, Act.PUT, Act.REMOVE})
_RETRY_AFTER_MS = 200  # the node of a process that has ended goes within a session's time-out


class _Asked(NamedTuple):
    """One write request, with the parts of its path."""

    session: SqliteSession
    register: Register
    parts: re.Match[str]
    is_held: Callable[[int], bool]

    @property
    def path(self) -> str:
        return self.register.path

    @property
    def group(self) -> str:
        return str(GroupName.parse(self.parts["group"]))


@dataclass(frozen=True, slots=True)
class _Rule:
    """One row of the table."""

    path: re.Pattern[str]
    act: Act
    check: Callable[[_Asked], Awaitable[None]]
    bytes_max: int = 0
    is_ephemeral: bool = False
    is_numbered: bool = False

    def covers(self, asked: Register) -> bool:
        is_alike = (asked.is_ephemeral, asked.is_numbered) == (self.is_ephemeral, self.is_numbered)
        return asked.act is self.act and is_alike and self.path.fullmatch(asked.path) is not None


class RegistryAccess:
    """Checks requests against the table. `is_held`: whether a live connection has that session."""

    def __init__(self, is_held: Callable[[int], bool]) -> None:
        self._is_held = is_held

    async def check(self, session: SqliteSession, asked: Register) -> None:
        """Raise `Refused` with the reason if the table does not allow the request."""
        if asked.act in _READS:
            if not (asked.path == layout.ROOT or is_below(checked_path(asked.path), layout.ROOT)):
                raise _no(f"only what is below {layout.ROOT} may be read")
            return
        if asked.act not in _WRITES:
            return
        path = checked_path(asked.path)
        rule = next((each for each in _RULES if each.covers(asked)), None)
        parts = None if rule is None else rule.path.fullmatch(path)
        if rule is None or parts is None:
            raise _no(
                f"{asked.act.name} {path} is nothing that a copy or a career does: subjects are made, and groups of "
                "servers promoted or given up, by commands (`fairway subject`, `fairway broker promote`, `fairway "
                "cluster`)"
            )
        if len(asked.value) > rule.bytes_max:
            raise Refused(
                Code.TOO_LARGE, f"{len(asked.value)} bytes for registry node {path}: at most {rule.bytes_max}"
            )
        await rule.check(_Asked(session, asked, parts, self._is_held))


# --- members ---------------------------------------------------------------------------------------------------------


async def _create_member(asked: _Asked) -> None:
    member, group, session = _member(asked), asked.group, asked.session
    if int(asked.parts["session"], 16) != asked.register.session:
        raise _no(f"registry node {asked.path} names another session than the one that makes it")
    if await session.get(asked.path) is not None:
        return  # the tree refuses it
    names = await session.children(layout.members_path(group))
    if any(name.partition(NAME_SEPARATOR)[0] == member.directory for name in names):
        raise Refused(
            Code.BUSY,
            f"directory {member.directory} is registered in group {group} already: wait until that node is gone",
            retry_after_ms=_RETRY_AFTER_MS,
        )
    _check_room(len(names), limits.GROUP_COPIES_MAX, f"group {group} has", "registered copies")
    await _check_owned(session)
    if await session.get(layout.group_path(group)) is None:
        groups = await session.children(layout.GROUPS)
        remedy = "; `fairway cluster decommission GROUP` forgets one"
        _check_room(len(groups), limits.SERVER_GROUPS_MAX, "this registry has", "groups of servers", remedy)
    record = await _record(session, group)
    if record is not None and record.kind != member.kind:
        raise _no(f"group {group} is of kind {record.kind}, and this copy is of kind {member.kind}")


async def _put_member(asked: _Asked) -> None:
    _member(asked)
    await _check_owner(asked)


async def _remove_member(asked: _Asked) -> None:
    node = await asked.session.get(asked.path)
    if node is not None and node.owner != asked.register.session and asked.is_held(node.owner):
        raise _no(f"registry node {asked.path} belongs to another session, whose connection is open")


def _member(asked: _Asked) -> RegisteredCopy:
    """The member record in the request, if it is valid."""
    member = _unpacked(RegisteredCopy, asked.path, asked.register.value)
    if member.directory != asked.parts["directory"]:
        raise _no(f"registry node {asked.path} is of another directory than {member.directory!r}")
    is_place = 0 < len(member.host) <= limits.HOST_CHARS_MAX and 0 < member.port <= PORT_MAX
    is_sound = is_place and member.kind in {BROKER, DELAY} and member.epoch >= 0
    if not is_sound:
        raise _no(
            f"a copy of kind {member.kind!r} at {member.host[:50]!r} port {member.port}, under epoch {member.epoch}, "
            "cannot be"
        )
    return member


# --- groups ----------------------------------------------------------------------------------------------------------


async def _put_group(asked: _Asked) -> None:
    session, group = asked.session, asked.group
    node = await session.get(asked.path)
    if node is None or node.version != asked.register.number - 1:
        return  # the tree refuses it
    mine = await _copies_of(asked)
    if asked.register.value == node.value:
        return
    after = _group_record(asked)
    if not node.value:
        _check_founded(group, after, mine)
        return
    before = _unpacked(GroupRecord, asked.path, node.value)
    names = await session.children(layout.members_path(group))
    living = {name.partition(NAME_SEPARATOR)[0] for name in names}
    why = why_not(before, after, living, mine)
    if why:
        raise _no(f"the record of group {group} cannot become that: {why}")


async def _copies_of(asked: _Asked) -> set[str]:
    """The directories that the session has registered in the group; `Refused` if there are none."""
    folder = layout.members_path(asked.group)
    paths = [path for path in await asked.session.owned() if is_below(path, folder)]
    mine = {path.rpartition("/")[2].partition(NAME_SEPARATOR)[0] for path in paths}
    if not mine:
        raise _no(f"this session has no copy in group {asked.group}: register one first")
    return mine


def _group_record(asked: _Asked) -> GroupRecord:
    """The group record in the request, if it is valid by itself."""
    record = _unpacked(GroupRecord, asked.path, asked.register.value)
    named = [record.master, *record.in_sync, *record.members]
    problems = {
        f"kind {record.kind!r}": record.kind not in {BROKER, DELAY},
        f"epoch {record.epoch}": not 0 < record.epoch <= limits.EPOCH_MAX,
        "a copy that is no directory id": not all(re.fullmatch(_DIRECTORY, each) for each in named),
        "a master that is not in sync": record.master not in record.in_sync,
        "a copy that is named twice": _has_twice(record.in_sync) or _has_twice(record.members),
        f"{len(record.members)} copies": len(record.members) > limits.GROUP_COPIES_MAX,
        f"min_in_sync {record.min_in_sync}": not 0 < record.min_in_sync <= limits.GROUP_COPIES_MAX,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise _no(f"{problem} in the record of group {asked.group} cannot be")
    return record


def _check_founded(group: str, record: GroupRecord, mine: set[str]) -> None:
    is_alone = record.in_sync == record.members == [record.master]
    is_open = not (record.is_draining or record.is_done or record.is_closed)
    if not (is_alone and is_open and record.master in mine):
        raise _no(f"group {group} begins with one copy, which this session has registered, and open")


def why_not(before: GroupRecord, after: GroupRecord, living: set[str], mine: set[str]) -> str:
    """Why a session with these copies may not change a group's record so; empty: it may."""
    if _decided_elsewhere(before) != _decided_elsewhere(after) or not _keeps_logs(before, after):
        return "kind, logs and what operators decide stay as they are"
    if not set(before.members) <= set(after.members):
        return "copies are forgotten by command only (`fairway cluster decommission GROUP --copy ID`)"
    if after.epoch == before.epoch:
        return _why_not_led(before, after, living, mine)
    if after.epoch < before.epoch:
        return f"epoch {after.epoch} goes back behind {before.epoch}"
    if after.epoch > before.epoch + limits.EPOCH_LEAP_MAX:
        return f"epoch {after.epoch} is too far beyond {before.epoch}"
    return _why_not_succeeded(before, after, living, mine)


def _why_not_led(before: GroupRecord, after: GroupRecord, living: set[str], mine: set[str]) -> str:
    """The master changes the in-sync set."""
    if after.master != before.master:
        return "a new master has a new epoch"
    if before.master not in mine:
        return f"only its master, {before.master}, changes it under the same epoch"
    if after.min_in_sync != before.min_in_sync:
        return "min_in_sync changes with the epoch only"
    added = [each for each in after.in_sync if each not in before.in_sync]
    strangers = [each for each in added if each not in living]
    if strangers:
        return f"{strangers[0]} is not registered, and only registered copies come to be in sync"
    unknown = set(after.members) - set(before.members) - set(added)
    return f"{min(unknown)} is named as a copy and is not in sync" if unknown else ""


def _why_not_succeeded(before: GroupRecord, after: GroupRecord, living: set[str], mine: set[str]) -> str:
    """A copy takes over as master."""
    if after.master not in mine:
        return f"this session has not registered {after.master}, which is to lead"
    if before.master != after.master and before.master in living:
        return f"{before.master} leads, and is registered: `fairway broker promote` names another master"
    if after.master not in before.in_sync:
        return f"{after.master} was not in sync, and does not have everything"
    if not set(after.in_sync) <= set(before.in_sync):
        return "whoever takes over adds nobody to the in-sync set"
    if not set(after.members) <= {*before.members, after.master}:
        return "whoever takes over adds no copies"
    return ""


def _decided_elsewhere(record: GroupRecord) -> tuple[object, ...]:
    return record.kind, record.is_draining, record.is_done, record.is_closed


def _keeps_logs(before: GroupRecord, after: GroupRecord) -> bool:
    """The log ids may not change. A group that was created by hand has none (0) until a copy takes over."""
    logs = ((before.messages_id, after.messages_id), (before.actions_id, after.actions_id))
    return all(was in (0, now) for was, now in logs)


# --- careers ---------------------------------------------------------------------------------------------------------


async def _create_candidate(asked: _Asked) -> None:
    session, career = asked.session, str(GroupName.parse(asked.parts["career"]))
    folder = f"{CAREERS}/{career}"
    await _check_owned(session)
    if await session.get(folder) is None:
        careers = await session.children(CAREERS)
        _check_room(len(careers), limits.CAREERS_MAX, "this registry has", "careers")
    else:
        candidates = await session.children(folder)
        _check_room(len(candidates), limits.CANDIDATES_MAX, f"career {career} has", "candidates")


# --- helpers ---------------------------------------------------------------------------------------------------------


async def _record(session: Registry, group: str) -> GroupRecord | None:
    path = layout.group_path(group)
    node = await session.get(path)
    return None if node is None or not node.value else _unpacked(GroupRecord, path, node.value)


def _unpacked(kind: type[layout.RecordT], path: str, value: bytes) -> layout.RecordT:
    try:
        return layout.unpack(kind, path, value)
    except RemoteProtocolError as error:
        raise _no(str(error)) from error


async def _check_owner(asked: _Asked) -> None:
    """Refuse another session's node. The tree refuses a missing node."""
    node = await asked.session.get(asked.path)
    if node is not None and node.owner != asked.register.session:
        raise _no(f"registry node {asked.path} belongs to another session")


async def _check_owned(session: SqliteSession) -> None:
    _check_room(len(await session.owned()), limits.SESSION_NODES_MAX, "this session has", "nodes")


def _check_room(number: int, most: int, who: str, what: str, remedy: str = "") -> None:
    if number >= most:
        raise Refused(Code.TOO_LARGE, f"{who} {most} {what}, and makes no more{remedy}")


def _has_twice(names: Iterable[str]) -> bool:
    listed = list(names)
    return len(set(listed)) != len(listed)


def _no(sentence: str) -> Refused:
    return Refused(Code.BAD_REQUEST, sentence)


_RULES = (
    _Rule(_GROUP, Act.PUT, _put_group, limits.REGISTRY_RECORD_BYTES_MAX),
    _Rule(_MEMBER, Act.CREATE, _create_member, limits.REGISTRY_RECORD_BYTES_MAX, is_ephemeral=True),
    _Rule(_MEMBER, Act.PUT, _put_member, limits.REGISTRY_RECORD_BYTES_MAX),
    _Rule(_MEMBER, Act.REMOVE, _remove_member),
    _Rule(_CANDIDACY, Act.CREATE, _create_candidate, is_ephemeral=True, is_numbered=True),
    _Rule(_CANDIDATE, Act.REMOVE, _check_owner),
)
