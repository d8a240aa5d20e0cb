"""What operators, tools and Spark ask of a broker: move a cursor, read without a group, look, configure, switch.

None of it is on the way of a message, so these messages may be large and are paged where they could grow without limit.
"""

from __future__ import annotations

import enum

from fairway.protocol.messages import AttachedBatch, ControlMessage, Natural, Whence

# --- reading and moving ----------------------------------------------------------------------------------------------


class Seek(ControlMessage, frozen=True):
    """Move a group's cursor on this broker group. What was in flight is forgotten: it is a clean start from there."""

    subject: str
    group: str
    whence: Whence
    value: Natural = 0  # TIME: ms since 1970 UTC; SEQUENCE: the sequence; otherwise 0


class Sought(ControlMessage, frozen=True):
    """Durable. The next message handed out is `sequence`, or the first one stored behind it."""

    sequence: Natural
    was: Natural
    held: Natural = 0  # messages that the group no longer remembers: those in the hands of consumers,
    waiting: Natural = 0  # those handed back or waiting for their next attempt,
    dying: Natural = 0  # and those on their way to dead letter


class Scan(ControlMessage, frozen=True):
    """Read committed batches without a group. With `bytes_max` 0 it only says where things are."""

    subject: str
    whence: Whence
    value: Natural
    end: Natural | None  # stop before this sequence; None: at the committed end
    bytes_max: Natural  # at least one batch comes, however large, unless this is 0
    log_id: Natural | None = None  # refuse as FENCED if the log is another one by now
    wait_ms: Natural = 0  # where there is nothing yet: how long to wait for it
    tags: list[str] = []  # noqa: RUF012  (msgspec copies an empty default)  # leave out batches without any of these
    is_dry: bool = False  # choose as ever, and attach nothing: how far so many bytes reach


class Scanned(ControlMessage, frozen=True):
    """Whole batches are attached: the first may begin before the place asked for, the last may reach past `end`."""

    batches: list[AttachedBatch]
    next_sequence: Natural  # go on here; where the scan would have begun if nothing is attached
    first_sequence: Natural  # the first that retention has left
    committed_end: Natural
    log_id: Natural
    epoch: Natural
    size_bytes: Natural = 0  # of the batches that were chosen, as they are stored


# --- looking ---------------------------------------------------------------------------------------------------------


class Depth(enum.IntEnum):
    """How far down a description goes."""

    SUBJECTS = 1
    GROUPS = 2
    CONSUMERS = 3  # and the groups' actors


class Describe(ControlMessage, frozen=True):
    """Paged by groups (by subjects where the depth is SUBJECTS)."""

    depth: Depth
    subject: str | None = None  # None: all
    group: str | None = None  # None: all
    after: str = ""  # `next` of the page before
    items_max: Natural = 1_000


class ConsumerState(ControlMessage, frozen=True):
    name: str
    messages: Natural  # handed out to it and not settled
    lots: Natural
    response: Natural  # the number of the last one
    lease_left_ms: Natural
    config_version: Natural
    is_paused: bool
    address: str  # of its connection; empty while it has none


class ActorState(ControlMessage, frozen=True):
    """How the scheduler sees a group; the times are those of its account."""

    run: str  # idle, ready, running
    waiting: Natural  # requests in its mailbox
    suspensions: Natural
    turns: Natural
    served_ns: Natural
    cold_ns: Natural  # time spent on reads that missed the page cache
    virtual_ns: Natural


class GroupDescription(ControlMessage, frozen=True):
    """One group on one subject. Counts are messages, but for `lots`."""

    name: str
    cursor: Natural
    oldest_unacked: Natural  # the cursor, if nothing below it is owed
    lag: Natural  # committed and not yet handed out
    in_flight: Natural  # held by consumers
    returned: Natural  # handed back, or due again: the next pull gets it
    retrying: Natural  # waiting for their next attempt
    dying: Natural  # on their way to the dead-letter subject
    dead: Natural  # in the dead-letter subject
    lost: Natural  # taken by retention or rot before the group was done with them
    inbox: Natural  # waiting in the private inbox
    lots: Natural  # un-acked ranges
    weight: float
    is_paused: bool
    config_version: Natural
    consumers_count: Natural
    consumers: list[ConsumerState] = []  # noqa: RUF012  (msgspec copies an empty default)
    actor: ActorState | None = None
    oldest_ms: Natural | None = None  # when the oldest that it is not done with was stored; None: done with all
    order: str = "none"  # key, strict
    parked: Natural = 0  # behind others of their keys, in nobody's hands
    is_full: bool = False  # as many are behind others of their keys, parked or in hand, as may be: nothing new goes out
    halted: Natural = 0  # keys that wait behind a dead letter; 1 where a group of strict order does
    declined: Natural = 0  # so far, by a coalescing group: others of their keys did what they asked for
    coalesce: str = "none"  # decline, latest
    rate_per_s: float = 0.0  # messages handed out at most; 0: without limit
    rate_per_key: float = 0.0
    active: str = ""  # in strict order: the consumer that is handed messages, the others stand by
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
    now_ms: Natural = 0  # by its clock
    durability: str = ""  # sync or memory
    free_bytes: Natural = 0  # on the disk of its data
    connections_max: Natural = 0
    rotten_spans: Natural = 0  # of its logs, that the disk has lost and no other copy has brought back


class Described(ControlMessage, frozen=True):
    broker: BrokerState
    subjects: list[
        SubjectDescription
    ]  # a subject whose groups fill more than a page is on several, with its groups so far
    next: str = ""  # for `Describe.after`; empty on the last page


# --- changing --------------------------------------------------------------------------------------------------------


class Configure(ControlMessage, frozen=True):
    """Compare and set: refused as STALE_CONFIG unless `expected_version` is the one in force."""

    subject: str
    group: str
    config: bytes  # MessagePack, as in Joined; its own version is the next one
    expected_version: Natural  # 0: the group does not exist yet


class Configured(ControlMessage, frozen=True):
    """Durable, and in force."""

    version: Natural


class Lever(enum.IntEnum):
    """What a switch switches."""

    PAUSE_GROUP = 1
    PAUSE_CONSUMER = 2
    READ_ONLY = 3  # a subject
    HALT_KEY = 4  # of a group that halts after a dead letter; it can be turned off only


class Switch(ControlMessage, frozen=True):
    """Turning a switch to where it stands is no error."""

    lever: Lever
    is_on: bool
    subject: str
    group: str = ""  # unless READ_ONLY
    consumer: str = ""  # PAUSE_CONSUMER
    key: str | None = None  # HALT_KEY; None: all keys that have halted


class Switched(ControlMessage, frozen=True):
    """Durable."""

    was_on: bool


class Weigh(ControlMessage, frozen=True):
    """A group of weight 2 gets twice the broker's time of one of weight 1, while both want it. Answered by Done."""

    subject: str
    group: str
    weight: float


class Redrive(ControlMessage, frozen=True):
    """Dead letters of a group back to that group, through its private inbox: no other group sees them."""

    subject: str
    group: str
    ids: list[str] | None  # text form; None: all that are there now
    rate_per_s: Natural = 0  # messages; 0: as fast as they are taken


class RemoveSubject(ControlMessage, frozen=True):
    """Remove a subject with its groups, their inboxes and their dead letters. Asked twice, it is as if asked once."""

    subject: str
    is_forced: bool = False  # although messages are lost by it, or consumers are connected
    is_dry: bool = False  # only say whether it can be removed, and what would go


class RemoveGroup(ControlMessage, frozen=True):
    """Remove a group from a subject with its inbox; its dead letters stay, unless there are none."""

    subject: str
    group: str
    is_forced: bool = False
    is_dry: bool = False
    takes_dead: bool = False  # its dead letters go with it


class Removed(ControlMessage, frozen=True):
    """Durable. What went."""

    existed: bool  # False: there was no such subject or group here
    groups: Natural = 0
    messages: Natural = 0  # that some group had not handled, or that no group consumed
    dead: Natural = 0  # dead letters


class Redriven(ControlMessage, frozen=True):
    """They will be handed out: durable, and done at the rate asked for, across restarts."""

    count: Natural
    unknown: list[str]  # ids that are not among the group's dead letters
