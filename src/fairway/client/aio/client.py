"""The client for asyncio programs: the methods of `fairway.client.sync`, awaited.

    async with fairway.aio.connect("fairway://127.0.0.1:20880") as fw:
        receipt = await fw.send("order.changed", b"...")              durable; waits for room when the buffer is full
        receipts = await asyncio.gather(*(fw.send("order.changed", each) for each in payloads))         few batches
        async with fw.consumer("order.changed", group="hotel") as consumer:
            async for message in consumer:
                message.ack()

Net, clock and randomness are parameters, so that a client also runs in a simulation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from fairway.batch import MessageId
from fairway.client import commands, url
from fairway.client.aio.connection import AioBatch, AioClusterClient, AioConsumerLink, AioPending, AioServerConnection
from fairway.client.aio.consumer import AioConsumer
from fairway.client.client_log import ClientLog, logged_session
from fairway.client.cluster.requests import is_elsewhere, to_scan
from fairway.client.commands import SCAN_BYTES, AnswerT, Command, Scanning, SeekTarget
from fairway.client.core import (
    ASK_S,
    CLOSE_S,
    ClientOptions,
    Duration,
    Goal,
    delay_server,
    end_of,
    failures,
    failures_noted,
    id_of,
    limit_of,
    meta_server,
    not_stored_yet,
    seconds_of,
    slices,
)
from fairway.client.delayed_messages import AioAskDelayServer, AioDelayed, columns_of, dues_of
from fairway.client.spool.spool import SpoolHandle, SpoolOptions, SpoolState
from fairway.client.spool.spool import options_of as options_of_spool
from fairway.client.taken_messages import LEAVE_S, ConsumerSettings, options_of
from fairway.errors import BufferFull, Misuse, Refused, Unreachable
from fairway.protocol.admin_messages import Configured, Depth, Described, Redriven, Removed, Sought, Switched
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.delivery import LazyBatch
from fairway.protocol.messages import ControlMessage
from fairway.protocol.receipts import BatchReceipt, Receipt
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.net import Net, RealNet
from fairway.runtime.rng import RealRng, Rng

if TYPE_CHECKING:
    from fairway.groups import GroupConfig


def connect(
    url: str,
    *,
    patience: Duration = 0,
    options: ClientOptions | None = None,
    spool: str | SpoolOptions | None = None,
    net: Net | None = None,
    clock: Clock | None = None,
    rng: Rng | None = None,
) -> AioClient:
    """Make a client of the broker at `fairway://HOST:PORT`, or of a cluster at `meta://HOST:PORT`.

    Enter the client with `async with`, or await it and `close` it. `?delay=HOST:PORT` behind a broker names a delay
    server that is elsewhere.

    If no server answers, opening tries again for `patience` and then raises `Unreachable`. Later the client connects
    again whenever a connection is lost, for as long as that takes, whatever the patience.

    With a `spool`, a directory, the broker need not be there: messages wait on disk for it (`fairway.SpoolOptions`).
    """
    chosen = options or ClientOptions()
    chosen = replace(chosen, spool=options_of_spool(spool, chosen.spool))
    return AioClient(url, patience, chosen, net or RealNet(), clock or RealClock(), rng or RealRng())


class AioClient:
    """A client of a broker or a cluster, on one loop."""

    def __init__(
        self,
        where: str,
        patience: Duration,
        options: ClientOptions | None,
        net: Net,
        clock: Clock,
        rng: Rng,
        log: ClientLog | None = None,
    ) -> None:
        """With a `log`, the client reports its connections and dead letters there."""
        self._target = url.parse_any(where)
        self._patience_s = seconds_of(patience)
        self._options = options or ClientOptions()
        self._options.check()
        self._log = log
        self._net = net
        self._clock = clock
        self._rng = rng
        self.delayed = AioDelayed(self._ask_delayed, clock, self._askers_delayed)
        self._consumers: list[AioConsumer] = []
        self._connection_or_none: AioServerConnection | None = None
        self._cluster_client: AioClusterClient | None = None  # in a cluster
        self._spooling: SpoolHandle | None = None
        self._delay_connection: AioServerConnection | None = None  # to the delay server of the URL, once needed
        self._is_closed = False
        self._is_awaited = False  # and not entered since

    async def open(self) -> None:
        """Connect; `async with` and `await` call this."""
        if self._connection_or_none is not None or self._is_closed:
            raise Misuse("a client is opened once: connect again")
        meta = self._target.meta
        connection = self._connection_or_none = self._new_connection(
            meta_server(meta) if meta else Goal(self._target.brokers)
        )
        if meta:
            self._cluster_client = AioClusterClient(connection, self._new_connection, self._clock, self._rng)
        try:
            if self._options.spool is not None:
                self._spooling = connection.spooling(self._options.spool, self._rng, self._cluster_client)
            await connection.wait_connected(self._patience_s)
        except BaseException as error:
            if isinstance(error, Unreachable) and self._spooling is not None:
                return
            self._is_closed = True
            connection.link.abort()
            if self._spooling is not None:
                self._spooling.close()
            raise

    def _new_connection(self, goal: Goal) -> AioServerConnection:
        watch = None if self._log is None else self._log.connection(goal)
        return AioServerConnection(goal, self._options, self._net, self._clock, self._rng, watch)

    @property
    def _connection(self) -> AioServerConnection:
        connection = self._connection_or_none
        if connection is None or self._is_closed:
            raise Misuse("this client is not open: `async with fairway.aio.connect(url) as client`")
        connection.link.check()
        return connection

    def _delaying(self) -> AioServerConnection:
        """The connection for delayed messages and requests about them."""
        connection = self._connection
        if not self._target.delay:
            return connection
        if self._delay_connection is None:
            self._delay_connection = self._new_connection(delay_server(self._target.delay))
        self._delay_connection.check()
        return self._delay_connection

    def _connections(self) -> list[AioServerConnection]:
        if self._cluster_client is not None:
            return self._cluster_client.connections
        return [
            connection for connection in (self._connection_or_none, self._delay_connection) if connection is not None
        ]

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> Awaitable[Receipt]:
        """Send a message; awaiting the result waits until the message is durable, and returns its receipt.

        With `after` or `at`, consumers get the message then, and never before; a past time means at once. The message
        is on its way before the caller awaits. If the buffer is full, awaiting waits for room first, or `BufferFull`
        is raised at once, as `when_full` of the options says.
        """
        if after is not None or at is not None or self._cluster_client is not None:
            message, is_alone = columns_of(payload, key, tags, headers, id, after, at, self._clock)
            connection, add = self._adding_routed(subject, message, is_alone=is_alone)
            try:
                return connection.put_now(add)
            except BufferFull as full:
                return connection.put_later(add, full)
        try:
            return self.send_nowait(subject, payload, key, tags, headers, id)
        except BufferFull as full:
            born = None if id is None else id_of(id)
            plain = partial(self._connection.producing.add, subject, payload, key, tags, headers, born)
            return self._connection.put_later(plain, full)

    def _adding_routed(
        self, subject: str, message: tuple[Any, ...], *, is_alone: bool
    ) -> tuple[AioServerConnection, Callable[[], AioPending]]:
        """Where to add a delayed message, or any message in a cluster, and the call that adds the message there."""
        if self._cluster_client is not None:
            self._connection.check()
            return self._cluster_client.adding(subject, message, is_alone=is_alone)[1:]
        connection = self._delaying()
        add = connection.producing.add_alone if is_alone else connection.producing.add
        return connection, partial(add, subject, *message)

    def send_nowait(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> AioPending:
        """Send a message, or raise `BufferFull` if there is no room now. The result is awaitable."""
        if after is not None or at is not None or self._cluster_client is not None:
            message, is_alone = columns_of(payload, key, tags, headers, id, after, at, self._clock)
            routed, add = self._adding_routed(subject, message, is_alone=is_alone)
            return routed.put_now(add)
        connection = self._connection
        producing = connection.producing
        try:
            pending = producing.add(subject, payload, key, tags, headers, None if id is None else id_of(id))
        except BufferFull:
            if producing.is_crammed:  # the spool makes room for the next call
                connection.link.stir()
            raise
        if producing.is_stirred:
            producing.is_stirred = False
            connection.link.stir()
        return pending

    async def send_many(
        self,
        subject: str,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str | None] | None = None,
        tags: Sequence[Collection[str] | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        ids: Sequence[MessageId | None] | None = None,
        after: Duration | Sequence[Duration] | None = None,
        at: datetime | Sequence[datetime] | None = None,
    ) -> list[BatchReceipt]:
        """Send many messages in their order. Returns when all are durable, with one receipt for each batch.

        `after` or `at` is one time for all messages, or a list with one for each.
        """
        due_ms = dues_of(len(payloads), after, at, self._clock)
        batches: list[AioBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids, due_ms=due_ms):
            if self._cluster_client is not None:
                self._connection.check()
                batches += await self._cluster_client.put_many(subject, part, is_due=due_ms is not None)
                continue
            connection = self._connection if due_ms is None else self._delaying()
            add = partial(connection.producing.add_many, subject, part.payloads, **part.columns)
            batches += await connection.put_many(add)
        return [await each for each in batches]

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  as in the sync face
        """Wait until everything sent so far is stored or has failed. Raises a group of failures nobody has seen."""
        end_ns = end_of(timeout, self._clock)
        self._connection.check()
        if not await self._flushed(end_ns):
            raise not_stored_yet(sum(connection.producing.messages for connection in self._connections()), timeout)
        self._raise_unseen()

    async def _flushed(self, end_ns: int | None) -> bool:
        """Wait until everything is settled, or until `end_ns`; False: not everything is settled."""
        flushing = [(connection, connection.begin_flush()) for connection in self._connections()]
        return all([await connection.flushed(each, end_ns) for connection, each in flushing])

    # --- the spool ---------------------------------------------------------------------------------------------------

    @property
    def spool(self) -> SpoolState | None:
        """The state of the spool; None: this client has no spool."""
        return None if self._spooling is None else self._spooling.spool.state()

    async def wait_drained(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until the spool is empty, which needs a broker; False: the timeout has passed."""
        connection, spooling = self._connection, self._spooling
        return spooling is None or await connection.link.wait(lambda: spooling.spool.is_drained, limit_of(timeout))

    async def _drained(self, connection: AioServerConnection, end_ns: int) -> None:
        """Wait as long as the spool drains by itself. The next process that uses the directory sends the rest."""
        spooling = self._spooling
        if spooling is not None:
            spool = spooling.spool
            await connection.link.wait(lambda: not spool.is_going_on, connection.left_s(end_ns))

    def _raise_unseen(self) -> None:
        unseen = [error for connection in self._connections() for error in connection.producing.take_unseen()]
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> AioConsumer:
        """Join a group on a subject. `fairway.ConsumerOptions` describes the settings."""
        connection, options = self._connection, options_of(subject, group, settings)
        if self._cluster_client is not None:
            return self._cluster_consumer(self._cluster_client, connection, options)
        link, line = connection.link, connection.core.line
        news = link.new_waiters()
        session = logged_session(options, connection, self._clock, self._rng, self._log, on_news=news.announce)
        made = AioConsumer(session, partial(line.remove, session), link, news, self._clock, self._consumers.remove)
        self._consumers.append(made)
        line.add(session, self._clock.monotonic_ns(), session.detach, is_on_call=True)
        link.stir()
        return made

    def _cluster_consumer(
        self, cluster_client: AioClusterClient, connection: AioServerConnection, options: ConsumerOptions
    ) -> AioConsumer:
        """A consumer on every broker group of its subject."""
        link = AioConsumerLink(options, connection, self._clock, self._rng, self._log)
        cluster_consumer = link.cluster_consumer

        def left(consumer: AioConsumer) -> None:
            cluster_client.leave(cluster_consumer)
            self._consumers.remove(consumer)

        made = AioConsumer(cluster_consumer, cluster_consumer.forget, link, link, self._clock, left)
        self._consumers.append(made)
        cluster_client.join(cluster_consumer)
        return made

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, message: ControlMessage, timeout: Duration = ASK_S) -> ControlMessage:  # noqa: ASYNC109
        """Ask any request of `fairway.protocol`. Raises `Refused`, or `OutcomeUnknown` if the answer was lost."""
        return await self._answer(commands.any_of(message), timeout)

    async def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:  # noqa: ASYNC109
        return (await self._ask(command, timeout))[0]

    async def _ask(
        self,
        command: Command[AnswerT],
        timeout: Duration = ASK_S,  # noqa: ASYNC109
    ) -> tuple[AnswerT, Sequence[Bytes]]:
        connection = self._connection
        if self._cluster_client is not None:
            return await self._cluster_client.ask(command, timeout), ()
        return await connection.ask(command, timeout)

    async def _ask_delayed(self, command: Command[AnswerT]) -> AnswerT:
        if self._cluster_client is not None:
            return await self._answer(command)
        connection = self._delaying()
        await connection.wait_connected(self._patience_s)
        return await connection.answer(command)

    async def _askers_delayed(self) -> list[AioAskDelayServer]:
        """One callable for each group of delay servers."""
        return [self._ask_delayed] if self._cluster_client is None else await self._cluster_client.delay_askers()

    async def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """Describe the broker, its subjects and groups: one page. `next` of the answer is `after` of the next page."""
        return await self._answer(commands.describe(subject, group, depth=depth, after=after))

    async def seek(self, subject: str, group: str, to: SeekTarget) -> Sought:
        """Move a group's cursor to 'earliest', 'latest', a sequence, or a time."""
        return await self._answer(commands.seek(subject, group, to))

    async def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Deliver nothing to a group, or to one consumer of the group, until `resume`."""
        return await self._answer(commands.switch(subject, group, consumer, is_on=True))

    async def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return await self._answer(commands.switch(subject, group, consumer, is_on=False))

    async def go_on(self, subject: str, group: str, key: str | None = None) -> Switched:
        """Go on with a key that has halted behind a dead letter, or with all such keys."""
        return await self._answer(commands.go_on(subject, group, key))

    async def read_only(self, subject: str, is_on: bool) -> Switched:
        """Let a subject take no more messages, or let it take them again."""
        return await self._answer(commands.read_only(subject, is_on=is_on))

    async def weight(self, subject: str, group: str, weight: float) -> None:
        """Set a group's share of the broker's time; 1 by default."""
        await self._answer(commands.weigh(subject, group, weight))

    async def redrive(
        self, subject: str, group: str, ids: Sequence[str | MessageId] | None = None, *, rate_per_s: int = 0
    ) -> Redriven:
        """Give dead letters back to their group: those with these ids, or all."""
        return await self._answer(commands.redrive(subject, group, ids, rate_per_s))

    async def remove_subject(self, subject: str, *, force: bool = False) -> Removed:
        """Remove a subject, its groups, their inboxes and dead letters.

        Refused if messages would be lost or consumers are connected, unless `force`. A later send or join creates the
        subject anew.
        """
        return await self._answer(commands.remove_subject(subject, is_forced=force))

    async def remove_group(
        self, subject: str, group: str, *, force: bool = False, dead_letters: bool = False
    ) -> Removed:
        """Remove a group and its inbox. Its dead letters stay, unless there are none or `dead_letters` is set.

        Refused if the group has not handled all messages or consumers are connected, unless `force`.
        """
        return await self._answer(commands.remove_group(subject, group, is_forced=force, takes_dead=dead_letters))

    async def configure(
        self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int
    ) -> Configured:
        """Compare and set a group's configuration, which carries the next version.

        `expected_version` 0: there is no such group yet.
        """
        return await self._answer(commands.configure(subject, group, config, expected_version))

    async def scan(
        self, subject: str, start: SeekTarget = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> AsyncIterator[LazyBatch]:
        """Read stored batches without a group, up to `end`, or up to the committed end at the start of the scan."""
        connections, cluster_client = [self._connection], self._cluster_client
        if cluster_client is not None:
            connections = await cluster_client.drive(to_scan(cluster_client, subject, start, end))
        for each in connections:
            scanning = Scanning(subject, start, end, bytes_max)
            while not scanning.is_done:
                try:
                    scanned = await each.ask(scanning.command(), ASK_S)
                except Refused as refused:
                    if is_elsewhere(refused, connections):
                        break
                    raise
                for page in scanning.pages(*scanned):
                    yield page

    # --- ending ------------------------------------------------------------------------------------------------------

    async def close(self, timeout: Duration = CLOSE_S) -> None:  # noqa: ASYNC109
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody has looked at, messages that are not stored by then included.
        """
        connection = self._connection_or_none
        if self._is_closed or connection is None:
            return
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        try:
            for consumer in tuple(self._consumers):
                await consumer.close(min(LEAVE_S, connection.left_s(end_ns)))
            await self._flushed(end_ns)
            await self._drained(connection, end_ns)
        finally:
            self._is_closed = True
            if self._cluster_client is not None:
                self._cluster_client.close()
            async with AsyncExitStack() as all_of_them:  # closes every one, even if another raises
                if self._spooling is not None:
                    all_of_them.callback(self._spooling.close)  # called last
                for each in reversed(self._connections()):
                    all_of_them.push_async_callback(each.hang_up, end_ns)
        self._raise_unseen()

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.open().__await__()
        self._is_awaited = True
        return self

    async def __aenter__(self) -> Self:
        if not self._is_awaited:  # after `async with await connect(...)` the client is open
            await self.open()
        self._is_awaited = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with failures_noted(error):
            await self.close()
