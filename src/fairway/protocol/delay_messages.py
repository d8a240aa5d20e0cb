"""Messages about delayed messages: cancel, reschedule, list, count, resend to another group, and their history.

Producers send delayed messages by PRODUCE, as a batch with due times. Until its due time a message is pending at a
delay server, which answers these requests: on the broker's own port where `fairway up` runs both, otherwise on its own
port.
"""

from __future__ import annotations

import enum

from fairway.protocol.messages import ControlMessage, Natural, Whence


class Fate(enum.IntEnum):
    """The result of a cancel or a reschedule."""

    CANCELLED = 1  # no longer pending, and never sent
    RESCHEDULED = 2
    ALREADY_DISPATCHED = 3  # on the way to the broker, or there
    UNKNOWN = 4  # never scheduled here, or sent or cancelled so long ago that the server has forgotten


class Cancel(ControlMessage, frozen=True):
    """Cancel pending messages, by exactly one of id and key. A key means every pending message of the subject with
    it."""

    subject: str  # "" with an id: any subject
    id: str | None  # text form
    key: str | None


class Reschedule(ControlMessage, frozen=True):
    """Give pending messages another due time."""

    subject: str
    id: str | None
    key: str | None
    due_ms: Natural


class Decided(ControlMessage, frozen=True):
    """The result is durable and final."""

    fate: Fate
    messages: Natural  # that were cancelled or rescheduled


class Which(ControlMessage, frozen=True):
    """A filter of pending messages; None: any."""

    subject: str | None = None
    key_prefix: str | None = None
    from_ms: Natural | None = None
    to_ms: Natural | None = None  # exclusive


class PendingListed(ControlMessage, frozen=True):
    """Ask for a page of pending messages, in the order of due times."""

    which: Which
    after: str = ""  # `next` of the page before
    items_max: Natural = 1_000
    with_batches: bool = False  # attach the messages themselves, too


class PendingMessage(ControlMessage, frozen=True):
    subject: str
    id: str
    key: str | None
    due_ms: Natural
    size_bytes: Natural  # of the payload


class DelayedBatch(ControlMessage, frozen=True):
    """An attached batch: the next `count` messages of the list, all of this subject."""

    subject: str
    count: Natural


class PendingPage(ControlMessage, frozen=True):
    """A page of pending messages, with batches attached if the request asked for them."""

    messages: list[PendingMessage]
    next: str = ""  # for `PendingListed.after`; empty on the last page
    batches: list[DelayedBatch] = []  # noqa: RUF012  (msgspec copies an empty default)


class DelayTally(ControlMessage, frozen=True):
    """Count pending messages, in all and by due time."""

    which: Which
    width_ms: Natural = 0  # of an interval of due times; 0: only the count


class Stretch(ControlMessage, frozen=True):
    """The count of messages due within one interval; `start_ms` is a multiple of the width."""

    start_ms: Natural
    count: Natural


class TransitReport(ControlMessage, frozen=True):
    """Due messages in batches made for one broker group. Only that group knows whether it has them."""

    group: str
    messages: Natural
    is_reachable: bool  # whether there is a connection to the group


class Tallied(ControlMessage, frozen=True):
    count: Natural
    stretches: list[Stretch] = []  # noqa: RUF012  (msgspec copies an empty default)  # in order; none is empty
    in_transit: list[TransitReport] | None = None  # by group, for all messages, not only `which`; None: older server


class Resend(ControlMessage, frozen=True):
    """Send messages made for a broker group that is gone to other groups. Messages that the old group stored then exist
    twice."""

    group: str


class Resent(ControlMessage, frozen=True):
    """Durable: these messages have another target."""

    messages: Natural
    left: Natural = 0  # no group takes them now, or they cannot be read: ask again


# --- history ----------------------------------------------------------------------------------------------------------


class Chronicle(enum.IntEnum):
    """A log of a delay server."""

    SCHEDULED = 1  # messages that the server accepted
    DECIDED = 2  # dispatches, cancellations and reschedules


class PastKind(enum.IntEnum):
    """The kind of an event of delayed messages."""

    SCHEDULED = 1
    DISPATCHED = 2  # decided, and final; the broker group's own logs show the arrival
    CANCELLED = 3
    RESCHEDULED = 4


class History(ControlMessage, frozen=True):
    """Ask for the events of one log, in order, from a place on, as far as the log goes back."""

    chronicle: Chronicle
    whence: Whence
    value: Natural  # SEQUENCE: a position in that log
    end: Natural | None = None  # leave out events at this position or behind it
    skip: Natural = 0  # events to skip of the record at the place: `next_skip` of the page before
    events_max: Natural = 1_000  # 0: none, only the numbers
    log_id: Natural | None = None  # refuse if the log is another one by now


class PastEvent(ControlMessage, frozen=True):
    kind: PastKind
    subject: str
    first_sequence: Natural  # in the delay server's own log of that subject; identifies the message
    count: Natural
    at_ms: Natural
    position: Natural  # of the event's record
    due_ms: Natural | None = None  # SCHEDULED: the due time; RESCHEDULED: the new due time
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
