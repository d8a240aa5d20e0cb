"""Sends the outbox's batches: to one broker, or to each broker group of a cluster; for threads and for asyncio.

A sender never waits for a broker, and never fails because no broker is there. The rows are in the database, and a relay
sends later what does not get through now. So the outbox has no window of batches in flight (ADR 0033): a batch that is
refused ends, and the others go on.

To one broker, a sender has a line, and another to the delay server if there is one (`_DirectLegs`). A thread drives
each line of an `OutboxSender`, the loop those of an `AioOutboxSender`.

To a cluster, a sender has a connection to each broker group (`_ClusterLegs`). A meta server tells it where subjects
are. The connections are those of a client (`client.cluster`), with one more session each. A batch goes to the group
that its row names, and nowhere else. For a row without a group, `pick` chooses a connected group that takes messages of
the subject, and `home` the group that a key of an ordered subject belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

from fairway.batch import is_delayed
from fairway.client import url as urls
from fairway.client.aio.connection import AioServerConnection
from fairway.client.cluster.client import ClusterClient
from fairway.client.core import ClientOptions, ConnectionT, Goal, meta_server
from fairway.client.sync.connection import SyncServerConnection
from fairway.client.url import BrokerAddress, ClientTarget
from fairway.lookup.routes import home
from fairway.protocol.connection_states import ConnectionOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng
from fairway.runtime.threaded_link import Link
from fairway.sql.outbox_batches import OutboxBatch, OutboxBatchSession, offer
from fairway.sql.outbox_encoding import Picker, StreamRoute

GOODBYE_S = 1.0

LINE_OPTIONS: Final = ReconnectOptions(hello=ConnectionOptions(name="fairway-outbox"))
_OPTIONS: Final = ClientOptions(line=LINE_OPTIONS)

LinkT = TypeVar("LinkT", bound=Link | LoopLink)
_link_of: Final = attrgetter("link")  # of a connection, as the link that it is


class _Leg(NamedTuple, Generic[LinkT]):
    """A connection with its session."""

    link: LinkT
    line: Line
    posting: OutboxBatchSession

    def is_quiet(self) -> bool:
        return not self.posting.unsettled


class _Legs(Generic[LinkT]):
    """The connections of a sender."""

    picker: Picker | None = None
    link: LinkT  # its changes may make `is_led` true

    @property
    def is_led(self) -> bool:
        """Whether something could be sent, or is about to be."""
        return self.is_open

    @property
    def is_open(self) -> bool:
        return any(leg.line.is_open for leg in self.all())

    def all(self) -> list[_Leg[LinkT]]:
        raise NotImplementedError

    def lines(self) -> list[Line]:
        return [leg.line for leg in self.all()]

    def sorted(self, outbox_batches: Iterable[OutboxBatch]) -> list[tuple[_Leg[LinkT], list[OutboxBatch]]]:
        """Batches by the connection they go to. Batches that no connection is known for are settled."""
        raise NotImplementedError

    def close(self) -> list[Callable[[int], Any]]:
        """Give up the unsettled batches; returns what says goodbye to each server, until a time."""
        for leg in self.all():
            with leg.link.lock:
                leg.posting.give_up("the outbox was closed")
        return self._hang_ups()

    def _hang_ups(self) -> list[Callable[[int], Any]]:
        raise NotImplementedError


class _DirectLegs(_Legs[LinkT]):
    """The connections to one broker, and to its delay server if there is one."""

    def __init__(
        self,
        target: ClientTarget,
        clock: Clock,
        rng: Rng,
        linger_s: float,
        new_link: Callable[[Line, Sequence[BrokerAddress]], LinkT],
        hang_up: Callable[[LinkT, Line, int], Any],
    ) -> None:
        def new_leg(addresses: Sequence[BrokerAddress]) -> _Leg[LinkT]:
            now_ns = clock.monotonic_ns()
            line, posting = Line(rng, LINE_OPTIONS, now_ns=now_ns), OutboxBatchSession(int(linger_s * 1e9))
            line.add(posting, now_ns)
            return _Leg(new_link(line, addresses), line, posting)

        self._direct = new_leg(target.brokers)
        self._delay = new_leg(target.delay) if target.delay else self._direct
        self._hang_up = hang_up
        self.link = self._direct.link

    def all(self) -> list[_Leg[LinkT]]:
        return list(dict.fromkeys([self._direct, self._delay]))

    def sorted(self, outbox_batches: Iterable[OutboxBatch]) -> list[tuple[_Leg[LinkT], list[OutboxBatch]]]:
        found: dict[_Leg[LinkT], list[OutboxBatch]] = {}
        for outbox_batch in outbox_batches:
            leg = self._delay if is_delayed(outbox_batch.data) else self._direct
            found.setdefault(leg, []).append(outbox_batch)
        return [*found.items()]

    def _hang_ups(self) -> list[Callable[[int], Any]]:
        return [partial(self._hang_up, leg.link, leg.line) for leg in self.all()]


class _ClusterLegs(_Legs[LinkT], Picker, Generic[LinkT, ConnectionT]):
    """The connections to all broker groups of a cluster, and the choice among them."""

    def __init__(
        self,
        addresses: tuple[BrokerAddress, ...],
        clock: Clock,
        rng: Rng,
        linger_s: float,
        new_connection: Callable[[Goal], ConnectionT],
    ) -> None:
        meta = new_connection(meta_server(addresses))
        self._cluster_client: ClusterClient[ConnectionT] = ClusterClient(meta, new_connection, clock, rng)
        self._cluster_client.on_connection = self._on_connection
        self.picker = self
        self.link = _link_of(meta)
        self._clock = clock
        self._linger_ns = int(linger_s * 1e9)
        self._legs: dict[str, _Leg[LinkT]] = {}
        self._turn = 0

    def _on_connection(self, name: str, connection: ConnectionT) -> None:
        posting = OutboxBatchSession(self._linger_ns)
        with connection.link.lock:
            connection.core.line.add(posting, self._clock.monotonic_ns())
        self._legs[name] = _Leg(_link_of(connection), connection.core.line, posting)

    def all(self) -> list[_Leg[LinkT]]:
        return [*self._legs.values()]

    def lines(self) -> list[Line]:
        return [self._cluster_client.meta.core.line, *super().lines()]

    @property
    def is_led(self) -> bool:
        return self.is_open or self._cluster_client.meta.core.line.is_open

    def sorted(self, outbox_batches: Iterable[OutboxBatch]) -> list[tuple[_Leg[LinkT], list[OutboxBatch]]]:
        found: dict[str, list[OutboxBatch]] = {}
        for outbox_batch in outbox_batches:
            if outbox_batch.group in self._legs:
                found.setdefault(outbox_batch.group, []).append(outbox_batch)
            elif outbox_batch.fate is None:
                outbox_batch.settle(
                    SendOutcome.LATER, f"no meta server has said where broker group {outbox_batch.group} is"
                )
        return [(self._legs[name], some) for name, some in found.items()]

    def close(self) -> list[Callable[[int], Any]]:
        self._cluster_client.close()
        return super().close()

    def _hang_ups(self) -> list[Callable[[int], Any]]:
        connections: list[Any] = self._cluster_client.connections
        return [each.hang_up for each in connections]

    # --- Picker ------------------------------------------------------------------------------------------------------

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        partitioner = self._cluster_client.partitioner(route.subject, is_due=route.is_due)
        names = partitioner.names
        if not partitioner.is_ordered or len(names) < 2 or (mine := key()) is None:
            return None
        return names[home(mine, names)]

    def pick(self, route: StreamRoute) -> str | None:
        names = self._cluster_client.partitioner(route.subject, is_due=route.is_due).names
        self._turn += 1
        by_turns = [names[(self._turn + step) % len(names)] for step in range(len(names))]
        return next((name for name in by_turns if name in self._legs and self._legs[name].line.is_open), None)

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        partitioner = self._cluster_client.partitioner(route.subject, is_due=route.is_due)
        return (
            bool(partitioner.connections) and group not in self._legs
        )  # a cluster without known groups may be about to learn them


class _Sender(Generic[LinkT]):
    """What all senders have in common: the connections, and the clock of the waits."""

    def __init__(self, legs: _Legs[LinkT], clock: Clock) -> None:
        self._legs = legs
        self._clock = clock

    @property
    def picker(self) -> Picker | None:
        """In a cluster: chooses broker groups for messages."""
        return self._legs.picker

    @property
    def is_open(self) -> bool:
        """Whether anything could be sent now."""
        return self._legs.is_open

    @property
    def trouble(self) -> str | None:
        """Why something cannot be sent now."""
        return next((line.trouble for line in self._legs.lines() if line.trouble), None)

    def _end_ns(self, timeout_s: float) -> int:
        return self._clock.monotonic_ns() + int(timeout_s * 1e9)

    def _left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9


class OutboxSender(_Sender[Link]):
    """A sender for threads, to one broker or to a cluster."""

    def __init__(self, url: str, clock: Clock, rng: Rng, at_exit: Callable[[], None], *, linger_s: float = 0.0) -> None:
        def new_link(line: Line, addresses: Sequence[BrokerAddress]) -> Link:
            return Link(line, addresses, clock, at_exit=at_exit)

        def new_connection(goal: Goal) -> SyncServerConnection:
            return SyncServerConnection(goal, _OPTIONS, clock, rng, lambda line, goal: new_link(line, goal.addresses))

        target = urls.parse_any(url)
        if target.meta:
            super().__init__(_ClusterLegs(target.meta, clock, rng, linger_s, new_connection), clock)
        else:
            legs = _DirectLegs(target, clock, rng, linger_s, new_link, self._hang_up)
            super().__init__(legs, clock)
            for leg in legs.all():
                leg.link.start()

    def put(self, outbox_batches: Sequence[OutboxBatch]) -> None:
        """Send these batches. Batches without room are settled at once."""
        for leg, mine in self._legs.sorted(outbox_batches):
            with leg.link.lock:
                for outbox_batch in mine:
                    offer(outbox_batch, leg.posting, leg.line)
                is_due = leg.posting.is_due(self._clock.monotonic_ns())  # else the reader knows when they will leave
            if is_due:
                leg.link.pump()

    def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        """Wait until all of them are settled; False: some are not in time."""
        end_ns = self._end_ns(timeout_s)
        for leg, mine in self._legs.sorted(outbox_batches):
            leg.link.wait(partial(_are_settled, mine), self._left_s(end_ns))
        return _are_settled(outbox_batches)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until all batches that were put are settled; False: some are not in time."""
        end_ns = self._end_ns(timeout_s)
        return all(leg.link.wait(leg.is_quiet, self._left_s(end_ns)) for leg in self._legs.all())

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until something could be sent, or a meta server answers; False: not in time."""
        return self._legs.link.wait(lambda: self._legs.is_led, timeout_s)

    def close(self) -> None:
        """Give up the unsettled batches, and end."""
        if not self._legs.link.is_orphan:
            end_ns = self._end_ns(GOODBYE_S)
            for hang_up in self._legs.close():
                hang_up(end_ns)

    def _hang_up(self, link: Link, line: Line, end_ns: int) -> None:
        with link.lock:
            line.close(self._clock.monotonic_ns())
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, self._left_s(end_ns))
        link.close(GOODBYE_S)


class AioOutboxSender(_Sender[LoopLink]):
    """A sender for asyncio; the methods are those of `OutboxSender`. Make it on the loop."""

    def __init__(self, url: str, clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0) -> None:
        def new_link(line: Line, addresses: Sequence[BrokerAddress]) -> LoopLink:
            return LoopLink(line, addresses, net, clock)

        def new_connection(goal: Goal) -> AioServerConnection:
            return AioServerConnection(goal, _OPTIONS, net, clock, rng)

        target = urls.parse_any(url)
        if target.meta:
            super().__init__(_ClusterLegs(target.meta, clock, rng, linger_s, new_connection), clock)
        else:
            super().__init__(_DirectLegs(target, clock, rng, linger_s, new_link, self._hang_up), clock)

    def put(self, outbox_batches: Sequence[OutboxBatch]) -> None:
        for leg, mine in self._legs.sorted(outbox_batches):
            for outbox_batch in mine:
                offer(outbox_batch, leg.posting, leg.line)
            leg.link.stir()

    async def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._end_ns(timeout_s)
        for leg, mine in self._legs.sorted(outbox_batches):
            await leg.link.wait(partial(_are_settled, mine), self._left_s(end_ns))
        return _are_settled(outbox_batches)

    async def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._end_ns(timeout_s)
        return all([await leg.link.wait(leg.is_quiet, self._left_s(end_ns)) for leg in self._legs.all()])

    async def wait_open(self, timeout_s: float) -> bool:
        return await self._legs.link.wait(lambda: self._legs.is_led, timeout_s)

    async def close(self) -> None:
        end_ns = self._end_ns(GOODBYE_S)
        for hang_up in self._legs.close():
            await hang_up(end_ns)
        await asyncio.sleep(0)  # lets the loop close connections that were cut

    async def _hang_up(self, link: LoopLink, _line: Line, end_ns: int) -> None:
        await link.close(self._left_s(end_ns))


def _are_settled(outbox_batches: Sequence[OutboxBatch]) -> bool:
    return all(outbox_batch.fate is not None for outbox_batch in outbox_batches)
