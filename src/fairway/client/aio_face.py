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

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from fairway.batch import MessageId
from fairway.client import commands, url
from fairway.client.aio_consumer import AioConsumer
from fairway.client.aio_pending import AioBatch, AioPending
from fairway.client.asking import AnswerT, Command
from fairway.client.commands import SCAN_BYTES, Place, Scanning
from fairway.client.core import (
    ASK_S,
    CLOSE_S,
    ClientOptions,
    Core,
    Duration,
    failures,
    limit_of,
    no_answer,
    not_stored_yet,
    note_failures,
    seconds_of,
    unreachable,
)
from fairway.client.hand import LEAVE_S
from fairway.client.loop_link import LoopLink
from fairway.client.many import slices
from fairway.client.settings import ConsumerSettings, id_of, options_of
from fairway.errors import BufferFull, Misuse
from fairway.protocol.admin import Configured, Depth, Described, Redriven, Sought, Switched
from fairway.protocol.consuming import Consuming
from fairway.protocol.delivery import Page
from fairway.protocol.frames import Bytes
from fairway.protocol.messages import Message
from fairway.protocol.pending import BatchReceipt, Receipt
from fairway.world.clock import Clock, RealClock
from fairway.world.net import Net, RealNet
from fairway.world.rng import RealRng, Rng

if TYPE_CHECKING:
    from fairway.groups import GroupConfig

T = TypeVar("T")

FIRST_S = 30.0  # for the first attempt to connect to succeed or fail


def connect(
    url: str,
    *,
    patience: Duration = 0,
    options: ClientOptions | None = None,
    net: Net | None = None,
    clock: Clock | None = None,
    rng: Rng | None = None,
) -> AioClient:
    """A client of the broker at `fairway://HOST:PORT`: enter it with `async with`, or await it and `close` it.

    Raises `Unreachable` if nobody answers, after trying again for `patience`. Later on a lost connection is found
    again for ever, whatever the patience.
    """
    return AioClient(url, patience, options, net or RealNet(), clock or RealClock(), rng or RealRng())


class AioClient:
    """A connection to a broker, on one loop."""

    def __init__(
        self, where: str, patience: Duration, options: ClientOptions | None, net: Net, clock: Clock, rng: Rng
    ) -> None:
        self._addresses = url.parse(where)
        self._patience_s = seconds_of(patience)
        self._options = options or ClientOptions()
        self._net = net
        self._clock = clock
        self._rng = rng
        self._core: Core[AioPending, AioBatch] = Core(
            clock, rng, self._options, pending_type=AioPending, batch_type=AioBatch
        )
        self._producing = self._core.producing
        self._consumers: list[AioConsumer] = []
        self._link_or_none: LoopLink | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Connect; `async with` and `await` do it."""
        if self._link_or_none is not None or self._is_closed:
            raise Misuse("a client is opened once: connect again")
        link, core = LoopLink(self._core.line, self._addresses, self._net, self._clock), self._core
        self._link_or_none = link
        try:
            await link.wait(core.is_decided, FIRST_S)
            if self._patience_s and not core.is_connected():
                await link.wait(core.is_connected, self._patience_s)
            if not core.is_connected():
                raise unreachable(self._addresses, core.line.trouble)
        except BaseException:
            self._is_closed = True
            link.abort()
            raise

    @property
    def _link(self) -> LoopLink:
        link = self._link_or_none
        if link is None or self._is_closed:
            raise Misuse("this client is not open: `async with fairway.aio.connect(url) as client`")
        link.check()
        return link

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
    ) -> Awaitable[Receipt]:
        """Put a message on its way; awaiting it waits until it is durable, and gives its receipt.

        It is on its way before it is awaited, unless the buffer is full: then awaiting it waits for room first.
        """
        try:
            return self.send_nowait(subject, payload, key, tags, headers, id)
        except BufferFull as full:
            born = None if id is None else id_of(id)
            add = partial(self._producing.add, subject, payload, key, tags, headers, born)
            return self._send_later(add, full)

    async def _send_later(self, add: Callable[[], AioPending], full: BufferFull) -> Receipt:
        return await (await self._wait_and_add(add, full))

    def send_nowait(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
    ) -> AioPending:
        """Put a message on its way, or raise `BufferFull`; what it returns may be awaited."""
        link = self._link
        pending = self._producing.add(subject, payload, key, tags, headers, None if id is None else id_of(id))
        if self._producing.is_stirred:
            self._producing.is_stirred = False
            link.stir()
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
    ) -> list[BatchReceipt]:
        """Many messages in their order; returns when all are durable, with one receipt per batch."""
        batches: list[AioBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids):
            link = self._link
            add = partial(self._producing.add_many, subject, part.payloads, **part.columns)
            try:
                batches += add()
            except BufferFull as full:
                batches += await self._wait_and_add(add, full)
            link.pump()
        return [await each for each in batches]

    async def _wait_and_add(self, add: Callable[[], T], full: BufferFull) -> T:
        """There was no room: wait for it, in turn, and try again."""
        while True:
            link, has_room = self._link, asyncio.Event()
            cancel = self._producing.when_room(full.messages, full.size_bytes, has_room.set)
            link.stir()
            try:
                await has_room.wait()
            finally:
                cancel()
            try:
                added = add()
            except BufferFull as still:
                full = still
            else:
                self._link.stir()
                return added

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  as in the sync face
        """Wait until everything sent so far is stored, or has failed; raises a group of the failures nobody saw."""
        link, flushing = self._link, self._producing.flush()
        link.pump()
        if not await link.wait(lambda: flushing.is_done, limit_of(timeout)):
            raise not_stored_yet(self._producing.messages, timeout)
        self._raise_unseen()

    def _raise_unseen(self) -> None:
        unseen = self._producing.take_unseen()
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> AioConsumer:
        """Join a group on a subject. `fairway.ConsumingOptions` says what can be set."""
        link, line = self._link, self._core.line
        session = Consuming(options_of(subject, group, settings), self._rng, on_change=link.stir)
        made = AioConsumer(session, line, link, self._clock, self._consumers.remove)
        self._consumers.append(made)
        line.add(session, self._clock.monotonic_ns())
        link.stir()
        return made

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, message: Message, timeout: Duration = ASK_S) -> Message:  # noqa: ASYNC109
        """Any request of `fairway.protocol`, and its answer; raises `Refused`, or `OutcomeUnknown` if that was lost."""
        return await self._answer(commands.any_of(message), timeout)

    async def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:  # noqa: ASYNC109
        return (await self._ask(command, timeout))[0]

    async def _ask(
        self,
        command: Command[AnswerT],
        timeout: Duration = ASK_S,  # noqa: ASYNC109
    ) -> tuple[AnswerT, Sequence[Bytes]]:
        link, question = self._link, self._core.questions.put(command)
        link.stir()
        try:
            if not await link.wait(question.is_answered, seconds_of(timeout)):
                raise no_answer(command.message, timeout, self._core.line.trouble)
        finally:
            question.is_abandoned = True
        return question.answer()

    async def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """The broker, its subjects and groups, one page; `next` of the answer is `after` of the next page."""
        return await self._answer(commands.describe(subject, group, depth=depth, after=after))

    async def seek(self, subject: str, group: str, to: Place) -> Sought:
        """Move a group: to 'earliest', 'latest', a sequence, or a time."""
        return await self._answer(commands.seek(subject, group, to))

    async def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Hand nothing out to a group, or to one consumer of it, until `resume`."""
        return await self._answer(commands.switch(subject, group, consumer, is_on=True))

    async def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return await self._answer(commands.switch(subject, group, consumer, is_on=False))

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

    async def configure(
        self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int
    ) -> Configured:
        """Compare and set a group's configuration; its own `version` is the next one. 0: there is no such group yet."""
        return await self._answer(commands.configure(subject, group, config, expected_version))

    async def scan(
        self, subject: str, start: Place = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> AsyncIterator[Page]:
        """Stored batches without a group, up to `end` or what is committed when it begins."""
        scanning = Scanning(subject, start, end, bytes_max)
        while not scanning.is_done:
            for page in scanning.pages(*await self._ask(scanning.command())):
                yield page

    # --- ending ------------------------------------------------------------------------------------------------------

    async def close(self, timeout: Duration = CLOSE_S) -> None:  # noqa: ASYNC109
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody looked at; what is not stored by then is among them.
        """
        link = self._link_or_none
        if self._is_closed or link is None:
            return
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        try:
            for consumer in tuple(self._consumers):
                await consumer.close(min(LEAVE_S, self._left_s(end_ns)))
            flushing = self._producing.flush()
            link.pump()
            await link.wait(lambda: flushing.is_done, self._left_s(end_ns))
        finally:
            self._is_closed = True
            self._producing.give_up("the client was closed before an answer came")
            await link.close(min(1.0, self._left_s(end_ns)))
        self._raise_unseen()

    def _left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.open().__await__()
        return self

    async def __aenter__(self) -> Self:
        await self.open()
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
