"""Settlements on their way: gathered from lots, sent together, sent again until the broker has answered.

With nothing in flight they leave at once; otherwise they wait for company, for a linger at most. So a lone ack is as
quick as the disk, and a thousand handlers make one request of their acks. To settle twice does no harm, so whatever may
have been lost is sent again; how many were not ours to settle comes back as a count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairway.errors import FairwayError, Misuse
from fairway.protocol.backoff import NS_PER_MS, RetryDelays
from fairway.protocol.consumption import DeadLettered
from fairway.protocol.delivery import Message
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
from fairway.world.rng import Rng

_IN_FLIGHT_MAX = 4  # requests; each waits for a sync, and the broker syncs for all at once
_OUTCOMES_MAX = 256  # in one request, each with a reason of at most 1 KiB
_SPANS_MAX = 8_000  # in one request: about 100 KiB of control message, of the 1 MiB that one may have


@dataclass(slots=True, eq=False)
class Settling:
    """The token of a request: what it says."""

    pieces: list[PendingSettlement]
    sent_ns: int


class SettlementSender:
    """Everything between `message.ack()` and the broker's confirmation."""

    def __init__(self, ledger: SettlementQueue, rng: Rng, *, linger_ms: float, enough: int) -> None:
        self.shelf = ledger.shelf
        self._ledger = ledger
        self._linger_ns = round(linger_ms * NS_PER_MS)
        self._enough = enough
        self._backoff = RetryDelays(rng, first_ms=20, most_ms=5_000)
        self._not_before_ns = 0
        self._ready: deque[PendingSettlement] = deque()
        self._ready_count = 0
        self._since_ns = 0  # when the oldest of them was gathered
        self._in_flight: set[int] = set()  # ids of tokens

    @property
    def is_idle(self) -> bool:
        """Whether the broker has confirmed everything that was said."""
        return not self._ready and not self._in_flight and not self._ledger.dirty

    @property
    def is_all_sent(self) -> bool:
        """Whether nothing that was said is still here, be it under way."""
        return not self._ready and not self._ledger.dirty

    def gather(self, now_ns: int) -> None:
        """Look what users have said since the last look."""
        dirty = self._ledger.dirty
        while dirty:
            lot = dirty.popleft()
            has_kin = bool(lot.heirs or lot.echoes)
            for piece in lot.gather():
                self._add(piece, now_ns)
            if has_kin:
                self.shelf.recount()

    def _add(self, piece: PendingSettlement, now_ns: int) -> None:
        self.shelf.sent(piece)
        if piece.lot.is_final:
            self.shelf.confirm(piece)
            self._tell(piece, None)
            return
        if not self._ready:
            self._since_ns = now_ns
        self._ready.append(piece)
        self._ready_count += piece.size

    def take(self, room: int, now_ns: int, *, is_urgent: bool) -> list[tuple[list[Settle], Settling]]:
        """The requests to make now; `is_urgent`: without linger, however many are in flight."""
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

    def deadline_ns(self, *, is_urgent: bool) -> int | None:
        """When `take` has something to give."""
        if not self._ready or (len(self._in_flight) >= _IN_FLIGHT_MAX and not is_urgent):
            return None
        is_at_once = is_urgent or not self._in_flight or self._ready_count >= self._enough
        return max(self._not_before_ns, 0 if is_at_once else self._since_ns + self._linger_ns)

    def _next_pieces(self) -> list[PendingSettlement]:
        """What one request may hold. A lot that somebody waits for goes alone: stale counts are per request."""
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

    # --- how it ended

    def confirmed(self, token: Settling, told: Settled) -> None:
        self._in_flight.discard(id(token))
        self._not_before_ns = 0
        self._backoff.reset()
        stale = StaleSettlement(
            f"{told.stale} of {told.settled + told.stale} messages were no longer this consumer's to settle"
        )
        for piece in token.pieces:
            self.shelf.confirm(piece)
            self._tell(piece, stale if told.stale else None)

    def returned(self, token: Settling, now_ns: int) -> None:
        """Lost on the way or refused: again, as far as it is still to be said."""
        self._in_flight.discard(id(token))
        pieces = [again for piece in token.pieces if (again := piece.still_sent()) is not None]
        if not self._ready:
            self._since_ns = now_ns
        self._ready.extendleft(reversed(pieces))
        self._ready_count += sum(piece.size for piece in pieces)
        if any(piece.lot.heirs for piece in token.pieces):
            self.shelf.recount()

    def put_off(self, now_ns: int, retry_after_ms: int | None) -> None:
        self._not_before_ns = now_ns + self._backoff.next_ns(retry_after_ms)

    def hurry(self) -> None:
        """There is a new connection: what was put off may be asked again."""
        self._not_before_ns = 0
        self.shelf.doubt()

    # --- who waits for it

    def when_settled(self, messages: Sequence[Message], call: Hook) -> None:
        codes = [message._lot.state[message.sequence - message._lot.first] for message in messages]
        if OPEN in codes or WAITING in codes:
            raise Misuse("settle a message before you wait for the outcome")
        countdown = _Countdown(call)
        for message, code in zip(messages, codes, strict=True):
            if code == GONE:
                countdown.error = StaleSettlement(self._ledger.ended)
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
        """Nothing more will be sent. Whoever waits is told."""
        lots = list(self.shelf)
        self.shelf.clear()
        self._ready.clear()
        for lot in lots:
            lot.end_all()
        for lot in lots:
            for hook in lot.hooks_of(0, len(lot.state)):
                hook(error)


def dead_letters(token: Settling, told: Settled) -> Iterator[DeadLettered]:
    """The messages of a request that go to dead letter, now that the broker has stored it."""
    for piece in token.pieces:
        lot = piece.lot
        if lot.is_last(piece.code):
            reason = "" if piece.note is None else piece.note.reason
            for index in (index for start, end in piece.runs for index in range(start, end)):
                yield DeadLettered(
                    lot.ledger.subject,
                    lot.ledger.group,
                    lot.ledger.broker_group,
                    lot.first + index,
                    lot.last_ids.pop(index, None),
                    lot.attempt,
                    reason,
                    piece.code == REJECT,
                    told.stale == 0,
                )


class _Countdown:
    """Calls when the last of several has been told; with an error if any of them had one."""

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
    """Acks of one lot that were gathered in several looks, as one outcome."""
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
