"""The streams of a process: under which number each of its batches is sent.

A broker stores a batch once that is sent twice under the same place in the same stream, and refuses one that comes
behind a gap. So a batch is given its place when it is written, in the same transaction; and what must not happen is
that a place is skipped, because its transaction was rolled back. Therefore a stream belongs to one transaction at a
time, from just before its commit until the outcome is known: committed, the next one goes on behind it; rolled back,
the next one takes the same place. Where the outcome is not known, or a broker has refused a batch, the stream is left
and never used again. There are as many streams as transactions that commit at the same moment: a handful.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from fairway.batch.secret import new_secret
from fairway.world.clock import Clock
from fairway.world.rng import Rng

IDLE_NS_MAX: Final = 3_600 * 1_000_000_000  # an hour: long before a broker forgets a stream


class StreamRoute(NamedTuple):
    """What the batches of one stream have in common."""

    subject: str
    is_due: bool  # delayed messages are stored elsewhere, and so have streams of their own
    group: str = ""  # of brokers, in a cluster; each knows its own streams


class OutboxStream:
    """One producer id, and places from 0 on; `secret` is what a broker is shown of it, in hexadecimal digits."""

    __slots__ = ("is_left", "next", "producer_id", "route", "secret", "used_ns")

    def __init__(self, route: StreamRoute, producer_id: int, secret: str | None = None) -> None:
        self.route = route
        self.producer_id = producer_id
        self.secret = secret
        self.next = 0
        self.used_ns = 0
        self.is_left = False  # never to be used again


class Streams:
    """Those of one process. For any number of threads: a deque gives each stream to one of them only."""

    def __init__(self, clock: Clock, rng: Rng, *, has_secrets: Callable[[], bool] = lambda: False) -> None:
        """`has_secrets`: whether rows have room for them."""
        self._clock = clock
        self._rng = rng
        self._has_secrets = has_secrets
        self._idle: dict[StreamRoute, deque[OutboxStream]] = {}

    def take(self, route: StreamRoute) -> OutboxStream:
        """A stream that nobody else has."""
        idle = self._idle.get(route)
        oldest_ns = self._clock.monotonic_ns() - IDLE_NS_MAX
        while idle:
            try:
                stream = idle.pop()  # the one that was used last: the others may rest, and be forgotten
            except IndexError:  # somebody was faster
                break
            if not stream.is_left and stream.used_ns > oldest_ns:
                return stream
        secret = new_secret(self._rng).hex() if self._has_secrets() else None
        return OutboxStream(route, self._rng.bits(63) or 1, secret)  # 63 bits: what databases call BIGINT has a sign

    def give_back(self, stream: OutboxStream, messages: int) -> None:
        """Its transaction has committed so many messages in it, or was certainly rolled back with none."""
        stream.next += messages
        stream.used_ns = self._clock.monotonic_ns()
        idle = self._idle.get(stream.route)
        if idle is None:
            idle = self._idle.setdefault(stream.route, deque())
        idle.append(stream)

    def leave(self, producer_ids: Collection[int | None]) -> None:
        """Never use these again, those of them that are here: something in them was not stored."""
        for idle in self._idle.values():
            for stream in list(idle):
                stream.is_left = stream.is_left or stream.producer_id in producer_ids
