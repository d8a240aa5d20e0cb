"""The requests of one actor: those that want to be handled, and beside them those that wait for something to come.

    arrived     to be handled, first in, first out
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
from typing import Any

from fairway.scheduling.processor import Expiry, Processor

NEVER_NS = 1 << 63


class Letter:
    """A request in a mailbox: who handles it, when it came, from when on an answer would be late."""

    __slots__ = ("has_waited", "late_ns", "number", "processor", "request")

    def __init__(self, request: Any, processor: Processor[Any], number: int, late_ns: int) -> None:
        self.request = request
        self.processor = processor
        self.number = number
        self.late_ns = late_ns
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

    __slots__ = ("arrived", "is_woken", "overdue", "waiting")

    def __init__(self) -> None:
        self.arrived: deque[Letter] = deque()
        self.waiting: deque[Letter] = deque()
        self.overdue: list[tuple[Letter, Expiry]] = []  # rare, and in no order: no deque for each idle actor
        self.is_woken = False

    def __len__(self) -> int:
        return len(self.arrived) + len(self.waiting) + len(self.overdue)

    def first(self) -> Letter | None:
        """What `take` would give, if anything."""
        if self.is_woken and self.waiting:
            return self.waiting[0]
        return self.arrived[0] if self.arrived else None

    def take(self) -> Letter:
        """The next to be handled: those that were woken have waited longest. Give it back by `wait` or `again`."""
        if self.is_woken and self.waiting:
            self.is_woken = False
            return self.waiting.popleft()
        if not self.waiting:
            self.is_woken = False  # nobody waits, and this one looks for itself
        return self.arrived.popleft()

    def look_on(self, letter: Letter) -> None:
        """The letter that was taken is done with: if a wake-up was spent on it, the next may look too."""
        self.is_woken = self.is_woken or letter.has_waited

    def again(self, letter: Letter) -> None:
        """Back to the front: it comes first in the next slice."""
        self.look_on(letter)
        letter.has_waited = False
        self.arrived.appendleft(letter)

    def wait(self, letter: Letter) -> None:
        """Nothing is there: it waits, and keeps its place if it has waited before."""
        if letter.has_waited:
            self.waiting.appendleft(letter)
        else:
            letter.has_waited = True
            self.waiting.append(letter)

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

    def sweep(self, now_ns: int) -> int:
        """Set aside what is due, and what nobody wants any more; when the next will be due."""
        next_ns = NEVER_NS
        for queue in (self.arrived, self.waiting):
            left: list[Letter] = []
            for letter in queue:
                due_ns = letter.due_ns()
                if now_ns >= due_ns or letter.request.is_cancelled:
                    self.overdue.append((letter, letter.expiry()))
                else:
                    left.append(letter)
                    next_ns = min(next_ns, due_ns)
            if len(left) < len(queue):
                queue.clear()
                queue.extend(left)
        return next_ns

    def empty(self) -> Iterator[Letter]:
        """Take everything out."""
        for letter, _ in self.overdue:
            yield letter
        yield from self.waiting
        yield from self.arrived
        self.overdue.clear()
        self.waiting.clear()
        self.arrived.clear()
