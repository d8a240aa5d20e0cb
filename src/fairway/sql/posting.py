"""Batches whose bytes are fixed, on their way to a broker: a session of a line, as a producer is.

Nothing is decided here but when to send, and whether to send again. What comes after a rest leaves at once; what comes
soon after another waits for company, so that under load many requests share a write, a read and a sync of the broker's.
What a connection took with it leaves once more over the next one, byte for byte, if its sender is still interested.
Whoever gave a parcel is told how it ended, and the row in the database is there for everything else.

Messages that have a row each and follow one another in their stream travel as one batch, right after their commits: a
quarter of the work for the broker, and less for everybody who reads them later. Which rows a batch was made of is
written down nowhere. It need not be: each message keeps the place that its row names, so whoever sends a row by itself
later, after a crash, is told that its place is taken, and by which batch: a relay makes that batch again from the rows
and compares. But a place that is taken says nothing of its neighbours: a batch of several that is refused is left to
relays (ADR 0019).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fairway.errors import Code, InvariantViolated, Refused, StoredRange
from fairway.protocol.conflict import TAKEN, is_receipt
from fairway.protocol.line import Line
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.session import Ask, ConnectionLost, RequestOutcome
from fairway.sql.letters import Lone, together

PARCELS_MAX: Final = 10_000  # that wait or are under way; what comes beyond is left to relays
PARCEL_BYTES_MAX: Final = 64 << 20
LINGER_PARCELS_MAX: Final = 100  # that wait for company
BUNDLE_MAX: Final = 100
BUNDLE_BYTES_MAX: Final = 1 << 20


class SendOutcome(enum.Enum):
    """How a parcel ended."""

    STORED = "stored"  # now, or before
    LATER = "later"  # the same may be granted another time; or nobody knows
    TAKEN = "taken"  # something else is at its place, or something that nobody knows: see `OutboxBatch.stored`
    GAP = "gap"  # a batch that comes before it in its stream is not stored, or the broker has forgotten the stream
    REFUSED = "refused"  # it will never be granted


_LATER: Final = frozenset(
    {Code.BUSY, Code.READ_ONLY, Code.NOT_MASTER, Code.EXPIRED, Code.DRAINING, Code.TOO_MANY_CONNECTIONS}
)
_FATES: Final = {
    **dict.fromkeys(TAKEN, SendOutcome.TAKEN),
    Code.SEQUENCE_GAP: SendOutcome.GAP,
    Code.UNKNOWN_PRODUCER: SendOutcome.GAP,  # never heard of, or forgotten
    **dict.fromkeys(_LATER, SendOutcome.LATER),
}


class OutboxBatch:
    """One batch under way. `settled` is called once, by whoever drives the line, and must not wait."""

    __slots__ = (
        "data", "fate", "group", "is_repeat", "is_resent", "lone", "secret", "sentence", "settled", "stored", "subject",
    )  # fmt: skip

    def __init__(
        self,
        subject: str,
        data: bytes,
        settled: Callable[[OutboxBatch], None] | None = None,
        *,
        is_resent: bool = False,
        group: str = "",
        lone: Lone | None = None,
        secret: bytes = b"",
    ) -> None:
        self.subject = subject
        self.secret = secret  # of its stream
        self.group = group  # of brokers, in a cluster: there, and nowhere else
        self.data = data
        self.settled = settled
        self.lone = lone  # where it may travel with others
        self.is_resent = is_resent  # again, where a connection was lost
        self.fate: SendOutcome | None = None
        self.sentence = ""
        self.is_repeat = False  # the broker had it before
        self.stored: tuple[StoredRange, ...] | None = None  # what has its place, as far as the broker knows

    @property
    def count(self) -> int:
        """Of those that were given."""
        return 1

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def fate_of(self, refused: Refused) -> SendOutcome:
        """What a refusal means."""
        if is_receipt(refused, self.data):
            return SendOutcome.STORED
        self.stored = refused.stored
        return _FATES.get(refused.code, SendOutcome.REFUSED)

    def settle(self, fate: SendOutcome, sentence: str = "") -> None:
        self.fate = fate
        self.sentence = sentence
        if self.settled is not None:
            self.settled(self)


class Bundle(OutboxBatch):
    """Several that travel as one batch."""

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


def offer(parcel: OutboxBatch, posting: OutboxBatchSession, line: Line) -> None:
    """One more, if there is room; and a connection, for one that does not wait for it."""
    if not (parcel.is_resent or line.is_open):
        parcel.settle(SendOutcome.LATER, line.trouble or "no broker answers")
    elif posting.has_room(len(parcel.data)):
        posting.put(parcel)
    else:
        parcel.settle(SendOutcome.LATER, "too much is under way already")


class OutboxBatchSession:
    """The session."""

    def __init__(self, linger_ns: int = 0) -> None:
        self._linger_ns = linger_ns
        self._leave_ns = 0  # when what waits may leave
        self._is_counting = False  # down to then: something has just left
        self._is_held = False  # what waits could leave, but for a connection, or for room on it
        self._waiting: deque[OutboxBatch] = deque()
        self._under_way: dict[OutboxBatch, None] = {}
        self._lost: list[OutboxBatch] = []  # with the last connection, in order
        self._size_bytes = 0
        self.unsettled = 0  # of those that were given

    def has_room(self, size_bytes: int) -> bool:
        return self.unsettled < PARCELS_MAX and self._size_bytes + size_bytes <= PARCEL_BYTES_MAX

    def put(self, parcel: OutboxBatch) -> None:
        self._waiting.append(parcel)
        self._size_bytes += len(parcel.data)
        self.unsettled += 1

    def give_up(self, sentence: str) -> None:
        """What is not answered by now is somebody else's affair."""
        for parcel in [*self._lost, *self._under_way, *self._waiting]:
            self._end(parcel, SendOutcome.LATER, sentence)
        self._lost = []
        self._under_way.clear()
        self._waiting.clear()

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self._waiting.extendleft(reversed(self._lost))
        self._lost = []

    def is_due(self, now_ns: int) -> bool:
        """Whether what waits may leave now."""
        return now_ns >= self._leave_ns or len(self._waiting) >= LINGER_PARCELS_MAX

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
            parcel = self._next()
            parcel.lone = None  # from now on these bytes, and no others: it may be stored
            self._under_way[parcel] = None
            room -= 1
            # Its row names the group, and the row may have been sent there before: no other group may get it.
            request = Produce(parcel.subject, is_pinned=bool(parcel.group), secret=parcel.secret)
            yield Ask(request, (parcel.data,), parcel)

    def _next(self) -> OutboxBatch:
        """The next one of those that wait, with those that can travel with it."""
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
        """Whoever drives the line looks again then, although nothing may wait yet: so who gives something meanwhile
        need not wake it. What is held waits for something to happen, and for no time."""
        if self._is_held:
            return None
        return self._leave_ns if self._is_counting or self._waiting else None

    def _end(self, parcel: OutboxBatch, fate: SendOutcome, sentence: str = "") -> None:
        self._size_bytes -= parcel.size_bytes
        self.unsettled -= parcel.count
        parcel.settle(fate, sentence)


def _may_follow(one: OutboxBatch, other: OutboxBatch) -> bool:
    if one.lone is None or other.lone is None or one.group != other.group:
        return False
    return one.lone.is_followed_by(other.lone)
