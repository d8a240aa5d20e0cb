"""One message's story: what the logs of brokers tell of it, put together from its place, its copies and its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fairway.cli import trace_life
from fairway.cli.messages import ShownMessage
from fairway.cli.trace_find import FoundMessage, ask, copies_of
from fairway.cli.trace_life import ActionFollower, Life, MessageLocation
from fairway.client.trail import ActionLogReader, Answer
from fairway.client.trail_names import Ids, NameResolver, Resolver
from fairway.groups.attempts import count_of
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed, Named, Retrace, Retraced

if TYPE_CHECKING:
    from fairway import Client
    from fairway.batch import MessageId
    from fairway.cli.trace_homes import Home, SearchScope
    from fairway.protocol.admin import GroupDescription


class TimelineEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the timeline, as `--json` prints it."""

    at: datetime
    event: str
    group: str | None = None
    consumer: str | None = None
    attempt: int | None = None
    due_at: datetime | None = None
    detail: str | None = None
    subject: str | None = None  # where it is another one than the message's: the group's inbox
    broker_group: str | None = None  # where it is another one than the message's


class InGroup(msgspec.Struct, frozen=True):
    """Where it stands with one group."""

    group: str
    state: str
    pulls: int = 0
    acks: int = 0
    due_at: datetime | None = None
    total_ms: int | None = None  # from creation to the first ack
    broker_group: str | None = None  # in a cluster: which has the message


class Story(msgspec.Struct, frozen=True):
    """All that is known of a message."""

    message: ShownMessage
    is_archived_only: bool
    is_of_this_log: bool  # False: of one that the broker had before it began anew, so nobody can tell what happened
    events: list[TimelineEvent]
    groups: list[InGroup]
    broker_group: str | None = None  # in a cluster: which has the message
    unasked: dict[str, str] = {}  # who could not be asked, and why


class _BrokerPart(NamedTuple):
    """What one broker group says: of the message, if that is there, and of copies of it in inboxes."""

    broker_group: str | None
    message: ShownMessage | None
    groups: dict[str, GroupDescription]
    copies: dict[str, list[ShownMessage]]  # by the group that they are for
    names: NameResolver
    lives: list[Life]
    from_ms: int  # since when its action log says anything

    def lives_in(self, group: str) -> list[Life]:
        return [life for life in self.lives if self.names.group(life.group_id) == group]


class Telling:
    """Puts a story together."""

    def __init__(self, asked: SearchScope, id: MessageId) -> None:
        self._asked = asked
        self._id = id

    def tell(self, finds: Sequence[FoundMessage], *, is_to_end: bool) -> Story:
        """Of at least one find. Where several broker groups have the message, it begins with the one stored first."""
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
            # A cursor below the message was moved back: nobody is done with it, whatever was done before.
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
    """Whether a clock that was ahead has dated it: what happened to it may have earlier times."""
    asked = Index(message.subject, Whence.TIME, ms_of(message.appended_at), None, 0)
    return ask(client, asked, Indexed).next_sequence > message.sequence


def _follow(
    client: Client, since_ms: int, places: Mapping[MessageLocation, list[str]], *, is_to_end: bool
) -> tuple[NameResolver, list[Life], int]:
    """What an action log says; and since when it says anything."""

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
    """By time; what falls into the same millisecond stays in the order in which it must have been."""
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
    """Into the group's inbox."""
    is_redriven = "fairway.dead.sequence" in copy.headers
    word = "redriven" if is_redriven else "replayed" if "fairway.replay.id" in copy.headers else "sent again"
    return TimelineEvent(copy.appended_at, word, group, subject=copy.subject, broker_group=elsewhere)


def _earlier_attempts(part: _BrokerPart) -> dict[MessageLocation, int]:
    """Of each redriven copy: the attempts before. `dead list` and the headers of dead letters count them, too."""
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
    """Of a broker group that has the message. What lies elsewhere in inboxes alone counts with the first of them."""
    if part.message is None:
        return []
    told = [part, *(each for each in parts if each.message is None and part is parts[0])]
    names = {
        *part.groups,
        *(each.names.group(life.group_id) or "" for each in told for life in each.lives if life.steps),
    }
    return [_in_group(name, part.message, part, told) for name in sorted(names)]


def _in_group(name: str, message: ShownMessage, part: _BrokerPart, told: Sequence[_BrokerPart]) -> InGroup:
    """The last copy says where it stands."""
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
        moment_of(last.due_ms) if last is not None and last.due_ms and state == trace_life.RETRYING else None,
        min(acked) - ms_of(message.created_at) if acked else None,
        part.broker_group,
    )


def _untold(message: ShownMessage, part: _BrokerPart, group: GroupDescription | None) -> str:
    """Where nothing is told of it, the group's cursor says whether it is to come. What a filter passes over is noted
    only when something behind it is handed out."""
    if group is None or group.cursor <= message.sequence:
        return trace_life.WAITING
    return trace_life.SKIPPED if part.from_ms <= ms_of(message.appended_at) else trace_life.UNKNOWN


def moment_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)


def ms_of(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000)
