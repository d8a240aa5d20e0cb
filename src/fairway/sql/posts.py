"""Where parcels are given in: a line to the broker and one to the delay server, driven by a thread or by a loop.

A post never waits for a broker and never fails for want of one: rows are in the database, and what does not get through
today is sent another day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from fairway.client import url as urls
from fairway.client.url import BrokerAddress, ClientTarget
from fairway.protocol.line import Line
from fairway.sql.fleet_posts import LINE_OPTIONS, AioClusterOutboxSender, ClusterOutboxSender
from fairway.sql.letters import Picker
from fairway.sql.posting import OutboxBatch, OutboxBatchSession, offer
from fairway.world.clock import Clock
from fairway.world.link import Link
from fairway.world.loop_link import LoopLink
from fairway.world.net import Net
from fairway.world.rng import Rng

GOODBYE_S = 1.0


class AnyOutboxSender(Protocol):
    """For threads: to one broker, or to a cluster."""

    @property
    def picker(self) -> Picker | None:
        """In a cluster: who knows where messages go."""

    @property
    def is_open(self) -> bool:
        """Whether anything could be sent now."""

    @property
    def trouble(self) -> str | None:
        """Why something cannot be sent now."""

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None:
        """Send these, each with whether it is due later. Those that cannot be taken are settled at once."""

    def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool:
        """Whether all of them are settled by then."""

    def wait_quiet(self, timeout_s: float) -> bool:
        """Whether everything that was given in is settled by then."""

    def wait_open(self, timeout_s: float) -> bool:
        """Whether anything could be sent by then, or its way be found out."""

    def close(self) -> None:
        """Give up what is not settled, and end."""


class AnyAioOutboxSender(Protocol):
    """The same on a loop."""

    @property
    def picker(self) -> Picker | None: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def trouble(self) -> str | None: ...

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None: ...

    async def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool: ...

    async def wait_quiet(self, timeout_s: float) -> bool: ...

    async def wait_open(self, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...


def post_to(url: str, clock: Clock, rng: Rng, at_exit: Callable[[], None], *, linger_s: float = 0.0) -> AnyOutboxSender:
    """As the URL says."""
    target = urls.parse_any(url)
    if target.meta:
        return ClusterOutboxSender(target.meta, clock, rng, at_exit, linger_s=linger_s)
    return OutboxSender(target, clock, rng, at_exit, linger_s=linger_s)


def aio_post_to(url: str, clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0) -> AnyAioOutboxSender:
    """The same on the loop that is running."""
    target = urls.parse_any(url)
    if target.meta:
        return AioClusterOutboxSender(target.meta, clock, rng, net, linger_s=linger_s)
    return AioOutboxSender(target, clock, rng, net, linger_s=linger_s)


class _Lane:
    """A line with its session."""

    def __init__(self, addresses: Sequence[BrokerAddress], clock: Clock, rng: Rng, linger_s: float) -> None:
        self.addresses = addresses
        self.line = Line(rng, LINE_OPTIONS, now_ns=clock.monotonic_ns())
        self.posting = OutboxBatchSession(int(linger_s * 1e9))
        self.line.add(self.posting, clock.monotonic_ns())


class OutboxSender:
    """For threads, to one broker."""

    picker: Picker | None = None

    def __init__(
        self, target: ClientTarget, clock: Clock, rng: Rng, at_exit: Callable[[], None], *, linger_s: float = 0.0
    ) -> None:
        self._clock = clock
        new_way = partial(self._new_way, rng, at_exit, linger_s)
        self._direct = new_way(target.brokers)
        self._delay = new_way(target.delay) if target.delay else self._direct
        self._ways = list(dict.fromkeys([self._direct, self._delay]))

    def _new_way(
        self, rng: Rng, at_exit: Callable[[], None], linger_s: float, addresses: Sequence[BrokerAddress]
    ) -> _ThreadWay:
        return _ThreadWay(_Lane(addresses, self._clock, rng, linger_s), self._clock, at_exit)

    @property
    def is_open(self) -> bool:
        return any(way.lane.line.is_open for way in self._ways)

    @property
    def trouble(self) -> str | None:
        return next((way.lane.line.trouble for way in self._ways if way.lane.line.trouble), None)

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None:
        if self._delay is self._direct:
            self._direct.put([parcel for parcel, _ in parcels])
            return
        for way in self._ways:
            mine = [parcel for parcel, is_due in parcels if (self._delay if is_due else self._direct) is way]
            if mine:
                way.put(mine)

    def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for way in self._ways:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            way.link.wait(lambda: all(parcel.fate is not None for parcel in parcels), left_s)
        return all(parcel.fate is not None for parcel in parcels)

    def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        return all(way.wait_quiet(max(end_ns - self._clock.monotonic_ns(), 0) / 1e9) for way in self._ways)

    def wait_open(self, timeout_s: float) -> bool:
        return self._direct.link.wait(lambda: self.is_open, timeout_s)

    def close(self) -> None:
        for way in self._ways:
            way.close()


class _ThreadWay:
    def __init__(self, lane: _Lane, clock: Clock, at_exit: Callable[[], None]) -> None:
        self.lane = lane
        self._clock = clock
        self.link = Link(lane.line, lane.addresses, clock, at_exit=at_exit)
        self.link.start()

    def put(self, parcels: Sequence[OutboxBatch]) -> None:
        link, lane = self.link, self.lane
        with link.lock:
            for parcel in parcels:
                offer(parcel, lane.posting, lane.line)
            is_due = lane.posting.is_due(self._clock.monotonic_ns())  # else the reader knows when they will leave
        if is_due:
            link.pump()

    def wait_quiet(self, timeout_s: float) -> bool:
        return self.link.wait(lambda: not self.lane.posting.unsettled, timeout_s)

    def close(self) -> None:
        link, line = self.link, self.lane.line
        if link.is_orphan:
            return
        with link.lock:
            self.lane.posting.give_up("the outbox was closed")
            line.close(self._clock.monotonic_ns())
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, GOODBYE_S)
        link.close(GOODBYE_S)


class AioOutboxSender:
    """The same on a loop; to be made there."""

    picker: Picker | None = None

    def __init__(self, target: ClientTarget, clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0) -> None:
        self._clock = clock
        self._direct = _LoopWay(_Lane(target.brokers, clock, rng, linger_s), clock, net)
        self._delay = _LoopWay(_Lane(target.delay, clock, rng, linger_s), clock, net) if target.delay else self._direct
        self._ways = list(dict.fromkeys([self._direct, self._delay]))

    @property
    def is_open(self) -> bool:
        return any(way.lane.line.is_open for way in self._ways)

    @property
    def trouble(self) -> str | None:
        return next((way.lane.line.trouble for way in self._ways if way.lane.line.trouble), None)

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for parcel, is_due in parcels:
            way = self._delay if is_due else self._direct
            offer(parcel, way.lane.posting, way.lane.line)
            way.link.stir()

    async def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for way in self._ways:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            await way.link.wait(lambda: all(parcel.fate is not None for parcel in parcels), left_s)
        return all(parcel.fate is not None for parcel in parcels)

    async def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        quiet = True
        for way in self._ways:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            quiet = await way.link.wait(partial(way.is_quiet), left_s) and quiet
        return quiet

    async def wait_open(self, timeout_s: float) -> bool:
        return await self._direct.link.wait(lambda: self.is_open, timeout_s)

    async def close(self) -> None:
        for way in self._ways:
            way.lane.posting.give_up("the outbox was closed")
            await way.link.close(GOODBYE_S)
        await asyncio.sleep(0)  # for the loop to close what was cut


class _LoopWay:
    def __init__(self, lane: _Lane, clock: Clock, net: Net) -> None:
        self.lane = lane
        self.link = LoopLink(lane.line, lane.addresses, net, clock)

    def is_quiet(self) -> bool:
        return not self.lane.posting.unsettled
