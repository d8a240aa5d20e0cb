"""The connections of an asyncio client, and the outcomes of what is sent there. The twin of `client.sync.connection`.

Any number of tasks may await an outcome. Each waits on a future of its own, because cancelling a task cancels the
future that the task waits on.

`AioClusterClient` sends and asks through the connections of a `ClusterClient`. `AioConsumerLink` takes the place of a
link for a consumer on several broker groups: its tasks wait there for news from any of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from fairway.client.client_log import ClientLog, ConnectionLog
from fairway.client.cluster import requests
from fairway.client.cluster.client import ClusterClient, nowhere
from fairway.client.cluster.consumer import ClusterConsumer
from fairway.client.cluster.requests import Dialog
from fairway.client.commands import AnswerT, Command, CommandRequest
from fairway.client.core import (
    ASK_S,
    FIRST_S,
    ClientCore,
    ClientOptions,
    Duration,
    Goal,
    MessageSlice,
    no_answer,
    seconds_of,
    unreachable,
)
from fairway.client.delayed_messages import AioAskDelayServer
from fairway.client.spool.cluster import open_cluster_spool
from fairway.client.spool.spool import SpoolHandle, SpoolOptions, open_spool
from fairway.errors import BufferFull, Misuse, Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.line import NS_PER_MS
from fairway.protocol.messages import ControlMessage
from fairway.protocol.receipts import BatchReceipt, Flush, Pending, PendingBatch, Receipt
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import ChangeWaiters, LoopLink
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng

T = TypeVar("T")


class AioBatch(PendingBatch):
    """The outcome of a batch, shared by its messages."""

    __slots__ = ()

    def wait(self) -> Generator[Any, None, None]:
        """Return when the outcome is known."""
        if not self.done():
            told = asyncio.get_running_loop().create_future()
            self.when_settled(lambda _: None if told.done() else told.set_result(None))
            yield from told

    def __await__(self) -> Generator[Any, None, BatchReceipt]:
        yield from self.wait()
        return self.receipt()


class AioPending(Pending):
    """The outcome of one message: awaiting it returns the receipt, or raises the error of a failed message."""

    __slots__ = ()

    batch: AioBatch

    def result(self) -> Receipt:
        """The receipt. Call this only when `done`."""
        return self.receipt()

    def __await__(self) -> Generator[Any, None, Receipt]:
        batch = self.batch
        if not batch.done():
            yield from batch.wait()
        return self.receipt()


class AioServerConnection:
    """A line, its sessions and its link. Make it on the loop that it lives on."""

    def __init__(
        self,
        goal: Goal,
        options: ClientOptions,
        net: Net,
        clock: Clock,
        rng: Rng,
        watch: ConnectionLog | None = None,
    ) -> None:
        self._goal = goal
        self._clock = clock
        self._options = options.producer
        self.block_s = options.producer.block_ms / 1_000
        self.core: ClientCore[AioPending, AioBatch] = ClientCore(
            clock, rng, options, pending_type=AioPending, batch_type=AioBatch, stores=goal.stores, watch=watch
        )
        self.producing = self.core.producing
        self._is_closed = False
        self.link = LoopLink(self.core.line, goal.addresses, net, clock)

    def check(self) -> None:
        """Raise if the connection is closed or its link has failed for good."""
        if self._is_closed:
            raise Misuse("this client was closed: connect again")
        self.link.check()

    async def wait_connected(self, patience_s: float) -> None:
        """Return when a connection has been made, now or before. Raises `Unreachable` if that takes too long."""
        link, core = self.link, self.core
        await link.wait(core.is_decided, FIRST_S)
        if patience_s and not core.is_connected():
            await link.wait(core.is_connected, patience_s)
        if not core.is_connected():
            raise unreachable(self._goal, core.line.trouble)

    def spooling(
        self, options: SpoolOptions, rng: Rng, cluster_client: ClusterClient[AioServerConnection] | None
    ) -> SpoolHandle:
        """Start a spool beside this connection; in a cluster, beside all connections."""
        loop = asyncio.get_running_loop()

        def post(callback: Callable[..., None], *args: object) -> None:
            loop.call_soon_threadsafe(self._on_post, callback, *args)

        made: SpoolHandle = (
            open_spool(options, self.core, self._clock, rng, post=post, on_change=self.link.stir)
            if cluster_client is None
            else open_cluster_spool(options, cluster_client, self._clock, rng, post=post)
        )
        made.start()
        return made

    def _on_post(self, callback: Callable[..., None], *args: object) -> None:
        callback(*args)
        self.link.stir()

    # --- sending -----------------------------------------------------------------------------------------------------

    def put_now(self, add: Callable[[], T]) -> T:
        """Add messages to the buffer, or raise `BufferFull`. They leave in this turn of the loop."""
        try:
            added = add()
        except BufferFull:
            if self.producing.is_crammed:  # the spool makes room for the next call
                self.link.stir()
            raise
        if self.producing.is_stirred:
            self.producing.is_stirred = False
            self.link.stir()
        return added

    def put_later(self, add: Callable[[], AioPending], full: BufferFull) -> Awaitable[Receipt]:
        """Add when there is room, for a caller that awaits the result. With `when_full="raise"`, raise now."""
        if self._options.when_full == "raise":
            raise full
        return self._put_later(add, full)

    async def _put_later(self, add: Callable[[], AioPending], full: BufferFull) -> Receipt:
        return await (await self.wait_and_put(add, full))

    async def put_many(self, add: Callable[[], list[AioBatch]]) -> list[AioBatch]:
        """Add many messages, and wait for room if there is none. They leave at once."""
        try:
            batches = add()
        except BufferFull as full:
            batches = await self.wait_and_put(add, full)
        self.link.pump()
        return batches

    async def wait_and_put(self, add: Callable[[], T], full: BufferFull) -> T:
        """Wait for room, in turn, and add again. With `when_full="raise"`, raise `full` at once."""
        if self._options.when_full == "raise":
            raise full
        end_ns = self._clock.monotonic_ns() + self._options.block_ms * NS_PER_MS
        while True:
            has_room = asyncio.Event()
            cancel = self.producing.when_room(full.messages, full.size_bytes, has_room.set)
            self.link.stir()
            try:
                async with asyncio.timeout(self.left_s(end_ns)):
                    await has_room.wait()
            except TimeoutError:
                raise full from None
            finally:
                cancel()
            self.check()
            try:
                added = add()
            except BufferFull as still:
                full = still
            else:
                self.link.stir()
                return added

    def begin_flush(self) -> Flush:
        """Send all that is buffered; `flushed` waits for the outcome."""
        flushing = self.producing.flush()
        self.link.pump()
        return flushing

    async def flushed(self, flushing: Flush, end_ns: int | None) -> bool:
        """Wait until everything is settled, or until `end_ns`; False: not everything is settled."""
        return await self.link.wait(lambda: flushing.is_done, None if end_ns is None else self.left_s(end_ns))

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        command: Command[AnswerT],
        timeout: Duration,  # noqa: ASYNC109
    ) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer to a command, and its attachments."""
        request = self.core.requests.put(CommandRequest(command))
        self.link.stir()
        try:
            if not await self.link.wait(request.is_answered, seconds_of(timeout)):
                raise no_answer(request, timeout, self.core.line.trouble)
        finally:
            request.is_abandoned = True
        return request.answer()

    async def answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:  # noqa: ASYNC109
        """The answer to a command, alone."""
        return (await self.ask(command, timeout))[0]

    # --- ending ------------------------------------------------------------------------------------------------------

    def left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    async def hang_up(self, end_ns: int) -> None:
        """Give up all that is not stored, say goodbye, end the link."""
        self._is_closed = True
        self.producing.give_up("the client was closed before an answer came")
        self.core.line.close(self._clock.monotonic_ns(), patience_ms=self._goal.patience_ms)
        await self.link.close(min(1.0, self.left_s(end_ns)))


class AioClusterClient(ClusterClient[AioServerConnection]):
    """Sends and asks in a cluster, and awaits where it must."""

    # --- sending -----------------------------------------------------------------------------------------------------

    async def put_many(self, subject: str, part: MessageSlice, *, is_due: bool) -> list[AioBatch]:
        """Add many messages, and wait for their route if they have keys."""
        partitioner, meta = self.partitioner(subject, is_due=is_due), self.meta
        is_waiting = part.columns.get("keys") is not None and not partitioner.connections
        if is_waiting and not await meta.link.wait(lambda: bool(partitioner.connections), meta.block_s):
            raise nowhere(partitioner, self)
        batches: list[AioBatch] = []
        for connection, add in self.adding_many(partitioner, part):
            batches += await connection.put_many(add)
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:  # noqa: ASYNC109
        """Ask every group that the command concerns, and merge the answers."""
        return await self.drive(requests.ask_all(self, command), timeout)

    async def delay_askers(self) -> list[AioAskDelayServer]:
        """One callable for each group of delay servers."""
        return [connection.answer for connection in (await self.drive(requests.delay_groups(self))).values()]

    async def drive(self, dialog: Dialog[T], timeout: Duration = ASK_S) -> T:  # noqa: ASYNC109
        """Ask what a dialog wants to know, and return its result."""
        outcome: ControlMessage | Refused | None = None
        try:
            while True:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
                try:
                    outcome = await asking.connection.answer(asking.command, timeout)
                except Refused as refused:
                    outcome = refused
                except TimeoutError as error:
                    raise asking.unanswered(error) from None
        except StopIteration as end:
            return cast("T", end.value)


class AioConsumerLink(ChangeWaiters):
    """The part of `loop_link.LoopLink` that consumers use, for the links of all broker groups."""

    def __init__(
        self, options: ConsumerOptions, meta: AioServerConnection, clock: Clock, rng: Rng, log: ClientLog | None
    ) -> None:
        super().__init__()
        self._meta = meta
        self.lock = nullcontext()
        self.cluster_consumer: ClusterConsumer[AioServerConnection] = ClusterConsumer(
            options, clock, rng, self.lock, self.announce, log
        )

    def check(self) -> None:
        """Raise if one of the links has failed for good."""
        self._meta.check()
        for link in self.cluster_consumer.links:
            link.check()

    def stir(self) -> None:
        for link in self.cluster_consumer.links:
            link.stir()
        self.announce()

    def pump(self) -> None:
        for link in self.cluster_consumer.links:
            link.pump()
