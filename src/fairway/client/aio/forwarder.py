"""The process-forward producer for asyncio: tasks take the place of threads.

    async with fairway.aio.Forwarder(client, price, workers=100) as forwarder:
        await forwarder.accept(request)

`process` may be a coroutine function. `fairway.client.sync.forwarder` describes the rest.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self

from fairway.client.aio.client import AioClient
from fairway.client.core import Duration, limit_of, seconds_of
from fairway.client.forwarder_buffer import (
    FailedItem,
    ForwarderBuffer,
    ForwarderCounts,
    ForwarderOptions,
    Item,
    ItemJournal,
    ItemT,
    Made,
    lost_items,
    open_buffer,
)
from fairway.client.sync.forwarder import KEEP_S, STOP_S
from fairway.errors import BufferFull, Misuse
from fairway.runtime.clock import RealClock
from fairway.runtime.loop_link import ChangeWaiters


class AioForwarder(Generic[ItemT]):
    """The forwarder for tasks. Enter it on the loop that it lives on."""

    def __init__(self, client: AioClient, process: Callable[[ItemT], Made | Awaitable[Made]], **settings: Any) -> None:
        """The settings are those of `fairway.ForwarderOptions`."""
        self._client = client
        self._process = process
        self._options: ForwarderOptions[ItemT] = ForwarderOptions(**settings)
        self._clock = RealClock()
        self._is_stopping = self._is_stopped = False
        self._changes = ChangeWaiters()
        self._tasks: list[asyncio.Task[None]] = []
        self._journal: ItemJournal | None = None
        self._buffer_or_none: ForwarderBuffer[ItemT] | None = None

    def start(self) -> None:
        """Start the tasks; `async with` calls this."""
        if self._buffer_or_none is not None:
            raise Misuse("a forwarder is started once: make another")
        loop = asyncio.get_running_loop()

        def post(callback: Callable[..., None], *args: object) -> None:
            loop.call_soon_threadsafe(callback, *args)

        self._journal, self._buffer_or_none = open_buffer(self._options, self._clock, post, self._changes.announce)
        work = [self._work() for _ in range(self._options.workers)]
        self._tasks = [loop.create_task(each, name="fairway-forwarder") for each in [*work, self._keep_time()]]

    @property
    def _buffer(self) -> ForwarderBuffer[ItemT]:
        if self._buffer_or_none is None:
            raise Misuse("this forwarder has not begun: `async with fairway.aio.Forwarder(...) as forwarder`")
        return self._buffer_or_none

    # --- for users ---------------------------------------------------------------------------------------------------

    async def accept(self, item: ItemT, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  as in the sync face
        """Accept an item, and return at once.

        If there is no room, `when_full` decides: wait for `timeout` (or `block` of the options), raise `BufferFull`, or
        write the item to the journal.
        """
        end_ns = self._clock.monotonic_ns() + int(seconds_of(self._options.block if timeout is None else timeout) * 1e9)
        while True:
            try:
                self.accept_nowait(item)
            except BufferFull:
                left_ns = end_ns - self._clock.monotonic_ns()
                if self._options.when_full == "raise" or left_ns <= 0:
                    raise
                await self._changes.wait_once(left_ns / 1e9)
            else:
                return

    def accept_nowait(self, item: ItemT) -> None:
        """The same without a wait: raises `BufferFull` if there is no room."""
        if self._is_stopping:
            raise Misuse("this forwarder is stopped: make another")
        self._buffer.accept(item)

    async def persist(self, timeout: Duration = KEEP_S) -> None:  # noqa: ASYNC109
        """Return when every item accepted so far is sent on or on disk. Raises TimeoutError after `timeout`."""
        self._buffer.check_durable()
        self._buffer.persist()
        if not await self._changes.wait(lambda: self._buffer.is_kept, seconds_of(timeout)):
            raise TimeoutError(f"not all items are on disk after {timeout} s: {self._buffer.counts()}")

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until every accepted item is sent on or set aside; False: the timeout has passed."""
        return await self._changes.wait(lambda: self._buffer.is_drained, limit_of(timeout))

    @property
    def counts(self) -> ForwarderCounts:
        return self._buffer.counts()

    @property
    def set_aside(self) -> list[FailedItem[ItemT]]:
        """The latest items that failed every attempt, with their last error."""
        return list(self._buffer.failures)

    async def stop(self, timeout: Duration = STOP_S) -> None:  # noqa: ASYNC109
        """Accept no more items, send on those that wait, end the tasks.

        Items that are not sent on within `timeout` go to the journal, and the next forwarder with this journal sends
        them on. Without a journal they are lost: TimeoutError says how many.
        """
        if self._is_stopped or self._buffer_or_none is None:
            return
        buffer = self._buffer
        self._is_stopping = True
        await self._changes.wait(lambda: buffer.is_drained, seconds_of(timeout))
        self._is_stopped = buffer.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        buffer.persist()
        is_kept = buffer.is_durable and await self._changes.wait(lambda: buffer.is_kept, KEEP_S)
        left = 0 if is_kept else len(list(buffer.left()))
        if self._journal is not None:
            self._journal.close(lambda: buffer.journals)
        if left:
            raise lost_items(left, timeout)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # --- in the tasks ------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while not self._is_stopped:
            await self._changes.wait_once(self._buffer.keep_time())

    async def _work(self) -> None:
        while not self._is_stopped:
            item = self._buffer.take(self._clock.monotonic_ns())
            if item is None:
                await self._changes.wait_once(None)
                continue
            try:
                sent = await self._forward(item)
            except Exception as error:
                self._buffer.fail(item, error, self._clock.monotonic_ns())
            else:
                self._buffer.finish(item, sent)

    async def _forward(self, item: Item[ItemT]) -> int:
        """Process an item, send the messages that it made, wait for the receipts."""
        made = self._process(item.value)
        if inspect.isawaitable(made):
            made = await made
        sends = item.send(self._client.send, made)
        for each in sends:
            await each
        return len(sends)
