"""Sends the outbox's batches: to one broker, or to each broker group of a cluster; for threads and for asyncio.

A sender never waits for a broker, and never fails because no broker is there. The rows are in the database, and a relay
sends later what does not get through now.

`OutboxSender` has a line to the broker, and another to the delay server if there is one; a thread drives each.
`AioOutboxSender` does the same on a loop.

`ClusterOutboxSender` and `AioClusterOutboxSender` have a connection to each broker group. A meta server tells them
where subjects are. The connections are those of a client (`client.cluster`), with one more session each. A batch goes
to the group that its row names, and nowhere else. For a row without a group, `pick` chooses a connected group that
takes messages of the subject, and `home` the group that a key of an ordered subject belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol

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


class AnyOutboxSender(Protocol):
    """A sender for threads, to one broker or to a cluster."""

    @property
    def picker(self) -> Picker | None:
        """In a cluster: chooses broker groups for messages."""

    @property
    def is_open(self) -> bool:
        """Whether anything could be sent now."""

    @property
    def trouble(self) -> str | None:
        """Why something cannot be sent now."""

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None:
        """Send these batches, each with whether it is delayed. Batches without room are settled at once."""

    def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        """Wait until all of them are settled; False: some are not in time."""

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until all batches that were put are settled; False: some are not in time."""

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until something could be sent, or a meta server answers; False: not in time."""

    def close(self) -> None:
        """Give up the unsettled batches, and end."""


class AnyAioOutboxSender(Protocol):
    """A sender for asyncio; the methods are those of `AnyOutboxSender`."""

    @property
    def picker(self) -> Picker | None: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def trouble(self) -> str | None: ...

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None: ...

    async def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool: ...

    async def wait_quiet(self, timeout_s: float) -> bool: ...

    async def wait_open(self, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...


def sender_to(
    url: str, clock: Clock, rng: Rng, at_exit: Callable[[], None], *, linger_s: float = 0.0
) -> AnyOutboxSender:
    """The sender for the URL: to one broker, or to a cluster."""
    target = urls.parse_any(url)
    if target.meta:
        return ClusterOutboxSender(target.meta, clock, rng, at_exit, linger_s=linger_s)
    return OutboxSender(target, clock, rng, at_exit, linger_s=linger_s)


def aio_sender_to(url: str, clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0) -> AnyAioOutboxSender:
    """`outbox_sender_to` for the running loop."""
    target = urls.parse_any(url)
    if target.meta:
        return AioClusterOutboxSender(target.meta, clock, rng, net, linger_s=linger_s)
    return AioOutboxSender(target, clock, rng, net, linger_s=linger_s)


class _SenderStream:
    """A line with its session."""

    def __init__(self, addresses: Sequence[BrokerAddress], clock: Clock, rng: Rng, linger_s: float) -> None:
        self.addresses = addresses
        self.line = Line(rng, LINE_OPTIONS, now_ns=clock.monotonic_ns())
        self.posting = OutboxBatchSession(int(linger_s * 1e9))
        self.line.add(self.posting, clock.monotonic_ns())


class OutboxSender:
    """A sender for threads, to one broker."""

    picker: Picker | None = None

    def __init__(
        self, target: ClientTarget, clock: Clock, rng: Rng, at_exit: Callable[[], None], *, linger_s: float = 0.0
    ) -> None:
        self._clock = clock
        new_connection = partial(self._new_connection, rng, at_exit, linger_s)
        self._direct = new_connection(target.brokers)
        self._delay = new_connection(target.delay) if target.delay else self._direct
        self._connections = list(dict.fromkeys([self._direct, self._delay]))

    def _new_connection(
        self, rng: Rng, at_exit: Callable[[], None], linger_s: float, addresses: Sequence[BrokerAddress]
    ) -> _ThreadConnection:
        return _ThreadConnection(_SenderStream(addresses, self._clock, rng, linger_s), self._clock, at_exit)

    @property
    def is_open(self) -> bool:
        return any(connection.stream.line.is_open for connection in self._connections)

    @property
    def trouble(self) -> str | None:
        return next(
            (connection.stream.line.trouble for connection in self._connections if connection.stream.line.trouble), None
        )

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None:
        if self._delay is self._direct:
            self._direct.put([outbox_batch for outbox_batch, _ in outbox_batches])
            return
        for connection in self._connections:
            mine = [
                outbox_batch
                for outbox_batch, is_due in outbox_batches
                if (self._delay if is_due else self._direct) is connection
            ]
            if mine:
                connection.put(mine)

    def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for connection in self._connections:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            connection.link.wait(lambda: all(outbox_batch.fate is not None for outbox_batch in outbox_batches), left_s)
        return all(outbox_batch.fate is not None for outbox_batch in outbox_batches)

    def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        return all(
            connection.wait_quiet(max(end_ns - self._clock.monotonic_ns(), 0) / 1e9) for connection in self._connections
        )

    def wait_open(self, timeout_s: float) -> bool:
        return self._direct.link.wait(lambda: self.is_open, timeout_s)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _ThreadConnection:
    def __init__(self, stream: _SenderStream, clock: Clock, at_exit: Callable[[], None]) -> None:
        self.stream = stream
        self._clock = clock
        self.link = Link(stream.line, stream.addresses, clock, at_exit=at_exit)
        self.link.start()

    def put(self, outbox_batches: Sequence[OutboxBatch]) -> None:
        link, stream = self.link, self.stream
        with link.lock:
            for outbox_batch in outbox_batches:
                offer(outbox_batch, stream.posting, stream.line)
            is_due = stream.posting.is_due(self._clock.monotonic_ns())  # else the reader knows when they will leave
        if is_due:
            link.pump()

    def wait_quiet(self, timeout_s: float) -> bool:
        return self.link.wait(lambda: not self.stream.posting.unsettled, timeout_s)

    def close(self) -> None:
        link, line = self.link, self.stream.line
        if link.is_orphan:
            return
        with link.lock:
            self.stream.posting.give_up("the outbox was closed")
            line.close(self._clock.monotonic_ns())
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, GOODBYE_S)
        link.close(GOODBYE_S)


class AioOutboxSender:
    """A sender for asyncio, to one broker. Make it on the loop."""

    picker: Picker | None = None

    def __init__(self, target: ClientTarget, clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0) -> None:
        self._clock = clock
        self._direct = _LoopConnection(_SenderStream(target.brokers, clock, rng, linger_s), clock, net)
        self._delay = (
            _LoopConnection(_SenderStream(target.delay, clock, rng, linger_s), clock, net)
            if target.delay
            else self._direct
        )
        self._connections = list(dict.fromkeys([self._direct, self._delay]))

    @property
    def is_open(self) -> bool:
        return any(connection.stream.line.is_open for connection in self._connections)

    @property
    def trouble(self) -> str | None:
        return next(
            (connection.stream.line.trouble for connection in self._connections if connection.stream.line.trouble), None
        )

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for outbox_batch, is_due in outbox_batches:
            connection = self._delay if is_due else self._direct
            offer(outbox_batch, connection.stream.posting, connection.stream.line)
            connection.link.stir()

    async def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for connection in self._connections:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            await connection.link.wait(
                lambda: all(outbox_batch.fate is not None for outbox_batch in outbox_batches), left_s
            )
        return all(outbox_batch.fate is not None for outbox_batch in outbox_batches)

    async def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        quiet = True
        for connection in self._connections:
            left_s = max(end_ns - self._clock.monotonic_ns(), 0) / 1e9
            quiet = await connection.link.wait(partial(connection.is_quiet), left_s) and quiet
        return quiet

    async def wait_open(self, timeout_s: float) -> bool:
        return await self._direct.link.wait(lambda: self.is_open, timeout_s)

    async def close(self) -> None:
        for connection in self._connections:
            connection.stream.posting.give_up("the outbox was closed")
            await connection.link.close(GOODBYE_S)
        await asyncio.sleep(0)  # lets the loop close connections that were cut


class _LoopConnection:
    def __init__(self, stream: _SenderStream, clock: Clock, net: Net) -> None:
        self.stream = stream
        self.link = LoopLink(stream.line, stream.addresses, net, clock)

    def is_quiet(self) -> bool:
        return not self.stream.posting.unsettled


LINE_OPTIONS: Final = ReconnectOptions(hello=ConnectionOptions(name="fairway-outbox"))
_OPTIONS: Final = ClientOptions(line=LINE_OPTIONS)


class _Leg(NamedTuple, Generic[ConnectionT]):
    """The connection to one broker group, with its session."""

    connection: ConnectionT
    posting: OutboxBatchSession


class Legs(Generic[ConnectionT]):
    """The connections to all broker groups of a cluster, and the choice among them; for threads and loops."""

    def __init__(
        self, meta: ConnectionT, new_connection: Callable[[Goal], ConnectionT], clock: Clock, rng: Rng, linger_s: float
    ) -> None:
        self.cluster_client: ClusterClient[ConnectionT] = ClusterClient(meta, new_connection, clock, rng)
        self.cluster_client.on_connection = self._on_connection
        self._clock = clock
        self._linger_ns = int(linger_s * 1e9)
        self._legs: dict[str, _Leg[ConnectionT]] = {}
        self._turn = 0

    def _on_connection(self, name: str, connection: ConnectionT) -> None:
        posting = OutboxBatchSession(self._linger_ns)
        with connection.link.lock:
            connection.core.line.add(posting, self._clock.monotonic_ns())
        self._legs[name] = _Leg(connection, posting)

    def all(self) -> list[_Leg[ConnectionT]]:
        return [*self._legs.values()]

    @property
    def is_open(self) -> bool:
        return any(leg.connection.core.line.is_open for leg in self.all())

    @property
    def is_led(self) -> bool:
        """Whether something could be sent, or a meta server answers."""
        return self.is_open or self.cluster_client.meta.core.line.is_open

    @property
    def trouble(self) -> str | None:
        connections = [self.cluster_client.meta, *(leg.connection for leg in self.all())]
        return next((connection.core.line.trouble for connection in connections if connection.core.line.trouble), None)

    # --- Picker ------------------------------------------------------------------------------------------------------

    def home(self, route: StreamRoute, key: Callable[[], str | None]) -> str | None:
        partitioner = self.cluster_client.partitioner(route.subject, is_due=route.is_due)
        names = partitioner.names
        if not partitioner.is_ordered or len(names) < 2 or (mine := key()) is None:
            return None
        return names[home(mine, names)]

    def pick(self, route: StreamRoute) -> str | None:
        names = self.cluster_client.partitioner(route.subject, is_due=route.is_due).names
        self._turn += 1
        by_turns = [names[(self._turn + step) % len(names)] for step in range(len(names))]
        return next((name for name in by_turns if self._takes(name)), None)

    def _takes(self, name: str) -> bool:
        leg = self._legs.get(name)
        return leg is not None and leg.connection.core.line.is_open

    def is_lost(self, route: StreamRoute, group: str) -> bool:
        partitioner = self.cluster_client.partitioner(route.subject, is_due=route.is_due)
        return (
            bool(partitioner.connections) and group not in self._legs
        )  # a cluster without known groups may be about to learn them

    # --- batches -----------------------------------------------------------------------------------------------------

    def sorted(self, outbox_batches: Sequence[OutboxBatch]) -> list[tuple[_Leg[ConnectionT], list[OutboxBatch]]]:
        """Batches by the connection they go to. Batches whose group is unknown are settled."""
        found: dict[str, list[OutboxBatch]] = {}
        for outbox_batch in outbox_batches:
            if outbox_batch.group in self._legs:
                found.setdefault(outbox_batch.group, []).append(outbox_batch)
            elif outbox_batch.fate is None:
                outbox_batch.settle(
                    SendOutcome.LATER, f"no meta server has said where broker group {outbox_batch.group} is"
                )
        return [(self._legs[name], some) for name, some in found.items()]


class ClusterOutboxSender:
    """A sender for threads, to a cluster."""

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
        self._legs = Legs(self._new_connection(meta_server(addresses)), self._new_connection, clock, rng, linger_s)
        self._meta = self._legs.cluster_client.meta
        self.picker = self._legs

    def _new_connection(self, goal: Goal) -> SyncServerConnection:
        return SyncServerConnection(goal, _OPTIONS, self._clock, self._rng, self._new_link)

    def _new_link(self, line: Line, goal: Goal) -> Link:
        return Link(line, goal.addresses, self._clock, at_exit=self._at_exit)

    @property
    def is_open(self) -> bool:
        return self._legs.is_open

    @property
    def trouble(self) -> str | None:
        return self._legs.trouble

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for (connection, posting), mine in self._legs.sorted([outbox_batch for outbox_batch, _ in outbox_batches]):
            link = connection.link
            with link.lock:
                for outbox_batch in mine:
                    offer(outbox_batch, posting, connection.core.line)
                is_due = posting.is_due(self._clock.monotonic_ns())
            if is_due:
                link.pump()

    def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for (connection, _), mine in self._legs.sorted(outbox_batches):
            connection.link.wait(partial(_are_settled, mine), connection.left_s(end_ns))
        return _are_settled(outbox_batches)

    def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        return all(
            connection.link.wait(partial(_is_quiet, posting), connection.left_s(end_ns))
            for connection, posting in self._legs.all()
        )

    def wait_open(self, timeout_s: float) -> bool:
        return self._meta.link.wait(lambda: self._legs.is_led, timeout_s)

    def close(self) -> None:
        if self._meta.link.is_orphan:
            return
        self._legs.cluster_client.close()
        for connection, posting in self._legs.all():
            with connection.link.lock:
                posting.give_up("the outbox was closed")
        end_ns = self._clock.monotonic_ns() + int(GOODBYE_S * 1e9)
        for each in self._legs.cluster_client.connections:
            each.hang_up(end_ns)


class AioClusterOutboxSender:
    """A sender for asyncio, to a cluster. Make it on the loop."""

    def __init__(
        self, addresses: tuple[BrokerAddress, ...], clock: Clock, rng: Rng, net: Net, *, linger_s: float = 0.0
    ) -> None:
        self._clock = clock
        new_connection = partial(_new_aio_connection, net, clock, rng)
        self._legs = Legs(new_connection(meta_server(addresses)), new_connection, clock, rng, linger_s)
        self._meta = self._legs.cluster_client.meta
        self.picker = self._legs

    @property
    def is_open(self) -> bool:
        return self._legs.is_open

    @property
    def trouble(self) -> str | None:
        return self._legs.trouble

    def put(self, outbox_batches: Sequence[tuple[OutboxBatch, bool]]) -> None:
        for (connection, posting), mine in self._legs.sorted([outbox_batch for outbox_batch, _ in outbox_batches]):
            for outbox_batch in mine:
                offer(outbox_batch, posting, connection.core.line)
            connection.link.stir()

    async def wait(self, outbox_batches: Sequence[OutboxBatch], timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        for (connection, _), mine in self._legs.sorted(outbox_batches):
            await connection.link.wait(partial(_are_settled, mine), connection.left_s(end_ns))
        return _are_settled(outbox_batches)

    async def wait_quiet(self, timeout_s: float) -> bool:
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        waits = [(connection, partial(_is_quiet, posting)) for connection, posting in self._legs.all()]
        return all([await connection.link.wait(is_quiet, connection.left_s(end_ns)) for connection, is_quiet in waits])

    async def wait_open(self, timeout_s: float) -> bool:
        return await self._meta.link.wait(lambda: self._legs.is_led, timeout_s)

    async def close(self) -> None:
        self._legs.cluster_client.close()
        for _, posting in self._legs.all():
            posting.give_up("the outbox was closed")
        end_ns = self._clock.monotonic_ns() + int(GOODBYE_S * 1e9)
        for each in self._legs.cluster_client.connections:
            await each.hang_up(end_ns)
        await asyncio.sleep(0)  # lets the loop close connections that were cut


def _new_aio_connection(net: Net, clock: Clock, rng: Rng, goal: Goal) -> AioServerConnection:
    return AioServerConnection(goal, _OPTIONS, net, clock, rng)


def _are_settled(outbox_batches: Sequence[OutboxBatch]) -> bool:
    return all(outbox_batch.fate is not None for outbox_batch in outbox_batches)


def _is_quiet(posting: OutboxBatchSession) -> bool:
    return not posting.unsettled
