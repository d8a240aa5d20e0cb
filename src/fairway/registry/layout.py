"""What is in the registry: the paths, and what their nodes say, as JSON that people can read.

    /fairway/groups/G                  one broker group (or group of delay servers): epoch, master, in-sync set
    /fairway/groups/G/members/D-S      ephemeral: the copy in data directory D lives, in session S, and listens there
                                       (D-S-N: after it has given up its place N times)
    /fairway/subjects/S                which broker groups carry the subject, and how it is to be treated
    /fairway/metas/N                   ephemeral: a meta server
    /fairway/careers/C/W-n_N           ephemeral, numbered: a candidate of a career (`fairway.career`)
    /private/session-key               with SQLite: what the secrets of sessions are made with; shown to nobody

Of a group's node every change is compare-and-set: it is the one place that says who leads and whose copies count.
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
IN_TRANSIT: Final = "in_transit/"  # of a figure of a delay server: before the name of a broker group
NAME_SEPARATOR: Final = "-"  # between the directory and the session of a member


class GroupRecord(msgspec.Struct, frozen=True):
    """Who leads a group, and whose copies have everything that was committed. Directory ids in hex, as `hex_id`."""

    kind: str  # "broker" or "delay"
    epoch: int
    master: str
    in_sync: list[str]
    min_in_sync: int = 1  # fewer copies than this: produce is closed
    messages_id: int = 0  # of the logs, which all copies share
    actions_id: int = 0
    is_draining: bool = False  # by command: no new subjects, no new messages
    members: list[str] = []  # every copy that was ever here and was not decommissioned
    is_done: bool = False  # by command: it is drained, was asked what it owes, and owed nothing
    is_closed: bool = False  # while it is asked: it takes nothing, not even what it may have stored already


class RegisteredCopy(msgspec.Struct, frozen=True):
    """A copy that lives."""

    directory: str  # hex
    host: str
    port: int
    role: str = "follower"  # what it does: master, follower, catching up, waiting; for people
    epoch: int = 0
    ends: list[int] = []
    name: str = ""  # program and version
    http_port: int | None = None
    load: dict[str, float] = {}  # messages_per_s, bytes_per_s, free_bytes, subjects
    why_read_only: str = ""
    started_ms: int = 0
    kind: str = "broker"  # or "delay": what the group is, should its node be lost
    is_closed: bool = False  # of the master: it has seen that the group takes nothing any more
    verifier: bytes = b""  # of the secret that the copy shows with FOLLOW; empty: its version shows none


class SubjectRecord(msgspec.Struct, frozen=True):
    """One subject."""

    groups: list[str]  # that hold messages of it
    writable: list[str]  # that new messages go to: `groups` less those that are being drained
    is_read_only: bool = False
    is_ordered: bool = False
    paused: list[str] = []  # consumer groups that are switched off
    options: dict[str, str] = {}
    is_on_first_use: bool = False  # made for a client; an operator's first change of the subject ends this


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
    """Of the node of a copy that lives: no session has the name of another's. `left`: how often this session has
    removed such a node; no node has the name of a removed one, for its removal may be carried out late."""
    name = f"{directory}{NAME_SEPARATOR}{session:x}"
    return f"{name}{NAME_SEPARATOR}{left}" if left else name


def by_directory(members: Iterable[RegisteredCopy]) -> dict[str, RegisteredCopy]:
    """The copies that live. Of two nodes of one directory one will soon go: the master's counts."""
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
    """What a node says; `RemoteProtocolError` names the node that cannot be read."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"registry node {path} cannot be read: {error}") from error
