"""One end of a simulated connection, with exactly the guarantees of an asyncio TCP transport.

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
from typing import TypeVarTuple

from fairway.errors import InvariantViolated
from fairway.limits import BATCH_RAW_BYTES_MAX, KIB
from fairway.runtime.blocking_connection import Address
from fairway.runtime.rng import SeededRng
from fairway.runtime.simulated.loop import SimLoop
from fairway.runtime.simulated.wire import SimulatedRoute, SimulatedWire

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
