"""`forwarder` on a loop: tasks in the place of threads; `process` may be a coroutine function.

async with fairway.aio.Forwarder(client, price, workers=100) as forwarder:
    await forwarder.accept(request)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self

from fairway.client.aio_face import AioClient
from fairway.client.core import Duration, seconds_of
from fairway.client.forwarder import KEEP_S, STOP_S
from fairway.client.forwarder_items import FailedItem, ForwarderCounts, ForwarderOptions, Item, ItemT, Made, lost_items
from fairway.client.forwarder_journal import ItemJournal
from fairway.client.forwarder_stock import ForwarderBuffer
from fairway.errors import BufferFull, Misuse
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng


class AioForwarder(Generic[ItemT]):
    """To be entered on the loop that it lives on."""

    def __init__(self, client: AioClient, process: Callable[[ItemT], Made | Awaitable[Made]], **settings: Any) -> None:
        """The settings are those of `fairway.ForwarderOptions`."""
        self._client = client
        self._process = process
        self._options: ForwarderOptions[ItemT] = ForwarderOptions(**settings)
        self._clock = RealClock()
        self._is_stopping = self._is_stopped = False
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._journal: ItemJournal | None = None
        self._stock_or_none: ForwarderBuffer[ItemT] | None = None

    def start(self) -> None:
        """Begin; `async with` does it."""
        if self._stock_or_none is not None:
            raise Misuse("a forwarder is started once: make another")
        loop, rng = asyncio.get_running_loop(), RealRng()

        def post(callback: Callable[..., None], *args: object) -> None:
            loop.call_soon_threadsafe(callback, *args)

        if self._options.journal is not None:
            self._journal = ItemJournal(self._options, self._clock, post)
        self._stock_or_none = ForwarderBuffer(
            self._options,
            self._clock,
            rng,
            journal=None if self._journal is None else self._journal.make(rng),
            on_change=self._ring,
            on_finished=self._journal.finished if self._journal is not None else lambda _: None,
        )
        if self._journal is not None:
            self._journal.start(self._stock.adopt)
        work = [self._work() for _ in range(self._options.workers)]
        self._tasks = [loop.create_task(each, name="fairway-forwarder") for each in [*work, self._keep_time()]]

    @property
    def _stock(self) -> ForwarderBuffer[ItemT]:
        if self._stock_or_none is None:
            raise Misuse("this forwarder has not begun: `async with fairway.aio.Forwarder(...) as forwarder`")
        return self._stock_or_none

    # --- for users ---------------------------------------------------------------------------------------------------

    async def accept(self, item: ItemT, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  as in the sync face
        """Take an item in, and return at once; where there is no room wait, raise `BufferFull`, or write it down, as
        `when_full` says. `timeout` is instead of `block`."""
        end_ns = self._clock.monotonic_ns() + int(seconds_of(self._options.block if timeout is None else timeout) * 1e9)
        while True:
            try:
                self.accept_nowait(item)
            except BufferFull:
                left_ns = end_ns - self._clock.monotonic_ns()
                if self._options.when_full == "raise" or left_ns <= 0:
                    raise
                await self._wait(left_ns / 1e9)
            else:
                return

    def accept_nowait(self, item: ItemT) -> None:
        """The same without a wait."""
        if self._is_stopping:
            raise Misuse("this forwarder is stopped: make another")
        self._stock.accept(item)

    async def persist(self, timeout: Duration = KEEP_S) -> None:  # noqa: ASYNC109
        """Return when all that was accepted so far is sent on, or on disk; TimeoutError if that takes too long."""
        if not self._stock.is_durable:
            raise Misuse("this forwarder has no journal: give it one, journal='/var/lib/app/spool'")
        self._stock.persist()
        if not await self._until(lambda: self._stock.is_kept, seconds_of(timeout)):
            raise TimeoutError(f"not all items are on disk after {timeout} s: {self._stock.counts()}")

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until all that was accepted is sent on, or set aside; False: it took too long."""
        return await self._until(lambda: self._stock.is_drained, None if timeout is None else seconds_of(timeout))

    @property
    def counts(self) -> ForwarderCounts:
        return self._stock.counts()

    @property
    def set_aside(self) -> list[FailedItem[ItemT]]:
        """The latest items that failed every time, with their last error."""
        return list(self._stock.failures)

    async def stop(self, timeout: Duration = STOP_S) -> None:  # noqa: ASYNC109
        """Take nothing more, send on what there is, end the tasks.

        What is not sent on by then is written down, to be sent on by the next forwarder with this journal. Without a
        journal it is lost: TimeoutError says how many items.
        """
        if self._is_stopped or self._stock_or_none is None:
            return
        stock = self._stock
        self._is_stopping = True
        await self._until(lambda: stock.is_drained, seconds_of(timeout))
        self._is_stopped = stock.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stock.persist()
        is_kept = stock.is_durable and await self._until(lambda: stock.is_kept, KEEP_S)
        left = 0 if is_kept else len(list(stock.left()))
        if self._journal is not None:
            self._journal.close(lambda: stock.journals)
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

    def _ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something changes, or for so long."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=timeout_s)

    async def _until(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while not is_so():
            left_s = None if end_ns is None else (end_ns - self._clock.monotonic_ns()) / 1e9
            if left_s is not None and left_s <= 0:
                return False
            await self._wait(left_s)
        return True

    async def _keep_time(self) -> None:
        """What is due although nothing happens: retries, and items that have waited too long."""
        while not self._is_stopped:
            now_ns = self._clock.monotonic_ns()
            self._stock.look(now_ns)
            due_ns = self._stock.next_ns()
            if due_ns is not None and due_ns <= now_ns:
                self._ring()  # a retry: for a worker that waits
                due_ns = now_ns + 10_000_000
            await self._wait(None if due_ns is None else (due_ns - now_ns) / 1e9)

    async def _work(self) -> None:
        while not self._is_stopped:
            item = self._stock.take(self._clock.monotonic_ns())
            if item is None:
                await self._wait(None)
                continue
            try:
                sent = await self._forward(item)
            except Exception as error:
                self._stock.fail(item, error, self._clock.monotonic_ns())
            else:
                self._stock.finish(item, sent)

    async def _forward(self, item: Item[ItemT]) -> int:
        """Process it, send what came of it, wait for the receipts."""
        made = self._process(item.value)
        if inspect.isawaitable(made):
            made = await made
        sends = [
            self._client.send(each.subject, each.payload, each.key, each.tags, each.headers, name, each.after, each.at)
            for each, name in item.messages(made)
        ]
        for each in sends:
            await each
        return len(sends)
