"""One producer's way into one subject: sealed batches, in order, each stored once or given up honestly.

A batch leaves under the lane's stream: a random producer id, and sequences without gaps. The broker's dedupe window
makes sending the same bytes twice harmless, refuses what lies beyond a gap, and so keeps the order. What follows here:

    waiting     sealed, not (or no longer) under way. A number is given when a batch first leaves, and then its bytes
                are fixed for as long as anybody may have stored them.
    sent        under way, or come back; in order.
    recovering  something came back. No more is sent until everything under way has come back too; then all that is
                not stored goes back to `waiting` and leaves again, in its old order, byte for byte.

What is known of a batch that is not stored by an answer's word:

    clean       every attempt was refused, or there was none: it is certainly not stored
    doubtful    an attempt was lost: it may be stored, and only its own bytes under its own number may be sent again
    behind a    a clean batch that was given up leaves a hole in its stream; the broker can store nothing behind it, so
    hole        everything behind it is clean, whatever was lost

A stream with a hole is broken: its doubtful batches are asked about first, then the clean ones leave under a new
stream. A doubtful batch whose stream the broker no longer remembers, or that is refused behind a doubtful hole, stays
unknown for ever, and its sender is told so.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from fairway import batch
from fairway.batch import MessageId
from fairway.batch.secret import derived_secret
from fairway.errors import Code, FairwayError, NotSent, OutcomeUnknown, Refused
from fairway.protocol.backoff import RetryDelays
from fairway.protocol.filling import BatchBuilder
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.pending import BatchReceipt, PendingBatch
from fairway.protocol.session import ConnectionLost
from fairway.world.rng import Rng

NEVER_NS: Final = 1 << 63

# Refusals that pass: the same batch may be granted later.
_LATER: Final = frozenset(
    {Code.BUSY, Code.READ_ONLY, Code.NOT_MASTER, Code.EXPIRED, Code.DRAINING, Code.TOO_MANY_CONNECTIONS}
)
# Refusals that concern the stream and not the batch: it may leave under another one, if it is clean. Behind another
# batch that is not stored they say nothing: a broker that could not take the first one of a stream a moment ago, and
# can take the second, knows nothing of the stream yet.
_STREAM: Final = frozenset({Code.SEQUENCE_GAP, Code.UNKNOWN_PRODUCER, Code.FOREIGN_STREAM})


class StreamIdentity:
    """What the broker knows of a lane: one producer id, numbers from 0 on, and the secret that goes with them."""

    __slots__ = ("cut_at", "is_broken", "next", "pinned_request", "producer_id", "request")

    def __init__(self, rng: Rng, subject: str, key: bytes) -> None:
        self.producer_id = rng.bits(64) or 1  # 0 names nobody
        secret = derived_secret(key, self.producer_id)
        self.request = Produce(subject, secret=secret)
        self.pinned_request = Produce(subject, is_pinned=True, secret=secret)  # of a doubtful batch
        self.next = 0
        self.is_broken = False  # a range of it will never be stored, or nobody knows
        self.cut_at = NEVER_NS  # certainly nothing is stored from this sequence on

    def copy(self) -> StreamIdentity:
        """The same stream, for somebody who goes on with it by himself."""
        return copy.copy(self)

    def cut(self, sequence: int) -> None:
        """What is numbered so is certainly not stored and will not be."""
        self.is_broken = True
        self.cut_at = min(self.cut_at, sequence)


class SealedBatch:
    """One sealed batch."""

    __slots__ = (
        "data", "deadline_ns", "first", "is_abandoned", "is_in_flight", "lane", "pending", "refused", "size_bytes",
        "stamp", "stream", "was_lost",
    )  # fmt: skip

    def __init__(self, lane: ProducerStream, pending: PendingBatch, size_bytes: int, deadline_ns: int) -> None:
        self.lane = lane
        self.pending = pending
        self.size_bytes = size_bytes  # as counted for the buffer
        self.deadline_ns = deadline_ns
        self.data = b""
        self.stamp = (0, 0)  # what the bytes say: producer id, first sequence
        self.stream: StreamIdentity | None = None  # under which it has left; None: it has not
        self.first = 0
        self.is_in_flight = False
        self.was_lost = False
        self.is_abandoned = False  # its time was up while it was under way: its sender has been told already
        self.refused: Refused | None = None  # the last time

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be stored."""
        return self.was_lost and self.stream is not None and self.first < self.stream.cut_at

    def twin(self) -> SealedBatch:
        """The same batch, to be sent again by somebody else while this one is under way."""
        other = SealedBatch(self.lane, self.pending, self.size_bytes, self.deadline_ns)
        other.data, other.stamp, other.stream, other.first = self.data, self.stamp, self.stream, self.first
        other.was_lost = True
        return other

    def number(self, stream: StreamIdentity) -> None:
        """Give it the next place in a stream; its bytes are fixed from here on."""
        self.stream = stream
        self.first = stream.next
        self.was_lost = False
        stream.next += self.pending.count
        if self.stamp != (stream.producer_id, self.first):
            self.stamp = (stream.producer_id, self.first)
            self.data = batch.restamp(self.data, producer_id=stream.producer_id, first_sequence=self.first)


class ProducerStream:
    """All of one producer's batches for one subject. `settle(parcel, outcome)` is called once for each."""

    def __init__(
        self,
        subject: str,
        rng: Rng,
        backoff: RetryDelays,
        window: int,
        settle: Callable[[SealedBatch, BatchReceipt | FairwayError], None],
        key: bytes,
    ) -> None:
        """`key`: what the secrets of its streams are derived from."""
        self.subject = subject
        self.broker_group = ""  # for receipts, in a cluster
        self.filling: BatchBuilder | None = None
        self.waiting: deque[SealedBatch] = deque()
        self.sent: dict[SealedBatch, None] = {}
        self.in_flight = 0
        self.is_recovering = False
        self.retry_at_ns = 0
        # When the owner's alarms for this lane ring. A deadline has one of its own, or each short wait before it would
        # leave another long one behind.
        self.wake_ns = NEVER_NS
        self.late_ns = NEVER_NS
        self._rng = rng
        self._backoff = backoff
        self._window = window
        self._settle = settle
        self._key = key
        self._stream = self._new_stream()
        self._unnumbered = 0  # messages in `waiting` that have not left yet

    def _new_stream(self) -> StreamIdentity:
        return StreamIdentity(self._rng, self.subject, self._key)

    @property
    def has_room(self) -> bool:
        """Whether one more batch may be under way now."""
        return self.in_flight < self._window and not self.is_recovering and not self.waiting

    @property
    def stamp(self) -> tuple[int, int]:
        """The place that the next batch to be sealed will have, if nothing goes wrong."""
        return self._stream.producer_id, self._stream.next + self._unnumbered

    def forget_alarm(self, due_ns: int) -> None:
        """It has rung."""
        if due_ns == self.wake_ns:
            self.wake_ns = NEVER_NS
        if due_ns == self.late_ns:
            self.late_ns = NEVER_NS

    def parcels(self) -> Iterator[SealedBatch]:
        """Everything sealed, oldest first."""
        yield from self.sent
        yield from self.waiting

    # --- out ---------------------------------------------------------------------------------------------------------

    def put(self, parcel: SealedBatch, data: bytes, stamp: tuple[int, int]) -> None:
        """One more sealed batch."""
        parcel.data = data
        parcel.stamp = stamp
        self._unnumbered += parcel.pending.count
        self.waiting.append(parcel)

    def take(self, room: int, now_ns: int) -> list[SealedBatch]:
        """What is to leave now, at most `room`."""
        leaving: list[SealedBatch] = []
        if self.is_recovering and not self._recovered(now_ns):
            return leaving
        room = min(room, self._window - self.in_flight)
        while self.waiting and len(leaving) < room:
            parcel = self.waiting[0]
            stream = parcel.stream or self._stream
            if self.sent and next(iter(self.sent)).stream is not stream:
                break  # what is doubtful in the old stream comes first
            if parcel.stream is None:
                self._unnumbered -= parcel.pending.count
                parcel.number(stream)
            self.waiting.popleft()
            self.sent[parcel] = None
            parcel.is_in_flight = True
            leaving.append(parcel)
        self.in_flight += len(leaving)
        return leaving

    def _recovered(self, now_ns: int) -> bool:
        """Everything is back and the wait is over: begin again, under a new stream if the old one has a hole."""
        if self.in_flight or now_ns < self.retry_at_ns:
            return False
        self.is_recovering = False
        self.retry_at_ns = 0
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        if self._stream.is_broken:
            self._stream = self._new_stream()
        for parcel in self.waiting:
            if parcel.stream is None:
                break  # nor has any behind it a number
            if parcel.stream.is_broken and not parcel.is_doubtful:
                parcel.stream.cut(parcel.first)  # it leaves that stream, so nothing behind it can be stored there
                parcel.stream = None
                self._unnumbered += parcel.pending.count
        return True

    # --- by another way ----------------------------------------------------------------------------------------------

    def succeed(self) -> ProducerStream:
        """A lane in the place of this one, with all that is not settled, from which `hand_over` takes.

        What is under way stays here, too, until it is answered, which interests nobody any more: the same bytes under
        the same number may be sent twice.
        """
        heir = ProducerStream(self.subject, self._rng, self._backoff, self._window, self._settle, self._key)
        heir.filling, self.filling = self.filling, None
        heir.broker_group = self.broker_group
        copies: dict[
            StreamIdentity, StreamIdentity
        ] = {}  # what becomes of the old ones is not known to those who go another way
        for parcel in [*self.parcels()]:
            if not parcel.is_in_flight:
                self._remove(parcel)
                heir._inherit(parcel, copies)
            elif not parcel.is_abandoned:
                heir._inherit(parcel.twin(), copies)
                parcel.is_abandoned = True
        if not self._stream.is_broken:
            heir._stream = copies.get(self._stream) or self._stream.copy()
        return heir

    def _inherit(self, parcel: SealedBatch, copies: dict[StreamIdentity, StreamIdentity]) -> None:
        """It keeps the number under which it may be stored; one in a broken stream where it is not is given up."""
        parcel.lane = self
        if parcel.stream is not None:
            parcel.stream = copies.setdefault(parcel.stream, parcel.stream.copy())
        stream = parcel.stream
        if stream is not None and stream.is_broken and not parcel.is_doubtful:
            stream.cut(parcel.first)
            parcel.stream = None
        if parcel.stream is None:
            self._unnumbered += parcel.pending.count
        self.waiting.append(parcel)

    def hand_over(self) -> bool:
        """The oldest that waits is for somebody else to bring to the broker: its number and bytes are fixed from here
        on. Whether it has been sent before under that number."""
        parcel = self.waiting.popleft()
        if parcel.stream is not None:
            return True
        self._unnumbered -= parcel.pending.count
        parcel.number(self._stream)
        return False

    def take_back(self, parcel: SealedBatch, *, was_sent: bool) -> None:
        """It could not be handed over; those behind it were taken back before."""
        if not was_sent:
            self._stream.next = parcel.first
            parcel.stream = None
            self._unnumbered += parcel.pending.count
        self.waiting.appendleft(parcel)

    def restart(self) -> None:
        """All that was handed over is where it belongs, under whatever number: begin a new stream."""
        self._stream = self._new_stream()

    @property
    def is_empty(self) -> bool:
        """Whether nothing here is unsettled."""
        return self.filling is None and not self.waiting and not self.sent

    def lend(self) -> list[SealedBatch]:
        """Everything that is sealed, not under way and certainly not stored, in order: it leaves this lane for good."""
        lent: list[SealedBatch] = []
        for parcel in [*self.parcels()]:
            if parcel.is_in_flight or parcel.is_abandoned or parcel.is_doubtful:
                continue
            if parcel.stream is None:
                self._unnumbered -= parcel.pending.count
            else:
                parcel.stream.cut(parcel.first)
                self.is_recovering = True
            self._remove(parcel)
            lent.append(parcel)
        return lent

    # --- back --------------------------------------------------------------------------------------------------------

    def stored(self, parcel: SealedBatch, answer: Produced) -> None:
        """The broker has it."""
        self._back(parcel)
        del self.sent[parcel]
        self._backoff.reset()
        if not parcel.is_abandoned:
            first_id = MessageId(*parcel.stamp)
            first, count, group = answer.first_sequence, answer.count, self.broker_group
            receipt = BatchReceipt(self.subject, first, count, answer.appended_ms, answer.is_duplicate, first_id, group)
            self._settle(parcel, receipt)

    def lost(self, parcel: SealedBatch, _: ConnectionLost) -> None:
        """Nobody knows."""
        self._back(parcel)
        self.is_recovering = True
        parcel.was_lost = True
        if parcel.is_abandoned:
            self.give_up(parcel, "")

    def refused(self, parcel: SealedBatch, refused: Refused, now_ns: int) -> bool:
        """Not stored by this attempt. Returns whether the broker is to blame and not the batch; once per window.

        One that does not lead is left by the line, which also waits and counts that; here nothing is to be waited for.
        """
        self._back(parcel)
        is_behind = refused.code in _STREAM and next(iter(self.sent)) is not parcel
        is_astray = refused.code is Code.NOT_MASTER
        is_news = not self.retry_at_ns and not is_astray
        if is_news and not is_behind:
            self.retry_at_ns = now_ns + self._backoff.next_ns(refused.retry_after_ms)  # once for the whole window
        self.is_recovering = True
        if not is_behind:
            parcel.refused = refused
        if parcel.is_abandoned:
            self.give_up(parcel, "")
        elif refused.code not in _LATER and not is_behind:
            self._refused_for_good(parcel, refused)
        return is_news and refused.code in _LATER

    def _refused_for_good(self, parcel: SealedBatch, refused: Refused) -> None:
        """This batch can never be stored under this number."""
        if parcel.is_doubtful:
            self._leave_unknown(parcel, refused.sentence, refused)
        elif refused.code in _STREAM:
            _of(parcel).is_broken = True  # it leaves under a new one
        else:
            _of(parcel).cut(parcel.first)
            del self.sent[parcel]
            self._settle(parcel, refused)

    def _back(self, parcel: SealedBatch) -> None:
        parcel.is_in_flight = False
        self.in_flight -= 1

    # --- giving up ---------------------------------------------------------------------------------------------------

    def is_late(self, now_ns: int) -> bool:
        """Whether some batch has had its time; the oldest comes first."""
        oldest = next(self.parcels(), None)
        return oldest is not None and oldest.deadline_ns <= now_ns

    def expire(self, now_ns: int, sentence: str) -> None:
        """Give up what has had its time."""
        for parcel in [*self.sent]:
            if parcel.deadline_ns > now_ns:
                return
            self.give_up(parcel, sentence)
        while self.waiting and self.waiting[0].deadline_ns <= now_ns:
            self.give_up(self.waiting[0], sentence)

    def give_up(self, parcel: SealedBatch, sentence: str) -> None:
        """Its sender is told what is certain. One that is under way stays in its place until its fate is known."""
        if parcel.is_in_flight:
            if not parcel.is_abandoned:
                parcel.is_abandoned = True
                self._settle(parcel, _unknown(parcel, sentence))
        elif parcel.is_doubtful:
            self._leave_unknown(parcel, sentence, parcel.refused)
        else:
            if parcel.stream is None:
                self._unnumbered -= parcel.pending.count
            else:
                parcel.stream.cut(parcel.first)
                self.is_recovering = True
            self._remove(parcel)
            if not parcel.is_abandoned:
                self._settle(parcel, not_sent(parcel.pending, sentence, parcel.refused))

    def _leave_unknown(self, parcel: SealedBatch, sentence: str, cause: Refused | None) -> None:
        _of(parcel).is_broken = True
        self.is_recovering = True
        self._remove(parcel)
        if not parcel.is_abandoned:
            error = _unknown(parcel, sentence)
            error.__cause__ = cause
            self._settle(parcel, error)

    def _remove(self, parcel: SealedBatch) -> None:
        if parcel in self.sent:
            del self.sent[parcel]
        else:
            self.waiting.remove(parcel)


def _of(parcel: SealedBatch) -> StreamIdentity:
    """The stream of a parcel that has left."""
    if parcel.stream is None:
        raise OutcomeUnknown("a batch came back that never left")
    return parcel.stream


def request_of(parcel: SealedBatch) -> Produce:
    """What goes with a parcel that leaves."""
    stream = _of(parcel)
    return stream.pinned_request if parcel.is_doubtful else stream.request


def _unknown(parcel: SealedBatch, sentence: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"whether {_many(parcel.pending)} stored is not known: {sentence}")


def not_sent(pending: PendingBatch, sentence: str, cause: Refused | None = None) -> NotSent:
    """The error for what is certainly not stored."""
    why = f"{sentence}; the last refusal was {cause}" if cause is not None else sentence
    error = NotSent(f"{_many(pending)} not stored: {why}")
    error.__cause__ = cause
    return error


def _many(pending: PendingBatch) -> str:
    what = "1 message" if pending.count == 1 else f"{pending.count} messages"
    return f"{what} to {pending.subject} {'is' if pending.count == 1 else 'are'}"
