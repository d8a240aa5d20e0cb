"""What is said about messages that are not due yet: cancel, put off, list, count, send to another group, and what
became of them so far.

They are sent by PRODUCE, as a batch with due times. Until its time has come a message is pending at a delay server, and
these questions are asked there: on the broker's own port where `fairway up` runs both, otherwise on the delay server's.
"""

from __future__ import annotations

import enum

from fairway.protocol.messages import ControlMessage, Natural, Whence


class Fate(enum.IntEnum):
    """What became of the messages that somebody wanted cancelled or put off."""

    CANCELLED = 1  # pending no longer, and never sent
    RESCHEDULED = 2
    ALREADY_DISPATCHED = 3  # on their way to the broker, or there
    UNKNOWN = 4  # never scheduled here, or sent or cancelled so long ago that nobody remembers


class Cancel(ControlMessage, frozen=True):
    """Exactly one of id and key. A key means every pending message of the subject that has it."""

    subject: str  # "" with an id: whichever it has
    id: str | None  # text form
    key: str | None


class Reschedule(ControlMessage, frozen=True):
    """Send at another time what is pending."""

    subject: str
    id: str | None
    key: str | None
    due_ms: Natural


class Decided(ControlMessage, frozen=True):
    """Durable, and true for ever."""

    fate: Fate
    messages: Natural  # that were cancelled or put off


class Which(ControlMessage, frozen=True):
    """Which pending messages are meant; None: any."""

    subject: str | None = None
    key_prefix: str | None = None
    from_ms: Natural | None = None
    to_ms: Natural | None = None  # not included


class PendingListed(ControlMessage, frozen=True):
    """A page of what is pending, in the order of due times."""

    which: Which
    after: str = ""  # `next` of the page before
    items_max: Natural = 1_000
    with_batches: bool = False  # the messages themselves, too


class PendingMessage(ControlMessage, frozen=True):
    subject: str
    id: str
    key: str | None
    due_ms: Natural
    size_bytes: Natural  # of the payload


class DelayedBatch(ControlMessage, frozen=True):
    """What an attached batch holds: the next `count` messages of the list, which all have this subject."""

    subject: str
    count: Natural


class PendingPage(ControlMessage, frozen=True):
    """Batches are attached where they were asked for."""

    messages: list[PendingMessage]
    next: str = ""  # for `PendingListed.after`; empty on the last page
    batches: list[DelayedBatch] = []  # noqa: RUF012  (msgspec copies an empty default)


class DelayTally(ControlMessage, frozen=True):
    """How many are pending, and when they are due."""

    which: Which
    width_ms: Natural = 0  # of a stretch; 0: the count alone


class Stretch(ControlMessage, frozen=True):
    """What is due from `start_ms` on, a multiple of the width, until the width is over."""

    start_ms: Natural
    count: Natural


class TransitReport(ControlMessage, frozen=True):
    """Messages that are due, in batches that were made for one broker group: only that group can say whether it has
    them."""

    group: str
    messages: Natural
    is_reachable: bool  # whether there is a connection to it


class Tallied(ControlMessage, frozen=True):
    count: Natural
    stretches: list[Stretch] = []  # noqa: RUF012  (msgspec copies an empty default)  # in order; none is empty
    in_transit: list[TransitReport] | None = (
        None  # by group; all there are, whichever pending ones were meant. None: an
    )
    # older server, which does not count them


class Resend(ControlMessage, frozen=True):
    """Send to other broker groups what was made for one that is gone. Whatever that one has stored is there twice."""

    group: str


class Resent(ControlMessage, frozen=True):
    """Durable: these messages have another target."""

    messages: Natural
    left: Natural = 0  # no group takes them now, or they cannot be read: ask again


# --- the past ---------------------------------------------------------------------------------------------------------


class Chronicle(enum.IntEnum):
    """Which log of a delay server."""

    SCHEDULED = 1  # what was taken
    DECIDED = 2  # what was dispatched, cancelled and put off


class PastKind(enum.IntEnum):
    """What happened to delayed messages."""

    SCHEDULED = 1
    DISPATCHED = 2  # they go to their broker group, whatever happens; that it has them is seen there
    CANCELLED = 3
    RESCHEDULED = 4


class History(ControlMessage, frozen=True):
    """What happened, in the order of one log, from a place on; as far as it goes back."""

    chronicle: Chronicle
    whence: Whence
    value: Natural  # SEQUENCE: a position in that log
    end: Natural | None = None  # leave out what lies at this position or behind it
    skip: Natural = 0  # so many events of the record at the place: `next_skip` of the page before
    events_max: Natural = 1_000  # 0: none, only the numbers
    log_id: Natural | None = None  # refuse if the log is another one by now


class PastEvent(ControlMessage, frozen=True):
    kind: PastKind
    subject: str
    first_sequence: Natural  # in the delay server's own log of that subject: what tells the message from all others
    count: Natural
    at_ms: Natural
    position: Natural  # of the record that says so
    due_ms: Natural | None = None  # SCHEDULED: when it is to be delivered; RESCHEDULED: when from now on
    id: str | None = None  # SCHEDULED, whose events are of one message each
    key: str | None = None
    target: str = ""  # DISPATCHED: the broker group


class HistoryPage(ControlMessage, frozen=True):
    events: list[PastEvent]
    next: Natural  # go on here, with `next_skip`
    next_skip: Natural
    first_position: Natural  # the log goes back to here
    committed_end: Natural
    log_id: Natural
