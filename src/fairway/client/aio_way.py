"""What `sync_way` is to threads, on a loop: one line of a client and the link that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fairway.client.aio_pending import AioBatch, AioPending
from fairway.client.asking import AnswerT, Command
from fairway.client.core import (
    ClientCore,
    ClientOptions,
    ConnectionWatch,
    Duration,
    Goal,
    no_answer,
    seconds_of,
    unreachable,
)
from fairway.client.fleet import ClusterClient
from fairway.client.spool import SpoolOptions
from fairway.client.spool_keeper import AnySpoolHandle, ClusterSpoolHandle, SpoolHandle
from fairway.errors import BufferFull, Misuse
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.pending import Receipt
from fairway.protocol.waiters import Flush
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock
from fairway.world.loop_link import LoopLink
from fairway.world.net import Net
from fairway.world.rng import Rng

T = TypeVar("T")

FIRST_S = 30.0  # for the first attempt to connect to succeed or fail


class AioServerConnection:
    """A line, its sessions and its link. To be made on the loop that it lives on."""

    def __init__(
        self,
        goal: Goal,
        options: ClientOptions,
        net: Net,
        clock: Clock,
        rng: Rng,
        watch: ConnectionWatch | None = None,
    ) -> None:
        self._goal = goal
        self._clock = clock
        self._options = options.producer
        self.core: ClientCore[AioPending, AioBatch] = ClientCore(
            clock, rng, options, pending_type=AioPending, batch_type=AioBatch, stores=goal.stores, watch=watch
        )
        self.producing = self.core.producing
        self._is_closed = False
        self.link = LoopLink(self.core.line, goal.addresses, net, clock)

    def check(self) -> None:
        """Raise if nothing will ever go this way again."""
        if self._is_closed:
            raise Misuse("this client was closed: connect again")
        self.link.check()

    async def wait_connected(self, patience_s: float) -> None:
        """Return when a connection has been made, now or before; `Unreachable` if that takes too long."""
        link, core = self.link, self.core
        await link.wait(core.is_decided, FIRST_S)
        if patience_s and not core.is_connected():
            await link.wait(core.is_connected, patience_s)
        if not core.is_connected():
            raise unreachable(self._goal, core.line.trouble)

    def spooling(
        self, options: SpoolOptions, rng: Rng, fleet: ClusterClient[AioServerConnection] | None
    ) -> AnySpoolHandle:
        """Another way than this one, for what cannot go to the broker now; in a cluster, than all ways of the fleet."""
        loop = asyncio.get_running_loop()

        def post(callback: Callable[..., None], *args: object) -> None:
            loop.call_soon_threadsafe(self._on_post, callback, *args)

        made: AnySpoolHandle = (
            SpoolHandle(options, self.core, self._clock, rng, post=post, on_change=self.link.stir)
            if fleet is None
            else ClusterSpoolHandle(options, fleet, self._clock, rng, post=post)
        )
        made.start()
        return made

    def _on_post(self, callback: Callable[..., None], *args: object) -> None:
        callback(*args)
        self.link.stir()

    # --- sending -----------------------------------------------------------------------------------------------------

    def put_now(self, add: Callable[[], T]) -> T:
        """Add to what is sent, or raise `BufferFull`; it leaves in this turn of the loop."""
        try:
            added = add()
        except BufferFull:
            if self.producing.is_crammed:  # room is made, for the next time
                self.link.stir()
            raise
        if self.producing.is_stirred:
            self.producing.is_stirred = False
            self.link.stir()
        return added

    def put_later(self, add: Callable[[], AioPending], full: BufferFull) -> Awaitable[Receipt]:
        """The same when there is room, for who awaits it; where nobody is to wait, raises `BufferFull` now."""
        if self._options.when_full == "raise":
            raise full
        return self._put_later(add, full)

    async def _put_later(self, add: Callable[[], AioPending], full: BufferFull) -> Receipt:
        return await (await self.wait_and_put(add, full))

    async def wait_and_put(self, add: Callable[[], T], full: BufferFull) -> T:
        """There was no room: wait for it, in turn, and try again; unless that is not wanted."""
        if self._options.when_full == "raise":
            raise full
        end_ns = self._clock.monotonic_ns() + self._options.block_ms * NS_PER_MS
        while True:
            has_room = asyncio.Event()
            cancel = self.producing.when_room(full.messages, full.size_bytes, has_room.set)
            self.link.stir()
            try:
                async with asyncio.timeout(self.left_s(end_ns)):
                    await has_room.wait()
            except TimeoutError:
                raise full from None
            finally:
                cancel()
            self.check()
            try:
                added = add()
            except BufferFull as still:
                full = still
            else:
                self.link.stir()
                return added

    def begin_flush(self) -> Flush:
        """Let everything leave; `flushed` waits for it."""
        flushing = self.producing.flush()
        self.link.pump()
        return flushing

    async def flushed(self, flushing: Flush, end_ns: int | None) -> bool:
        """Whether everything is settled by then."""
        return await self.link.wait(lambda: flushing.is_done, None if end_ns is None else self.left_s(end_ns))

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        command: Command[AnswerT],
        timeout: Duration,  # noqa: ASYNC109
    ) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer, and what is attached to it."""
        question = self.core.questions.put(command)
        self.link.stir()
        try:
            if not await self.link.wait(question.is_answered, seconds_of(timeout)):
                raise no_answer(question, timeout, self.core.line.trouble)
        finally:
            question.is_abandoned = True
        return question.answer()

    # --- ending ------------------------------------------------------------------------------------------------------

    def left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    async def hang_up(self, end_ns: int) -> None:
        """Give up what is not stored, say goodbye, end the link."""
        self._is_closed = True
        self.producing.give_up("the client was closed before an answer came")
        self.core.line.close(self._clock.monotonic_ns(), patience_ms=self._goal.patience_ms)
        await self.link.close(min(1.0, self.left_s(end_ns)))
