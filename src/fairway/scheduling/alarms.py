"""When an actor must be looked at although nothing has happened: a wait or a deadline ends, it has been idle for long.

One alarm per actor, at the earliest of those, and one timer of the loop for all. An alarm may be too early, because the
request that it was set for is long done: then looking sets the next one. So a request that is handled in time costs a
comparison, and no timer of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

from fairway.scheduling.actor import Actor
from fairway.scheduling.mailbox import NEVER_NS
from fairway.world.clock import Clock

SLACK_S = 0.001  # uvloop rounds timers to milliseconds: without it they would ring early, and ring again at once
STALE_MIN = 64  # below this a heap with stale entries in it is not worth rebuilding


class Timer(Protocol):
    """What a loop gives for a callback that is to come."""

    def cancel(self) -> None:
        """Do not call it after all."""


class TimerLoop(Protocol):
    """The part of an asyncio loop that alarms need."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call it once, that many seconds from now."""


class ActorTimers:
    """Calls `ring(actor, now_ns)` when an actor's alarm is due, for at most `turn_ns` at a time."""

    def __init__(self, clock: Clock, loop: TimerLoop, turn_ns: int, ring: Callable[[Actor, int], None]) -> None:
        self._clock = clock
        self._loop = loop
        self._turn_ns = turn_ns
        self._ring = ring
        self._heap: list[tuple[int, int, Actor]] = []  # stale where the actor's own alarm is another
        self._numbers = count()
        self._rebuild_at = STALE_MIN
        self._timer: Timer | None = None
        self._timer_ns = NEVER_NS

    def set(self, actor: Actor, due_ns: int) -> None:
        """In place of the alarm that the actor has."""
        actor.alarm_ns = due_ns
        heapq.heappush(self._heap, (due_ns, next(self._numbers), actor))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].alarm_ns]
            heapq.heapify(self._heap)
            self._rebuild_at = max(STALE_MIN, 2 * len(self._heap))
        if due_ns < self._timer_ns:
            self._arm(due_ns)

    def close(self) -> None:
        """Ring no more."""
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
        self._timer_ns = 0  # what is set meanwhile is armed at the end
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
