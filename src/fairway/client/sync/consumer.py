"""A consumer for programs without a loop: `for message in consumer`, or `poll`, or `take`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from fairway.client.core import Duration, end_of, seconds_of
from fairway.client.sync.connection import ConsumerLink
from fairway.client.taken_messages import HANDFUL, LEAVE_S, ResultT, Source, TakenMessages, check_most
from fairway.protocol.delivery import Message
from fairway.runtime.clock import Clock
from fairway.runtime.threaded_link import Link, ThreadWaiters


class Consumer(TakenMessages):
    """One member of a group. Several threads may take messages; each message goes to one of them."""

    _link: Link | ConsumerLink

    def __init__(
        self,
        session: Source,
        forget: Callable[[], None],
        link: Link | ConsumerLink,
        news: ThreadWaiters | ConsumerLink,
        clock: Clock,
        on_close: Callable[[Consumer], None],
    ) -> None:
        """`news` is announced after changes of this consumer alone."""
        super().__init__(session, forget, link, clock)
        self._news = news
        self._on_close = on_close

    # --- taking ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they come, until the consumer is closed."""
        while self._refill(None):
            yield from self._sound()

    def poll(self, timeout: Duration | None = None) -> Message | None:
        """The next message; None: the timeout has passed. Without a timeout the call waits for ever."""
        found = self.take(1, timeout)
        return found[0] if found else None

    def take(self, most: int = HANDFUL, timeout: Duration | None = None) -> list[Message]:
        """Between 1 and `most` messages, as soon as there are any. An empty list: the timeout has passed."""
        check_most(most)
        self._session.set_take_count(most)
        end_ns = end_of(timeout, self._clock)
        while self._refill(end_ns, most):
            if found := self._some(most):
                return found
        return []

    def _refill(self, end_ns: int | None, most: int = HANDFUL) -> bool:
        """Wait until messages are in hand; False: none came in time, or the consumer is closed."""
        while not self._in_hand and not self._take_handful(most):
            left_s = None if end_ns is None else (end_ns - self._clock.monotonic_ns()) / 1e9
            if self._is_stopped or (left_s is not None and left_s <= 0):
                return False
            self._news.wait(self._has_news, left_s)
        return True

    def _take_handful(self, most: int) -> bool:
        self._link.check()
        with self._link.lock:
            self._wake()
            has_some = self._grab(most)
            if len(self._in_hand) > 1:
                self._news.announce()  # the other threads may take some, too
        self._link.pump()  # sends settlements, and pulls more into the room that was made
        return has_some

    # --- flushing and changing ---------------------------------------------------------------------------------------

    def flush(self, timeout: Duration = LEAVE_S) -> bool:
        """Wait until the broker has confirmed every settlement so far; False: the timeout has passed.

        Raises the error that has ended the consumer, if any: then the broker may not have the last settlements.
        """
        self._link.pump()
        is_in_time = self._news.wait(self._is_quiet, seconds_of(timeout))
        self._check_lasting()
        return is_in_time

    def _change(self, change: Callable[[], ResultT]) -> ResultT:
        with self._link.lock:
            result = change()
            self._news.announce()
        self._link.pump()
        return result

    @property
    def _is_orphan(self) -> bool:
        return self._link.is_orphan

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = LEAVE_S) -> None:
        """Leave the group. The broker stores all settlements, and gives unsettled messages to others at once."""
        if self._is_closed or self._is_orphan:
            return
        self._is_closed = self._is_stopped = True
        try:
            self._leave(seconds_of(timeout))
        finally:
            self._on_close(self)

    def _leave(self, timeout_s: float) -> None:
        self._give_back()
        with self._link.lock:
            now_ns = self._clock.monotonic_ns()
            self._session.drain(now_ns, now_ns)
        self._link.pump()
        try:
            self._news.wait(lambda: self._session.is_finished, timeout_s)
        finally:
            with self._link.lock:
                if not self._session.is_finished:
                    self._session.abandon()
                self._forget()
                self._news.announce()  # wake threads that still wait for messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
