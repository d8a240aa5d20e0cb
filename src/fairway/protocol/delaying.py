"""What is said about messages that are not due yet: cancel, put off, list, count.

They are sent by PRODUCE, as a batch with due times. Until its time has come a message is pending at a delay server, and
these questions are asked there: on the broker's own port where `fairway up` runs both, otherwise on the delay server's.
"""

from __future__ import annotations

import enum

from fairway.protocol.messages import Message, Natural


class Fate(enum.IntEnum):
    """What became of the messages that somebody wanted cancelled or put off."""

    CANCELLED = 1  # pending no longer, and never sent
    RESCHEDULED = 2
    ALREADY_DISPATCHED = 3  # on their way to the broker, or there
    UNKNOWN = 4  # never scheduled here, or sent or cancelled so long ago that nobody remembers


class Cancel(Message, frozen=True):
    """Exactly one of id and key. A key means every pending message of the subject that has it."""

    subject: str  # "" with an id: whichever it has
    id: str | None  # text form
    key: str | None


class Reschedule(Message, frozen=True):
    """Send at another time what is pending."""

    subject: str
    id: str | None
    key: str | None
    due_ms: Natural


class Decided(Message, frozen=True):
    """Durable, and true for ever."""

    fate: Fate
    messages: Natural  # that were cancelled or put off


class Which(Message, frozen=True):
    """Which pending messages are meant; None: any."""

    subject: str | None = None
    key_prefix: str | None = None
    from_ms: Natural | None = None
    to_ms: Natural | None = None  # not included


class Pending(Message, frozen=True):
    """A page of what is pending, in the order of due times."""

    which: Which
    after: str = ""  # `next` of the page before
    items_max: Natural = 1_000
    with_batches: bool = False  # the messages themselves, too


class PendingMessage(Message, frozen=True):
    subject: str
    id: str
    key: str | None
    due_ms: Natural
    size_bytes: Natural  # of the payload


class PendingBatch(Message, frozen=True):
    """What an attached batch holds: the next `count` messages of the list, which all have this subject."""

    subject: str
    count: Natural


class PendingPage(Message, frozen=True):
    """Batches are attached where they were asked for."""

    messages: list[PendingMessage]
    next: str = ""  # for `Pending.after`; empty on the last page
    batches: list[PendingBatch] = []  # noqa: RUF012  (msgspec copies an empty default)


class Tally(Message, frozen=True):
    """How many are pending, and when they are due."""

    which: Which
    width_ms: Natural = 0  # of a stretch; 0: the count alone


class Stretch(Message, frozen=True):
    """What is due from `start_ms` on, a multiple of the width, until the width is over."""

    start_ms: Natural
    count: Natural


class Tallied(Message, frozen=True):
    count: Natural
    stretches: list[Stretch] = []  # noqa: RUF012  (msgspec copies an empty default)  # in order; none is empty
