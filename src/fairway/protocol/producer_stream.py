"""A producer stream: one producer's sealed batches for one subject, in order, each stored once or given up honestly.

A batch leaves under the stream's identity: a random producer id, and sequences without gaps. The broker's dedupe window
makes sending the same bytes twice harmless. The broker also refuses a batch beyond a gap, and so keeps the order.

The stream is a `SendWindow`, which says what is resent and when. A batch gets its number when it first leaves. From
then on its bytes are fixed for as long as a broker may have stored them.

A batch without a receipt is clean or doubtful:

    clean       every attempt was refused, or there was none: the batch is certainly not stored
    doubtful    an attempt was lost: the batch may be stored, and may only be resent with the same bytes and number
    behind a    a clean batch that was given up leaves a hole in the identity's sequences. The broker can store nothing
    hole        behind a hole, so everything behind it is clean, even after a lost attempt

An identity with a hole is broken. The stream first resends its doubtful batches, then the clean ones under a new
identity. A doubtful batch stays unknown for ever if the broker no longer remembers its identity, or refuses the batch
behind a doubtful hole. Its sender gets OutcomeUnknown.

On a SEQUENCE_CONFLICT the stream fails the batch, with the refusal if clean, with OutcomeUnknown if doubtful.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

from fairway import batch
from fairway.batch import MessageId
from fairway.batch.identity import derived_secret
from fairway.errors import Code, FairwayError, NotSent, OutcomeUnknown, Refused
from fairway.protocol.batch_builder import BatchBuilder
from fairway.protocol.line import ConnectionLost, RetryDelays
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.receipts import BatchReceipt, PendingBatch
from fairway.protocol.resend import SendOutcome, SendWindow, outcome_of
from fairway.runtime.rng import Rng

NEVER_NS: Final = 1 << 63
_NO_STAMP: Final = MessageId(0, 0)

# Refusals that concern the identity and not the batch: a clean batch may leave under another identity. Ignore these
# codes for any batch but the oldest unacknowledged one. A broker that refused the first batch of an identity a moment
# ago, and could store the second, does not know the identity yet.
_STREAM: Final = frozenset({Code.SEQUENCE_GAP, Code.UNKNOWN_PRODUCER, Code.FOREIGN_STREAM})


class StreamIdentity:
    """The identity that a stream shows to the broker: a producer id, numbers from 0 on, and the secret that proves
    them."""

    __slots__ = ("cut_at", "is_broken", "next", "pinned_request", "producer_id", "request")

    def __init__(self, rng: Rng, subject: str, key: bytes) -> None:
        self.producer_id = rng.bits(64) or 1  # 0 is reserved
        secret = derived_secret(key, self.producer_id)
        self.request = Produce(subject, secret=secret)
        self.pinned_request = Produce(subject, is_pinned=True, secret=secret)  # for a doubtful batch
        self.next = 0
        self.is_broken = False  # a range of its sequences will never be stored, or may not be
        self.cut_at = NEVER_NS  # certainly nothing is stored from this sequence on

    def copy(self) -> StreamIdentity:
        """The same identity, for another owner that goes on with its own copy."""
        return copy.copy(self)

    def cut(self, sequence: int) -> None:
        """Note that nothing is or will be stored from this sequence on."""
        self.is_broken = True
        self.cut_at = min(self.cut_at, sequence)


class SealedBatch:
    """A sealed batch, and what is known of its attempts."""

    __slots__ = (
        "data",
        "deadline_ns",
        "first",
        "identity",
        "is_abandoned",
        "pending",
        "refused",
        "size_bytes",
        "stamp",
        "stream",
        "was_lost",
    )  # fmt: skip

    def __init__(self, stream: ProducerStream, pending: PendingBatch, size_bytes: int, deadline_ns: int) -> None:
        self.stream = stream
        self.pending = pending
        self.size_bytes = size_bytes  # as counted for the buffer
        self.deadline_ns = deadline_ns
        self.data = b""
        self.stamp = _NO_STAMP  # as written in the bytes: producer id, first sequence
        self.identity: StreamIdentity | None = None  # under which the batch has left; None: not yet
        self.first = 0
        self.was_lost = False
        self.is_abandoned = False  # the deadline passed in flight: its sender has the outcome already
        self.refused: Refused | None = None  # the last refusal

    @property
    def is_doubtful(self) -> bool:
        """Whether the batch may be stored."""
        return self.was_lost and self.identity is not None and self.first < self.identity.cut_at

    def twin(self) -> SealedBatch:
        """A copy of the batch, to be resent elsewhere while this one is in flight."""
        other = SealedBatch(self.stream, self.pending, self.size_bytes, self.deadline_ns)
        other.data, other.stamp, other.identity, other.first = self.data, self.stamp, self.identity, self.first
        other.was_lost = True
        return other

    def number(self, identity: StreamIdentity) -> None:
        """Give the batch the next place in an identity; its bytes are fixed from here on."""
        self.identity = identity
        self.first = identity.next
        self.was_lost = False
        identity.next += self.pending.count
        if self.stamp != (identity.producer_id, self.first):
            self.stamp = MessageId(identity.producer_id, self.first)
            self.data = batch.restamp(self.data, producer_id=identity.producer_id, first_sequence=self.first)


class ProducerStream(SendWindow[SealedBatch]):
    """All batches of one producer for one subject. The stream calls `settle(sealed, outcome)` once for each."""

    def __init__(
        self,
        subject: str,
        rng: Rng,
        backoff: RetryDelays,
        window: int,
        settle: Callable[[SealedBatch, BatchReceipt | FairwayError], None],
        key: bytes,
    ) -> None:
        """The secrets of the stream's identities are derived from `key`."""
        super().__init__(backoff, window)
        self.subject = subject
        self.broker_group = ""  # for receipts, in a cluster
        self.filling: BatchBuilder | None = None
        # The owner's alarms for this stream. The deadline has an alarm of its own; otherwise each short wait before it
        # would leave another long alarm behind.
        self.wake_ns = NEVER_NS
        self.late_ns = NEVER_NS
        self._rng = rng
        self._settle = settle
        self._key = key
        self._stream = self._new_stream()
        self._unnumbered = 0  # messages in `waiting` without a number

    def _new_stream(self) -> StreamIdentity:
        return StreamIdentity(self._rng, self.subject, self._key)

    @property
    def has_room(self) -> bool:
        """Whether one more batch may leave now."""
        return self.in_flight < self.batches_max and not self.is_recovering and not self.waiting

    @property
    def stamp(self) -> MessageId:
        """The producer id and sequence of the next sealed batch, if nothing fails meanwhile."""
        return MessageId(self._stream.producer_id, self._stream.next + self._unnumbered)

    def forget_alarm(self, due_ns: int) -> None:
        """Note that the alarm for `due_ns` has rung."""
        if due_ns == self.wake_ns:
            self.wake_ns = NEVER_NS
        if due_ns == self.late_ns:
            self.late_ns = NEVER_NS

    # --- out ---------------------------------------------------------------------------------------------------------

    def put(self, sealed: SealedBatch, data: bytes, stamp: MessageId) -> None:
        """Add a sealed batch."""
        sealed.data = data
        sealed.stamp = stamp
        self._unnumbered += sealed.pending.count
        self.waiting.append(sealed)

    def may_leave(self, sealed: SealedBatch, /) -> bool:
        identity = sealed.identity or self._stream
        if self.sent and next(iter(self.sent)).identity is not identity:
            return False  # doubtful batches of the old identity go first
        if sealed.identity is None:
            self._unnumbered -= sealed.pending.count
            sealed.number(identity)
        return True

    def recover(self) -> bool:
        """Begin again once everything is back; under a new identity if the old one is broken."""
        if not super().recover():
            return False
        if self._stream.is_broken:
            self._stream = self._new_stream()
        for sealed in self.waiting:
            if sealed.identity is None:
                break  # nor has any batch behind it
            if sealed.identity.is_broken and not sealed.is_doubtful:
                sealed.identity.cut(sealed.first)  # it leaves this identity, so nothing behind it can be stored there
                sealed.identity = None
                self._unnumbered += sealed.pending.count
        return True

    # --- by the spool, or by another session -------------------------------------------------------------------------

    def succeed(self) -> ProducerStream:
        """Return a stream that replaces this one, with all unsettled batches; `hand_over` takes from the new stream.

        Batches in flight stay here too until they are answered, and the answers are ignored. So the same bytes may be
        sent twice under the same number.
        """
        heir = ProducerStream(self.subject, self._rng, self.backoff, self.batches_max, self._settle, self._key)
        heir.filling, self.filling = self.filling, None
        heir.broker_group = self.broker_group
        copies: dict[StreamIdentity, StreamIdentity] = {}  # answers to this stream must not change the heir's
        for sealed in [*self.batches()]:
            if not self.is_in_flight(sealed):
                self.remove(sealed)
                heir._inherit(sealed, copies)
            elif not sealed.is_abandoned:
                heir._inherit(sealed.twin(), copies)
                sealed.is_abandoned = True
        if not self._stream.is_broken:
            heir._stream = copies.get(self._stream) or self._stream.copy()
        return heir

    def _inherit(self, sealed: SealedBatch, copies: dict[StreamIdentity, StreamIdentity]) -> None:
        """Add a batch with the number under which it may be stored. A clean batch of a broken identity loses its
        number."""
        sealed.stream = self
        if sealed.identity is not None:
            sealed.identity = copies.setdefault(sealed.identity, sealed.identity.copy())
        identity = sealed.identity
        if identity is not None and identity.is_broken and not sealed.is_doubtful:
            identity.cut(sealed.first)
            sealed.identity = None
        if sealed.identity is None:
            self._unnumbered += sealed.pending.count
        self.waiting.append(sealed)

    def hand_over(self) -> bool:
        """Take the oldest waiting batch for the spool, and fix its number and bytes. Returns whether the batch was sent
        before under that number."""
        sealed = self.waiting.popleft()
        if sealed.identity is not None:
            return True
        self._unnumbered -= sealed.pending.count
        sealed.number(self._stream)
        return False

    def take_back(self, sealed: SealedBatch, *, was_sent: bool) -> None:
        """Put back a batch that the spool could not keep; the caller takes back the ones behind it first."""
        if not was_sent:
            self._stream.next = sealed.first
            sealed.identity = None
            self._unnumbered += sealed.pending.count
        self.waiting.appendleft(sealed)

    def restart(self) -> None:
        """Begin a new identity: everything that was handed over has arrived, under whatever number."""
        self._stream = self._new_stream()

    @property
    def is_empty(self) -> bool:
        """Whether every batch is settled, and none is being filled."""
        return self.filling is None and not self.waiting and not self.sent

    def lend(self) -> list[SealedBatch]:
        """Take all sealed batches that are not in flight and certainly not stored, in order, out of this stream for
        good."""
        lent: list[SealedBatch] = []
        for sealed in [*self.batches()]:
            if self.is_in_flight(sealed) or sealed.is_abandoned or sealed.is_doubtful:
                continue
            if sealed.identity is None:
                self._unnumbered -= sealed.pending.count
            else:
                sealed.identity.cut(sealed.first)
                self.is_recovering = True
            self.remove(sealed)
            lent.append(sealed)
        return lent

    # --- back --------------------------------------------------------------------------------------------------------

    def stored(self, sealed: SealedBatch, answer: Produced) -> None:
        """The broker has stored the batch."""
        self.note_stored(sealed)
        self.backoff.reset()
        if not sealed.is_abandoned:
            first, count, group = answer.first_sequence, answer.count, self.broker_group
            receipt = BatchReceipt(
                self.subject, first, count, answer.appended_ms, answer.is_duplicate, sealed.stamp, group
            )
            self._settle(sealed, receipt)

    def lost(self, sealed: SealedBatch, _: ConnectionLost) -> None:
        """The connection was lost: the batch may be stored."""
        self.note_failed(sealed)
        sealed.was_lost = True
        if sealed.is_abandoned:
            self.give_up(sealed, "")

    def refused(self, sealed: SealedBatch, refused: Refused, now_ns: int) -> bool:
        """This attempt did not store the batch. Returns whether the broker is to blame and not the batch; once per
        window.

        On NOT_MASTER the line leaves the copy, waits and counts the failure, so the stream does not wait.
        """
        self.note_failed(sealed)
        is_behind = refused.code in _STREAM and next(iter(self.sent)) is not sealed
        is_astray = refused.code is Code.NOT_MASTER
        is_news = not self.retry_ns and not is_astray
        if is_news and not is_behind:
            self.retry_ns = now_ns + self.backoff.next_ns(refused.retry_after_ms)  # once for the whole window
        if not is_behind:
            sealed.refused = refused
        if sealed.is_abandoned:
            self.give_up(sealed, "")
        elif outcome_of(refused.code) is not SendOutcome.LATER and not is_behind:
            self._refused_for_good(sealed, refused)
        return is_news and outcome_of(refused.code) is SendOutcome.LATER

    def _refused_for_good(self, sealed: SealedBatch, refused: Refused) -> None:
        """This batch can never be stored under this number."""
        if sealed.is_doubtful:
            self._leave_unknown(sealed, refused.sentence, refused)
        elif refused.code in _STREAM:
            _of(sealed).is_broken = True  # the batch leaves under a new identity
        else:
            _of(sealed).cut(sealed.first)
            del self.sent[sealed]
            self._settle(sealed, refused)

    # --- giving up ---------------------------------------------------------------------------------------------------

    def is_late(self, now_ns: int) -> bool:
        """Whether the oldest batch is past its deadline."""
        oldest = next(self.batches(), None)
        return oldest is not None and oldest.deadline_ns <= now_ns

    def expire(self, now_ns: int, sentence: str) -> None:
        """Give up the batches past their deadline."""
        for sealed in [*self.sent]:
            if sealed.deadline_ns > now_ns:
                return
            self.give_up(sealed, sentence)
        while self.waiting and self.waiting[0].deadline_ns <= now_ns:
            self.give_up(self.waiting[0], sentence)

    def give_up(self, sealed: SealedBatch, sentence: str) -> None:
        """Report the certain part of the outcome to the sender. A batch in flight stays in place until its answer
        comes."""
        if self.is_in_flight(sealed):
            if not sealed.is_abandoned:
                sealed.is_abandoned = True
                self._settle(sealed, _unknown(sealed, sentence))
        elif sealed.is_doubtful:
            self._leave_unknown(sealed, sentence, sealed.refused)
        else:
            if sealed.identity is None:
                self._unnumbered -= sealed.pending.count
            else:
                sealed.identity.cut(sealed.first)
                self.is_recovering = True
            self.remove(sealed)
            if not sealed.is_abandoned:
                self._settle(sealed, not_sent(sealed.pending, sentence, sealed.refused))

    def _leave_unknown(self, sealed: SealedBatch, sentence: str, cause: Refused | None) -> None:
        _of(sealed).is_broken = True
        self.is_recovering = True
        self.remove(sealed)
        if not sealed.is_abandoned:
            error = _unknown(sealed, sentence)
            error.__cause__ = cause
            self._settle(sealed, error)


def _of(sealed: SealedBatch) -> StreamIdentity:
    """The identity of a batch that has left."""
    if sealed.identity is None:
        raise OutcomeUnknown("a batch came back that never left")
    return sealed.identity


def request_of(sealed: SealedBatch) -> Produce:
    """The request that carries a batch."""
    identity = _of(sealed)
    return identity.pinned_request if sealed.is_doubtful else identity.request


def _unknown(sealed: SealedBatch, sentence: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"whether {_many(sealed.pending)} stored is not known: {sentence}")


def not_sent(pending: PendingBatch, sentence: str, cause: Refused | None = None) -> NotSent:
    """The error for a batch that is certainly not stored."""
    why = f"{sentence}; the last refusal was {cause}" if cause is not None else sentence
    error = NotSent(f"{_many(pending)} not stored: {why}")
    error.__cause__ = cause
    return error


def _many(pending: PendingBatch) -> str:
    what = "1 message" if pending.count == 1 else f"{pending.count} messages"
    return f"{what} to {pending.subject} {'is' if pending.count == 1 else 'are'}"
