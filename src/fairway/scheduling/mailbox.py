"""The mailbox of one actor, and the port of the scheduler: `Request`, `Processor`, and every way a request can end.

    dispatch ──► refused (`Refused` is raised)
            └──► process ──► DONE                                        answered, or handed on
                    ▲   ├──► raises ──► fail
                    │   ├──► AGAIN ──► first in the actor's next turn ──► process …
                    │   └──► WAIT  ──► waits beside the mailbox ──► woken ──► process …
                    │                       └──► its wait ends ──► expire(WAITED)
                    └── in any queue: expire(LATE), expire(GONE), expire(STOPPED)

Every request ends in exactly one of: refused, DONE, fail, expire.

A mailbox has three queues:

    arrived     to be handled, by their start
    waiting     found nothing when handled: long polls. Requests that arrive later pass them
    overdue     to be expired

Each request has a start in virtual time (`virtual_time`), and the earliest start goes first. The requests of one
connection start one after the other. So a connection that sends 1,000 requests at a time waits only behind itself, and
its requests keep their order.

Waiting requests do not block the mailbox or suspend the actor. Otherwise later requests (a pull that does not wait, an
ack) would be stuck behind them, and so would all deadlines.

A wake-up is a flag ("something may be there since the last look"), not a count: it cannot get lost or double. The first
waiting request uses it. If that request finds something, the next one may look too; if not, no other would. So a
message costs 1,000 waiting consumers one fruitless look, not 1,000.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fairway.errors import InvariantViolated
from fairway.scheduling.account import Account

if TYPE_CHECKING:
    from fairway.scheduling.account import Account
    from fairway.scheduling.actor import Actor


class TurnResult(enum.Enum):
    """What `process` did with a request."""

    DONE = "done"  # answered, or handed on to whatever answers it: the scheduler forgets the request
    WAIT = "wait"  # the actor has nothing for any request: keep it until `Scheduler.wake`, or until its wait ends
    # not finished (more to scan, a read under way): the slice ends, and the request comes first in the next slice
    AGAIN = "again"


class Expiry(enum.Enum):
    """Why a request ends unserved."""

    LATE = "late"  # an answer would miss its deadline: refuse, with a retry-after
    WAITED = "waited"  # its wait ended and nothing came: give the empty answer
    GONE = "gone"  # nobody reads the answer: release what the request holds
    STOPPED = "stopped"  # the scheduler was closed


class Request(Protocol):
    """An entry of a mailbox. Times are monotonic."""

    @property
    def deadline_ns(self) -> int:
        """When the sender gives up: the scheduler expires a request that cannot be answered before."""

    @property
    def wait_until_ns(self) -> int:
        """How long WAIT may keep the request; a time in the past, such as 0, for a request without a long poll."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more. Called often: keep it cheap."""

    @property
    def account(self) -> Account | None:
        """The account that pays beside the actor; None: none."""


RequestT_contra = TypeVar("RequestT_contra", bound=Request, contravariant=True)


class Processor(Protocol[RequestT_contra]):
    """Handles one kind of request. No method may block; an exception affects only its own request.

    A long poll registers for news, looks again, and returns WAIT: later news calls `Scheduler.wake`.
    """

    def process(self, request: RequestT_contra, actor: Actor) -> TurnResult:
        """Handle the request. Called again for the same request after AGAIN, and after WAIT when the actor was
        woken."""

    def expire(self, request: RequestT_contra, expiry: Expiry) -> None:
        """Tell the sender that the request ends unserved."""

    def fail(self, request: RequestT_contra, error: Exception) -> None:
        """Tell the sender that `process` raised. The request has left the mailbox, and the actor goes on."""


NEVER_NS = 1 << 63
SWEEP_ITEMS = 256  # looked at in one step: 0.2 ms


class MailboxItem:
    """A request in a mailbox, with its processor, its number, the time when an answer is late, and its account.

    `start_ns` is set when the request arrives, and again when it is woken. `expected_ns` is the cost that its account
    has paid in advance.
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
        """When the request must expire."""
        wait_until_ns: int = self.request.wait_until_ns
        return min(self.late_ns, wait_until_ns) if self.has_waited else self.late_ns

    def expiry(self) -> Expiry:
        """The reason why the request expires."""
        if self.request.is_cancelled:
            return Expiry.GONE
        return Expiry.WAITED if self.has_waited else Expiry.LATE


class Mailbox:
    """One actor's requests. The scheduler bounds their number."""

    __slots__ = ("_due_ns", "_order", "_swept", "arrived", "is_woken", "overdue", "waiting")

    def __init__(self) -> None:
        self.arrived: dict[int, MailboxItem] = {}  # by number, in the order of arrival
        self._order: list[tuple[float, int]] = []  # a heap of starts and numbers; some of the requests may be gone
        self.waiting: deque[MailboxItem] = deque()
        self.overdue: list[tuple[MailboxItem, Expiry]] = []  # rare, and in no order
        self.is_woken = False
        self._swept = -1  # the number of the last arrived request that the sweep has seen; -1: no sweep is under way
        self._due_ns = NEVER_NS  # the first time when a request that the sweep has seen is due

    def __len__(self) -> int:
        return len(self.arrived) + len(self.waiting) + len(self.overdue)

    def put(self, item: MailboxItem) -> None:
        """Add a request that arrives, or that comes back to be handled further."""
        self.arrived[item.number] = item
        heappush(self._order, (item.start_ns, item.number))
        self._due_ns = min(self._due_ns, item.late_ns)  # a sweep under way may have passed its place

    def first(self) -> MailboxItem | None:
        """The request that `take` would return, if any."""
        order, arrived = self._order, self.arrived
        while order and order[0][1] not in arrived:
            heappop(order)
        if not (self.is_woken and self.waiting):
            return arrived[order[0][1]] if order else None
        woken = self.waiting[0]
        return arrived[order[0][1]] if order and order[0][0] < woken.start_ns else woken

    def defer(self, first: MailboxItem, start_ns: float) -> None:
        """Move the start of the first request to a later time: another request may be first now."""
        first.start_ns = start_ns
        if not first.has_waited:
            heapreplace(self._order, (start_ns, first.number))

    def take(self) -> MailboxItem:
        """Take out the next request. `wait` or `again` puts it back."""
        item = self.first()
        if item is None:
            raise InvariantViolated("a mailbox is asked for a letter when it has one")
        if item.has_waited:
            self.is_woken = False
            self.waiting.popleft()
        else:
            heappop(self._order)
            del self.arrived[item.number]
            if not self.waiting:
                self.is_woken = False  # no request waits, and this one looks for itself
        return item

    def look_on(self, item: MailboxItem) -> None:
        """Note that the taken request is done: if it used a wake-up, the next waiting request may look too."""
        self.is_woken = self.is_woken or item.has_waited

    def again(self, item: MailboxItem) -> None:
        """Put the request back at its start: no later request of its connection passes it."""
        self.look_on(item)
        item.has_waited = False
        self.put(item)

    def wait(self, item: MailboxItem) -> None:
        """Let the request wait: it found nothing. A request that has waited before keeps its place."""
        item.is_placed = False
        if item.has_waited:
            self.waiting.appendleft(item)
        else:
            item.has_waited = True
            self.waiting.append(item)
        self._due_ns = min(self._due_ns, item.due_ns())  # as in `put`

    def withdraw(self, is_meant: Callable[[Any], bool]) -> list[Any]:
        """Take waiting requests out, for the caller to answer: for example the long polls of a consumer that leaves."""
        taken, left = [], deque[MailboxItem]()
        for item in self.waiting:
            if is_meant(item.request):
                taken.append(item.request)
            else:
                left.append(item)
        self.waiting = left
        return taken

    # --- requests whose time is up -----------------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> int | None:
        """Move due and cancelled requests to `overdue`. Returns when the next request is due; None: this was one step
        of several. The sweep misses no request that comes or goes between two steps."""
        if self._swept < 0:
            self._due_ns = NEVER_NS
            self.waiting = deque(item for item in self.waiting if not self._is_over(item, now_ns))
        unseen = (item for number, item in self.arrived.items() if number > self._swept)
        step = list(islice(unseen, SWEEP_ITEMS))
        for item in step:
            self._swept = item.number
            if self._is_over(item, now_ns):
                del self.arrived[item.number]
        if len(step) == SWEEP_ITEMS:
            return None
        due_ns, self._due_ns, self._swept = self._due_ns, NEVER_NS, -1
        return due_ns

    def _is_over(self, item: MailboxItem, now_ns: int) -> bool:
        due_ns = item.due_ns()
        if now_ns >= due_ns or item.request.is_cancelled:
            self.overdue.append((item, item.expiry()))
            return True
        self._due_ns = min(self._due_ns, due_ns)
        return False

    def empty(self) -> Iterator[MailboxItem]:
        """Take everything out."""
        for item, _ in self.overdue:
            yield item
        yield from self.waiting
        yield from self.arrived.values()
        self.overdue.clear()
        self.waiting.clear()
        self.arrived.clear()
        self._order.clear()
