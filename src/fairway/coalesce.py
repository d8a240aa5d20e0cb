"""The law by which equal requests are merged: a machine of four states, as a table. No clock, no I/O, no lock.

Requests that mean the same (refresh this cache entry, recompute that basket) often stand close together in a queue.
While one of them is in process a second one must wait, since the first may have read what has changed by now; a third
would only repeat what the second is going to do, and is declined. Per key there are two places, the *head* (in process)
and the *tail* (waiting), and that is all there is to know:

    INIT       nobody is here: the next request is the head
    PROCESS    the head is in process, nobody waits
    BLOCK      the head is in process and the tail waits for it
    DECLINE    one more has come while both places are taken. Nobody stays here: one of the two that cannot both wait
               is declined, and the machine is back in BLOCK

                  enqueue: accept           enqueue: wait             enqueue: decline
          ┌──────┐ ─────────────► ┌─────────┐ ─────────────► ┌───────┐ ─────────────► ┌─────────┐
          │ INIT │                │ PROCESS │                │ BLOCK │                │ DECLINE │
          └──────┘ ◄───────────── └─────────┘ ◄───────────── └───────┘ ◄───────────── └─────────┘
                  dequeue: freed            dequeue: promoted         settle, of itself
                                            withdraw: withdrawn

Who of the two is declined is a choice (`Keep`). By default it is the newcomer: right where the request carries nothing
but its key. Where it carries a value, `Keep.LATEST` lets the newcomer wait in the place of the one that waited.

A dequeue by one that is not the head does nothing. It happens: a head that was given up for dead comes back and says it
has ended, and must not end the one that took its place.

Who they are is up to the caller: tickets of one process (`fairway.QueueCoordinator`) or sequences of messages (a
broker's group). `None` is nobody.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from fairway.errors import InvariantViolated

Who = TypeVar("Who")


class CoalescingState(enum.IntEnum):
    """(Integers here and below: they are looked up for every message, and their hash costs a tenth.)"""

    INIT = 0
    PROCESS = 1
    BLOCK = 2
    DECLINE = 3


class CoalescingEvent(enum.IntEnum):
    ENQUEUE = 0  # a request has come
    DEQUEUE = 1  # the head has ended, or is given up for dead
    WITHDRAW = 2  # the tail does not want to wait any longer
    SETTLE = 3  # of itself, once it is decided who is declined


class CoalescingAnswer(enum.IntEnum):
    ACCEPT = 0  # you are the head: go
    WAIT = 1  # you are the tail: wait for the head
    DECLINE = 2  # one is at work and one waits: drop it
    FREED = 3  # nobody is here any more: the machine may be forgotten
    PROMOTED = 4  # the tail is the head now: tell it
    WITHDRAWN = 5  # nobody waits any more
    IGNORED = 6  # it was not yours to end: nothing has changed
    SETTLED = 7  # back in BLOCK


class Keep(enum.Enum):
    """Which of two requests is to wait when there is place for one."""

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
    """What comes of a request that enqueues: its own answer, and who is declined, if anybody."""

    answer: CoalescingAnswer
    declined: Who | None


# Looked up for every message: a name of the module costs a third of a member of an enumeration.
_INIT, _ENQUEUE, _DEQUEUE, _ACCEPT = (
    CoalescingState.INIT,
    CoalescingEvent.ENQUEUE,
    CoalescingEvent.DEQUEUE,
    CoalescingAnswer.ACCEPT,
)
_ACCEPTED: Final[EnqueueResult[Any]] = EnqueueResult(CoalescingAnswer.ACCEPT, None)
_WAITING: Final[EnqueueResult[Any]] = EnqueueResult(CoalescingAnswer.WAIT, None)


class Machine(Generic[Who]):
    """One key's machine. Whoever shares it between threads keeps a lock of their own around it."""

    __slots__ = ("head", "state", "tail")

    def __init__(self, head: Who | None = None, tail: Who | None = None) -> None:
        """A new one; or, with those who were in it, one from a checkpoint."""
        self.head = head
        self.tail = tail
        self.state = _INIT
        if head is not None:
            self.state = CoalescingState.PROCESS if tail is None else CoalescingState.BLOCK
        elif tail is not None:
            raise InvariantViolated("nobody waits for nobody")

    def enqueue(self, who: Who, keep: Keep = Keep.FIRST) -> EnqueueResult[Who]:
        """Ask for a place. One that has a place already is told so again, and takes no second one."""
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
        """The head has ended: FREED, or PROMOTED. From anybody else: IGNORED."""
        if who != self.head or self.head is None:
            return CoalescingAnswer.IGNORED
        answer = self._move(_DEQUEUE)
        self.head, self.tail = self.tail, None
        return answer

    def withdraw(self, who: Who) -> CoalescingAnswer:
        """The tail gives up its place: WITHDRAWN. From anybody else: IGNORED."""
        if who != self.tail or self.tail is None:
            return CoalescingAnswer.IGNORED
        self.tail = None
        return self._move(CoalescingEvent.WITHDRAW)

    def _decline(self, who: Who, keep: Keep) -> EnqueueResult[Who]:
        """Both places are taken: one of those who want to wait goes, and the machine settles."""
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
