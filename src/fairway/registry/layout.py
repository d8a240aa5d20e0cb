"""Layout of the registry: the paths, and the records in their nodes, as JSON that people can read.

    /fairway/groups/G                  one broker group (or group of delay servers): epoch, master, in-sync set
    /fairway/groups/G/members/D-S      ephemeral: the copy in data directory D is alive in session S, with its address
                                       (D-S-N: after it has removed its node N times)
    /fairway/subjects/S                which broker groups carry the subject, and its settings
    /fairway/metas/N                   ephemeral: a meta server
    /fairway/careers/C/W-n_N           ephemeral, numbered: a candidate of a career (`fairway.career`)
    /private/session-key               with SQLite: the key of the session secrets; meta servers show it to nobody

Every change of a group's node is compare-and-set: this node alone names the master and the copies that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from fairway.errors import RemoteProtocolError

ROOT = "/fairway"
GROUPS = f"{ROOT}/groups"
SUBJECTS = f"{ROOT}/subjects"
METAS = f"{ROOT}/metas"
MASTER: Final = "master"  # the role of a member
IN_TRANSIT: Final = "in_transit/"  # prefix of a delay server's load figure, before the name of a broker group
NAME_SEPARATOR: Final = "-"  # between the directory and the session of a member


class GroupRecord(msgspec.Struct, frozen=True):
    """The master of a group, and the copies that have everything committed. Directory ids are hex, from `hex_id`."""

    kind: str  # "broker" or "delay"
    epoch: int
    master: str
    in_sync: list[str]
    min_in_sync: int = 1  # with fewer copies than this in sync, the group takes no messages
    messages_id: int = 0  # of the logs, which all copies share
    actions_id: int = 0
    is_draining: bool = False  # by command: no new subjects, no new messages
    members: list[str] = []  # every copy that was ever here and was not decommissioned
    is_done: bool = False  # by command: the group is drained, and its check found nothing outstanding
    is_closed: bool = False  # during that check: the group takes nothing, not even repeats


class RegisteredCopy(msgspec.Struct, frozen=True):
    """A copy that is alive."""

    directory: str  # hex
    host: str
    port: int
    role: str = "follower"  # its current role: master, follower, catching up, waiting; for people
    epoch: int = 0
    ends: list[int] = []
    name: str = ""  # program and version
    http_port: int | None = None
    load: dict[str, float] = {}  # messages_per_s, bytes_per_s, free_bytes, subjects
    why_read_only: str = ""
    started_ms: int = 0
    kind: str = "broker"  # or "delay": the kind of the group, should its node be lost
    is_closed: bool = False  # of the master: it has seen that the group takes nothing any more
    verifier: bytes = b""  # of the secret that the copy shows with FOLLOW; empty: an older version without secrets


class SubjectRecord(msgspec.Struct, frozen=True):
    """One subject."""

    groups: list[str]  # that hold messages of it
    writable: list[str]  # that new messages go to: `groups` without the draining ones
    is_read_only: bool = False
    is_ordered: bool = False
    paused: list[str] = []  # consumer groups that are paused
    options: dict[str, str] = {}
    is_on_first_use: bool = False  # created for a client; an operator's first change of the subject ends this


RecordT = TypeVar("RecordT", GroupRecord, RegisteredCopy, SubjectRecord)


def hex_id(directory_id: int) -> str:
    return f"{directory_id:016x}"


def group_path(group: str) -> str:
    return f"{GROUPS}/{group}"


def members_path(group: str) -> str:
    return f"{GROUPS}/{group}/members"


def member_path(group: str, name: str) -> str:
    return f"{GROUPS}/{group}/members/{name}"


def place_name(directory: str, session: int, left: int = 0) -> str:
    """Name of a live copy's node. No two sessions share a name. `left`: how often this session has removed such a node.
    No node has the name of a removed one, because its removal may be carried out late."""
    name = f"{directory}{NAME_SEPARATOR}{session:x}"
    return f"{name}{NAME_SEPARATOR}{left}" if left else name


def by_directory(members: Iterable[RegisteredCopy]) -> dict[str, RegisteredCopy]:
    """The live copies. If a directory has two nodes, one will soon go: the master's node counts."""
    found: dict[str, RegisteredCopy] = {}
    for each in members:
        before = found.get(each.directory)
        if before is None or before.role != MASTER:
            found[each.directory] = each
    return found


def subject_path(subject: str) -> str:
    return f"{SUBJECTS}/{subject}"


def pack(record: GroupRecord | RegisteredCopy | SubjectRecord) -> bytes:
    return msgspec.json.encode(record)


def unpack(kind: type[RecordT], path: str, value: bytes) -> RecordT:
    """The record in a node. `RemoteProtocolError` names a node that cannot be read."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"registry node {path} cannot be read: {error}") from error
