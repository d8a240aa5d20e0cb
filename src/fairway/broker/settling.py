"""Settling: what became of messages, for any number of lots in one request and, as a rule, one action record."""

from __future__ import annotations

from fairway import limits
from fairway.broker.desk import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.groups import GroupOutcome, SettleDecision
from fairway.groups import SettleVerdict as Settlement
from fairway.names import ConsumerName
from fairway.protocol import ControlMessage, messages
from fairway.protocol.messages import Settle, SettleAll
from fairway.serving.requests import ServedRequest
from fairway.storage.record import RecordHeader
from fairway.world.rng import Rng

_Lot = tuple[bool, int, int]  # is it the inbox's, and its name


class _Gathered:
    """Decisions on different lots: they do not depend on one another, so one record may hold them all."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._decisions: dict[_Lot, tuple[GroupHost, SettleDecision]] = {}
        self.written: RecordHeader | None = None
        self.settled = 0
        self.stale = 0

    def make_way_for(self, lot: _Lot) -> None:
        if lot in self._decisions:
            self.carry_out()

    def add(self, lot: _Lot, host: GroupHost, decision: SettleDecision) -> None:
        self._decisions[lot] = (host, decision)

    def carry_out(self) -> None:
        decisions = list(self._decisions.values())
        self._decisions.clear()
        self.written = self._desk.carry_out_all(decisions) or self.written
        self.settled += sum(decision.settled for _, decision in decisions)
        self.stale += sum(decision.stale for _, decision in decisions)


class SettleProcessor:
    """Handles SETTLE for the consumers of all groups."""

    def __init__(self, desk: GroupCoordinator, rng: Rng) -> None:
        self._desk = desk
        self._rng = rng

    def settle_all(
        self, request: ServedRequest[ControlMessage], message: SettleAll, host: GroupHost, name: ConsumerName
    ) -> None:
        """Where one outcome is refused, those before it hold: settling twice is harmless."""
        gathered = _Gathered(self._desk)
        refused = None
        for outcome in message.outcomes:
            lot = (outcome.is_inbox, outcome.first, outcome.attempt)
            gathered.make_way_for(lot)
            of = host.inbox if outcome.is_inbox else host
            decision = _unknown(outcome) if of is None else self._settle(request, of, name, outcome, message.arrived)
            refused = refusal(decision)
            if refused is not None:
                break
            gathered.add(lot, of or host, decision)
            if decision.is_believed:
                gathered.carry_out()
        gathered.carry_out()
        if any(outcome.kind is not messages.Settlement.ACK for outcome in message.outcomes):
            self._desk.scheduler.wake(host.key)
        if refused is not None:
            request.refuse(refused)
            return
        answer = messages.Settled(gathered.settled, gathered.stale)
        self._desk.when_durable(gathered.written, lambda told: request.settle(told, answer))

    def _settle(
        self, request: ServedRequest[ControlMessage], host: GroupHost, name: ConsumerName, outcome: Settle, arrived: int
    ) -> SettleDecision:
        is_ack = outcome.kind is messages.Settlement.ACK and not host.is_revived
        return host.law.settle(
            name,
            Settlement(outcome.kind),
            outcome.first,
            outcome.attempt,
            [(span.first, span.count) for span in outcome.spans],
            now_ms=self._desk.clock.wall_ms(),
            arrived=arrived,
            after_ms=outcome.after_ms,
            draw=0.0 if outcome.kind is messages.Settlement.ACK else self._rng.uniform(),
            may_grow=is_ack or self._desk.memory.room(host, request.session) >= limits.LOT_BYTES,
            reason=outcome.reason,
            fence=outcome.fence if host.law.is_ordered else 0,
        )


def _unknown(outcome: Settle) -> SettleDecision:
    """There is no inbox, or no longer."""
    return SettleDecision(GroupOutcome.DONE, stale=sum(span.count for span in outcome.spans))
