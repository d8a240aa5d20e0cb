"""A group with consumers and two clocks, so that a test reads like what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairway.group_events import GroupEvent
from fairway.groups import (
    GroupConfig,
    GroupDecision,
    GroupOutcome,
    GroupStateMachine,
    Handout,
    JoinClaim,
    JoinDecision,
    PullDecision,
    Range,
    SettleDecision,
    SettleVerdict,
)
from fairway.names import ConsumerName

MS_NS = 1_000_000
BORN_MS = 1_700_000_000_000


class Scene:
    """Applies what is decided, at once; keeps the events, as the action log would."""

    def __init__(self, end: int = 100, **config: Any) -> None:
        self.group = GroupStateMachine()
        self.events: list[GroupEvent] = []
        self.now_ms = BORN_MS
        self.end = end
        self.arrived: dict[str, int] = {}
        self.happen(self.group.configure(0, GroupConfig(**config), now_ms=self.now_ms))
        self.happen(self.group.seek(0, now_ms=self.now_ms))

    @property
    def now_ns(self) -> int:
        return (self.now_ms - BORN_MS) * MS_NS

    def happen(self, decision: GroupDecision) -> None:
        self.group.apply_all(decision.events, self.now_ns)
        self.events += decision.events

    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    def join(
        self, name: str, *, arrived: int = 0, version: int = 0, resume_at: int = 0, claim: JoinClaim | None = None
    ) -> JoinDecision:
        decision = self.group.join(
            ConsumerName.parse(name),
            version=version,
            arrived=arrived,
            resume_at=resume_at,
            now_ns=self.now_ns,
            now_ms=self.now_ms,
            claim=claim or JoinClaim(),
        )
        self.happen(decision)
        return decision

    def pull(self, name: str, most: int = 10, *, arrives: bool = True, fresh: Range | None = None) -> PullDecision:
        """`arrives`: whether the response reaches the consumer, which then says so with its next request."""
        if fresh is None and self.end > self.group.cursor:
            fresh = (self.group.cursor, self.end - self.group.cursor)
        decision = self.group.pull(
            ConsumerName(name),
            arrived=self.arrived.get(name, 0),
            messages_max=most,
            fresh=fresh,
            now_ns=self.now_ns,
            now_ms=self.now_ms,
        )
        self.happen(decision)
        if arrives and decision.outcome is GroupOutcome.DONE:
            self.arrived[name] = decision.number
        return decision

    def lot(self, name: str, most: int = 10) -> Handout:
        """Pull, and expect exactly one lot."""
        (lot,) = self.pull(name, most).lots
        return lot

    def settle(
        self, name: str, verdict: SettleVerdict, lot: Handout, ranges: Sequence[Range] | None = None, **more: Any
    ) -> SettleDecision:
        decision = self.group.settle(
            ConsumerName(name),
            verdict,
            lot.first,
            lot.attempt,
            lot.ranges if ranges is None else ranges,
            now_ms=self.now_ms,
            **more,
        )
        self.happen(decision)
        return decision

    def ack(self, name: str, lot: Handout, ranges: Sequence[Range] | None = None) -> SettleDecision:
        return self.settle(name, SettleVerdict.ACK, lot, ranges)

    def beat(self, name: str) -> GroupDecision:
        return self.group.heartbeat(ConsumerName(name), arrived=self.arrived.get(name, 0), now_ns=self.now_ns)

    def leave(self, name: str) -> None:
        self.happen(self.group.leave(ConsumerName(name), now_ms=self.now_ms))

    def expire(self) -> GroupDecision:
        decision = self.group.expire(now_ns=self.now_ns, now_ms=self.now_ms)
        self.happen(decision)
        return decision

    def crash(self, lost: int = 0) -> None:
        """The broker begins again, without the last `lost` events."""
        del self.events[len(self.events) - lost :]
        self.group = GroupStateMachine()
        self.group.apply_all(self.events)
        self.group.begin_life(self.end, self.now_ns)
