"""Coalescing: the rules by which equal requests are merged. A machine of four states, as a table; no clock, I/O or
lock.

Requests that mean the same (refresh this cache entry, recompute that basket) often stand close together in a queue.
While one of them is in process a second request must wait, because the first may have read data that has changed by
now. A third would only repeat the work of the second, and is declined. So each key has two places, the *head* (in
process) and the *tail* (waiting):

    INIT       no request is here: the next request becomes the head
    PROCESS    the head is in process, no request waits
    BLOCK      the head is in process and the tail waits for it
    DECLINE    another request has come while both places are taken. The machine leaves this state at once: the new
               request or the tail is declined, and the machine is back in BLOCK

                  enqueue: accept           enqueue: wait             enqueue: decline
          ┌──────┐ ─────────────► ┌─────────┐ ─────────────► ┌───────┐ ─────────────► ┌─────────┐
          │ INIT │                │ PROCESS │                │ BLOCK │                │ DECLINE │
          └──────┘ ◄───────────── └─────────┘ ◄───────────── └───────┘ ◄───────────── └─────────┘
                  dequeue: freed            dequeue: promoted         settle, of itself
                                            withdraw: withdrawn

`Keep` chooses which request is declined. By default the new request is declined, which is right if requests carry
nothing but their key. If they carry a value, `Keep.LATEST` lets the new request take the place of the waiting one.

A dequeue by any request but the head does nothing. A head that was given up for dead may come back and report its end,
and must not end the request that took its place.

The caller defines the requests: tickets of one process (`fairway.QueueCoordinator`) or sequences of messages (a
broker's group). `None` means no request.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from fairway.errors import InvariantViolated

Who = TypeVar("Who")


class CoalescingState(enum.IntEnum):
    """The states. (Integers here and below: they are looked up for every message, and hashing an enum costs a
    tenth.)"""

    INIT = 0
    PROCESS = 1
    BLOCK = 2
    DECLINE = 3


class CoalescingEvent(enum.IntEnum):
    ENQUEUE = 0  # a request has come
    DEQUEUE = 1  # the head has ended, or is given up for dead
    WITHDRAW = 2  # the tail does not want to wait any longer
    SETTLE = 3  # of itself, after one request was declined


class CoalescingAnswer(enum.IntEnum):
    ACCEPT = 0  # the request is the head: begin
    WAIT = 1  # the request is the tail: wait for the head
    DECLINE = 2  # one request is in process and one waits: drop this one
    FREED = 3  # no request is here any more: the machine may be deleted
    PROMOTED = 4  # the tail is the head now: the caller notifies it
    WITHDRAWN = 5  # no request waits any more
    IGNORED = 6  # the request was not the head or the tail: nothing has changed
    SETTLED = 7  # back in BLOCK


class Keep(enum.Enum):
    """Which of two requests waits if there is one place."""

    FIRST = "first"
    LATEST = "latest"


TABLE: Final[dict[tuple[CoalescingState, CoalescingEvent], tuple[CoalescingState, CoalescingAnswer]]] = {
    (CoalescingState.INIT, CoalescingEvent.ENQUEUE): (CoalescingState.PROCESS, CoalescingAnswer.ACCEPT),
    (CoalescingState.PROCESS, CoalescingEvent.ENQUEUE): (CoalescingState.BLOCK, CoalescingAnswer.WAIT),
    (CoalescingState.PROCESS, CoalescingEvent.DEQUEUE): (CoalescingState.INIT, CoalescingAnswer.FREED),
    (CoalescingState.BLOCK, CoalescingEvent.ENQUEUE): (CoalescingState.DECLINE, CoalescingAnswer.DECLINE),
    (CoalescingState.BLOCK, CoalescingEvent.DEQUEUE): (CoalescingState.PROCESS, CoalescingAnswer.PROMOTED),
    (CoalescingState.BLOCK, CoalescingEvent.WITHDRAW): (CoalescingState.PROCESS, CoalescingAnswer.WITHDRAWN),
    (CoalescingState.DECLINE, CoalescingEvent.SETTLE): (CoalescingState.BLOCK, CoalescingAnswer.SETTLED),
}


class EnqueueResult(NamedTuple, Generic[Who]):
    """The result of an enqueue: the answer, and the request that is declined, if any."""

    answer: CoalescingAnswer
    declined: Who | None


# Looked up for every message: a module name costs a third of an enum member.
_INIT, _ENQUEUE, _DEQUEUE, _ACCEPT = (
    CoalescingState.INIT,
    CoalescingEvent.ENQUEUE,
    CoalescingEvent.DEQUEUE,
    CoalescingAnswer.ACCEPT,
)
_ACCEPTED: Final[EnqueueResult[Any]] = EnqueueResult(CoalescingAnswer.ACCEPT, None)
_WAITING: Final[EnqueueResult[Any]] = EnqueueResult(CoalescingAnswer.WAIT, None)


class Machine(Generic[Who]):
    """The machine of one key. Threads that share a machine need a lock of their own."""

    __slots__ = ("head", "state", "tail")

    def __init__(self, head: Who | None = None, tail: Who | None = None) -> None:
        """A new machine; with `head` and `tail`, a machine from a checkpoint."""
        self.head = head
        self.tail = tail
        self.state = _INIT
        if head is not None:
            self.state = CoalescingState.PROCESS if tail is None else CoalescingState.BLOCK
        elif tail is not None:
            raise InvariantViolated("nobody waits for nobody")

    def enqueue(self, who: Who, keep: Keep = Keep.FIRST) -> EnqueueResult[Who]:
        """Ask for a place. A request that has a place gets the same answer again, and no second place."""
        if who == self.head:
            return _ACCEPTED
        if who == self.tail:
            return _WAITING
        answer = self._move(_ENQUEUE)
        if answer is _ACCEPT:
            self.head = who
            return _ACCEPTED
        if answer is CoalescingAnswer.WAIT:
            self.tail = who
            return _WAITING
        return self._decline(who, keep)

    def dequeue(self, who: Who) -> CoalescingAnswer:
        """The head has ended: FREED, or PROMOTED. From any other request: IGNORED."""
        if who != self.head or self.head is None:
            return CoalescingAnswer.IGNORED
        answer = self._move(_DEQUEUE)
        self.head, self.tail = self.tail, None
        return answer

    def withdraw(self, who: Who) -> CoalescingAnswer:
        """The tail gives up its place: WITHDRAWN. From any other request: IGNORED."""
        if who != self.tail or self.tail is None:
            return CoalescingAnswer.IGNORED
        self.tail = None
        return self._move(CoalescingEvent.WITHDRAW)

    def _decline(self, who: Who, keep: Keep) -> EnqueueResult[Who]:
        """Both places are taken: decline the new request or the tail, and settle."""
        entry: EnqueueResult[Who] = EnqueueResult(CoalescingAnswer.DECLINE, who)
        if keep is Keep.LATEST:
            entry = EnqueueResult(CoalescingAnswer.WAIT, self.tail)
            self.tail = who
        self._move(CoalescingEvent.SETTLE)
        return entry

    def _move(self, event: CoalescingEvent) -> CoalescingAnswer:
        found = TABLE.get((self.state, event))
        if found is None:
            raise InvariantViolated(f"a machine in {self.state.name} has no way on when it hears {event.name}")
        self.state, answer = found
        return answer
