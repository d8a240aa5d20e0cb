"""A simulated network: named hosts on one simulated loop, with the faults of real networks.

Each host is a `Net` of its own: `net.host("broker-1")` listens under its name and dials others by theirs. The seed
draws arrival times per connection, so that one more connection does not change what the others see.

    partition   bytes, acknowledgements and dials stall, one way or both; `heal` lets them continue
    drop        a connection, or all of a host's, breaks: both ends see a reset, and bytes under way are lost
    crash       a host vanishes: its peers see resets, its dialers are refused, its own code is never called again

A crashed host stays silent for ever. A new `host` of the same name is the machine after its restart.

`SimTransport` is one end of a connection, with exactly the guarantees of an asyncio TCP transport:

    write → unsent ─(window)─► wire ─► the peer's inbox ─► data_received, in chunks that the seed cuts
              │                                 │
       pause_writing                     acknowledged when read, which opens the window again

The seed decides what TCP leaves open: how bytes are cut and merged, whether an abort looks to the peer like an end or
like a reset, whether bytes that arrived before a reset are still read.
"""

from __future__ import annotations

import asyncio
import errno
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, TypeVarTuple

from fairway.errors import CannotListen, InvariantViolated, Misuse, Unreachable
from fairway.limits import BATCH_RAW_BYTES_MAX, KIB
from fairway.runtime.net import PORT_MAX, Address, check_port
from fairway.runtime.rng import SeededRng
from fairway.simulation.loop import SimLoop
from fairway.simulation.wire import Conditions, SimulatedRoute, SimulatedWire

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


@dataclass(eq=False)
class SimListener:
    """A port that accepts connections until it is closed or its host crashes."""

    factory: Callable[[], asyncio.Protocol]
    port: int
    loopback_only: bool
    listeners: dict[int, SimListener]  # of the host, by port

    def close(self) -> None:
        if self.listeners.get(self.port) is self:
            del self.listeners[self.port]

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)


Ts = TypeVarTuple("Ts")

HIGH_WATER_BYTES = 64 * KIB  # asyncio's default
READ_BYTES_MAX = 256 * KIB  # asyncio's too: no data_received is larger
READ_DELAY_US_MAX = 50  # between arrival and reading: long enough for a second piece to be merged with the first
BREAK_DELAY_US_MAX = 1_000  # each end notices a broken connection in its own time
UNSENT_BYTES_MAX = 2 * BATCH_RAW_BYTES_MAX  # a writer that obeys pause_writing holds the largest batch and little more


class SimTransport(asyncio.Transport):
    """One end. `link` joins it to the other end, `start` gives it its protocol; before that it only takes bytes in."""

    _peer: SimTransport
    _protocol: asyncio.Protocol

    def __init__(
        self,
        loop: SimLoop,
        rng: SeededRng,
        way: SimulatedRoute,
        *,
        own: Address,
        peer: Address,
        opened: asyncio.Future[None] | None = None,  # for the dialing end: its `connect` waits for this
    ) -> None:
        super().__init__({"sockname": own, "peername": peer})
        self.on_gone: Callable[[], object] | None = None  # called once nothing passes this end any more
        self._label = f"{own[0]}:{own[1]}<{peer[0]}:{peer[1]}"
        self._loop = loop
        self._rng = rng
        self._way = way
        self._wire = SimulatedWire(loop, rng, way, self.break_off)
        self._opened = opened
        self._window_bytes = way.conditions.window_bytes  # may still be sent before the peer reads
        self._unsent = bytearray()
        self._inbox = bytearray()
        self._untold_bytes = 0  # read here, and not yet acknowledged to the peer
        self._high_bytes, self._low_bytes = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self._read_timer: asyncio.TimerHandle | None = None
        self._started = False
        self._writing_paused = self._reading_paused = False
        self._eof_asked = self._eof_sent = False  # towards the peer
        self._eof_here = self._eof_told = False  # from the peer
        self._closing = False  # no more reading, no more new bytes
        self._lost = False  # nothing passes any more; connection_lost is called or about to be
        self._crashed = False  # the host is gone: its protocol is not called any more

    # --- the life of a connection ------------------------------------------------------------------------------------

    def link(self, peer: SimTransport) -> None:
        self._peer = peer
        peer._peer = self

    def signal(self, arrive: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `arrive` on the other side, after everything sent from here before."""
        self._wire.send(arrive, *args)

    def answer(self, refusal: ConnectionError | None) -> None:
        """The other side accepts this dialing end, or refuses it."""
        if self._opened is None or self._opened.done():
            return
        if refusal is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(refusal)

    def start(self, protocol: asyncio.Protocol, made: asyncio.Future[None] | None = None) -> None:
        """Give this end its protocol; `made` is done once `connection_made` has been called."""
        self._protocol = protocol
        self._started = True
        self._loop.call_soon(self._tell_made, made)
        self._loop.call_soon(self._read_soon)

    def crash(self) -> None:
        """The host is gone: the peer will see a reset, and the protocol here sees nothing any more."""
        self._crashed = True
        if not self._lost:
            self._wire.send(self._peer._reset_arrived)
            self._lose(None)

    def break_off(self) -> None:
        """Break the connection at both ends, with everything under way between them."""
        for end in (self, self._peer):
            end._wire.close()
            self._loop.call_later(self._rng.below(BREAK_DELAY_US_MAX) / 1e6, end._reset_arrived)

    def _tell_made(self, made: asyncio.Future[None] | None) -> None:
        if self._crashed:
            return
        if made is not None and not made.done():
            made.set_result(None)
        self._loop.note(f"{self._label} made")
        self._protocol.connection_made(self)

    def _lose(self, problem: Exception | None) -> None:
        """Nothing passes any more. The protocol learns this once, and never from within its own call."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._unsent.clear()
        self._inbox.clear()
        if self._started:
            self._loop.call_soon(self._tell_lost, problem)
        else:
            self.answer(_reset())
            self._gone()

    def _gone(self) -> None:
        if self.on_gone is not None:
            self.on_gone()

    def _tell_lost(self, problem: Exception | None) -> None:
        self._gone()
        if not self._crashed:
            self._loop.note(f"{self._label} lost {type(problem).__name__}")
            self._protocol.connection_lost(problem)

    def _fail(self, what: str, problem: Exception) -> None:
        """The protocol raised: as in asyncio the connection is lost, and the error is reported."""
        message = f"{what} of {type(self._protocol).__qualname__} failed at {self._label}"
        self._loop.call_exception_handler({"message": message, "exception": problem, "transport": self})
        if not self._lost:
            self._wire.send(self._peer._reset_arrived)
            self._lose(problem)

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes-like, not {type(data).__name__}")
        if self._eof_asked:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing:
            return
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES_MAX:
            raise InvariantViolated(f"{len(self._unsent)} unsent bytes at {self._label}: pause_writing is not heeded")
        self._push()
        self._pause_if_full()

    def write_eof(self) -> None:
        if not self._closing and not self._eof_asked:
            self._eof_asked = True
            self._push()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._push()

    def abort(self) -> None:
        if self._lost:
            return
        looks_like_a_reset = self._eof_sent or self._rng.below(2) == 0
        self._wire.send(self._peer._reset_arrived if looks_like_a_reset else self._peer._eof_arrived)
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def _push(self) -> None:
        """Send as much as the window allows; after the last byte, the end if that was asked for."""
        size = min(len(self._unsent), self._window_bytes)
        if size:
            self._wire.send(self._peer._data_arrived, bytes(self._unsent[:size]))
            del self._unsent[:size]
            self._window_bytes -= size
        if self._unsent:
            return
        if (self._eof_asked or self._closing) and not self._eof_sent:
            self._eof_sent = True
            self._wire.send(self._peer._eof_arrived)
        if self._closing:
            self._lose(None)

    def _read_by_peer(self, size: int) -> None:
        if self._lost:
            return
        self._window_bytes += size
        self._push()
        if self._writing_paused and len(self._unsent) <= self._low_bytes:
            self._writing_paused = False
            self._tell("resume_writing", self._protocol.resume_writing)

    def _pause_if_full(self) -> None:
        if not self._writing_paused and len(self._unsent) > self._high_bytes:
            self._writing_paused = True
            self._tell("pause_writing", self._protocol.pause_writing)

    def _tell(self, what: str, call: Callable[[], object]) -> None:
        """Call the protocol about flow control. An exception is reported, and the connection stays, as in asyncio."""
        try:
            call()
        except Exception as problem:
            self._loop.call_exception_handler({"message": f"{what} failed at {self._label}", "exception": problem})

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_bytes, self._low_bytes = high, low
        if self._started:
            self._pause_if_full()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    # --- reading -----------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._read_soon()

    def is_reading(self) -> bool:
        return not self._closing and not self._reading_paused

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        if not isinstance(protocol, asyncio.Protocol):
            raise TypeError(f"a simulated connection takes an asyncio.Protocol, not {type(protocol).__name__}")
        self._protocol = protocol

    def _data_arrived(self, data: bytes) -> None:
        if self._lost:
            self._wire.send(self._peer._reset_arrived)  # this end is gone, as the sender now learns
            return
        self._inbox += data
        self._read_soon()

    def _eof_arrived(self) -> None:
        self._eof_here = True
        self._read_soon()

    def _reset_arrived(self) -> None:
        if self._lost:
            return
        if self._rng.below(2):
            while self._inbox and self._may_read():
                self._read_data()
        self._lose(_reset())

    def _may_read(self) -> bool:
        unread = bool(self._inbox) or (self._eof_here and not self._eof_told)
        return unread and self._started and not self._reading_paused and not self._closing

    def _read_soon(self) -> None:
        if self._read_timer is None and self._may_read():
            delay_us = self._rng.below(READ_DELAY_US_MAX + 1)
            self._read_timer = self._loop.call_later(delay_us / 1e6, self._read)

    def _read(self) -> None:
        self._read_timer = None
        if not self._may_read():
            return
        if self._inbox:
            self._read_data()
        else:
            self._read_eof()
        self._read_soon()

    def _read_data(self) -> None:
        size = min(len(self._inbox), READ_BYTES_MAX)
        if self._way.conditions.is_choppy:
            size = self._chunk_bytes(size)
        data = bytes(self._inbox[:size])
        del self._inbox[:size]
        self._loop.note(f"{self._label} {size} bytes {zlib.crc32(data):08x}")
        try:
            self._protocol.data_received(data)
        except Exception as problem:
            self._fail("data_received", problem)
        self._untold_bytes += size
        if not self._lost and self._untold_bytes >= self._way.conditions.told_bytes:
            self._wire.send(self._peer._read_by_peer, self._untold_bytes)
            self._untold_bytes = 0

    def _chunk_bytes(self, available: int) -> int:
        """Half of the time all bytes; else any number of them, or a few."""
        match self._rng.below(4):
            case 0:
                return 1 + self._rng.below(min(available, 16))
            case 1:
                return 1 + self._rng.below(available)
            case _:
                return available

    def _read_eof(self) -> None:
        self._eof_told = True
        keep_open: bool | None = False
        try:
            keep_open = self._protocol.eof_received()
        except Exception as problem:
            self._fail("eof_received", problem)
        if not keep_open:
            self.close()


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
