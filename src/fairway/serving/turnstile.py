"""Where those queue who send more than a helping at a time, so that nobody waits for them but they themselves.

A loop serves every connection that has something, for as long as it has. So one that sends thousands of small requests
at once, or a large frame as fast as it can, would hold up all others. Each is read a helping (`session` says how much),
and whoever has more, or has used more of the loop than others, queues here. In every turn of the loop those that have
used the least are served for a bounded time, and a bounded number of them is allowed to send on. After a chunk of a
large frame the next turns are free: everybody else has the loop. A turn in which nobody sends anything takes some
microseconds, so a sender of large frames on an idle broker is as fast as without them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from fairway.world.clock import Clock

WaiterT = TypeVar("WaiterT")

TURN_NS_MAX = 100_000  # half a slice of the actors: a small request of another client takes six turns of the loop
FREE_TURNS = 2  # after a chunk of a large frame: a small request takes six turns, and waits for two chunks, not six
SENDERS_MAX = 1  # per turn: it may then send a chunk, 256 KB, of which page faults make 0.3 ms (bench/hostile)


class ReadThrottle(Generic[WaiterT]):
    """Least used first. `used` says what a waiter has used, `serve` whether it goes on sending; where it does not, and
    has more to be read, it has queued again."""

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
        self._free_turns = 0  # turns of the loop to come in which nobody here is served

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: WaiterT) -> None:
        heapq.heappush(self._queue, (self._used(waiter), next(self._numbers), waiter))
        self._call()

    def rest(self) -> None:
        """A chunk of a large frame was read: leave the next turns of the loop to everybody else. Not so after a chunk
        of small requests: those who have used more than their share wait here too, and would wait longer."""
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
