"""The history of a message, put together from its place, its copies in inboxes and the events of action logs.

`Histories` applies the events of an action log to one `MessageHistory` for each group, and for each copy of the message
in an inbox (`fairway.client.message_states`). `TimelineBuilder` merges the answers of all broker groups into a
`Timeline`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from fairway.cli.consume import ShownMessage
from fairway.cli.trace_search import FoundMessage, ask, copies_of
from fairway.client.action_log_reader import ActionLogReader, Answer, Ids, NameResolver, Resolver, event_of
from fairway.client.delayed_messages import moment_of, time_ms
from fairway.client.message_states import (
    DEAD_ATTEMPTS,
    RETRYING,
    MessageHistory,
    MessageLocation,
    copied_by,
    state_without_events,
)
from fairway.group_events import ActionKind
from fairway.groups.attempts import count_of
from fairway.groups.config import Mode
from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import Index, Indexed, Named, Retrace, Retraced
from fairway.protocol.messages import Whence
from fairway.storage.action_log import ActionHeader, walk
from fairway.storage.record import RecordKind

if TYPE_CHECKING:
    from fairway import Client
    from fairway.batch import MessageId
    from fairway.cli.trace import Home, SearchScope
    from fairway.protocol.admin_messages import GroupDescription


_CONCERNS: Final = frozenset(
    int(kind)
    for kind in (
        ActionKind.EXPIRE, ActionKind.LEAVE, ActionKind.PULL, ActionKind.ACK, ActionKind.RETRY, ActionKind.DEAD,
        ActionKind.DECLINE, ActionKind.CURSOR, ActionKind.REMOVE, ActionKind.PARK,
    )
)  # fmt: skip
_RANGE: Final = struct.Struct("<QQ")


class Histories:
    """The histories of a message and its copies, in every group that the action log names."""

    def __init__(self, names: NameResolver, resolve: Callable[[Ids], None], places: Iterable[MessageLocation]) -> None:
        """`resolve` fetches names; called before they are looked up."""
        self._names = names
        self._resolve = resolve
        self._sequences: dict[str, list[int]] = {}
        for each in places:
            self._sequences.setdefault(each.subject, []).append(each.sequence)
        self._meant: dict[int, list[MessageLocation]] = {}  # by the number of the subject; empty: of another message
        self._found: dict[tuple[int, int], list[MessageHistory]] = {}  # by the numbers of subject and group
        self._named: dict[tuple[int, str | None], list[MessageHistory]] = {}  # the same by the name of the group

    def __iter__(self) -> Iterator[MessageHistory]:
        return (each for found in self._named.values() for each in found)

    def apply(self, body: bytes) -> bool:
        """Apply the actions of a record; returns whether one of them concerns the message."""
        is_concerned = False
        for action in walk(body):
            if action.kind in _CONCERNS:
                is_concerned |= self._apply(action, body)
        return is_concerned

    def _apply(self, action: ActionHeader, body: bytes) -> bool:
        histories = self._of(action.subject_id, action.group_id)
        if not histories:
            return False
        detail = body[action.detail_at : action.detail_at + action.detail_bytes]
        event = event_of(action.kind, action.due_ms, action.lot, detail)
        before = sum(len(each.events) for each in histories)
        is_once = self._names.modes.get(action.group_id) is Mode.AT_MOST_ONCE
        for each in histories:
            if action.ranges:
                ranges = _RANGE.iter_unpack(body[action.ranges_at : action.detail_at])
                if any(first <= each.place.sequence < first + count for first, count in ranges):
                    each.apply(event, action, detail, is_at_most_once=is_once)
            elif action.consumer_id:
                each.end_consumer(event, action)
            else:
                each.move_cursor(event, action)
        return sum(len(each.events) for each in histories) > before

    def _of(self, subject_id: int, group_id: int) -> list[MessageHistory]:
        if subject_id not in self._meant:
            self._resolve(Ids({subject_id}, set(), set()))
            name = self._names.subjects.get(subject_id, "")
            self._meant[subject_id] = [MessageLocation(name, each) for each in self._sequences.get(name, ())]
        places = self._meant[subject_id]
        if places and (subject_id, group_id) not in self._found:
            self._resolve(Ids(set(), {group_id}, set()))
            group = self._names.group(group_id)
            new = [MessageHistory(each, group) for each in places]
            self._found[subject_id, group_id] = self._named.setdefault((subject_id, group), new)
        return self._found[subject_id, group_id] if places else []

    def are_done(self, awaited: Mapping[MessageLocation, Iterable[str]]) -> bool:
        """Whether the awaited groups are done with each place."""
        done = {(each.place, each.group) for each in self if each.is_done}
        return all((place, group) in done for place, groups in awaited.items() for group in groups)


class TimelineEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the timeline, as `--json` prints it."""

    at: datetime
    event: str
    group: str | None = None
    consumer: str | None = None
    attempt: int | None = None
    due_at: datetime | None = None
    detail: str | None = None
    subject: str | None = None  # if not the message's: the inbox of the group
    broker_group: str | None = None  # if not the message's


class InGroup(msgspec.Struct, frozen=True):
    """The state of the message in a group."""

    group: str
    state: str
    pulls: int = 0
    acks: int = 0
    due_at: datetime | None = None
    total_ms: int | None = None  # from creation to the first ack
    broker_group: str | None = None  # in a cluster: the group that has the message


class Timeline(msgspec.Struct, frozen=True):
    """The history of a message."""

    message: ShownMessage
    is_archived_only: bool
    is_of_this_log: bool  # False: the message is of an earlier log of the broker, and its events are gone
    events: list[TimelineEvent]
    groups: list[InGroup]
    broker_group: str | None = None  # in a cluster: the group that has the message
    unasked: dict[str, str] = {}  # broker groups that could not be asked, and why


class _BrokerPart(NamedTuple):
    """The answer of a broker group: about the message, if the group has it, and about its copies in inboxes."""

    broker_group: str | None
    message: ShownMessage | None
    groups: dict[str, GroupDescription]
    copies: dict[str, list[ShownMessage]]  # by the group that they are for
    names: NameResolver
    histories: list[MessageHistory]
    from_ms: int  # the begin of its action log

    def histories_in(self, group: str) -> list[MessageHistory]:
        return [each for each in self.histories if each.group == group]


class TimelineBuilder:
    """Builds a timeline from the answers of broker groups."""

    def __init__(self, asked: SearchScope, id: MessageId) -> None:
        self._asked = asked
        self._id = id

    def build(self, finds: Sequence[FoundMessage], *, is_to_end: bool) -> Timeline:
        """The timeline of at least one find; of several broker groups, the one that stored first comes first."""
        first, *others = sorted(finds, key=lambda each: each.message.appended_at)
        message, unasked = first.message, self._asked.unasked
        if first.home is None:
            return Timeline(message, True, False, _beginning(message), [], unasked=unasked)
        same = {each.home.name: each.message for each in others if each.home is not None}
        parts = [self._part(first.home, message.subject, message, is_to_end=is_to_end)]
        for home in self._asked.homes:
            if home is not first.home:
                own = same.get(home.name)
                parts.append(self._part(home, own.subject if own else message.subject, own, is_to_end=is_to_end))
        ended = [each for part in parts for each in _in_groups(part, parts)]
        return Timeline(message, not first.is_live, True, _in_order(parts), ended, first.home.name, unasked)

    def _part(self, home: Home, subject: str, message: ShownMessage | None, *, is_to_end: bool) -> _BrokerPart:
        state = next((each for each in home.subjects if each.name == subject), None)
        groups = {} if state is None else {each.name: each for each in state.groups}
        inboxes = {group: str(Subject.inbox(GroupName(group), Subject(subject))) for group in groups}
        copies = {group: list(copies_of(home.client, self._id, inbox)) for group, inbox in inboxes.items()}
        places: dict[MessageLocation, list[str]] = {}
        if message is not None:
            places[MessageLocation(subject, message.sequence)] = list(groups)
            # A cursor below the message was moved back: no group is done with the message, whatever happened before.
            is_to_end |= any(each.cursor <= message.sequence for each in groups.values())
        for group, of in copies.items():
            places |= {MessageLocation(each.subject, each.sequence): [group] for each in of}
        stored = [each for each in (message, *(copy for of in copies.values() for copy in of)) if each is not None]
        if not stored:
            return _BrokerPart(home.name, None, groups, {}, NameResolver(), [], 0)
        is_ahead = any(_is_ahead(home.client, each) for each in stored)
        since_ms = 0 if is_ahead else min(time_ms(each.appended_at) for each in stored)
        told = _follow(home.client, since_ms, places, is_to_end=is_to_end)
        return _BrokerPart(home.name, message, groups, copies, *told)


def _is_ahead(client: Client, message: ShownMessage) -> bool:
    """Whether a clock that was ahead dated the message: later events may have earlier times."""
    asked = Index(message.subject, Whence.TIME, time_ms(message.appended_at), None, 0)
    return ask(client, asked, Indexed).next_sequence > message.sequence


def _follow(
    client: Client, since_ms: int, places: Mapping[MessageLocation, list[str]], *, is_to_end: bool
) -> tuple[NameResolver, list[MessageHistory], int]:
    """The histories of the places, and the time from which the action log has events. The log is read from the time
    that the message was stored until the groups of each place are done with it; `is_to_end`: to its end."""

    def retrace(asked: Retrace) -> Answer:
        return lambda: ask(client, asked, Retraced)

    log, names = ActionLogReader(retrace, None, is_strict=False), NameResolver()
    begin = log.look(Whence.TIME, since_ms)
    resolver = Resolver(lambda asked: ask(client, asked, Named), log, names, begin.segment_base)
    histories = Histories(names, resolver.resolve, places)
    for each in log.records(begin.segment_base, begin.committed_end):
        is_action = each.header.kind == RecordKind.ACTIONS and each.header.appended_ms >= since_ms
        if is_action or each.header.kind == RecordKind.NAMES:
            resolver.meet(each)
        if is_action and histories.apply(each.body) and not is_to_end and histories.are_done(places):
            break
    found = list(histories)
    consumers = {(each.group_id, each.consumer_id) for of in found for each in of.events if each.consumer_id}
    resolver.resolve(Ids(set(), set(), consumers))
    return names, found, log.told_from_ms()


# --- the timeline -----------------------------------------------------------------------------------------------------


def _in_order(parts: Sequence[_BrokerPart]) -> list[TimelineEvent]:
    """All events by time; those of one millisecond stay in their only possible order."""
    main = parts[0]
    events = [] if main.message is None else _beginning(main.message)
    for part in parts:
        elsewhere = None if part is main else part.broker_group
        subject = "" if part.message is None else part.message.subject
        if part.message is not None and part is not main:
            events.append(TimelineEvent(part.message.appended_at, "stored", broker_group=elsewhere))
        earlier = _earlier_attempts(part)
        own = [each for each in part.histories if each.place.subject == subject]
        of_copies = [each for each in part.histories if each.place.subject != subject]
        events += [each for history in own for each in _events(history, part.names, subject, elsewhere, earlier)]
        events += [  # the copies into the inboxes of groups
            TimelineEvent(
                each.appended_at, copied_by(each.headers), group, subject=each.subject, broker_group=elsewhere
            )
            for group in part.copies
            for each in part.copies[group]
        ]
        events += [each for history in of_copies for each in _events(history, part.names, subject, elsewhere, earlier)]
    return sorted(events, key=lambda each: each.at)


def _beginning(message: ShownMessage) -> list[TimelineEvent]:
    return [TimelineEvent(message.created_at, "created"), TimelineEvent(message.appended_at, "stored")]


def _earlier_attempts(part: _BrokerPart) -> dict[MessageLocation, int]:
    """The earlier attempts of each redriven copy. `dead list` and the headers of dead letters count them, too."""
    return {
        MessageLocation(copy.subject, copy.sequence): before
        for copies in part.copies.values()
        for copy in copies
        if (before := count_of(copy.headers.get(DEAD_ATTEMPTS, "")))
    }


def _events(
    history: MessageHistory,
    names: NameResolver,
    subject: str,
    elsewhere: str | None,
    earlier: Mapping[MessageLocation, int],
) -> list[TimelineEvent]:
    place = history.place
    return [
        TimelineEvent(
            moment_of(each.at_ms),
            each.event,
            history.group,
            names.consumer(each.group_id, each.consumer_id),
            earlier.get(place, 0) + each.attempt if each.attempt else None,
            moment_of(each.due_ms) if each.due_ms else None,
            each.detail,
            None if place.subject == subject else place.subject,
            elsewhere,
        )
        for each in history.events
    ]


# --- where it stands --------------------------------------------------------------------------------------------------


def _in_groups(part: _BrokerPart, parts: Sequence[_BrokerPart]) -> list[InGroup]:
    """The states in a broker group that has the message. Groups with inbox copies alone count with the first."""
    if part.message is None:
        return []
    told = [part, *(each for each in parts if each.message is None and part is parts[0])]
    names = {
        *part.groups,
        *(history.group or "" for each in told for history in each.histories if history.events),
    }
    return [_in_group(name, part.message, part, told) for name in sorted(names)]


def _in_group(name: str, message: ShownMessage, part: _BrokerPart, told: Sequence[_BrokerPart]) -> InGroup:
    """The state in a group: the last copy decides."""
    copies = [(each, copy) for each in told for copy in each.copies.get(name, [])]
    where, latest = max(copies, key=lambda each: each[1].appended_at, default=(part, message))
    histories = [history for each in told for history in each.histories_in(name)]
    place = (latest.subject, latest.sequence)
    last = next((each for each in where.histories_in(name) if each.place == place and each.events), None)
    group = None if copies else part.groups.get(name)
    cursor = None if group is None else group.cursor
    appended_ms = time_ms(message.appended_at)
    state = last.state if last else state_without_events(message.sequence, cursor, appended_ms, part.from_ms)
    acked = [each.acked_ms for each in histories if each.acked_ms]
    return InGroup(
        name,
        state,
        sum(each.pulls for each in histories),
        sum(each.acks for each in histories),
        moment_of(last.due_ms) if last is not None and last.due_ms and state == RETRYING else None,
        min(acked) - time_ms(message.created_at) if acked else None,
        part.broker_group,
    )
