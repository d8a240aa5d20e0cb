"""The outcomes that `send` and `send_many` return, which threads can wait for, and `client.delayed`.

A message costs no lock and no event of its own: only a thread that has to wait makes an event, for that wait.

`Delayed` lists, counts, cancels and reschedules delayed messages.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from datetime import datetime
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from fairway.batch import MessageId
from fairway.client import delayed_messages
from fairway.client.commands import AnswerT, Command
from fairway.client.core import Duration, limit_of
from fairway.client.delayed_messages import Between, DelayedMessage, DelayedOutcome, InTransit, Listing, Redirection
from fairway.protocol.delay_messages import Which
from fairway.protocol.receipts import BatchReceipt, Pending, PendingBatch, Receipt
from fairway.runtime.clock import Clock

if TYPE_CHECKING:
    from fairway.runtime.threaded_link import Link


class SyncBatch(PendingBatch):
    """The outcome of a batch, shared by its messages."""

    __slots__ = ("_link",)

    def __init__(self, subject: str, run_later: Callable[[Callable[[], None]], None], link: Link) -> None:
        super().__init__(subject, run_later)
        self._link = link

    def wait(self, timeout: Duration | None) -> None:
        """Return when the outcome is known. Raises TimeoutError after `timeout`; the caller may wait again."""
        if not self.done() and not self._link.wait_told(self._tell, limit_of(timeout)) and not self.done():
            raise TimeoutError(f"no receipt for a batch to {self.subject} after {timeout} s: it may still come")

    def _tell(self, told: Callable[[], None]) -> None:
        self.when_settled(lambda _: told())

    def result(self, timeout: Duration | None = None) -> BatchReceipt:
        """Wait for the receipt: the whole batch is durable. Raises the error of a failed batch."""
        self.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Wait for the outcome: the error, or None if the batch is durable."""
        self.wait(timeout)
        return super().exception()

    def add_done_callback(self, callback: Callable[[PendingBatch], object]) -> None:
        """Call `callback(batch)` from the thread that reads, or at once if the outcome is known. It must not wait."""
        with self._link.lock:
            if not self.done():
                super().add_done_callback(callback)
                return
        callback(self)


class SyncPending(Pending):
    """The outcome of one message."""

    __slots__ = ()

    batch: SyncBatch

    def result(self, timeout: Duration | None = None) -> Receipt:
        """Wait for the receipt: the message is durable. Raises the error of a failed message, or TimeoutError."""
        batch = self.batch
        if not batch.done():
            batch.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Wait for the outcome: the error, or None if the message is durable."""
        return self.batch.exception(timeout)


class AskDelayServer(Protocol):
    """Asks a delay server, or all of them, and waits for the answer."""

    def __call__(self, command: Command[AnswerT]) -> AnswerT: ...


class Delayed:
    """Requests about delayed messages. Each waits for its answer; the answer to a change means that it is durable."""

    def __init__(self, ask: AskDelayServer, clock: Clock, askers: Callable[[], list[AskDelayServer]]) -> None:
        """`ask` asks all groups of delay servers and merges the answers; `askers` returns one callable for each."""
        self._ask = ask
        self._clock = clock
        self._askers = askers

    def cancel(
        self, id: MessageId | str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> DelayedOutcome:
        """Cancel a message by the id in its receipt, or all pending messages of a key in a subject."""
        return delayed_messages.decision_of(self._ask(delayed_messages.cancel(id, subject, key)))

    def reschedule(
        self,
        id: MessageId | str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> DelayedOutcome:
        """Give these messages another due time, sooner or later."""
        due_ms = delayed_messages.due_of(after, at, self._clock)
        return delayed_messages.decision_of(self._ask(delayed_messages.reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> Iterator[DelayedMessage]:
        """The pending messages in the order of due times. The iterator asks for pages as the caller goes on."""
        which = delayed_messages.which_of(subject, key_prefix, between)
        walks = [_walk(ask, Listing(which, limit)) for ask in self._askers()]
        return walks[0] if len(walks) == 1 else islice(merge(*walks, key=attrgetter("due_at")), limit)

    def count(self, subject: str | None = None, key_prefix: str | None = None, between: Between | None = None) -> int:
        return self._ask(delayed_messages.count(delayed_messages.which_of(subject, key_prefix, between))).count

    def in_transit(self) -> builtins.list[InTransit]:
        """Due messages on their way, by broker group: too late to cancel, and not known to be stored there yet."""
        return delayed_messages.in_transit_of(self._ask(delayed_messages.count(Which())))

    def resend(self, group: str) -> Redirection:
        """Send the messages on their way to a broker group that is gone for good to other groups.

        Nobody can tell any more which messages the lost group has stored, so these may be delivered twice.
        """
        resent = self._ask(delayed_messages.resend(group))
        return Redirection(resent.messages, resent.left)

    def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """The number of messages due in each stretch of that width, by its start (UTC), without empty stretches."""
        asked = delayed_messages.histogram(delayed_messages.which_of(subject, key_prefix, between), width)
        return delayed_messages.stretches_of(self._ask(asked))


def _walk(ask: AskDelayServer, listing: Listing) -> Iterator[DelayedMessage]:
    while not listing.is_done:
        yield from listing.messages(ask(listing.command()))
