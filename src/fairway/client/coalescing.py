"""Merges equal requests of one process: a table of state machines, one for each key in process (`fairway.coalesce`).

Each machine has a *head*, the request that works on the key, and a *tail*, the request that waits. The table knows no
thread, no loop and no clock. `fairway.client.sync.coalescing` and `fairway.client.aio.coalescing` bring a lock or a
loop, the time, and a bell for each waiting request. The table adds three things to the machines:

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

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Literal, TypeAlias, TypeVar

from fairway.coalesce import CoalescingAnswer, Keep, Machine
from fairway.errors import Code, Misuse, Refused, invariant

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
    """One request for one key. The table calls `bell` when another request changes the status of this one."""

    __slots__ = ("bell", "key", "status")

    def __init__(self, key: KeyT) -> None:
        self.key = key
        self.status = _DECLINED
        self.bell: Callable[[], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this request may work on its key, now."""
        return self.status is _ACCEPTED

    def _change(self, status: RequestStatus) -> None:
        self.status = status
        if self.bell is not None:
            self.bell()


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
        self._desks: dict[KeyT, _KeyQueue[KeyT]] = {}
        self._spare: _KeyQueue[KeyT] | None = None  # the last freed machine: making a new one costs as much as its use
        self._sweep_ns = 0
        self._hottest: _Hottest[KeyT] = _Hottest()
        self._accepted = self._waited = self._promoted = self._declined = 0
        self._withdrawn = self._evicted = self._refused = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """Give a new request its status: accepted, waiting or declined."""
        key_queue = self._desks.get(place.key)
        if key_queue is not None and key_queue.due_ns <= now_ns:
            self._evict(place.key, key_queue, now_ns)
            key_queue = self._desks.get(place.key)
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
        key_queue = self._desks.get(place.key)
        if key_queue is None or key_queue.head is not place:
            return False
        place.status = _RELEASED
        self._dequeue(place.key, key_queue, now_ns)
        return True

    def withdraw(self, place: CoalescedRequest[KeyT]) -> bool:
        """Stop the request's wait; False: it was not waiting."""
        key_queue = self._desks.get(place.key)
        if key_queue is None or key_queue.withdraw(place) is not CoalescingAnswer.WITHDRAWN:
            return False
        self._withdrawn += 1
        place.status = RequestStatus.WITHDRAWN
        return True

    def leave(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """End the request if it is the head, withdraw it if it is the tail."""
        key_queue = self._desks.get(place.key)
        if key_queue is not None and key_queue.head is place:
            place.status = _RELEASED
            self._dequeue(place.key, key_queue, now_ns)
        elif key_queue is not None:
            self.withdraw(place)

    def renew(self, place: CoalescedRequest[KeyT], now_ns: int) -> bool:
        """Give the head the whole time-out once more; False: the request is not the head any more."""
        key_queue = self._desks.get(place.key)
        if key_queue is None or key_queue.head is not place:
            return False
        self._lead(place.key, key_queue, now_ns)
        return True

    def look(self, place: CoalescedRequest[KeyT], now_ns: int) -> int:
        """The ns until a waiting request looks again: then the head is evicted, if no bell rings before. 0: now."""
        key_queue = self._desks.get(place.key)
        if key_queue is None or place.status is not RequestStatus.WAITING:
            return 0
        if key_queue.due_ns <= now_ns:
            self._evict(place.key, key_queue, now_ns)
            return 0
        return key_queue.due_ns - now_ns

    # --- keys --------------------------------------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> int:
        """Evict the heads whose time is up; returns how many."""
        self._sweep_ns = now_ns + self._timeout_ns
        overdue = list(takewhile(lambda item: item[1].due_ns <= now_ns, self._desks.items()))
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
            keys=len(self._desks),
            hottest=self._hottest.ranked(),
        )

    def _open(self, key: KeyT, now_ns: int) -> _KeyQueue[KeyT]:
        if key is None:
            raise Misuse("a key of None names nothing: requests without a key are not the same request")
        if now_ns >= self._sweep_ns or len(self._desks) >= self._keys_max:
            self.sweep(now_ns)
        if len(self._desks) >= self._keys_max:
            self._refused += 1
            oldest = next(iter(self._desks.values()))
            raise Refused(
                Code.BUSY,
                f"{len(self._desks):,} keys are in process at once: release turns, or raise keys_max",
                retry_after_ms=max((oldest.due_ns - now_ns) // 1_000_000, 1),
            )
        key_queue, self._spare = self._spare or _KeyQueue(), None
        self._desks[key] = key_queue
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
            del self._desks[key]
            self._spare = key_queue
            return
        self._promoted += 1
        self._lead(key, key_queue, now_ns)
        if key_queue.head is not None:
            key_queue.head._change(RequestStatus.ACCEPTED)

    def _lead(self, key: KeyT, key_queue: _KeyQueue[KeyT], now_ns: int) -> None:
        """Start the time-out of a head again: it is now the last to be evicted."""
        key_queue.due_ns = now_ns + self._timeout_ns
        del self._desks[key]
        self._desks[key] = key_queue
