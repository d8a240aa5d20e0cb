"""The rate at which clients may create subjects: one token bucket for all, and a smaller one for each connection.

A client makes up a name for nothing, but a subject costs a server a place in its table and a line in every segment. So
creation has a rate. One connection gets at most half of it, so that a connection that creates subjects as fast as
possible leaves as many for all others. A service that starts up creates its subjects from the burst, at once.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

from fairway import limits
from fairway.errors import Code, Refused
from fairway.runtime.clock import Clock

_NS = 1_000_000_000


class _Bucket:
    __slots__ = ("_as_of_ns", "_most", "_per_s", "_tokens")

    def __init__(self, per_s: float, most: float, now_ns: int) -> None:
        self._per_s, self._most, self._tokens, self._as_of_ns = per_s, most, most, now_ns

    def wait_ms(self, now_ns: int) -> int:
        """The time until there is a whole token; 0: there is one."""
        come = (now_ns - self._as_of_ns) * self._per_s / _NS
        self._tokens, self._as_of_ns = min(self._tokens + come, self._most), now_ns
        return 0 if self._tokens >= 1 else math.ceil((1 - self._tokens) * 1_000 / self._per_s)

    def take(self) -> None:
        self._tokens -= 1


class CreationRate:
    """The creation rate of one server."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.monotonic_ns
        self._all = _Bucket(limits.SUBJECTS_CREATED_PER_S, limits.SUBJECTS_CREATED_BURST, self._now_ns())
        self._shares: WeakKeyDictionary[object, _Bucket] = WeakKeyDictionary()
        self.refused = 0

    def check(self, connection: object) -> None:
        """`Refused` where this connection may not create a subject now. Only `note` takes a token."""
        now_ns = self._now_ns()
        share = self._shares.get(connection)
        wait_ms = max(self._all.wait_ms(now_ns), 0 if share is None else share.wait_ms(now_ns))
        if wait_ms:
            self.refused += 1
            sentence = (
                f"subjects are made at {limits.SUBJECTS_CREATED_PER_S} a second, and a connection makes half of them: "
                "ask again"
            )
            raise Refused(Code.BUSY, sentence, retry_after_ms=wait_ms)

    def note(self, connection: object) -> None:
        """Take a token: the connection has created a subject."""
        share = self._shares.get(connection)
        if share is None:
            half = limits.SUBJECTS_CREATED_PER_S / 2, limits.SUBJECTS_CREATED_BURST / 2
            share = self._shares[connection] = _Bucket(*half, self._now_ns())
        share.take()
        self._all.take()
