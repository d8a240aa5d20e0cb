"""The sender of settlements: gathers outcomes from lots, sends them together, and resends until the broker answers.

With nothing in flight, outcomes leave at once; otherwise they wait for others, for a linger at most. So a lone ack is
as quick as the disk, and a thousand handlers share one request. In a group by key a program takes few messages at a
time. There the sender looks at the lots only now and then while outcomes wait, because a look costs 20 µs. A repeated
settlement does no harm, so the sender resends whatever may have been lost. The broker's answer counts the messages that
were no longer this consumer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairway.errors import FairwayError, Misuse
from fairway.protocol.consumer_options import DeadLettered
from fairway.protocol.delivery import Message
from fairway.protocol.line import NS_PER_MS, RetryDelays
from fairway.protocol.lots import (
    ACK,
    DONE,
    GONE,
    OPEN,
    REJECT,
    WAITING,
    ConsumerLot,
    Hook,
    PendingSettlement,
    SettlementQueue,
    StaleSettlement,
)
from fairway.protocol.messages import Settle, Settled
from fairway.runtime.rng import Rng

_LOOK_NS = 500_000  # between two looks at the lots of a group by key, while a request is in flight
_IN_FLIGHT_MAX = 4  # requests; each waits for a sync, and the broker syncs for all at once
_OUTCOMES_MAX = 256  # in one request, each with a reason of at most 1 KiB
_SPANS_MAX = 8_000  # in one request: about 100 KiB, of at most 1 MiB for a control message


@dataclass(slots=True, eq=False)
class Settling:
    """The token of a SETTLE request: its settlements."""

    pieces: list[PendingSettlement]
    sent_ns: int


class SettlementSender:
    """The way of an outcome from `message.ack()` to the broker's confirmation."""

    def __init__(self, settlements: SettlementQueue, rng: Rng, *, linger_ms: float, enough: int) -> None:
        self.unacked = settlements.unacked
        self._settlements = settlements
        self._linger_ns = round(linger_ms * NS_PER_MS)
        self._enough = enough
        self._backoff = RetryDelays(rng, first_ms=20, most_ms=5_000)
        self._not_before_ns = 0
        self._ready: deque[PendingSettlement] = deque()
        self._ready_count = 0
        self._since_ns = 0  # when the oldest in `_ready` was gathered
        self._in_flight: set[int] = set()  # ids of tokens
        self.is_by_key = False  # of the group's configuration
        self._look_ns = min(_LOOK_NS, self._linger_ns)
        self._looked_ns = 0  # when it gathered last

    @property
    def is_idle(self) -> bool:
        """Whether the broker has confirmed every outcome."""
        return not self._ready and not self._in_flight and not self._settlements.dirty

    @property
    def is_all_sent(self) -> bool:
        """Whether every outcome has been sent, even if not confirmed."""
        return not self._ready and not self._settlements.dirty

    def gather(self, now_ns: int, *, is_urgent: bool) -> None:
        """Gather the outcomes that users have set since the last call; in a group by key only now and then, unless
        `is_urgent`."""
        dirty = self._settlements.dirty
        if now_ns < self._look_due_ns() and not is_urgent:
            return
        self._looked_ns = now_ns
        while dirty:
            lot = dirty.popleft()
            has_kin = bool(lot.heirs or lot.echoes)
            for piece in lot.gather():
                self._add(piece, now_ns)
            if has_kin:
                self.unacked.recount()

    def _add(self, piece: PendingSettlement, now_ns: int) -> None:
        self.unacked.sent(piece)
        if piece.lot.is_final:
            self.unacked.confirm(piece)
            self._tell(piece, None)
            return
        if not self._ready:
            self._since_ns = now_ns
        self._ready.append(piece)
        self._ready_count += piece.size

    def take(self, room: int, now_ns: int, *, is_urgent: bool) -> list[tuple[list[Settle], Settling]]:
        """Return the requests to send now. `is_urgent`: without linger, however many are in flight."""
        requests: list[tuple[list[Settle], Settling]] = []
        while len(requests) < room:
            due_ns = self.deadline_ns(is_urgent=is_urgent)
            if due_ns is None or now_ns < due_ns:
                break
            token = Settling(_merged(self._next_pieces()), now_ns)
            self._in_flight.add(id(token))
            requests.append(([piece.settle() for piece in token.pieces], token))
            self._since_ns = now_ns
        return requests

    def _look_due_ns(self) -> int:
        return self._looked_ns + self._look_ns if self.is_by_key and self._in_flight else 0

    def next_deadline_ns(self, *, is_urgent: bool) -> int | None:
        """When `gather` or `take` has something to do, or had."""
        due_ns = self.deadline_ns(is_urgent=is_urgent)
        if not self.is_by_key or not self._settlements.dirty:
            return due_ns
        return self._look_due_ns() if due_ns is None else min(due_ns, self._look_due_ns())

    def deadline_ns(self, *, is_urgent: bool) -> int | None:
        """When `take` returns a request."""
        if not self._ready or (len(self._in_flight) >= _IN_FLIGHT_MAX and not is_urgent):
            return None
        is_at_once = is_urgent or not self._in_flight or self._ready_count >= self._enough
        return max(self._not_before_ns, 0 if is_at_once else self._since_ns + self._linger_ns)

    def _next_pieces(self) -> list[PendingSettlement]:
        """The settlements for one request. A lot with hooks goes alone, because the broker counts stale messages per
        request."""
        pieces: list[PendingSettlement] = []
        spans_left = _SPANS_MAX
        while self._ready and len(pieces) < _OUTCOMES_MAX:
            piece = self._ready[0]
            is_alone = bool(piece.lot.hooks)
            if pieces and (is_alone or len(piece.runs) > spans_left):
                break
            self._ready.popleft()
            self._ready_count -= piece.size
            pieces.append(piece)
            spans_left -= len(piece.runs)
            if is_alone:
                break
        return pieces

    # --- the outcome of a request

    def confirmed(self, token: Settling, told: Settled) -> None:
        self._in_flight.discard(id(token))
        self._not_before_ns = 0
        self._backoff.reset()
        stale = StaleSettlement(
            f"{told.stale} of {told.settled + told.stale} messages were no longer this consumer's to settle"
        )
        for piece in token.pieces:
            self.unacked.confirm(piece)
            self._tell(piece, stale if told.stale else None)

    def returned(self, token: Settling, now_ns: int) -> None:
        """A request was lost or refused: resend the part that still matters."""
        self._in_flight.discard(id(token))
        pieces = [again for piece in token.pieces if (again := piece.still_sent()) is not None]
        if not self._ready:
            self._since_ns = now_ns
        self._ready.extendleft(reversed(pieces))
        self._ready_count += sum(piece.size for piece in pieces)
        if any(piece.lot.heirs for piece in token.pieces):
            self.unacked.recount()

    def put_off(self, now_ns: int, retry_after_ms: int | None) -> None:
        self._not_before_ns = now_ns + self._backoff.next_ns(retry_after_ms)

    def hurry(self) -> None:
        """There is a new connection: retry at once, and doubt every handout."""
        self._not_before_ns = 0
        self.unacked.doubt()

    # --- callers that wait for it

    def when_settled(self, messages: Sequence[Message], call: Hook) -> None:
        codes = [message._lot.state[message.sequence - message._lot.first] for message in messages]
        if OPEN in codes or WAITING in codes:
            raise Misuse("settle a message before you wait for the outcome")
        countdown = _Countdown(call)
        for message, code in zip(messages, codes, strict=True):
            if code == GONE:
                countdown.error = StaleSettlement(self._settlements.ended)
            elif code != DONE:
                countdown.left += 1
                message._lot.hooks.setdefault(message.sequence - message._lot.first, []).append(countdown.tick)
        countdown.tick(None)

    def _tell(self, piece: PendingSettlement, error: FairwayError | None) -> None:
        if piece.lot.hooks:
            for start, end in piece.runs:
                for hook in piece.lot.hooks_of(start, end):
                    hook(error)

    def end(self, error: FairwayError) -> None:
        """Stop sending; report `error` to every waiting hook."""
        lots = list(self.unacked)
        self.unacked.clear()
        self._ready.clear()
        for lot in lots:
            lot.end_all()
        for lot in lots:
            for hook in lot.hooks_of(0, len(lot.state)):
                hook(error)


def dead_letters(token: Settling, told: Settled) -> Iterator[DeadLettered]:
    """The messages of a request that became dead letters, now that the broker has stored that."""
    for piece in token.pieces:
        lot = piece.lot
        if lot.is_last(piece.code):
            reason = "" if piece.note is None else piece.note.reason
            for index in (index for start, end in piece.runs for index in range(start, end)):
                yield DeadLettered(
                    lot.settlements.subject,
                    lot.settlements.group,
                    lot.settlements.broker_group,
                    lot.first + index,
                    lot.last_ids.pop(index, None),
                    lot.attempt,
                    reason,
                    piece.code == REJECT,
                    told.stale == 0,
                )


class _Countdown:
    """Calls back after the last of several hooks; with an error if any hook got one."""

    __slots__ = ("_call", "error", "left")

    def __init__(self, call: Hook) -> None:
        self._call = call
        self.left = 1
        self.error: FairwayError | None = None

    def tick(self, error: FairwayError | None) -> None:
        self.error = self.error or error
        self.left -= 1
        if not self.left:
            self._call(self.error)


def _merged(pieces: list[PendingSettlement]) -> list[PendingSettlement]:
    """Merge acks of one lot that several looks gathered into one settlement."""
    acks: dict[int, list[tuple[int, int]]] = {}
    lots: dict[int, ConsumerLot] = {}
    others = []
    for piece in pieces:
        if piece.code == ACK:
            acks.setdefault(piece.lot.serial, []).extend(piece.runs)
            lots[piece.lot.serial] = piece.lot
        else:
            others.append(piece)
    return [PendingSettlement(lots[serial], ACK, None, _joined(runs)) for serial, runs in acks.items()] + others


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(runs) == 1:
        return runs
    runs.sort()
    joined = [runs[0]]
    for start, end in runs[1:]:
        if start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
