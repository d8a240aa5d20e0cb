"""The loop link: `threaded_link` for programs with an event loop, and for servers that send to other servers.

The link dials, reads, writes, and keeps the line's deadlines. Everything happens on the caller's loop, so there is no
lock. Changes of one turn of the loop are written together: a hundred sends between two awaits are one batch. The net is
a parameter, real or simulated.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from fairway.errors import FairwayError, Unreachable
from fairway.runtime.clock import Clock
from fairway.runtime.net import DIAL_S, Address, Net
from fairway.runtime.threaded_link import NOBODY, READ_BYTES, LinkCore

_NS_PER_MS = 1_000_000
_LAST_WORDS_S = 1.0  # for the last bytes, once a conversation is over
_EARLY_NS = 500_000  # a timer that is this little too late stays: another timer costs more


class LoopCore(LinkCore, Protocol):
    """The protocol side of a loop link, which the link also closes (`protocol.line`)."""

    @property
    def is_closed(self) -> bool:
        """Whether the line has ended, with nothing left to send."""

    def close(self, now_ns: int) -> None:
        """Say goodbye."""


class LoopLinkFailed(FairwayError):
    """A bug ended the task that keeps the connection; the cause is attached."""


class ChangeWaiters:
    """The tasks of one loop that wait for a change."""

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        """`check` raises if there will be no change any more."""
        self._waiters: list[asyncio.Future[None]] = []
        self._check = check

    def check(self) -> None:
        """Raise if there will be no change any more. A waiting task calls this before each look."""
        if self._check is not None:
            self._check()

    def announce(self) -> None:
        """Make the tasks look again."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return True once a change makes `is_ready` true, False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_ready():
                    self.check()
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            return is_ready()
        return True

    async def wait_once(self, timeout_s: float | None) -> None:
        """Wait for the next change, or until the timeout has passed."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=timeout_s)


class LoopLink(ChangeWaiters):
    """One connection to one of several addresses, dialed again whenever it is lost."""

    def __init__(self, line: LoopCore, addresses: Sequence[Address], net: Net, clock: Clock) -> None:
        super().__init__()
        self.lock: AbstractContextManager[None] = nullcontext()  # for callers that also use threaded links
        self._line = line
        self._addresses = list(addresses)
        self._address: Address | None = None  # of the current connection, or the last one
        self._is_redirected = False
        self._moved = asyncio.Event()
        self._patience: asyncio.Timeout | None = None  # of the current attempt to connect
        self._net = net
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._wire: _Wire | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_ns = 0  # when it is due: a handle cannot say so (uvloop has plain ones for less than 0.5 ms)
        self._is_stirred = False
        self._failure: BaseException | None = None
        self._others: weakref.WeakSet[ChangeWaiters] = weakref.WeakSet()  # that a failure must wake, too
        self._keeper = self._loop.create_task(self._keep(), name="fairway-link")
        self._keeper.add_done_callback(self._on_keeper_done)

    # --- for callers -------------------------------------------------------------------------------------------------

    def stir(self) -> None:
        """Have `pump` called soon, in the loop's next turn at the latest. Also from other threads."""
        if self._is_stirred:
            return
        self._is_stirred = True
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_soon(self._pump_soon)
        else:
            self._loop.call_soon_threadsafe(self._pump_soon)

    def pump(self) -> None:
        """Write the line's output, look at its deadlines again, and wake the callers that wait for a change.

        The transport keeps what it cannot send at once. That is no more than the sessions have in flight, which is
        bounded.
        """
        self._is_stirred = False
        now_ns = self._clock.monotonic_ns()
        parts = self._line.take(now_ns)
        transport = None if self._wire is None else self._wire.transport
        if transport is not None and not transport.is_closing():
            if parts:
                transport.writelines(parts)
            if self._line.is_over():
                transport.close()
                self._loop.call_later(_LAST_WORDS_S, transport.abort)  # the peer may not be reading
        self._arm(now_ns)
        self.announce()
        for callback in self._line.callbacks():
            self._run(callback)

    def check(self) -> None:
        if self._failure is not None:
            raise LoopLinkFailed("the task that keeps the connection has failed") from self._failure

    def redirect(self, addresses: Sequence[Address], leader: Address | None) -> None:
        """Dial these addresses from now on. A connection to another address than the leader's ends at once; None: the
        leader is unknown."""
        self._addresses = [*addresses]
        self._is_redirected = True
        if self._patience is not None:
            self._patience.reschedule(self._loop.time())
        if leader is not None and (self._wire is None or self._address != leader):
            self._line.move(self._clock.monotonic_ns())
            self._moved.set()
            if self._wire is not None and self._wire.transport is not None:
                self._wire.transport.abort()
        self.stir()

    def new_waiters(self) -> ChangeWaiters:
        """Waiters for a part of the line, whose owner announces its changes. The link wakes them if it fails."""
        waiters = ChangeWaiters(self.check)
        self._others.add(waiters)
        return waiters

    async def close(self, timeout_s: float) -> None:
        """Say goodbye, if there is time for that, and end."""
        self._line.close(self._clock.monotonic_ns())
        self.pump()
        try:
            await self.wait(lambda: self._line.is_closed or self._keeper.done(), timeout_s)
        finally:
            self.abort()

    def abort(self) -> None:
        """End at once."""
        self._line.close(self._clock.monotonic_ns())
        self._keeper.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.abort()
        self.announce()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _run(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # of a user's callback: reported as loops report theirs
            message = "a callback of a sent message failed"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _arm(self, now_ns: int) -> None:
        """Keep one timer, for the next deadline. A timer that fires too early looks again."""
        due_ns = self._line.next_deadline()
        if due_ns is None or self._keeper.done():
            return
        due_ns = max(due_ns, now_ns)
        if self._timer is not None:
            if self._timer_ns <= due_ns + _EARLY_NS:
                return
            self._timer.cancel()
        self._timer_ns = due_ns
        delay_ms = -(-(due_ns - now_ns) // _NS_PER_MS)  # uvloop rounds to the nearest: it would fire early, and again
        self._timer = self._loop.call_later(delay_ms / 1e3, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._pump_soon()

    def _pump_soon(self) -> None:
        """`pump` where no caller would see it fail."""
        try:
            self.pump()
        except BaseException as error:
            self._failure = error
            self._announce_end()
            raise

    def _on_keeper_done(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (failure := keeper.exception()) is not None:
            self._failure = failure
        self._announce_end()

    def _announce_end(self) -> None:
        for waiters in (self, *self._others):
            waiters.announce()

    # --- the connection ----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Dial when it is time, until the line is closed."""
        while not self._line.is_closed:
            due_ns = self._line.dial_due()
            if due_ns is None:
                return
            if not await self._is_time(due_ns):
                continue
            wire = await self._dial() or self._wire  # a connection may exist although the attempt was called off
            if wire is not None:
                await wire.lost
            self.pump()

    async def _is_time(self, due_ns: int) -> bool:
        """Wait until it is time to dial; False: the time may have changed."""
        self._moved.clear()
        wait_s = max(due_ns - self._clock.monotonic_ns(), 0) / 1e9
        try:
            async with asyncio.timeout(wait_s):
                await self._moved.wait()
        except TimeoutError:
            return True
        return False

    async def _dial(self) -> _Wire | None:
        """Try every address once, beginning with the one that answered last, unless that one does not lead."""
        if self._line.moves_on() and self._addresses and not self._is_redirected:
            self._addresses.append(self._addresses.pop(0))
        self._is_redirected = False
        problems = []
        for address in tuple(self._addresses):
            try:
                self._address = address
                async with asyncio.timeout(DIAL_S) as self._patience:
                    _, wire = await self._net.connect(partial(_Wire, self), *address)
                    return wire
            except Unreachable as problem:
                problems.append(str(problem))
            except TimeoutError:
                if self._is_redirected:
                    return None
                problems.append(f"cannot connect to {address[0]}:{address[1]}: no answer within {DIAL_S:g} s")
            finally:
                self._patience = None
            if self._is_redirected:
                return None
            self._addresses.append(self._addresses.pop(0))
        self._line.unreachable("; ".join(problems) or NOBODY, self._clock.monotonic_ns())
        return None

    def made(self, wire: _Wire) -> None:
        if self._line.is_closed or self._wire is not None:  # the attempt was given up meanwhile
            if wire.transport is not None:
                wire.transport.abort()
            return
        self._wire = wire
        self._line.connected(self._clock.monotonic_ns())
        self.pump()

    def fed(self, wire: _Wire, data: bytes) -> None:
        if wire is self._wire:
            self._line.feed(data, self._clock.monotonic_ns())
            self.pump()

    def gone(self, wire: _Wire, problem: Exception | None) -> None:
        if wire is self._wire:
            self._wire = None
            sentence = (
                "the other side closed the connection" if problem is None else f"the connection was cut: {problem}"
            )
            self._line.lost(sentence, self._clock.monotonic_ns())
            self.pump()


class _Wire(asyncio.Protocol, asyncio.BufferedProtocol):
    """One connection, as the loop sees it.

    asyncio's own loop reads into the wire's buffer, because new memory for each read would cost 13 µs. uvloop has a
    buffer of its own, and a simulated net needs none: they call `data_received`.
    """

    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._link.made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._link.fed(self, bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._link.fed(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._link.gone(self, exc)
