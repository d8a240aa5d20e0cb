"""The face for programs on a loop: the names of `sync`, awaited.

    async with fairway.aio.connect("fairway://127.0.0.1:20880") as fw:
        receipt = await fw.send("order.changed", b"...")              durable; waits for room when the buffer is full
        receipts = await asyncio.gather(*(fw.send("order.changed", each) for each in payloads))         few batches
        async with fw.consumer("order.changed", group="hotel") as consumer:
            async for message in consumer:
                message.ack()

Net, clock and chance are parameters, so that a client runs in a simulation too.
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
from fairway.client.aio_consumer import AioConsumer
from fairway.client.aio_delayed import AioAnswers, AioDelayed
from fairway.client.aio_fleet import AioClusterClient
from fairway.client.aio_herd import AioConsumerLink
from fairway.client.aio_pending import AioBatch, AioPending
from fairway.client.aio_way import AioServerConnection
from fairway.client.asking import AnswerT, Command
from fairway.client.client_log import ClientLog, JoinLog
from fairway.client.commands import SCAN_BYTES, Scanning, SeekTarget
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
from fairway.client.delaying import due_of, dues_of, is_far
from fairway.client.fleet import ClusterClient
from fairway.client.hand import LEAVE_S
from fairway.client.many import slices
from fairway.client.merging import is_elsewhere
from fairway.client.settings import ConsumerSettings, id_of, options_of
from fairway.client.spool import SpoolOptions, SpoolState
from fairway.client.spool import options_of as options_of_spool
from fairway.client.spool_keeper import AnySpoolHandle
from fairway.errors import BufferFull, Misuse, Refused, Unreachable
from fairway.protocol.admin import Configured, Depth, Described, Redriven, Removed, Sought, Switched
from fairway.protocol.consuming import ConsumerSession
from fairway.protocol.messages import ControlMessage
from fairway.protocol.page import LazyBatch
from fairway.protocol.pending import BatchReceipt, Receipt
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock, RealClock
from fairway.world.net import Net, RealNet
from fairway.world.rng import RealRng, Rng

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
    """A client of the broker at `fairway://HOST:PORT`, or of a cluster at `meta://HOST:PORT`: enter it with
    `async with`, or await it and `close` it.

    Raises `Unreachable` if nobody answers, after trying again for `patience`. Later on a lost connection is found
    again for ever, whatever the patience. `?delay=HOST:PORT` behind it names a delay server that is elsewhere.

    With a `spool`, a directory, the broker need not be there: messages wait on disk for it (`fairway.SpoolOptions`).
    """
    chosen = options or ClientOptions()
    chosen = replace(chosen, spool=options_of_spool(spool, chosen.spool))
    return AioClient(url, patience, chosen, net or RealNet(), clock or RealClock(), rng or RealRng())


class AioClient:
    """A connection to a broker, on one loop."""

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
        """With a `log`, its connections and dead letters are reported there."""
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
        self._way_or_none: AioServerConnection | None = None
        self._fleet: AioClusterClient | None = None  # where it is a cluster
        self._spooling: AnySpoolHandle | None = None
        self._delay_way: AioServerConnection | None = None  # to a delay server that is elsewhere, once it was needed
        self._is_closed = False
        self._is_awaited = False  # and not entered since

    async def open(self) -> None:
        """Connect; `async with` and `await` do it."""
        if self._way_or_none is not None or self._is_closed:
            raise Misuse("a client is opened once: connect again")
        meta = self._target.meta
        way = self._way_or_none = self._new_way(meta_server(meta) if meta else Goal(self._target.brokers))
        if meta:
            self._fleet = AioClusterClient(
                ClusterClient(way, self._new_way, self._clock, self._rng), self._options.producer
            )
        try:
            if self._options.spool is not None:
                fleet = None if self._fleet is None else self._fleet.inner
                self._spooling = way.spooling(self._options.spool, self._rng, fleet)
            await way.wait_connected(self._patience_s)
        except BaseException as error:
            if isinstance(error, Unreachable) and self._spooling is not None:
                return
            self._is_closed = True
            way.link.abort()
            if self._spooling is not None:
                self._spooling.close()
            raise

    def _new_way(self, goal: Goal) -> AioServerConnection:
        watch = None if self._log is None else self._log.connection(goal)
        return AioServerConnection(goal, self._options, self._net, self._clock, self._rng, watch)

    @property
    def _way(self) -> AioServerConnection:
        way = self._way_or_none
        if way is None or self._is_closed:
            raise Misuse("this client is not open: `async with fairway.aio.connect(url) as client`")
        way.link.check()
        return way

    def _delaying(self) -> AioServerConnection:
        """Where delayed messages go, and questions about them."""
        way = self._way
        if not self._target.delay:
            return way
        if self._delay_way is None:
            self._delay_way = self._new_way(delay_server(self._target.delay))
        self._delay_way.check()
        return self._delay_way

    def _ways(self) -> list[AioServerConnection]:
        if self._fleet is not None:
            return self._fleet.ways
        return [way for way in (self._way_or_none, self._delay_way) if way is not None]

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
        """Put a message on its way; awaiting it waits until it is durable, and gives its receipt.

        With `after` or `at` it is delivered then, and never before; a time that is past means at once. It is on its way
        before it is awaited, unless the buffer is full: then awaiting it waits for room first.
        """
        if self._fleet is not None:
            message, is_alone = self._message(payload, key, tags, headers, id, after, at)
            return self._fleet.put(subject, message, is_alone=is_alone)
        if after is not None or at is not None:
            way, add = self._due_add(due_of(after, at, self._clock), subject, payload, key, tags, headers, id)
        else:
            try:
                return self.send_nowait(subject, payload, key, tags, headers, id)
            except BufferFull as full:
                born = None if id is None else id_of(id)
                plain = partial(self._way.producing.add, subject, payload, key, tags, headers, born)
                return self._way.put_later(plain, full)
        try:
            return way.put_now(add)
        except BufferFull as full:
            return way.put_later(add, full)

    def _message(
        self,
        payload: bytes,
        key: str | None,
        tags: Collection[str],
        headers: Mapping[str, str] | None,
        id: MessageId | str | None,
        after: Duration | None,
        at: datetime | None,
    ) -> tuple[tuple[Any, ...], bool]:
        """All that belongs to a message, and whether it is better off in a batch of its own."""
        self._way.check()
        due_ms = 0 if after is None and at is None else due_of(after, at, self._clock)
        born = None if id is None else id_of(id)
        return (payload, key, tags, headers, born, due_ms), bool(due_ms) and is_far(due_ms, self._clock)

    def _due_add(
        self,
        due_ms: int,
        subject: str,
        payload: bytes,
        key: str | None,
        tags: Collection[str],
        headers: Mapping[str, str] | None,
        id: MessageId | str | None,
    ) -> tuple[AioServerConnection, Callable[[], AioPending]]:
        way = self._delaying()
        add = way.producing.add_alone if is_far(due_ms, self._clock) else way.producing.add
        return way, partial(add, subject, payload, key, tags, headers, None if id is None else id_of(id), due_ms)

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
        """Put a message on its way, or raise `BufferFull`; what it returns may be awaited."""
        if self._fleet is not None:
            message, is_alone = self._message(payload, key, tags, headers, id, after, at)
            return self._fleet.put_now(subject, message, is_alone=is_alone)
        if after is not None or at is not None:
            delaying, add = self._due_add(due_of(after, at, self._clock), subject, payload, key, tags, headers, id)
            return delaying.put_now(add)
        way = self._way
        producing = way.producing
        try:
            pending = producing.add(subject, payload, key, tags, headers, None if id is None else id_of(id))
        except BufferFull:
            if producing.is_crammed:  # room is made, for the next time
                way.link.stir()
            raise
        if producing.is_stirred:
            producing.is_stirred = False
            way.link.stir()
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
        """Many messages in their order; returns when all are durable, with one receipt per batch.

        `after` or `at` is one time for all of them, or a list with one for each.
        """
        due_ms = dues_of(len(payloads), after, at, self._clock)
        batches: list[AioBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids, due_ms=due_ms):
            if self._fleet is not None:
                self._way.check()
                batches += await self._fleet.put_many(subject, part, is_due=due_ms is not None)
                continue
            way = self._way if due_ms is None else self._delaying()
            add = partial(way.producing.add_many, subject, part.payloads, **part.columns)
            try:
                batches += add()
            except BufferFull as full:
                batches += await way.wait_and_put(add, full)
            way.link.pump()
        return [await each for each in batches]

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  as in the sync face
        """Wait until everything sent so far is stored, or has failed; raises a group of the failures nobody saw."""
        limit_s = limit_of(timeout)
        self._way.check()
        if not await self._flushed(None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)):
            raise not_stored_yet(sum(way.producing.messages for way in self._ways()), timeout)
        self._raise_unseen()

    async def _flushed(self, end_ns: int | None) -> bool:
        """Whether everything is settled by then."""
        flushing = [(way, way.begin_flush()) for way in self._ways()]
        return all([await way.flushed(each, end_ns) for way, each in flushing])

    # --- the spool ---------------------------------------------------------------------------------------------------

    @property
    def spool(self) -> SpoolState | None:
        """How the spool stands; None: this client has none."""
        return None if self._spooling is None else self._spooling.spool.state()

    async def wait_drained(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until nothing is in the spool any more, which needs a broker; False: it took too long."""
        way, spooling = self._way, self._spooling
        return spooling is None or await way.link.wait(lambda: spooling.spool.is_drained, limit_of(timeout))

    async def _drained(self, way: AioServerConnection, end_ns: int) -> None:
        """Before the end: as long as it goes on by itself. The rest is for whoever uses the spool next."""
        spooling = self._spooling
        if spooling is not None:
            spool = spooling.spool
            await way.link.wait(lambda: not spool.is_going_on, way.left_s(end_ns))

    def _raise_unseen(self) -> None:
        unseen = [error for way in self._ways() for error in way.producing.take_unseen()]
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> AioConsumer:
        """Join a group on a subject. `fairway.ConsumerOptions` says what can be set."""
        way, options = self._way, options_of(subject, group, settings)
        if self._fleet is not None:
            return self._herded(self._fleet, AioConsumerLink(options, way, self._clock, self._rng, self._log))
        link, line = way.link, way.core.line
        on_event = None if self._log is None else self._log.listener(line)
        session = ConsumerSession(
            options,
            self._clock,
            self._rng,
            on_change=link.stir,
            on_event=on_event,
            on_join_delayed=JoinLog(line, self._log),
        )
        made = AioConsumer(session, partial(line.remove, session), link, self._clock, self._consumers.remove)
        self._consumers.append(made)
        line.add(session, self._clock.monotonic_ns(), session.detach)
        link.stir()
        return made

    def _herded(self, fleet: AioClusterClient, link: AioConsumerLink) -> AioConsumer:
        """A consumer on every broker group of its subject."""
        herd = link.herd

        def left(consumer: AioConsumer) -> None:
            fleet.inner.leave(herd)
            self._consumers.remove(consumer)

        made = AioConsumer(herd, herd.forget, link, self._clock, left)
        self._consumers.append(made)
        fleet.inner.join(herd)
        return made

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, message: ControlMessage, timeout: Duration = ASK_S) -> ControlMessage:  # noqa: ASYNC109
        """Any request of `fairway.protocol`, and its answer; raises `Refused`, or `OutcomeUnknown` if that was lost."""
        return await self._answer(commands.any_of(message), timeout)

    async def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:  # noqa: ASYNC109
        return (await self._ask(command, timeout))[0]

    async def _ask(
        self,
        command: Command[AnswerT],
        timeout: Duration = ASK_S,  # noqa: ASYNC109
    ) -> tuple[AnswerT, Sequence[Bytes]]:
        way = self._way
        if self._fleet is not None:
            return await self._fleet.ask(command, timeout), ()
        return await way.ask(command, timeout)

    async def _ask_delayed(self, command: Command[AnswerT]) -> AnswerT:
        if self._fleet is not None:
            return await self._answer(command)
        way = self._delaying()
        await way.wait_connected(self._patience_s)
        return (await way.ask(command, ASK_S))[0]

    async def _askers_delayed(self) -> list[AioAnswers]:
        """One for each group of delay servers."""
        return [self._ask_delayed] if self._fleet is None else await self._fleet.delay_askers()

    async def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """The broker, its subjects and groups, one page; `next` of the answer is `after` of the next page."""
        return await self._answer(commands.describe(subject, group, depth=depth, after=after))

    async def seek(self, subject: str, group: str, to: SeekTarget) -> Sought:
        """Move a group: to 'earliest', 'latest', a sequence, or a time."""
        return await self._answer(commands.seek(subject, group, to))

    async def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Hand nothing out to a group, or to one consumer of it, until `resume`."""
        return await self._answer(commands.switch(subject, group, consumer, is_on=True))

    async def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return await self._answer(commands.switch(subject, group, consumer, is_on=False))

    async def go_on(self, subject: str, group: str, key: str | None = None) -> Switched:
        """With a key that has halted behind a dead letter, or with all that have."""
        return await self._answer(commands.go_on(subject, group, key))

    async def read_only(self, subject: str, is_on: bool) -> Switched:
        """Take no more messages for a subject, or take them again."""
        return await self._answer(commands.read_only(subject, is_on=is_on))

    async def weight(self, subject: str, group: str, weight: float) -> None:
        """A group's share of the broker's time; 1 unless set."""
        await self._answer(commands.weigh(subject, group, weight))

    async def redrive(
        self, subject: str, group: str, ids: Sequence[str | MessageId] | None = None, *, rate_per_s: int = 0
    ) -> Redriven:
        """Dead letters of a group back to it: those with these ids, or all."""
        return await self._answer(commands.redrive(subject, group, ids, rate_per_s))

    async def remove_subject(self, subject: str, *, force: bool = False) -> Removed:
        """Remove a subject, its groups, their inboxes and dead letters. Refused where messages would be lost or
        consumers are connected, unless `force`. Whoever sends to the subject or joins it later makes a new one."""
        return await self._answer(commands.remove_subject(subject, is_forced=force))

    async def remove_group(
        self, subject: str, group: str, *, force: bool = False, dead_letters: bool = False
    ) -> Removed:
        """Remove a group and its inbox; its dead letters stay, unless there are none or `dead_letters`. Refused where
        the group has not handled all messages or consumers are connected, unless `force`."""
        return await self._answer(commands.remove_group(subject, group, is_forced=force, takes_dead=dead_letters))

    async def configure(
        self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int
    ) -> Configured:
        """Compare and set a group's configuration; its own `version` is the next one. 0: there is no such group yet."""
        return await self._answer(commands.configure(subject, group, config, expected_version))

    async def scan(
        self, subject: str, start: SeekTarget = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> AsyncIterator[LazyBatch]:
        """Stored batches without a group, up to `end` or what is committed when it begins."""
        way = self._way
        ways = [way] if self._fleet is None else await self._fleet.to_scan(subject, start, end)
        for each in ways:
            scanning = Scanning(subject, start, end, bytes_max)
            while not scanning.is_done:
                try:
                    scanned = await each.ask(scanning.command(), ASK_S)
                except Refused as refused:
                    if is_elsewhere(refused, ways):
                        break
                    raise
                for page in scanning.pages(*scanned):
                    yield page

    # --- ending ------------------------------------------------------------------------------------------------------

    async def close(self, timeout: Duration = CLOSE_S) -> None:  # noqa: ASYNC109
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody looked at; what is not stored by then is among them.
        """
        way = self._way_or_none
        if self._is_closed or way is None:
            return
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        try:
            for consumer in tuple(self._consumers):
                await consumer.close(min(LEAVE_S, way.left_s(end_ns)))
            await self._flushed(end_ns)
            await self._drained(way, end_ns)
        finally:
            self._is_closed = True
            if self._fleet is not None:
                self._fleet.inner.close()
            async with AsyncExitStack() as all_of_them:  # whatever happens to one of them
                if self._spooling is not None:
                    all_of_them.callback(self._spooling.close)  # called last
                for each in reversed(self._ways()):
                    all_of_them.push_async_callback(each.hang_up, end_ns)
        self._raise_unseen()

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.open().__await__()
        self._is_awaited = True
        return self

    async def __aenter__(self) -> Self:
        if not self._is_awaited:  # `async with await connect(...)`: it is open
            await self.open()
        self._is_awaited = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except ExceptionGroup as failed:
            if error is None:
                raise
            note_failures(error, failed)
