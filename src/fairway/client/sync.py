"""The face for programs without a loop: `connect` gives a `Client`, whose methods wait where they must.

The caller's own thread encodes and writes; one daemon thread reads (`world.link`). A client may be used from any number
of threads. After a fork the child's copy starts over by itself, with a connection and producer ids of its own: what the
parent had buffered is the parent's, and so are its consumers.

Delayed messages, and questions about them, go to the broker as everything else does; or to the delay server that the
URL names, over a connection of its own that is made when it is first needed.

In a cluster (`meta://`) a client has many ways: one to each group of servers that its subjects are on (`fleet`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from fairway.batch import MessageId
from fairway.client import commands, url
from fairway.client.asking import AnswerT, Command
from fairway.client.client_log import ClientLog, JoinLog
from fairway.client.commands import SCAN_BYTES, Scanning, SeekTarget
from fairway.client.consumer import Consumer
from fairway.client.core import (
    ASK_S,
    CLOSE_S,
    ClientOptions,
    Duration,
    Goal,
    delay_server,
    failures,
    limit_of,
    meta_server,
    not_stored_yet,
    note_failures,
    seconds_of,
)
from fairway.client.delayed import AskDelayServer, Delayed
from fairway.client.delaying import due_of, dues_of, is_far
from fairway.client.fleet import ClusterClient
from fairway.client.hand import LEAVE_S
from fairway.client.many import PendingMany, slices
from fairway.client.merging import is_elsewhere
from fairway.client.pending import SyncBatch, SyncPending
from fairway.client.settings import ConsumerSettings, id_of, options_of
from fairway.client.spool import SpoolOptions, SpoolState
from fairway.client.spool import options_of as options_of_spool
from fairway.client.spool_keeper import AnySpoolHandle
from fairway.client.sync_fleet import SyncClusterClient
from fairway.client.sync_herd import ConsumerLink
from fairway.client.sync_way import SyncServerConnection
from fairway.errors import BufferFull, Misuse, Refused, Unreachable
from fairway.protocol.admin import Configured, Depth, Described, Redriven, Removed, Sought, Switched
from fairway.protocol.consuming import ConsumerSession
from fairway.protocol.line import Line
from fairway.protocol.messages import ControlMessage
from fairway.protocol.page import LazyBatch
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock, RealClock
from fairway.world.link import Link
from fairway.world.rng import RealRng, Rng

if TYPE_CHECKING:
    from fairway.groups import GroupConfig

EXIT_S = 10.0  # for what is buffered to be stored when the program ends without `close`


def connect(
    url: str,
    *,
    patience: Duration = 0,
    options: ClientOptions | None = None,
    spool: str | SpoolOptions | None = None,
) -> Client:
    """A client of the broker at `fairway://HOST:PORT` (copies of it with commas between them: the one that leads), or
    of a cluster with a meta server at `meta://HOST:PORT` (several, with commas between them: the first that answers).

    Raises `Unreachable` if nobody answers, after trying again for `patience`. Later on a lost connection is found
    again for ever, whatever the patience. `?delay=HOST:PORT` behind it names a delay server that is elsewhere.

    With a `spool`, a directory, the broker need not be there: messages wait on disk for it (`fairway.SpoolOptions`).
    """
    chosen = options or ClientOptions()
    client = Client(url, replace(chosen, spool=options_of_spool(spool, chosen.spool)))
    try:
        client.wait_connected(patience)
    except Unreachable:
        if client.spool is None:
            client.abandon()
            raise
    except BaseException:
        client.abandon()
        raise
    return client


class Client:
    """A connection to a broker. Leaving its `with`, or `close`, waits until everything that was sent is stored."""

    def __init__(
        self,
        where: str,
        options: ClientOptions | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
        log: ClientLog | None = None,
    ) -> None:
        """With a `log`, its connections and dead letters are reported there."""
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
        self._way = self._new_way(meta_server(meta) if meta else Goal(self._target.brokers))
        self._fleet: SyncClusterClient | None = None
        if meta:
            self._fleet = SyncClusterClient(
                ClusterClient(self._way, self._new_way, self._clock, self._rng), self._options.producer
            )
        self._delay_way: SyncServerConnection | None = None  # to a delay server that is elsewhere
        self._core, self._producing = self._way.core, self._way.producing
        self._consumers: list[Consumer] = []
        self._spooling = self._new_spooling(self._way)
        self._link = self._way.link  # last: other threads go by it

    def _new_spooling(self, way: SyncServerConnection) -> AnySpoolHandle | None:
        if self._options.spool is None:
            return None
        try:
            fleet = None if self._fleet is None else self._fleet.inner
            return way.spooling(self._options.spool, self._rng, fleet)
        except BaseException:
            way.hang_up(self._clock.monotonic_ns())
            raise

    def _new_way(self, goal: Goal) -> SyncServerConnection:
        watch = None if self._log is None else self._log.connection(goal)
        return SyncServerConnection(goal, self._options, self._clock, self._rng, self._new_link, watch)

    def _new_link(self, line: Line, goal: Goal) -> Link:
        return Link(line, goal.addresses, self._clock, at_exit=partial(self.close, EXIT_S))

    def _live(self) -> Link:
        """The link; in a forked child a new one."""
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
        """Where delayed messages go, and questions about them."""
        link = self._live()
        if not self._target.delay:
            return self._way
        with link.lock:
            if self._delay_way is None and not self._is_closed:
                self._delay_way = self._new_way(delay_server(self._target.delay))
            way = self._delay_way or self._way
        way.link.check()
        return way

    def _ways(self) -> list[SyncServerConnection]:
        if self._fleet is not None:
            return self._fleet.ways
        return [self._way] if self._delay_way is None else [self._way, self._delay_way]

    def wait_connected(self, patience: Duration = 0) -> None:
        """Return when a connection has been made, now or before; `Unreachable` if that takes too long."""
        self._live()
        self._patience_s = seconds_of(patience)
        self._way.wait_connected(self._patience_s)

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
        """Put a message on its way; `.result()` waits until it is durable and gives its receipt.

        With `after` or `at` it is delivered then, and never before; a time that is past means at once. While the buffer
        is full it waits for room, up to `timeout` (`block_ms` of the options), then raises `BufferFull`; or it raises
        that at once, or spools, as `when_full` says.
        """
        if after is not None or at is not None:
            due_ms = due_of(after, at, self._clock)
            if self._fleet is not None:
                return self._send_by(self._fleet, subject, payload, key, tags, headers, id, due_ms, timeout)
            way = self._delaying()
            add = way.producing.add_alone if is_far(due_ms, self._clock) else way.producing.add
            return way.put(partial(add, subject, payload, key, tags, headers, _born(id), due_ms), timeout)
        if self._fleet is not None:
            return self._send_by(self._fleet, subject, payload, key, tags, headers, id, 0, timeout)
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
            return self._way.wait_and_put(again, full, timeout)
        if is_stirred:
            link.pump()
        return pending

    def _send_by(
        self,
        fleet: SyncClusterClient,
        subject: str,
        payload: bytes,
        key: str | None,
        tags: Collection[str],
        headers: Mapping[str, str] | None,
        id: MessageId | str | None,
        due_ms: int,
        timeout: Duration | None,
    ) -> SyncPending:
        if self._is_closed or self._link.is_orphan:
            self._live()
            fleet = self._fleet or fleet  # another one in a forked child
        message = (payload, key, tags, headers, _born(id), due_ms)
        return fleet.put(subject, message, timeout, is_alone=bool(due_ms) and is_far(due_ms, self._clock))

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
        """`send` that never waits: `BufferFull` if there is no room now."""
        self._live()
        if self._fleet is not None:
            due_ms = 0 if after is None and at is None else due_of(after, at, self._clock)
            return self._send_by(self._fleet, subject, payload, key, tags, headers, id, due_ms, 0)
        if after is None and at is None:
            return self._way.put_now(partial(self._producing.add, subject, payload, key, tags, headers, _born(id)))
        due_ms, way = due_of(after, at, self._clock), self._delaying()
        add = way.producing.add_alone if is_far(due_ms, self._clock) else way.producing.add
        return way.put_now(partial(add, subject, payload, key, tags, headers, _born(id), due_ms))

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
        """Many messages in their order, in as few batches as there can be; one receipt for each batch.

        `after` or `at` is one time for all of them, or a list with one for each. Waits for room like `send`; each slice
        of a few thousand messages is added whole or not at all.
        """
        due_ms = dues_of(len(payloads), after, at, self._clock)
        batches: list[SyncBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids, due_ms=due_ms):
            self._live()
            if self._fleet is not None:
                batches += self._fleet.put_many(subject, part, timeout, is_due=due_ms is not None)
                continue
            way = self._way if due_ms is None else self._delaying()
            batches += way.put(partial(way.producing.add_many, subject, part.payloads, **part.columns), timeout)
        return PendingMany(batches)

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything sent so far is stored, or has failed; raises a group of the failures nobody saw."""
        limit_s = limit_of(timeout)
        self._live()
        if not self._flushed(None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)):
            raise not_stored_yet(sum(way.producing.messages for way in self._ways()), timeout)
        self._raise_unseen()

    def _flushed(self, end_ns: int | None) -> bool:
        """Whether everything is settled by then."""
        flushing = [(way, way.begin_flush()) for way in self._ways()]
        return all(way.flushed(each, end_ns) for way, each in flushing)

    # --- the spool ---------------------------------------------------------------------------------------------------

    @property
    def spool(self) -> SpoolState | None:
        """How the spool stands; None: this client has none."""
        if self._spooling is None:
            return None
        with self._link.lock:
            return self._spooling.spool.state()

    def wait_drained(self, timeout: Duration | None = None) -> bool:
        """Wait until nothing is in the spool any more, which needs a broker; False: it took too long."""
        self._live()
        spooling = self._spooling
        return spooling is None or self._link.wait(lambda: spooling.spool.is_drained, limit_of(timeout))

    def _drained(self, end_ns: int) -> None:
        """Before the end: as long as it goes on by itself. The rest is for whoever uses the spool next."""
        spooling = self._spooling
        if spooling is not None and not self._link.in_reader:
            spool = spooling.spool
            self._link.wait(lambda: not spool.is_going_on, self._way.left_s(end_ns))

    def _raise_unseen(self) -> None:
        unseen = [error for way in self._ways() for error in way.take_unseen()]
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
        """Join a group on a subject. `fairway.ConsumerOptions` says what can be set."""
        link, core, options = self._live(), self._core, options_of(subject, group, settings)
        if self._fleet is not None:
            return self._herded(self._fleet, ConsumerLink(options, self._way, self._clock, self._rng, self._log))
        on_event = None if self._log is None else self._log.listener(core.line)
        session = ConsumerSession(
            options,
            self._clock,
            self._rng,
            on_change=link.stir,
            on_event=on_event,
            on_join_delayed=JoinLog(core.line, self._log),
        )
        made = Consumer(session, partial(core.line.remove, session), link, self._clock, self._forget)
        with link.lock:
            core.line.add(session, self._clock.monotonic_ns(), session.detach)
            self._consumers.append(made)
        link.pump()
        return made

    def _herded(self, fleet: SyncClusterClient, link: ConsumerLink) -> Consumer:
        """A consumer on every broker group of its subject."""
        herd = link.herd

        def left(consumer: Consumer) -> None:
            fleet.inner.leave(herd)
            self._forget(consumer)

        made = Consumer(herd, herd.forget, link, self._clock, left)
        with self._link.lock:
            self._consumers.append(made)
        fleet.inner.join(herd)
        return made

    def _forget(self, consumer: Consumer) -> None:
        with self._link.lock:
            self._consumers = [each for each in self._consumers if each is not consumer]

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, message: ControlMessage, timeout: Duration = ASK_S) -> ControlMessage:
        """Any request of `fairway.protocol`, and its answer; raises `Refused`, or `OutcomeUnknown` if that was lost."""
        return self._answer(commands.any_of(message), timeout)

    def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:
        return self._ask(command, timeout)[0]

    def _ask(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> tuple[AnswerT, Sequence[Bytes]]:
        self._live()
        if self._fleet is not None:
            return self._fleet.ask(command, timeout), ()
        return self._way.ask(command, timeout)

    def _ask_delayed(self, command: Command[AnswerT]) -> AnswerT:
        if self._fleet is not None:
            return self._answer(command)
        way = self._delaying()
        way.wait_connected(self._patience_s)
        return way.ask(command, ASK_S)[0]

    def _askers_delayed(self) -> list[AskDelayServer]:
        """One for each group of delay servers."""
        return [self._ask_delayed] if self._fleet is None else self._fleet.delay_askers()

    def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """The broker, its subjects and groups, one page; `next` of the answer is `after` of the next page."""
        return self._answer(commands.describe(subject, group, depth=depth, after=after))

    def seek(self, subject: str, group: str, to: SeekTarget) -> Sought:
        """Move a group: to 'earliest', 'latest', a sequence, or a time."""
        return self._answer(commands.seek(subject, group, to))

    def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Hand nothing out to a group, or to one consumer of it, until `resume`."""
        return self._answer(commands.switch(subject, group, consumer, is_on=True))

    def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return self._answer(commands.switch(subject, group, consumer, is_on=False))

    def go_on(self, subject: str, group: str, key: str | None = None) -> Switched:
        """With a key that has halted behind a dead letter, or with all that have."""
        return self._answer(commands.go_on(subject, group, key))

    def read_only(self, subject: str, is_on: bool) -> Switched:
        """Take no more messages for a subject, or take them again."""
        return self._answer(commands.read_only(subject, is_on=is_on))

    def weight(self, subject: str, group: str, weight: float) -> None:
        """A group's share of the broker's time; 1 unless set."""
        self._answer(commands.weigh(subject, group, weight))

    def redrive(
        self, subject: str, group: str, ids: Sequence[str | MessageId] | None = None, *, rate_per_s: int = 0
    ) -> Redriven:
        """Dead letters of a group back to it: those with these ids, or all."""
        return self._answer(commands.redrive(subject, group, ids, rate_per_s))

    def remove_subject(self, subject: str, *, force: bool = False) -> Removed:
        """Remove a subject, its groups, their inboxes and dead letters. Refused where messages would be lost or
        consumers are connected, unless `force`. Whoever sends to the subject or joins it later makes a new one."""
        return self._answer(commands.remove_subject(subject, is_forced=force))

    def remove_group(self, subject: str, group: str, *, force: bool = False, dead_letters: bool = False) -> Removed:
        """Remove a group and its inbox; its dead letters stay, unless there are none or `dead_letters`. Refused where
        the group has not handled all messages or consumers are connected, unless `force`."""
        return self._answer(commands.remove_group(subject, group, is_forced=force, takes_dead=dead_letters))

    def configure(self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int) -> Configured:
        """Compare and set a group's configuration; its own `version` is the next one. 0: there is no such group yet."""
        return self._answer(commands.configure(subject, group, config, expected_version))

    def scan(
        self, subject: str, start: SeekTarget = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> Iterator[LazyBatch]:
        """Stored batches without a group, up to `end` or what is committed when it begins."""
        self._live()
        ways = [self._way] if self._fleet is None else self._fleet.to_scan(subject, start, end)
        for way in ways:
            scanning = Scanning(subject, start, end, bytes_max)
            while not scanning.is_done:
                try:
                    scanned = way.ask(scanning.command(), ASK_S)
                except Refused as refused:
                    if is_elsewhere(refused, ways):
                        break
                    raise
                yield from scanning.pages(*scanned)

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody looked at; what is not stored by then is among them.
        """
        if self._is_closed:
            return
        link, end_ns = self._link, self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        if link.is_orphan:
            self._is_closed = True
            return
        try:
            for consumer in tuple(self._consumers):
                consumer.close(min(LEAVE_S, self._way.left_s(end_ns)))
            self._flushed(end_ns)
            self._drained(end_ns)
        finally:
            self._hang_up(end_ns)
        self._raise_unseen()

    def abandon(self) -> None:
        """End at once: what is not stored by now fails, unless it is on its way."""
        if not self._is_closed and not self._link.is_orphan:
            self._hang_up(self._clock.monotonic_ns())

    def _hang_up(self, end_ns: int) -> None:
        with self._link.lock:
            self._is_closed = True
        if self._fleet is not None:
            self._fleet.inner.close()
        with ExitStack() as all_of_them:  # whatever happens to one of them
            if self._spooling is not None:
                all_of_them.callback(self._spooling.close)  # called last
            for way in reversed(self._ways()):
                all_of_them.callback(way.hang_up, end_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ExceptionGroup as failed:
            if error is None:
                raise
            note_failures(error, failed)


def _born(id: MessageId | str | None) -> MessageId | None:
    return None if id is None else id_of(id)
