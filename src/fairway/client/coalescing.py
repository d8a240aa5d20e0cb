"""Equal requests of one process, merged: a book of machines, one per key that somebody is at (`fairway.coalesce`).

The book knows no thread, no loop and no clock: its two faces (`coalescing_threads`, `coalescing_aio`) bring a lock or a
loop, the time, and a bell for whoever waits. Three things it adds to the machine:

- *Time.* A head that has not ended within the safety time-out is given up for dead, by whoever comes or waits next, and
  the tail takes its place. It may only have been slow; then it can see that its turn is over, and its release does
  nothing. What takes longer than that by its nature calls `renew`.
- *A bound.* A machine to which nobody is left is forgotten at once. What remains are keys in process, and heads that
  died and that nobody asks for again: those are swept out when their time is up. Past `keys_max` a request is refused.
- *Figures.* How often each answer was given, and which keys are the most repetitive. Repetitions alone are counted by
  key, so that a stream without any pays nothing for it.
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

TIMEOUT_S = 60.0  # twice what most database and HTTP clients wait by themselves: a head that is alive has ended by then
KEYS_MAX = 100_000  # in process at once, about 30 MB: nobody has as many threads, so most of them would be dead
HOTTEST_KEYS = 32


class RequestStatus(enum.Enum):
    """How a request stands with its key."""

    ACCEPTED = "accepted"
    """It is the head: it may go ahead."""
    WAITING = "waiting"
    """It is the tail: another one is at work."""
    DECLINED = "declined"
    """One is at work and another one waits: what this one would do will be done."""
    WITHDRAWN = "withdrawn"
    """It did not want to wait any longer."""
    RELEASED = "released"
    """It has ended."""
    EVICTED = "evicted"
    """It took too long, and another one has its place."""


# Needed for every request: a name of the module costs a third of a member of an enumeration.
_ACCEPT, _FREED = CoalescingAnswer.ACCEPT, CoalescingAnswer.FREED
_ACCEPTED, _DECLINED, _RELEASED = RequestStatus.ACCEPTED, RequestStatus.DECLINED, RequestStatus.RELEASED


class CoalescedRequest(Generic[KeyT]):
    """One request for one key. `bell` is rung when somebody else has changed how it stands."""

    __slots__ = ("bell", "key", "standing")

    def __init__(self, key: KeyT) -> None:
        self.key = key
        self.standing = _DECLINED
        self.bell: Callable[[], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this request may work on its key, now."""
        return self.standing is _ACCEPTED

    def _change(self, standing: RequestStatus) -> None:
        self.standing = standing
        if self.bell is not None:
            self.bell()


@dataclass(frozen=True, slots=True)
class CoalescingStatistics(Generic[KeyT]):
    """What a coordinator has done so far. Every request was accepted, waited, was declined or refused."""

    accepted: int
    """Went ahead at once."""
    waited: int
    """Found another one at work, and waited."""
    promoted: int
    """Of those, the ones that went ahead."""
    declined: int
    """Dropped: the work that was saved. With `keep="latest"` those are requests that had waited."""
    withdrawn: int
    """Gave up waiting."""
    evicted: int
    """Heads that did not end within the time-out."""
    refused: int
    """Found the coordinator full."""
    keys: int
    """In process now."""
    hottest: tuple[tuple[KeyT, int], ...]
    """The keys that were repeated most, and how often at most: requests that came while another one was there."""


class _KeyQueue(Machine[CoalescedRequest[KeyT]]):
    """A key's machine, and when its head is given up."""

    __slots__ = ("due_ns",)

    def __init__(self) -> None:
        super().__init__()
        self.due_ns = 0


class _Hottest(Generic[KeyT]):
    """The keys that occur most, in bounded memory: a newcomer takes the place and the count of the least one."""

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
    """The machines of a coordinator. Called under its lock, or on its loop."""

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
        # In the order in which their heads are given up: a desk with a new head goes to the end.
        self._desks: dict[KeyT, _KeyQueue[KeyT]] = {}
        self._spare: _KeyQueue[KeyT] | None = None  # the last that was left: making one costs as much as using it
        self._sweep_ns = 0
        self._hottest: _Hottest[KeyT] = _Hottest()
        self._accepted = self._waited = self._promoted = self._declined = 0
        self._withdrawn = self._evicted = self._refused = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """Give a new request its standing: accepted, waiting or declined."""
        desk = self._desks.get(place.key)
        if desk is not None and desk.due_ns <= now_ns:
            self._evict(place.key, desk, now_ns)
            desk = self._desks.get(place.key)
        if desk is None:
            desk = self._open(place.key, now_ns)
        answer, declined = desk.enqueue(place, self._keep)
        if answer is _ACCEPT:
            self._accepted += 1
            place.standing = _ACCEPTED
            desk.due_ns = now_ns + self._timeout_ns
            return
        self._hottest.note(place.key)
        if answer is CoalescingAnswer.WAIT:
            self._waited += 1
            place.standing = RequestStatus.WAITING
        if declined is not None:
            self._declined += 1
            declined._change(RequestStatus.DECLINED)

    def end(self, place: CoalescedRequest[KeyT], now_ns: int) -> bool:
        """The request has ended; False: it was not the head, and nothing has changed."""
        desk = self._desks.get(place.key)
        if desk is None or desk.head is not place:
            return False
        place.standing = _RELEASED
        self._dequeue(place.key, desk, now_ns)
        return True

    def withdraw(self, place: CoalescedRequest[KeyT]) -> bool:
        """The request does not wait any longer; False: it did not wait."""
        desk = self._desks.get(place.key)
        if desk is None or desk.withdraw(place) is not CoalescingAnswer.WITHDRAWN:
            return False
        self._withdrawn += 1
        place.standing = RequestStatus.WITHDRAWN
        return True

    def leave(self, place: CoalescedRequest[KeyT], now_ns: int) -> None:
        """End, or withdraw, or nothing: whatever it takes to be out of the way."""
        desk = self._desks.get(place.key)
        if desk is not None and desk.head is place:
            place.standing = _RELEASED
            self._dequeue(place.key, desk, now_ns)
        elif desk is not None:
            self.withdraw(place)

    def renew(self, place: CoalescedRequest[KeyT], now_ns: int) -> bool:
        """The head lives, and has the whole time-out once more; False: it was not the head any more."""
        desk = self._desks.get(place.key)
        if desk is None or desk.head is not place:
            return False
        self._lead(place.key, desk, now_ns)
        return True

    def look(self, place: CoalescedRequest[KeyT], now_ns: int) -> int:
        """How long until a request that waits should look again: the head is given up then, if nobody rings before."""
        desk = self._desks.get(place.key)
        if desk is None or place.standing is not RequestStatus.WAITING:
            return 0
        if desk.due_ns <= now_ns:
            self._evict(place.key, desk, now_ns)
            return 0
        return desk.due_ns - now_ns

    # --- keys --------------------------------------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> int:
        """Give up the heads whose time is up; how many those were."""
        self._sweep_ns = now_ns + self._timeout_ns
        overdue = list(takewhile(lambda item: item[1].due_ns <= now_ns, self._desks.items()))
        for key, desk in overdue:
            self._evict(key, desk, now_ns)
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
        desk, self._spare = self._spare or _KeyQueue(), None
        self._desks[key] = desk
        return desk

    def _evict(self, key: KeyT, desk: _KeyQueue[KeyT], now_ns: int) -> None:
        """The head is given up for dead. It may only be slow, and look at its standing."""
        head = desk.head
        invariant(head is not None, "a machine without a head is not kept")
        self._evicted += 1
        self._dequeue(key, desk, now_ns)
        if head is not None:
            head._change(RequestStatus.EVICTED)

    def _dequeue(self, key: KeyT, desk: _KeyQueue[KeyT], now_ns: int) -> None:
        head = desk.head
        if head is None or desk.dequeue(head) is _FREED:
            del self._desks[key]
            self._spare = desk
            return
        self._promoted += 1
        self._lead(key, desk, now_ns)
        if desk.head is not None:
            desk.head._change(RequestStatus.ACCEPTED)

    def _lead(self, key: KeyT, desk: _KeyQueue[KeyT], now_ns: int) -> None:
        """A head begins, or begins anew: it is the last to be given up."""
        desk.due_ns = now_ns + self._timeout_ns
        del self._desks[key]
        self._desks[key] = desk
