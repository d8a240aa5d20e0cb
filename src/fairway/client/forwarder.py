"""The process-forward producer: take items in at once, work on them in the background, send on what comes of it.

    def price(request: bytes) -> fairway.Outgoing:
        return fairway.Outgoing("order.priced", ...)

    with fairway.Forwarder(client, price, workers=8, journal="/var/lib/app/spool") as forwarder:
        forwarder.accept(request)                  returns at once; leaving the `with` waits until all is sent on

`process` runs in `workers` threads, whatever number of requests comes in; what waits is bounded, and where it is full
`when_full` says what happens. With a `journal`, items that wait for long, or too many of them, are on disk, and survive
a crash. A `process` that fails is called again, later each time; after the last attempt the item is set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self

from fairway.client.core import Duration, seconds_of
from fairway.client.forwarder_items import FailedItem, ForwarderCounts, ForwarderOptions, Item, ItemT, Made, lost_items
from fairway.client.forwarder_journal import ItemJournal
from fairway.client.forwarder_stock import ForwarderBuffer
from fairway.client.sync import Client
from fairway.errors import BufferFull, Misuse
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng
from fairway.world.watch import ConditionVariable
from fairway.world.workers import Workers

STOP_S = 30.0  # for what was accepted to be sent on
KEEP_S = 10.0  # for the rest to be written down, after that


class Forwarder(Generic[ItemT]):
    """Its threads run from the beginning; `stop`, or leaving its `with`, ends them."""

    def __init__(self, client: Client, process: Callable[[ItemT], Made], **settings: Any) -> None:
        """The settings are those of `fairway.ForwarderOptions`."""
        self._client = client
        self._process = process
        self._options: ForwarderOptions[ItemT] = ForwarderOptions(**settings)
        self._clock = RealClock()
        self._watch = ConditionVariable()
        self._is_stopping = self._is_stopped = False
        rng = RealRng()
        self._journal = None if self._options.journal is None else ItemJournal(self._options, self._clock, self._post)
        self._stock: ForwarderBuffer[ItemT] = ForwarderBuffer(
            self._options,
            self._clock,
            rng,
            journal=None if self._journal is None else self._journal.make(rng),
            on_change=self._watch.ring,
            on_finished=self._journal.finished if self._journal is not None else lambda _: None,
        )
        if self._journal is not None:
            self._journal.start(self._stock.adopt)
        self._workers = Workers()
        for number in range(self._options.workers):
            self._workers.start(f"fairway-forwarder:{number}", self._work)
        self._workers.start("fairway-forwarder:clock", self._keep_time)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """In a thread of the disk: something is done."""
        with self._watch:
            callback(*args)
            self._watch.ring()

    # --- for users ---------------------------------------------------------------------------------------------------

    def accept(self, item: ItemT, timeout: Duration | None = None) -> None:
        """Take an item in, and return at once; where there is no room wait, raise `BufferFull`, or write it down, as
        `when_full` says. `timeout` is instead of `block`."""
        end_ns = self._clock.monotonic_ns() + int(seconds_of(self._options.block if timeout is None else timeout) * 1e9)
        with self._watch:
            while True:
                if self._is_stopping:
                    raise Misuse("this forwarder is stopped: make another")
                try:
                    self._stock.accept(item)
                except BufferFull:
                    left_ns = end_ns - self._clock.monotonic_ns()
                    if self._options.when_full == "raise" or left_ns <= 0:
                        raise
                    self._watch.wait(left_ns / 1e9)
                else:
                    return

    def persist(self, timeout: Duration = KEEP_S) -> None:
        """Return when all that was accepted so far is sent on, or on disk; TimeoutError if that takes too long."""
        if not self._stock.is_durable:
            raise Misuse("this forwarder has no journal: give it one, journal='/var/lib/app/spool'")
        with self._watch:
            self._stock.persist()
            if not self._until(lambda: self._stock.is_kept, seconds_of(timeout)):
                raise TimeoutError(f"not all items are on disk after {timeout} s: {self._stock.counts()}")

    def flush(self, timeout: Duration | None = None) -> bool:
        """Wait until all that was accepted is sent on, or set aside; False: it took too long."""
        with self._watch:
            return self._until(lambda: self._stock.is_drained, None if timeout is None else seconds_of(timeout))

    @property
    def counts(self) -> ForwarderCounts:
        with self._watch:
            return self._stock.counts()

    @property
    def set_aside(self) -> list[FailedItem[ItemT]]:
        """The latest items that failed every time, with their last error."""
        with self._watch:
            return list(self._stock.failures)

    def stop(self, timeout: Duration = STOP_S) -> None:
        """Take nothing more, send on what there is, end the threads.

        What is not sent on by then is written down, to be sent on by the next forwarder with this journal. Without a
        journal it is lost: TimeoutError says how many items.
        """
        if self._is_stopped:
            return
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        with self._watch:
            self._is_stopping = True
            self._until(lambda: self._stock.is_drained, self._left_s(end_ns))
            self._is_stopped = self._stock.is_closed = True
            self._watch.ring()
        self._workers.join(max(self._left_s(end_ns), 1.0))
        with self._watch:
            self._stock.persist()
            is_kept = self._stock.is_durable and self._until(lambda: self._stock.is_kept, KEEP_S)
            left = 0 if is_kept else len(list(self._stock.left()))
        if self._journal is not None:
            self._journal.close(lambda: self._stock.journals)
        if left:
            raise lost_items(left, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # --- in the threads ----------------------------------------------------------------------------------------------

    def _until(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """With the watch: wait for it."""
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while not is_so():
            left_s = None if end_ns is None else self._left_s(end_ns)
            if left_s is not None and left_s <= 0:
                return False
            self._watch.wait(left_s)
        return True

    def _left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _keep_time(self) -> None:
        """What is due although nothing happens: retries, and items that have waited too long."""
        with self._watch:
            while not self._is_stopped:
                now_ns = self._clock.monotonic_ns()
                self._stock.look(now_ns)
                due_ns = self._stock.next_ns()
                if due_ns is not None and due_ns <= now_ns:
                    self._watch.ring()  # a retry: for a worker that waits
                    due_ns = now_ns + 10_000_000
                self._watch.wait(None if due_ns is None else (due_ns - now_ns) / 1e9)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                sent = self._forward(item)
            except Exception as error:
                with self._watch:
                    self._stock.fail(item, error, self._clock.monotonic_ns())
            else:
                with self._watch:
                    self._stock.finish(item, sent)

    def _next(self) -> Item[ItemT] | None:
        """Wait for one; None: it is over."""
        with self._watch:
            while not self._is_stopped:
                item = self._stock.take(self._clock.monotonic_ns())
                if item is not None:
                    return item
                self._watch.wait(None)
        return None

    def _forward(self, item: Item[ItemT]) -> int:
        """Process it, send what came of it, wait for the receipts."""
        pendings = [
            self._client.send(each.subject, each.payload, each.key, each.tags, each.headers, name, each.after, each.at)
            for each, name in item.messages(self._process(item.value))
        ]
        for pending in pendings:
            pending.result()
        return len(pendings)
