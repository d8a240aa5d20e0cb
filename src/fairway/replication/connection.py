"""A replica's connection to its master: awaits one answer, or sends many requests without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from fairway.errors import FairwayError, Refused, RemoteProtocolError, Unreachable
from fairway.protocol import (
    Bytes,
    Connection,
    ConnectionOptions,
    ControlMessage,
    HandshakeDone,
    RefusalReceived,
    ResponseReceived,
    Role,
)
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net

AnswerT = TypeVar("AnswerT", bound=ControlMessage)
OnResponse: TypeAlias = "Callable[[ControlMessage, Sequence[Bytes]], None]"
ResponseFuture: TypeAlias = "asyncio.Future[tuple[ControlMessage, Sequence[Bytes]]]"

_DIAL_S = 5.0
_NS = 1_000_000_000
_SLACK_S = 0.001  # uvloop rounds to milliseconds


class WireEnded(FairwayError):
    """The connection has ended; the sentence says why."""


class RequestChannel(Protocol):
    """The part of a connection that asks and waits for answers."""

    async def ask(self, message: ControlMessage, answer: type[AnswerT]) -> tuple[AnswerT, Sequence[Bytes]]: ...

    def post(self, message: ControlMessage) -> ResponseFuture: ...


class ReplicaConnection(asyncio.Protocol):
    """One connection, on one loop. It does not reconnect: the owner dials again."""

    def __init__(self, clock: Clock, options: ConnectionOptions) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(Role.CLIENT, clock.monotonic_ns(), options)
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._asked: dict[int, OnResponse | ResponseFuture] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._problem: FairwayError | None = None
        self._is_flush_due = False
        self.is_over = False
        self.over: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def dial(cls, net: Net, clock: Clock, host: str, port: int, options: ConnectionOptions) -> ReplicaConnection:
        """Connect. Raises `Unreachable`, or `WireEnded` where the handshake fails."""
        try:
            async with asyncio.timeout(_DIAL_S):
                _, wire = await net.connect(lambda: cls(clock, options), host, port)
        except TimeoutError:
            raise Unreachable(f"cannot connect to {host}:{port}: no answer within {_DIAL_S:g} s") from None
        try:
            async with asyncio.timeout(_DIAL_S):
                await asyncio.shield(wire._ready)
        except TimeoutError:
            wire.abort()
            raise Unreachable(f"{host}:{port} does not answer the greeting within {_DIAL_S:g} s") from None
        except BaseException:
            wire.abort()
            raise
        return wire

    # --- requests ----------------------------------------------------------------------------------------------------

    async def ask(self, message: ControlMessage, answer: type[AnswerT]) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer. Raises `Refused`, or `WireEnded` where no answer will come."""
        told, attached = await self.post(message)
        if not isinstance(told, answer):
            raise RemoteProtocolError(f"a {type(told).__name__} where a {answer.__name__} was asked for")
        return told, attached

    def post(self, message: ControlMessage) -> ResponseFuture:
        """Send a request, and return a future for its answer."""
        future: ResponseFuture = self._loop.create_future()
        self._send(message, future)
        return future

    def send(self, message: ControlMessage, told: OnResponse, attachments: Sequence[Bytes] = ()) -> None:
        """Send a request whose answer goes to `told`; a refusal ends the connection."""
        self._send(message, told, attachments)

    def fail(self, problem: FairwayError) -> None:
        """End the connection, and remember why."""
        self._problem = self._problem or problem
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def check(self) -> None:
        """Raise why the connection has ended."""
        if self._problem is not None:
            raise self._problem
        closed = self._connection.closed
        raise WireEnded(closed.sentence if closed is not None else "the connection is over")

    # --- calls from the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._flush()

    def data_received(self, data: bytes) -> None:
        for event in self._connection.feed(data, self._clock.monotonic_ns()):
            if self.is_over:  # an earlier event has ended it
                return
            if isinstance(event, HandshakeDone):
                if not self._ready.done():
                    self._ready.set_result(None)
            elif isinstance(event, ResponseReceived):
                self._answered(event.correlation, event.message, event.attachments)
            elif isinstance(event, RefusalReceived):
                self._refused(event.correlation, event.refused)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        self._end()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _send(
        self, message: ControlMessage, then: OnResponse | ResponseFuture, attachments: Sequence[Bytes] = ()
    ) -> None:
        if self.is_over or not self._connection.is_open:
            self.check()
        correlation = self._connection.request(message, attachments)
        self._asked[correlation] = then
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _answered(self, correlation: int, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        then = self._asked.pop(correlation, None)
        if isinstance(then, asyncio.Future):
            if not then.done():
                then.set_result((message, attachments))
        elif then is not None:
            then(message, attachments)

    def _refused(self, correlation: int, refused: Refused) -> None:
        then = self._asked.pop(correlation, None)
        if isinstance(then, asyncio.Future):
            if not then.done():
                then.set_exception(refused)
        else:
            self.fail(refused)

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        closed = self._connection.closed
        problem = self._problem or WireEnded(closed.sentence if closed is not None else "the connection was given up")
        if not self._ready.done():
            self._ready.set_exception(problem)
            self._ready.exception()  # the caller of `dial` may have given up
        asked, self._asked = self._asked, {}
        for then in asked.values():
            if isinstance(then, asyncio.Future) and not then.done():
                then.set_exception(problem)
        if not self.over.done():
            self.over.set_result(None)

    def _flush(self) -> None:
        self._is_flush_due = False
        transport = self._transport
        if transport is None or self.is_over:
            return
        out = self._connection.take()
        if out:
            transport.writelines(out)
        if self._connection.closed is not None:
            transport.close()
            self._end()
            return
        self._rearm()

    def _rearm(self) -> None:
        deadline_ns = self._connection.next_deadline()
        if self._timer is None and deadline_ns is not None:
            delay_ns = max(deadline_ns - self._clock.monotonic_ns(), 0)
            self._timer = self._loop.call_later(delay_ns / _NS + _SLACK_S, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if not self.is_over:
            self._connection.on_time(self._clock.monotonic_ns())
            self._flush()
