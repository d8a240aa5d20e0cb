"""The run order: which ready actor is next.

`VirtualTime` is the order of a fair process scheduler: the ready actor that has used the least time for its weight goes
first. QMQ has two other orders, and both have a flaw. By total time, an actor that was quiet for a day and wakes up
starves all others until it has used as much as they. By last execution, every actor gets equal turns, not equal time,
and a slow reader is not held back.

So a new actor starts at the least time that any ready actor has used, and a sleeping actor that wakes up at most 1 ms
below that. Neither can spend the time that it did not use, and neither has to wait until the others have caught up. The
millisecond is for short naps. A group of two consumers empties its mailbox with every slice, and is idle until their
next requests have come. Without the millisecond, each nap would cost the group its unused time (ADR 0005). In the
long run no actor gains more than that 1 ms by it.

Virtual time advances with the time given, divided by the weight of all ready actors, as in weighted fair queueing.
Otherwise an endless row of new actors would each start at the same least time, and no actor served before would be
served again. Time spent on reading requests advances virtual time too, but not past the ready actors. They are charged
nothing for it, so an actor that came next would wait behind them for all of it.

Each request counts twice: for its actor, and for the account of its connection. A request has a start of its own, as in
start-time fair queueing: the expected end of its connection's last request, and not before now. An actor's rank is the
greater of its used time and the start of its next request. So its share is the smaller of what the two accounts allow.
100 actors that one connection keeps busy have the share of one connection. 100 connections that keep one actor busy
have the share of one actor. A new connection starts 1 ms late: otherwise a client that comes back under another name
with each request would always go first.
"""

from __future__ import annotations

from fairway.scheduling.actor import Account, Actor, MailboxItem

# 0.1 s: the longest time that a single charge (a disk that hangs for a minute) holds an actor back
LEAD_NS_MAX = 100_000_000
CREDIT_NS = 1_000_000  # 1 ms, five slices: as long as a consumer takes to send its next request (bench/slices)

# 1 ms: a new connection starts so far behind the others, or a row of new connections would always go first
DEBIT_NS = 1_000_000
SLACK_NS = 200_000  # 0.2 ms, a slice: a request that is served too early by no more than this keeps its place
AHEAD_NS = 2_000_000  # 2 ms, ten slices: a connection that is so far ahead of the others is read when its turn comes
_COST_SHARE = 0.1  # of the newest request in the expected cost of a request


class VirtualTime:
    """Least virtual time first. The minimum never goes back. The least rank is next; ties go to the actor that became
    ready first."""

    slice_requests_max = 1 << 62  # that an actor may handle before the scheduler picks again, if its time lasts

    def __init__(self, lead_ns_max: int = LEAD_NS_MAX, credit_ns: int = CREDIT_NS) -> None:
        self.minimum_ns = 0.0
        self._lead_ns_max = lead_ns_max
        self._credit_ns = credit_ns

    def enter(self, actor: Actor) -> None:
        """Note that an idle or new actor becomes ready."""
        credit_ns = self._credit_ns if actor.slices else 0  # a new actor has not earned any
        actor.virtual_ns = max(actor.virtual_ns, self.minimum_ns - credit_ns)

    def place(self, item: MailboxItem) -> None:
        """Set the start of a request that has arrived or was woken."""
        item.is_placed = True
        account = item.account
        if account is None:
            return
        least_ns = self.minimum_ns + (DEBIT_NS if account.is_new else -self._credit_ns)
        start_ns = max(least_ns, min(account.end_ns, self.minimum_ns + self._lead_ns_max), account.start_ns)
        item.start_ns = account.start_ns = start_ns
        item.expected_ns = account.cost_ns
        account.end_ns = start_ns + account.cost_ns

    def rank(self, actor: Actor) -> float:
        """The actor's rank among the ready actors."""
        item = actor.mailbox.first()
        while item is not None and item.start_ns < (least_ns := self._least_start_ns(item.account)):
            actor.mailbox.defer(item, least_ns)
            item = actor.mailbox.first()
        if item is None or item.start_ns < actor.virtual_ns:
            return actor.virtual_ns
        return item.start_ns

    def _least_start_ns(self, account: Account | None) -> float:
        """The least start by the connection's real use. At one moment it is the same for all requests of a connection,
        and it never goes back, so none overtakes another."""
        if account is None:
            return 0.0
        return min(account.served_ns - SLACK_NS, self.minimum_ns + self._lead_ns_max)

    def charge(self, actor: Actor, charge_ns: float) -> None:
        weight = actor.weight
        used_ns = actor.virtual_ns + charge_ns / weight
        if (used_ns - self.minimum_ns) * weight > self._lead_ns_max:
            used_ns = max(actor.virtual_ns, self.minimum_ns + self._lead_ns_max / weight)
        actor.virtual_ns = used_ns

    def settle(self, item: MailboxItem, charge_ns: float) -> None:
        """Charge the request's account for time used."""
        account = item.account
        if account is not None:
            account.end_ns += charge_ns - item.expected_ns
            account.served_ns = max(account.served_ns, item.start_ns) + charge_ns
            item.expected_ns = 0.0
            account.cost_ns += (charge_ns - account.cost_ns) * _COST_SHARE
            account.is_new = False

    def charge_account(self, account: Account, charge_ns: float) -> None:
        """Charge a connection for time used without a request."""
        account.end_ns = max(account.end_ns, self.minimum_ns - self._credit_ns) + charge_ns

    def is_ahead(self, account: Account) -> bool:
        """Whether a connection has used more than its share, or has already asked for more."""
        return account.end_ns > self.minimum_ns + AHEAD_NS

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        """Advance by time given while actors of this weight were ready. `least_rank`: the least among these, if there
        are any."""
        self.minimum_ns += charge_ns / ready_weight
        if least_rank is not None and least_rank > self.minimum_ns:
            self.minimum_ns = least_rank

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        """Advance by time that no actor was given."""
        reached_ns = self.minimum_ns + charge_ns / (ready_weight + 1)
        if least_rank is not None:
            reached_ns = min(reached_ns, least_rank + SLACK_NS)
        self.minimum_ns = max(self.minimum_ns, reached_ns)
