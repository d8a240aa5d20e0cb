"""What becomes of a message, told from the action log as it is read: one life for each group, and for each copy of the
message in a group's inbox. The words for states are those of `fairway.spark.jobs.lives`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fairway.client.happenings import SOUGHT, detail_of, event_of
from fairway.client.trail import ActionLogReader
from fairway.client.trail_names import Ids, NameResolver, Resolver
from fairway.groups.config import Mode
from fairway.protocol.messages import Whence
from fairway.storage.action_log import RANGE_BYTES, ActionHeader, ActionKind, walk
from fairway.storage.record import RecordKind

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
    """Where a message lies, or a copy of it."""

    subject: str
    sequence: int


@dataclass(frozen=True)
class Step:
    """One thing that happened."""

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
    """Of one copy in one group."""

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
        """Something that names the message."""
        self.state = HANDED_OUT if event == "pulled" and is_at_most_once else _AFTER[event]
        self.holder = spot.consumer_id if self.state == IN_HAND else 0
        self.due_ms = max(spot.due_ms, 0)
        self.pulls += event == "pulled"
        if event == "acked":
            self.acks += 1
            self.acked_ms = self.acked_ms or spot.time_ms
        self._note(event, spot, detail_of(spot.kind, spot.lot, detail))

    def part(self, event: str, spot: ActionHeader) -> None:
        """A consumer has left, or its lease has ended."""
        if self.holder == spot.consumer_id and self.state == IN_HAND:
            self.state, self.holder = _AFTER[event], 0
            self._note(event, spot, None)

    def move(self, event: str, spot: ActionHeader) -> None:
        """The group's cursor was moved, or the group is no more: what was in flight is forgotten."""
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
    """Reads the action log from when a message was stored, until all that is awaited has come to an end."""

    def __init__(
        self, trail: ActionLogReader, names: NameResolver, resolver: Resolver, places: Iterable[MessageLocation]
    ) -> None:
        self._trail = trail
        self._names = names
        self._resolver = resolver
        self._sequences: dict[str, list[int]] = {}
        for each in places:
            self._sequences.setdefault(each.subject, []).append(each.sequence)
        self._meant: dict[int, tuple[str, list[int]] | None] = {}  # by the subject's number; None: not this one
        self._lives: dict[tuple[int, int], list[Life]] = {}  # by the numbers of subject and group

    def follow(self, since_ms: int, awaited: Mapping[MessageLocation, Iterable[str]], *, is_to_end: bool) -> list[Life]:
        """`awaited`: groups that are to be done with a place. What they do with it later is looked at `is_to_end`."""
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
        """The actions of one record; whether one of them concerns the message."""
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
