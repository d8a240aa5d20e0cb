"""The awaitable parts of a cluster client: waiting for room, for routes, for answers, and for messages of any group.

`AioClusterClient` sends and asks through the connections of a `ClusterClient`. `AioConsumerLink` takes the place of a
link for a consumer on several broker groups: its tasks wait there for news from any of them. The blocking twin is
`fairway.client.sync.cluster`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TypeVar, cast

from fairway.client.aio.connection import AioBatch, AioServerConnection
from fairway.client.client_log import ClientLog
from fairway.client.cluster import requests
from fairway.client.cluster.client import ClusterClient, nowhere
from fairway.client.cluster.consumer import ClusterConsumer
from fairway.client.cluster.requests import Dialog
from fairway.client.commands import AnswerT, Command
from fairway.client.core import ASK_S, Duration, MessageSlice
from fairway.client.delayed_messages import AioAskDelayServer
from fairway.errors import Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.messages import ControlMessage
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import ChangeWaiters
from fairway.runtime.rng import Rng

T = TypeVar("T")


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
