"""The history of a message, put together from its place, its copies in inboxes and the events of action logs.

`ActionFollower` reads an action log, and keeps one `Life` for each group, and for each copy of the message in an inbox.
The words for states are those of `fairway.spark.jobs.message_lifecycle`. `Telling` merges the answers of all broker
groups into a `Story`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from fairway.cli.consume import ShownMessage
from fairway.cli.trace_search import FoundMessage, ask, copies_of
from fairway.client.action_log_reader import (
    SOUGHT,
    ActionLogReader,
    Answer,
    Ids,
    NameResolver,
    Resolver,
    detail_of,
    event_of,
)
from fairway.group_events import ActionKind
from fairway.groups.attempts import count_of
from fairway.groups.config import Mode
from fairway.protocol.admin_messages import Index, Indexed, Named, Retrace, Retraced
from fairway.protocol.messages import Whence
from fairway.storage.action_log import RANGE_BYTES, ActionHeader, walk
from fairway.storage.record import RecordKind

if TYPE_CHECKING:
    from fairway import Client
    from fairway.batch import MessageId
    from fairway.cli.trace import Home, SearchScope
    from fairway.protocol.admin_messages import GroupDescription


WAITING, IN_HAND, RETRYING, ACKED, HANDED_OUT, SKIPPED, UNKNOWN = (
    "waiting", "in hand", "retrying", "acked", "handed out", "skipped", "unknown",
)  # fmt: skip
_AFTER: Final = {
    "pulled": IN_HAND, "acked": ACKED, "retried": RETRYING, "doubted": RETRYING, "released": "returned",
    "expired": "returned", "left": "returned", "rejected": "dying", "dead": "dead", "declined": SKIPPED,
    "skipped": SKIPPED, "lost": "lost", "parked": WAITING,
}  # fmt: skip
_DONE: Final = frozenset({ACKED, HANDED_OUT, "dead", SKIPPED, "lost"})
_CONCERNS: Final = frozenset(
    int(kind)
    for kind in (
        ActionKind.EXPIRE, ActionKind.LEAVE, ActionKind.PULL, ActionKind.ACK, ActionKind.RETRY, ActionKind.DEAD,
        ActionKind.DECLINE, ActionKind.CURSOR, ActionKind.REMOVE, ActionKind.PARK,
    )
)  # fmt: skip
_RANGE: Final = struct.Struct("<QQ")


class MessageLocation(NamedTuple):
    """The place of a message, or of a copy in an inbox."""

    subject: str
    sequence: int


@dataclass(frozen=True)
class Step:
    """An event in the life of a message."""

    at_ms: int
    event: str
    subject: str
    group_id: int = 0
    consumer_id: int = 0
    attempt: int = 0
    due_ms: int = 0
    detail: str | None = None


@dataclass
class Life:
    """The state of one copy in one group, and the events that led there."""

    place: MessageLocation
    group_id: int
    state: str = WAITING
    holder: int = 0
    due_ms: int = 0
    pulls: int = 0
    acks: int = 0
    acked_ms: int = 0  # the first time
    steps: list[Step] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.state in _DONE

    def happen(self, event: str, spot: ActionHeader, detail: bytes, *, is_at_most_once: bool = False) -> None:
        """Apply an event that names the message."""
        self.state = HANDED_OUT if event == "pulled" and is_at_most_once else _AFTER[event]
        self.holder = spot.consumer_id if self.state == IN_HAND else 0
        self.due_ms = max(spot.due_ms, 0)
        self.pulls += event == "pulled"
        if event == "acked":
            self.acks += 1
            self.acked_ms = self.acked_ms or spot.time_ms
        self._note(event, spot, detail_of(spot.kind, spot.lot, detail))

    def part(self, event: str, spot: ActionHeader) -> None:
        """Apply the end of a consumer: it has left, or its lease has expired."""
        if self.holder == spot.consumer_id and self.state == IN_HAND:
            self.state, self.holder = _AFTER[event], 0
            self._note(event, spot, None)

    def move(self, event: str, spot: ActionHeader) -> None:
        """Apply a move of the group's cursor, or the removal of the group: in-flight messages are forgotten."""
        is_to_come = event == SOUGHT and spot.lot <= self.place.sequence
        after = WAITING if is_to_come else self.state if self.is_done else SKIPPED
        if after != self.state:
            self.state, self.holder, self.due_ms = after, 0, 0
            self._note(event, spot, None)

    def _note(self, event: str, spot: ActionHeader, detail: str | None) -> None:
        due_ms = max(spot.due_ms, 0)
        self.steps.append(
            Step(spot.time_ms, event, self.place.subject, self.group_id, spot.consumer_id, spot.attempt, due_ms, detail)
        )


class ActionFollower:
    """Reads the action log from the time that a message was stored, until all awaited groups are done with it."""

    def __init__(
        self, trail: ActionLogReader, names: NameResolver, resolver: Resolver, places: Iterable[MessageLocation]
    ) -> None:
        self._trail = trail
        self._names = names
        self._resolver = resolver
        self._sequences: dict[str, list[int]] = {}
        for each in places:
            self._sequences.setdefault(each.subject, []).append(each.sequence)
        self._meant: dict[
            int, tuple[str, list[int]] | None
        ] = {}  # by the number of the subject; None: not a subject of the message
        self._lives: dict[tuple[int, int], list[Life]] = {}  # by the numbers of subject and group

    def follow(self, since_ms: int, awaited: Mapping[MessageLocation, Iterable[str]], *, is_to_end: bool) -> list[Life]:
        """Read until the `awaited` groups are done with each place; `is_to_end`: to the end of the log."""
        begin = self._trail.look(Whence.TIME, since_ms)
        for each in self._trail.records(begin.segment_base, begin.committed_end):
            if each.header.kind == RecordKind.NAMES:
                self._resolver.meet(each)
            elif each.header.kind == RecordKind.ACTIONS and each.header.appended_ms >= since_ms:
                self._resolver.meet(each)
                if self._take(each.body) and not is_to_end and self._is_over(awaited):
                    break
        return [life for lives in self._lives.values() for life in lives]

    def _take(self, body: bytes) -> bool:
        """Apply the actions of a record; returns whether one of them concerns the message."""
        is_concerned = False
        for spot in walk(body):
            if spot.kind in _CONCERNS:
                lives = self._lives_of(spot.subject_id, spot.group_id)
                if lives:
                    is_concerned |= self._tell(lives, spot, body)
        return is_concerned

    def _tell(self, lives: list[Life], spot: ActionHeader, body: bytes) -> bool:
        detail = body[spot.detail_at : spot.detail_at + spot.detail_bytes]
        event = event_of(spot.kind, spot.due_ms, spot.lot, detail)
        before = sum(len(life.steps) for life in lives)
        is_once = self._names.modes.get(spot.group_id) is Mode.AT_MOST_ONCE
        for life in lives:
            if spot.ranges:
                if any(first <= life.place.sequence < first + count for first, count in _ranges(body, spot)):
                    life.happen(event, spot, detail, is_at_most_once=is_once)
            elif spot.consumer_id:
                life.part(event, spot)
            else:
                life.move(event, spot)
        return sum(len(life.steps) for life in lives) > before

    def _lives_of(self, subject_id: int, group_id: int) -> list[Life]:
        if subject_id not in self._meant:
            self._resolver.resolve(Ids({subject_id}, set(), set()))
            name = self._names.subjects.get(subject_id, "")
            self._meant[subject_id] = (name, self._sequences[name]) if name in self._sequences else None
        meant = self._meant[subject_id]
        if meant is None:
            return []
        if (subject_id, group_id) not in self._lives:
            name, sequences = meant
            self._resolver.resolve(Ids(set(), {group_id}, set()))
            self._lives[subject_id, group_id] = [Life(MessageLocation(name, each), group_id) for each in sequences]
        return self._lives[subject_id, group_id]

    def _is_over(self, awaited: Mapping[MessageLocation, Iterable[str]]) -> bool:
        done = {
            (life.place, self._names.group(life.group_id))
            for lives in self._lives.values()
            for life in lives
            if life.is_done
        }
        return all((place, group) in done for place, groups in awaited.items() for group in groups)


def _ranges(body: bytes, spot: ActionHeader) -> Iterator[tuple[int, int]]:
    return _RANGE.iter_unpack(body[spot.ranges_at : spot.ranges_at + spot.ranges * RANGE_BYTES])


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


class Story(msgspec.Struct, frozen=True):
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
    lives: list[Life]
    from_ms: int  # the begin of its action log

    def lives_in(self, group: str) -> list[Life]:
        return [life for life in self.lives if self.names.group(life.group_id) == group]


class Telling:
    """Puts a story together from the answers of broker groups."""

    def __init__(self, asked: SearchScope, id: MessageId) -> None:
        self._asked = asked
        self._id = id

    def tell(self, finds: Sequence[FoundMessage], *, is_to_end: bool) -> Story:
        """The story of at least one find; of several broker groups, the one that stored first comes first."""
        first, *others = sorted(finds, key=lambda each: each.message.appended_at)
        message, unasked = first.message, self._asked.unasked
        if first.home is None:
            return Story(message, True, False, _beginning(message), [], unasked=unasked)
        same = {each.home.name: each.message for each in others if each.home is not None}
        parts = [self._part(first.home, message.subject, message, is_to_end=is_to_end)]
        for home in self._asked.homes:
            if home is not first.home:
                own = same.get(home.name)
                parts.append(self._part(home, own.subject if own else message.subject, own, is_to_end=is_to_end))
        ended = [each for part in parts for each in _in_groups(part, parts)]
        return Story(message, not first.is_live, True, _in_order(parts), ended, first.home.name, unasked)

    def _part(self, home: Home, subject: str, message: ShownMessage | None, *, is_to_end: bool) -> _BrokerPart:
        state = next((each for each in home.subjects if each.name == subject), None)
        groups = {} if state is None else {each.name: each for each in state.groups}
        copies = {group: list(copies_of(home.client, self._id, f"inbox:{group}:{subject}")) for group in groups}
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
        since_ms = 0 if is_ahead else min(ms_of(each.appended_at) for each in stored)
        told = _follow(home.client, since_ms, places, is_to_end=is_to_end)
        return _BrokerPart(home.name, message, groups, copies, *told)


def _is_ahead(client: Client, message: ShownMessage) -> bool:
    """Whether a clock that was ahead dated the message: later events may have earlier times."""
    asked = Index(message.subject, Whence.TIME, ms_of(message.appended_at), None, 0)
    return ask(client, asked, Indexed).next_sequence > message.sequence


def _follow(
    client: Client, since_ms: int, places: Mapping[MessageLocation, list[str]], *, is_to_end: bool
) -> tuple[NameResolver, list[Life], int]:
    """The events of an action log, and the time from which the log has any."""

    def retrace(asked: Retrace) -> Answer:
        return lambda: ask(client, asked, Retraced)

    trail, names = ActionLogReader(retrace, None, is_strict=False), NameResolver()
    begin = trail.look(Whence.TIME, since_ms).segment_base
    resolver = Resolver(lambda asked: ask(client, asked, Named), trail, names, begin)
    lives = ActionFollower(trail, names, resolver, places).follow(since_ms, places, is_to_end=is_to_end)
    consumers = {(each.group_id, each.consumer_id) for life in lives for each in life.steps if each.consumer_id}
    resolver.resolve(Ids(set(), set(), consumers))
    return names, lives, trail.told_from_ms()


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
        lives = sorted(part.lives, key=lambda life: life.place.subject != subject)
        own = [life for life in lives if life.place.subject == subject]
        earlier = _earlier_attempts(part)
        events += [each for life in own for each in _events(life, part.names, subject, elsewhere, earlier)]
        events += [_copied(each, group, elsewhere) for group in part.copies for each in part.copies[group]]
        events += [
            each for life in lives[len(own) :] for each in _events(life, part.names, subject, elsewhere, earlier)
        ]
    return sorted(events, key=lambda each: each.at)


def _beginning(message: ShownMessage) -> list[TimelineEvent]:
    return [TimelineEvent(message.created_at, "created"), TimelineEvent(message.appended_at, "stored")]


def _copied(copy: ShownMessage, group: str, elsewhere: str | None) -> TimelineEvent:
    """The event of a copy into the inbox of a group."""
    is_redriven = "fairway.dead.sequence" in copy.headers
    word = "redriven" if is_redriven else "replayed" if "fairway.replay.id" in copy.headers else "sent again"
    return TimelineEvent(copy.appended_at, word, group, subject=copy.subject, broker_group=elsewhere)


def _earlier_attempts(part: _BrokerPart) -> dict[MessageLocation, int]:
    """The earlier attempts of each redriven copy. `dead list` and the headers of dead letters count them, too."""
    return {
        MessageLocation(copy.subject, copy.sequence): before
        for copies in part.copies.values()
        for copy in copies
        if (before := count_of(copy.headers.get("fairway.dead.attempts", "")))
    }


def _events(
    life: Life, names: NameResolver, subject: str, elsewhere: str | None, earlier: Mapping[MessageLocation, int]
) -> list[TimelineEvent]:
    before = earlier.get(life.place, 0)
    return [
        TimelineEvent(
            moment_of(each.at_ms),
            each.event,
            names.group(each.group_id),
            names.consumer(each.group_id, each.consumer_id),
            before + each.attempt if each.attempt else None,
            moment_of(each.due_ms) if each.due_ms else None,
            each.detail,
            None if each.subject == subject else each.subject,
            elsewhere,
        )
        for each in life.steps
    ]


# --- where it stands --------------------------------------------------------------------------------------------------


def _in_groups(part: _BrokerPart, parts: Sequence[_BrokerPart]) -> list[InGroup]:
    """The states in a broker group that has the message. Groups with inbox copies alone count with the first."""
    if part.message is None:
        return []
    told = [part, *(each for each in parts if each.message is None and part is parts[0])]
    names = {
        *part.groups,
        *(each.names.group(life.group_id) or "" for each in told for life in each.lives if life.steps),
    }
    return [_in_group(name, part.message, part, told) for name in sorted(names)]


def _in_group(name: str, message: ShownMessage, part: _BrokerPart, told: Sequence[_BrokerPart]) -> InGroup:
    """The state in a group: the last copy decides."""
    copies = [(each, copy) for each in told for copy in each.copies.get(name, [])]
    where, latest = max(copies, key=lambda each: each[1].appended_at, default=(part, message))
    lives = [life for each in told for life in each.lives_in(name)]
    place = (latest.subject, latest.sequence)
    last = next((life for life in where.lives_in(name) if life.place == place and life.steps), None)
    state = last.state if last is not None else _untold(message, part, None if copies else part.groups.get(name))
    acked = [life.acked_ms for life in lives if life.acked_ms]
    return InGroup(
        name,
        state,
        sum(life.pulls for life in lives),
        sum(life.acks for life in lives),
        moment_of(last.due_ms) if last is not None and last.due_ms and state == RETRYING else None,
        min(acked) - ms_of(message.created_at) if acked else None,
        part.broker_group,
    )


def _untold(message: ShownMessage, part: _BrokerPart, group: GroupDescription | None) -> str:
    """The state of a message without events: the group's cursor tells whether the message is still to come.

    The log records what a filter skips only when the group delivers a later message.
    """
    if group is None or group.cursor <= message.sequence:
        return WAITING
    return SKIPPED if part.from_ms <= ms_of(message.appended_at) else UNKNOWN


def moment_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)


def ms_of(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000)
