"""`client.delayed` for programs on a loop: the names of `delayed`, awaited."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Protocol

from fairway.batch import MessageId
from fairway.client import delaying
from fairway.client.asking import AnswerT, Command
from fairway.client.core import Duration
from fairway.client.delaying import Between, DelayedMessage, DelayedOutcome, InTransit, Listing, Redirection
from fairway.protocol.delaying import Which
from fairway.world.clock import Clock


class AioAnswers(Protocol):
    """How a question is asked."""

    async def __call__(self, command: Command[AnswerT]) -> AnswerT: ...


class AioDelayed:
    """Questions about delayed messages. An answer is durable where it changes anything."""

    def __init__(self, ask: AioAnswers, clock: Clock, askers: Callable[[], Awaitable[list[AioAnswers]]]) -> None:
        """`askers` gives one for each group of delay servers; `ask` asks all of them, and has one answer."""
        self._ask = ask
        self._clock = clock
        self._askers = askers

    async def cancel(
        self, id: MessageId | str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> DelayedOutcome:
        """Never send a message, by the id in its receipt; or all that are pending of a key in a subject."""
        return delaying.decision_of(await self._ask(delaying.cancel(id, subject, key)))

    async def reschedule(
        self,
        id: MessageId | str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> DelayedOutcome:
        """The same messages at another time, sooner or later."""
        due_ms = delaying.due_of(after, at, self._clock)
        return delaying.decision_of(await self._ask(delaying.reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[DelayedMessage]:
        """What is pending, in the order of due times: `async for`. It is asked for page by page, as it is wanted."""
        return self._walks(delaying.which_of(subject, key_prefix, between), limit)

    async def _walks(self, which: Which, limit: int | None) -> AsyncIterator[DelayedMessage]:
        """Whoever has the one that is due next is asked on, until there are enough."""
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
        return (await self._ask(delaying.count(delaying.which_of(subject, key_prefix, between)))).count

    async def in_transit(self) -> builtins.list[InTransit]:
        """What is due and on its way, by broker group: too late to cancel, and not known to be stored there yet."""
        return delaying.in_transit_of(await self._ask(delaying.count(Which())))

    async def resend(self, group: str) -> Redirection:
        """Send to other broker groups what is on its way to one that is gone for good. Nobody can say any more what
        that one has stored: those messages may be delivered twice."""
        resent = await self._ask(delaying.resend(group))
        return Redirection(resent.messages, resent.left)

    async def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """How many are due in each stretch of that width, by its start (UTC); stretches without any are left out."""
        asked = delaying.histogram(delaying.which_of(subject, key_prefix, between), width)
        return delaying.stretches_of(await self._ask(asked))


async def _walk(ask: AioAnswers, listing: Listing) -> AsyncIterator[DelayedMessage]:
    while not listing.is_done:
        for message in listing.messages(await ask(listing.command())):
            yield message
