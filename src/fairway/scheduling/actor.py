"""An actor: a mailbox, the time it has used, and two independent facts that decide whether it may run.

    run state      IDLE ── work arrives ──► READY ── picked ──► RUNNING ── slice ends ──► READY or IDLE
    suspensions    a count: `suspend` adds one, `Scheduler.resume` takes one off; above zero no request is handled

A processor suspends its actor for short work elsewhere, such as a cold read. A long poll does not suspend: its
processor returns WAIT. Nor does a paused group: its processor answers for the pause. A suspended actor finishes the
request at hand, still expires overdue requests, and is never removed. So the processor may keep a reference to it.

A request goes through the mailbox, and ends in exactly one of: refused, DONE, fail, expire.

    dispatch ──► refused (`Refused` is raised)
            └──► process ──► DONE                                        answered, or handed on
                    ▲   ├──► raises ──► fail
                    │   ├──► AGAIN ──► first in the actor's next turn ──► process …
                    │   └──► WAIT  ──► waits beside the mailbox ──► woken ──► process …
                    │                       └──► its wait ends ──► expire(WAITED)
                    └── in any queue: expire(LATE), expire(GONE), expire(STOPPED)

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

A request counts against two accounts: the time of its actor, for all connections that use the actor, and the `Account`
of its connection. So a connection that uses 100 actors gets the time of one connection. An actor that 100 connections
use gets the time of one actor (`virtual_time`). Each request of a connection starts, in virtual time, at the expected
end of the request before it. The real cost is known later and moves the start of later requests. No start moves before
the start of a request that may still wait: otherwise a later request would overtake that request. The scheduler also
moves waiting requests when their turn comes, if their connection has used more than expected by then. Otherwise 1,000
requests that each cost 40 times the usual would all be served as cheap ones.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Any, Protocol, TypeVar

from fairway.errors import InvariantViolated, invariant


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


_COST_NS = 50_000.0  # of a request of a new connection: about a small produce


class Account:
    """The virtual times of one connection.

    `start_ns`: the start of its last request. `end_ns`: the expected end of that request. `cost_ns`: the usual cost of
    a request, by experience. `served_ns`: the real end of the request that was served last.
    """

    __slots__ = ("cost_ns", "end_ns", "is_new", "served_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns = 0.0
        self.end_ns = 0.0
        self.served_ns = 0.0
        self.cost_ns = _COST_NS
        self.is_new = True  # none of its requests was handled yet


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


class _Flow:
    """The arrived requests of one connection in one mailbox, in order. Only the first one is in the mailbox's heap:
    then it costs the same to defer one request or a thousand."""

    __slots__ = ("account", "behind", "first", "spare")

    def __init__(self, account: Account | None, first: int) -> None:
        self.account = account
        self.first = first  # the number of the request in the heap
        self.spare = -1  # of the request behind it, if that one is still in the heap; -1: it is not
        self.behind: deque[MailboxItem] = deque()


class Mailbox:
    """One actor's requests. The scheduler bounds their number."""

    __slots__ = ("_due_ns", "_flows", "_order", "_swept", "arrived", "is_woken", "overdue", "waiting")

    def __init__(self) -> None:
        self.arrived: dict[int, MailboxItem] = {}  # by number, in the order of arrival
        self._flows: dict[Account | None, _Flow] = {}
        self._order: list[tuple[float, int, _Flow]] = []  # a heap of starts and numbers; some entries are out of date
        self.waiting: deque[MailboxItem] = deque()
        self.overdue: list[tuple[MailboxItem, Expiry]] = []  # rare, and in no order
        self.is_woken = False
        self._swept = -1  # the number of the last arrived request that the sweep has seen; -1: no sweep is under way
        self._due_ns = NEVER_NS  # the first time when a request that the sweep has seen is due

    def __len__(self) -> int:
        return len(self.arrived) + len(self.waiting) + len(self.overdue)

    def put(self, item: MailboxItem) -> None:
        """Add a request that arrives, or that comes back to be handled further."""
        number, flow = item.number, self._flows.get(item.account)
        self.arrived[number] = item
        self._due_ns = min(self._due_ns, item.late_ns)  # a sweep under way may have passed its place
        if flow is not None and number > flow.first:
            flow.behind.append(item)
            return
        if flow is None:
            flow = self._flows[item.account] = _Flow(item.account, number)
        elif flow.first in self.arrived:  # the request comes back
            flow.behind.appendleft(self.arrived[flow.first])
            flow.spare = flow.first
        flow.first = number
        heappush(self._order, (item.start_ns, number, flow))

    def first(self) -> MailboxItem | None:
        """The request that `take` would return, if any."""
        order, arrived = self._order, self.arrived
        while order and (order[0][1] not in arrived or order[0][1] != order[0][2].first):
            self._drop_entry()
        if not (self.is_woken and self.waiting):
            return arrived[order[0][1]] if order else None
        woken = self.waiting[0]
        return arrived[order[0][1]] if order and order[0][0] < woken.start_ns else woken

    def defer(self, first: MailboxItem, start_ns: float) -> None:
        """Move the start of the first request to a later time: another request may be first now."""
        first.start_ns = start_ns
        if not first.has_waited:
            heapreplace(self._order, (start_ns, first.number, self._order[0][2]))

    def _drop_entry(self) -> None:
        """Take the first entry off the heap, and put the next request of its connection there."""
        _, number, flow = heappop(self._order)
        if number == flow.spare:
            flow.spare = -1
        if number != flow.first:
            return
        behind, arrived = flow.behind, self.arrived
        while behind and behind[0].number not in arrived:
            behind.popleft()
        if not behind:
            del self._flows[flow.account]
            return
        item = behind.popleft()
        flow.first = item.number
        if item.number == flow.spare:
            flow.spare = -1
        else:
            heappush(self._order, (item.start_ns, item.number, flow))

    def take(self) -> MailboxItem:
        """Take out the next request. `wait` or `again` puts it back."""
        item = self.first()
        if item is None:
            raise InvariantViolated("a mailbox is asked for an item when it has one")
        if item.has_waited:
            self.is_woken = False
            self.waiting.popleft()
        else:
            self._drop_entry()
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
        self._flows.clear()
        self._order.clear()


class RunState(enum.Enum):
    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"


IDLE, READY, RUNNING = RunState  # reading a member through its class costs 0.1 µs on 3.11, and a turn only 1 µs


class Actor:
    """One actor. Processors call `suspend` and `charge`, and may read the figures. The rest belongs to the
    scheduler."""

    __slots__ = (
        "alarm_ns",
        "byte_cost_ns",
        "bytes_served",
        "elsewhere_ns",
        "idle_since_ns",
        "is_background",
        "key",
        "mailbox",
        "owed_ns",
        "place",
        "rank",
        "run",
        "served_ns",
        "slices",
        "suspensions",
        "sweep_ns",
        "swept_until_ns",
        "virtual_ns",
        "weight",
    )

    def __init__(self, key: Hashable, weight: float, byte_cost_ns: float, now_ns: int) -> None:
        self.key = key
        self.mailbox = Mailbox()
        self.run = IDLE
        self.suspensions = 0
        self.weight = weight
        self.byte_cost_ns = byte_cost_ns
        self.virtual_ns = 0.0  # time used, divided by weight: the actor with the least runs next
        self.owed_ns = 0.0  # time used that is not in `virtual_ns` yet
        self.rank = 0.0  # its rank among the ready actors, from what its accounts had used
        self.place = 0  # the number of its entry among the ready actors; other entries are out of date
        self.idle_since_ns = now_ns
        self.alarm_ns = NEVER_NS
        self.sweep_ns = 0  # the time that the current sweep has taken so far
        self.swept_until_ns = 0  # no new sweep before this time
        self.is_background = False  # set by its processor: its slices do not count in `Scheduler.busy_ns`
        self.served_ns = 0  # figures for operators
        self.elsewhere_ns = 0
        self.bytes_served = 0
        self.slices = 0

    @property
    def may_run(self) -> bool:
        """Whether the actor has a request to handle or to expire."""
        mailbox = self.mailbox
        if self.suspensions or not (mailbox.arrived or (mailbox.is_woken and mailbox.waiting)):
            return bool(mailbox.overdue)
        return True

    def suspend(self) -> None:
        """Handle no further request until `Scheduler.resume` was called as often."""
        self.suspensions += 1

    def lift(self) -> None:
        invariant(self.suspensions > 0, "an actor is resumed no more often than it was suspended")
        self.suspensions -= 1

    def charge(self, *, elapsed_ns: int = 0, size_bytes: int = 0) -> None:
        """Account for work done elsewhere for the actor, when that work ends, and for the bytes of a response.

        Takes effect before the actor's next slice.
        """
        self.owed_ns += elapsed_ns + size_bytes * self.byte_cost_ns
        self.elsewhere_ns += elapsed_ns
        self.bytes_served += size_bytes
