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
from typing import Generic, NamedTuple, Protocol, Self

from fairway import batch
from fairway.client.cluster.partitioner import Partitioner
from fairway.client.cluster.server_connection import ConnectionT
from fairway.client.core import Goal
from fairway.client.url import BrokerAddress
from fairway.errors import FairwayError, Misuse, NotSent
from fairway.lookup.routes import Routes
from fairway.names import Subject
from fairway.protocol.producer_stream import SealedBatch
from fairway.protocol.receipts import BatchReceipt
from fairway.protocol.route_messages import ClientRole, GroupRoute, SubjectRoute
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng


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
        self._steered: dict[str, _Course] = {}
        self._routed: set[str] = set()  # groups that some route names or has named; never iterated
        self._spots: dict[str, Partitioner[ConnectionT]] = {}
        self._due_spots: dict[str, Partitioner[ConnectionT]] = {}
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
        spots = self._due_spots if is_due else self._spots
        return spots.get(subject) or self._new_partitioner(subject, is_due)

    def _new_partitioner(self, subject: str, is_due: bool) -> Partitioner[ConnectionT]:
        name = str(Subject.parse(subject))
        with self._lock:
            return self.seek(name, is_due=is_due)

    def seek(self, name: str, *, is_due: bool) -> Partitioner[ConnectionT]:
        """The same, for a caller that holds the lock of the meta connection."""
        spots = self._due_spots if is_due else self._spots
        partitioner = spots.get(name)
        if partitioner is None:
            partitioner = spots[name] = Partitioner(name, self.meta, is_due=is_due)
            self._routes[ClientRole.SCHEDULER if is_due else ClientRole.PRODUCER].want(name)
            self.meta.link.stir()
        return partitioner

    def settle(self, partitioner: Partitioner[ConnectionT]) -> None:
        """Send on what waits on the meta connection, if the subject's broker groups are known by now."""
        with self._lock:
            if partitioner.connections:
                self._settle(partitioner)

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
            course, known = _Course.of(route), self._steered.get(route.name)
            connection = self._connections.get(route.name)
            if connection is None or known is None:
                self._steered[route.name] = course
                connection = self._connections[route.name] = self._new_connection(
                    Goal(course.addresses, f"{route.kind} group {route.name}", is_routed=True)
                )
                connection.producing.broker_group = route.name
                connection.producing.on_failure = partial(self._on_failure, route.name, connection)
                if self.on_connection is not None:
                    self.on_connection(route.name, connection)
                return connection
            if course == known or course.epoch < known.epoch:
                return connection
            self._steered[route.name] = course
        if course.addresses:
            connection.link.redirect(course.addresses, course.leader)
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
            partitioner = (self._due_spots if is_due else self._spots).get(subject)
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
            self._steered[name] = _NOWHERE
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
            spots = self._spots_with_news()
            followers = [*self._followers]
        found = ((route.name, self._connection_to(route)) for route in groups)
        connections = {name: connection for name, connection in found if connection is not None}
        for partitioner in spots:
            self._place(partitioner, connections)
        for follower in followers:
            route = self._routes[ClientRole.CONSUMER].subject(follower.subject)
            if route is not None:
                follower.follow({name: connections[name] for name in route.groups if name in connections}, route.paused)
        if self.on_routes is not None:
            self.on_routes()
        self.meta.link.stir()  # wake callers that wait for a route

    def _spots_with_news(self) -> list[Partitioner[ConnectionT]]:
        """The partitioners whose routes have changed. Looking at all for each new subject would be quadratic."""
        pairs = ((self._spots, ClientRole.PRODUCER), (self._due_spots, ClientRole.SCHEDULER))
        named = ((spots, name) for spots, asker in pairs for name in self._routes[asker].take_news())
        return [spots[name] for spots, name in named if name in spots]

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


class _Course(NamedTuple):
    """The addresses that a connection dials."""

    epoch: int
    addresses: tuple[BrokerAddress, ...]  # in the order of dialing, the master first
    leader: BrokerAddress | None  # the master's address, if known

    @classmethod
    def of(cls, route: GroupRoute) -> Self:
        leader = BrokerAddress.parse(route.master) if route.master else None
        others = tuple(BrokerAddress.parse(each) for each in route.replicas)
        return cls(route.epoch, others if leader is None else (leader, *others), leader)


_NOWHERE = _Course(-1, (), None)  # older than any route: a group that is created again begins with epoch 1
