"""A client in a cluster: a line to a meta server, which knows where subjects are, and a line to each broker group.

What is sent before anybody has said where its subject is waits on the way to the meta server, which stores nothing, and
is lent (`protocol.lending`) to the way that it belongs to as soon as that is known. In the same way what one broker
group does not take, and certainly has not stored, is lent to another. What a group may have stored stays with it: only
its dedupe window can tell.

The same for both faces: what differs is the kind of way. Locks are taken in this order: a consumer's, the meta way's,
another way's; two of the last kind are never held at once. What one link brings about for another is done in errands,
which hold no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, Self

from fairway import batch
from fairway.client.core import Goal
from fairway.client.spot import Partitioner
from fairway.client.url import BrokerAddress
from fairway.client.ways import WayT
from fairway.errors import FairwayError, Misuse, NotSent
from fairway.lookup.routes import Routes
from fairway.names import Subject
from fairway.protocol.lane import SealedBatch
from fairway.protocol.pending import BatchReceipt
from fairway.protocol.routing import ClientRole, GroupRoute, SubjectRoute
from fairway.world.clock import Clock
from fairway.world.rng import Rng


class SubjectFollower(Protocol[WayT]):
    """Somebody who goes wherever a subject is: a consumer."""

    @property
    def subject(self) -> str: ...

    def follow(self, ways: dict[str, WayT], paused: Sequence[str]) -> None:
        """These are its broker groups now, and these groups of consumers are switched off."""


class ClusterClient(Generic[WayT]):
    """All ways of one client. `new_way` makes one more."""

    def __init__(self, meta: WayT, new_way: Callable[[Goal], WayT], clock: Clock, rng: Rng) -> None:
        self.meta = meta
        self._new_way = new_way
        self._clock = clock
        self._lock = meta.link.lock
        self._ways: dict[str, WayT] = {}
        self._steered: dict[str, _Course] = {}
        self._routed: set[str] = set()  # the groups that some route names, or did; asked, and its order does not matter
        self._spots: dict[str, Partitioner[WayT]] = {}
        self._due_spots: dict[str, Partitioner[WayT]] = {}
        self._followers: list[SubjectFollower[WayT]] = []
        self._is_called = False
        self._is_closed = False
        self.on_way: Callable[[str, WayT], None] | None = None  # called with the lock, for each that is made
        self.on_place: Callable[[Partitioner[WayT], SubjectRoute], None] | None = None  # with the lock, before it is so
        self.on_routes: Callable[[], None] | None = None  # called without it, when all is as meta servers say
        self._routes = {
            ClientRole.PRODUCER: Routes(ClientRole.PRODUCER, rng, self._changed, may_create=True),
            ClientRole.CONSUMER: Routes(ClientRole.CONSUMER, rng, self._changed),
            ClientRole.SCHEDULER: Routes(ClientRole.SCHEDULER, rng, self._changed, may_create=True),
        }
        with self._lock:
            for routes in self._routes.values():
                meta.core.line.add(routes, clock.monotonic_ns())

    @property
    def ways(self) -> list[WayT]:
        """All of them; the one to the meta server last, for what is lent comes back to it."""
        with self._lock:
            return [*self._ways.values(), self.meta]

    # --- sending -----------------------------------------------------------------------------------------------------

    def spot(self, subject: str, *, is_due: bool = False) -> Partitioner[WayT]:
        """Where messages of a subject go. Asks for it the first time; until that is answered they go nowhere."""
        spots = self._due_spots if is_due else self._spots
        return spots.get(subject) or self._new_spot(subject, is_due)

    def _new_spot(self, subject: str, is_due: bool) -> Partitioner[WayT]:
        name = str(Subject.parse(subject))
        with self._lock:
            return self.seek(name, is_due=is_due)

    def seek(self, name: str, *, is_due: bool) -> Partitioner[WayT]:
        """The same for who has the lock of the meta way."""
        spots = self._due_spots if is_due else self._spots
        spot = spots.get(name)
        if spot is None:
            spot = spots[name] = Partitioner(name, self.meta, is_due=is_due)
            self._routes[ClientRole.SCHEDULER if is_due else ClientRole.PRODUCER].want(name)
            self.meta.link.stir()
        return spot

    def settle(self, spot: Partitioner[WayT]) -> None:
        """Something went nowhere: if there is a place for it by now, it goes there."""
        with self._lock:
            if spot.ways:
                self._settle(spot)

    def _settle(self, spot: Partitioner[WayT]) -> None:
        for parcel in self.meta.producing.lend(spot.subject, is_due=spot.is_due):
            self._hand_on(spot, self.meta, spot.next_way(_key_of(parcel, spot)), [parcel])

    def _hand_on(self, spot: Partitioner[WayT], lender: WayT, way: WayT, parcels: Sequence[SealedBatch]) -> None:
        with way.link.lock:
            repay = partial(self._repay, lender, way)
            way.producing.borrow(spot.subject, parcels, repay, is_due=spot.is_due)
        way.link.stir()

    def _repay(self, lender: WayT, way: WayT, parcel: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        """Under the lock of the way: tell the lender, later."""
        way.core.line.run_later(partial(self._repaid, lender, parcel, outcome))

    def _repaid(self, lender: WayT, parcel: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        with lender.link.lock:
            lender.producing.repaid(parcel, outcome)
        lender.link.stir()  # for those who wait, and for callbacks

    # --- consuming ---------------------------------------------------------------------------------------------------

    def join(self, follower: SubjectFollower[WayT]) -> None:
        """Tell it where its subject is, now and whenever that changes."""
        with self._lock:
            self._followers.append(follower)
            self._routes[ClientRole.CONSUMER].want(follower.subject)
            self._changed()  # the subject may be known
        self.meta.link.stir()

    def leave(self, follower: SubjectFollower[WayT]) -> None:
        with self._lock:
            self._followers = [each for each in self._followers if each is not follower]
            if all(each.subject != follower.subject for each in self._followers):
                self._routes[ClientRole.CONSUMER].forget(follower.subject)

    # --- ways --------------------------------------------------------------------------------------------------------

    def way_to(self, route: GroupRoute) -> WayT:
        """The way to a group of servers; made when it is first needed, and led to whoever leads there."""
        way = self._way_to(route)
        if way is None:
            raise Misuse("this client is closed: connect again")
        return way

    def _way_to(self, route: GroupRoute) -> WayT | None:
        with self._lock:
            if self._is_closed:
                return None
            course, known = _Course.of(route), self._steered.get(route.name)
            way = self._ways.get(route.name)
            if way is None or known is None:
                self._steered[route.name] = course
                way = self._ways[route.name] = self._new_way(
                    Goal(course.addresses, f"{route.kind} group {route.name}", is_routed=True)
                )
                way.producing.broker_group = route.name
                way.producing.on_failure = partial(self._on_failure, route.name, way)
                if self.on_way is not None:
                    self.on_way(route.name, way)
                return way
            if course == known or course.epoch < known.epoch:
                return way
            self._steered[route.name] = course
        if course.addresses:
            way.link.redirect(course.addresses, course.leader)
        return way

    def _on_failure(self, name: str, way: WayT) -> None:
        """An errand: a broker group does not answer, or takes no messages."""
        with self._lock:
            for routes in self._routes.values():
                routes.doubt(name)
        self.meta.link.stir()
        with way.link.lock:
            unsettled = way.producing.unsettled()
        for subject, is_due in unsettled:
            spot = (self._due_spots if is_due else self._spots).get(subject)
            other = None if spot is None else spot.another(way)
            if spot is not None and other is not None:
                with way.link.lock:
                    lent = way.producing.lend(subject, is_due=is_due)
                if lent:
                    self._hand_on(spot, way, other, lent)
        way.link.stir()  # what is left there goes on in its time
        self._let_rest(name, way)

    def _let_rest(self, name: str, way: WayT) -> None:
        """A group that no route names any more was given up, most likely: nobody is dialed there until one does, unless
        something is to be settled."""
        with way.link.lock:
            is_idle = way.core.is_idle
        with self._lock:
            is_named = any(routes.group(name) is not None for routes in self._routes.values())
            if is_named or not is_idle or name not in self._routed:
                return
            self._routed.discard(name)
            self._steered[name] = _NOWHERE
        way.link.redirect((), None)

    def close(self) -> None:
        """No more ways are made."""
        with self._lock:
            self._is_closed = True

    # --- what meta servers say ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Under the meta way's lock."""
        if not self._is_called:
            self._is_called = True
            self.meta.core.line.run_later(self._apply)

    def _apply(self) -> None:
        """An errand: do as is known now."""
        with self._lock:
            self._is_called = False
            if self._is_closed:
                return
            groups = [route for routes in self._routes.values() for route in routes.groups.values()]
            self._routed.update(route.name for route in groups)
            spots = self._spots_with_news()
            followers = [*self._followers]
        found = ((route.name, self._way_to(route)) for route in groups)
        ways = {name: way for name, way in found if way is not None}
        for spot in spots:
            self._place(spot, ways)
        for follower in followers:
            route = self._routes[ClientRole.CONSUMER].subject(follower.subject)
            if route is not None:
                follower.follow({name: ways[name] for name in route.groups if name in ways}, route.paused)
        if self.on_routes is not None:
            self.on_routes()
        self.meta.link.stir()  # for those who wait for a place

    def _spots_with_news(self) -> list[Partitioner[WayT]]:
        """To look at all of them for each new subject would cost the n-th one n times as much (bench.subjects)."""
        pairs = ((self._spots, ClientRole.PRODUCER), (self._due_spots, ClientRole.SCHEDULER))
        named = ((spots, name) for spots, asker in pairs for name in self._routes[asker].take_news())
        return [spots[name] for spots, name in named if name in spots]

    def _place(self, spot: Partitioner[WayT], ways: dict[str, WayT]) -> None:
        route = self._routes[ClientRole.SCHEDULER if spot.is_due else ClientRole.PRODUCER].subject(spot.subject)
        if route is None or not all(name in ways for name in route.writable):
            return
        if route.writable or route.is_read_only or not spot.ways:
            with self._lock:
                if self.on_place is not None:
                    self.on_place(spot, route)
                spot.place(route, [ways[name] for name in route.writable], self.meta)
                if not spot.ways:
                    self.meta.producing.trouble(spot.why, self._clock.monotonic_ns())
                elif spot.way is self.meta:  # first what waits, then what is sent from now on
                    self._settle(spot)
                    spot.turn()
        # else nobody takes messages just now: they wait where they would go


def nowhere(spot: Partitioner[WayT], fleet: ClusterClient[WayT]) -> NotSent:
    """Nobody has said in time where a subject is."""
    why = spot.why or fleet.meta.core.line.trouble or "no meta server has said where it is"
    return NotSent(f"nothing to {spot.subject} was sent: {why}")


def _key_of(parcel: SealedBatch, spot: Partitioner[WayT]) -> str | None:
    """Of a message that went nowhere with its key: it has a batch of its own."""
    return batch.decode(parcel.data).key(0) if spot.is_ordered and len(spot.ways) > 1 else None


class _Course(NamedTuple):
    """Where a way leads."""

    epoch: int
    addresses: tuple[BrokerAddress, ...]  # all to be tried, whoever leads first
    leader: BrokerAddress | None  # if anybody knows

    @classmethod
    def of(cls, route: GroupRoute) -> Self:
        leader = BrokerAddress.parse(route.master) if route.master else None
        others = tuple(BrokerAddress.parse(each) for each in route.replicas)
        return cls(route.epoch, others if leader is None else (leader, *others), leader)


_NOWHERE = _Course(-1, (), None)  # whatever is heard of the group later is news: one made anew begins with epoch 1
