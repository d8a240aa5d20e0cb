"""A consumer on a loop: `async for message in consumer`, or `await poll()`, or `await take()`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from fairway.client.aio.connection import AioConsumerLink
from fairway.client.core import Duration, end_of, seconds_of
from fairway.client.taken_messages import HANDFUL, LEAVE_S, ResultT, Source, TakenMessages, check_most
from fairway.protocol.delivery import Message
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import ChangeWaiters, LoopLink


class AioConsumer(TakenMessages):
    """One member of a group. Several tasks may take messages; each message goes to one of them."""

    _link: LoopLink | AioConsumerLink

    def __init__(
        self,
        session: Source,
        forget: Callable[[], None],
        link: LoopLink | AioConsumerLink,
        news: ChangeWaiters,
        clock: Clock,
        on_close: Callable[[AioConsumer], None],
    ) -> None:
        """`news` is announced after changes of this consumer alone."""
        super().__init__(session, forget, link, clock)
        self._news = news
        self._on_close = on_close

    # --- taking ------------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they come, until the consumer is closed."""
        while await self._refill(None):
            for message in self._sound():
                yield message

    async def poll(self, timeout: Duration | None = None) -> Message | None:  # noqa: ASYNC109  as in the sync face
        """The next message; None: the timeout has passed. Without a timeout the call waits for ever."""
        found = await self.take(1, timeout)
        return found[0] if found else None

    async def take(self, most: int = HANDFUL, timeout: Duration | None = None) -> list[Message]:  # noqa: ASYNC109
        """Between 1 and `most` messages, as soon as there are any. An empty list: the timeout has passed."""
        check_most(most)
        self._session.set_take_count(most)
        end_ns = end_of(timeout, self._clock)
        while await self._refill(end_ns, most):
            if found := self._some(most):
                return found
        return []

    async def _refill(self, end_ns: int | None, most: int = HANDFUL) -> bool:
        """Wait until messages are in hand; False: none came in time, or the consumer is closed."""
        while not self._in_hand and not self._take_handful(most):
            left_s = None if end_ns is None else (end_ns - self._clock.monotonic_ns()) / 1e9
            if self._is_stopped or (left_s is not None and left_s <= 0):
                return False
            await self._news.wait(self._has_news, left_s)
        return True

    def _take_handful(self, most: int) -> bool:
        self._link.check()
        self._wake()
        has_some = self._grab(most)
        self._link.stir()  # pulls more into the room that was made
        return has_some

    # --- flushing and changing ---------------------------------------------------------------------------------------

    async def flush(self, timeout: Duration = LEAVE_S) -> bool:  # noqa: ASYNC109
        """Wait until the broker has confirmed every settlement so far; False: the timeout has passed.

        Raises the error that has ended the consumer, if any: then the broker may not have the last settlements.
        """
        self._link.pump()
        is_in_time = await self._news.wait(self._is_quiet, seconds_of(timeout))
        self._check_lasting()
        return is_in_time

    def _change(self, change: Callable[[], ResultT]) -> ResultT:
        result = change()
        self._news.announce()
        self._link.stir()
        return result

    # --- ending ------------------------------------------------------------------------------------------------------

    async def close(self, timeout: Duration = LEAVE_S) -> None:  # noqa: ASYNC109
        """Leave the group. The broker stores all settlements, and gives unsettled messages to others at once."""
        if self._is_closed:
            return
        self._is_closed = self._is_stopped = True
        try:
            await self._leave(seconds_of(timeout))
        finally:
            self._on_close(self)

    async def _leave(self, timeout_s: float) -> None:
        self._give_back()
        now_ns = self._clock.monotonic_ns()
        self._session.drain(now_ns, now_ns)
        self._link.pump()
        try:
            await self._news.wait(lambda: self._session.is_finished, timeout_s)
        finally:
            if not self._session.is_finished:
                self._session.abandon()
            self._forget()
            self._news.announce()  # wake tasks that still wait for messages

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
