"""Delayed messages: due times, requests about them, and `client.delayed` of the blocking and the asyncio client.

`send` fixes the due time in whole milliseconds, rounded up so that no message is early: `after` counts from the call by
this machine's clock, and `at` is a point in time. The clock of the delay server decides when the due time has come.

The operator of the delay server decides how far ahead a due time may be: two years by default. A message beyond that
travels in a batch of its own, so that its refusal concerns no other message.
"""

from __future__ import annotations

import builtins
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.batch.layout import TIME_MS_MAX
from fairway.client.commands import AnswerT, Command
from fairway.client.core import Duration, id_of, seconds_of
from fairway.errors import Misuse
from fairway.names import Subject
from fairway.protocol.delay_messages import (
    Cancel,
    Decided,
    DelayTally,
    PendingListed,
    PendingPage,
    Reschedule,
    Resend,
    Resent,
    Tallied,
    Which,
)
from fairway.runtime.clock import Clock

Between: TypeAlias = tuple[datetime | None, datetime | None]  # from (inclusive), to (exclusive); None: no bound
DelayedFate: TypeAlias = Literal["cancelled", "rescheduled", "already_dispatched", "unknown"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_FATES: dict[int, DelayedFate] = {1: "cancelled", 2: "rescheduled", 3: "already_dispatched", 4: "unknown"}


class DelayedOutcome(msgspec.Struct, frozen=True):
    """The result of a cancel or a reschedule. It is durable, and stays true.

    "cancelled": the messages are never sent. "rescheduled": the messages have the new due time. "already_dispatched":
    too late, the messages are on their way to their subject, or there. "unknown": the delay server never had the
    messages, or has forgotten them.
    """

    fate: DelayedFate
    messages: int  # cancelled or rescheduled by this call


class DelayedMessage(msgspec.Struct, frozen=True):
    """A message that waits for its due time."""

    subject: str
    id: str
    key: str | None
    due_at: datetime
    size_bytes: int  # of the payload


class InTransit(msgspec.Struct, frozen=True):
    """Due messages on their way to a broker group that has not confirmed them."""

    group: str
    messages: int
    is_reachable: bool  # whether the delay server has a connection to it


class Redirection(msgspec.Struct, frozen=True):
    """The result of a resend: messages that were on their way to a lost broker group."""

    messages: int  # go to other groups now
    left: int  # wait as before: no other group takes them now, or their group can be asked


# --- due times --------------------------------------------------------------------------------------------------------


def due_of(after: Duration | None, at: datetime | None, clock: Clock) -> int:
    """The due time of one message, from either `after` or `at`. A past time is allowed: it means at once."""
    if after is not None and at is None:
        due_ms = clock.wall_ms() + _wait_ms(after)
    elif at is not None and after is None:
        due_ms = time_ms(at)
    else:
        raise _which_time()
    if due_ms > TIME_MS_MAX:
        raise Misuse("due behind the year 9999: no file and no protocol can say that")
    return max(due_ms, 1)  # 0 would mean no due time


def columns_of(
    payload: bytes,
    key: str | None,
    tags: Collection[str],
    headers: Mapping[str, str] | None,
    id: MessageId | str | None,
    after: Duration | None,
    at: datetime | None,
    clock: Clock,
) -> tuple[tuple[Any, ...], bool]:
    """The columns of a message, and whether it travels in a batch of its own, because its due time is far."""
    due_ms = 0 if after is None and at is None else due_of(after, at, clock)
    is_alone = due_ms > 0 and is_far(due_ms, clock)
    return (payload, key, tags, headers, None if id is None else id_of(id), due_ms), is_alone


def dues_of(
    count: int,
    after: Duration | Sequence[Duration] | None,
    at: datetime | Sequence[datetime] | None,
    clock: Clock,
) -> Sequence[int] | None:
    """The due times of a list of messages, from one time for all or one for each. None: they are not delayed."""
    if after is None and at is None:
        return None
    if after is not None and at is not None:
        raise _which_time()
    if isinstance(after, Sequence):
        _check_count(len(after), count, "after")
        return [due_of(each, None, clock) for each in after]
    if isinstance(at, Sequence):
        _check_count(len(at), count, "at")
        return [due_of(None, each, clock) for each in at]
    return array("q", [due_of(after, at, clock)]) * count


def _which_time() -> Misuse:
    return Misuse("say when by after= or by at=, and not by both")


def _check_count(given: int, count: int, name: str) -> None:
    if given != count:
        raise Misuse(f"{given} times in {name}= for {count} payloads: give one for each, or one for all")


def _wait_ms(after: Duration) -> int:
    seconds = seconds_of(after)
    if seconds * 1_000 > TIME_MS_MAX:  # check before the conversion to int, which fails for infinity
        return TIME_MS_MAX
    if isinstance(after, timedelta):
        return -(-after // _MS)
    return math.ceil(round(seconds * 1_000, 6))  # 1.1 s are 1,100 ms, although 1.1 * 1000 is a little more


def is_far(due_ms: int, clock: Clock) -> bool:
    """Whether a delay server with default options refuses this due time."""
    return due_ms > clock.wall_ms() + limits.DELAY_HORIZON_MS


def time_ms(at: datetime) -> int:
    """Milliseconds since 1970 UTC, rounded up. Raises `Misuse` if the datetime has no time zone."""
    if not isinstance(at, datetime):
        raise Misuse(f"a time is a datetime, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise Misuse(f"{at} says no time zone: give it a time zone, such as datetime.now(timezone.utc)")
    return -(-(at - _EPOCH) // _MS)


def moment_of(ms: int) -> datetime:
    """The UTC datetime of a time in the protocol's form."""
    return _EPOCH + ms * _MS


# --- cancel and reschedule --------------------------------------------------------------------------------------------


def cancel(id: MessageId | str | None, subject: str | None, key: str | None) -> Command[Decided]:
    return Command(Cancel(*_named(id, subject, key)), Decided)


def reschedule(id: MessageId | str | None, subject: str | None, key: str | None, due_ms: int) -> Command[Decided]:
    return Command(Reschedule(*_named(id, subject, key), due_ms), Decided)


def _named(id: MessageId | str | None, subject: str | None, key: str | None) -> tuple[str, str | None, str | None]:
    """The messages that the arguments name: one by its id, or all pending messages of a key in a subject."""
    if (id is None) == (key is None):
        raise Misuse("name a message by its id, or messages by subject= and key=")
    if key is not None and subject is None:
        raise Misuse(f"the key {key!r} belongs to a subject: say which, subject=")
    where = "" if subject is None else str(Subject.parse(subject))
    return where, None if id is None else str(id_of(id)), key


def decision_of(decided: Decided) -> DelayedOutcome:
    return DelayedOutcome(_FATES[decided.fate], decided.messages)


# --- list and count ---------------------------------------------------------------------------------------------------


def which_of(subject: str | None, key_prefix: str | None, between: Between | None) -> Which:
    """The filter in the protocol's form."""
    start, end = between or (None, None)
    return Which(
        None if subject is None else str(Subject.parse(subject)),
        key_prefix,
        None if start is None else max(time_ms(start), 0),
        None if end is None else max(time_ms(end), 0),
    )


def count(which: Which) -> Command[Tallied]:
    return Command(DelayTally(which), Tallied)


def histogram(which: Which, width: Duration) -> Command[Tallied]:
    width_ms = math.ceil(seconds_of(width) * 1_000)
    if not width_ms:
        raise Misuse("a histogram of a width of 0: give seconds or a timedelta")
    return Command(DelayTally(which, width_ms), Tallied)


def stretches_of(tallied: Tallied) -> dict[datetime, int]:
    """The number of messages due in each stretch, by its start, in order."""
    return {moment_of(each.start_ms): each.count for each in tallied.stretches}


def in_transit_of(tallied: Tallied) -> list[InTransit]:
    return [InTransit(each.group, each.messages, each.is_reachable) for each in tallied.in_transit or ()]


def resend(group: str) -> Command[Resent]:
    return Command(Resend(group), Resent)


class Listing:
    """Reads the pending messages page by page: ask `command()`, give the answer to `messages`, until `is_done`."""

    def __init__(self, which: Which, limit: int | None) -> None:
        if limit is not None and limit < 0:
            raise Misuse(f"limit={limit}: it is 0 or more, or None for all")
        self._which = which
        self._left = limit
        self._after = ""
        self.is_done = limit == 0

    def command(self) -> Command[PendingPage]:
        most = limits.PENDING_PAGE_MAX if self._left is None else min(self._left, limits.PENDING_PAGE_MAX)
        return Command(PendingListed(self._which, self._after, most), PendingPage)

    def messages(self, page: PendingPage) -> Iterator[DelayedMessage]:
        if self._left is not None:
            self._left -= len(page.messages)
        self._after = page.next
        self.is_done = not page.next or self._left == 0
        for each in page.messages:
            yield DelayedMessage(each.subject, each.id, each.key, moment_of(each.due_ms), each.size_bytes)


# --- `client.delayed` -------------------------------------------------------------------------------------------------


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
        return decision_of(self._ask(cancel(id, subject, key)))

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
        due_ms = due_of(after, at, self._clock)
        return decision_of(self._ask(reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> Iterator[DelayedMessage]:
        """The pending messages in the order of due times. The iterator asks for pages as the caller goes on."""
        which = which_of(subject, key_prefix, between)
        walks = [_walk(ask, Listing(which, limit)) for ask in self._askers()]
        return walks[0] if len(walks) == 1 else islice(merge(*walks, key=attrgetter("due_at")), limit)

    def count(self, subject: str | None = None, key_prefix: str | None = None, between: Between | None = None) -> int:
        return self._ask(count(which_of(subject, key_prefix, between))).count

    def in_transit(self) -> builtins.list[InTransit]:
        """Due messages on their way, by broker group: too late to cancel, and not known to be stored there yet."""
        return in_transit_of(self._ask(count(Which())))

    def resend(self, group: str) -> Redirection:
        """Send the messages on their way to a broker group that is gone for good to other groups.

        Nobody can tell any more which messages the lost group has stored, so these may be delivered twice.
        """
        resent = self._ask(resend(group))
        return Redirection(resent.messages, resent.left)

    def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """The number of messages due in each stretch of that width, by its start (UTC), without empty stretches."""
        asked = histogram(which_of(subject, key_prefix, between), width)
        return stretches_of(self._ask(asked))


def _walk(ask: AskDelayServer, listing: Listing) -> Iterator[DelayedMessage]:
    while not listing.is_done:
        yield from listing.messages(ask(listing.command()))


class AioAskDelayServer(Protocol):
    """Asks a delay server, or all of them."""

    async def __call__(self, command: Command[AnswerT]) -> AnswerT: ...


class AioDelayed:
    """Requests about delayed messages. The answer to a change means that it is durable."""

    def __init__(
        self, ask: AioAskDelayServer, clock: Clock, askers: Callable[[], Awaitable[list[AioAskDelayServer]]]
    ) -> None:
        """`ask` asks all groups of delay servers and merges the answers; `askers` returns one callable for each."""
        self._ask = ask
        self._clock = clock
        self._askers = askers

    async def cancel(
        self, id: MessageId | str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> DelayedOutcome:
        """Cancel a message by the id in its receipt, or all pending messages of a key in a subject."""
        return decision_of(await self._ask(cancel(id, subject, key)))

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
        due_ms = due_of(after, at, self._clock)
        return decision_of(await self._ask(reschedule(id, subject, key, due_ms)))

    def list(
        self,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[DelayedMessage]:
        """The pending messages in the order of due times. The iterator asks for pages as the caller goes on."""
        return self._walks(which_of(subject, key_prefix, between), limit)

    async def _walks(self, which: Which, limit: int | None) -> AsyncIterator[DelayedMessage]:
        """Merge the walks through all groups of delay servers by due time, up to `limit` messages."""
        walks = [_walk_async(ask, Listing(which, limit)) for ask in await self._askers()]
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
        return (await self._ask(count(which_of(subject, key_prefix, between)))).count

    async def in_transit(self) -> builtins.list[InTransit]:
        """Due messages on their way, by broker group: too late to cancel, and not known to be stored there yet."""
        return in_transit_of(await self._ask(count(Which())))

    async def resend(self, group: str) -> Redirection:
        """Send the messages on their way to a broker group that is gone for good to other groups.

        Nobody can tell any more which messages the lost group has stored, so these may be delivered twice.
        """
        resent = await self._ask(resend(group))
        return Redirection(resent.messages, resent.left)

    async def histogram(
        self,
        width: Duration,
        subject: str | None = None,
        key_prefix: str | None = None,
        between: Between | None = None,
    ) -> dict[datetime, int]:
        """The number of messages due in each stretch of that width, by its start (UTC), without empty stretches."""
        asked = histogram(which_of(subject, key_prefix, between), width)
        return stretches_of(await self._ask(asked))


async def _walk_async(ask: AioAskDelayServer, listing: Listing) -> AsyncIterator[DelayedMessage]:
    while not listing.is_done:
        for message in listing.messages(await ask(listing.command())):
            yield message
