"""Dispatch log: every decision about pending messages, in one order. It is the action log of the delay server's store.

    INTENT        these messages go to that target, as this batch of that producer stream. It is synced before the
                  batch is sent. It replaces an earlier intent of the same number, whose target is given up for good
    SENT          the target has stored the intent's batch
    CANCEL        these messages are never sent
    RESCHEDULE    these messages have another due time
    STREAM        the next sequence of a stream (only in checkpoints)
    DISPATCHED    these messages were sent (only in checkpoints)
    GONE          these messages of a bucket record are finished and have no row any more (only in checkpoints)
    PUT_OFF       these messages have another due time, each its own (only in checkpoints)
    KEY           the key from which the secrets of the streams are derived; once, before the first intent

The log is the serial point: a message is cancelled or intended, whichever event comes first. State in memory changes
with the append. An intent names its messages, target, stream, sequence and batch checksum. After a crash the delay
server makes the batch again from the buckets, byte for byte, so the broker's dedupe window recognises it.

The checkpoint holds the state of the log as the same kinds of events.

In a replica, the master decides. The replica collects the master's decisions in `heard`, and
`fairway.delay.replica` applies them to the rows.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway.delay.schedule.batch_arrays import runs_of, split_by
from fairway.delay.schedule.bucket_record import Sequences
from fairway.delay.schedule.pending_rows import DecisionIndex, Ranges, RowNumbers, Rows, RowState, sequences_of
from fairway.errors import Code, Refused, RemoteProtocolError
from fairway.storage.record import Record, RecordKind, padded

_MAGIC = b"FWYDSP\r\n"
_VERSION = 1
_PICTURE = struct.Struct("<8sHHHHQ")  # magic, version, header length, must, may, next number
# kind, zero, length of the target, ranges, subject id, batch CRC, number, producer id, first sequence, time
_FIXED = struct.Struct("<BxHIIIQQQq")
_RANGE = struct.Struct("<QQ")  # first sequence, count
_KEY = struct.Struct("<QQ")


class EventKind(enum.IntEnum):
    INTENT = 1
    SENT = 2
    CANCEL = 3
    RESCHEDULE = 4
    STREAM = 5
    DISPATCHED = 6
    GONE = 7  # number: the bucket; first sequence: the record's position; ranges: a bitmap, 128 bits each
    PUT_OFF = 8  # ranges: sequence and due time
    KEY = 9  # producer id and first sequence: the 16 bytes of the key


class DispatchEvent(NamedTuple):
    """One decision. `time_ms` is when the intent was made, or the new due time."""

    kind: EventKind
    subject_id: int = 0
    ranges: Ranges = ()
    number: int = 0
    producer_id: int = 0
    first_sequence: int = 0
    time_ms: int = 0
    crc: int = 0
    target: str = ""

    @property
    def messages(self) -> int:
        return sum(count for _, count in self.ranges)

    def sequences(self) -> Sequences:
        return sequences_of(self.ranges)


class MasterDecision(NamedTuple):
    """A decision of the master, and the state that it gives to the messages. PENDING: they have another due time."""

    event: DispatchEvent
    state: RowState


@dataclass(slots=True)
class DispatchStream:
    """The delay server's producer stream into one subject at one target."""

    producer_id: int
    next_sequence: int
    used_ms: int
    outstanding: int = 0


def key_event(key: bytes) -> DispatchEvent:
    """The event that records this key."""
    producer_id, first_sequence = _KEY.unpack(key)
    return DispatchEvent(EventKind.KEY, producer_id=producer_id, first_sequence=first_sequence)


def pack(events: Iterable[DispatchEvent]) -> bytes:
    """The body of a DISPATCH record."""
    return b"".join(
        _pack(each, struct.pack(f"<{2 * len(each.ranges)}Q", *chain.from_iterable(each.ranges))) for each in events
    )


def _pack(event: DispatchEvent, ranges: bytes) -> bytes:
    """Pack one event with these ranges in place of its own."""
    target = event.target.encode()
    fixed = _FIXED.pack(
        event.kind,
        len(target),
        len(ranges) // _RANGE.size,
        event.subject_id,
        event.crc,
        event.number,
        event.producer_id,
        event.first_sequence,
        event.time_ms,
    )
    return fixed + ranges + padded(target)


def unpack(body: bytes) -> Iterator[DispatchEvent]:
    """The events of a record's body."""
    at = 0
    while at < len(body):
        try:
            kind, target, ranges, subject, crc, number, producer, first, time = _FIXED.unpack_from(body, at)
            at += _FIXED.size
            if at + ranges * _RANGE.size > len(body):
                raise ValueError("its ranges are cut short")
            spans = tuple(_RANGE.iter_unpack(body[at : at + ranges * _RANGE.size]))
            at += ranges * _RANGE.size
            end = at + target + -target % 8
            if end > len(body):
                raise ValueError("its target is cut short")
            name, at = body[at : at + target].decode(), end
            yield DispatchEvent(EventKind(kind), subject, spans, number, producer, first, time, crc, name)
        except (struct.error, ValueError) as error:
            raise RemoteProtocolError(f"a decision cannot be read: {error}") from error


def ranges_of(sequences: Sequences) -> Ranges:
    """Ascending sequences as ranges."""
    return tuple(map(tuple, _range_table(sequences).tolist())) if len(sequences) else ()


def _range_table(sequences: Sequences) -> NDArray[np.uint64]:
    firsts, ends = runs_of(sequences)
    return np.stack((firsts, ends - firsts), axis=1)


class DispatchLog:
    """State of the dispatch log in memory."""

    def __init__(self) -> None:
        self.intents: dict[int, DispatchEvent] = {}  # not yet SENT, by number
        self.streams: dict[tuple[int, str], DispatchStream] = {}
        self.next_number = 1
        self.key = b""  # the secrets of the streams are derived from it; empty before the first intent
        self.is_restored = False  # a checkpoint was loaded
        self.gone: dict[int, dict[int, int]] = {}  # by bucket and position: a bit for each message without a row
        self.end = 0  # where the newest decision ends
        # the master's decisions that no row has yet; None: this copy decides
        self.heard: list[MasterDecision] | None = None
        # the master's decisions about messages that have no row yet
        self.unmatched: Callable[[], Iterable[DispatchEvent]] = tuple
        self._rows: Rows | None = None  # None until every row is loaded
        self._so_far: list[bytes] = []  # until then: every event, packed
        self._sent: list[DispatchEvent] = []
        self._write: Callable[[bytes, int], int] = _not_open

    def open(self, write: Callable[[bytes, int], int]) -> None:
        """Append decisions from now on. `write` appends a record to the action log, and returns the record's end."""
        self._write = write

    # --- deciding ----------------------------------------------------------------------------------------------------

    def append(self, events: list[DispatchEvent]) -> int:
        """Append decisions and apply them to memory. They are durable once the action log is synced to the returned
        position."""
        body = pack(events)
        end = self.end = self._write(body, len(events))
        if self._rows is None:
            self._so_far.append(body)
        for each in events:
            self._note(each)
        return end

    def _note(self, event: DispatchEvent) -> None:
        if event.kind is EventKind.INTENT:
            self._leave(event.number)
            self.intents[event.number] = event
            self.next_number = max(self.next_number, event.number + 1)
            self._note_intent(event)
            self._hear(event, RowState.INTENDED)
        elif event.kind is EventKind.SENT:
            intent = self.intents.pop(event.number, None)
            if intent is not None:
                stream = self.streams.get((intent.subject_id, intent.target))
                if stream is not None and stream.producer_id == intent.producer_id:
                    stream.outstanding -= 1
                if self._rows is None and self.heard is None:
                    self._sent.append(intent)
                self._hear(intent, RowState.DISPATCHED)
        elif event.kind is EventKind.CANCEL:
            self._hear(event, RowState.CANCELLED)
        elif event.kind is EventKind.RESCHEDULE:
            self._hear(event, RowState.PENDING)
        elif event.kind is EventKind.GONE:
            bitmap = struct.pack(f"<{2 * len(event.ranges)}Q", *chain.from_iterable(event.ranges))
            self.gone.setdefault(event.number, {})[event.first_sequence] = int.from_bytes(bitmap, "little")
        elif event.kind is EventKind.KEY:
            self.key = _KEY.pack(event.producer_id, event.first_sequence)
        elif event.kind is EventKind.STREAM:
            stream = DispatchStream(event.producer_id, event.first_sequence, event.time_ms)
            self.streams[event.subject_id, event.target] = stream

    def _hear(self, event: DispatchEvent, state: RowState) -> None:
        if self.heard is not None:
            self.heard.append(MasterDecision(event, state))

    def _leave(self, number: int) -> None:
        """Forget an intent that is replaced. Its stream ends, because the stream now has a gap."""
        before = self.intents.get(number)
        if before is not None:
            stream = self.streams.get((before.subject_id, before.target))
            if stream is not None and stream.producer_id == before.producer_id:
                del self.streams[before.subject_id, before.target]

    def _note_intent(self, event: DispatchEvent) -> None:
        end = event.first_sequence + event.messages
        stream = self.streams.get((event.subject_id, event.target))
        if stream is None or stream.producer_id != event.producer_id:  # a new one begins only when none is under way
            stream = self.streams[event.subject_id, event.target] = DispatchStream(
                event.producer_id, end, event.time_ms
            )
        stream.next_sequence = max(stream.next_sequence, end)
        stream.used_ms = max(stream.used_ms, event.time_ms)
        stream.outstanding += 1

    # --- a start -----------------------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Apply a record of the log. Records come in order."""
        if record.header.kind == RecordKind.DISPATCH:
            self.end = record.header.end
            if self._rows is None:
                self._so_far.append(record.body)
            for each in unpack(record.body):
                self._note(each)

    def is_whole(self, first_base: int) -> bool:
        """Always True: a copy begins with its master's checkpoint, not in the middle of the log."""
        del first_base
        return True

    def restore(self, picture: bytes, end: int) -> None:
        """Begin with the state from the checkpoint."""
        del end
        if len(picture) < _PICTURE.size:
            raise RemoteProtocolError("the picture of the dispatch log is cut short")
        magic, version, header_bytes, must, _, number = _PICTURE.unpack_from(picture)
        if (magic, version, header_bytes, must) != (_MAGIC, _VERSION, _PICTURE.size, 0):
            raise RemoteProtocolError("the picture of the dispatch log is of another format")
        events = list(unpack(picture[_PICTURE.size :]))
        self._so_far.append(picture[_PICTURE.size :])
        self.next_number = number
        self.is_restored = True
        for each in events:
            self._note(each)

    def decision_index(self) -> DecisionIndex:
        """Index the decisions so far, for messages that are not loaded yet."""
        decision_index = DecisionIndex()
        for body in self._so_far:
            for each in unpack(body):
                if each.kind is EventKind.CANCEL:
                    decision_index.note(each.subject_id, each.ranges, RowState.CANCELLED)
                elif each.kind is EventKind.DISPATCHED:
                    decision_index.note(each.subject_id, each.ranges, RowState.DISPATCHED)
                elif each.kind is EventKind.RESCHEDULE:
                    decision_index.note_due(each.subject_id, each.ranges, each.time_ms)
                elif each.kind is EventKind.PUT_OFF:
                    decision_index.note_dues(each.subject_id, each.ranges)
        for file, pieces in self.gone.items():
            for position, mask in pieces.items():
                decision_index.note_gone(file, position, mask)
        for intents, state in ((self._sent, RowState.DISPATCHED), (self.intents.values(), RowState.INTENDED)):
            for each in intents:
                decision_index.note(each.subject_id, each.ranges, state)
        return decision_index

    def loaded(self, rows: Rows) -> None:
        """Every row is loaded: from now on the rows hold the states of the messages."""
        self._rows = rows
        self._so_far, self._sent = [], []

    def picture(self) -> bytes:
        """The state for the checkpoint: everything up to the current end of the log."""
        head = _PICTURE.pack(_MAGIC, _VERSION, _PICTURE.size, 0, 0, self.next_number)
        if self._rows is None:
            return head + b"".join(self._so_far)
        unmatched = pack(self.unmatched())  # must come first, because this call applies `heard` to the rows
        return head + unmatched + b"".join(self._events(self._rows))

    def _events(self, rows: Rows) -> Iterator[bytes]:
        if self.key:
            yield _pack(key_event(self.key), b"")
        for (subject_id, target), stream in self.streams.items():
            event = DispatchEvent(
                EventKind.STREAM,
                subject_id,
                producer_id=stream.producer_id,
                first_sequence=stream.next_sequence,
                time_ms=stream.used_ms,
                target=target,
            )
            yield _pack(event, b"")
        yield pack(self.intents.values())
        for kind, state in ((EventKind.DISPATCHED, RowState.DISPATCHED), (EventKind.CANCEL, RowState.CANCELLED)):
            for subject_id, chosen in by_subject(rows, rows.in_state(state)):
                yield _pack(DispatchEvent(kind, subject_id), _range_table(rows.sequence[chosen]).tobytes())
        moved = rows.where(rows.is_rescheduled[: rows.end] & (rows.state[: rows.end] == RowState.PENDING))
        for subject_id, chosen in by_subject(rows, moved):
            pairs = np.stack((rows.sequence[chosen], rows.due_ms[chosen].astype(np.uint64)), axis=1)
            yield _pack(DispatchEvent(EventKind.PUT_OFF, subject_id), pairs.tobytes())
        for file, pieces in self.gone.items():
            for position, mask in pieces.items():
                bitmap = mask.to_bytes(-(-mask.bit_length() // (8 * _RANGE.size)) * _RANGE.size, "little")
                yield _pack(DispatchEvent(EventKind.GONE, number=file, first_sequence=position), bitmap)


def by_subject(rows: Rows, chosen: RowNumbers) -> Iterator[tuple[int, RowNumbers]]:
    """The chosen rows subject by subject, ascending by their sequences."""
    if not len(chosen):
        return
    chosen = chosen[np.argsort(rows.sequence[chosen], kind="stable")]
    yield from split_by(chosen, rows.subject_id[chosen])


def _not_open(_body: bytes, _count: int) -> int:
    raise Refused(Code.BUSY, "the delay server is starting", retry_after_ms=100)
