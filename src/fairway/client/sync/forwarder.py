"""The process-forward producer: accepts items at once, processes them in the background, sends the results.

    def price(request: bytes) -> fairway.Outgoing:
        return fairway.Outgoing("order.priced", ...)

    with fairway.Forwarder(client, price, workers=8, journal="/var/lib/app/spool") as forwarder:
        forwarder.accept(request)                  returns at once; leaving the `with` waits until all is sent on

`process` runs in `workers` threads, however many requests come in. The number of waiting items is bounded, and
`when_full` decides what happens at the bound.

With a `journal`, items that wait for long, or wait in large numbers, are on disk and survive a crash. If `process`
fails, the forwarder calls it again, later each time, and sets the item aside after the last attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self

from fairway.client.core import Duration, limit_of, seconds_of
from fairway.client.forwarder_buffer import (
    FailedItem,
    ForwarderCounts,
    ForwarderOptions,
    Item,
    ItemT,
    Made,
    lost_items,
    open_buffer,
)
from fairway.client.sync.client import Client
from fairway.errors import BufferFull, Misuse
from fairway.runtime.clock import RealClock
from fairway.runtime.threads import ConditionVariable, Workers

STOP_S = 30.0  # wait so long until the accepted items are sent on
KEEP_S = 10.0  # after that, wait so long until the rest is in the journal


class Forwarder(Generic[ItemT]):
    """The forwarder for threads. Its threads run from the beginning; `stop`, or leaving its `with`, ends them."""

    def __init__(self, client: Client, process: Callable[[ItemT], Made], **settings: Any) -> None:
        """The settings are those of `fairway.ForwarderOptions`."""
        self._client = client
        self._process = process
        self._options: ForwarderOptions[ItemT] = ForwarderOptions(**settings)
        self._clock = RealClock()
        self._watch = ConditionVariable()
        self._is_stopping = self._is_stopped = False
        self._journal, self._buffer = open_buffer(self._options, self._clock, self._post, self._watch.notify_all)
        self._workers = Workers()
        for number in range(self._options.workers):
            self._workers.start(f"fairway-forwarder:{number}", self._work)
        self._workers.start("fairway-forwarder:clock", self._keep_time)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Run a completion. A thread of the disk calls this."""
        with self._watch:
            callback(*args)
            self._watch.notify_all()

    # --- for users ---------------------------------------------------------------------------------------------------

    def accept(self, item: ItemT, timeout: Duration | None = None) -> None:
        """Accept an item, and return at once.

        If there is no room, `when_full` decides: wait for `timeout` (or `block` of the options), raise `BufferFull`, or
        write the item to the journal.
        """
        end_ns = self._clock.monotonic_ns() + int(seconds_of(self._options.block if timeout is None else timeout) * 1e9)
        with self._watch:
            while True:
                if self._is_stopping:
                    raise Misuse("this forwarder is stopped: make another")
                try:
                    self._buffer.accept(item)
                except BufferFull:
                    left_ns = end_ns - self._clock.monotonic_ns()
                    if self._options.when_full == "raise" or left_ns <= 0:
                        raise
                    self._watch.wait(left_ns / 1e9)
                else:
                    return

    def persist(self, timeout: Duration = KEEP_S) -> None:
        """Return when every item accepted so far is sent on or on disk. Raises TimeoutError after `timeout`."""
        self._buffer.check_durable()
        with self._watch:
            self._buffer.persist()
            if not self._watch.wait_for(lambda: self._buffer.is_kept, seconds_of(timeout)):
                raise TimeoutError(f"not all items are on disk after {timeout} s: {self._buffer.counts()}")

    def flush(self, timeout: Duration | None = None) -> bool:
        """Wait until every accepted item is sent on or set aside; False: the timeout has passed."""
        with self._watch:
            return self._watch.wait_for(lambda: self._buffer.is_drained, limit_of(timeout))

    @property
    def counts(self) -> ForwarderCounts:
        with self._watch:
            return self._buffer.counts()

    @property
    def set_aside(self) -> list[FailedItem[ItemT]]:
        """The latest items that failed every attempt, with their last error."""
        with self._watch:
            return list(self._buffer.failures)

    def stop(self, timeout: Duration = STOP_S) -> None:
        """Accept no more items, send on those that wait, end the threads.

        Items that are not sent on within `timeout` go to the journal, and the next forwarder with this journal sends
        them on. Without a journal they are lost: TimeoutError says how many.
        """
        if self._is_stopped:
            return
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        with self._watch:
            self._is_stopping = True
            self._watch.wait_for(lambda: self._buffer.is_drained, self._left_s(end_ns))
            self._is_stopped = self._buffer.is_closed = True
            self._watch.notify_all()
        self._workers.join(max(self._left_s(end_ns), 1.0))
        with self._watch:
            self._buffer.persist()
            is_kept = self._buffer.is_durable and self._watch.wait_for(lambda: self._buffer.is_kept, KEEP_S)
            left = 0 if is_kept else len(list(self._buffer.left()))
        if self._journal is not None:
            self._journal.close(lambda: self._buffer.journals)
        if left:
            raise lost_items(left, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # --- in the threads ----------------------------------------------------------------------------------------------

    def _left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _keep_time(self) -> None:
        with self._watch:
            while not self._is_stopped:
                self._watch.wait(self._buffer.keep_time())

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                sent = self._forward(item)
            except Exception as error:
                with self._watch:
                    self._buffer.fail(item, error, self._clock.monotonic_ns())
            else:
                with self._watch:
                    self._buffer.finish(item, sent)

    def _next(self) -> Item[ItemT] | None:
        """Wait for the next item; None: the forwarder has stopped."""
        with self._watch:
            while not self._is_stopped:
                item = self._buffer.take(self._clock.monotonic_ns())
                if item is not None:
                    return item
                self._watch.wait(None)
        return None

    def _forward(self, item: Item[ItemT]) -> int:
        """Process an item, send the messages that it made, wait for the receipts."""
        pendings = item.send(self._client.send, self._process(item.value))
        for pending in pendings:
            pending.result()
        return len(pendings)
