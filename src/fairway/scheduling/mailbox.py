"""The requests of one actor: those that want to be handled, and beside them those that wait for something to come.

    arrived     to be handled, by their start
    waiting     looked, and found nothing: a long poll. Not in anybody's way: what arrives later is handled at once
    overdue     to be told that their time is up

Each request has a start in virtual time (`order`), and the earliest start goes first. Those of one connection start one
after the other: so whoever sends a thousand requests at a time waits behind nobody but itself, and their order is kept.

Why waiting requests lie beside the mailbox, and do not suspend the actor with the first of them at its head: whatever
comes later (a pull that waits for nothing, an ack) would be stuck behind it, and so would the deadlines of all others.

A wake-up is a fact ("something may be there since the waiting ones last looked"), not a count: it cannot be lost, nor
come twice. It is spent on the first of the waiting. If that one finds something the next may look too; if not, nobody
would. So a thousand waiting consumers cost one fruitless look per message, not a thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Any

from fairway.errors import InvariantViolated
from fairway.scheduling.account import Account
from fairway.scheduling.processor import Expiry, Processor

NEVER_NS = 1 << 63
SWEEP_LETTERS = 256  # looked at in one step: 0.2 ms


class MailboxItem:
    """A request in a mailbox: who handles it, when it came, from when on an answer would be late, who pays.

    `start_ns` is set when it arrives, and again when it is woken; `expected_ns` is what its account has paid for it in
    advance.
    """

    __slots__ = (
        "account", "expected_ns", "has_waited", "is_placed", "late_ns", "number", "processor", "request", "start_ns",
    )  # fmt: skip

    def __init__(
        self, request: Any, processor: Processor[Any], number: int, late_ns: int, account: Account | None
    ) -> None:
        self.request = request
        self.processor = processor
        self.number = number
        self.late_ns = late_ns
        self.account = account
        self.start_ns = 0.0
        self.expected_ns = 0.0
        self.is_placed = False  # whether it has a start
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

    __slots__ = ("_due_ns", "_order", "_swept", "arrived", "is_woken", "overdue", "waiting")

    def __init__(self) -> None:
        self.arrived: dict[int, MailboxItem] = {}  # by number, in the order of their coming
        self._order: list[tuple[float, int]] = []  # a heap of their starts and numbers; some may be gone
        self.waiting: deque[MailboxItem] = deque()
        self.overdue: list[tuple[MailboxItem, Expiry]] = []  # rare, and in no order
        self.is_woken = False
        self._swept = -1  # the number of the last one among the arrived that the sweep has seen; -1: it has not begun
        self._due_ns = NEVER_NS  # the first that will be due of those that it has seen

    def __len__(self) -> int:
        return len(self.arrived) + len(self.waiting) + len(self.overdue)

    def put(self, letter: MailboxItem) -> None:
        """It has arrived, or comes back to be handled further."""
        self.arrived[letter.number] = letter
        heappush(self._order, (letter.start_ns, letter.number))
        self._due_ns = min(self._due_ns, letter.late_ns)  # a sweep that is under way may have passed its place

    def first(self) -> MailboxItem | None:
        """What `take` would give, if anything."""
        order, arrived = self._order, self.arrived
        while order and order[0][1] not in arrived:
            heappop(order)
        if not (self.is_woken and self.waiting):
            return arrived[order[0][1]] if order else None
        woken = self.waiting[0]
        return arrived[order[0][1]] if order and order[0][0] < woken.start_ns else woken

    def defer(self, first: MailboxItem, start_ns: float) -> None:
        """The first letter starts later than it was said to: another one may be the first now."""
        first.start_ns = start_ns
        if not first.has_waited:
            heapreplace(self._order, (start_ns, first.number))

    def take(self) -> MailboxItem:
        """The next to be handled. Give it back by `wait` or `again`."""
        letter = self.first()
        if letter is None:
            raise InvariantViolated("a mailbox is asked for a letter when it has one")
        if letter.has_waited:
            self.is_woken = False
            self.waiting.popleft()
        else:
            heappop(self._order)
            del self.arrived[letter.number]
            if not self.waiting:
                self.is_woken = False  # nobody waits, and this one looks for itself
        return letter

    def look_on(self, letter: MailboxItem) -> None:
        """The letter that was taken is done with: if a wake-up was spent on it, the next may look too."""
        self.is_woken = self.is_woken or letter.has_waited

    def again(self, letter: MailboxItem) -> None:
        """Back to where it started: nothing of its connection goes before it."""
        self.look_on(letter)
        letter.has_waited = False
        self.put(letter)

    def wait(self, letter: MailboxItem) -> None:
        """Nothing is there: it waits, and keeps its place if it has waited before."""
        letter.is_placed = False
        if letter.has_waited:
            self.waiting.appendleft(letter)
        else:
            letter.has_waited = True
            self.waiting.append(letter)
        self._due_ns = min(self._due_ns, letter.due_ns())  # as in `put`

    def withdraw(self, is_meant: Callable[[Any], bool]) -> list[Any]:
        """Take requests out that wait, for somebody else to answer: a consumer leaves, its long polls end."""
        taken, left = [], deque[MailboxItem]()
        for letter in self.waiting:
            if is_meant(letter.request):
                taken.append(letter.request)
            else:
                left.append(letter)
        self.waiting = left
        return taken

    # --- those whose time is up --------------------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> int | None:
        """Set aside what is due, and what nobody wants any more; when the next will be due. None: this was one step,
        and there is more to look at. What comes and goes between two steps is missed by neither."""
        if self._swept < 0:
            self._due_ns = NEVER_NS
            self.waiting = deque(letter for letter in self.waiting if not self._is_over(letter, now_ns))
        unseen = (letter for number, letter in self.arrived.items() if number > self._swept)
        step = list(islice(unseen, SWEEP_LETTERS))
        for letter in step:
            self._swept = letter.number
            if self._is_over(letter, now_ns):
                del self.arrived[letter.number]
        if len(step) == SWEEP_LETTERS:
            return None
        due_ns, self._due_ns, self._swept = self._due_ns, NEVER_NS, -1
        return due_ns

    def _is_over(self, letter: MailboxItem, now_ns: int) -> bool:
        due_ns = letter.due_ns()
        if now_ns >= due_ns or letter.request.is_cancelled:
            self.overdue.append((letter, letter.expiry()))
            return True
        self._due_ns = min(self._due_ns, due_ns)
        return False

    def empty(self) -> Iterator[MailboxItem]:
        """Take everything out."""
        for letter, _ in self.overdue:
            yield letter
        yield from self.waiting
        yield from self.arrived.values()
        self.overdue.clear()
        self.waiting.clear()
        self.arrived.clear()
        self._order.clear()
