"""The action log: what happened to messages after they were stored. The truth about groups, as the message log is
about messages.

An action is a fixed part, ranges of sequences, and a detail that only its kind understands. Actions are gathered into
one record per append, so that a thousand acks share one header, one checksum and one sync.

Actions speak of groups and consumers by number. A segment begins with a NAMES record, the groups and members that there
are at that moment, so that whoever reads from the middle of the log need not go back further to know them all. Now and
then a GROUPS record states what all actions before it amount to, so that they may go (`action_retention`).

The log's segments are reserved on disk in advance, and a ballast file holds room for one more: a full disk stops
produce, not acks."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

from fairway.errors import DiskFull, RemoteProtocolError
from fairway.storage import record
from fairway.storage.flusher import Defer, Durability
from fairway.storage.log import Log, LogState
from fairway.storage.log_time import IsAhead
from fairway.storage.record import Record, RecordHeader, RecordKind
from fairway.world.clock import Clock
from fairway.world.disk import Disk

DIRECTORY = "actions"
BALLAST = f"{DIRECTORY}/ballast"

# kind, zero, ranges, detail length, group, subject, consumer, attempt, time, due, lot
_FIXED = struct.Struct("<BxHIIIIIqqQ")
_RANGE = struct.Struct("<QQ")  # first sequence, count
RANGE_BYTES = _RANGE.size
_LENGTH = struct.Struct("<Q")  # of a picture, before it
_NAMES_SHARE = 4  # a quarter of a segment, at most: what is reserved there is for acks


class ActionKind(enum.IntEnum):
    GROUP_CONFIG = 1
    JOIN = 2
    LEAVE = 3
    EXPIRE = 4
    PULL = 5
    ACK = 6
    RETRY = 7
    DEAD = 8
    DECLINE = 9
    CURSOR = 10
    PAUSE = 11
    WEIGHT = 12  # of a group, in thousandths, in the lot's place
    READ_ONLY = 13  # a subject's switch: 1 or 0 in the lot's place
    RATE = 14  # messages per second out of a group's inbox, in the lot's place; 0 is without limit
    REMOVE = 15  # a group, with all that is known of it
    PARK = 16  # in a group by key: behind others of their keys, which are the detail
    GO_ON = 17  # a key that had halted, in the lot's place; 0: all of them
    VERIFIER = 18  # of the secret of a consumer's session, which is the detail; in the record of the JOIN


class Action(NamedTuple):
    """One thing that happened to a range of messages, in a group, by a consumer, at a time."""

    kind: ActionKind
    group_id: int
    subject_id: int
    time_ms: int
    consumer_id: int = 0
    attempt: int = 0
    due_ms: int = 0
    lot: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    detail: bytes = b""


class ActionView(Protocol):
    """Whoever makes something of the actions: the groups of a broker. Rebuilt like every other view."""

    def replay(self, record: Record) -> None:
        """Take in a record of the log, in order."""

    def picture(self) -> bytes:
        """For the checkpoint: everything up to the end of the log as it is now."""

    def is_whole(self, first_base: int) -> bool:
        """Whether the view lacks nothing, in a log of which only what lies from `first_base` on is left."""

    def restore(self, picture: bytes, end: int) -> None:
        """Begin with a picture of the log up to `end`; `RemoteProtocolError` where the picture cannot be read, and then
        nothing was taken in."""


NameStatements: TypeAlias = Callable[[], Iterable[Action]]  # a GROUP_CONFIG for each group, a JOIN for each member


def pack(actions: Iterable[Action]) -> bytes:
    """The body of an ACTIONS record."""
    parts = []
    for each in actions:
        parts.append(
            _FIXED.pack(
                each.kind,
                len(each.ranges),
                len(each.detail),
                each.group_id,
                each.subject_id,
                each.consumer_id,
                each.attempt,
                each.time_ms,
                each.due_ms,
                each.lot,
            )
        )
        parts += [_RANGE.pack(*each_range) for each_range in each.ranges]
        parts.append(record.padded(each.detail))
    return b"".join(parts)


class ActionHeader(NamedTuple):
    """An action's fixed part, and where in the body its ranges and its detail are: for readers of many, who have no
    use for a tuple per range."""

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
    """The actions of a record's body, one by one; of any kind."""
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
        yield Action(known, group, subject, time, consumer, attempt, due, lot, spans, body[at : at + detail])


def pack_groups(picture: bytes) -> bytes:
    """The body of a GROUPS record."""
    return record.padded(_LENGTH.pack(len(picture)) + picture)


def unpack_groups(body: bytes) -> bytes:
    """The picture of the groups that a GROUPS record holds."""
    size = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else len(body)
    if size > len(body) - _LENGTH.size:
        raise RemoteProtocolError("a picture of the groups cannot be read: it is cut short")
    return body[_LENGTH.size : _LENGTH.size + size]


class ActionLog:
    """Actions in; read back by recovery. Lives on the loop of its store."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        state: LogState,
        *,
        segment_bytes: int,
        defer: Defer,
        on_progress: Callable[[], None],
        on_cut: Callable[[int], None] = lambda _: None,
        durability: Durability = Durability.SYNC,
        names: NameStatements = tuple,
        is_ahead: IsAhead = lambda *_: False,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._names = names
        self._segment_bytes = segment_bytes
        self.has_ballast = False
        self.log = Log(
            disk,
            clock,
            DIRECTORY,
            state,
            segment_bytes=segment_bytes,
            defer=defer,
            on_roll=self._begin_segment,
            on_cut=on_cut,
            on_progress=on_progress,
            durability=durability,
            reserved=True,
            release_ballast=self._release_ballast,
            is_ahead=is_ahead,
        )

    def append(self, actions: Iterable[Action]) -> RecordHeader:
        """Gather actions as one record; durable once `log.flusher.durable(header.end)` says so."""
        gathered = list(actions)
        return self.log.append(RecordKind.ACTIONS, pack(gathered), self._clock.wall_ms(), count=len(gathered))

    def state_groups(self, picture: bytes) -> RecordHeader:
        """Gather a GROUPS record: what all actions before it amount to."""
        return self.log.append(RecordKind.GROUPS, pack_groups(picture), self._clock.wall_ms())

    def _begin_segment(self) -> None:
        """Too many names are left out: then a reader goes back further. A copy has the master's."""
        self.take_ballast()
        if self.log.follows:
            return
        body = pack(self._names())
        if 0 < len(body) <= self._segment_bytes // _NAMES_SHARE:
            self.log.write(RecordKind.NAMES, body, self._clock.wall_ms())

    def take_ballast(self) -> None:
        """Claim room for the rest of the newest segment, which a cut or a power cut may have given up, and for one
        segment more. Without it the store closes for produce."""
        try:
            if self.log.segments:
                self._disk.reserve(self.log.file(self.log.segments[-1]), self._segment_bytes)
            file = self._disk.open(BALLAST, create=True)
            try:
                self._disk.reserve(file, self._segment_bytes)
                self.has_ballast = True
            finally:
                file.close()
        except DiskFull:
            self.has_ballast = False

    def _release_ballast(self) -> bool:
        """Give the room back for the segment that needs it now; False if there was none."""
        had, self.has_ballast = self.has_ballast, False
        if had:
            self._disk.remove(BALLAST)
        return had
