"""One message's story: what the broker's logs tell of it, put together from its place, its copies and its events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fairway.cli import trace_life
from fairway.cli.messages import ShownMessage
from fairway.cli.trace_find import Found, ask, copies_of
from fairway.cli.trace_life import Following, Life, Place
from fairway.client.trail import Answer, Trail
from fairway.client.trail_names import Ids, Names, Resolver
from fairway.protocol import tracing
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Named, Retrace, Retraced

if TYPE_CHECKING:
    from fairway import Client
    from fairway.batch import MessageId
    from fairway.protocol.admin import GroupState, SubjectState


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the timeline, as `--json` prints it."""

    at: datetime
    event: str
    group: str | None = None
    consumer: str | None = None
    attempt: int | None = None
    due_at: datetime | None = None
    detail: str | None = None
    subject: str | None = None  # where it is another one than the message's: the group's inbox


class InGroup(msgspec.Struct, frozen=True):
    """Where it stands with one group."""

    group: str
    state: str
    pulls: int = 0
    acks: int = 0
    due_at: datetime | None = None
    total_ms: int | None = None  # from creation to the first ack


class Story(msgspec.Struct, frozen=True):
    """All that is known of a message."""

    message: ShownMessage
    is_archived_only: bool
    is_of_this_log: bool  # False: of one that the broker had before it began anew, so nobody can tell what happened
    events: list[Event]
    groups: list[InGroup]


class _Told(NamedTuple):
    """What the action log says."""

    names: Names
    lives: list[Life]
    from_ms: int  # since when it says anything


class Telling:
    """Puts a story together. `subjects` have their groups."""

    def __init__(self, client: Client, id: MessageId, subjects: Sequence[SubjectState]) -> None:
        self._client = client
        self._id = id
        self._subjects = {each.name: each for each in subjects}

    def tell(self, found: Found, *, is_to_end: bool) -> Story:
        message = found.message
        if not found.is_of_this_log:
            return Story(message, True, False, _beginning(message), [])
        subject = self._subjects.get(message.subject)
        groups = {} if subject is None else {each.name: each for each in subject.groups}
        copies = {
            group: list(copies_of(self._client, self._id, f"inbox:{group}:{message.subject}")) for group in groups
        }
        # A cursor below the message was moved back: nobody is done with it, whatever was done before.
        is_to_end |= any(each.cursor <= message.sequence for each in groups.values())
        told = self._told(message, groups, copies, is_to_end)
        names = {*groups, *(told.names.group(life.group_id) or "" for life in told.lives if life.steps)}
        ended = [_in_group(name, message, told, groups.get(name), copies.get(name, [])) for name in sorted(names)]
        return Story(message, not found.is_live, True, _in_order(message, told, copies), ended)

    def _told(
        self,
        message: ShownMessage,
        groups: dict[str, GroupState],
        copies: dict[str, list[ShownMessage]],
        is_to_end: bool,
    ) -> _Told:
        places = {Place(message.subject, message.sequence): list(groups)}
        for group, of in copies.items():
            places |= {Place(each.subject, each.sequence): [group] for each in of}
        trail = Trail(self._retrace, None, is_strict=False)
        names, since_ms = Names(), ms_of(message.appended_at)
        resolver = Resolver(self._names, trail, names, trail.look(Whence.TIME, since_ms).segment_base)
        lives = Following(trail, names, resolver, places).follow(since_ms, places, is_to_end=is_to_end)
        consumers = {(each.group_id, each.consumer_id) for life in lives for each in life.steps if each.consumer_id}
        resolver.resolve(Ids(set(), set(), consumers))
        return _Told(names, lives, trail.told_from_ms())

    def _retrace(self, asked: Retrace) -> Answer:
        return lambda: ask(self._client, asked, Retraced)

    def _names(self, asked: tracing.Names) -> Named:
        return ask(self._client, asked, Named)


def _in_order(message: ShownMessage, told: _Told, copies: dict[str, list[ShownMessage]]) -> list[Event]:
    """By time; what falls into the same millisecond stays in the order in which it must have been."""
    lives = sorted(told.lives, key=lambda life: life.place.subject != message.subject)
    own = [life for life in lives if life.place.subject == message.subject]
    events = _beginning(message)
    events += [each for life in own for each in _events(life, told.names, message)]
    events += [_copied(each, group) for group in copies for each in copies[group]]
    events += [each for life in lives[len(own) :] for each in _events(life, told.names, message)]
    return sorted(events, key=lambda each: each.at)


def _beginning(message: ShownMessage) -> list[Event]:
    return [Event(message.created_at, "created"), Event(message.appended_at, "stored")]


def _copied(copy: ShownMessage, group: str) -> Event:
    """Into the group's inbox."""
    is_redriven = "fairway.dead.sequence" in copy.headers
    word = "redriven" if is_redriven else "replayed" if "fairway.replay.id" in copy.headers else "sent again"
    return Event(copy.appended_at, word, group, subject=copy.subject)


def _events(life: Life, names: Names, message: ShownMessage) -> list[Event]:
    return [
        Event(
            moment_of(each.at_ms),
            each.event,
            names.group(each.group_id),
            names.consumer(each.group_id, each.consumer_id),
            each.attempt or None,
            moment_of(each.due_ms) if each.due_ms else None,
            each.detail,
            None if each.subject == message.subject else each.subject,
        )
        for each in life.steps
    ]


def _in_group(
    name: str, message: ShownMessage, told: _Told, group: GroupState | None, copies: Sequence[ShownMessage]
) -> InGroup:
    """The last copy says where it stands."""
    lives = [life for life in told.lives if told.names.group(life.group_id) == name]
    latest = (copies[-1].subject, copies[-1].sequence) if copies else (message.subject, message.sequence)
    last = next((life for life in lives if life.place == latest and life.steps), None)
    state = last.state if last is not None else _untold(message, told, None if copies else group)
    acked = [life.acked_ms for life in lives if life.acked_ms]
    return InGroup(
        name,
        state,
        sum(life.pulls for life in lives),
        sum(life.acks for life in lives),
        moment_of(last.due_ms) if last is not None and last.due_ms and state == trace_life.RETRYING else None,
        min(acked) - ms_of(message.created_at) if acked else None,
    )


def _untold(message: ShownMessage, told: _Told, group: GroupState | None) -> str:
    """Where nothing is told of it, the group's cursor says whether it is to come. What a filter passes over is noted
    only when something behind it is handed out."""
    if group is None or group.cursor <= message.sequence:
        return trace_life.WAITING
    return trace_life.SKIPPED if told.from_ms <= ms_of(message.appended_at) else trace_life.UNKNOWN


def moment_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)


def ms_of(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000)
