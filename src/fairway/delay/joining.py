"""A delay server as part of a cluster: it registers itself, and asks meta servers where its messages go.

Which meta servers there are is known from the start (those that keep the registry), or read from the registry, where
they register themselves; one that is new is found, and while none lives, those before are still tried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from fairway.delay.membership import Membership
from fairway.delay.service import Delay, DelayWorld
from fairway.delay.wayfinding import Wayfinder, parse_place
from fairway.errors import Misuse
from fairway.registry import layout
from fairway.registry.layout import Member
from fairway.registry.port import Registry, RegistryError, SessionState
from fairway.world.dialing import Address

_ANYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  nobody can dial these
_RETRY_S = 1.0
_FREE_BYTES_STEP = 64 << 20  # a figure that is told only when it has changed by so much


@dataclass(frozen=True, slots=True)
class Joining:
    """Which cluster, under which name. The registry is closed with the server."""

    registry: Registry
    group: str
    advertise: Address | None = None  # where others reach it; None: where it listens
    metas: tuple[Address, ...] = ()  # none: those that the registry names

    def check(self, host: str) -> None:
        """`Misuse` where nobody could reach it."""
        if self.advertise is None and host in _ANYWHERE:
            raise Misuse(
                f"listening at {host or '*'} says nothing about where others reach it: give --advertise HOST:PORT"
            )


@dataclass(frozen=True, slots=True)
class Face:
    """What others see of this server."""

    address: Address
    http_port: int | None
    name: str


class Joined:
    """The part that a delay server takes in its cluster. `await Joined.begin(...)` before it listens, then `appear`."""

    def __init__(self, joining: Joining, world: DelayWorld, delay: Delay, name: str, membership: Membership) -> None:
        self._joining = joining
        self._registry = joining.registry
        self._delay = delay
        self._clock = world.clock
        self.membership = membership
        self.wayfinder = Wayfinder(
            world.net,
            world.clock,
            world.rng,
            joining.metas,
            name=name,
            courier=delay.courier,
            on_change=delay.clockwork.poke,
        )
        self._started_ms = world.clock.wall_ms()
        self._rate = _Rate(delay)
        self._looked = asyncio.Event()
        self._looker: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, joining: Joining, world: DelayWorld, delay: Delay, name: str) -> Joined:
        """Take the group's name for this directory, and ask the way from now on; `WrongDirectory`."""
        store = delay.engine.store
        membership = await Membership.begin(
            joining.registry, world.rng, joining.group, store.identity, max(1, store.messages.log.epoch)
        )
        joined = cls(joining, world, delay, name, membership)
        joining.registry.on_session = joined._session_is
        if not joining.metas:
            joining.registry.watch(layout.METAS, joined._looked.set)
            joined._looker = asyncio.get_running_loop().create_task(joined._look(), name="fairway-delay-metas")
        delay.courier.follow(joined.wayfinder)
        return joined

    def appear(self, face: Face, remark: Callable[[str], None]) -> None:
        """It listens: let clients come."""
        self.membership.appear(lambda: self._member(face), remark)

    def _member(self, face: Face) -> Member:
        store = self._delay.engine.store
        host, port = self._joining.advertise or face.address
        free_bytes = store.free_bytes() // _FREE_BYTES_STEP * _FREE_BYTES_STEP
        return Member(
            self.membership.directory,
            host,
            port or face.address[1],
            role="master",
            epoch=self.membership.epoch,
            ends=[store.messages.log.committed_end, store.actions.log.committed_end],
            name=face.name,
            http_port=face.http_port,
            load={
                "messages_per_s": self._rate.per_s(self._clock.monotonic_ns()),
                "pending_messages": float(self._delay.engine.messages_pending),
                "free_bytes": float(free_bytes),
            },
            why_read_only=_why_read_only(self._delay),
            started_ms=self._started_ms,
        )

    def _session_is(self, state: SessionState) -> None:
        self.membership.session_is(state)
        self._looked.set()

    async def _look(self) -> None:
        """See which meta servers there are, now and whenever that changes."""
        while True:
            self._looked.clear()
            try:
                names = await self._registry.children(layout.METAS)
            except RegistryError:
                await asyncio.sleep(_RETRY_S)
                continue
            self.wayfinder.ask_at([parse_place(name) for name in names])
            await self._looked.wait()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Clients go elsewhere from here on; what is on its way is still brought there. Raises what ended it."""
        if self._looker is not None:
            self._looker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looker
        await self.membership.stop()

    async def close(self) -> None:
        self.wayfinder.close()
        await self._registry.close()


class _Rate:
    """Messages scheduled per second since the last look."""

    def __init__(self, delay: Delay) -> None:
        self._engine = delay.engine
        self._at_ns = 0
        self._total = 0

    def per_s(self, now_ns: int) -> float:
        took_s = (now_ns - self._at_ns) / 1e9 if self._at_ns else 0.0
        total = self._engine.scheduled_total
        rate = (total - self._total) / took_s if took_s > 0 else 0.0
        self._at_ns, self._total = now_ns, total
        return round(rate, 1)


def _why_read_only(delay: Delay) -> str:
    store = delay.engine.store
    if store.fault is not None:
        return f"its disk has failed: {store.fault}"
    return "" if store.has_room else "its disk is nearly full: make room"
