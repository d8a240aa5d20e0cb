"""The consumer's side of a lease: until when the consumer's messages are certainly its own.

The broker gives up a consumer that has sent no request for a lease, and then hands its messages to other consumers. The
broker counts from the moment at which it handled the consumer's last request. The consumer does not know that moment:
it lies between the request and the answer, and the answer may have been late. So the consumer counts from the moment at
which it *sent* a request that was answered. Its own end of the lease is never later than the broker's.

Where a broker has several copies, the master may be cut off from the other copies while the consumer still reaches it.
No other copy knows what the master then hands out, and the next master hands the same messages out again. So a copy
says in its answers for how long no other copy can become master. A *durable* handout (of an ordered or an at-most-once
group) is on every in-sync copy before it is answered. The next master knows of it and grants a full lease.

    durable handouts       the consumer's until `end_ns`: a lease after the last request that was answered
    other handouts         the consumer's until `sure_ns`: the same, and not after another copy may become master

While there is no connection, the broker may have restarted and forgotten handouts that are not durable. The program
keeps the messages that it holds. No message is begun before the broker has confirmed it in its answer to JOIN: with the
same epoch, or with the number of a response that is not earlier than the message's own.

`Attempts` and `RequestToken` track the session's own requests: the kind of each, and when it may be sent again.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from fairway.protocol.line import NS_PER_MS, RetryDelays
from fairway.protocol.messages import Joined
from fairway.runtime.rng import Rng

_BACKOFF_FIRST_MS = 20
_BACKOFF_MOST_MS = 5_000


class Doing(enum.Enum):
    """The kind of a request; SETTLE has a token of its own, `Settling`."""

    JOIN = "join"
    PULL = "pull"
    HEARTBEAT = "heartbeat"
    LEAVE = "leave"


class RequestToken(msgspec.Struct, frozen=True, gc=False):
    """The token of a request."""

    doing: Doing
    sent_ns: int
    life: int  # of the connection
    stumbles: int = 0  # of a PULL in strict order: how many failures there were when it was sent


class Attempts:
    """One kind of request: whether one is in flight, and the earliest time of the next."""

    __slots__ = ("_backoff", "is_in_flight", "not_before_ns")

    def __init__(self, rng: Rng) -> None:
        self._backoff = RetryDelays(rng, first_ms=_BACKOFF_FIRST_MS, most_ms=_BACKOFF_MOST_MS)
        self.is_in_flight = False
        self.not_before_ns = 0

    def may_ask(self, now_ns: int) -> bool:
        return not self.is_in_flight and now_ns >= self.not_before_ns

    def due_ns(self, wanted_ns: int | None) -> int | None:
        """When a request that is wanted at `wanted_ns` may be sent; None: not before something happens."""
        return None if self.is_in_flight or wanted_ns is None else max(wanted_ns, self.not_before_ns)

    def granted(self) -> None:
        self.is_in_flight = False
        self.not_before_ns = 0
        self._backoff.reset()

    def put_off(self, now_ns: int, retry_after_ms: int | None = None) -> None:
        self.is_in_flight = False
        self.not_before_ns = now_ns + self._backoff.next_ns(retry_after_ms)

    def abandon(self) -> None:
        """The outcome does not matter any more, or will never come."""
        self.is_in_flight = False
        self.not_before_ns = 0


NEVER_NS: Final = 1 << 63
_UNKNOWN_EPOCH: Final = 0  # of a broker that does not send an epoch
_CONFIRM_MS_MIN: Final = 250  # a master that is cut off answers with ever shorter times: ask no more often


class Lease:
    """The lease of one consumer at one broker. The line's thread writes, any thread reads."""

    __slots__ = ("_asked_ns", "_epoch", "_leads_until_ns", "_renewed_ns", "end_ns", "is_attached", "sure_ns")

    def __init__(self) -> None:
        self.end_ns = 0
        self.sure_ns = 0
        self.is_attached = False  # joined, on a connection that is not known to be lost
        self._renewed_ns: int | None = None
        self._epoch = _UNKNOWN_EPOCH
        self._asked_ns = 0  # when the latest request was sent whose answer confirmed the master
        self._leads_until_ns = NEVER_NS

    def renew(self, sent_ns: int, lease_ms: int) -> None:
        """The broker has answered a request that renews the lease and was sent at `sent_ns`."""
        self._renewed_ns = sent_ns if self._renewed_ns is None else max(self._renewed_ns, sent_ns)
        self.end_ns = self._renewed_ns + lease_ms * NS_PER_MS
        self.sure_ns = min(self.end_ns, self._leads_until_ns)

    def confirm(self, sent_ns: int, leads_ms: int | None) -> None:
        """The answer to a request sent at `sent_ns` says: no other copy becomes master for `leads_ms` after it."""
        until_ns = NEVER_NS if leads_ms is None else sent_ns + leads_ms * NS_PER_MS
        self._asked_ns = max(self._asked_ns, sent_ns)  # even if the answer is no news, or the next would be due at once
        if until_ns > self._leads_until_ns:
            self._leads_until_ns = until_ns
            self.sure_ns = min(self.end_ns, until_ns)

    def join(self, sent_ns: int, told: Joined) -> bool:
        """Take the answer to JOIN; False: the broker may have forgotten earlier handouts that are not durable."""
        is_same = told.epoch != _UNKNOWN_EPOCH and told.epoch == self._epoch
        self._epoch = told.epoch
        self._leads_until_ns = -1
        self.confirm(sent_ns, told.leads_ms)
        self.renew(sent_ns, told.lease_ms)
        self.is_attached = True
        return is_same

    def detach(self) -> None:
        """The connection is gone, or leads to a broker that is no longer master."""
        self.is_attached = False

    def end(self) -> None:
        """The consumer has left: no message is its own any more."""
        self.is_attached = False
        self.end_ns = self.sure_ns = 0

    def is_over(self, now_ns: int) -> bool:
        """Whether the broker may have given up the consumer; False if there never was a lease."""
        return self._renewed_ns is not None and now_ns >= self.end_ns

    def confirm_due_ns(self) -> int:
        """When to confirm the master, if no other request does before; never, if there is no other copy."""
        if self._leads_until_ns == NEVER_NS:
            return NEVER_NS
        half_ns = (self._leads_until_ns - self._asked_ns) // 2
        return self._asked_ns + max(half_ns, _CONFIRM_MS_MIN * NS_PER_MS)
