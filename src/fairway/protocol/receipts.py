"""Receipts: the pending outcome of a send, then the receipt. Also the queues of callers that wait for a producer.

A batch has one shared state. A message's `Pending` is two fields: that state, and the message's place in it. There is
no lock and no Future per message, because a Future each is five to seven times slower than the rest of a send.

The threaded and the asyncio producer add waiting: each derives from `PendingBatch` and `Pending` and gives both classes
to `ProducerSession`. The single hook is `PendingBatch.when_settled(callback)`. The callback comes once, under the
owner's lock, in the thread or loop that brought the outcome, or at once if the outcome is known. So the callback must
be quick and must not call back into the producer. The threaded producer makes an event there when a caller first waits
for the batch, the asyncio producer a future. All messages of the batch share it. Callbacks of users do not belong
there: `add_done_callback` has the owner run them without its lock, through `run_later` of the line.

`Flush` waits until everything is settled, and `RoomQueue` until there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from fairway.batch import MessageId
from fairway.errors import Misuse


class Flush:
    """Waits for all batches that were added before; `is_done` once each is stored or has failed."""

    def __init__(self) -> None:
        self._left = 1  # the caller counts too, until it has named all batches
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, under the owner's lock, like `PendingBatch.when_settled`; at once if done."""
        if self.is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def watch(self, pending: PendingBatch) -> None:
        """Wait for one more batch."""
        self._left += 1
        pending.when_settled(self.count_down)

    def count_down(self, _: object = None) -> None:
        """Count one batch as settled."""
        self._left -= 1
        if self._left == 0:
            for callback in self._callbacks:
                callback()


class _Waiter:
    """A caller that waits for room."""

    __slots__ = ("callback", "messages", "size_bytes")

    def __init__(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> None:
        self.messages = messages
        self.size_bytes = size_bytes
        self.callback = callback


class RoomQueue:
    """Callers that wait for room, in order of asking. `fits` says whether so much more may be added. `fits_alone` says
    whether it may if no other caller adds anything: an empty buffer takes anything."""

    __slots__ = ("_fits", "_fits_alone", "_waiters")

    def __init__(self, fits: Callable[[int, int], bool], fits_alone: Callable[[int, int], bool]) -> None:
        self._fits = fits
        self._fits_alone = fits_alone
        self._waiters: dict[_Waiter, None] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def join(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Add a waiter; returns a function that cancels it."""
        waiter = _Waiter(messages, size_bytes, callback)
        self._waiters[waiter] = None
        self.offer()
        return partial(self._cancel, waiter)

    def _cancel(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter, None)
        self.offer()

    def offer(self) -> None:
        """Call the waiters that would fit, in order, as if each took the room that it wants."""
        messages = size_bytes = 0
        for waiter in tuple(self._waiters):
            is_first = not messages
            messages += waiter.messages
            size_bytes += waiter.size_bytes
            if not (self._fits_alone if is_first else self._fits)(messages, size_bytes):
                return
            del self._waiters[waiter]
            waiter.callback()


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The message is durable, and this is its place."""

    subject: str
    sequence: int  # in its subject, and in a cluster in its broker group
    appended_ms: int  # by the broker's clock, ms since 1970 UTC
    is_duplicate: bool  # an earlier attempt stored the message and its answer was lost; the message is stored once
    message_id: MessageId
    broker_group: str = ""  # that stores the message, in a cluster

    @property
    def id(self) -> str:
        """The message's id as text, the one that consumers see."""
        return str(self.message_id)


class BatchReceipt(msgspec.Struct, frozen=True, gc=False):
    """A whole batch is durable. Message i has the i-th sequence and, unless its sender gave an id, the i-th id."""

    subject: str
    first_sequence: int
    count: int
    appended_ms: int
    is_duplicate: bool
    first_id: MessageId
    broker_group: str = ""  # that stores the batch, in a cluster

    def id(self, index: int) -> str:
        """The id of a message as text, unless its sender gave another."""
        if not 0 <= index < self.count:
            raise Misuse(f"there is no message {index} in a batch of {self.count}: they are counted from 0")
        return str(MessageId(self.first_id.producer_id, self.first_id.sequence + index))


class SpoolReceipt(Receipt, frozen=True, gc=False):
    """The message is safe on this host's disk, in the spool, and not yet at the broker: so the receipt has no sequence.

    The message keeps its id, unless the broker has forgotten its stream by the time of sending; then it gets a new id.
    """

    spool: str = ""  # the directory
    spooled_ms: int = 0  # by this host's clock, ms since 1970 UTC

    @property  # type: ignore[misc]  # in the place of a field
    def sequence(self) -> int:
        """Raises Misuse: a spooled message has no sequence yet."""
        raise _not_yet(self.subject, self.spool, "sequence")

    @property  # type: ignore[misc]  # in the place of a field
    def appended_ms(self) -> int:
        """Raises Misuse: a spooled message has no append time yet."""
        raise _not_yet(self.subject, self.spool, "time of its append")

    def __repr__(self) -> str:
        return f"SpoolReceipt(subject={self.subject!r}, id={self.id!r}, spool={self.spool!r})"


class SpoolBatchReceipt(BatchReceipt, frozen=True, gc=False):
    """The same as SpoolReceipt, for a whole batch."""

    spool: str = ""
    spooled_ms: int = 0

    @property  # type: ignore[misc]  # in the place of a field
    def first_sequence(self) -> int:
        """Raises Misuse: a spooled batch has no sequence yet."""
        raise _not_yet(self.subject, self.spool, "sequence")

    @property  # type: ignore[misc]  # in the place of a field
    def appended_ms(self) -> int:
        """Raises Misuse: a spooled batch has no append time yet."""
        raise _not_yet(self.subject, self.spool, "time of its append")

    def __repr__(self) -> str:
        return f"SpoolBatchReceipt(subject={self.subject!r}, count={self.count}, spool={self.spool!r})"

    @classmethod
    def of(cls, subject: str, count: int, first_id: MessageId, spool: str, spooled_ms: int) -> SpoolBatchReceipt:
        return cls(subject, 0, count, 0, False, first_id, spool=spool, spooled_ms=spooled_ms)

    def one(self, message_id: MessageId) -> SpoolReceipt:
        """The receipt of one message of the batch."""
        return SpoolReceipt(self.subject, 0, 0, False, message_id, spool=self.spool, spooled_ms=self.spooled_ms)


def _not_yet(subject: str, spool: str, what: str) -> Misuse:
    return Misuse(
        f"this message to {subject} is in the spool {spool}, not yet at the broker, and has no {what}: "
        "isinstance(receipt, fairway.SpoolReceipt) tells"
    )


class PendingBatch:
    """The outcome of one batch, shared by its messages. A receipt or an error settles it, once."""

    __slots__ = ("_error", "_receipt", "_run_later", "_watchers", "count", "ids", "is_seen", "subject")

    def __init__(self, subject: str, run_later: Callable[[Callable[[], None]], None]) -> None:
        self.subject = subject
        self.count = 0  # messages; grows until the batch is sealed
        self.ids: Sequence[MessageId | None] | None = None  # explicit ones
        self.is_seen = False  # the user has read the outcome
        self._receipt: BatchReceipt | None = None
        self._error: Exception | None = None
        self._watchers: list[Callable[[PendingBatch], None]] | None = None
        self._run_later = run_later

    # --- for users

    def done(self) -> bool:
        """Whether the outcome is known, or can never be known."""
        return self._receipt is not None or self._error is not None

    def exception(self) -> Exception | None:
        """The error; None if the batch is stored. Only when `done`."""
        if self._error is None and self._receipt is None:
            raise Misuse("the outcome is not known yet: wait for it")
        self.is_seen = True
        return self._error

    def receipt(self) -> BatchReceipt:
        """The receipt; raises the error. Only when `done`."""
        receipt = self._receipt
        if receipt is None:
            raise self.exception() or Misuse("the outcome is not known yet: wait for it")
        self.is_seen = True
        return receipt

    def add_done_callback(self, callback: Callable[[PendingBatch], object]) -> None:
        """Have `callback(batch)` called when the batch is settled; at once, if it is already."""
        if self.done():
            callback(self)
        else:
            self.when_settled(lambda batch: self._run_later(lambda: _void(callback(batch))))

    # --- for the threaded and the asyncio producer

    def when_settled(self, callback: Callable[[PendingBatch], None]) -> None:
        """The hook for waiting: see the module docstring."""
        if self.done():
            callback(self)
        elif self._watchers is None:
            self._watchers = [callback]
        else:
            self._watchers.append(callback)

    # --- for `ProducerSession`

    def settle(self, outcome: BatchReceipt | Exception) -> None:
        """Store the outcome and call the watchers."""
        if isinstance(outcome, BatchReceipt):
            self._receipt = outcome
        else:
            self._error = outcome
        watchers, self._watchers = self._watchers, None
        for callback in watchers or ():
            callback(self)


class Pending:
    """The outcome of one message: its batch's outcome, and its place in the batch."""

    __slots__ = ("batch", "index")

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self.batch = batch
        self.index = index

    def done(self) -> bool:
        """Whether the outcome is known, or can never be known."""
        return self.batch.done()

    def exception(self) -> Exception | None:
        """The error; None if the message is stored. Only when `done`."""
        return self.batch.exception()

    def receipt(self) -> Receipt:
        """The receipt; raises the error. Only when `done`."""
        whole, index = self.batch.receipt(), self.index
        who = whole.first_id
        if index:
            who = MessageId(who.producer_id, who.sequence + index)
        if self.batch.ids is not None:
            who = self.batch.ids[index] or who
        if isinstance(whole, SpoolBatchReceipt):
            return whole.one(who)
        sequence = whole.first_sequence + index
        return Receipt(whole.subject, sequence, whole.appended_ms, whole.is_duplicate, who, whole.broker_group)

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Have `callback(pending)` called when the message is settled; at once, if it is already."""
        self.batch.add_done_callback(lambda _: callback(self))


def _void(_: object) -> None:
    """Drop the result of a callback."""
