"""A post in a cluster: a way to each group of brokers, and a meta server that says where subjects are.

The ways are those of a client (`client.fleet`), with one session more on each: parcels go to the group that their row
names, and nowhere else. Where a row has none yet, `pick` chooses: a group that takes messages of the subject and is
connected; for a key of an ordered subject, the one that it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple

from fairway.client.aio_way import AioServerConnection
from fairway.client.core import ClientOptions, Goal, meta_server
from fairway.client.fleet import ClusterClient
from fairway.client.sync_way import SyncServerConnection
from fairway.client.url import BrokerAddress
from fairway.client.ways import WayT
from fairway.lookup.homes import home
from fairway.protocol.handshake import ConnectionOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.sql.posting import OutboxBatch, OutboxBatchSession, SendOutcome, offer
from fairway.sql.streams import StreamRoute
from fairway.world.clock import Clock
from fairway.world.link import Link
from fairway.world.net import Net
from fairway.world.rng import Rng

LINE_OPTIONS: Final = ReconnectOptions(hello=ConnectionOptions(name="fairway-outbox"))
_OPTIONS: Final = ClientOptions(line=LINE_OPTIONS)
GOODBYE_S: Final = 1.0


class _Leg(NamedTuple, Generic[WayT]):
    """What goes to one group."""

    way: WayT
    posting: OutboxBatchSession


class Legs(Generic[WayT]):
    """All of them; the same for threads and for loops."""

    def __init__(self, meta: WayT, new_way: Callable[[Goal], WayT], clock: Clock, rng: Rng, linger_s: float) -> None:
        self.fleet: ClusterClient[WayT] = ClusterClient(meta, new_way, clock, rng)
        self.fleet.on_way = self._on_way
        self._clock = clock
        self._linger_ns = int(linger_s * 1e9)
        self._legs: dict[str, _Leg[WayT]] = {}
        self._turn = 0

    def _on_way(self, name: str, way: WayT) -> None:
        posting = OutboxBatchSession(self._linger_ns)
        with way.link.lock:
            way.core.line.add(posting, self._clock.monotonic_ns())
        self._legs[name] = _Leg(way, posting)

    def all(self) -> list[_Leg[WayT]]:
        return [*self._legs.values()]

    @property
    def is_open(self) -> bool:
        return any(leg.way.core.line.is_open for leg in self.all())

    @property
    def is_led(self) -> bool:
        """Whether anything could be sent, or its way be found out."""
        return self.is_open or self.fleet.meta.core.line.is_open

    @property
    def trouble(self) -> str | None:
        ways = [self.fleet.meta, *(leg.way for leg in self.all())]
        return next((way.core.line.trouble for way in ways if way.core.line.trouble), None)

    # --- Picker ------------------------------------------------------------------------------------------------------

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        spot = self.fleet.spot(route.subject, is_due=route.is_due)
        names = spot.names
        if not spot.is_ordered or len(names) < 2 or (mine := key()) is None:
            return None
        return names[home(mine, names)]

    def pick(self, route: StreamRoute) -> str | None:
        names = self.fleet.spot(route.subject, is_due=route.is_due).names
        self._turn += 1
        by_turns = [names[(self._turn + step) % len(names)] for step in range(len(names))]
        return next((name for name in by_turns if self._takes(name)), None)

    def _takes(self, name: str) -> bool:
        leg = self._legs.get(name)
        return leg is not None and leg.way.core.line.is_open

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        spot = self.fleet.spot(route.subject, is_due=route.is_due)
        return bool(spot.ways) and group not in self._legs  # a cluster that knows no place may be about to learn them

    # --- parcels -----------------------------------------------------------------------------------------------------

    def sorted(self, parcels: Sequence[OutboxBatch]) -> list[tuple[_Leg[WayT], list[OutboxBatch]]]:
        """By where they go. Those that no way is known for are settled."""
        found: dict[str, list[OutboxBatch]] = {}
        for parcel in parcels:
            if parcel.group in self._legs:
                found.setdefault(parcel.group, []).append(parcel)
            elif parcel.fate is None:
                parcel.settle(SendOutcome.LATER, f"no meta server has said where broker group {parcel.group} is")
        return [(self._legs[name], some) for name, some in found.items()]


class ClusterOutboxSender:
    """For threads."""

    def __init__(
        self,
        addresses: tuple[BrokerAddress, ...],
        clock: Clock,
        rng: Rng,
        at_exit: Callable[[], None],
        *,
        linger_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._at_exit = at_exit
        self._legs = Legs(self._new_way(meta_server(addresses)), self._new_way, clock, rng, linger_s)
        self._meta = self._legs.fleet.meta
        self.picker = self._legs

    def _new_way(self, goal: Goal) -> SyncServerConnection:
        return SyncServerConnection(goal, _OPTIONS, self._clock, self._rng, self._new_link)

    def _new_link(self, line: Line, goal: Goal) -> Link:
        return Link(line, goal.addresses, self._clock, at_exit=self._at_exit)

    @property
    def is_open(self) -> bool:
        return self._legs.is_open

    @property
    def trouble(self) -> str | None:
        return self._legs.trouble

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for (way, posting), mine in self._legs.sorted([parcel for parcel, _ in parcels]):
            link = way.link
            with link.lock:
                for parcel in mine:
                    offer(parcel, posting, way.core.line)
                is_due = posting.is_due(self._clock.monotonic_ns())
            if is_due:
                link.pump()

    def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for (way, _), mine in self._legs.sorted(parcels):
            way.link.wait(partial(_are_settled, mine), way.left_s(end_ns))
        return _are_settled(parcels)

    def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        return all(way.link.wait(partial(_is_quiet, posting), way.left_s(end_ns)) for way, posting in self._legs.all())

    def wait_open(self, timeout_s: float) -> bool:
        return self._meta.link.wait(lambda: self._legs.is_led, timeout_s)

    def close(self) -> None:
        if self._meta.link.is_orphan:
            return
        self._legs.fleet.close()
        for way, posting in self._legs.all():
            with way.link.lock:
                posting.give_up("the outbox was closed")
        end_ns = self._clock.monotonic_ns() + int(GOODBYE_S * 1e9)
        for each in self._legs.fleet.ways:
            each.hang_up(end_ns)


class AioClusterOutboxSender:
    """The same on a loop; to be made there."""

    def __init__(
        self, addresses: tuple[BrokerAddress, ...], clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0
    ) -> None:
        self._clock = clock
        new_way = partial(_new_aio_way, net, clock, rng)
        self._legs = Legs(new_way(meta_server(addresses)), new_way, clock, rng, linger_s)
        self._meta = self._legs.fleet.meta
        self.picker = self._legs

    @property
    def is_open(self) -> bool:
        return self._legs.is_open

    @property
    def trouble(self) -> str | None:
        return self._legs.trouble

    def put(self, parcels: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for (way, posting), mine in self._legs.sorted([parcel for parcel, _ in parcels]):
            for parcel in mine:
                offer(parcel, posting, way.core.line)
            way.link.stir()

    async def wait(self, parcels: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for (way, _), mine in self._legs.sorted(parcels):
            await way.link.wait(partial(_are_settled, mine), way.left_s(end_ns))
        return _are_settled(parcels)

    async def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        waits = [(way, partial(_is_quiet, posting)) for way, posting in self._legs.all()]
        return all([await way.link.wait(is_quiet, way.left_s(end_ns)) for way, is_quiet in waits])

    async def wait_open(self, timeout_s: float) -> bool:
        return await self._meta.link.wait(lambda: self._legs.is_led, timeout_s)

    async def close(self) -> None:
        self._legs.fleet.close()
        for _, posting in self._legs.all():
            posting.give_up("the outbox was closed")
        end_ns = self._clock.monotonic_ns() + int(GOODBYE_S * 1e9)
        for each in self._legs.fleet.ways:
            await each.hang_up(end_ns)
        await asyncio.sleep(0)  # for the loop to close what was cut


def _new_aio_way(net: Net, clock: Clock, rng: Rng, goal: Goal) -> AioServerConnection:
    return AioServerConnection(goal, _OPTIONS, net, clock, rng)


def _are_settled(parcels: Sequence[OutboxBatch]) -> bool:
    return all(parcel.fate is not None for parcel in parcels)


def _is_quiet(posting: OutboxBatchSession) -> bool:
    return not posting.unsettled
