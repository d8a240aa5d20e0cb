"""A simulated network: named hosts on one simulated loop, with the faults of real networks.

Each host is a `Net` of its own: `net.host("broker-1")` listens under its name and dials others by theirs. The seed
draws arrival times per connection, so that one more connection does not change what the others see.

    partition   bytes, acknowledgements and dials stall, one way or both; `heal` lets them continue
    drop        a connection, or all of a host's, breaks: both ends see a reset, and bytes under way are lost
    crash       a host vanishes: its peers see resets, its dialers are refused, its own code is never called again

A crashed host stays silent for ever. A new `host` of the same name is the machine after its restart.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

from fairway.errors import CannotListen, Misuse, Unreachable
from fairway.runtime.blocking_connection import Address
from fairway.runtime.net import PORT_MAX, check_port
from fairway.runtime.rng import SeededRng
from fairway.runtime.simulated.loop import SimLoop
from fairway.runtime.simulated.transport import SimTransport
from fairway.runtime.simulated.wire import Conditions, SimulatedRoute

P = TypeVar("P", bound=asyncio.Protocol)
Dial: TypeAlias = "Callable[[SimHost, str, int, asyncio.Future[None]], SimTransport]"

CONNECT_S_MAX = 127.0  # Linux gives up after six more attempts, each waiting twice as long as the one before
FIRST_FREE_PORT = 49_152  # where the dynamic ports begin
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104


class SimNet:
    """The hosts, the routes between them, and the faults."""

    def __init__(self, loop: SimLoop, rng: SeededRng, conditions: Conditions | None = None) -> None:
        self._loop = loop
        self._rng = rng
        self._conditions = conditions or Conditions()
        self._hosts: dict[str, SimHost] = {}  # a crashed host stays until its name is taken again
        self._ways: dict[tuple[str, str], SimulatedRoute] = {}
        self._connections_made = 0

    def host(self, name: str) -> SimHost:
        """The living host of that name, or a new one."""
        if name in LOOPBACK | ANY_ADDRESS:
            raise Misuse(f"{name!r} means every host itself: choose another name")
        host = self._hosts.get(name)
        if host is None or host.crashed:
            host = self._hosts[name] = SimHost(name, self._loop, self._dial)
        return host

    def set_conditions(self, conditions: Conditions) -> None:
        """Change the conditions for later traffic; a connection keeps the window that it was made with."""
        self._conditions = conditions
        for way in self._ways.values():
            way.conditions = conditions

    def partition(self, source: str, destination: str, *, one_way: bool = False) -> None:
        """Let nothing pass between two hosts; with `one_way`, nothing from the first to the second."""
        for way in self._ways_between(source, destination, one_way=one_way):
            way.cut()

    def heal(self, source: str, destination: str, *, one_way: bool = False) -> None:
        """Undo `partition`: stalled traffic continues."""
        for way in self._ways_between(source, destination, one_way=one_way):
            way.mend()

    def drop(self, target: str | asyncio.Transport) -> None:
        """Break a connection, given by either end, or all connections of a host."""
        if isinstance(target, SimTransport):
            target.break_off()
        elif isinstance(target, str):
            for end in self._known(target).ends():
                end.break_off()
        else:
            raise Misuse(f"not a connection of this net: {type(target).__name__}")

    def crash(self, name: str) -> None:
        """Remove a host, as `kill -9` does."""
        self._known(name).crash()

    def _known(self, name: str) -> SimHost:
        if name not in self._hosts:
            raise Misuse(f"no host {name!r}: take it with host() first")
        return self._hosts[name]

    def _ways_between(self, source: str, destination: str, *, one_way: bool) -> list[SimulatedRoute]:
        source, destination = self._known(source).name, self._known(destination).name
        if source == destination:
            raise Misuse(f"host {source!r} cannot be parted from itself")
        ways = [self._way(source, destination)]
        return ways if one_way else [*ways, self._way(destination, source)]

    def _way(self, source: str, destination: str) -> SimulatedRoute:
        return self._ways.setdefault((source, destination), SimulatedRoute(self._conditions))

    def _dial(self, caller: SimHost, target: str, port: int, opened: asyncio.Future[None]) -> SimTransport:
        """Dial a host; `opened` learns whether the host accepts. Returns the caller's end."""
        if target not in self._hosts:
            raise Unreachable(f"cannot connect to {target}:{port}: no such host")
        self._connections_made += 1
        rng = self._rng.child(f"connection-{self._connections_made}")
        here, there = (caller.name, caller.free_port()), (target, port)
        near = SimTransport(self._loop, rng, self._way(caller.name, target), own=here, peer=there, opened=opened)
        far = SimTransport(self._loop, rng, self._way(target, caller.name), own=there, peer=here)
        near.link(far)
        near.signal(self._knock, near, far, caller.name, there)
        return near

    def _knock(self, near: SimTransport, far: SimTransport, caller: str, address: Address) -> None:
        """A dial has arrived: a listener at that address accepts it."""
        host = self._hosts[address[0]]
        factory = host.listening(address[1], local=caller == host.name)
        if factory is None:
            far.signal(near.answer, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
            return
        far.signal(near.answer, None)
        host.accept(far, factory)


class SimHost:
    """One host: a `Net` that reaches the others of the same simulation."""

    def __init__(self, name: str, loop: SimLoop, dial: Dial) -> None:
        self.name = name
        self.crashed = False
        self._loop = loop
        self._dial = dial
        self._listeners: dict[int, SimListener] = {}
        self._ends: dict[SimTransport, None] = {}  # in the order made, unlike a set
        self._port = FIRST_FREE_PORT - 1

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> SimListener:
        check_port(port, least=0)
        await self._stand_still_if_crashed()
        if host not in LOOPBACK | ANY_ADDRESS | {self.name}:
            raise CannotListen(f"cannot listen on {host}:{port}: that is not an address of {self.name}")
        if port in self._listeners:
            raise CannotListen(f"cannot listen on {host}:{port}: the address is in use")
        listener = SimListener(factory, port or self.free_port(), host in LOOPBACK, self._listeners)
        self._listeners[listener.port] = listener
        return listener

    async def connect(self, factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
        check_port(port, least=1)
        await self._stand_still_if_crashed()
        protocol = factory()
        target = self.name if host in LOOPBACK else host
        opened: asyncio.Future[None] = self._loop.create_future()
        end = self._dial(self, target, port, opened)
        self._keep(end)
        try:
            await self._answered(opened, target, port)
            if end.is_closing():
                raise Unreachable(f"cannot connect to {target}:{port}: reset as soon as it was made")
            made: asyncio.Future[None] = self._loop.create_future()
            end.start(protocol, made)
            await made
        except BaseException:
            end.abort()
            raise
        return end, protocol

    async def _answered(self, opened: asyncio.Future[None], target: str, port: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await opened
        except TimeoutError:
            await self._stand_still_if_crashed()
            raise Unreachable(f"cannot connect to {target}:{port}: no answer in {CONNECT_S_MAX:.0f} s") from None
        except ConnectionError as problem:
            await self._stand_still_if_crashed()
            raise Unreachable(f"cannot connect to {target}:{port}: {problem.strerror}") from problem

    async def _stand_still_if_crashed(self) -> None:
        """Stop the code of a crashed host: it waits here until its task is cancelled."""
        if self.crashed:
            await self._loop.create_future()

    def listening(self, port: int, *, local: bool) -> Callable[[], asyncio.Protocol] | None:
        """The factory of the listener on that port, for local callers or for all."""
        listener = self._listeners.get(port)
        return None if listener is None or (listener.loopback_only and not local) else listener.factory

    def accept(self, end: SimTransport, factory: Callable[[], asyncio.Protocol]) -> None:
        self._keep(end)
        try:
            protocol = factory()
        except Exception as problem:
            self._loop.call_exception_handler({"message": f"no protocol for {self.name}", "exception": problem})
            end.abort()
        else:
            end.start(protocol)

    def ends(self) -> list[SimTransport]:
        """This host's ends of its connections, oldest first."""
        return list(self._ends)

    def crash(self) -> None:
        self.crashed = True
        self._listeners.clear()
        for end in self.ends():
            end.crash()

    def free_port(self) -> int:
        """The next port of the dynamic range on which nobody listens."""
        for _ in range(FIRST_FREE_PORT, PORT_MAX + 1):
            self._port = self._port + 1 if self._port < PORT_MAX else FIRST_FREE_PORT
            if self._port not in self._listeners:
                return self._port
        raise CannotListen(f"no free port is left on {self.name}")

    def _keep(self, end: SimTransport) -> None:
        self._ends[end] = None
        end.on_gone = partial(self._ends.pop, end, None)


class SimListener:
    """A port that accepts connections until it is closed or its host crashes."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        port: int,
        loopback_only: bool,
        listeners: dict[int, SimListener],
    ) -> None:
        self.factory = factory
        self.loopback_only = loopback_only
        self._port = port
        self._listeners = listeners

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        if self._listeners.get(self._port) is self:
            del self._listeners[self._port]

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)
