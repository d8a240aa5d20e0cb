"""The consumer groups of this broker: their laws, their events in the action log, their timers.

A *host* is one group on one subject. Its law is pure and knows no number, no name and no clock; the host gives it
those, writes what it decides to the action log, and wakes it when a lease ends or a retry falls due.

A view of the action log: rebuilt by replaying it, carried by the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from fairway.broker.consumer_sessions import ConsumerSessions
from fairway.broker.copies import CopiedRanges
from fairway.errors import InvariantViolated, RemoteProtocolError
from fairway.groups import Description, GroupEvent, GroupEventKind, GroupStateMachine
from fairway.names import GroupName
from fairway.storage.action_log import Action, ActionKind, unpack, unpack_groups
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES

if TYPE_CHECKING:
    from fairway.broker.pacing import TokenBucket

WEIGHT_UNIT = 1_000  # an action has no fractions: a weight of 1 is written as this
_BESIDE_THE_LAW = frozenset({ActionKind.WEIGHT, ActionKind.RATE, ActionKind.REMOVE})


class GroupHost:
    """One group on one subject. `key` names its actor."""

    def __init__(self, id_: int, subject_id: int, name: GroupName, law: GroupStateMachine | None = None) -> None:
        self.id = id_
        self.subject_id = subject_id
        self.name = name
        self.law = law if law is not None else GroupStateMachine()
        self.weight = 1.0
        self.main: GroupHost | None = None  # of an inbox: the group that it belongs to
        self.inbox: GroupHost | None = None
        self.is_inbox_open = False  # it has one that is durable: whatever lies in it is found again
        self.is_inbox_next = False  # the next response is the inbox's, if it has something
        self.rate_per_s = 0  # of an inbox: messages handed out, at most; 0 is without limit
        self.next_handout_ns = 0  # and when the next may be
        self.bucket: TokenBucket | None = None  # of a group with a rate, once somebody has pulled
        self.is_revived = False  # from the life before
        self.redriven: CopiedRanges | None = None  # which of its dead letters are in its inbox, once somebody has asked
        self.sessions = ConsumerSessions()
        self._skipped = (0, 0, 0)  # at this cursor, by this configuration: nothing is wanted below the third
        self.timer: asyncio.TimerHandle | None = None
        self.timer_ns = 0

    @property
    def key(self) -> tuple[str, int]:
        """Of the actor; a group drains its inbox beside the main subject."""
        return ("group", self.id if self.main is None else self.main.id)

    @property
    def next_fresh(self) -> int:
        """Where to look for what was never handed out: at the cursor, or beyond what was passed over there."""
        law = self.law
        cursor, version, to = self._skipped
        return to if to > law.cursor == cursor and version == law.config.version else law.cursor

    def note_skipped(self, to: int) -> None:
        """The next life will look again from the cursor on: to write every step down would be an action for every
        batch that a filter passes over."""
        self._skipped = (self.law.cursor, self.law.config.version, to)

    def describe(self, end: int, *, now_ns: int, now_ms: int) -> Description:
        """The law's own, as if what was passed over had been written down."""
        seen = self.law.describe(end, now_ns=now_ns, now_ms=now_ms)
        cursor = self.next_fresh
        if cursor == seen.cursor:
            return seen
        oldest = cursor if seen.oldest_unacked == seen.cursor else seen.oldest_unacked
        return msgspec.structs.replace(seen, cursor=cursor, lag=max(end - cursor, 0), oldest_unacked=oldest)

    def take_inbox(self, inbox: GroupHost | None) -> None:
        self.inbox = inbox
        if inbox is not None:
            inbox.main = self

    def action(self, event: GroupEvent) -> Action:
        """The event as it stands in the action log; the configuration carries the group's name with it."""
        detail = event.detail
        if event.kind is GroupEventKind.GROUP_CONFIG:
            detail = msgspec.msgpack.encode((str(self.name), detail))
        return Action(
            ActionKind(event.kind),
            self.id,
            self.subject_id,
            event.time_ms,
            event.consumer_id,
            event.attempt,
            event.due_ms,
            event.lot,
            event.ranges,
            detail,
        )


class _HostPicture(msgspec.Struct, frozen=True, array_like=True):
    id: int
    subject_id: int
    name: str
    weight: float
    law: bytes
    rate_per_s: int = 0


class _Picture(msgspec.Struct, frozen=True, array_like=True):
    next_id: int
    hosts: list[_HostPicture]
    read_only: list[int]


class Groups:
    """All hosts of this broker."""

    def __init__(self) -> None:
        self._hosts: dict[int, GroupHost] = {}
        self._by_subject: dict[int, dict[str, GroupHost]] = {}
        self._next_id = 1
        self.read_only: set[int] = set()  # subjects that take no messages, by command; asked, never iterated in order
        self._reached = 0  # of the action log, by pictures and in a replay
        self._has_holes = False  # records are missing that have rotted, or that retention took

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[GroupHost]:
        return iter(self._hosts.values())

    def of_subject(self, subject_id: int) -> dict[str, GroupHost]:
        return self._by_subject.get(subject_id, {})

    def has(self, host: GroupHost) -> bool:
        """Whether it is still one of them."""
        return self._hosts.get(host.id) is host

    def find(self, subject_id: int, name: GroupName) -> GroupHost | None:
        return self.of_subject(subject_id).get(name)

    # --- a view of the action log ------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Take in a record of the action log."""
        header = record.header
        if header.position > self._reached + SEGMENT_HEADER_BYTES:
            self._has_holes = True  # rot, or retention: the next GROUPS record has what is missing
        self._reached = header.end
        if header.kind == RecordKind.GROUPS and self._has_holes:
            self.restore(unpack_groups(record.body), header.end)  # whatever is missing before, they are whole
        if header.kind != RecordKind.ACTIONS:
            return
        for action in unpack(record.body):
            self._replay_action(action)

    def _replay_action(self, action: Action) -> None:
        if action.kind is ActionKind.READ_ONLY:
            self.note_read_only(action.subject_id, is_on=bool(action.lot))
            return
        host = self._hosts.get(action.group_id)
        detail = action.detail
        if action.kind is ActionKind.GROUP_CONFIG:
            name, detail = _read_config(action.detail)
            host = host or self._add(GroupHost(action.group_id, action.subject_id, name))
        if host is None:
            return  # the record that introduced it is rotten: the group begins anew when somebody joins
        if action.kind in _BESIDE_THE_LAW:
            self._replay_beside(host, action)
            return
        event = GroupEvent(
            GroupEventKind(action.kind),
            action.time_ms,
            action.consumer_id,
            action.attempt,
            action.due_ms,
            action.lot,
            action.ranges,
            detail,
        )
        if not self._has_holes:
            host.law.apply(event)
            return
        host.law.expect_holes()
        # It may speak of what has rotted, such as the PULL of a lot. The rest is worth a start, and another copy may
        # have what is lost.
        with contextlib.suppress(InvariantViolated, LookupError, ValueError):
            host.law.apply(event)

    def names(self) -> Iterator[Action]:
        """For readers of the action log who begin at a new segment: which group, and which consumer, has which number.
        Nothing happened, so there is no time and no configuration."""
        for host in self:
            named = msgspec.msgpack.encode((str(host.name), b""))
            yield Action(ActionKind.GROUP_CONFIG, host.id, host.subject_id, 0, detail=named)
            for consumer_id, name in host.law.members():
                yield Action(ActionKind.JOIN, host.id, host.subject_id, 0, consumer_id, detail=name.encode())

    def of_id(self, group_id: int) -> GroupHost | None:
        return self._hosts.get(group_id)

    def _replay_beside(self, host: GroupHost, action: Action) -> None:
        if action.kind is ActionKind.WEIGHT:
            host.weight = action.lot / WEIGHT_UNIT
        elif action.kind is ActionKind.RATE:
            host.rate_per_s = action.lot
        else:
            self.remove(host)

    def picture(self) -> bytes:
        """For the checkpoint."""
        hosts = [
            _HostPicture(host.id, host.subject_id, str(host.name), host.weight, host.law.snapshot(), host.rate_per_s)
            for host in self
        ]
        return msgspec.msgpack.encode(_Picture(self._next_id, hosts, sorted(self.read_only)))

    def is_whole(self, first_base: int) -> bool:
        """Whether nothing is missing. A copy that begins with `first_base` has nothing whole before it has passed a
        GROUPS record."""
        return not self._has_holes and self._reached >= first_base

    def restore(self, data: bytes, end: int) -> None:
        """Begin again with a picture of the log up to `end`; where it cannot be read, nothing has changed."""
        try:
            picture = msgspec.msgpack.decode(data, type=_Picture)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the picture of the groups cannot be read: {error}") from error
        hosts = [_restored(each) for each in picture.hosts]
        self._hosts, self._by_subject = {}, {}
        self._reached, self._has_holes = end, False
        self._next_id = picture.next_id
        self.read_only = set(picture.read_only)
        for host in hosts:
            self._add(host)

    def introduce(self, subject_id: int, name: GroupName) -> GroupHost:
        """A group that is new to this subject. It is known to the log from its first GROUP_CONFIG on."""
        return self._add(GroupHost(self._next_id, subject_id, name))

    def remove(self, host: GroupHost) -> None:
        """It has been without members for too long, or never came to be. Its number is not used again."""
        self._hosts.pop(host.id, None)
        of_subject = self._by_subject.get(host.subject_id, {})
        if of_subject.get(host.name) is host:
            del of_subject[host.name]
        if not of_subject:
            self._by_subject.pop(host.subject_id, None)

    def _add(self, host: GroupHost) -> GroupHost:
        self._hosts[host.id] = host
        self._by_subject.setdefault(host.subject_id, {})[host.name] = host
        self._next_id = max(self._next_id, host.id + 1)
        return host

    def note_read_only(self, subject_id: int, *, is_on: bool) -> None:
        if is_on:
            self.read_only.add(subject_id)
        else:
            self.read_only.discard(subject_id)


def _restored(picture: _HostPicture) -> GroupHost:
    host = GroupHost(picture.id, picture.subject_id, GroupName(picture.name), GroupStateMachine.restore(picture.law))
    host.weight = picture.weight
    host.rate_per_s = picture.rate_per_s
    return host


def _read_config(detail: bytes) -> tuple[GroupName, bytes]:
    try:
        name, config = msgspec.msgpack.decode(detail, type=tuple[str, bytes])
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error
    return GroupName(name), config
