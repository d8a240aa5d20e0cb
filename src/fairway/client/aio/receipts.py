"""The awaitable outcomes of `send`, and `client.delayed` for asyncio programs.

Any number of tasks may await an outcome. Each waits on a future of its own, because cancelling a task cancels the
future that the task waits on.

`AioDelayed` has the methods of `fairway.client.sync.receipts.Delayed`, awaited.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from datetime import datetime
from typing import Any, Protocol

from fairway.batch import MessageId
from fairway.client import delayed_messages
from fairway.client.commands import AnswerT, Command
from fairway.client.core import Duration
from fairway.client.delayed_messages import Between, DelayedMessage, DelayedOutcome, InTransit, Listing, Redirection
from fairway.protocol.delay_messages import Which
from fairway.protocol.receipts import BatchReceipt, Pending, PendingBatch, Receipt
from fairway.runtime.clock import Clock


class AioBatch(PendingBatch):
    """The outcome of a batch, shared by its messages."""

    __slots__ = ()

    def wait(self) -> Generator[Any, None, None]:
        """Return when the outcome is known."""
        if not self.done():
            told = asyncio.get_running_loop().create_future()
            self.when_settled(lambda _: None if told.done() else told.set_result(None))
            yield from told

    def __await__(self) -> Generator[Any, None, BatchReceipt]:
        yield from self.wait()
        return self.receipt()


class AioPending(Pending):
    """The outcome of one message: awaiting it returns the receipt, or raises the error of a failed message."""

    __slots__ = ()

    batch: AioBatch

    def result(self) -> Receipt:
        """The receipt. Call this only when `done`."""
        return self.receipt()

    def __await__(self) -> Generator[Any, None, Receipt]:
        batch = self.batch
        if not batch.done():
            yield from batch.wait()
        return self.receipt()


class AioAnswers(Protocol):
    """Asks a delay server, or all of them."""

    async def __call__(self, command: Command[AnswerT]) -> AnswerT: ...


class AioDelayed:
    """Requests about delayed messages. The answer to a change means that it is durable."""

    def __init__(self, ask: AioAnswers, clock: Clock, askers: Callable[[], Awaitable[list[AioAnswers]]]) -> None:
        """`ask` asks all groups of delay servers and merges the answers; `askers` returns one callable for each."""
        self._ask = ask
        self._clock = clock
        self._askers = askers

    async def cancel(
        self, id: MessageId | str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> DelayedOutcome:
        """Cancel a message by the id in its receipt, or all pending messages of a key in a subject."""
        return delayed_messages.decision_of(await self._ask(delayed_messages.cancel(id, subject, key)))

    async def reschedule(
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
        return delayed_messages.decision_of(await self._ask(delayed_messages.reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[DelayedMessage]:
        """The pending messages in the order of due times. The iterator asks for pages as the caller goes on."""
        return self._walks(delayed_messages.which_of(subject, key_prefix, between), limit)

    async def _walks(self, which: Which, limit: int | None) -> AsyncIterator[DelayedMessage]:
        """Merge the walks through all groups of delay servers by due time, up to `limit` messages."""
        walks = [_walk(ask, Listing(which, limit)) for ask in await self._askers()]
        heads = {walk: head for walk in walks if (head := await anext(walk, None)) is not None}
        left = limit
        while heads and left != 0:
            walk = min(heads, key=lambda each: heads[each].due_at)
            yield heads[walk]
            left = None if left is None else left - 1
            head = await anext(walk, None)
            if head is None:
                del heads[walk]
            else:
                heads[walk] = head

    async def count(
        self, subject: str | None = None, key_prefix: str | None = None, between: Between | None = None
    ) -> int:
        return (await self._ask(delayed_messages.count(delayed_messages.which_of(subject, key_prefix, between)))).count

    async def in_transit(self) -> builtins.list[InTransit]:
        """Due messages on their way, by broker group: too late to cancel, and not known to be stored there yet."""
        return delayed_messages.in_transit_of(await self._ask(delayed_messages.count(Which())))

    async def resend(self, group: str) -> Redirection:
        """Send the messages on their way to a broker group that is gone for good to other groups.

        Nobody can tell any more which messages the lost group has stored, so these may be delivered twice.
        """
        resent = await self._ask(delayed_messages.resend(group))
        return Redirection(resent.messages, resent.left)

    async def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """The number of messages due in each stretch of that width, by its start (UTC), without empty stretches."""
        asked = delayed_messages.histogram(delayed_messages.which_of(subject, key_prefix, between), width)
        return delayed_messages.stretches_of(await self._ask(asked))


async def _walk(ask: AioAnswers, listing: Listing) -> AsyncIterator[DelayedMessage]:
    while not listing.is_done:
        for message in listing.messages(await ask(listing.command())):
            yield message
