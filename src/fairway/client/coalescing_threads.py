"""Merging equal requests among the threads of a process: `fairway.QueueCoordinator`.

coordinator = fairway.QueueCoordinator()

with coordinator.acquire(key) as turn:         waits while another one is at work on the key
    if turn.is_mine:                           False: one is at work and one waits already; nothing is to be done
        refresh(key)

@app.listener("cache.refresh", group="cache", concurrency=16)
@coordinator.coalesced(lambda message: message.key)
def refresh(message: fairway.Message) -> None: ...
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
from fairway.world.clock import Clock, RealClock
from fairway.world.gate import Gate, Lock

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class QueueEntry(CoalescedRequest[KeyT]):
    """One request's turn on a key: accepted, waiting or declined (`standing`). Made by `QueueCoordinator.acquire`.

    Entering its `with` waits; leaving it releases. Any thread may release it, once.
    """

    __slots__ = ("_coordinator",)

    def __init__(self, coordinator: QueueCoordinator[KeyT], key: KeyT) -> None:
        super().__init__(key)
        self._coordinator = coordinator

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until it is this request's turn; True: it is. False: it was declined, or has waited for so long and is
        withdrawn. A head that does not end within the coordinator's time-out is not waited for any longer."""
        return self._coordinator._wait(self, timeout) if self.standing is RequestStatus.WAITING else self.is_mine

    def release(self) -> bool:
        """It has ended, and the one that waits may begin. False: this was not its turn (any more), and nothing has
        changed."""
        return self._coordinator._release(self)

    def renew(self) -> bool:
        """It lives and takes long: count the time-out from now. False: this is not its turn any more."""
        return self._coordinator._renew(self)

    def __enter__(self) -> Self:
        if self.standing is RequestStatus.WAITING:
            self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._coordinator._leave(self)


class QueueCoordinator(Generic[KeyT]):
    """Lets one request per key be in process and one wait; further ones are declined. For any number of threads."""

    def __init__(
        self,
        *,
        timeout: Duration = TIMEOUT_S,
        keep: KeepName = "first",
        keys_max: int = KEYS_MAX,
        clock: Clock | None = None,
    ) -> None:
        """`timeout`: a head that has not ended by then is given up for dead. `keep`: which of two requests may wait;
        with "latest" a newcomer takes the place of the one that waits, and that one is declined."""
        self._book: CoalescingTable[KeyT] = CoalescingTable(seconds_of(timeout), keep, keys_max)
        self._clock = clock or RealClock()
        self._lock = Lock()

    def acquire(self, key: KeyT) -> QueueEntry[KeyT]:
        """Ask for a turn on a key, without waiting for it: see how it stands, or enter its `with`.

        Each call is a request of its own: a thread that has the turn and asks for it again waits for itself.
        """
        turn = QueueEntry(self, key)
        with self._lock:
            self._book.ask(turn, self._clock.monotonic_ns())
        return turn

    def coalesced(
        self, key_of: Callable[[Any], KeyT | None]
    ) -> Callable[[Callable[[RequestT], ResultT]], Callable[[RequestT], ResultT | None]]:
        """For handlers: one that is declined returns None, so that its message is acked. One without a key is handled
        as if there were no coordinator."""

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
        """Give up the heads whose time is up, though nobody asks for their keys; how many. It happens by itself, too,
        about once per time-out."""
        with self._lock:
            return self._book.sweep(self._clock.monotonic_ns())

    def statistics(self) -> CoalescingStatistics[KeyT]:
        """What has become of the requests so far."""
        with self._lock:
            return self._book.statistics()

    # --- for its turns -----------------------------------------------------------------------------------------------

    def _wait(self, turn: QueueEntry[KeyT], timeout: Duration | None) -> bool:
        limit_s = limit_of(timeout)
        end_ns = None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)
        gate = Gate()
        try:
            while (wait_ns := self._look(turn, gate, end_ns)) > 0:
                gate.wait(wait_ns / 1e9)
        except BaseException:  # Ctrl-C, say: nobody will release what nobody waits for
            self._leave(turn)
            raise
        return turn.is_mine

    def _look(self, turn: QueueEntry[KeyT], gate: Gate, end_ns: int | None) -> int:
        """How long to wait at the gate; 0: no longer."""
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
