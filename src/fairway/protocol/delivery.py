"""A message as a handler sees it.

The payload was sliced when the batch was decoded; key, tags, headers, id and times are looked up in the batch when
somebody asks, which decodes the batch again if it was released meanwhile (`page`). To settle a message is to set one
byte in its lot's state: from any thread, no lock, no dictionary. The lot tells its consumer that there is something to
send, which sends it with whatever else has been settled by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.errors import Misuse
from fairway.protocol.lots import ACK, OPEN, REJECT, RELEASE, RETRY, ConsumerLot, SettlementNote
from fairway.protocol.page import LazyBatch

After: TypeAlias = float | timedelta  # seconds, or a timedelta
_LOT: Final[Callable[[Message], ConsumerLot]] = attrgetter("_lot")


def after_ms_of(after: After | None) -> int | None:
    """A wait in seconds or as a timedelta, in ms; None stays None: the group's own backoff."""
    if after is None:
        return None
    if isinstance(after, bool) or not isinstance(after, int | float | timedelta):
        raise Misuse(f"after is seconds or a timedelta, not {type(after).__name__}")
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if not 0 <= seconds * 1_000 <= limits.RETRY_AFTER_MS_MAX:
        raise Misuse(f"after is {seconds} s: it is from 0 to {limits.RETRY_AFTER_MS_MAX // 1_000}, one day")
    return round(seconds * 1_000)


class Message(msgspec.Struct, gc=False, eq=False):
    """One message, handed to you. Settle it once: `ack`, `retry` or `reject`; otherwise it stays yours while you live.

    Its methods may be called from any thread.
    """

    payload: bytes
    sequence: int
    _lot: ConsumerLot
    _page: LazyBatch

    # --- what it says

    @property
    def subject(self) -> str:
        return self._lot.ledger.subject

    @property
    def group(self) -> str:
        return self._lot.ledger.group

    @property
    def broker_group(self) -> str:
        """In a cluster: the group of brokers that has it, and numbers its messages by itself. Otherwise empty."""
        return self._lot.ledger.broker_group

    @property
    def attempt(self) -> int:
        """1 the first time."""
        return self._lot.attempt

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier attempt failed, or nobody knows how it ended."""
        return self._lot.attempt > 1

    @property
    def key(self) -> str | None:
        return self._page.batch.key(self.sequence - self._page.first_sequence)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._page.batch.tags(self.sequence - self._page.first_sequence))

    @property
    def headers(self) -> dict[str, str]:
        return self._page.batch.headers(self.sequence - self._page.first_sequence)

    @property
    def id(self) -> MessageId:
        """Who it is, for ever and on every copy; `str` gives 26 characters."""
        return self._page.batch.id(self.sequence - self._page.first_sequence)

    @property
    def created_at(self) -> datetime:
        """When its producer made it, UTC."""
        return _time(self._page.batch.created_ms(self.sequence - self._page.first_sequence))

    @property
    def appended_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return _time(self._page.appended_ms)

    @property
    def fence(self) -> int:
        """In an ordered group: a number that grows with every handout, of whatever to whomever. Keep the highest with
        what you change, and refuse a lower one: then a consumer that was given up for dead changes nothing. Otherwise
        0."""
        return self._lot.fence

    # --- how it stands

    @property
    def is_settled(self) -> bool:
        """Whether somebody has said what became of it; the broker may not know yet."""
        return self._lot.state[self.sequence - self._lot.first] != OPEN

    @property
    def is_lapsed(self) -> bool:
        """Whether the lease may have run out, so that others may have it by now: release it rather than begin. It may
        become False again, when the broker confirms that the message is still yours."""
        return self._lot.has_lapsed(self.sequence)

    @property
    def is_final(self) -> bool:
        """Whether the group is at most once: it was settled by being handed out, and cannot be retried."""
        return self._lot.is_final

    # --- what became of it

    def ack(self) -> None:
        """Done."""
        lot = self._lot
        index = self.sequence - lot.first
        if lot.state[index] != OPEN:
            raise lot.complaint(self.sequence)
        lot.state[index] = ACK
        if not lot.is_dirty:
            lot.touch()

    def retry(self, after: After | None = None, reason: str = "") -> None:
        """Failed: again after so many seconds (or a timedelta); by the group's backoff unless told."""
        self._fail(RETRY, SettlementNote(after_ms_of(after), reason))

    def reject(self, reason: str = "") -> None:
        """Never again: to dead letter at once."""
        self._fail(REJECT, SettlementNote(None, reason))

    def release(self) -> None:
        """Hand it back untouched, to whoever pulls next; counts as no attempt."""
        self._lot.settle(self.sequence, RELEASE, None)

    def _fail(self, code: int, note: SettlementNote) -> None:
        lot = self._lot
        if lot.ledger.is_watched and lot.is_last(code):
            lot.last_ids[self.sequence - lot.first] = self.id
        lot.settle(self.sequence, code, note)

    def __repr__(self) -> str:
        return f"<Message {self.sequence} of {self.subject}, attempt {self.attempt}, {len(self.payload)} bytes>"


def may_begin(message: Message) -> bool:
    """Whether a message that was taken from its session may go to the program: certainly nobody else has it."""
    return message._lot.may_begin(message.sequence)


def is_last_attempt(message: Message) -> bool:
    """Whether the message is a dead letter if this attempt fails, as far as its consumer knows the configuration."""
    return message._lot.is_last(RETRY)


def ack_all(messages: Sequence[Message]) -> None:
    """`ack` of each; where one was settled before, those before it hold."""
    for lot, group in groupby(messages, _LOT):
        state, first = lot.state, lot.first
        try:
            for message in group:
                index = message.sequence - first
                if state[index] != OPEN:
                    raise lot.complaint(message.sequence)
                state[index] = ACK
        finally:
            if not lot.is_dirty:  # after the bytes: who looks now sees all of them
                lot.touch()


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)
