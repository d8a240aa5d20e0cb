"""Target finder: learns from the meta servers which broker groups take a subject and where they are.

The finder asks for a subject when its first message is due, or when an intent's group has no known address. One route
question holds a bounded number of subjects; a new subject takes the place of the one wanted for the longest time. Known
routes stay in force while no meta server answers, because brokers run on without meta servers.

Each subject prefers one of the groups that take it, by a hash that is the same after a restart. While the preferred
group takes nothing, `DispatchSender` picks another. Of an ordered subject, each key belongs to one of the groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fairway import batch, limits
from fairway.delay.dispatch.sender import DispatchSender
from fairway.lookup.routes import Routes
from fairway.names import Subject
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.route_messages import ClientRole, GroupRoute
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import Address, Net
from fairway.runtime.rng import Rng

_KEPT_NS = 5_000_000_000  # a subject stays at least this long: time for the answer, and for sending what is due
_ROOM_S = 1.0  # after this time, subjects that found no room try again


class TargetFinder:
    """Routes of the cluster as one delay server knows them. Lives on its loop."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        metas: Sequence[Address],
        *,
        name: str,
        dispatch_sender: DispatchSender,
        on_change: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._metas = tuple(metas)
        self._dispatch_sender = dispatch_sender
        self._on_change = on_change
        self._subjects_max = limits.ROUTE_SUBJECTS_MAX
        self._wanted: dict[str, int] = {}  # since when, the oldest first
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
        """Whether no meta server answers."""
        return not self._line.is_open or self._routes.refused is not None

    def ask_at(self, metas: Sequence[Address]) -> None:
        """Use these meta servers from now on. An empty list changes nothing."""
        if metas and tuple(metas) != self._metas:
            self._metas = tuple(metas)
            self._link.redirect(metas, None)

    # --- for DispatchSender ------------------------------------------------------------------------------------------

    def groups_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that take messages of a subject now, the preferred group first."""
        route = self._routes.subject(subject)
        if route is None:
            self.want(subject)
            return ()
        if len(route.writable) < 2:
            return route.writable
        return sorted(route.writable, key=lambda group: batch.key_hash(f"{group}/{subject}"), reverse=True)

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that share the keys of an ordered subject. Clients that send to the subject use the same
        ones."""
        route = self._routes.subject(subject)
        return route.writable if route is not None and route.is_ordered else ()

    def want(self, subject: Subject) -> None:
        """Ask for the subject's route, now or as soon as there is room."""
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
        if self._dispatch_sender.is_busy_with(oldest):
            self._wanted[oldest] = self._clock.monotonic_ns()
            return False
        self._routes.forget(oldest)
        return True

    def doubt(self, group: str) -> None:
        """Ask again about a group that cannot be reached or does not lead any more."""
        self._routes.doubt(group)
        self._link.stir()

    # --- from the meta servers ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        groups = self._routes.groups
        self._epochs = {name: epoch for name, epoch in self._epochs.items() if name in groups}
        for name, group in groups.items():
            if group.epoch >= self._epochs.get(name, 0):  # else a meta server that is behind
                self._epochs[name] = group.epoch
                addresses, leader = _places(group)
                if addresses:
                    self._dispatch_sender.lead(name, addresses, leader)
        self._dispatch_sender.keep_only(groups)
        self._on_change()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort the connection: nobody needs the answer of a waiting question any more."""
        if self._again is not None:
            self._again.cancel()
        self._link.abort()


def _places(group: GroupRoute) -> tuple[list[Address], Address | None]:
    """The addresses of a group, its master first, and the master's address if known."""
    leader = parse_place(group.master) if group.master else None
    others = [parse_place(each) for each in group.replicas]
    return (others if leader is None else [leader, *others]), leader


def parse_place(place: str) -> Address:
    """Parse `HOST:PORT` as meta servers write it."""
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)
