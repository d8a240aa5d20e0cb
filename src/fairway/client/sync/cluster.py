"""The blocking parts of a cluster client: waiting for room, for routes, for answers, and for messages of any group.

`SyncClusterClient` sends and asks through the connections of a `ClusterClient`. `ConsumerLink` takes the place of a
link for a consumer on several broker groups: its threads wait there for news from any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from fairway.client.client_log import ClientLog
from fairway.client.cluster import requests
from fairway.client.cluster.client import ClusterClient, nowhere
from fairway.client.cluster.consumer import ClusterConsumer
from fairway.client.cluster.requests import Dialog
from fairway.client.commands import AnswerT, Command
from fairway.client.core import ASK_S, Duration, MessageSlice, limit_of
from fairway.client.delayed_messages import AskDelayServer
from fairway.client.sync.connection import SyncBatch, SyncPending, SyncServerConnection
from fairway.errors import BufferFull, Misuse, Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.messages import ControlMessage
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng
from fairway.runtime.threads import Hub

T = TypeVar("T")


class SyncClusterClient(ClusterClient[SyncServerConnection]):
    """Sends and asks in a cluster, and blocks where it must."""

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, subject: str, message: tuple[Any, ...], timeout: Duration | None, *, is_alone: bool) -> SyncPending:
        """Add one message; `adding` describes the arguments. If the picked group has no room, another group may."""
        partitioner, connection, add = self.adding(subject, message, is_alone=is_alone)
        pending: SyncPending
        try:
            pending = connection.put_now(add)
        except BufferFull as full:
            other = None if connection is self.meta else partitioner.another(connection)
            if other is not None:
                again = other.producing.add_alone if is_alone else other.producing.add
                return other.put(partial(again, subject, *message), timeout)
            pending = connection.wait_and_put(add, full, timeout)
        return pending

    def put_many(self, subject: str, part: MessageSlice, timeout: Duration | None, *, is_due: bool) -> list[SyncBatch]:
        """Add many messages, and wait for their route if they have keys."""
        partitioner, meta, limit_s = self.partitioner(subject, is_due=is_due), self.meta, limit_of(timeout)
        is_waiting = part.columns.get("keys") is not None and not partitioner.connections
        block_s = meta.block_s if limit_s is None else limit_s
        if is_waiting and not meta.link.wait(lambda: bool(partitioner.connections), block_s):
            raise nowhere(partitioner, self)
        batches: list[SyncBatch] = []
        for connection, add in self.adding_many(partitioner, part):
            batches += connection.put(add, timeout)
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:
        """Ask every group that the command concerns, and merge the answers."""
        return self.drive(requests.ask_all(self, command), timeout)

    def delay_askers(self) -> list[AskDelayServer]:
        """One callable for each group of delay servers."""
        return [connection.answer for connection in self.drive(requests.delay_groups(self)).values()]

    def drive(self, dialog: Dialog[T], timeout: Duration = ASK_S) -> T:
        """Ask what a dialog wants to know, and return its result."""
        outcome: ControlMessage | Refused | None = None
        try:
            while True:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
                try:
                    outcome = asking.connection.answer(asking.command, timeout)
                except Refused as refused:
                    outcome = refused
                except TimeoutError as error:
                    raise asking.unanswered(error) from None
        except StopIteration as end:
            return cast("T", end.value)


class ConsumerLink:
    """The part of `threaded_link.Link` that consumers use, for the links of all broker groups."""

    def __init__(
        self, options: ConsumerOptions, meta: SyncServerConnection, clock: Clock, rng: Rng, log: ClientLog | None
    ) -> None:
        self._hub = Hub(clock)
        self._meta = meta
        self.lock = self._hub.lock
        self.announce = self._hub.announce
        self.cluster_consumer: ClusterConsumer[SyncServerConnection] = ClusterConsumer(
            options, clock, rng, self.lock, self.announce, log
        )

    @property
    def is_orphan(self) -> bool:
        return self._meta.link.is_orphan

    def check(self) -> None:
        """Raise if one of the links has failed for good."""
        self._meta.link.check()
        for link in self.cluster_consumer.links:
            link.check()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if any(link.in_reader for link in (self._meta.link, *self.cluster_consumer.links)):
            raise Misuse("a callback runs in the thread that reads: it must not wait for what that thread brings")
        return self._hub.wait(is_ready, self.check, timeout_s)

    def pump(self) -> None:
        for link in self.cluster_consumer.links:
            link.pump()
