"""The dedupe window: what each producer stream has stored already, so that a batch sent twice is stored once.

A stream numbers its messages without gaps. For each stream the window keeps the next sequence expected, and the last
batches (range, checksum, receipt). `judge` decides about a batch that arrives:

    begins at the next sequence expected                       → new: store it
    same range and same bytes as a batch in the window         → the original receipt, once that batch is committed
    any other overlap with stored batches                      → SEQUENCE_CONFLICT, with what is stored there (likewise)
    an older epoch than the stream's, or another subject       → SEQUENCE_CONFLICT (likewise)
    begins beyond the next sequence expected                   → SEQUENCE_GAP
    stream not in the window, and it does not begin at 0       → UNKNOWN_PRODUCER, never a silent store
    another secret than the stream was begun with              → FOREIGN_STREAM, without any detail of the stream

A stream that began with a secret has a verifier (`batch.identity`). A STREAM record states the verifier in each segment
of the log, before the first batch of the stream there and again behind it. So the verifier outlives retention, a lost
checkpoint and any single rotten record. A stream that began without a secret never gets a verifier.

The window is a view: rebuilt from the log, carried by the checkpoint. It is bounded per stream, in memory, in the
number of streams, and in days of idleness. More batches of a stream may be on their way to the disk than its window
holds (a relay sends a thousand at once). So a batch that left the window may be uncommitted, and an undo may reach
below the window; the consume log then tells where the stream goes on (`Firsts`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from typing import TypeAlias

import msgspec

from fairway import batch, limits
from fairway.batch.identity import VERIFIER_BYTES, is_same, verifier_of
from fairway.errors import Code, Refused, RemoteProtocolError, StoredRange

# first producer sequence, count, CRC, first sequence, end of the record, append ms, producer epoch
_STORED = struct.Struct("<QIIQQqI4x")
_EPOCH_AT = slice(-8, -4)  # of the newest batch, in a window of packed ones
_OLDEST_EPOCH_AT = slice(_STORED.size - 8, _STORED.size - 4)
_OLDEST_END_AT = slice(struct.calcsize("<QIIQ"), struct.calcsize("<QIIQQ"))
_WINDOW_BYTES_MAX = limits.STREAM_BATCHES_MAX * _STORED.size
_STREAM = struct.Struct("<QIIQqI4x")  # producer, subject, epoch before the window, next, last used ms, batches
_VERIFIER = struct.Struct(f"<QI4x{VERIFIER_BYTES}s")  # producer, subject, verifier: in a checkpoint
_STATEMENT = struct.Struct(f"<Q{VERIFIER_BYTES}s")  # producer, verifier: the body of a STREAM record
STATEMENT_BYTES = _STATEMENT.size
_ALL_SUBJECTS = range(1 << 32)
_NOWHERE = -1  # no segment states this verifier, as far as this process knows

# By subject and producer: the first producer sequence that the log has at or above some position.
Firsts: TypeAlias = Callable[[], Mapping[tuple[int, int], int]]


class DedupeEntry(msgspec.Struct, frozen=True, gc=False):
    """A batch that is in the log, or on its way there."""

    producer_sequence: int
    count: int
    crc: int
    first_sequence: int
    end: int
    appended_ms: int
    epoch: int  # the producer's

    @property
    def range(self) -> StoredRange:
        return StoredRange(self.producer_sequence, self.count, self.crc)


class PlaceTaken(Refused):
    """SEQUENCE_CONFLICT: another batch has this place, or is on its way there. Answer only once that batch is
    committed; if it never is, the place is free again. `stored` is None where the window does not reach back so far."""

    def __init__(
        self,
        header: batch.BatchHeader,
        sentence: str,
        end: int,
        stored: tuple[StoredRange, ...] | None = None,
        subject_id: int = 0,
    ) -> None:
        super().__init__(Code.SEQUENCE_CONFLICT, _told(header, sentence), stored=stored)
        self.header = header
        self.end = end  # of the record that has the place
        self.subject_id = subject_id  # where the log has that record; 0: nowhere


class _Stream:
    """One producer's stream into one subject. `window` holds packed `DedupeEntry`, oldest first."""

    __slots__ = (
        "epoch", "left_end", "next", "old_epoch", "secret", "stated_at", "stated_from", "subject_id", "used_ms",
        "verifier", "window",
    )  # fmt: skip

    def __init__(self, subject_id: int, old_epoch: int, next_: int, used_ms: int, window: bytearray) -> None:
        self.subject_id = subject_id
        self.old_epoch = old_epoch  # of the last batch before the window
        self.next = next_
        self.used_ms = used_ms
        self.window = window
        self.left_end = 0  # end of the record that left the window last; 0: it is committed
        self.epoch = self.newest_epoch()
        self.verifier: bytes | None = None
        self.secret: bytes | None = None  # found right before, so that the next batch need not be hashed; never stored
        self.stated_at = _NOWHERE  # position of the newest statement
        self.stated_from = _NOWHERE  # position of the oldest; 0: below the checkpoint that carried it

    def is_opened_by(self, secret: bytes, producer_id: int) -> bool:
        """Whether a sender that shows this secret may continue the stream."""
        if self.verifier is None:
            return True
        if self.secret is not None:
            return is_same(self.secret, secret)
        is_right = is_same(self.verifier, verifier_of(secret, producer_id))
        if is_right:
            self.secret = secret
        return is_right

    def overlapping(self, first: int, end: int) -> list[DedupeEntry]:
        """The batches of the window that hold any of these sequences, in order."""
        found = [each for each in self if each.producer_sequence < end and each.producer_sequence + each.count > first]
        return found[::-1]

    def newest_epoch(self) -> int:
        """The epoch of the newest batch. The undo of a batch undoes its epoch too."""
        return int.from_bytes(self.window[_EPOCH_AT], "little") if self.window else self.old_epoch

    def end_before(self, sequence: int | None) -> int:
        """The end of the record that holds the last message before `sequence`, or the last of all. If that record has
        left the window: an upper bound of its end."""
        ends = (each.end for each in self if sequence is None or each.producer_sequence < sequence)
        return next(ends, self.left_end)

    def below(self, position: int, producer_id: int, firsts: Firsts) -> tuple[int, int]:
        """How many batches of the window end at or before `position`, and the stream's next sequence there."""
        batches, next_ = len(self.window) // _STORED.size, self.next
        for stored in self:
            if stored.end <= position:
                return batches, next_
            batches, next_ = batches - 1, stored.producer_sequence
        return 0, firsts().get((self.subject_id, producer_id), next_)

    def __iter__(self) -> Iterator[DedupeEntry]:
        """Newest first: a batch that is sent again is nearly always the last one."""
        for at in range(len(self.window) - _STORED.size, -1, -_STORED.size):
            yield DedupeEntry(*_STORED.unpack_from(self.window, at))


class DedupeWindow:
    """All streams of one message log, the least recently used first."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._window_bytes = 0  # of all windows
        self.bytes_max: int | None = None  # beyond it the least recently used go; None in a replay, which keeps all

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held_bytes(self) -> int:
        """Memory that all streams take, as an estimate."""
        return len(self._streams) * limits.STREAM_BYTES + self._window_bytes * 5 // 4  # a window grows in steps

    def judge(
        self, header: batch.BatchHeader, subject_id: int, secret: bytes = b"", subjects: Container[int] = _ALL_SUBJECTS
    ) -> DedupeEntry | None:
        """None: the batch is new. Otherwise the original's entry. `Refused` for all other answers. `subjects`: those
        that exist; the streams of others went with them."""
        stream = self._streams.get(header.producer_id)
        first = header.first_sequence
        if stream is not None and stream.subject_id != subject_id and stream.next and stream.subject_id not in subjects:
            self._drop(header.producer_id)
            stream = None
        if stream is None:
            if first == 0:
                return None
            raise _refused(Code.UNKNOWN_PRODUCER, header, "is not remembered here: begin a new stream at sequence 0")
        if stream.verifier is not None and not stream.is_opened_by(secret, header.producer_id):
            raise _refused(Code.FOREIGN_STREAM, header, "has another secret: begin a stream of your own")
        if stream.subject_id != subject_id and stream.next:
            raise PlaceTaken(header, "belongs to another subject: a stream has one subject", stream.end_before(None))
        if first < stream.next:
            for stored in stream:
                if (stored.producer_sequence, stored.count, stored.crc) == (first, header.count, header.crc):
                    return stored  # even if a newer epoch has taken over the stream since
        if header.producer_epoch < stream.epoch:
            sentence = f"was taken over by epoch {stream.epoch}"
            raise self._taken(stream, header, sentence, stream.end_before(None))
        if first == stream.next:
            return None
        if first > stream.next:
            raise _refused(Code.SEQUENCE_GAP, header, f"is expected to go on at {stream.next}, not at {first}")
        end = stream.end_before(first + header.count)
        raise self._taken(stream, header, f"already stored other bytes in {first}+{header.count}", end)

    def _taken(self, stream: _Stream, header: batch.BatchHeader, sentence: str, end: int) -> PlaceTaken:
        first, sent_end = header.first_sequence, header.first_sequence + header.count
        found = stream.overlapping(first, sent_end)
        is_known = first >= stream.next or (bool(found) and found[0].producer_sequence <= first)
        stored = tuple(each.range for each in found) if is_known else None
        return PlaceTaken(header, sentence, end, stored, stream.subject_id)

    # --- verifiers ---------------------------------------------------------------------------------------------------

    def statement(self, producer_id: int, secret: bytes, segment_base: int) -> bytes | None:
        """The body of the STREAM record that the segment needs before the stream's next batch, which was judged new.
        None: the segment has it, or the stream began without a secret."""
        stream = self._streams.get(producer_id)
        if stream is None:
            return _STATEMENT.pack(producer_id, verifier_of(secret, producer_id)) if secret else None
        if stream.verifier is None or stream.stated_at >= segment_base:
            return None
        return _STATEMENT.pack(producer_id, stream.verifier)

    def state(self, body: bytes, subject_id: int, position: int) -> None:
        """Apply a STREAM record at `position`. Another verifier than before means that the stream was forgotten and
        begun again. No verifier before, though there are batches, means that the earlier STREAM record has rotted. A
        stream without batches takes the newest subject: an older one may never have been committed."""
        producer_id, verifier = unpack_statement(body)
        stream = self._streams.get(producer_id)
        is_begun_anew = stream is not None and bool(stream.next) and stream.subject_id != subject_id
        if stream is None or is_begun_anew or stream.verifier not in (None, verifier):
            if stream is not None:
                self._drop(producer_id)
            stream = self._add(producer_id, _Stream(subject_id, 0, 0, 0, bytearray()))
        if not stream.next:
            stream.subject_id = subject_id
        stream.verifier = verifier
        stream.stated_at = max(stream.stated_at, position)
        stream.stated_from = position if stream.stated_from == _NOWHERE else stream.stated_from

    def restate(self, body: bytes) -> None:
        """Apply a repaired STREAM record. The window knows all later records already."""
        producer_id, verifier = unpack_statement(body)
        stream = self._streams.get(producer_id)
        if stream is not None and stream.verifier is None:
            stream.verifier = verifier

    def _add(self, producer_id: int, stream: _Stream) -> _Stream:
        streams = self._streams
        while len(streams) >= limits.STREAMS_MAX:
            self._drop(next(iter(streams)))
        streams[producer_id] = stream
        return stream

    def _drop(self, producer_id: int) -> None:
        self._window_bytes -= len(self._streams.pop(producer_id).window)

    def _make_room(self) -> None:
        """Forget the least recently used streams, as far as memory is short."""
        bytes_max = self.bytes_max
        while bytes_max is not None and self.held_bytes > bytes_max and len(self._streams) > 1:
            self._drop(next(iter(self._streams)))

    # --- growing -----------------------------------------------------------------------------------------------------

    def note(self, header: batch.BatchHeader, subject_id: int, first_sequence: int, end: int, appended_ms: int) -> None:
        """A batch was appended, or read again from the log; its record ends at `end`."""
        streams = self._streams
        stream = streams.pop(header.producer_id, None)
        if stream is None or (stream.next and stream.subject_id != subject_id):  # the old subject was removed
            if stream is not None:
                self._window_bytes -= len(stream.window)
            stream = self._add(header.producer_id, _Stream(subject_id, 0, 0, 0, bytearray()))
        else:
            streams[header.producer_id] = stream  # now the most recently used
            if not stream.next:
                stream.subject_id = subject_id
        first, count, epoch = header.first_sequence, header.count, header.producer_epoch
        stream.next = first + count
        stream.epoch = epoch
        stream.used_ms = appended_ms
        window = stream.window
        window += _STORED.pack(first, count, header.crc, first_sequence, end, appended_ms, epoch)
        if len(window) > _WINDOW_BYTES_MAX:
            stream.old_epoch = int.from_bytes(window[_OLDEST_EPOCH_AT], "little")
            stream.left_end = int.from_bytes(window[_OLDEST_END_AT], "little")
            del window[: _STORED.size]
        else:
            self._window_bytes += _STORED.size
            if self.bytes_max is not None:
                self._make_room()

    def cut(self, position: int, firsts: Firsts) -> None:
        """Forget batches that end above `position`: they were never committed. `firsts`: for that position."""
        firsts = cache(firsts)
        for producer_id in list(self._streams):
            stream = self._streams[producer_id]
            batches, stream.next = stream.below(position, producer_id, firsts)
            del stream.window[batches * _STORED.size :]
            stream.left_end = min(stream.left_end, position)
            stream.stated_at = stream.stated_at if stream.stated_at < position else _NOWHERE
            stream.stated_from = stream.stated_from if stream.stated_from < position else _NOWHERE
            stream.epoch = stream.newest_epoch()
            if not stream.window and stream.next == 0:
                del self._streams[producer_id]
        self._count()

    def _count(self) -> None:
        self._window_bytes = sum(len(stream.window) for stream in self._streams.values())

    def expire(self, now_ms: int) -> None:
        """Forget streams that were idle for too long."""
        for producer_id in list(self._streams):
            if now_ms - self._streams[producer_id].used_ms <= limits.STREAM_IDLE_MS_MAX:
                break
            self._drop(producer_id)

    def pack(self, upto: int, firsts: Firsts) -> bytes:
        """The streams for the checkpoint, as of position `upto`. `firsts`: for that position."""
        firsts = cache(firsts)
        parts: list[bytes | bytearray] = []
        for producer_id, stream in self._streams.items():
            batches, next_ = stream.below(upto, producer_id, firsts)
            if batches or next_:
                fields = (stream.subject_id, stream.old_epoch, next_, stream.used_ms, batches)
                parts += (_STREAM.pack(producer_id, *fields), stream.window[: batches * _STORED.size])
        return b"".join(parts)

    def pack_verifiers(self, upto: int, firsts: Firsts) -> bytes:
        """The verifiers of the packed streams, and of those stated below position `upto`. A stream that lies wholly
        above `upto` is left out: it may be undone, and the id of its subject given to another subject."""
        firsts = cache(firsts)
        parts: list[bytes] = []
        for producer_id, stream in self._streams.items():
            if stream.verifier is None:
                continue
            if _NOWHERE < stream.stated_from < upto or any(stream.below(upto, producer_id, firsts)):
                parts.append(_VERIFIER.pack(producer_id, stream.subject_id, stream.verifier))
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes, verifiers: bytes = b"") -> DedupeWindow:
        window = cls()
        at = 0
        while at < len(data):
            if at + _STREAM.size > len(data):
                raise RemoteProtocolError("the dedupe window is cut short")
            producer_id, subject_id, old_epoch, next_, used_ms, batches = _STREAM.unpack_from(data, at)
            at += _STREAM.size
            stored = bytearray(data[at : at + batches * _STORED.size])
            window._streams[producer_id] = _Stream(subject_id, old_epoch, next_, used_ms, stored)
            at += batches * _STORED.size
        if len(verifiers) % _VERIFIER.size:
            raise RemoteProtocolError("the verifiers of the dedupe window are cut short")
        for producer_id, subject_id, verifier in _VERIFIER.iter_unpack(verifiers):
            stream = window._streams.get(producer_id)
            if stream is None:
                stream = window._add(producer_id, _Stream(subject_id, 0, 0, 0, bytearray()))
            stream.verifier = verifier
            stream.stated_from = 0
        window._count()
        return window


def unpack_statement(body: bytes) -> tuple[int, bytes]:
    """Producer id and verifier from a STREAM record's body."""
    if len(body) < STATEMENT_BYTES:
        raise RemoteProtocolError("the statement of a stream is cut short")
    producer_id, verifier = _STATEMENT.unpack_from(body)
    return producer_id, verifier


def _refused(code: Code, header: batch.BatchHeader, sentence: str) -> Refused:
    return Refused(code, _told(header, sentence))


def _told(header: batch.BatchHeader, sentence: str) -> str:
    return f"stream {header.producer_id:016x} {sentence}"
