"""The requests of one actor: those that want to be handled, and beside them those that wait for something to come.

    arrived     to be handled, first in, first out
    hasty       the same, from those who send too much at a time: others go before them, though not for ever
    waiting     looked, and found nothing: a long poll. Not in anybody's way: what arrives later is handled at once
    overdue     to be told that their time is up

Why waiting requests lie beside the mailbox, and do not suspend the actor with the first of them at its head: whatever
comes later (a pull that waits for nothing, an ack) would be stuck behind it, and so would the deadlines of all others.

A wake-up is a fact ("something may be there since the waiting ones last looked"), not a count: it cannot be lost, nor
come twice. It is spent on the first of the waiting. If that one finds something the next may look too; if not, nobody
would. So a thousand waiting consumers cost one fruitless look per message, not a thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from fairway.scheduling.processor import Expiry, Processor

NEVER_NS = 1 << 63
SWEEP_LETTERS = 256  # looked at in one step: 0.2 ms
OVERTAKING_MAX = 8  # others that go before one that is hasty: it gets a ninth of its actor's time, at least


class Letter:
    """A request in a mailbox: who handles it, when it came, from when on an answer would be late."""

    __slots__ = ("has_waited", "is_hasty", "late_ns", "number", "processor", "request")

    def __init__(
        self, request: Any, processor: Processor[Any], number: int, late_ns: int, *, is_hasty: bool = False
    ) -> None:
        self.request = request
        self.processor = processor
        self.number = number
        self.late_ns = late_ns
        self.is_hasty = is_hasty
        self.has_waited = False

    def due_ns(self) -> int:
        """When it must be told that its time is up."""
        wait_until_ns: int = self.request.wait_until_ns
        return min(self.late_ns, wait_until_ns) if self.has_waited else self.late_ns

    def expiry(self) -> Expiry:
        """Why, when it is not worth handling any more."""
        if self.request.is_cancelled:
            return Expiry.GONE
        return Expiry.WAITED if self.has_waited else Expiry.LATE


class Mailbox:
    """One actor's requests. Bounded by whoever puts them in."""

    __slots__ = ("_due_ns", "_overtaken", "_swept", "arrived", "hasty", "is_woken", "overdue", "waiting")

    def __init__(self) -> None:
        self.arrived: deque[Letter] = deque()
        self.hasty: deque[Letter] | None = None  # rare: no deque for each idle actor
        self.waiting: deque[Letter] = deque()
        self.overdue: list[tuple[Letter, Expiry]] = []  # rare, too, and in no order
        self.is_woken = False
        self._overtaken = 0  # times that others went before the first of the hasty
        self._swept: Letter | None = None  # so far the sweep has come
        self._due_ns = NEVER_NS  # the first that will be due of those that it has seen

    def __len__(self) -> int:
        hasty = len(self.hasty) if self.hasty else 0
        return len(self.arrived) + hasty + len(self.waiting) + len(self.overdue)

    @property
    def is_hasty(self) -> bool:
        """Whether all that `take` would give, and all that is to be told its end, is from hasty ones."""
        if self.arrived or (self.is_woken and self.waiting):
            return False
        return not self.overdue or self.overdue[-1][0].is_hasty

    def put(self, letter: Letter) -> None:
        """It has arrived."""
        if not letter.is_hasty:
            self.arrived.append(letter)
        elif self.hasty is None:
            self.hasty = deque((letter,))
        else:
            self.hasty.append(letter)

    def first(self) -> Letter | None:
        """What `take` would give, if anything."""
        if self.is_woken and self.waiting:
            return self.waiting[0]
        arrived = self._next_queue()
        return arrived[0] if arrived else None

    def _next_queue(self) -> deque[Letter]:
        """A hasty one goes before none that came earlier: the two may be of one connection, whose order is kept."""
        hasty, arrived = self.hasty, self.arrived
        if not hasty:
            return arrived
        if arrived and (self._overtaken < OVERTAKING_MAX or arrived[0].number < hasty[0].number):
            return arrived
        return hasty

    def take(self) -> Letter:
        """The next to be handled: those that were woken have waited longest. Give it back by `wait` or `again`."""
        if self.is_woken and self.waiting:
            self.is_woken = False
            return self.waiting.popleft()
        if not self.waiting:
            self.is_woken = False  # nobody waits, and this one looks for itself
        if not self.hasty:
            return self.arrived.popleft()
        letter = self._next_queue().popleft()
        self._overtaken = 0 if letter.is_hasty else self._overtaken + 1
        return letter

    def look_on(self, letter: Letter) -> None:
        """The letter that was taken is done with: if a wake-up was spent on it, the next may look too."""
        self.is_woken = self.is_woken or letter.has_waited

    def again(self, letter: Letter) -> None:
        """Back to the front: it comes first in the next slice."""
        self.look_on(letter)
        letter.has_waited = False
        self._due_ns = min(self._due_ns, letter.late_ns)  # a sweep that is under way may have passed the front
        (self.hasty if letter.is_hasty and self.hasty is not None else self.arrived).appendleft(letter)

    def wait(self, letter: Letter) -> None:
        """Nothing is there: it waits, and keeps its place if it has waited before."""
        if letter.has_waited:
            self.waiting.appendleft(letter)
        else:
            letter.has_waited = True
            self.waiting.append(letter)
            if letter is self._swept:
                self._swept = None  # or the sweep would go on behind it

    def withdraw(self, is_meant: Callable[[Any], bool]) -> list[Any]:
        """Take requests out that wait, for somebody else to answer: a consumer leaves, its long polls end."""
        taken, left = [], deque[Letter]()
        for letter in self.waiting:
            if is_meant(letter.request):
                taken.append(letter.request)
            else:
                left.append(letter)
        self.waiting = left
        return taken

    def sweep(self, now_ns: int) -> int | None:
        """Set aside what is due, and what nobody wants any more; when the next will be due. None: this was one step,
        and there is more to look at. What comes and goes between two steps is missed by neither."""
        room = SWEEP_LETTERS
        queues = [self.arrived, self.waiting] if self.hasty is None else [self.arrived, self.hasty, self.waiting]
        if any(self._swept in queue for queue in queues):
            while self._swept not in queues[0]:
                del queues[0]
        for queue in queues:
            swept = self._swept
            at = queue.index(swept) + 1 if swept is not None and swept in queue else 0  # gone: so are those before it
            count = min(room, len(queue) - at)
            self._sweep_part(queue, at, count, now_ns)
            room -= count
            if not room:
                return None
        due_ns, self._due_ns, self._swept = self._due_ns, NEVER_NS, None
        return due_ns

    def _sweep_part(self, queue: deque[Letter], at: int, count: int, now_ns: int) -> None:
        left: list[Letter] = []
        for letter in islice(queue, at, at + count):
            due_ns = letter.due_ns()
            if now_ns >= due_ns or letter.request.is_cancelled:
                self.overdue.append((letter, letter.expiry()))
            else:
                left.append(letter)
                self._due_ns = min(self._due_ns, due_ns)
        if left:
            self._swept = left[-1]
        if len(left) < count:
            queue.rotate(-at)
            for _ in range(count):
                queue.popleft()
            queue.extendleft(reversed(left))
            queue.rotate(at)

    def empty(self) -> Iterator[Letter]:
        """Take everything out."""
        for letter, _ in self.overdue:
            yield letter
        yield from self.waiting
        yield from self.arrived
        yield from self.hasty or ()
        self.overdue.clear()
        self.waiting.clear()
        self.arrived.clear()
        self.hasty = None
