"""Until when a consumer's messages are certainly its own, as far as the consumer can know.

The broker takes a consumer for dead when it has heard nothing from it for a lease, and then hands its messages to
others. The broker counts from the moment at which it handled the consumer's last request. The consumer does not know
that moment: it lies somewhere between the request and the answer, and the answer may have been on its way for long. So
the consumer counts from the moment at which it *sent* a request that was answered. Its own end of the lease is never
later than the broker's.

Where a broker is one copy of several, the copy that leads may be cut off from the others while the consumer still
reaches it. What it hands out then, nobody else knows of, and the next master hands it out again. So a copy says with
its answers for how long no other copy can lead. A *durable* handout (of an ordered or an at-most-once group) is on
every copy before it is answered: the next master knows of it and grants a full lease.

    durable handouts       theirs until `end_ns`: a lease after the last request that was answered
    others                 theirs until `sure_ns`: the same, and not after another copy may lead

While there is no connection, the broker may have restarted and forgotten handouts that are not durable. Those that are
held stay with the program; none of them is begun before the broker has confirmed it by its answer to JOIN: with the
same epoch, or with the number of a response that is not earlier than the one they came in.
"""

from __future__ import annotations

from typing import Final

from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.messages import Joined

NEVER_NS: Final = 1 << 63
_UNKNOWN_EPOCH: Final = 0  # of a broker that does not tell
_CONFIRM_MS_MIN: Final = 250  # a master that is cut off is certain for ever shorter times: ask it no more often


class Lease:
    """Of one consumer at one broker. Written by the line's thread, read by any."""

    __slots__ = ("_asked_ns", "_epoch", "_leads_until_ns", "_renewed_ns", "end_ns", "is_attached", "sure_ns")

    def __init__(self) -> None:
        self.end_ns = 0
        self.sure_ns = 0
        self.is_attached = False  # joined, on a connection that is not known to be lost
        self._renewed_ns: int | None = None
        self._epoch = _UNKNOWN_EPOCH
        self._asked_ns = 0  # the latest request whose answer said who leads
        self._leads_until_ns = NEVER_NS

    def renew(self, sent_ns: int, lease_ms: int) -> None:
        """A request that renews the lease was sent then, and has been answered."""
        self._renewed_ns = sent_ns if self._renewed_ns is None else max(self._renewed_ns, sent_ns)
        self.end_ns = self._renewed_ns + lease_ms * NS_PER_MS
        self.sure_ns = min(self.end_ns, self._leads_until_ns)

    def confirm(self, sent_ns: int, leads_ms: int | None) -> None:
        """The answer to a request that was sent then says: no other copy leads for so long after the request."""
        until_ns = NEVER_NS if leads_ms is None else sent_ns + leads_ms * NS_PER_MS
        self._asked_ns = max(self._asked_ns, sent_ns)  # also where the answer is no news: else it is due again at once
        if until_ns > self._leads_until_ns:
            self._leads_until_ns = until_ns
            self.sure_ns = min(self.end_ns, until_ns)

    def join(self, sent_ns: int, told: Joined) -> bool:
        """The answer to JOIN; False: handouts from before that are not durable may be forgotten by now."""
        is_same = told.epoch != _UNKNOWN_EPOCH and told.epoch == self._epoch
        self._epoch = told.epoch
        self._leads_until_ns = -1
        self.confirm(sent_ns, told.leads_ms)
        self.renew(sent_ns, told.lease_ms)
        self.is_attached = True
        return is_same

    def detach(self) -> None:
        """The connection is gone, or leads to a broker that does not lead any more."""
        self.is_attached = False

    def end(self) -> None:
        """The consumer has left: nothing is its own any more."""
        self.is_attached = False
        self.end_ns = self.sure_ns = 0

    def is_over(self, now_ns: int) -> bool:
        """Whether the broker may have given up the consumer; not where there never was a lease."""
        return self._renewed_ns is not None and now_ns >= self.end_ns

    def confirm_due_ns(self) -> int:
        """When to ask who leads, if nothing else was asked before; never, where nobody else can."""
        if self._leads_until_ns == NEVER_NS:
            return NEVER_NS
        half_ns = (self._leads_until_ns - self._asked_ns) // 2
        return self._asked_ns + max(half_ns, _CONFIRM_MS_MIN * NS_PER_MS)
