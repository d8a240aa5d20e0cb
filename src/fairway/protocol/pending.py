"""What a producer gets for what it sends: a pending outcome, and in the end a receipt.

A batch has one shared state, and a message is two fields: that state, and its place in it. There is no lock and no
Future per message (a Future each is five to seven times slower than all the rest of a send).

How a face adds waiting: it derives from `PendingBatch` and `Pending` and gives both classes to `ProducerSession`. The
single hook is `PendingBatch.when_settled(callback)`: the callback comes once, under the owner's lock, in the thread or
loop that brought the outcome (at once, if it is there already), so it must be quick and must not call back into the
producer. A threaded face makes an event there when somebody first waits for the batch, an asyncio face a future; all
messages of the batch share it. Callbacks of users do not belong there: `add_done_callback` has them run by the owner
without its lock, through `run_later` of the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fairway.batch import MessageId
from fairway.errors import Misuse


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """A message is durable, and this is where it is."""

    subject: str
    sequence: int  # in its subject, and in a cluster in its broker group
    appended_ms: int  # by the broker's clock, ms since 1970 UTC
    is_duplicate: bool  # it was stored by an earlier attempt whose answer was lost; it is stored once all the same
    message_id: MessageId
    broker_group: str = ""  # that has it, in a cluster

    @property
    def id(self) -> str:
        """The message's id as text, the one that consumers see."""
        return str(self.message_id)


class BatchReceipt(msgspec.Struct, frozen=True, gc=False):
    """A whole batch is durable. Message i of it has the i-th sequence and, unless it was given one, the i-th id."""

    subject: str
    first_sequence: int
    count: int
    appended_ms: int
    is_duplicate: bool
    first_id: MessageId
    broker_group: str = ""  # that has it, in a cluster

    def id(self, index: int) -> str:
        """The id of a message of the batch as text, unless it was given one."""
        if not 0 <= index < self.count:
            raise Misuse(f"there is no message {index} in a batch of {self.count}: they are counted from 0")
        return str(MessageId(self.first_id.producer_id, self.first_id.sequence + index))


class SpoolReceipt(Receipt, frozen=True, gc=False):
    """A message is safe on this host's disk, in the spool, and not yet at the broker: so it has no sequence there.

    Its id is the one that it will have (unless the broker has forgotten its stream by then, and it needs a new one).
    """

    spool: str = ""  # the directory
    spooled_ms: int = 0  # by this host's clock, ms since 1970 UTC

    @property  # type: ignore[misc]  # in the place of a field
    def sequence(self) -> int:
        """There is none yet."""
        raise _not_yet(self.subject, self.spool, "sequence")

    @property  # type: ignore[misc]  # in the place of a field
    def appended_ms(self) -> int:
        """There is none yet."""
        raise _not_yet(self.subject, self.spool, "time of its append")

    def __repr__(self) -> str:
        return f"SpoolReceipt(subject={self.subject!r}, id={self.id!r}, spool={self.spool!r})"


class SpoolBatchReceipt(BatchReceipt, frozen=True, gc=False):
    """The same for a whole batch."""

    spool: str = ""
    spooled_ms: int = 0

    @property  # type: ignore[misc]  # in the place of a field
    def first_sequence(self) -> int:
        """There is none yet."""
        raise _not_yet(self.subject, self.spool, "sequence")

    @property  # type: ignore[misc]  # in the place of a field
    def appended_ms(self) -> int:
        """There is none yet."""
        raise _not_yet(self.subject, self.spool, "time of its append")

    def __repr__(self) -> str:
        return f"SpoolBatchReceipt(subject={self.subject!r}, count={self.count}, spool={self.spool!r})"

    @classmethod
    def of(cls, subject: str, count: int, first_id: MessageId, spool: str, spooled_ms: int) -> SpoolBatchReceipt:
        return cls(subject, 0, count, 0, False, first_id, spool=spool, spooled_ms=spooled_ms)

    def one(self, message_id: MessageId) -> SpoolReceipt:
        """The receipt of one of its messages."""
        return SpoolReceipt(self.subject, 0, 0, False, message_id, spool=self.spool, spooled_ms=self.spooled_ms)


def _not_yet(subject: str, spool: str, what: str) -> Misuse:
    return Misuse(
        f"this message to {subject} is in the spool {spool}, not yet at the broker, and has no {what}: "
        "isinstance(receipt, fairway.SpoolReceipt) tells"
    )


class PendingBatch:
    """The outcome of one batch, shared by its messages. Settled once: by a receipt or by an error."""

    __slots__ = ("_error", "_receipt", "_run_later", "_watchers", "count", "ids", "is_seen", "subject")

    def __init__(self, subject: str, run_later: Callable[[Callable[[], None]], None]) -> None:
        self.subject = subject
        self.count = 0  # messages; grows until the batch is cut
        self.ids: Sequence[MessageId | None] | None = None  # explicit ones
        self.is_seen = False  # somebody has looked at how it ended
        self._receipt: BatchReceipt | None = None
        self._error: Exception | None = None
        self._watchers: list[Callable[[PendingBatch], None]] | None = None
        self._run_later = run_later

    # --- for users

    def done(self) -> bool:
        """Whether the outcome is known (or known to stay unknown)."""
        return self._receipt is not None or self._error is not None

    def exception(self) -> Exception | None:
        """Why it failed; None if it is stored. Only when `done`."""
        if self._error is None and self._receipt is None:
            raise Misuse("the outcome is not known yet: wait for it")
        self.is_seen = True
        return self._error

    def receipt(self) -> BatchReceipt:
        """The receipt; raises what went wrong. Only when `done`."""
        error = self.exception()
        if error is not None or self._receipt is None:
            raise error or Misuse("the outcome is not known yet: wait for it")
        return self._receipt

    def add_done_callback(self, callback: Callable[[PendingBatch], object]) -> None:
        """Have `callback(batch)` called when it is settled; at once, if it is already."""
        if self.done():
            callback(self)
        else:
            self.when_settled(lambda batch: self._run_later(lambda: _void(callback(batch))))

    # --- for faces

    def when_settled(self, callback: Callable[[PendingBatch], None]) -> None:
        """The hook: see the head of this file."""
        if self.done():
            callback(self)
        elif self._watchers is None:
            self._watchers = [callback]
        else:
            self._watchers.append(callback)

    # --- for `ProducerSession`

    def settle(self, outcome: BatchReceipt | Exception) -> None:
        """How it ended. Whoever watches is told."""
        if isinstance(outcome, BatchReceipt):
            self._receipt = outcome
        else:
            self._error = outcome
        watchers, self._watchers = self._watchers, None
        for callback in watchers or ():
            callback(self)


class Pending:
    """The outcome of one message: its batch's, and its place in it."""

    __slots__ = ("batch", "index")

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self.batch = batch
        self.index = index

    def done(self) -> bool:
        """Whether the outcome is known (or known to stay unknown)."""
        return self.batch.done()

    def exception(self) -> Exception | None:
        """Why it failed; None if it is stored. Only when `done`."""
        return self.batch.exception()

    def receipt(self) -> Receipt:
        """The receipt; raises what went wrong. Only when `done`."""
        whole = self.batch.receipt()
        explicit = self.batch.ids[self.index] if self.batch.ids is not None else None
        born = MessageId(whole.first_id.producer_id, whole.first_id.sequence + self.index)
        if isinstance(whole, SpoolBatchReceipt):
            return whole.one(explicit or born)
        sequence = whole.first_sequence + self.index
        who = explicit or born
        return Receipt(whole.subject, sequence, whole.appended_ms, whole.is_duplicate, who, whole.broker_group)

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Have `callback(pending)` called when it is settled; at once, if it is already."""
        self.batch.add_done_callback(lambda _: callback(self))


def _void(_: object) -> None:
    """A callback's answer interests nobody."""
