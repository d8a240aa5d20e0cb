"""The awaitable parts of a cluster client: waiting for room, for routes, for answers, and for messages of any group.

`AioClusterClient` sends and asks through the connections of a `ClusterClient`. `AioConsumerLink` takes the place of a
link for a consumer on several broker groups: its tasks wait there for news from any of them. The blocking twin is
`fairway.client.sync.cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fairway.client.aio.connection import AioServerConnection
from fairway.client.aio.receipts import AioAnswers, AioBatch, AioPending
from fairway.client.bulk_send import MessageSlice, shares_of
from fairway.client.client_log import ClientLog
from fairway.client.cluster import requests
from fairway.client.cluster.client import ClusterClient, nowhere
from fairway.client.cluster.consumer import ClusterConsumer
from fairway.client.cluster.partitioner import Partitioner
from fairway.client.cluster.requests import Dialog, check_scannable
from fairway.client.commands import AnswerT, Command, SeekTarget
from fairway.client.core import ASK_S, Duration
from fairway.errors import BufferFull, Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.messages import ControlMessage
from fairway.protocol.producer_session import ProducerOptions
from fairway.protocol.receipts import Receipt
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

if TYPE_CHECKING:
    from fairway.client.aio.connection import AioServerConnection


T = TypeVar("T")


class AioClusterClient:
    """Sends and asks in a cluster, and awaits where it must."""

    def __init__(self, inner: ClusterClient[AioServerConnection], options: ProducerOptions) -> None:
        self.inner = inner
        self._block_s = options.block_ms / 1_000

    @property
    def connections(self) -> list[AioServerConnection]:
        return self.inner.connections

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, subject: str, message: tuple[Any, ...], *, is_alone: bool) -> Awaitable[Receipt]:
        """Add one message. `message` holds its columns, and the due time is the last of them.

        Awaiting the result waits for room first, if there is none now.
        """
        connection, add = self._adding(subject, message, is_alone)
        try:
            return connection.put_now(add)
        except BufferFull as full:
            return connection.put_later(add, full)

    def put_now(self, subject: str, message: tuple[Any, ...], *, is_alone: bool) -> AioPending:
        """The same without a wait: raises `BufferFull` if there is no room."""
        connection, add = self._adding(subject, message, is_alone)
        return connection.put_now(add)

    def _adding(
        self, subject: str, message: tuple[Any, ...], is_alone: bool
    ) -> tuple[AioServerConnection, Callable[[], AioPending]]:
        cluster_client, key = self.inner, message[1]
        partitioner = cluster_client.partitioner(subject, is_due=bool(message[-1]))
        connection = partitioner.pick(key)
        if connection is not cluster_client.meta:
            return connection, partial(
                connection.producing.add_alone if is_alone else connection.producing.add, subject, *message
            )
        is_alone = is_alone or key is not None  # in an ordered subject the key may belong to another group
        add = partial(connection.producing.add_alone if is_alone else connection.producing.add, subject, *message)
        return connection, partial(self._add_nowhere, partitioner, add)

    def _add_nowhere(self, partitioner: Partitioner[AioServerConnection], add: Callable[[], T]) -> T:
        """Add to the meta connection until the route is known. The route may have come while the caller waited."""
        added = add()
        self.inner.settle(partitioner)
        return added

    async def put_many(self, subject: str, part: MessageSlice, *, is_due: bool) -> list[AioBatch]:
        """Add many messages: to one broker group, unless an ordered subject divides them by their keys."""
        partitioner = self.inner.partitioner(subject, is_due=is_due)
        if part.columns.get("keys") is None:
            connection = partitioner.pick(None)
            add = partial(connection.producing.add_many, subject, part.payloads, **part.columns)
            return await self._put(
                connection, partial(self._add_nowhere, partitioner, add) if connection is self.inner.meta else add
            )
        if not partitioner.connections and not await self.inner.meta.link.wait(
            lambda: bool(partitioner.connections), self._block_s
        ):
            raise nowhere(partitioner, self.inner)
        batches: list[AioBatch] = []
        for connection, share in shares_of(partitioner, part).items():
            batches += await self._put(
                connection, partial(connection.producing.add_many, subject, share.payloads, **share.columns)
            )
        return batches

    async def _put(self, connection: AioServerConnection, add: Callable[[], list[AioBatch]]) -> list[AioBatch]:
        try:
            batches = add()
        except BufferFull as full:
            batches = await connection.wait_and_put(add, full)
        connection.link.pump()
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:  # noqa: ASYNC109
        """Ask every group that the command concerns, and merge the answers."""
        return await self._drive(requests.ask_all(self.inner, command), timeout)

    async def to_scan(self, subject: str, start: SeekTarget, end: int | None) -> list[AioServerConnection]:
        """The connections to read one after the other, for all messages of a subject."""
        connections = await self._drive(requests.groups_of(self.inner, subject), ASK_S)
        check_scannable(subject, start, end, sorted(connections))
        return [connections[name] for name in sorted(connections)]

    async def delay_askers(self) -> list[AioAnswers]:
        """One callable for each group of delay servers."""
        connections = await self._drive(requests.delay_groups(self.inner), ASK_S)
        return [partial(_answer, connections[name]) for name in sorted(connections)]

    async def _drive(self, dialog: Dialog[T], timeout: Duration) -> T:  # noqa: ASYNC109
        outcome: ControlMessage | Refused | None = None
        while True:
            try:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
            except StopIteration as end:
                found: T = end.value
                return found
            try:
                outcome = (await asking.connection.ask(asking.command, timeout))[0]
            except Refused as refused:
                outcome = refused
            except TimeoutError as error:
                raise asking.unanswered(error) from None


async def _answer(connection: AioServerConnection, command: Command[AnswerT]) -> AnswerT:
    return (await connection.ask(command, ASK_S))[0]


class AioConsumerLink:
    """The part of `loop_link.LoopLink` that consumers use, for the links of all broker groups."""

    def __init__(
        self, options: ConsumerOptions, meta: AioServerConnection, clock: Clock, rng: Rng, log: ClientLog | None
    ) -> None:
        self._meta = meta
        self._waiters: list[asyncio.Future[None]] = []
        self.cluster_consumer: ClusterConsumer[AioServerConnection] = ClusterConsumer(
            options, clock, rng, nullcontext(), self.announce, log
        )

    def announce(self) -> None:
        """Wake the tasks that wait, so that they look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def check(self) -> None:
        """Raise if one of the links has failed for good."""
        self._meta.check()
        for link in self.cluster_consumer.links:
            link.check()

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_ready()`; False: the timeout has passed."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while not is_ready():
                    self.check()
                    waiter = loop.create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            return is_ready()
        return True

    def stir(self) -> None:
        for link in self.cluster_consumer.links:
            link.stir()
        self.announce()

    def pump(self) -> None:
        for link in self.cluster_consumer.links:
            link.pump()
