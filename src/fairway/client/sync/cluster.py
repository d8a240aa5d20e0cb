"""The blocking parts of a cluster client: waiting for room, for routes, for answers, and for messages of any group.

`SyncClusterClient` sends and asks through the connections of a `ClusterClient`. `ConsumerLink` takes the place of a
link for a consumer on several broker groups: its threads wait there for news from any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fairway.client.bulk_send import MessageSlice, shares_of
from fairway.client.client_log import ClientLog
from fairway.client.cluster import requests
from fairway.client.cluster.client import ClusterClient, nowhere
from fairway.client.cluster.consumer import ClusterConsumer
from fairway.client.cluster.partitioner import Partitioner
from fairway.client.cluster.requests import Dialog, check_scannable
from fairway.client.commands import AnswerT, Command, SeekTarget
from fairway.client.core import ASK_S, Duration, limit_of
from fairway.client.sync.connection import SyncServerConnection
from fairway.client.sync.receipts import AskDelayServer, SyncBatch, SyncPending
from fairway.errors import BufferFull, Misuse, Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.messages import ControlMessage
from fairway.protocol.producer_session import ProducerOptions
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng
from fairway.runtime.threads import Hub

if TYPE_CHECKING:
    from fairway.client.sync.connection import SyncServerConnection


T = TypeVar("T")


class SyncClusterClient:
    """Sends and asks in a cluster, and blocks where it must."""

    def __init__(self, inner: ClusterClient[SyncServerConnection], options: ProducerOptions) -> None:
        self.inner = inner
        self._block_s = options.block_ms / 1_000

    @property
    def connections(self) -> list[SyncServerConnection]:
        return self.inner.connections

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, subject: str, message: tuple[Any, ...], timeout: Duration | None, *, is_alone: bool) -> SyncPending:
        """Add one message. `message` holds its columns, and the due time is the last of them.

        If the picked group has no room, another group may.
        """
        cluster_client, key = self.inner, message[1]
        partitioner = cluster_client.partitioner(subject, is_due=bool(message[-1]))
        connection = partitioner.pick(key)
        if connection is cluster_client.meta:
            # The route is not known. In an ordered subject the key may belong to another group than its neighbours'.
            return self._put_nowhere(partitioner, message, timeout, is_alone=is_alone or key is not None)
        add = partial(connection.producing.add_alone if is_alone else connection.producing.add, subject, *message)
        try:
            return connection.put_now(add)
        except BufferFull as full:
            other = partitioner.another(connection)
            if other is None:
                return connection.wait_and_put(add, full, timeout)
        return other.put(partial(other.producing.add, subject, *message), timeout)

    def _put_nowhere(
        self,
        partitioner: Partitioner[SyncServerConnection],
        message: tuple[Any, ...],
        timeout: Duration | None,
        *,
        is_alone: bool,
    ) -> SyncPending:
        connection = self.inner.meta
        pending = connection.put(
            partial(
                connection.producing.add_alone if is_alone else connection.producing.add, partitioner.subject, *message
            ),
            timeout,
        )
        self.inner.settle(partitioner)
        return pending

    def put_many(self, subject: str, part: MessageSlice, timeout: Duration | None, *, is_due: bool) -> list[SyncBatch]:
        """Add many messages: to one broker group, unless an ordered subject divides them by their keys."""
        partitioner, keys = self.inner.partitioner(subject, is_due=is_due), part.columns.get("keys")
        if keys is None:
            connection = partitioner.pick(None)
            batches = connection.put(
                partial(connection.producing.add_many, subject, part.payloads, **part.columns), timeout
            )
            if connection is self.inner.meta:
                self.inner.settle(partitioner)
            return batches
        limit_s = limit_of(timeout)
        if not partitioner.connections and not self.inner.meta.link.wait(
            lambda: bool(partitioner.connections), self._block_s if limit_s is None else limit_s
        ):
            raise nowhere(partitioner, self.inner)
        batches = []
        for connection, share in shares_of(partitioner, part).items():
            batches += connection.put(
                partial(connection.producing.add_many, subject, share.payloads, **share.columns), timeout
            )
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:
        """Ask every group that the command concerns, and merge the answers."""
        return self._drive(requests.ask_all(self.inner, command), timeout)

    def to_scan(self, subject: str, start: SeekTarget, end: int | None) -> list[SyncServerConnection]:
        """The connections to read one after the other, for all messages of a subject."""
        connections = self._drive(requests.groups_of(self.inner, subject), ASK_S)
        check_scannable(subject, start, end, sorted(connections))
        return [connections[name] for name in sorted(connections)]

    def delay_askers(self) -> list[AskDelayServer]:
        """One callable for each group of delay servers."""
        connections = self._drive(requests.delay_groups(self.inner), ASK_S)
        return [partial(_answer, connections[name]) for name in sorted(connections)]

    def _drive(self, dialog: Dialog[T], timeout: Duration) -> T:
        outcome: ControlMessage | Refused | None = None
        while True:
            try:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
            except StopIteration as end:
                found: T = end.value
                return found
            try:
                outcome = asking.connection.ask(asking.command, timeout)[0]
            except Refused as refused:
                outcome = refused
            except TimeoutError as error:
                raise asking.unanswered(error) from None


def _answer(connection: SyncServerConnection, command: Command[AnswerT]) -> AnswerT:
    return connection.ask(command, ASK_S)[0]


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
