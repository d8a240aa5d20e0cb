"""Merges equal requests of one process: `QueueCoordinator` of `fairway` and of `fairway.aio`.

    coordinator = fairway.QueueCoordinator()

    with coordinator.acquire(key) as turn:         waits while another request works on the key
        if turn.is_mine:                           False: one request works and one waits already; skip the work
            refresh(key)

    @app.listener("cache.refresh", group="cache", concurrency=16)
    @coordinator.coalesced(lambda message: message.key)
    def refresh(message: fairway.Message) -> None: ...

`CoalescingTable` has a state machine for each key in process (`fairway.coalesce`). Each machine has a *head*, the
request that works on the key, and a *tail*, the request that waits. The table knows no thread, no loop and no clock.
The coordinators bring a lock or a loop, the time, and a callback for each waiting request. The table adds three things
to the machines:

- *Time.* A head that has not ended within the time-out is evicted by the next request that comes or waits, and the tail
  takes its place. A head that was only slow can see that its turn is over, and its release does nothing. Work that
  takes longer by its nature calls `renew`.
- *A bound.* The table forgets a machine as soon as it has no request. The rest are keys in process, and heads that died
  and whose keys nobody asks for again; a sweep evicts those when their time is up. Beyond `keys_max` keys, a request is
  refused.
- *Statistics.* How often each answer was given, and which keys repeat most. Only repetitions are counted by key, so a
  stream without repetitions pays nothing.
"""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

from fairway.client.core import Duration, end_of, seconds_of
from fairway.coalesce import CoalescingAnswer, Keep, Machine
from fairway.errors import Code, Misuse, Refused, invariant
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.threads import Gate, Lock

KeyT = TypeVar("KeyT", bound=Hashable)
KeepName: TypeAlias = Literal["first", "latest"]

TIMEOUT_S = 60.0  # twice the time-out of most database and HTTP clients: a living head has ended by then
KEYS_MAX = 100_000  # in process at once, about 30 MB; no program has as many threads, so most heads would be dead
HOTTEST_KEYS = 32


class RequestStatus(enum.Enum):
    """The state of a request for its key."""

    ACCEPTED = "accepted"
    """The request is the head: it may work."""
    WAITING = "waiting"
    """The request is the tail: it waits for the head."""
    DECLINED = "declined"
    """A head works and a tail waits: the tail will do the work of this request."""
    WITHDRAWN = "withdrawn"
    """The request has stopped waiting."""
    RELEASED = "released"
    """The request has ended."""
    EVICTED = "evicted"
    """The request took too long and has lost its turn."""


# Every request needs these: a module's name costs a third of an enumeration's member.
_ACCEPT, _FREED = CoalescingAnswer.ACCEPT, CoalescingAnswer.FREED
_ACCEPTED, _DECLINED, _RELEASED = RequestStatus.ACCEPTED, RequestStatus.DECLINED, RequestStatus.RELEASED


class CoalescedRequest(Generic[KeyT]):
    """One request for one key. The table calls `on_change` when another request changes the status of this one."""

    __slots__ = ("key", "on_change", "status")

    def __init__(self, key: KeyT) -> None:
        self.key = key
        self.status = _DECLINED
        self.on_change: Callable[[], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this request may work on its key, now."""
        return self.status is _ACCEPTED

    def _change(self, status: RequestStatus) -> None:
        self.status = status
        if self.on_change is not None:
            self.on_change()


@dataclass(frozen=True, slots=True)
class CoalescingStatistics(Generic[KeyT]):
    """The counts of a coordinator. Every request was accepted, waited, was declined or was refused."""

    accepted: int
    """Requests that worked at once."""
    waited: int
    """Requests that found a head at work, and waited."""
    promoted: int
    """Of the waiting requests, those that got their turn."""
    declined: int
    """Requests that were dropped: the work that was saved. With `keep="latest"` these had waited before."""
    withdrawn: int
    """Requests that stopped waiting."""
    evicted: int
    """Heads that did not end within the time-out."""
    refused: int
    """Requests that found `keys_max` keys in process."""
    keys: int
    """Keys in process now."""
    hottest: tuple[tuple[KeyT, int], ...]
    """The most repeated keys, each with an upper bound of its repetitions: requests that came during another."""


class _KeyQueue(Machine[CoalescedRequest[KeyT]]):
    """A key's machine, and the time when its head is evicted."""

    __slots__ = ("due_ns",)

    def __init__(self) -> None:
        super().__init__()
        self.due_ns = 0


class _Hottest(Generic[KeyT]):
    """The most frequent keys, in bounded memory: a new key takes the place and the count of the least frequent."""

    def __init__(self) -> None:
        self._counts: dict[KeyT, int] = {}

    def note(self, key: KeyT) -> None:
        counts = self._counts
        if key in counts:
            counts[key] += 1
        elif len(counts) < HOTTEST_KEYS:
            counts[key] = 1
        else:
            least = min(counts, key=counts.__getitem__)
            counts[key] = counts.pop(least) + 1

    def ranked(self) -> tuple[tuple[KeyT, int], ...]:
        return tuple(sorted(self._counts.items(), key=lambda item: -item[1]))


class CoalescingTable(Generic[KeyT]):
    """The machines of a coordinator. The caller holds the coordinator's lock, or calls on its loop."""

    def __init__(self, timeout_s: float, keep: KeepName, keys_max: int) -> None:
        if keep not in ("first", "latest"):
            raise Misuse(f"keep={keep!r}: of two requests the 'first' may wait, or the 'latest'")
        if not timeout_s > 0:
            raise Misuse(f"a time-out of {timeout_s:g} s: every head would be dead at once")
        if keys_max < 1:
            raise Misuse(f"keys_max={keys_max}: it is at least 1")
        self._timeout_ns = int(timeout_s * 1e9)
        self._keep = Keep(keep)
        self._keys_max = keys_max
        # In the order of `due_ns`: a machine with a new head goes to the end.
        self._queues: dict[KeyT, _KeyQueue[KeyT]] = {}
        self._spare: _KeyQueue[KeyT] | None = None  # the last freed machine: making a new one costs as much as its use
        self._sweep_ns = 0
        self._hottest: _Hottest[KeyT] = _Hottest()
        self._accepted = self._waited = self._promoted = self._declined = 0
        self._withdrawn = self._evicted = self._refused = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """Give a new request its status: accepted, waiting or declined."""
        key_queue = self._queues.get(place.key)
        if key_queue is not None and key_queue.due_ns <= now_ns:
            self._evict(place.key, key_queue, now_ns)
            key_queue = self._queues.get(place.key)
        if key_queue is None:
            key_queue = self._open(place.key, now_ns)
        answer, declined = key_queue.enqueue(place, self._keep)
        if answer is _ACCEPT:
            self._accepted += 1
            place.status = _ACCEPTED
            key_queue.due_ns = now_ns + self._timeout_ns
            return
        self._hottest.note(place.key)
        if answer is CoalescingAnswer.WAIT:
            self._waited += 1
            place.status = RequestStatus.WAITING
        if declined is not None:
            self._declined += 1
            declined._change(RequestStatus.DECLINED)

    def end(self, place: CoalescedRequest[KeyT], now_ns: int) -> bool:
        """End the request; False: it was not the head, and nothing has changed."""
        key_queue = self._queues.get(place.key)
        if key_queue is None or key_queue.head is not place:
            return False
        place.status = _RELEASED
        self._dequeue(place.key, key_queue, now_ns)
        return True

    def withdraw(self, place: CoalescedRequest[KeyT]) -> bool:
        """Stop the request's wait; False: it was not waiting."""
        key_queue = self._queues.get(place.key)
        if key_queue is None or key_queue.withdraw(place) is not CoalescingAnswer.WITHDRAWN:
            return False
        self._withdrawn += 1
        place.status = RequestStatus.WITHDRAWN
        return True

    def leave(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """End the request if it is the head, withdraw it if it is the tail."""
        if not self.end(place, now_ns):
            self.withdraw(place)

    def renew(self, place: CoalescedRequest[KeyT], now_ns: int) -> bool:
        """Give the head the whole time-out once more; False: the request is not the head any more."""
        key_queue = self._queues.get(place.key)
        if key_queue is None or key_queue.head is not place:
            return False
        self._lead(place.key, key_queue, now_ns)
        return True

    def look(self, place: CoalescedRequest[KeyT], now_ns: int, end_ns: int | None = None) -> int:
        """The ns until a waiting request looks again: then the head is evicted, if nothing changes before.

        0: the wait is over. A request that has waited until `end_ns` is withdrawn.
        """
        key_queue = self._queues.get(place.key)
        if key_queue is None or place.status is not RequestStatus.WAITING:
            return 0
        if key_queue.due_ns <= now_ns:
            self._evict(place.key, key_queue, now_ns)
            return 0
        if end_ns is None:
            return key_queue.due_ns - now_ns
        if end_ns <= now_ns:
            self.withdraw(place)
        return max(min(key_queue.due_ns, end_ns) - now_ns, 0)

    # --- keys --------------------------------------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> int:
        """Evict the heads whose time is up; returns how many."""
        self._sweep_ns = now_ns + self._timeout_ns
        overdue = list(takewhile(lambda item: item[1].due_ns <= now_ns, self._queues.items()))
        for key, key_queue in overdue:
            self._evict(key, key_queue, now_ns)
        return len(overdue)

    def statistics(self) -> CoalescingStatistics[KeyT]:
        return CoalescingStatistics(
            accepted=self._accepted,
            waited=self._waited,
            promoted=self._promoted,
            declined=self._declined,
            withdrawn=self._withdrawn,
            evicted=self._evicted,
            refused=self._refused,
            keys=len(self._queues),
            hottest=self._hottest.ranked(),
        )

    def _open(self, key: KeyT, now_ns: int) -> _KeyQueue[KeyT]:
        if key is None:
            raise Misuse("a key of None names nothing: requests without a key are not the same request")
        if now_ns >= self._sweep_ns or len(self._queues) >= self._keys_max:
            self.sweep(now_ns)
        if len(self._queues) >= self._keys_max:
            self._refused += 1
            oldest = next(iter(self._queues.values()))
            raise Refused(
                Code.BUSY,
                f"{len(self._queues):,} keys are in process at once: release turns, or raise keys_max",
                retry_after_ms=max((oldest.due_ns - now_ns) // 1_000_000, 1),
            )
        key_queue, self._spare = self._spare or _KeyQueue(), None
        self._queues[key] = key_queue
        return key_queue

    def _evict(self, key: KeyT, key_queue: _KeyQueue[KeyT], now_ns: int) -> None:
        """Take the turn from the head. A head that is only slow sees that from its status."""
        head = key_queue.head
        invariant(head is not None, "a machine without a head is not kept")
        self._evicted += 1
        self._dequeue(key, key_queue, now_ns)
        if head is not None:
            head._change(RequestStatus.EVICTED)

    def _dequeue(self, key: KeyT, key_queue: _KeyQueue[KeyT], now_ns: int) -> None:
        head = key_queue.head
        if head is None or key_queue.dequeue(head) is _FREED:
            del self._queues[key]
            self._spare = key_queue
            return
        self._promoted += 1
        self._lead(key, key_queue, now_ns)
        if key_queue.head is not None:
            key_queue.head._change(RequestStatus.ACCEPTED)

    def _lead(self, key: KeyT, key_queue: _KeyQueue[KeyT], now_ns: int) -> None:
        """Start the time-out of a head again: it is now the last to be evicted."""
        key_queue.due_ns = now_ns + self._timeout_ns
        del self._queues[key]
        self._queues[key] = key_queue


# --- for threads and tasks alike --------------------------------------------------------------------------------------

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class _KeyTurn(CoalescedRequest[KeyT]):
    """One request's turn. The lock of a coordinator for tasks does nothing: its loop runs one of them at a time."""

    __slots__ = ("_clock", "_lock", "_table")

    def __init__(
        self, table: CoalescingTable[KeyT], clock: Clock, lock: AbstractContextManager[object], key: KeyT
    ) -> None:
        super().__init__(key)
        self._table = table
        self._clock = clock
        self._lock = lock

    def release(self) -> bool:
        """End this request's turn, so that the waiting request may begin.

        False: the turn was not this request's, or no longer, and nothing has changed.
        """
        with self._lock:
            return self._table.end(self, self._clock.monotonic_ns())

    def renew(self) -> bool:
        """Count the time-out from now, because the work takes long. False: the turn is not this request's any more."""
        with self._lock:
            return self._table.renew(self, self._clock.monotonic_ns())

    def _look(self, ring: Callable[[], None], end_ns: int | None) -> int:
        """How long to wait for `ring`, in ns; 0: no longer."""
        with self._lock:
            self.on_change = ring
            return self._table.look(self, self._clock.monotonic_ns(), end_ns)

    def _leave(self) -> None:
        with self._lock:
            self._table.leave(self, self._clock.monotonic_ns())


class _Coordinator(Generic[KeyT]):
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
        self._table: CoalescingTable[KeyT] = CoalescingTable(seconds_of(timeout), keep, keys_max)
        self._clock = clock or RealClock()
        self._lock = self._new_lock()

    @staticmethod
    def _new_lock() -> AbstractContextManager[object]:
        return nullcontext()

    def sweep(self) -> int:
        """Take the turn from every request whose time is up, and return how many there were.

        New requests do the same by themselves, about once per time-out.
        """
        with self._lock:
            return self._table.sweep(self._clock.monotonic_ns())

    def statistics(self) -> CoalescingStatistics[KeyT]:
        """The counts of all requests so far."""
        with self._lock:
            return self._table.statistics()


# --- for threads ------------------------------------------------------------------------------------------------------


class QueueEntry(_KeyTurn[KeyT]):
    """One request's turn on a key; `status` says whether the request is accepted, waits or is declined.

    `QueueCoordinator.acquire` makes it. Entering its `with` waits; leaving releases. Any thread may release it, once.
    """

    __slots__ = ()

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for this request's turn. False: the request was declined, or withdrawn after `timeout`.

        A request at work that does not end within the coordinator's time-out loses its turn, and the wait ends.
        """
        if self.status is not RequestStatus.WAITING:
            return self.is_mine
        end_ns, gate = end_of(timeout, self._clock), Gate()
        try:
            while (wait_ns := self._look(gate.open, end_ns)) > 0:
                gate.wait(wait_ns / 1e9)
        except BaseException:  # Ctrl-C, for example: nobody would release the turn later
            self._leave()
            raise
        return self.is_mine

    def __enter__(self) -> Self:
        if self.status is RequestStatus.WAITING:
            self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()


class QueueCoordinator(_Coordinator[KeyT]):
    """Lets one request per key work and one wait, and declines further ones. For any number of threads."""

    @staticmethod
    def _new_lock() -> AbstractContextManager[object]:
        return Lock()

    def acquire(self, key: KeyT) -> QueueEntry[KeyT]:
        """Ask for a turn on a key, without waiting. Look at `status`, or enter the `with` to wait.

        Each call is a request of its own: a thread that has the turn and asks again waits for itself.
        """
        turn = QueueEntry(self._table, self._clock, self._lock, key)
        with self._lock:
            self._table.ask(turn, self._clock.monotonic_ns())
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


# --- for tasks --------------------------------------------------------------------------------------------------------


class AioQueueEntry(_KeyTurn[KeyT]):
    """One request's turn on a key; `status` says whether the request is accepted, waits or is declined.

    `QueueCoordinator.acquire` makes it. Entering its `async with` waits; leaving releases. A task that is cancelled
    while it waits gives up its place.
    """

    __slots__ = ()

    async def wait(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109  ours, with an answer of its own
        """Wait for this request's turn. False: the request was declined, or withdrawn after `timeout`.

        A request at work that does not end within the coordinator's time-out loses its turn, and the wait ends.
        """
        if self.status is not RequestStatus.WAITING:
            return self.is_mine
        end_ns, changed = end_of(timeout, self._clock), asyncio.Event()
        try:
            while (wait_ns := self._look(changed.set, end_ns)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_ns / 1e9):
                        await changed.wait()
                changed.clear()
        except BaseException:  # cancelled: nobody would release the turn later
            self._leave()
            raise
        return self.is_mine

    async def __aenter__(self) -> Self:
        await self.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()


class AioQueueCoordinator(_Coordinator[KeyT]):
    """Lets one request per key work and one wait, and declines further ones. For the tasks of one loop."""

    def acquire(self, key: KeyT) -> AioQueueEntry[KeyT]:
        """Ask for a turn on a key, without waiting. Look at `status`, or enter the `async with` to wait."""
        turn = AioQueueEntry(self._table, self._clock, self._lock, key)
        self._table.ask(turn, self._clock.monotonic_ns())
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
