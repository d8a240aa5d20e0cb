"""A consumer for programs without a loop: `for message in consumer`, or `poll`, or `take`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from fairway.client.core import Duration, limit_of, seconds_of
from fairway.client.hand import HANDFUL, LEAVE_S, Source, TakenMessages, check_most
from fairway.protocol.delivery import Message
from fairway.world.clock import Clock


class ThreadWaiter(Protocol):
    """What a consumer asks of its link, or of several (`sync_herd`)."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    @property
    def is_orphan(self) -> bool: ...

    def check(self) -> None: ...

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool: ...

    def announce(self) -> None: ...

    def pump(self) -> None: ...


class Consumer(TakenMessages):
    """One member of a group. Several threads may take from it; each message goes to one of them."""

    def __init__(
        self,
        session: Source,
        forget: Callable[[], None],
        link: ThreadWaiter,
        clock: Clock,
        on_close: Callable[[Consumer], None],
    ) -> None:
        """`forget` takes the session from its line, with the lock."""
        super().__init__(session)
        self._forget = forget
        self._link = link
        self._clock = clock
        self._on_close = on_close

    # --- taking ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, for ever: until the consumer is closed."""
        while self._refill(None):
            yield from self._sound()

    def poll(self, timeout: Duration | None = None) -> Message | None:
        """The next message; None if none comes in time. Without a timeout it waits for ever."""
        found = self.take(1, timeout)
        return found[0] if found else None

    def take(self, most: int = HANDFUL, timeout: Duration | None = None) -> list[Message]:
        """At least one message and at most so many, as soon as there are any; none if none come in time."""
        check_most(most)
        self._session.wish(most)
        limit_s = limit_of(timeout)
        end_ns = None if limit_s is None else self._clock.monotonic_ns() + int(limit_s * 1e9)
        while self._refill(end_ns, most):
            if found := self._some(most):
                return found
        return []

    def _refill(self, end_ns: int | None, most: int = HANDFUL) -> bool:
        """See that something is in hand; False: nothing came in time, or the consumer is closed."""
        while not self._in_hand and not self._take_handful(most):
            left_s = None if end_ns is None else (end_ns - self._clock.monotonic_ns()) / 1e9
            if self._is_stopped or (left_s is not None and left_s <= 0):
                return False
            self._link.wait(self._has_news, left_s)
        return True

    def _take_handful(self, most: int) -> bool:
        self._link.check()
        with self._link.lock:
            self._wake()
            has_some = self._grab(most)
            if len(self._in_hand) > 1:
                self._link.announce()  # for the other threads: it is for them, too
        self._link.pump()  # what was settled meanwhile leaves, and what was taken makes room for more
        return has_some

    # --- steering ----------------------------------------------------------------------------------------------------

    def flush(self, timeout: Duration = LEAVE_S) -> bool:
        """Wait until the broker has confirmed everything that was settled so far; False: it took too long.

        Raises what has ended the consumer, if something has: then what was settled last may not be.
        """
        self._link.pump()
        is_in_time = self._link.wait(self._is_quiet, seconds_of(timeout))
        self._check_lasting()
        return is_in_time

    def pause(self) -> None:
        """Take no more messages until `resume`; what is in hand stays in hand."""
        with self._link.lock:
            self._session.pause()

    def resume(self) -> None:
        with self._link.lock:
            self._session.resume()
            self._link.announce()
        self._link.pump()

    def rest(self) -> bool:
        """Give back what is here and was not begun, so that others may have it, and take no more until somebody asks
        for a message again. For a program whose handlers are all busy for long; False: there was nothing to give."""
        with self._link.lock:
            is_resting = self._rest()
            self._link.announce()
        self._link.pump()
        return is_resting

    # --- ending ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to end: loops over it end, what was not begun goes back at once, what is in the hands of handlers may
        still be settled. `close` follows."""
        if self._is_stopped or self._link.is_orphan:
            return
        self._is_stopped = True
        self._give_back()
        with self._link.lock:
            self._session.drain(self._clock.monotonic_ns())
            self._link.announce()
        self._link.pump()

    def close(self, timeout: Duration = LEAVE_S) -> None:
        """Leave the group: what was settled is stored, what was not goes back to the others at once."""
        if self._is_closed or self._link.is_orphan:
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
            self._link.wait(lambda: self._session.is_finished, timeout_s)
        finally:
            with self._link.lock:
                if not self._session.is_finished:
                    self._session.abandon()
                self._forget()
                self._link.announce()  # for threads that still wait for messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
