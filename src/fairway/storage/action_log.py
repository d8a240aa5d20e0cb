"""The action log: what groups did with messages after they were stored. The truth about groups.

An action is a fixed part, ranges of sequences, and a detail that only its kind understands. One append gathers its
actions into one record, so that a thousand acks share one header, one checksum and one sync.

Actions name groups and consumers by number. A segment begins with a NAMES record: the groups and members at that
moment. So a reader that starts in the middle of the log need not go further back to know them. Now and then a GROUPS
record states the result of all actions before it.

The segments are reserved on disk in advance, and a ballast file holds room for one more. So a full disk stops produce,
not acks.

`ActionRetention` plans which segments may go; the store carries the plan out once a checkpoint covers them. An action
speaks of messages that were stored before it. So a segment of actions can go once every message that was stored when
the segment was completed is gone: a retained message keeps its whole trace. Positions decide, not times, so a wrong
clock changes nothing.

Groups are built from actions. Before old actions go, the log must hold a GROUPS record with the state of all groups at
its position. The first segment that stays always has one. So a start without a checkpoint, and a replica that begins
with this segment, arrive at the same groups: they load that state and apply the actions behind it.

    segments    [ acks ... ][ acks ... ][ acks, GROUPS, acks ... ][ acks ... ][ newest
                  may go      may go      stays: it states the groups
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol, TypeAlias

from fairway.errors import DiskFull, RemoteProtocolError
from fairway.group_events import ActionKind, GroupEvent
from fairway.storage import record
from fairway.storage.log import Log, LogSetup, LogState
from fairway.storage.record import Record, RecordHeader, RecordKind
from fairway.storage.segment import Segment

TOO_MANY_GROUPS = (
    "the action log is not shortened any more: the state of its groups is larger than a record may be; remove groups "
    "that nobody needs"
)
_PICTURE_SHARE = 4  # the log grows by so many times the size of a GROUPS record before it gets the next


class ActionRetention:
    """The facts about the action log that retention needs. The checkpoint carries them."""

    def __init__(self, bounds: Mapping[int, int] | None = None, pictures: Sequence[int] = ()) -> None:
        self.bounds = dict(bounds or {})  # by complete segment: where the message log ended when it was complete
        self.pictures = list(pictures)  # positions of GROUPS records, oldest first

    def note_complete(self, segments: Sequence[Segment], messages_end: int) -> None:
        """Note the end of the message log for newly complete segments. A late call is safe: the bound is higher."""
        for each in segments[:-1]:
            self.bounds.setdefault(each.base, messages_end)

    def note_picture(self, position: int) -> None:
        """Note the position of a GROUPS record."""
        if not self.pictures or position > self.pictures[-1]:
            self.pictures.append(position)

    def undo(self, position: int) -> None:
        """Everything from `position` on was taken off the log."""
        self.pictures = [each for each in self.pictures if each < position]
        self.bounds = {base: bound for base, bound in self.bounds.items() if base < position}

    def below(self, end: int, segments: Sequence[Segment]) -> ActionRetention:
        """The part of this knowledge that concerns the log before `end`."""
        complete = {each.base for each in segments[:-1] if each.end <= end}
        bounds = {base: bound for base, bound in self.bounds.items() if base in complete}
        return ActionRetention(bounds, [each for each in self.pictures if each < end])

    def is_picture_due(self, segments: Sequence[Segment], end: int, picture_bytes: int, grown_bytes_min: int) -> bool:
        """Whether the log has grown by enough since its last GROUPS record."""
        first_base = segments[0].base if segments else end
        stated_at = self.pictures[-1] if self.pictures else first_base
        return end - stated_at >= max(grown_bytes_min, _PICTURE_SHARE * picture_bytes)

    def droppable(self, segments: Sequence[Segment], messages_base: int, below: int) -> list[int]:
        """The bases of the segments that may go, oldest first. `messages_base`: where the message log begins. `below`:
        how far a checkpoint covers actions."""
        count = 0
        for each in segments[:-1]:
            bound = self.bounds.get(each.base)
            if bound is None or bound > messages_base or each.end > below:
                break
            count += 1
        while count and not self._states_groups(segments[count], below):
            count -= 1
        return [each.base for each in segments[:count]]

    def _states_groups(self, of: Segment, below: int) -> bool:
        return any(of.base <= position < min(of.end, below) for position in self.pictures)

    def forget_below(self, first_base: int) -> None:
        """Nothing is left of the log below this position."""
        self.bounds = {base: bound for base, bound in self.bounds.items() if base >= first_base}
        self.pictures = [each for each in self.pictures if each >= first_base]


DIRECTORY = "actions"
BALLAST = f"{DIRECTORY}/ballast"

# kind, zero, ranges, detail length, group, subject, consumer, attempt, time, due, lot
_FIXED = struct.Struct("<BxHIIIIIqqQ")
_RANGE = struct.Struct("<QQ")  # first sequence, count
RANGE_BYTES = _RANGE.size
_LENGTH = struct.Struct("<Q")  # of the groups' state, before it
_NAMES_SHARE = 4  # names take a quarter of a segment at most: its reserved space is for acks


class Action(NamedTuple):
    """An event of a group, with the numbers of the group and of the subject. A switch of a subject has group 0."""

    group_id: int
    subject_id: int
    event: GroupEvent


class ActionView(Protocol):
    """A view of the action log: the groups of a broker. Rebuilt like every other view."""

    def replay(self, record: Record) -> None:
        """Apply a record of the log, in order."""

    def picture(self) -> bytes:
        """The view's state for the checkpoint: everything up to the current end of the log."""

    def is_whole(self, first_base: int) -> bool:
        """Whether the view lacks nothing, in a log that begins at `first_base`."""

    def restore(self, picture: bytes, end: int) -> None:
        """Load the state of the log up to `end`. `RemoteProtocolError`: the state cannot be read, and nothing was
        loaded."""


NameStatements: TypeAlias = Callable[[], Iterable[Action]]  # a GROUP_CONFIG for each group, a JOIN for each member


def pack(actions: Iterable[Action]) -> bytes:
    """The body of an ACTIONS record."""
    parts = []
    for group_id, subject_id, (kind, time_ms, consumer_id, attempt, due_ms, lot, ranges, detail) in actions:
        sizes = kind, len(ranges), len(detail)
        parts.append(_FIXED.pack(*sizes, group_id, subject_id, consumer_id, attempt, time_ms, due_ms, lot))
        parts += [_RANGE.pack(*each_range) for each_range in ranges]
        parts.append(record.padded(detail))
    return b"".join(parts)


class ActionHeader(NamedTuple):
    """An action's fixed part, and where in the body its ranges and its detail are. For readers of many actions, which
    need no tuple per range."""

    kind: int
    ranges: int
    detail_bytes: int
    group_id: int
    subject_id: int
    consumer_id: int
    attempt: int
    time_ms: int
    due_ms: int
    lot: int
    ranges_at: int

    @property
    def detail_at(self) -> int:
        return self.ranges_at + self.ranges * RANGE_BYTES


def walk(body: bytes) -> Iterator[ActionHeader]:
    """The actions of a record's body, one by one, of known and unknown kinds."""
    at = 0
    while at < len(body):
        try:
            found = ActionHeader._make((*_FIXED.unpack_from(body, at), at + _FIXED.size))
        except struct.error as error:
            raise RemoteProtocolError(f"an action cannot be read: {error}") from error
        end = found.ranges_at + found.ranges * RANGE_BYTES + found.detail_bytes
        if end > len(body):
            raise RemoteProtocolError("an action cannot be read: it is cut short")
        yield found
        at = end + -end % record.ALIGNMENT


def unpack(body: bytes) -> Iterator[Action]:
    """The actions of a record's body."""
    for each in walk(body):
        kind, ranges, detail, group, subject, consumer, attempt, time, due, lot, at = each
        spans = tuple(_RANGE.unpack_from(body, at + index * RANGE_BYTES) for index in range(ranges))
        at += ranges * RANGE_BYTES
        try:
            known = ActionKind(kind)
        except ValueError as error:
            raise RemoteProtocolError(f"an action cannot be read: {error}") from error
        event = GroupEvent(known, time, consumer, attempt, due, lot, spans, body[at : at + detail])
        yield Action(group, subject, event)


def pack_groups(picture: bytes) -> bytes:
    """The body of a GROUPS record."""
    return record.padded(_LENGTH.pack(len(picture)) + picture)


def unpack_groups(body: bytes) -> bytes:
    """The state of the groups in a GROUPS record."""
    size = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else len(body)
    if size > len(body) - _LENGTH.size:
        raise RemoteProtocolError("a picture of the groups cannot be read: it is cut short")
    return body[_LENGTH.size : _LENGTH.size + size]


class ActionLog:
    """Appends actions; recovery reads them. Lives on the loop of its store."""

    def __init__(self, setup: LogSetup, state: LogState, names: NameStatements) -> None:
        self._disk = setup.disk
        self._clock = setup.clock
        self._names = names
        self._segment_bytes = setup.segment_bytes
        self.has_ballast = False
        self.log = Log(
            setup,
            DIRECTORY,
            state,
            on_roll=self._begin_segment,
            on_cut=setup.on_cut,
            reserved=True,
            release_ballast=self._release_ballast,
        )

    def append(self, actions: Iterable[Action]) -> RecordHeader:
        """Gather actions as one record; durable once `log.flusher.durable(header.end)` returns."""
        gathered = list(actions)
        return self.log.append(RecordKind.ACTIONS, pack(gathered), self._clock.wall_ms(), count=len(gathered))

    def state_groups(self, picture: bytes) -> RecordHeader:
        """Gather a GROUPS record: the result of all actions before it."""
        return self.log.append(RecordKind.GROUPS, pack_groups(picture), self._clock.wall_ms())

    def _begin_segment(self) -> None:
        """Open a segment with names. Too many names are left out, and readers go further back. A replica copies its
        master's."""
        self.take_ballast()
        if self.log.follows:
            return
        body = pack(self._names())
        if 0 < len(body) <= self._segment_bytes // _NAMES_SHARE:
            self.log.write(RecordKind.NAMES, body, self._clock.wall_ms())

    def take_ballast(self) -> None:
        """Reserve the rest of the newest segment, which a cut or a power cut may have released, and one segment more.
        Without that room the store refuses produce."""
        try:
            if self.log.segments:
                self._disk.reserve(self.log.file(self.log.segments[-1]), self._segment_bytes)
            with closing(self._disk.open(BALLAST, create=True)) as file:
                self._disk.reserve(file, self._segment_bytes)
            self.has_ballast = True
        except DiskFull:
            self.has_ballast = False

    def _release_ballast(self) -> bool:
        """Release the ballast for the segment that needs the room now; False if there was none."""
        had, self.has_ballast = self.has_ballast, False
        if had:
            self._disk.remove(BALLAST)
        return had
