"""`client.delayed`: what waits for its time, and how to change one's mind about it. For programs without a loop."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from datetime import datetime
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Protocol

from fairway.batch import MessageId
from fairway.client import delaying
from fairway.client.asking import AnswerT, Command
from fairway.client.core import Duration
from fairway.client.delaying import Between, DelayedMessage, DelayedOutcome, InTransit, Listing, Redirection
from fairway.protocol.delaying import Which
from fairway.world.clock import Clock


class AskDelayServer(Protocol):
    """How a question is asked."""

    def __call__(self, command: Command[AnswerT]) -> AnswerT: ...


class Delayed:
    """Questions about delayed messages. Each waits for its answer, which is durable where it changes anything."""

    def __init__(self, ask: AskDelayServer, clock: Clock, askers: Callable[[], list[AskDelayServer]]) -> None:
        """`askers` gives one for each group of delay servers; `ask` asks all of them, and has one answer."""
        self._ask = ask
        self._clock = clock
        self._askers = askers

    def cancel(
        self, id: MessageId | str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> DelayedOutcome:
        """Never send a message, by the id in its receipt; or all that are pending of a key in a subject."""
        return delaying.decision_of(self._ask(delaying.cancel(id, subject, key)))

    def reschedule(
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
        return delaying.decision_of(self._ask(delaying.reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> Iterator[DelayedMessage]:
        """What is pending, in the order of due times; it is asked for page by page, as it is wanted."""
        which = delaying.which_of(subject, key_prefix, between)
        walks = [_walk(ask, Listing(which, limit)) for ask in self._askers()]
        return walks[0] if len(walks) == 1 else islice(merge(*walks, key=attrgetter("due_at")), limit)

    def count(self, subject: str | None = None, key_prefix: str | None = None, between: Between | None = None) -> int:
        return self._ask(delaying.count(delaying.which_of(subject, key_prefix, between))).count

    def in_transit(self) -> builtins.list[InTransit]:
        """What is due and on its way, by broker group: too late to cancel, and not known to be stored there yet."""
        return delaying.in_transit_of(self._ask(delaying.count(Which())))

    def resend(self, group: str) -> Redirection:
        """Send to other broker groups what is on its way to one that is gone for good. Nobody can say any more what
        that one has stored: those messages may be delivered twice."""
        resent = self._ask(delaying.resend(group))
        return Redirection(resent.messages, resent.left)

    def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """How many are due in each stretch of that width, by its start (UTC); stretches without any are left out."""
        asked = delaying.histogram(delaying.which_of(subject, key_prefix, between), width)
        return delaying.stretches_of(self._ask(asked))


def _walk(ask: AskDelayServer, listing: Listing) -> Iterator[DelayedMessage]:
    while not listing.is_done:
        yield from listing.messages(ask(listing.command()))
