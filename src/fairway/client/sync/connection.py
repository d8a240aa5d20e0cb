"""The connections of a blocking client, and the outcomes of what is sent there. Callers block here.

A client has one connection to its broker. If the URL names a delay server, the client has a second connection from the
first message or request that goes there. In a cluster, a client has a connection to a meta server and one to each group
of servers that its subjects are on. `SyncClusterClient` sends and asks through all of these. `ConsumerLink` takes the
place of a link for a consumer on several broker groups: its threads wait there for news from any of them.

Threads can wait for the outcomes of `send` and `send_many`. A message costs no lock and no event of its own: only a
thread that has to wait makes an event, for that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    limit_of,
    no_answer,
    seconds_of,
    unreachable,
)
from fairway.client.delayed_messages import AskDelayServer
from fairway.client.spool.cluster import open_cluster_spool
from fairway.client.spool.spool import SpoolHandle, SpoolOptions, open_spool
from fairway.errors import BufferFull, Misuse, Refused
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.line import NS_PER_MS, Line
from fairway.protocol.messages import ControlMessage
from fairway.protocol.receipts import BatchReceipt, Flush, Pending, PendingBatch, Receipt
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng
from fairway.runtime.threaded_link import Link
from fairway.runtime.threads import Hub

T = TypeVar("T")


class SyncBatch(PendingBatch):
    """The outcome of a batch, shared by its messages."""

    __slots__ = ("_link",)

    def __init__(self, subject: str, run_later: Callable[[Callable[[], None]], None], link: Link) -> None:
        super().__init__(subject, run_later)
        self._link = link

    def wait(self, timeout: Duration | None) -> None:
        """Return when the outcome is known. Raises TimeoutError after `timeout`; the caller may wait again."""
        if not self.done() and not self._link.wait_told(self._tell, limit_of(timeout)) and not self.done():
            raise TimeoutError(f"no receipt for a batch to {self.subject} after {timeout} s: it may still come")

    def _tell(self, told: Callable[[], None]) -> None:
        self.when_settled(lambda _: told())

    def result(self, timeout: Duration | None = None) -> BatchReceipt:
        """Wait for the receipt: the whole batch is durable. Raises the error of a failed batch."""
        self.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Wait for the outcome: the error, or None if the batch is durable."""
        self.wait(timeout)
        return super().exception()

    def add_done_callback(self, callback: Callable[[PendingBatch], object]) -> None:
        """Call `callback(batch)` from the thread that reads, or at once if the outcome is known. It must not wait."""
        with self._link.lock:
            if not self.done():
                super().add_done_callback(callback)
                return
        callback(self)


class SyncPending(Pending):
    """The outcome of one message."""

    __slots__ = ()

    batch: SyncBatch

    def result(self, timeout: Duration | None = None) -> Receipt:
        """Wait for the receipt: the message is durable. Raises the error of a failed message, or TimeoutError."""
        batch = self.batch
        if not batch.done():
            batch.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Wait for the outcome: the error, or None if the message is durable."""
        return self.batch.exception(timeout)


class PendingMany:
    """The outcome of `send_many`: the outcomes of its batches, in order."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[SyncBatch]) -> None:
        self.batches = batches

    def done(self) -> bool:
        return all(batch.done() for batch in self.batches)

    def result(self, timeout: Duration | None = None) -> list[BatchReceipt]:
        """Wait for the receipts of all batches. Raises the first failure, or TimeoutError."""
        for batch in self.batches:
            batch.wait(timeout)
        return [batch.receipt() for batch in self.batches]

    def exceptions(self, timeout: Duration | None = None) -> list[Exception]:
        """Wait for all outcomes: the errors of failed batches, empty if all are durable."""
        found = (batch.exception(timeout) for batch in self.batches)
        return [error for error in found if error is not None]

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.batches)


class SyncServerConnection:
    """A line, its sessions and its link. May be used from any number of threads."""

    def __init__(
        self,
        goal: Goal,
        options: ClientOptions,
        clock: Clock,
        rng: Rng,
        new_link: Callable[[Line, Goal], Link],
        watch: ConnectionLog | None = None,
    ) -> None:
        self._goal = goal
        self._clock = clock
        self._options = options.producer
        self.block_s = options.producer.block_ms / 1_000
        self.core: ClientCore[SyncPending, SyncBatch] = ClientCore(
            clock, rng, options, pending_type=SyncPending, batch_type=self._batch, stores=goal.stores, watch=watch
        )
        self.producing = self.core.producing
        self.link = new_link(self.core.line, goal)
        self.link.start()

    def _batch(self, subject: str, run_later: Callable[[Callable[[], None]], None]) -> SyncBatch:
        return SyncBatch(subject, run_later, self.link)

    def wait_connected(self, patience_s: float) -> None:
        """Return when a connection has been made, now or before. Raises `Unreachable` if that takes too long."""
        link, core = self.link, self.core
        link.wait(core.is_decided, FIRST_S)
        if patience_s and not core.is_connected():
            link.wait(core.is_connected, patience_s)
        if not core.is_connected():
            raise unreachable(self._goal, core.line.trouble)

    def spooling(
        self, options: SpoolOptions, rng: Rng, cluster_client: ClusterClient[SyncServerConnection] | None
    ) -> SpoolHandle:
        """Start a spool beside this connection; in a cluster, beside all connections."""
        if cluster_client is not None:
            made: SpoolHandle = open_cluster_spool(options, cluster_client, self._clock, rng, post=self._post)
        else:
            with self.link.lock:
                made = open_spool(options, self.core, self._clock, rng, post=self._post, on_change=self.link.stir)
        made.start()
        return made

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Run a completion. A thread of the disk calls this."""
        with self.link.lock:
            callback(*args)
            self.link.announce()
        self.link.pump()

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, add: Callable[[], T], timeout: Duration | None) -> T:
        """Add messages to the buffer, and wait for room if there is none."""
        try:
            return self.put_now(add)
        except BufferFull as full:
            return self.wait_and_put(add, full, timeout)

    def put_now(self, add: Callable[[], T]) -> T:
        """The same without a wait: raises `BufferFull` if there is no room."""
        producing = self.producing
        try:
            with self.link.lock:
                added = add()
                is_stirred, producing.is_stirred = producing.is_stirred, False
        except BufferFull:
            if producing.is_crammed:  # the spool makes room for the next call
                self.link.pump()
            raise
        if is_stirred:
            self.link.pump()
        return added

    def wait_and_put(self, add: Callable[[], T], full: BufferFull, timeout: Duration | None) -> T:
        """Wait for room, in turn, and add again. With `when_full="raise"`, raise `full` at once."""
        if self._options.when_full == "raise":
            raise full
        wait_ns = self._options.block_ms * NS_PER_MS if timeout is None else int(seconds_of(timeout) * 1e9)
        link, end_ns = self.link, self._clock.monotonic_ns() + wait_ns
        while not link.in_reader and self._clock.monotonic_ns() < end_ns:
            has_room: list[bool] = []
            with link.lock:
                cancel = self.producing.when_room(full.messages, full.size_bytes, partial(has_room.append, True))
            link.pump()
            try:
                link.wait(partial(bool, has_room), self.left_s(end_ns))
            finally:
                with link.lock:
                    cancel()
            try:
                with link.lock:
                    added = add()
            except BufferFull as still:
                full = still
            else:
                link.pump()
                return added
        raise full

    def begin_flush(self) -> Flush:
        """Send all that is buffered; `flushed` waits for the outcome."""
        with self.link.lock:
            flushing = self.producing.flush()
        self.link.pump()
        return flushing

    def flushed(self, flushing: Flush, end_ns: int | None) -> bool:
        """Wait until everything is settled, or until `end_ns`; False: not everything is settled."""
        return self.link.wait(lambda: flushing.is_done, None if end_ns is None else self.left_s(end_ns))

    def take_unseen(self) -> list[Exception]:
        with self.link.lock:
            return self.producing.take_unseen()

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, command: Command[AnswerT], timeout: Duration) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer to a command, and its attachments."""
        link = self.link
        with link.lock:
            request = self.core.requests.put(CommandRequest(command))
        link.pump()
        try:
            if not link.wait(request.is_answered, seconds_of(timeout)):
                raise no_answer(request, timeout, self.core.line.trouble)
        finally:
            request.is_abandoned = True
        return request.answer()

    def answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:
        """The answer to a command, alone."""
        return self.ask(command, timeout)[0]

    # --- ending ------------------------------------------------------------------------------------------------------

    def left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def hang_up(self, end_ns: int) -> None:
        """Give up all that is not stored, say goodbye, end the link."""
        link, line = self.link, self.core.line
        with link.lock:
            self.producing.give_up("the client was closed before an answer came")
            line.close(self._clock.monotonic_ns(), patience_ms=self._goal.patience_ms)
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, min(1.0, self.left_s(end_ns)))
        link.close(1.0)
        for callback in line.callbacks():
            callback()


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
