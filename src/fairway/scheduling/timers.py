"""Timers of actors: when a wait or a deadline ends, or when an actor has been idle for long.

Each actor has one alarm, at the earliest of those times. All alarms share one timer of the loop. An alarm may be early,
because its request is already done: then the scheduler looks at the actor and sets the next alarm. So a request that is
handled in time costs a comparison, and no timer of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

from fairway.runtime.clock import Clock
from fairway.scheduling.actor import Actor
from fairway.scheduling.mailbox import NEVER_NS

SLACK_S = 0.001  # uvloop rounds timers to milliseconds: without the slack they would fire early, and again at once
STALE_MIN = 64  # a smaller heap with stale entries is not worth a rebuild


class Timer(Protocol):
    """The handle that a loop returns for a pending callback."""

    def cancel(self) -> None:
        """Do not make the call."""


class TimerLoop(Protocol):
    """The part of an asyncio loop that timers need."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call the callback once, that many seconds from now."""


class ActorTimers:
    """Calls `ring(actor, now_ns)` when an actor's alarm is due, for at most `turn_ns` at a time."""

    def __init__(self, clock: Clock, loop: TimerLoop, turn_ns: int, ring: Callable[[Actor, int], None]) -> None:
        self._clock = clock
        self._loop = loop
        self._turn_ns = turn_ns
        self._ring = ring
        self._heap: list[tuple[int, int, Actor]] = []  # an entry is stale if the actor's alarm is at another time
        self._numbers = count()
        self._rebuild_at = STALE_MIN
        self._timer: Timer | None = None
        self._timer_ns = NEVER_NS

    def set(self, actor: Actor, due_ns: int) -> None:
        """Set the actor's alarm in place of its current one."""
        actor.alarm_ns = due_ns
        heapq.heappush(self._heap, (due_ns, next(self._numbers), actor))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].alarm_ns]
            heapq.heapify(self._heap)
            self._rebuild_at = max(STALE_MIN, 2 * len(self._heap))
        if due_ns < self._timer_ns:
            self._arm(due_ns)

    def close(self) -> None:
        """Fire no more alarms."""
        self._heap.clear()
        self._disarm()

    def _arm(self, due_ns: int) -> None:
        self._disarm()
        self._timer_ns = due_ns
        delay_ns = max(0, due_ns - self._clock.monotonic_ns())
        self._timer = self._loop.call_later(delay_ns / 1e9 + SLACK_S, self._ring_due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_ns = NEVER_NS

    def _ring_due(self) -> None:
        self._timer = None
        self._timer_ns = 0  # alarms set meanwhile are armed at the end
        started_ns = now_ns = self._clock.monotonic_ns()
        try:
            while self._heap and self._heap[0][0] <= now_ns and now_ns - started_ns < self._turn_ns:
                due_ns, _, actor = heapq.heappop(self._heap)
                if actor.alarm_ns == due_ns:
                    actor.alarm_ns = NEVER_NS
                    self._ring(actor, now_ns)
                    now_ns = self._clock.monotonic_ns()
        finally:
            self._timer_ns = NEVER_NS
            if self._heap:
                self._arm(self._heap[0][0])
