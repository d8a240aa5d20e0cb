"""The consumer groups of this broker, and the connections that act for their consumers.

`ConsumerSessions` binds a consumer to the connection whose JOIN under the consumer's id was accepted last. The requests
of a consumer name it by its id, which is no secret. So the broker refuses every connection but the bound one:

    another connection is bound, and open    FENCED: a later JOIN was accepted, or this connection never joined
    no connection is bound                   NOT_A_MEMBER: the broker has restarted, or the bound connection has ended

In both cases the consumer has to JOIN, which takes its secret (`fairway.groups.membership`). A restart forgets all
bindings.

A `GroupHost` is one group on one subject. The group's state machine is pure: it knows no number, no name and no clock.
The host holds them, together with the group's timer, inbox and weight, and turns events into actions for the log.

`Groups` holds all hosts. It is a view of the action log: a replay of the log rebuilds it, and the checkpoint carries a
snapshot of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec

from fairway.broker.message_copies import CopiedRanges
from fairway.errors import Code, InvariantViolated, Refused, RemoteProtocolError
from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import Description, GroupStateMachine
from fairway.names import ConsumerName, GroupName
from fairway.serving.rates import TokenBucket
from fairway.serving.requests import Requester
from fairway.storage.action_log import Action, unpack, unpack_groups
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES

FENCED = Refused(Code.FENCED, "another connection has joined as this consumer: stop, or join with its secret")
NOT_JOINED = Refused(Code.NOT_A_MEMBER, "this connection has not joined as this consumer: join")


class ConsumerSessions:
    """The connections of one group's consumers."""

    def __init__(self) -> None:
        self._bound: dict[ConsumerName, Requester] = {}

    def bind(self, name: ConsumerName, session: Requester) -> bool:
        """Bind the consumer to this connection, whose JOIN was accepted. Returns whether that replaces another
        connection which is still open."""
        before = self._bound.get(name)
        self._bound[name] = session
        return before is not None and before is not session and not before.is_gone

    def check(self, name: ConsumerName, session: Requester, state_machine: GroupStateMachine) -> None:
        """Refuse a connection that may not act for the consumer. The state machine refuses consumers that are no
        members."""
        bound = self._bound.get(name)
        if bound is session:
            return
        if bound is not None and not bound.is_gone:
            raise FENCED
        if state_machine.has_member(name):
            raise NOT_JOINED

    def address(self, name: ConsumerName) -> str:
        session = self._bound.get(name)
        return "" if session is None or session.is_gone else session.address

    def has_other(self, name: ConsumerName, session: Requester) -> bool:
        """Whether another open connection acts for the consumer."""
        bound = self._bound.get(name)
        return bound is not None and bound is not session and not bound.is_gone

    def release(self, name: ConsumerName) -> None:
        """Forget the binding of a consumer that has left."""
        self._bound.pop(name, None)

    def prune(self) -> None:
        """Forget connections that have ended."""
        self._bound = {name: session for name, session in self._bound.items() if not session.is_gone}


WEIGHT_UNIT = 1_000  # an action has no fractions: this number stands for a weight of 1
_BESIDE_THE_STATE_MACHINE = frozenset({ActionKind.WEIGHT, ActionKind.RATE, ActionKind.REMOVE})


class GroupHost:
    """One group on one subject. `key` names its actor."""

    def __init__(
        self, id_: int, subject_id: int, name: GroupName, state_machine: GroupStateMachine | None = None
    ) -> None:
        self.id = id_
        self.key = ("group", id_)  # of its actor; an inbox shares the actor of its group
        self.subject_id = subject_id
        self.name = name
        self.state_machine = state_machine if state_machine is not None else GroupStateMachine()
        self.weight = 1.0
        self.main: GroupHost | None = None  # of an inbox: the group that the inbox belongs to
        self.inbox: GroupHost | None = None
        self.is_inbox_open = False  # the group has a durable inbox, so recovery finds its messages again
        self.is_inbox_next = False  # the next response comes from the inbox, if the inbox has messages
        self.rate_per_s = 0  # of an inbox: the bound on messages per second; 0: none
        self.next_handout_ns = 0  # and when the next handout may be
        self.bucket: TokenBucket | None = None  # of a group with a rate, once a consumer has pulled
        self.is_revived = False  # the group existed before the last restart
        # which of its dead letters are in its inbox, once a request has needed this
        self.redriven: CopiedRanges | None = None
        self.sessions = ConsumerSessions()
        # cursor, configuration version, and a sequence: the group wants nothing between the cursor and the sequence
        self._skipped = (0, 0, 0)
        self.timer: asyncio.TimerHandle | None = None
        self.timer_ns = 0

    @property
    def with_inbox(self) -> tuple[GroupHost, ...]:
        """The group, and its inbox if it has one."""
        return (self,) if self.inbox is None else (self, self.inbox)

    @property
    def next_fresh(self) -> int:
        """Where to look for messages that were never handed out: at the cursor, or beyond what was passed over
        there."""
        at, (cursor, version, to) = self.state_machine.cursor, self._skipped
        return to if to > at == cursor and version == self.state_machine.config.version else at

    def note_skipped(self, to: int) -> None:
        """Remember that the group wants nothing below `to`. Only memory holds this: an event for every batch that a
        filter passes over would be an action each. After a restart the group looks again from its cursor on."""
        self._skipped = (self.state_machine.cursor, self.state_machine.config.version, to)

    def describe(self, end: int, *, now_ns: int, now_ms: int) -> Description:
        """The state machine's description, with the cursor behind what was passed over."""
        seen = self.state_machine.describe(end, now_ns=now_ns, now_ms=now_ms)
        cursor = self.next_fresh
        if cursor == seen.cursor:
            return seen
        oldest = cursor if seen.oldest_unacked == seen.cursor else seen.oldest_unacked
        return msgspec.structs.replace(seen, cursor=cursor, lag=max(end - cursor, 0), oldest_unacked=oldest)

    def take_inbox(self, inbox: GroupHost | None) -> None:
        self.inbox = inbox
        if inbox is not None:
            inbox.main, inbox.key = self, self.key

    def action(self, event: GroupEvent) -> Action:
        """The event as an action of the log. A configuration carries the group's name with it."""
        if event.kind is ActionKind.GROUP_CONFIG:
            event = event._replace(detail=msgspec.msgpack.encode((str(self.name), event.detail)))
        return Action(self.id, self.subject_id, event)


class _HostPicture(msgspec.Struct, frozen=True, array_like=True):
    id: int
    subject_id: int
    name: str
    weight: float
    state_machine: bytes
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
        self.read_only: set[int] = set()  # subjects that an operator made read-only; never iterated in order
        self._reached = 0  # the end of the action log so far, by snapshots and replay
        self._has_holes = False  # records are missing: rot or retention took them

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[GroupHost]:
        return iter(self._hosts.values())

    def of_subject(self, subject_id: int) -> dict[str, GroupHost]:
        return self._by_subject.get(subject_id, {})

    def has(self, host: GroupHost) -> bool:
        """Whether the host is still one of the groups."""
        return self._hosts.get(host.id) is host

    def find(self, subject_id: int, name: GroupName) -> GroupHost | None:
        return self.of_subject(subject_id).get(name)

    # --- a view of the action log ------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Apply a record of the action log."""
        header = record.header
        if header.position > self._reached + SEGMENT_HEADER_BYTES:
            self._has_holes = True  # rot or retention; the next GROUPS record has the missing state
        self._reached = header.end
        if header.kind == RecordKind.GROUPS and self._has_holes:
            # a GROUPS record is complete, whatever is missing before it
            self.restore(unpack_groups(record.body), header.end)
        if header.kind != RecordKind.ACTIONS:
            return
        for action in unpack(record.body):
            self._replay_action(action)

    def _replay_action(self, action: Action) -> None:
        group_id, subject_id, event = action
        if event.kind is ActionKind.READ_ONLY:
            self.note_read_only(subject_id, is_on=bool(event.lot))
            return
        host = self._hosts.get(group_id)
        if event.kind is ActionKind.GROUP_CONFIG:
            name, config = _read_config(event.detail)
            event = event._replace(detail=config)
            host = host or self._add(GroupHost(group_id, subject_id, name))
        if host is None:
            return  # the record that introduced the group is rotten: a later join creates a new group
        if event.kind in _BESIDE_THE_STATE_MACHINE:
            self._replay_beside(host, event)
            return
        if not self._has_holes:
            host.state_machine.apply(event)
            return
        host.state_machine.expect_holes()
        # An event may refer to rotten records, such as the PULL of a lot. Skip it: a start with the rest is worth more,
        # and another copy may have the lost records.
        with contextlib.suppress(InvariantViolated, LookupError, ValueError):
            host.state_machine.apply(event)

    def names(self) -> Iterator[Action]:
        """Which group and which consumer has which number, for readers of the action log that begin at a new segment.
        These actions stand for no event, so they have no time and no configuration."""
        for host in self:
            yield host.action(GroupEvent(ActionKind.GROUP_CONFIG, 0))
            for consumer_id, name in host.state_machine.members():
                yield host.action(GroupEvent(ActionKind.JOIN, 0, consumer_id, detail=name.encode()))

    def of_id(self, group_id: int) -> GroupHost | None:
        return self._hosts.get(group_id)

    def _replay_beside(self, host: GroupHost, event: GroupEvent) -> None:
        if event.kind is ActionKind.WEIGHT:
            host.weight = event.lot / WEIGHT_UNIT
        elif event.kind is ActionKind.RATE:
            host.rate_per_s = event.lot
        else:
            self.remove(host)

    def picture(self) -> bytes:
        """The snapshot for the checkpoint."""
        hosts = [
            _HostPicture(
                host.id, host.subject_id, str(host.name), host.weight, host.state_machine.snapshot(), host.rate_per_s
            )
            for host in self
        ]
        return msgspec.msgpack.encode(_Picture(self._next_id, hosts, sorted(self.read_only)))

    def is_whole(self, first_base: int) -> bool:
        """Whether no state is missing. A copy whose log begins at `first_base` is complete only after a GROUPS
        record."""
        return not self._has_holes and self._reached >= first_base

    def restore(self, data: bytes, end: int) -> None:
        """Load a snapshot of the log up to `end`. An unreadable snapshot raises and changes nothing."""
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
        """Add a group that is new to this subject. The log knows the group from its first GROUP_CONFIG on."""
        return self._add(GroupHost(self._next_id, subject_id, name))

    def remove(self, host: GroupHost) -> None:
        """Forget a group. Its number is never used again."""
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
    host = GroupHost(
        picture.id, picture.subject_id, GroupName(picture.name), GroupStateMachine.restore(picture.state_machine)
    )
    host.weight = picture.weight
    host.rate_per_s = picture.rate_per_s
    return host


def _read_config(detail: bytes) -> tuple[GroupName, bytes]:
    try:
        name, config = msgspec.msgpack.decode(detail, type=tuple[str, bytes])
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error
    return GroupName(name), config
