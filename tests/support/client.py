"""A small client for tests: one connection, requests as coroutines, no retries and no cleverness of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from fairway import batch
from fairway.errors import FairwayError, Refused, Unreachable
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
from fairway.protocol import messages as m
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net

AnswerT = TypeVar("AnswerT", bound=ControlMessage)


class ConnectionEnded(FairwayError):
    """The answer will never come: whether the request was carried out is unknown."""


class Client(asyncio.Protocol):
    """One connection to a broker."""

    def __init__(self, clock: Clock, options: ConnectionOptions | None = None) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(Role.CLIENT, clock.monotonic_ns(), options)
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[tuple[ControlMessage, tuple[Bytes, ...]]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.is_gone = False

    @classmethod
    async def connect(
        cls, net: Net, clock: Clock, host: str, port: int, options: ConnectionOptions | None = None
    ) -> Client:
        _, client = await net.connect(lambda: cls(clock, options), host, port)
        await client._ready
        return client

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._flush()

    def data_received(self, data: bytes) -> None:
        for event in self._connection.feed(data, self._clock.monotonic_ns()):
            if isinstance(event, HandshakeDone):
                if not self._ready.done():  # whoever connects may have given up
                    self._ready.set_result(None)
            elif isinstance(event, ResponseReceived):
                self._settle(event.correlation, (event.message, tuple(bytes(each) for each in event.attachments)))
            elif isinstance(event, RefusalReceived):
                self._settle(event.correlation, event.refused)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self._connection.lost()
        if self._timer is not None:
            self._timer.cancel()
        closed = self._connection.closed
        sentence = closed.sentence if closed is not None else "gone"
        if not self._ready.done():
            self._ready.set_exception(Unreachable(sentence))
        for correlation in list(self._answers):
            self._settle(correlation, ConnectionEnded(sentence))

    # --- asking

    async def ask(
        self, message: ControlMessage, answer: type[AnswerT], attachments: Sequence[Bytes] = ()
    ) -> tuple[AnswerT, tuple[bytes, ...]]:
        """Raises `Refused`, or `ConnectionEnded` where the outcome is unknown."""
        if self.is_gone or not self._connection.is_open:
            raise ConnectionEnded("not connected")
        correlation = self._connection.request(message, attachments)
        future = self._answers[correlation] = self._loop.create_future()
        self._flush()
        told, attached = await future
        assert isinstance(told, answer)
        return told, tuple(bytes(each) for each in attached)

    async def produce(self, subject: str, data: bytes) -> m.Produced:
        return (await self.ask(m.Produce(subject), m.Produced, [data]))[0]

    async def join(self, subject: str, group: str, consumer: str, *, arrived: int = 0, secret: bytes = b"") -> m.Joined:
        return (await self.ask(m.Join(subject, group, consumer, 0, arrived, secret=secret), m.Joined))[0]

    async def pull(
        self,
        subject: str,
        group: str,
        consumer: str,
        *,
        arrived: int = 0,
        messages_max: int = 1_000,
        wait_ms: int = 0,
        run_max: int = 1,
        extends_runs: bool = False,
    ) -> Delivery:
        pull = m.Pull(subject, group, consumer, messages_max, 1 << 20, wait_ms, arrived, run_max, extends_runs)
        pulled, batches = await self.ask(pull, m.Pulled)
        return Delivery(pulled, batches)

    async def settle(
        self,
        subject: str,
        group: str,
        consumer: str,
        lots: Sequence[m.WireLot],
        *,
        kind: m.Settlement = m.Settlement.ACK,
        arrived: int = 0,
        after_ms: int | None = None,
    ) -> m.Settled:
        outcomes = [m.Settle(kind, lot.first, lot.attempt, lot.spans, after_ms) for lot in lots]
        return (await self.ask(m.SettleAll(subject, group, consumer, outcomes, arrived), m.Settled))[0]

    def close(self) -> None:
        if self._transport is not None:
            self._connection.drain("done")
            self._flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- within

    def _settle(self, correlation: int, told: tuple[ControlMessage, tuple[Bytes, ...]] | Exception) -> None:
        future = self._answers.pop(correlation, None)
        if future is None or future.done():
            return
        if isinstance(told, Exception):
            future.set_exception(told)
        else:
            future.set_result(told)

    def _flush(self) -> None:
        if self._transport is None or self.is_gone:
            return
        out = self._connection.take()
        if out:
            self._transport.writelines(out)
        if self._connection.closed is not None and not self._transport.is_closing():
            self._transport.close()
        deadline_ns = self._connection.next_deadline()
        if self._timer is None and deadline_ns is not None:
            delay_s = max(deadline_ns - self._clock.monotonic_ns(), 0) / 1e9
            self._timer = self._loop.call_later(delay_s + 0.001, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._connection.on_time(self._clock.monotonic_ns())
        self._flush()


class Delivery:
    """A pull's answer, opened: what is meant, by sequence."""

    def __init__(self, pulled: m.Pulled, batches: tuple[bytes, ...]) -> None:
        self.number = pulled.number
        self.lots = pulled.lots
        self.is_inbox = pulled.is_inbox
        payloads: dict[int, bytes] = {}
        for attached, data in zip(pulled.batches, batches, strict=True):
            for offset, payload in enumerate(batch.decode(data).payloads):
                payloads[attached.first_sequence + offset] = payload
        self.payloads = {
            sequence: payloads[sequence]
            for lot in pulled.lots
            for span in lot.spans
            for sequence in range(span.first, span.first + span.count)
        }


class Stream:
    """A producer's stream: numbers its messages without gaps."""

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.next = 0

    def batch(self, payloads: Sequence[bytes], keys: Sequence[str | None] | None = None) -> bytes:
        """The next batch; keep it to send it again."""
        data = batch.encode(
            list(payloads), producer_id=self.producer_id, first_sequence=self.next, created_ms=1, keys=keys
        )
        self.next += len(payloads)
        return data


__all__ = ["Client", "ConnectionEnded", "Delivery", "Refused", "Stream"]
