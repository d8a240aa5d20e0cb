"""Sends encoded batches of the outbox over one connection, and tells how each ended.

`OutboxBatchSession` is a session of a `Line`, as a producer is. The session decides only when to send, and whether to
send again. A batch that follows a pause leaves at once. A batch that soon follows another waits a little, so that under
load many requests share a write, a read and a sync of the broker. After a lost connection, batches without an answer
are sent once more over the next connection, byte for byte, if their owner asked for that. The owner learns how each
batch ended. For everything else there is the row in the database.

Consecutive messages of one stream with a row each travel as one batch, right after their commits. A joint batch is a
quarter of the work for the broker, and less work for every later reader. No one records which rows a joint batch was
made of, and no record is needed: each message keeps the place that its row names. If a relay sends a row by itself
later, after a crash, the broker refuses the row, because its place is taken, and names the batch there. The relay makes
that batch again from the rows and compares. A taken place says nothing of its neighbours, so a joint batch that is
refused is left to relays (ADR 0019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from fairway.errors import InvariantViolated, Refused, StoredRange
from fairway.protocol.line import Ask, ConnectionLost, Line, RequestOutcome
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.resend import SendOutcome, is_receipt, outcome_of
from fairway.sql.outbox_encoding import Lone, together

OUTBOX_BATCHES_MAX: Final = 10_000  # waiting or under way; relays send the excess
OUTBOX_BATCH_BYTES_MAX: Final = 64 << 20
LINGER_OUTBOX_BATCHES_MAX: Final = 100  # waiting batches that end the linger
BUNDLE_MAX: Final = 100
BUNDLE_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True, eq=False)
class OutboxBatch:
    """One batch to send. The thread or loop that drives the line calls `settled` once; `settled` must not wait."""

    subject: str
    data: bytes
    settled: Callable[[OutboxBatch], None] | None = None
    _: KW_ONLY
    is_resent: bool = False  # after a lost connection
    group: str = ""  # the only broker group that may get the batch; empty without a cluster
    lone: Lone | None = None  # set: the batch may be joined with others
    secret: bytes = b""  # of its stream
    fate: SendOutcome | None = None
    sentence: str = ""
    is_repeat: bool = False  # the broker had the batch before
    stored: tuple[StoredRange, ...] | None = None  # batches at its place, as far as the broker knows

    @property
    def count(self) -> int:
        """How many of the batches that were put this one stands for."""
        return 1

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def fate_of(self, refused: Refused) -> SendOutcome:
        """The outcome that a refusal means."""
        if is_receipt(refused, self.data):
            return SendOutcome.STORED
        self.stored = refused.stored
        return outcome_of(refused.code)

    def settle(self, fate: SendOutcome, sentence: str = "") -> None:
        self.fate = fate
        self.sentence = sentence
        if self.settled is not None:
            self.settled(self)


class Bundle(OutboxBatch):
    """Several batches that travel as one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[OutboxBatch]) -> None:
        data = together([part.lone for part in parts if part.lone is not None])
        super().__init__(parts[0].subject, data, is_resent=True, group=parts[0].group, secret=parts[0].secret)
        self._parts = parts

    @property
    def count(self) -> int:
        return len(self._parts)

    @property
    def size_bytes(self) -> int:
        return sum(len(part.data) for part in self._parts)

    def fate_of(self, refused: Refused) -> SendOutcome:
        return SendOutcome.STORED if is_receipt(refused, self.data) else SendOutcome.LATER

    def settle(self, fate: SendOutcome, sentence: str = "") -> None:
        self.fate = fate
        for part in self._parts:
            part.is_repeat = self.is_repeat
            part.settle(fate, sentence)


def offer(outbox_batch: OutboxBatch, session: OutboxBatchSession, line: Line) -> None:
    """Give the session one more batch if there is room, and if the line is open or the batch may wait for it."""
    if not (outbox_batch.is_resent or line.is_open):
        outbox_batch.settle(SendOutcome.LATER, line.trouble or "no broker answers")
    elif session.has_room(len(outbox_batch.data)):
        session.put(outbox_batch)
    else:
        outbox_batch.settle(SendOutcome.LATER, "too much is under way already")


class OutboxBatchSession:
    """The session of a `Line` that sends batches of the outbox."""

    def __init__(self, linger_ns: int = 0) -> None:
        self._linger_ns = linger_ns
        self._leave_ns = 0  # when waiting batches may leave
        self._is_counting = False  # towards `_leave_ns`: a batch has just left
        self._is_held = False  # waiting batches are due, and lack a connection or room on it
        self._waiting: deque[OutboxBatch] = deque()
        self._under_way: dict[OutboxBatch, None] = {}
        self._lost: list[OutboxBatch] = []  # with the last connection, in order
        self._size_bytes = 0
        self.unsettled = 0  # batches that were put and have no outcome

    def has_room(self, size_bytes: int) -> bool:
        return self.unsettled < OUTBOX_BATCHES_MAX and self._size_bytes + size_bytes <= OUTBOX_BATCH_BYTES_MAX

    def put(self, outbox_batch: OutboxBatch) -> None:
        self._waiting.append(outbox_batch)
        self._size_bytes += len(outbox_batch.data)
        self.unsettled += 1

    def give_up(self, sentence: str) -> None:
        """Settle every unanswered batch as LATER: relays send them."""
        for outbox_batch in [*self._lost, *self._under_way, *self._waiting]:
            self._end(outbox_batch, SendOutcome.LATER, sentence)
        self._lost = []
        self._under_way.clear()
        self._waiting.clear()

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self._waiting.extendleft(reversed(self._lost))
        self._lost = []

    def is_due(self, now_ns: int) -> bool:
        """Whether waiting batches may leave now."""
        return now_ns >= self._leave_ns or len(self._waiting) >= LINGER_OUTBOX_BATCHES_MAX

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        if not self.is_due(now_ns):
            return
        self._is_counting = False
        self._is_held = not room
        if not room or not self._waiting:
            return
        self._leave_ns = now_ns + self._linger_ns
        self._is_counting = self._linger_ns > 0
        while room > 0 and self._waiting:
            outbox_batch = self._next()
            outbox_batch.lone = None  # the broker may store these bytes, so they must not change any more
            self._under_way[outbox_batch] = None
            room -= 1
            # No other group may get the batch: its row names the group, and may have been sent there before.
            request = Produce(outbox_batch.subject, is_pinned=bool(outbox_batch.group), secret=outbox_batch.secret)
            yield Ask(request, (outbox_batch.data,), outbox_batch)

    def _next(self) -> OutboxBatch:
        """The next waiting batch, joined with those that can travel with it."""
        waiting = self._waiting
        last = waiting.popleft()
        if last.lone is None or not waiting:
            return last
        parts, size_bytes = [last], len(last.data)
        while waiting and _may_follow(last, waiting[0]) and len(parts) < BUNDLE_MAX:
            size_bytes += len(waiting[0].data)
            if size_bytes > BUNDLE_BYTES_MAX:
                break
            last = waiting.popleft()
            parts.append(last)
        return Bundle(parts) if len(parts) > 1 else parts[0]

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if not isinstance(token, OutboxBatch):
            raise InvariantViolated(f"an answer to {token!r}, which was never sent")
        if token not in self._under_way:
            return  # it was given up meanwhile
        del self._under_way[token]
        if isinstance(outcome, ConnectionLost) and token.is_resent:
            self._lost.append(token)
        elif isinstance(outcome, ConnectionLost):
            self._end(token, SendOutcome.LATER, outcome.sentence)
        elif isinstance(outcome, Refused):
            fate = token.fate_of(outcome)
            token.is_repeat = fate is SendOutcome.STORED
            self._end(token, fate, str(outcome))
        elif isinstance(outcome.message, Produced):
            token.is_repeat = outcome.message.is_duplicate
            self._end(token, SendOutcome.STORED)
        else:
            raise InvariantViolated(f"PRODUCE was answered with {outcome!r}")

    def next_deadline(self) -> int | None:
        """When to look at the session again. The time is set even while nothing waits, so that a caller who adds a
        batch meanwhile need not wake the driver of the line. Held batches wait for an event, not for a time."""
        if self._is_held:
            return None
        return self._leave_ns if self._is_counting or self._waiting else None

    def _end(self, outbox_batch: OutboxBatch, fate: SendOutcome, sentence: str = "") -> None:
        self._size_bytes -= outbox_batch.size_bytes
        self.unsettled -= outbox_batch.count
        outbox_batch.settle(fate, sentence)


def _may_follow(one: OutboxBatch, other: OutboxBatch) -> bool:
    if one.lone is None or other.lone is None or one.group != other.group:
        return False
    return one.lone.is_followed_by(other.lone)
