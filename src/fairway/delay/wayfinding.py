"""Which broker groups of a cluster take a subject, and where they are: asked of meta servers, and kept fresh.

A subject is asked for when its first message is due, or when an intent for a group that nobody has named yet is to be
sent; a question holds so many subjects and no more, so those that were asked for the longest time ago make room for
others. What was known stays in force while no meta server answers: brokers do not stop when meta servers do.

Each subject belongs to one of the groups that take it, by a hash that is the same after a restart. While that one takes
nothing it is another's turn, which is for the courier to see. Of an ordered subject each key belongs to one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from fairway import batch, limits
from fairway.lookup.routes import Routes
from fairway.names import Subject
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.routing import ClientRole, GroupRoute
from fairway.world.clock import Clock
from fairway.world.dialing import Address
from fairway.world.loop_link import LoopLink
from fairway.world.net import Net
from fairway.world.rng import Rng

_KEPT_NS = 5_000_000_000  # a subject is not given up before: time for its answer, and for what is due to leave
_ROOM_S = 1.0  # after so long those who found no room look again


class TargetListener(Protocol):
    """Who goes there."""

    def lead(self, name: str, addresses: Sequence[Address], leader: Address | None) -> None:
        """A broker group is there now."""

    def keep_only(self, names: Collection[str]) -> None:
        """Other groups than these are not known any more."""

    def is_busy_with(self, subject: str) -> bool:
        """Whether something is on its way that a subject stands for."""


class TargetFinder:
    """What one delay server knows of its cluster. Lives on its loop."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        metas: Sequence[Address],
        *,
        name: str,
        courier: TargetListener,
        on_change: Callable[[], None],
        subjects_max: int = limits.ROUTE_SUBJECTS_MAX,
    ) -> None:
        self._clock = clock
        self._metas = tuple(metas)
        self._courier = courier
        self._on_change = on_change
        self._subjects_max = subjects_max
        self._wanted: dict[str, int] = {}  # since when
        self._epochs: dict[str, int] = {}
        self._again: asyncio.TimerHandle | None = None
        now_ns = clock.monotonic_ns()
        self._routes = Routes(ClientRole.PRODUCER, rng, self._changed, may_create=True)
        self._line = Line(
            rng, ReconnectOptions(hello=ConnectionOptions(name=name), backoff_most_ms=1_000), now_ns=now_ns
        )
        self._line.add(self._routes, now_ns)
        self._link = LoopLink(self._line, self._metas, net, clock)

    @property
    def is_lost(self) -> bool:
        """No meta server answers."""
        return not self._line.is_open or self._routes.refused is not None

    def ask_at(self, metas: Sequence[Address]) -> None:
        """There are other meta servers now. With none of them, those before are still tried."""
        if metas and tuple(metas) != self._metas:
            self._metas = tuple(metas)
            self._link.redirect(metas, None)

    # --- for the courier ---------------------------------------------------------------------------------------------

    def groups_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that take messages of it now, the one that it belongs to first."""
        route = self._routes.subject(subject)
        if route is None:
            self.want(subject)
            return ()
        if len(route.writable) < 2:
            return route.writable
        return sorted(route.writable, key=lambda group: batch.key_hash(f"{group}/{subject}"), reverse=True)

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """Where the keys of an ordered subject belong, as clients that send to it have it, too."""
        route = self._routes.subject(subject)
        return route.writable if route is not None and route.is_ordered else ()

    def want(self, subject: Subject) -> None:
        """Know of it, as soon as there is room."""
        name = str(subject)
        if name in self._wanted:
            return
        if self._make_room():
            self._wanted[name] = self._clock.monotonic_ns()
            self._routes.want(name)
            self._link.stir()
        elif self._again is None:
            self._again = asyncio.get_running_loop().call_later(_ROOM_S, self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self._on_change()

    def _make_room(self) -> bool:
        if len(self._wanted) < self._subjects_max:
            return True
        old_ns = self._clock.monotonic_ns() - _KEPT_NS
        oldest = next((name for name, since_ns in self._wanted.items() if since_ns < old_ns), None)
        if oldest is None:
            return False
        del self._wanted[oldest]
        if self._courier.is_busy_with(oldest):
            self._wanted[oldest] = self._clock.monotonic_ns()
            return False
        self._routes.forget(oldest)
        return True

    def doubt(self, group: str) -> None:
        """It cannot be reached, or does not lead any more: ask again."""
        self._routes.doubt(group)
        self._link.stir()

    # --- what meta servers say ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        groups = self._routes.groups
        self._epochs = {name: epoch for name, epoch in self._epochs.items() if name in groups}
        for name, group in groups.items():
            if group.epoch >= self._epochs.get(name, 0):  # else a meta server that is behind
                self._epochs[name] = group.epoch
                addresses, leader = _places(group)
                if addresses:
                    self._courier.lead(name, addresses, leader)
        self._courier.keep_only(groups)
        self._on_change()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Without a goodbye: the answer to a question that waits for news is of no use any more."""
        if self._again is not None:
            self._again.cancel()
        self._link.abort()


def _places(group: GroupRoute) -> tuple[list[Address], Address | None]:
    """All to be tried, whoever leads first; and that one, if anybody knows."""
    leader = parse_place(group.master) if group.master else None
    others = [parse_place(each) for each in group.replicas]
    return (others if leader is None else [leader, *others]), leader


def parse_place(place: str) -> Address:
    """`HOST:PORT`, as meta servers write it."""
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)
