"""Merges equal requests among the tasks of a loop: `fairway.aio.QueueCoordinator`, the twin of the blocking one.

async with coordinator.acquire(key) as turn:
    if turn.is_mine:
        await refresh(key)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from fairway.client.coalescing import (
    KEYS_MAX,
    TIMEOUT_S,
    CoalescedRequest,
    CoalescingStatistics,
    CoalescingTable,
    KeepName,
    KeyT,
    RequestStatus,
)
from fairway.client.core import Duration, limit_of, seconds_of
from fairway.runtime.clock import Clock, RealClock

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class AioQueueEntry(CoalescedRequest[KeyT]):
    """One request's turn on a key; `status` says whether the request is accepted, waits or is declined.

    `QueueCoordinator.acquire` makes it. Entering its `async with` waits; leaving releases. A task that is cancelled
    while it waits gives up its place.
    """

    __slots__ = ("_book", "_clock")

    def __init__(self, book: CoalescingTable[KeyT], clock: Clock, key: KeyT) -> None:
        super().__init__(key)
        self._book = book
        self._clock = clock

    async def wait(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109  ours, with an answer of its own
        """Wait for this request's turn. False: the request was declined, or withdrawn after `timeout`.

        A request at work that does not end within the coordinator's time-out loses its turn, and the wait ends.
        """
        if self.status is not RequestStatus.WAITING:
            return self.is_mine
        limit_s = limit_of(timeout)
        end_ns = None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)
        try:
            while (wait_ns := self._look(end_ns)) > 0:
                await self._rung(wait_ns / 1e9)
        except BaseException:  # cancelled: nobody would release the turn later
            self._book.leave(self, self._clock.monotonic_ns())
            raise
        return self.is_mine

    def release(self) -> bool:
        """End this request's turn, so that the waiting request may begin.

        False: the turn was not this request's, or no longer, and nothing has changed.
        """
        return self._book.end(self, self._clock.monotonic_ns())

    def renew(self) -> bool:
        """Count the time-out from now, because the work takes long. False: the turn is not this request's any more."""
        return self._book.renew(self, self._clock.monotonic_ns())

    async def __aenter__(self) -> Self:
        await self.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._book.leave(self, self._clock.monotonic_ns())

    def _look(self, end_ns: int | None) -> int:
        """How long to wait for the bell, in ns; 0: no longer."""
        now_ns = self._clock.monotonic_ns()
        wait_ns = self._book.look(self, now_ns)
        if wait_ns and end_ns is not None:
            wait_ns = min(wait_ns, end_ns - now_ns)
            if wait_ns <= 0:
                self._book.withdraw(self)
        return wait_ns

    async def _rung(self, timeout_s: float) -> None:
        """Wait until the bell rings or the timeout has passed."""
        loop = asyncio.get_running_loop()
        heard = loop.create_future()

        def ring() -> None:
            if not heard.done():
                heard.set_result(None)

        self.bell = ring
        timer = loop.call_later(timeout_s, ring)
        try:
            await heard
        finally:
            timer.cancel()
            self.bell = None


class AioQueueCoordinator(Generic[KeyT]):
    """Lets one request per key work and one wait, and declines further ones. For the tasks of one loop."""

    def __init__(
        self,
        *,
        timeout: Duration = TIMEOUT_S,
        keep: KeepName = "first",
        keys_max: int = KEYS_MAX,
        clock: Clock | None = None,
    ) -> None:
        """Set the rules, as for `fairway.QueueCoordinator`."""
        self._book: CoalescingTable[KeyT] = CoalescingTable(seconds_of(timeout), keep, keys_max)
        self._clock = clock or RealClock()

    def acquire(self, key: KeyT) -> AioQueueEntry[KeyT]:
        """Ask for a turn on a key, without waiting. Look at `status`, or enter the `async with` to wait."""
        turn = AioQueueEntry(self._book, self._clock, key)
        self._book.ask(turn, self._clock.monotonic_ns())
        return turn

    def coalesced(
        self, key_of: Callable[[Any], KeyT | None]
    ) -> Callable[[Callable[[RequestT], Awaitable[ResultT]]], Callable[[RequestT], Awaitable[ResultT | None]]]:
        """Decorate an `async def` handler, as `fairway.QueueCoordinator.coalesced` decorates plain ones."""

        def decorate(
            handler: Callable[[RequestT], Awaitable[ResultT]],
        ) -> Callable[[RequestT], Awaitable[ResultT | None]]:
            @functools.wraps(handler)
            async def merged(request: RequestT) -> ResultT | None:
                key = key_of(request)
                if key is None:
                    return await handler(request)
                async with self.acquire(key) as turn:
                    return await handler(request) if turn.is_mine else None

            return merged

        return decorate

    def sweep(self) -> int:
        """Take the turn from every request whose time is up, and return how many there were."""
        return self._book.sweep(self._clock.monotonic_ns())

    def statistics(self) -> CoalescingStatistics[KeyT]:
        """The counts of all requests so far."""
        return self._book.statistics()
