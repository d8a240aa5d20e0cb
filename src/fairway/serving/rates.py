"""Rates: a token bucket, and the rate at which clients may create subjects.

`CreationRate` has one bucket for all connections, and a smaller one for each. A client makes up a name for nothing, but
a subject costs a server a place in its table and a line in every segment. So creation has a rate. One connection gets
at most half of it, so that a connection that creates subjects as fast as possible leaves as many for all others. A
service that starts up creates its subjects from the burst, at once.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

from fairway import limits
from fairway.errors import Code, Refused
from fairway.runtime.clock import Clock

_NS = 1_000_000_000
_MS_NS = 1_000_000


class TokenBucket:
    """`rate_per_s` tokens a second arrive, and the bucket keeps `most` of them."""

    def __init__(self, rate_per_s: float, most: float, now_ns: int, *, is_full: bool = True) -> None:
        self.rate_per_s = rate_per_s
        self.most = most
        self._tokens = most if is_full else 0.0
        self._as_of_ns = now_ns
        self.alarm_ns = 0  # when the timer for the next token fires, if its owner has set one

    def tokens(self, now_ns: int) -> int:
        """The number of whole tokens in the bucket."""
        come = (now_ns - self._as_of_ns) * self.rate_per_s / _NS
        self._tokens = min(self._tokens + come, max(self.most, self._tokens))
        self._as_of_ns = now_ns
        return int(self._tokens + 1e-9)

    def take(self, count: int = 1) -> None:
        self._tokens -= count

    def wait_ns(self) -> int:
        """The time until the next whole token, counted from the last call of `tokens`."""
        return max(round((1 - self._tokens) * _NS / self.rate_per_s), 0)


class CreationRate:
    """The creation rate of one server."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.monotonic_ns
        self._all = TokenBucket(limits.SUBJECTS_CREATED_PER_S, limits.SUBJECTS_CREATED_BURST, self._now_ns())
        self._shares: WeakKeyDictionary[object, TokenBucket] = WeakKeyDictionary()
        self.refused = 0

    def check(self, connection: object) -> None:
        """`Refused` where this connection may not create a subject now. Only `note` takes a token."""
        now_ns = self._now_ns()
        buckets = (self._all, self._shares.get(connection, self._all))
        wait_ns = max(0 if each.tokens(now_ns) >= 1 else each.wait_ns() for each in buckets)
        if wait_ns:
            self.refused += 1
            sentence = (
                f"subjects are made at {limits.SUBJECTS_CREATED_PER_S} a second, and a connection makes half of them: "
                "ask again"
            )
            raise Refused(Code.BUSY, sentence, retry_after_ms=math.ceil(wait_ns / _MS_NS))

    def note(self, connection: object) -> None:
        """Take a token: the connection has created a subject."""
        share = self._shares.get(connection)
        if share is None:
            half = limits.SUBJECTS_CREATED_PER_S / 2, limits.SUBJECTS_CREATED_BURST / 2
            share = self._shares[connection] = TokenBucket(*half, self._now_ns())
        share.take()
        self._all.take()
