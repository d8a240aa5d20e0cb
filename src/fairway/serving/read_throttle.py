"""The queue of connections that send more than a helping at a time, so that no other connection waits for them.

A loop would serve a connection for as long as it has bytes. So a connection that sends thousands of small requests at
once, or a large frame at full speed, would hold up all others. A session reads each connection one helping at a time
(`session` sets its size). A connection that has more, or has used more of the loop than others, joins this queue.

In every turn of the loop the throttle serves the connections that have used the least, for a bounded time, and lets a
bounded number of them send on. After a chunk of a large frame it skips two turns: all others have the loop. An empty
turn takes some microseconds, so a sender of large frames on an idle broker loses no speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from fairway.runtime.clock import Clock

WaiterT = TypeVar("WaiterT")

TURN_NS_MAX = 100_000  # half a slice of the actors: a small request of another client takes six turns of the loop
FREE_TURNS = 2  # after a chunk of a large frame: a small request takes six turns, and so waits for two chunks, not six
SENDERS_MAX = 1  # per turn: it may then send a chunk, 256 KB, whose page faults take 0.3 ms (bench/hostile)


class ReadThrottle(Generic[WaiterT]):
    """Serves the waiter that has used the least first.

    `used` returns what a waiter has used. `serve` reads a helping of the waiter, and returns whether the waiter goes on
    sending. If not, a waiter with more to read has joined again.
    """

    def __init__(
        self,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        serve: Callable[[WaiterT], bool],
        used: Callable[[WaiterT], float],
    ) -> None:
        self._clock = clock
        self._call_soon = call_soon
        self._serve = serve
        self._used = used
        self._queue: list[tuple[float, int, WaiterT]] = []
        self._numbers = count()
        self._is_called = False
        self._free_turns = 0  # the next turns of the loop in which no waiter is served

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: WaiterT) -> None:
        heapq.heappush(self._queue, (self._used(waiter), next(self._numbers), waiter))
        self._call()

    def rest(self) -> None:
        """Leave the next turns of the loop to all others, after a chunk of a large frame. Chunks of small requests do
        not call this: connections that have used more than their share wait here too, and would wait longer."""
        self._free_turns = FREE_TURNS

    def _call(self) -> None:
        if self._queue and not self._is_called:
            self._is_called = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        self._is_called = False
        if self._free_turns:
            self._free_turns -= 1
            self._call()
            return
        end_ns = self._clock.monotonic_ns() + TURN_NS_MAX
        senders = 0
        try:
            while self._queue and senders < SENDERS_MAX:
                senders += self._serve(heapq.heappop(self._queue)[2])
                if self._clock.monotonic_ns() >= end_ns:
                    break
        finally:
            self._call()
