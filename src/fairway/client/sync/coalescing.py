"""Merges equal requests among the threads of a process: `fairway.QueueCoordinator`.

    coordinator = fairway.QueueCoordinator()

    with coordinator.acquire(key) as turn:         waits while another request works on the key
        if turn.is_mine:                           False: one request works and one waits already; skip the work
            refresh(key)

    @app.listener("cache.refresh", group="cache", concurrency=16)
    @coordinator.coalesced(lambda message: message.key)
    def refresh(message: fairway.Message) -> None: ...

`fairway.client.coalescing` holds the rules; this module adds the lock, the clock and the waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from fairway.runtime.threads import Gate, Lock

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class QueueEntry(CoalescedRequest[KeyT]):
    """One request's turn on a key; `status` says whether the request is accepted, waits or is declined.

    `QueueCoordinator.acquire` makes it. Entering its `with` waits; leaving releases. Any thread may release it, once.
    """

    __slots__ = ("_coordinator",)

    def __init__(self, coordinator: QueueCoordinator[KeyT], key: KeyT) -> None:
        super().__init__(key)
        self._coordinator = coordinator

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for this request's turn. False: the request was declined, or withdrawn after `timeout`.

        A request at work that does not end within the coordinator's time-out loses its turn, and the wait ends.
        """
        return self._coordinator._wait(self, timeout) if self.status is RequestStatus.WAITING else self.is_mine

    def release(self) -> bool:
        """End this request's turn, so that the waiting request may begin.

        False: the turn was not this request's, or no longer, and nothing has changed.
        """
        return self._coordinator._release(self)

    def renew(self) -> bool:
        """Count the time-out from now, because the work takes long. False: the turn is not this request's any more."""
        return self._coordinator._renew(self)

    def __enter__(self) -> Self:
        if self.status is RequestStatus.WAITING:
            self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._coordinator._leave(self)


class QueueCoordinator(Generic[KeyT]):
    """Lets one request per key work and one wait, and declines further ones. For any number of threads."""

    def __init__(
        self,
        *,
        timeout: Duration = TIMEOUT_S,
        keep: KeepName = "first",
        keys_max: int = KEYS_MAX,
        clock: Clock | None = None,
    ) -> None:
        """Set the rules.

        `timeout`: a request that works longer without `renew` loses its turn. `keep`: which of two requests may wait.
        With "latest" a newcomer takes the place of the waiting request, and that request is declined.
        """
        self._book: CoalescingTable[KeyT] = CoalescingTable(seconds_of(timeout), keep, keys_max)
        self._clock = clock or RealClock()
        self._lock = Lock()

    def acquire(self, key: KeyT) -> QueueEntry[KeyT]:
        """Ask for a turn on a key, without waiting. Look at `status`, or enter the `with` to wait.

        Each call is a request of its own: a thread that has the turn and asks again waits for itself.
        """
        turn = QueueEntry(self, key)
        with self._lock:
            self._book.ask(turn, self._clock.monotonic_ns())
        return turn

    def coalesced(
        self, key_of: Callable[[Any], KeyT | None]
    ) -> Callable[[Callable[[RequestT], ResultT]], Callable[[RequestT], ResultT | None]]:
        """Decorate a handler. A declined call returns None, so that its message is acked.

        A request whose key is None is handled as if there were no coordinator.
        """

        def decorate(handler: Callable[[RequestT], ResultT]) -> Callable[[RequestT], ResultT | None]:
            @functools.wraps(handler)
            def merged(request: RequestT) -> ResultT | None:
                key = key_of(request)
                if key is None:
                    return handler(request)
                with self.acquire(key) as turn:
                    return handler(request) if turn.is_mine else None

            return merged

        return decorate

    def sweep(self) -> int:
        """Take the turn from every request whose time is up, and return how many there were.

        New requests do the same by themselves, about once per time-out.
        """
        with self._lock:
            return self._book.sweep(self._clock.monotonic_ns())

    def statistics(self) -> CoalescingStatistics[KeyT]:
        """The counts of all requests so far."""
        with self._lock:
            return self._book.statistics()

    # --- for `QueueEntry` --------------------------------------------------------------------------------------------

    def _wait(self, turn: QueueEntry[KeyT], timeout: Duration | None) -> bool:
        limit_s = limit_of(timeout)
        end_ns = None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)
        gate = Gate()
        try:
            while (wait_ns := self._look(turn, gate, end_ns)) > 0:
                gate.wait(wait_ns / 1e9)
        except BaseException:  # Ctrl-C, for example: nobody would release the turn later
            self._leave(turn)
            raise
        return turn.is_mine

    def _look(self, turn: QueueEntry[KeyT], gate: Gate, end_ns: int | None) -> int:
        """How long to wait at the gate, in ns; 0: no longer."""
        with self._lock:
            turn.bell = gate.open
            now_ns = self._clock.monotonic_ns()
            wait_ns = self._book.look(turn, now_ns)
            if wait_ns and end_ns is not None:
                wait_ns = min(wait_ns, end_ns - now_ns)
                if wait_ns <= 0:
                    self._book.withdraw(turn)
            return wait_ns

    def _release(self, turn: QueueEntry[KeyT]) -> bool:
        with self._lock:
            return self._book.end(turn, self._clock.monotonic_ns())

    def _renew(self, turn: QueueEntry[KeyT]) -> bool:
        with self._lock:
            return self._book.renew(turn, self._clock.monotonic_ns())

    def _leave(self, turn: QueueEntry[KeyT]) -> None:
        with self._lock:
            self._book.leave(turn, self._clock.monotonic_ns())
