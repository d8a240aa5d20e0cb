"""Who is next.

`VirtualTime` is the order of a fair process scheduler: the ready actor that has used the least time for its weight.
QMQ knew two others, and neither is right. By total time, one that was quiet for a day and wakes up starves all others
until it has used as much as they. By last execution, everybody gets equal turns, not equal time, and a slow reader is
no longer held back. Here a newcomer starts at the least that any ready actor has used, and a sleeper that wakes up at
most a millisecond below it: they can neither spend the time that they did not use, nor need to wait until the others
have caught up with them. The millisecond is for naps. A group of two consumers empties its mailbox with every slice,
and is away until their next requests have come: without it, each such nap would cost it what it had not yet used
(docs/adr/0005). In the long run nobody gains more than that one millisecond by it.

`Arrival` is a plain queue of requests, first come, first served, behind the same interface: for comparison.
"""

from __future__ import annotations

from typing import Protocol

from fairway.scheduling.actor import Actor

LEAD_NS_MAX = 100_000_000  # 0.1 s: so long a single charge (a disk that hangs for a minute) may hold an actor back
CREDIT_NS = 1_000_000  # 1 ms, five slices: as long as a consumer's way to its next request (bench/slices)


class Order(Protocol):
    """What the scheduler asks of an order. The least rank is next; ties go to whoever became ready first."""

    @property
    def slice_requests_max(self) -> int:
        """How many requests an actor may handle before the next is picked, if its time lasts."""

    def enter(self, actor: Actor) -> None:
        """The actor was idle, or is new, and becomes ready."""

    def rank(self, actor: Actor) -> float:
        """Its place among the ready. Asked once, when it becomes ready or has run."""

    def charge(self, actor: Actor, charge_ns: float) -> None:
        """The actor has used this much time."""

    def advance(self, least_rank: float) -> None:
        """This is now the least rank among the ready."""


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

    def rank(self, actor: Actor) -> float:
        return actor.virtual_ns

    def charge(self, actor: Actor, charge_ns: float) -> None:
        weight = actor.weight
        used_ns = actor.virtual_ns + charge_ns / weight
        if (used_ns - self.minimum_ns) * weight > self._lead_ns_max:
            used_ns = max(actor.virtual_ns, self.minimum_ns + self._lead_ns_max / weight)
        actor.virtual_ns = used_ns

    def advance(self, least_rank: float) -> None:
        self.minimum_ns = max(self.minimum_ns, least_rank)


class Arrival:
    """First come, first served, one request at a time, whoever sent it."""

    slice_requests_max = 1

    def enter(self, actor: Actor) -> None:
        pass

    def rank(self, actor: Actor) -> float:
        letter = actor.mailbox.first()
        return letter.number if letter is not None else 0

    def charge(self, actor: Actor, charge_ns: float) -> None:
        actor.virtual_ns += charge_ns / actor.weight

    def advance(self, least_rank: float) -> None:
        pass
