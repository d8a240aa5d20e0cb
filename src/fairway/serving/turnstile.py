"""Where those queue who send more than a helping at a time, so that nobody waits for them but they themselves.

A loop serves every connection that has something, for as long as it has. So one that sends thousands of small requests
at once, or a large frame as fast as it can, would hold up all others. Each is read a helping (`session` says how much),
and whoever has more queues here. In every turn of the loop the first in the queue are served for a bounded time, and a
bounded number of them is allowed to send on. A client that sends little at a time never comes here; while such clients
are at work, those in the queue are served every now and then, not in every turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from fairway.scheduling.courtesy import Courtesy
from fairway.world.clock import Clock

WaiterT = TypeVar("WaiterT")

TURN_NS_MAX = 200_000  # a slice of the actors: what is read here waits for them anyway
SENDERS_MAX = 1  # per turn: it may then send a chunk, 256 KB, of which page faults make 0.3 ms (bench/hostile)
PAUSE_S = 0.001  # before its next turn then: there are still tens of thousands of small requests per second
BRIEF_NS = 50_000  # a turn that took no longer has only let somebody send on: no pause for that


class Turnstile(Generic[WaiterT]):
    """First come, first served. `serve` says whether the waiter goes on sending; where it does not, and has more to be
    read, it has queued again."""

    def __init__(
        self,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        serve: Callable[[WaiterT], bool],
        courtesy: Courtesy,
    ) -> None:
        self.courtesy = courtesy
        self._clock = clock
        self._call_soon = call_soon
        self._call_later = call_later
        self._serve = serve
        self._queue: deque[WaiterT] = deque()
        self._is_called = False
        self._took_ns = 0  # its last turn

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: WaiterT) -> None:
        self._queue.append(waiter)
        self._call()

    def _call(self) -> None:
        if self._queue and not self._is_called:
            self._is_called = True
            if self._took_ns > BRIEF_NS and self.courtesy.is_due(self._clock.monotonic_ns()):
                self._call_later(PAUSE_S, self._turn)
            else:
                self._call_soon(self._turn)

    def _turn(self) -> None:
        self._is_called = False
        began_ns = self._clock.monotonic_ns()
        senders = 0
        try:
            while self._queue and senders < SENDERS_MAX:
                senders += self._serve(self._queue.popleft())
                if self._clock.monotonic_ns() >= began_ns + TURN_NS_MAX:
                    break
        finally:
            self._took_ns = self._clock.monotonic_ns() - began_ns
            self._call()
