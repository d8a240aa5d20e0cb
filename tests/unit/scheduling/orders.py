"""QMQ's two orders and a plain queue, which are wrong: the fairness tests must tell them from the right one."""

from __future__ import annotations

from itertools import count

from fairway.scheduling import Account, Actor, VirtualTime
from fairway.scheduling.actor import MailboxItem


class TotalTime(VirtualTime):
    """Least time ever used first: one that was quiet starves all others when it wakes up."""

    slice_requests_max = 1 << 62

    def place(self, item: MailboxItem) -> None:
        item.is_placed = True

    def settle(self, item: MailboxItem, charge_ns: float) -> None:
        pass

    def charge_account(self, account: Account, charge_ns: float) -> None:
        pass

    def is_ahead(self, account: Account) -> bool:
        return False

    def enter(self, actor: Actor) -> None:
        pass

    def rank(self, actor: Actor) -> float:
        return actor.virtual_ns

    def charge(self, actor: Actor, charge_ns: float) -> None:
        actor.virtual_ns += charge_ns / actor.weight

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass


class LastExecution(TotalTime):
    """Longest not run first: equal turns, not equal time."""

    def __init__(self) -> None:
        self._turns = count(1)

    def rank(self, actor: Actor) -> float:
        return next(self._turns)


class Arrival(VirtualTime):
    """First come, first served, one request at a time, from any connection."""

    slice_requests_max = 1

    def enter(self, actor: Actor) -> None:
        pass

    def place(self, item: MailboxItem) -> None:
        item.is_placed = True
        item.start_ns = item.number

    def rank(self, actor: Actor) -> float:
        item = actor.mailbox.first()
        return item.number if item is not None else 0

    def charge(self, actor: Actor, charge_ns: float) -> None:
        actor.virtual_ns += charge_ns / actor.weight

    def settle(self, item: MailboxItem, charge_ns: float) -> None:
        pass

    def charge_account(self, account: Account, charge_ns: float) -> None:
        pass

    def is_ahead(self, account: Account) -> bool:
        return False

    def advance(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass

    def advance_beside(self, charge_ns: float, ready_weight: float, least_rank: float | None) -> None:
        pass
