"""The client for programs without a loop: `connect` returns a `Client`, whose methods block where they must.

The caller's own thread encodes and writes; one daemon thread for each connection reads (`runtime.threaded_link`). Any
number of threads may use a client. After a fork, the child's copy starts over by itself, with its own connection and
producer ids: messages that the parent had buffered stay with the parent, and so do its consumers.

Delayed messages, and requests about them, go to the broker like everything else. If the URL names a delay server, they
go there, over a second connection that the client makes at the first need.

In a cluster (`meta://`) a client has a connection to each group of servers that its subjects are on (`cluster`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from fairway.batch import MessageId
from fairway.client import commands, url
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
from fairway.client.delayed_messages import AskDelayServer, Delayed, columns_of, dues_of
from fairway.client.spool.spool import SpoolHandle, SpoolOptions, SpoolState
from fairway.client.spool.spool import options_of as options_of_spool
from fairway.client.sync.connection import (
    ConsumerLink,
    PendingMany,
    SyncBatch,
    SyncClusterClient,
    SyncPending,
    SyncServerConnection,
)
from fairway.client.sync.consumer import Consumer
from fairway.client.taken_messages import LEAVE_S, ConsumerSettings, options_of
from fairway.errors import BufferFull, Misuse, Refused, Unreachable
from fairway.protocol.admin_messages import Configured, Depth, Described, Redriven, Removed, Sought, Switched
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.delivery import LazyBatch
from fairway.protocol.line import Line
from fairway.protocol.messages import ControlMessage
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.threaded_link import Link

if TYPE_CHECKING:
    from fairway.groups import GroupConfig

# With so many messages before it a message waits for a receipt anyway, and may wait a little to be written with others.
PIPELINE_MESSAGES = 64
EXIT_S = 10.0  # wait so long for receipts when the program ends without `close`


def connect(
    url: str,
    *,
    patience: Duration = 0,
    options: ClientOptions | None = None,
    spool: str | SpoolOptions | None = None,
) -> Client:
    """Connect to the broker at `fairway://HOST:PORT`, or to a cluster with a meta server at `meta://HOST:PORT`.

    Several addresses have commas between them. Copies of one broker: the client uses the master. Meta servers: the
    client uses the first that answers. `?delay=HOST:PORT` behind a broker names a delay server that is elsewhere.

    If no server answers, the client tries again for `patience` and then raises `Unreachable`. Later the client connects
    again whenever a connection is lost, for as long as that takes, whatever the patience.

    With a `spool`, a directory, the broker need not be there: messages wait on disk for it (`fairway.SpoolOptions`).
    """
    chosen = options or ClientOptions()
    client = Client(url, replace(chosen, spool=options_of_spool(spool, chosen.spool)))
    try:
        client.wait_connected(patience)
    except BaseException as error:
        if client.spool is None or not isinstance(error, Unreachable):
            client.abandon()
            raise
    return client


class Client:
    """A client of a broker or a cluster. `close`, or leaving its `with`, waits until everything sent is stored."""

    def __init__(
        self,
        where: str,
        options: ClientOptions | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
        log: ClientLog | None = None,
    ) -> None:
        """With a `log`, the client reports its connections and dead letters there."""
        self._target = url.parse_any(where)
        self._options = options or ClientOptions()
        self._options.check()
        self._clock = clock or RealClock()
        self._rng = rng or RealRng()
        self._log = log
        self._patience_s = 0.0
        self._is_closed = False
        self.delayed = Delayed(self._ask_delayed, self._clock, self._askers_delayed)
        self._start()

    def _start(self) -> None:
        meta = self._target.meta
        self._connection = self._new_connection(meta_server(meta) if meta else Goal(self._target.brokers))
        self._cluster_client: SyncClusterClient | None = None
        if meta:
            self._cluster_client = SyncClusterClient(self._connection, self._new_connection, self._clock, self._rng)
        self._delay_connection: SyncServerConnection | None = None  # to the delay server of the URL, once needed
        self._producing = self._connection.producing
        self._consumers: list[Consumer] = []
        self._spooling = self._new_spooling(self._connection)
        self._link = self._connection.link  # last: by it other threads see that the start is complete

    def _new_spooling(self, connection: SyncServerConnection) -> SpoolHandle | None:
        if self._options.spool is None:
            return None
        try:
            return connection.spooling(self._options.spool, self._rng, self._cluster_client)
        except BaseException:
            connection.hang_up(self._clock.monotonic_ns())
            raise

    def _new_connection(self, goal: Goal) -> SyncServerConnection:
        watch = None if self._log is None else self._log.connection(goal)
        return SyncServerConnection(goal, self._options, self._clock, self._rng, self._new_link, watch)

    def _new_link(self, line: Line, goal: Goal) -> Link:
        return Link(line, goal.addresses, self._clock, at_exit=partial(self.close, EXIT_S))

    def _live(self) -> Link:
        """The link; in a forked child, a new one."""
        if self._is_closed:
            raise Misuse("this client is closed: connect again")
        link = self._link
        if link.is_orphan:
            with link.lock:
                if self._link is link:
                    self._start()
        self._link.check()
        return self._link

    def _delaying(self) -> SyncServerConnection:
        """The connection for delayed messages and requests about them."""
        link = self._live()
        if not self._target.delay:
            return self._connection
        with link.lock:
            if self._delay_connection is None and not self._is_closed:
                self._delay_connection = self._new_connection(delay_server(self._target.delay))
            connection = self._delay_connection or self._connection
        connection.link.check()
        return connection

    def _connections(self) -> list[SyncServerConnection]:
        if self._cluster_client is not None:
            return self._cluster_client.connections
        return [self._connection] if self._delay_connection is None else [self._connection, self._delay_connection]

    def wait_connected(self, patience: Duration = 0) -> None:
        """Return when a connection has been made, now or before. Raises `Unreachable` if that takes too long."""
        self._live()
        self._patience_s = seconds_of(patience)
        self._connection.wait_connected(self._patience_s)

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
        timeout: Duration | None = None,
    ) -> SyncPending:
        """Send a message; `.result()` waits until the message is durable, and returns its receipt.

        With `after` or `at`, consumers get the message then, and never before; a past time means at once. If the buffer
        is full, `when_full` of the options decides: block for `timeout` (or `block_ms` of the options) and then raise
        `BufferFull`, raise it at once, or spool.
        """
        if after is not None or at is not None or self._cluster_client is not None:
            message, is_alone = columns_of(payload, key, tags, headers, id, after, at, self._clock)
            return self._send_routed(subject, message, timeout, is_alone=is_alone)
        link = self._link
        if self._is_closed or link.is_orphan:
            link = self._live()
        producing = self._producing
        born = None if id is None else id_of(id)
        try:
            with link.lock:
                pending = producing.add(subject, payload, key, tags, headers, born)
                is_stirred, producing.is_stirred = producing.is_stirred, False
        except BufferFull as full:
            again = partial(producing.add, subject, payload, key, tags, headers, born)
            return self._connection.wait_and_put(again, full, timeout)
        if is_stirred:
            link.pump() if producing.messages < PIPELINE_MESSAGES else link.pump_soon()
        return pending

    def _send_routed(
        self, subject: str, message: tuple[Any, ...], timeout: Duration | None, *, is_alone: bool
    ) -> SyncPending:
        """Send a delayed message, or any message in a cluster."""
        cluster_client = self._cluster_client
        if cluster_client is None:
            connection = self._delaying()
            add = connection.producing.add_alone if is_alone else connection.producing.add
            return connection.put(partial(add, subject, *message), timeout)
        if self._is_closed or self._link.is_orphan:
            self._live()
            cluster_client = self._cluster_client or cluster_client  # a forked child has a new one
        return cluster_client.put(subject, message, timeout, is_alone=is_alone)

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
    ) -> SyncPending:
        """`send` that never waits: raises `BufferFull` if there is no room now."""
        self._live()
        if after is not None or at is not None or self._cluster_client is not None:
            message, is_alone = columns_of(payload, key, tags, headers, id, after, at, self._clock)
            return self._send_routed(subject, message, 0, is_alone=is_alone)
        born = None if id is None else id_of(id)
        return self._connection.put_now(partial(self._producing.add, subject, payload, key, tags, headers, born))

    def send_many(
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
        timeout: Duration | None = None,
    ) -> PendingMany:
        """Send many messages in their order, in as few batches as possible. Each batch has one receipt.

        `after` or `at` is one time for all messages, or a list with one for each. The call waits for room like `send`,
        and adds each slice of a few thousand messages whole or not at all.
        """
        due_ms = dues_of(len(payloads), after, at, self._clock)
        batches: list[SyncBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids, due_ms=due_ms):
            self._live()
            if self._cluster_client is not None:
                batches += self._cluster_client.put_many(subject, part, timeout, is_due=due_ms is not None)
                continue
            connection = self._connection if due_ms is None else self._delaying()
            batches += connection.put(
                partial(connection.producing.add_many, subject, part.payloads, **part.columns), timeout
            )
        return PendingMany(batches)

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything sent so far is stored or has failed. Raises a group of failures nobody has seen."""
        end_ns = end_of(timeout, self._clock)
        self._live()
        if not self._flushed(end_ns):
            raise not_stored_yet(sum(connection.producing.messages for connection in self._connections()), timeout)
        self._raise_unseen()

    def _flushed(self, end_ns: int | None) -> bool:
        """Wait until everything is settled, or until `end_ns`; False: not everything is settled."""
        flushing = [(connection, connection.begin_flush()) for connection in self._connections()]
        return all(connection.flushed(each, end_ns) for connection, each in flushing)

    # --- the spool ---------------------------------------------------------------------------------------------------

    @property
    def spool(self) -> SpoolState | None:
        """The state of the spool; None: this client has no spool."""
        if self._spooling is None:
            return None
        with self._link.lock:
            return self._spooling.spool.state()

    def wait_drained(self, timeout: Duration | None = None) -> bool:
        """Wait until the spool is empty, which needs a broker; False: the timeout has passed."""
        self._live()
        spooling = self._spooling
        return spooling is None or self._link.wait(lambda: spooling.spool.is_drained, limit_of(timeout))

    def _drained(self, end_ns: int) -> None:
        """Wait as long as the spool drains by itself. The next process that uses the directory sends the rest."""
        spooling = self._spooling
        if spooling is not None and not self._link.in_reader:
            spool = spooling.spool
            self._link.wait(lambda: not spool.is_going_on, self._connection.left_s(end_ns))

    def _raise_unseen(self) -> None:
        unseen = [error for connection in self._connections() for error in connection.take_unseen()]
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
        """Join a group on a subject. `fairway.ConsumerOptions` describes the settings."""
        link, options = self._live(), options_of(subject, group, settings)
        if self._cluster_client is not None:
            return self._cluster_consumer(self._cluster_client, options)
        line = self._connection.core.line
        news = link.new_waiters()
        session = logged_session(options, self._connection, self._clock, self._rng, self._log, on_news=news.announce)
        made = Consumer(session, partial(line.remove, session), link, news, self._clock, self._forget)
        with link.lock:
            line.add(session, self._clock.monotonic_ns(), session.detach, is_on_call=True)
            self._consumers.append(made)
        link.pump()
        return made

    def _cluster_consumer(self, cluster_client: SyncClusterClient, options: ConsumerOptions) -> Consumer:
        """A consumer on every broker group of its subject."""
        link = ConsumerLink(options, self._connection, self._clock, self._rng, self._log)
        cluster_consumer = link.cluster_consumer

        def left(consumer: Consumer) -> None:
            cluster_client.leave(cluster_consumer)
            self._forget(consumer)

        made = Consumer(cluster_consumer, cluster_consumer.forget, link, link, self._clock, left)
        with self._link.lock:
            self._consumers.append(made)
        cluster_client.join(cluster_consumer)
        return made

    def _forget(self, consumer: Consumer) -> None:
        with self._link.lock:
            self._consumers = [each for each in self._consumers if each is not consumer]

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, message: ControlMessage, timeout: Duration = ASK_S) -> ControlMessage:
        """Ask any request of `fairway.protocol`. Raises `Refused`, or `OutcomeUnknown` if the answer was lost."""
        return self._answer(commands.any_of(message), timeout)

    def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:
        return self._ask(command, timeout)[0]

    def _ask(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> tuple[AnswerT, Sequence[Bytes]]:
        self._live()
        if self._cluster_client is not None:
            return self._cluster_client.ask(command, timeout), ()
        return self._connection.ask(command, timeout)

    def _ask_delayed(self, command: Command[AnswerT]) -> AnswerT:
        if self._cluster_client is not None:
            return self._answer(command)
        connection = self._delaying()
        connection.wait_connected(self._patience_s)
        return connection.answer(command)

    def _askers_delayed(self) -> list[AskDelayServer]:
        """One callable for each group of delay servers."""
        return [self._ask_delayed] if self._cluster_client is None else self._cluster_client.delay_askers()

    def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """Describe the broker, its subjects and groups: one page. `next` of the answer is `after` of the next page."""
        return self._answer(commands.describe(subject, group, depth=depth, after=after))

    def seek(self, subject: str, group: str, to: SeekTarget) -> Sought:
        """Move a group's cursor to 'earliest', 'latest', a sequence, or a time."""
        return self._answer(commands.seek(subject, group, to))

    def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Deliver nothing to a group, or to one consumer of the group, until `resume`."""
        return self._answer(commands.switch(subject, group, consumer, is_on=True))

    def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return self._answer(commands.switch(subject, group, consumer, is_on=False))

    def go_on(self, subject: str, group: str, key: str | None = None) -> Switched:
        """Go on with a key that has halted behind a dead letter, or with all such keys."""
        return self._answer(commands.go_on(subject, group, key))

    def read_only(self, subject: str, is_on: bool) -> Switched:
        """Let a subject take no more messages, or let it take them again."""
        return self._answer(commands.read_only(subject, is_on=is_on))

    def weight(self, subject: str, group: str, weight: float) -> None:
        """Set a group's share of the broker's time; 1 by default."""
        self._answer(commands.weigh(subject, group, weight))

    def redrive(
        self, subject: str, group: str, ids: Sequence[str | MessageId] | None = None, *, rate_per_s: int = 0
    ) -> Redriven:
        """Give dead letters back to their group: those with these ids, or all."""
        return self._answer(commands.redrive(subject, group, ids, rate_per_s))

    def remove_subject(self, subject: str, *, force: bool = False) -> Removed:
        """Remove a subject, its groups, their inboxes and dead letters.

        Refused if messages would be lost or consumers are connected, unless `force`. A later send or join creates the
        subject anew.
        """
        return self._answer(commands.remove_subject(subject, is_forced=force))

    def remove_group(self, subject: str, group: str, *, force: bool = False, dead_letters: bool = False) -> Removed:
        """Remove a group and its inbox. Its dead letters stay, unless there are none or `dead_letters` is set.

        Refused if the group has not handled all messages or consumers are connected, unless `force`.
        """
        return self._answer(commands.remove_group(subject, group, is_forced=force, takes_dead=dead_letters))

    def configure(self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int) -> Configured:
        """Compare and set a group's configuration, which carries the next version.

        `expected_version` 0: there is no such group yet.
        """
        return self._answer(commands.configure(subject, group, config, expected_version))

    def scan(
        self, subject: str, start: SeekTarget = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> Iterator[LazyBatch]:
        """Read stored batches without a group, up to `end`, or up to the committed end at the start of the scan."""
        self._live()
        connections, cluster_client = [self._connection], self._cluster_client
        if cluster_client is not None:
            connections = cluster_client.drive(to_scan(cluster_client, subject, start, end))
        for connection in connections:
            scanning = Scanning(subject, start, end, bytes_max)
            while not scanning.is_done:
                try:
                    scanned = connection.ask(scanning.command(), ASK_S)
                except Refused as refused:
                    if is_elsewhere(refused, connections):
                        break
                    raise
                yield from scanning.pages(*scanned)

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody has looked at, messages that are not stored by then included.
        """
        if self._is_closed:
            return
        link, end_ns = self._link, self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        if link.is_orphan:
            self._is_closed = True
            return
        try:
            for consumer in tuple(self._consumers):
                consumer.close(min(LEAVE_S, self._connection.left_s(end_ns)))
            self._flushed(end_ns)
            self._drained(end_ns)
        finally:
            self._hang_up(end_ns)
        self._raise_unseen()

    def abandon(self) -> None:
        """End at once. Messages without a receipt fail; those in flight may still be stored."""
        if not self._is_closed and not self._link.is_orphan:
            self._hang_up(self._clock.monotonic_ns())

    def _hang_up(self, end_ns: int) -> None:
        with self._link.lock:
            self._is_closed = True
        if self._cluster_client is not None:
            self._cluster_client.close()
        with ExitStack() as all_of_them:  # closes every one, even if another raises
            if self._spooling is not None:
                all_of_them.callback(self._spooling.close)  # called last
            for connection in reversed(self._connections()):
                all_of_them.callback(connection.hang_up, end_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with failures_noted(error):
            self.close()
