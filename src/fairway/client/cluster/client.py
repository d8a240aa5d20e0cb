"""A cluster client: a connection to a meta server, which knows the routes, and a connection to each broker group.

A message that is sent before its route is known waits in the producer of the meta connection, which stores nothing.
When the route arrives, the client lends the message to the connection of the right broker group. In the same way a
batch that one group refuses, and certainly has not stored, is lent to another group. A batch that a group may have
stored stays with that group, because only its dedupe window can tell. `protocol.spool_port` describes lending.

The blocking and the asyncio client share this module, each with its own type of connection.

Locks are taken in this order: the consumer's, the meta connection's, another connection's. Two of the last kind are
never held at once. Work that one link causes for another runs later, from `run_later`, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from fairway import batch
from fairway.client.core import ConnectionT, Goal, MessageSlice
from fairway.client.url import BrokerAddress
from fairway.errors import FairwayError, Misuse, NotSent
from fairway.lookup.routes import Routes, home
from fairway.names import Subject
from fairway.protocol.producer_stream import SealedBatch
from fairway.protocol.receipts import BatchReceipt
from fairway.protocol.route_messages import ClientRole, GroupRoute, SubjectRoute
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

T = TypeVar("T")


class Partitioner(Generic[ConnectionT]):
    """Chooses the broker group for each message of one subject: for delayed messages (`is_due`), or for the others.

    Groups take turns, so that each gets as many messages. The turn changes between batches, not between messages:
    otherwise batches would be half as full. A group that takes no messages now (the client is not connected to it, or
    has to send it batches again) is passed over while another group takes them.

    In an ordered subject the messages of a key go to one group, the same from every client, and wait for that group.
    """

    __slots__ = ("_at", "connection", "connections", "is_due", "is_ordered", "names", "subject", "why")

    def __init__(self, subject: str, connection: ConnectionT, *, is_due: bool) -> None:
        self.subject = subject
        self.is_due = is_due
        self.is_ordered = False
        self.connection = connection  # takes messages without a key now
        self.why = ""  # why no group takes messages
        self.names: tuple[str, ...] = ()  # of these groups, in the same order
        self.connections: tuple[ConnectionT, ...] = ()  # to the groups that take the messages; empty if none is known
        self._at = -1

    def place(self, route: SubjectRoute, connections: Sequence[ConnectionT], nowhere: ConnectionT) -> None:
        """Use these connections from now on.

        A partitioner that still points to `nowhere` stays there: the caller sends on what waits there first.
        """
        self.is_ordered = route.is_ordered
        self.why = route.why
        self.names, self.connections = tuple(route.writable), tuple(connections)
        if not connections:
            self.connection = nowhere
        elif self.connection not in (nowhere, *connections):
            self.turn()

    def pick(self, key: str | None) -> ConnectionT:
        """The connection for one more message."""
        if len(self.connections) < 2:
            return self.connection
        if self.is_ordered and key is not None:
            return self.connections[home(key, self.names)]
        connection = self.connection
        if connection.producing.is_filling(self.subject, self.is_due) and connection.core.line.is_open:
            return connection
        return self.turn()

    def turn(self) -> ConnectionT:
        """Give the turn to the next connection."""
        if self.connections:
            self.connection = self.next_connection()
        return self.connection

    def next_connection(self, key: str | None = None) -> ConnectionT:
        """The next connection that takes messages, or just the next if none does. An ordered key has its own."""
        if self.is_ordered and key is not None:
            return self.connections[home(key, self.names)]
        count = len(self.connections)
        turns = [(self._at + step) % count for step in range(1, count + 1)]
        self._at = next((at for at in turns if self._takes(self.connections[at])), turns[0])
        return self.connections[self._at]

    def another(self, connection: ConnectionT) -> ConnectionT | None:
        """Another connection that takes messages now. None if there is none, or if the subject is ordered."""
        if self.is_ordered:
            return None
        return next((each for each in self.connections if each is not connection and self._takes(each)), None)

    def _takes(self, connection: ConnectionT) -> bool:
        producing = connection.producing
        return (
            connection.core.line.is_open
            and producing.is_flowing(self.subject, is_due=self.is_due)
            and producing.room_for(1, 0)
        )

    def shares(self, part: MessageSlice) -> dict[ConnectionT, MessageSlice]:
        """Divide messages with keys among the connections, in their order."""
        if not self.is_ordered or len(self.connections) < 2:
            return {self.pick(None): part}
        found: dict[ConnectionT, list[int]] = {}
        for index, key in enumerate(part.columns["keys"]):
            connection = self.connection if key is None else self.connections[home(key, self.names)]
            found.setdefault(connection, []).append(index)
        return {connection: part.at(places) for connection, places in found.items()}


class SubjectFollower(Protocol[ConnectionT]):
    """A consumer that follows its subject to the subject's broker groups."""

    @property
    def subject(self) -> str: ...

    def follow(self, connections: dict[str, ConnectionT], paused: Sequence[str]) -> None:
        """Use these broker groups from now on. `paused` names the consumer groups that are switched off."""


class ClusterClient(Generic[ConnectionT]):
    """The routes and connections of one client. `new_connection` makes one more connection."""

    def __init__(
        self, meta: ConnectionT, new_connection: Callable[[Goal], ConnectionT], clock: Clock, rng: Rng
    ) -> None:
        self.meta = meta
        self._new_connection = new_connection
        self._clock = clock
        self._lock = meta.link.lock
        self._connections: dict[str, ConnectionT] = {}
        self._dialed: dict[str, _DialOrder] = {}
        self._routed: set[str] = set()  # groups that some route names or has named; never iterated
        self._partitioners: dict[str, Partitioner[ConnectionT]] = {}
        self._due_partitioners: dict[str, Partitioner[ConnectionT]] = {}
        self._followers: list[SubjectFollower[ConnectionT]] = []
        self._is_called = False
        self._is_closed = False
        # Called with the lock, for each new connection.
        self.on_connection: Callable[[str, ConnectionT], None] | None = None
        # Called with the lock, before a subject gets its broker groups.
        self.on_place: Callable[[Partitioner[ConnectionT], SubjectRoute], None] | None = None
        # Called without the lock, after the client has applied the latest routes.
        self.on_routes: Callable[[], None] | None = None
        self._routes = {
            ClientRole.PRODUCER: Routes(ClientRole.PRODUCER, rng, self._changed, may_create=True),
            ClientRole.CONSUMER: Routes(ClientRole.CONSUMER, rng, self._changed),
            ClientRole.SCHEDULER: Routes(ClientRole.SCHEDULER, rng, self._changed, may_create=True),
        }
        with self._lock:
            for routes in self._routes.values():
                meta.core.line.add(routes, clock.monotonic_ns())

    @property
    def connections(self) -> list[ConnectionT]:
        """All connections. The meta server's is the last, because batches lent by it are settled there."""
        with self._lock:
            return [*self._connections.values(), self.meta]

    # --- sending -----------------------------------------------------------------------------------------------------

    def partitioner(self, subject: str, *, is_due: bool = False) -> Partitioner[ConnectionT]:
        """The partitioner of a subject. The first call asks for the route; until the answer, messages wait."""
        partitioners = self._due_partitioners if is_due else self._partitioners
        return partitioners.get(subject) or self._new_partitioner(subject, is_due)

    def _new_partitioner(self, subject: str, is_due: bool) -> Partitioner[ConnectionT]:
        name = str(Subject.parse(subject))
        with self._lock:
            return self.seek(name, is_due=is_due)

    def seek(self, name: str, *, is_due: bool) -> Partitioner[ConnectionT]:
        """The same, for a caller that holds the lock of the meta connection."""
        partitioners = self._due_partitioners if is_due else self._partitioners
        partitioner = partitioners.get(name)
        if partitioner is None:
            partitioner = partitioners[name] = Partitioner(name, self.meta, is_due=is_due)
            self._routes[ClientRole.SCHEDULER if is_due else ClientRole.PRODUCER].want(name)
            self.meta.link.stir()
        return partitioner

    def adding(
        self, subject: str, message: tuple[Any, ...], *, is_alone: bool
    ) -> tuple[Partitioner[ConnectionT], ConnectionT, Callable[[], Any]]:
        """The connection for one more message, and the call that adds the message there, under the connection's lock.

        `message` holds the columns, and the due time is the last of them.
        """
        partitioners = self._due_partitioners if message[-1] else self._partitioners
        partitioner = partitioners.get(subject) or self._new_partitioner(subject, bool(message[-1]))
        key = message[1]
        connection = partitioner.pick(key)
        producing = connection.producing
        if connection is not self.meta:
            add = producing.add_alone if is_alone else producing.add
            return partitioner, connection, partial(add, subject, *message)
        # The route is not known. In an ordered subject the key may belong to another group than its neighbours'.
        add = producing.add if key is None and not is_alone else producing.add_alone
        return partitioner, connection, partial(self.add_unrouted, partitioner, partial(add, subject, *message))

    def adding_many(
        self, partitioner: Partitioner[ConnectionT], part: MessageSlice
    ) -> list[tuple[ConnectionT, Callable[[], list[Any]]]]:
        """The same for many messages: one broker group, unless an ordered subject divides them by their keys."""
        has_keys = part.columns.get("keys") is not None
        shares = partitioner.shares(part) if has_keys else {partitioner.pick(None): part}
        calls: list[tuple[ConnectionT, Callable[[], list[Any]]]] = []
        for connection, share in shares.items():
            add = partial(connection.producing.add_many, partitioner.subject, share.payloads, **share.columns)
            is_unrouted = connection is self.meta
            calls.append((connection, partial(self.add_unrouted, partitioner, add) if is_unrouted else add))
        return calls

    def add_unrouted(self, partitioner: Partitioner[ConnectionT], add: Callable[[], T]) -> T:
        """Add to the meta connection, under its lock. The route may have come meanwhile: then send on what waits."""
        added = add()
        if partitioner.connections:
            self._settle(partitioner)
        return added

    def _settle(self, partitioner: Partitioner[ConnectionT]) -> None:
        for spooled in self.meta.producing.lend(partitioner.subject, is_due=partitioner.is_due):
            self._hand_on(partitioner, self.meta, partitioner.next_connection(_key_of(spooled, partitioner)), [spooled])

    def _hand_on(
        self,
        partitioner: Partitioner[ConnectionT],
        lender: ConnectionT,
        connection: ConnectionT,
        spooled_batches: Sequence[SealedBatch],
    ) -> None:
        with connection.link.lock:
            repay = partial(self._repay, lender, connection)
            connection.producing.borrow(partitioner.subject, spooled_batches, repay, is_due=partitioner.is_due)
        connection.link.stir()

    def _repay(
        self, lender: ConnectionT, connection: ConnectionT, spooled: SealedBatch, outcome: BatchReceipt | FairwayError
    ) -> None:
        """Report the outcome to the lender, later. Called under the lock of the borrowing connection."""
        connection.core.line.run_later(partial(self._repaid, lender, spooled, outcome))

    def _repaid(self, lender: ConnectionT, spooled: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        with lender.link.lock:
            lender.producing.repaid(spooled, outcome)
        lender.link.stir()  # wake callers that wait, and run callbacks

    # --- consuming ---------------------------------------------------------------------------------------------------

    def join(self, follower: SubjectFollower[ConnectionT]) -> None:
        """Call `follow` with the subject's broker groups, now and after each change."""
        with self._lock:
            self._followers.append(follower)
            self._routes[ClientRole.CONSUMER].want(follower.subject)
            self._changed()  # the route may be known already
        self.meta.link.stir()

    def leave(self, follower: SubjectFollower[ConnectionT]) -> None:
        with self._lock:
            self._followers = [each for each in self._followers if each is not follower]
            if all(each.subject != follower.subject for each in self._followers):
                self._routes[ClientRole.CONSUMER].forget(follower.subject)

    # --- connections -------------------------------------------------------------------------------------------------

    def connection_to(self, route: GroupRoute) -> ConnectionT:
        """The connection to a group of servers: made at the first call, redirected when the group's master changes."""
        connection = self._connection_to(route)
        if connection is None:
            raise Misuse("this client is closed: connect again")
        return connection

    def _connection_to(self, route: GroupRoute) -> ConnectionT | None:
        with self._lock:
            if self._is_closed:
                return None
            order, known = _DialOrder.of(route), self._dialed.get(route.name)
            connection = self._connections.get(route.name)
            if connection is None or known is None:
                self._dialed[route.name] = order
                connection = self._connections[route.name] = self._new_connection(
                    Goal(order.addresses, f"{route.kind} group {route.name}", is_routed=True)
                )
                connection.producing.broker_group = route.name
                connection.producing.on_failure = partial(self._on_failure, route.name, connection)
                if self.on_connection is not None:
                    self.on_connection(route.name, connection)
                return connection
            if order == known or order.epoch < known.epoch:
                return connection
            self._dialed[route.name] = order
        if order.addresses:
            connection.link.redirect(order.addresses, order.leader)
        return connection

    def _on_failure(self, name: str, connection: ConnectionT) -> None:
        """Ask for new routes and lend batches to other groups: this broker group fails. Called without a lock."""
        with self._lock:
            for routes in self._routes.values():
                routes.doubt(name)
        self.meta.link.stir()
        with connection.link.lock:
            unsettled = connection.producing.unsettled()
        for subject, is_due in unsettled:
            partitioner = (self._due_partitioners if is_due else self._partitioners).get(subject)
            other = None if partitioner is None else partitioner.another(connection)
            if partitioner is not None and other is not None:
                with connection.link.lock:
                    lent = connection.producing.lend(subject, is_due=is_due)
                if lent:
                    self._hand_on(partitioner, connection, other, lent)
        connection.link.stir()  # the batches that are left there are retried in time
        self._let_rest(name, connection)

    def _let_rest(self, name: str, connection: ConnectionT) -> None:
        """Stop dialing an idle group that no route names any more: the group was most likely given up.

        The client dials again when a route names the group.
        """
        with connection.link.lock:
            is_idle = connection.core.is_idle
        with self._lock:
            is_named = any(routes.group(name) is not None for routes in self._routes.values())
            if is_named or not is_idle or name not in self._routed:
                return
            self._routed.discard(name)
            self._dialed[name] = _NOWHERE
        connection.link.redirect((), None)

    def close(self) -> None:
        """Make no more connections."""
        with self._lock:
            self._is_closed = True

    # --- answers of meta servers -------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Apply the routes soon. Called under the meta connection's lock."""
        if not self._is_called:
            self._is_called = True
            self.meta.core.line.run_later(self._apply)

    def _apply(self) -> None:
        """Apply the routes that are known now. Called without a lock."""
        with self._lock:
            self._is_called = False
            if self._is_closed:
                return
            groups = [route for routes in self._routes.values() for route in routes.groups.values()]
            self._routed.update(route.name for route in groups)
            partitioners = self._partitioners_with_news()
            followers = [*self._followers]
        found = ((route.name, self._connection_to(route)) for route in groups)
        connections = {name: connection for name, connection in found if connection is not None}
        for partitioner in partitioners:
            self._place(partitioner, connections)
        for follower in followers:
            route = self._routes[ClientRole.CONSUMER].subject(follower.subject)
            if route is not None:
                follower.follow({name: connections[name] for name in route.groups if name in connections}, route.paused)
        if self.on_routes is not None:
            self.on_routes()
        self.meta.link.stir()  # wake callers that wait for a route

    def _partitioners_with_news(self) -> list[Partitioner[ConnectionT]]:
        """The partitioners whose routes have changed. Looking at all for each new subject would be quadratic."""
        pairs = ((self._partitioners, ClientRole.PRODUCER), (self._due_partitioners, ClientRole.SCHEDULER))
        named = ((partitioners, name) for partitioners, asker in pairs for name in self._routes[asker].take_news())
        return [partitioners[name] for partitioners, name in named if name in partitioners]

    def _place(self, partitioner: Partitioner[ConnectionT], connections: dict[str, ConnectionT]) -> None:
        route = self._routes[ClientRole.SCHEDULER if partitioner.is_due else ClientRole.PRODUCER].subject(
            partitioner.subject
        )
        if route is None or not all(name in connections for name in route.writable):
            return
        if route.writable or route.is_read_only or not partitioner.connections:
            with self._lock:
                if self.on_place is not None:
                    self.on_place(partitioner, route)
                partitioner.place(route, [connections[name] for name in route.writable], self.meta)
                if not partitioner.connections:
                    self.meta.producing.trouble(partitioner.why, self._clock.monotonic_ns())
                elif partitioner.connection is self.meta:  # messages that have waited go before new ones
                    self._settle(partitioner)
                    partitioner.turn()
        # Otherwise no group takes messages now: they wait at the groups that the subject had before.


def nowhere(partitioner: Partitioner[ConnectionT], cluster_client: ClusterClient[ConnectionT]) -> NotSent:
    """The error of a send whose route did not arrive in time."""
    why = partitioner.why or cluster_client.meta.core.line.trouble or "no meta server has said where it is"
    return NotSent(f"nothing to {partitioner.subject} was sent: {why}")


def _key_of(spooled: SealedBatch, partitioner: Partitioner[ConnectionT]) -> str | None:
    """The key of a batch that waited for a route. Such a message has a batch of its own."""
    return batch.decode(spooled.data).key(0) if partitioner.is_ordered and len(partitioner.connections) > 1 else None


class _DialOrder(NamedTuple):
    """The addresses that a connection dials."""

    epoch: int
    addresses: tuple[BrokerAddress, ...]  # in the order of dialing, the master first
    leader: BrokerAddress | None  # the master's address, if known

    @classmethod
    def of(cls, route: GroupRoute) -> Self:
        leader = BrokerAddress.parse(route.master) if route.master else None
        others = tuple(BrokerAddress.parse(each) for each in route.replicas)
        return cls(route.epoch, others if leader is None else (leader, *others), leader)


_NOWHERE = _DialOrder(-1, (), None)  # older than any route: a group that is created again begins with epoch 1
