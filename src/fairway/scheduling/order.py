"""Who is next.

`VirtualTime` is the order of a fair process scheduler: the ready actor that has used the least time for its weight.
QMQ knew two others, and neither is right. By total time, one that was quiet for a day and wakes up starves all others
until it has used as much as they. By last execution, everybody gets equal turns, not equal time, and a slow reader is
no longer held back. Here a newcomer starts at the least that any ready actor has used, and a sleeper that wakes up at
most a millisecond below it: they can neither spend the time that they did not use, nor need to wait until the others
have caught up with them. The millisecond is for naps. A group of two consumers empties its mailbox with every slice,
and is away until their next requests have come: without it, each such nap would cost it what it had not yet used
(docs/adr/0005). In the long run nobody gains more than that one millisecond by it.

Virtual time goes on with the service that is given, as in weighted fair queueing: by the time given, divided by the
weight of all who are ready. Otherwise newcomers that come without end would each start at the same least, and nobody
who was served before would be served again. Time that goes to the reading of requests moves it too, but not away from
those who are ready: they are charged nothing for it, so whoever came next would wait behind them for all of it.

Each request counts twice: for its actor, and for the account of the connection that it came from. A request has a start
of its own, as in start-time fair queueing: where its connection's last one is expected to end, and not before now. An
actor's rank is the greater of what it has used and the start of its next request, so its share is the smaller of what
the two accounts allow: a hundred actors that one connection keeps busy have the share of one connection, and a hundred
connections that keep one actor busy have the share of one actor. A new connection starts a millisecond late: otherwise
one that comes back under another name with each request would always go first.

`Arrival` is a plain queue of requests, first come, first served, behind the same interface: for comparison.
"""

from __future__ import annotations

from typing import Protocol

from fairway.scheduling.account import Account
from fairway.scheduling.actor import Actor
from fairway.scheduling.mailbox import MailboxItem

LEAD_NS_MAX = 100_000_000  # 0.1 s: so long a single charge (a disk that hangs for a minute) may hold an actor back
CREDIT_NS = 1_000_000  # 1 ms, five slices: as long as a consumer's way to its next request (bench/slices)

DEBIT_NS = 1_000_000  # 1 ms: a new connection starts so far behind those that are there, or its like would go first
SLACK_NS = 200_000  # 0.2 ms, a slice: a request that is served sooner than it should be, by no more, stays where it is
AHEAD_NS = 2_000_000  # 2 ms, ten slices: a connection that is so far ahead of the others is read when its turn comes
_COST_SHARE = 0.1  # of the newest request in what one of its connection is expected to take


class RunOrder(Protocol):
    """What the scheduler asks of an order. The least rank is next; ties go to whoever became ready first."""

    @property
    def slice_requests_max(self) -> int:
        """How many requests an actor may handle before the next is picked, if its time lasts."""

    def enter(self, actor: Actor) -> None:
        """The actor was idle, or is new, and becomes ready."""

    def place(self, letter: MailboxItem) -> None:
        """A request has come, or was woken: set its start."""

    def rank(self, actor: Actor) -> float:
        """Its place among the ready."""

    def charge(self, actor: Actor, charge_ns: float) -> None:
        """The actor has used this much time."""

    def settle(self, letter: MailboxItem, charge_ns: float) -> None:
        """A request has used this much time."""

    def charge_account(self, account: Account, charge_ns: float) -> None:
        """A connection has used this much time without a request."""

    def is_ahead(self, account: Account) -> bool:
        """Whether a connection has used more than its share, or has asked for it already."""

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        """So much time was given while actors of this weight were ready; the least rank among these, if there are
        any."""

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        """The same for time that no actor was given."""


class VirtualTime:
    """Least virtual time first. The minimum never goes back."""

    slice_requests_max = 1 << 62

    def __init__(self, lead_ns_max: int = LEAD_NS_MAX, credit_ns: int = CREDIT_NS) -> None:
        self.minimum_ns = 0.0
        self._lead_ns_max = lead_ns_max
        self._credit_ns = credit_ns

    def enter(self, actor: Actor) -> None:
        credit_ns = self._credit_ns if actor.slices else 0  # a newcomer has not earned any
        actor.virtual_ns = max(actor.virtual_ns, self.minimum_ns - credit_ns)

    def place(self, letter: MailboxItem) -> None:
        letter.is_placed = True
        account = letter.account
        if account is None:
            return
        least_ns = self.minimum_ns + (DEBIT_NS if account.is_new else -self._credit_ns)
        start_ns = max(least_ns, min(account.end_ns, self.minimum_ns + self._lead_ns_max), account.start_ns)
        letter.start_ns = account.start_ns = start_ns
        letter.expected_ns = account.cost_ns
        account.end_ns = start_ns + account.cost_ns

    def rank(self, actor: Actor) -> float:
        letter = actor.mailbox.first()
        while letter is not None and letter.start_ns < (least_ns := self._least_start_ns(letter.account)):
            actor.mailbox.defer(letter, least_ns)
            letter = actor.mailbox.first()
        if letter is None or letter.start_ns < actor.virtual_ns:
            return actor.virtual_ns
        return letter.start_ns

    def _least_start_ns(self, account: Account | None) -> float:
        """By what a connection has really used. It is the same for all of its requests at one moment and never goes
        back, so that none overtakes another."""
        if account is None:
            return 0.0
        return min(account.served_ns - SLACK_NS, self.minimum_ns + self._lead_ns_max)

    def charge(self, actor: Actor, charge_ns: float) -> None:
        weight = actor.weight
        used_ns = actor.virtual_ns + charge_ns / weight
        if (used_ns - self.minimum_ns) * weight > self._lead_ns_max:
            used_ns = max(actor.virtual_ns, self.minimum_ns + self._lead_ns_max / weight)
        actor.virtual_ns = used_ns

    def settle(self, letter: MailboxItem, charge_ns: float) -> None:
        account = letter.account
        if account is not None:
            account.end_ns += charge_ns - letter.expected_ns
            account.served_ns = max(account.served_ns, letter.start_ns) + charge_ns
            letter.expected_ns = 0.0
            account.cost_ns += (charge_ns - account.cost_ns) * _COST_SHARE
            account.is_new = False

    def charge_account(self, account: Account, charge_ns: float) -> None:
        account.end_ns = max(account.end_ns, self.minimum_ns - self._credit_ns) + charge_ns

    def is_ahead(self, account: Account) -> bool:
        return account.end_ns > self.minimum_ns + AHEAD_NS

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        self.minimum_ns += charge_ns / ready_weight
        if least_rank is not None and least_rank > self.minimum_ns:
            self.minimum_ns = least_rank

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        reached_ns = self.minimum_ns + charge_ns / (ready_weight + 1)
        if least_rank is not None:
            reached_ns = min(reached_ns, least_rank + SLACK_NS)
        self.minimum_ns = max(self.minimum_ns, reached_ns)


class Arrival:
    """First come, first served, one request at a time, whoever sent it."""

    slice_requests_max = 1

    def enter(self, actor: Actor) -> None:
        pass

    def place(self, letter: MailboxItem) -> None:
        letter.is_placed = True
        letter.start_ns = letter.number

    def rank(self, actor: Actor) -> float:
        letter = actor.mailbox.first()
        return letter.number if letter is not None else 0

    def charge(self, actor: Actor, charge_ns: float) -> None:
        actor.virtual_ns += charge_ns / actor.weight

    def settle(self, letter: MailboxItem, charge_ns: float) -> None:
        pass

    def charge_account(self, account: Account, charge_ns: float) -> None:
        pass

    def is_ahead(self, account: Account) -> bool:
        return False

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass
