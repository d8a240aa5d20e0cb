"""Requests of operators, tools and Spark to a broker: seek, scan without a group, describe, configure, switch, remove.

No message waits for these requests. So their answers may be large, and those that could grow without limit are paged.

`Retrace`, `Names` and `Index` serve readers of message histories: Spark, and tools. Logs travel as they are stored
(`docs/internals/formats.md`), so a broker has no more work with a thousand events than with one.
"""

from __future__ import annotations

import enum

from fairway.protocol.messages import AttachedBatch, ControlMessage, Natural, Whence

# --- cursors and scans ------------------------------------------------------------------------------------------------


class Seek(ControlMessage, frozen=True):
    """Move a group's cursor on this broker group. The group forgets everything in flight: a clean start from there."""

    subject: str
    group: str
    whence: Whence
    value: Natural = 0  # TIME: ms since 1970 UTC; SEQUENCE: the sequence; otherwise 0


class Sought(ControlMessage, frozen=True):
    """Durable. The next message handed out is `sequence`, or the first stored message behind it."""

    sequence: Natural
    was: Natural
    held: Natural = 0  # messages that the group no longer remembers: held by consumers,
    waiting: Natural = 0  # handed back or waiting for their next attempt,
    dying: Natural = 0  # and on their way to dead letter


class Scan(ControlMessage, frozen=True):
    """Read committed batches without a group. With `bytes_max` 0 the answer only has the positions."""

    subject: str
    whence: Whence
    value: Natural
    end: Natural | None  # stop before this sequence; None: at the committed end
    bytes_max: Natural  # at least one batch comes, however large, unless this is 0
    log_id: Natural | None = None  # refuse as FENCED if the log is another one by now
    wait_ms: Natural = 0  # if there is nothing yet: how long to wait
    tags: list[str] = []  # noqa: RUF012  (msgspec copies an empty default)  # leave out batches without any of these
    is_dry: bool = False  # choose batches but attach none: how far so many bytes reach


class Scanned(ControlMessage, frozen=True):
    """Whole batches are attached: the first may begin before the place asked for, the last may end past `end`."""

    batches: list[AttachedBatch]
    next_sequence: Natural  # go on here; if nothing is attached, where the scan would have begun
    first_sequence: Natural  # the first that retention has left
    committed_end: Natural
    log_id: Natural
    epoch: Natural
    size_bytes: Natural = 0  # of the chosen batches, as they are stored


# --- descriptions -----------------------------------------------------------------------------------------------------


class Depth(enum.IntEnum):
    """The level of detail of a description."""

    SUBJECTS = 1
    GROUPS = 2
    CONSUMERS = 3  # and the groups' actors


class Describe(ControlMessage, frozen=True):
    """Ask for a description. Pages count groups (subjects where the depth is SUBJECTS)."""

    depth: Depth
    subject: str | None = None  # None: all
    group: str | None = None  # None: all
    after: str = ""  # `next` of the page before
    items_max: Natural = 1_000


class ConsumerState(ControlMessage, frozen=True):
    name: str
    messages: Natural  # handed out to the consumer and not settled
    lots: Natural
    response: Natural  # the number of the last response
    lease_left_ms: Natural
    config_version: Natural
    is_paused: bool
    address: str  # of its connection; empty while there is none


class ActorState(ControlMessage, frozen=True):
    """The scheduler's view of a group; the times are those of its account."""

    run: str  # idle, ready, running
    waiting: Natural  # requests in its mailbox
    suspensions: Natural
    turns: Natural
    served_ns: Natural
    cold_ns: Natural  # time spent on reads that missed the page cache
    virtual_ns: Natural


class GroupDescription(ControlMessage, frozen=True):
    """One group on one subject. Counts are messages, except `lots`."""

    name: str
    cursor: Natural
    oldest_unacked: Natural  # the cursor, if no message below it is open
    lag: Natural  # committed and not yet handed out
    in_flight: Natural  # held by consumers
    returned: Natural  # handed back, or due again: the next pull gets them
    retrying: Natural  # waiting for their next attempt
    dying: Natural  # on their way to the dead-letter subject
    dead: Natural  # in the dead-letter subject
    lost: Natural  # taken by retention or rot before the group had handled them
    inbox: Natural  # waiting in the private inbox
    lots: Natural  # unacked lots
    weight: float
    is_paused: bool
    config_version: Natural
    consumers_count: Natural
    consumers: list[ConsumerState] = []  # noqa: RUF012  (msgspec copies an empty default)
    actor: ActorState | None = None
    oldest_ms: Natural | None = None  # when the oldest unhandled message was stored; None: all are handled
    order: str = "none"  # key, strict
    parked: Natural = 0  # behind others of their keys, held by nobody
    is_full: bool = False  # the maximum is behind others of their keys: the group parks no more messages
    halted: Natural = 0  # keys that wait behind a dead letter; 1 if a group of strict order waits
    declined: Natural = 0  # so far, by a coalescing group: other messages of their keys do what they ask for
    coalesce: str = "none"  # decline, latest
    rate_per_s: float = 0.0  # messages handed out at most; 0: no limit
    rate_per_key: float = 0.0
    active: str = ""  # in strict order: the consumer that gets messages, while the others stand by
    config: bytes | None = None  # as in Joined; at depth CONSUMERS


class SubjectDescription(ControlMessage, frozen=True):
    name: str
    first_sequence: Natural
    committed_end: Natural
    is_read_only: bool
    groups_count: Natural
    groups: list[GroupDescription] = []  # noqa: RUF012  (msgspec copies an empty default)


class BrokerState(ControlMessage, frozen=True):
    server: str
    log_id: Natural
    epoch: Natural
    is_master: bool
    is_read_only: bool
    started_ms: Natural
    connections: Natural
    now_ms: Natural = 0  # by the broker's clock
    durability: str = ""  # sync or memory
    free_bytes: Natural = 0  # on the disk of its data
    connections_max: Natural = 0
    rotten_spans: Natural = 0  # spans of its logs that the disk has lost and no other copy has restored


class Described(ControlMessage, frozen=True):
    broker: BrokerState
    subjects: list[SubjectDescription]  # a subject with more groups than a page holds is on several pages
    next: str = ""  # for `Describe.after`; empty on the last page


# --- changes ----------------------------------------------------------------------------------------------------------


class Configure(ControlMessage, frozen=True):
    """Set a configuration, compare and set: refused as STALE_CONFIG unless `expected_version` is in force."""

    subject: str
    group: str
    config: bytes  # MessagePack, as in Joined; its own version is the next one
    expected_version: Natural  # 0: the group does not exist yet


class Configured(ControlMessage, frozen=True):
    """The configuration is durable and in force."""

    version: Natural


class Lever(enum.IntEnum):
    """The switches that an operator can turn."""

    PAUSE_GROUP = 1
    PAUSE_CONSUMER = 2
    READ_ONLY = 3  # a subject
    HALT_KEY = 4  # of a group that halts after a dead letter; can only be turned off


class Switch(ControlMessage, frozen=True):
    """Turn a switch. A switch that is in that position already is no error."""

    lever: Lever
    is_on: bool
    subject: str
    group: str = ""  # unless READ_ONLY
    consumer: str = ""  # PAUSE_CONSUMER
    key: str | None = None  # HALT_KEY; None: all halted keys


class Switched(ControlMessage, frozen=True):
    """The switch is durable."""

    was_on: bool


class Weigh(ControlMessage, frozen=True):
    """Set a group's weight. While both want it, weight 2 gets twice the broker's time of weight 1. Answered by Done."""

    subject: str
    group: str
    weight: float


class Redrive(ControlMessage, frozen=True):
    """Send dead letters of a group back to it, through its private inbox: no other group gets them."""

    subject: str
    group: str
    ids: list[str] | None  # text form; None: all that are there now
    rate_per_s: Natural = 0  # messages; 0: as fast as consumers take them


class RemoveSubject(ControlMessage, frozen=True):
    """Remove a subject with its groups, their inboxes and their dead letters. Repeating the request is harmless."""

    subject: str
    is_forced: bool = False  # although messages are lost by it, or consumers are connected
    is_dry: bool = False  # only report whether it can be removed, and what would go


class RemoveGroup(ControlMessage, frozen=True):
    """Remove a group from a subject, with its inbox. Its dead letters stay, unless there are none."""

    subject: str
    group: str
    is_forced: bool = False
    is_dry: bool = False
    takes_dead: bool = False  # remove its dead letters too


class Removed(ControlMessage, frozen=True):
    """The removal is durable; these are its counts."""

    existed: bool  # False: there was no such subject or group here
    groups: Natural = 0
    messages: Natural = 0  # that some group had not handled, or that no group consumed
    dead: Natural = 0  # dead letters


class Redriven(ControlMessage, frozen=True):
    """The redrive is durable, and continues at the given rate across restarts."""

    count: Natural
    unknown: list[str]  # ids that are not among the group's dead letters


class Retrace(ControlMessage, frozen=True):
    """Read the action log, from a position on. With `bytes_max` 0 the answer only has the positions."""

    whence: Whence
    value: Natural  # TIME: ms since 1970 UTC; SEQUENCE: a position in the log; otherwise 0
    bytes_max: Natural
    log_id: Natural | None = None  # refuse as FENCED if the log is another one by now
    wait_ms: Natural = 0  # if there is nothing yet: how long to wait


class Retraced(ControlMessage, frozen=True):
    """Committed bytes of one segment. They may end within a record, and go on at `position` + their length."""

    data: bytes
    position: Natural  # of the first byte; past the requested one if a segment begins there, or a part is missing
    segment_base: Natural  # of the segment with that byte; at the end of the log, the position
    segment_end: Natural  # the committed end in that segment
    first_position: Natural  # of the oldest byte that is stored
    committed_end: Natural
    log_id: Natural
    epoch: Natural


class NumberedConsumer(ControlMessage, frozen=True):
    group: Natural
    consumer: Natural


class Names(ControlMessage, frozen=True):
    """Ask for the names of numbers in the action log."""

    subjects: list[Natural]
    groups: list[Natural]
    consumers: list[NumberedConsumer]


class Named(ControlMessage, frozen=True):
    """The names in the requested order. Empty: the broker does not know the number any more, only the log does."""

    subjects: list[str]
    groups: list[str]
    consumers: list[str]


class Index(ControlMessage, frozen=True):
    """Read the index entries of a subject's batches: what was stored when, without the messages."""

    subject: str
    whence: Whence
    value: Natural
    end: Natural | None  # stop before batches that begin at this sequence; None: at the committed end
    entries_max: Natural  # 0: none, only the numbers of the answer
    log_id: Natural | None = None
    is_dry: bool = False  # choose entries but send none: how far so many reach


class Indexed(ControlMessage, frozen=True):
    """Index entries. The first may be of a batch that begins before the place asked for."""

    data: bytes  # entries as in an index file, back to back
    entries: Natural  # chosen
    next_sequence: Natural  # go on here
    first_sequence: Natural  # the first that retention has left
    committed_end: Natural
    log_id: Natural
    epoch: Natural
