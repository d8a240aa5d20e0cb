"""What the two sides say to each other: one control message per frame, with batches attached where there are any.

A control message is MessagePack, an array of its fields in the order given here; a field may be added at the end with a
default, and a reader ignores fields that it does not know. Batches follow the control message as they are: nobody
between producer and consumer opens one. Names are raw strings here; the broker parses them at its border.

This file has the conversation, producing and consuming; `admin` has what operators, tools and Spark ask, `delaying`
what is asked about messages that are not due yet, `tracing` what is asked about their past, `routing` what is asked of
meta servers, `replicating` what copies say to each other. `codec` says which message goes with which verb, and
`docs/protocol.md` is the specification.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

# No number on the wire is negative, and all of them fit the signed 64 bits that other languages have.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Verb(enum.IntEnum):
    """What a request asks for. The number is on the wire; 1 to 15 concern the connection itself."""

    HELLO = 1
    PING = 2
    GOODBYE = 3  # no new requests after it: answer what is under way, then close

    PRODUCE = 16
    JOIN = 17
    PULL = 18
    SETTLE = 19  # ack, retry, reject, release
    HEARTBEAT = 20
    LEAVE = 21
    SEEK = 22
    SCAN = 23
    DESCRIBE = 24
    CONFIGURE = 25  # a group
    SWITCH = 26  # pause and resume a group or a consumer; read-only for a subject
    REDRIVE = 27  # dead letters back to their group
    WEIGH = 28  # a group's share of the broker's time
    CANCEL = 29  # messages that are not due yet
    RESCHEDULE = 30
    PENDING = 31  # list them
    TALLY = 32  # count them
    RETRACE = 33  # the action log, as it is written
    NAMES = 34  # of the numbers in it
    INDEX = 35  # which batches a subject has
    HISTORY = 36  # what happened to delayed messages
    ROUTE = 37  # where subjects are, of a meta server
    REGISTER = 38  # the registry that a meta server keeps
    FOLLOW = 39  # a replica begins
    COMPARE = 40
    REPLICATE = 41
    MEND = 42
    GOVERN = 43  # a subject or a group of servers, at a meta server
    GIVE = 44  # what has rotted on the master
    SNAPSHOT = 45  # of a delay server, for a replica that lacks more than the logs have
    FETCH = 46  # a part of one
    RESEND = 47  # delayed messages that were made for a broker group that is gone
    REMOVE_SUBJECT = 48
    REMOVE_GROUP = 49  # from a subject


FIRST_REQUEST_VERB = 16  # below it: the connection's own


class Whence(enum.IntEnum):
    """Where in a subject."""

    EARLIEST = 1  # the first message that is still stored
    LATEST = 2  # behind the last committed message
    TIME = 3  # the first batch appended at or after a time, ms since 1970 UTC
    SEQUENCE = 4


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all control messages."""


class SequenceRange(ControlMessage, frozen=True):
    """A range of sequences of one subject."""

    first: Natural
    count: Natural


# --- the connection --------------------------------------------------------------------------------------------------


class Hello(ControlMessage, frozen=True):
    """The client's first frame."""

    version_min: Natural
    version_max: Natural
    features: list[str]
    client: str  # for people: name and version of the library
    frame_bytes_max: Natural  # the largest that the client takes


class Welcome(ControlMessage, frozen=True):
    """The server's answer."""

    version: Natural
    features: list[str]  # those that both sides have
    server: str
    frame_bytes_max: Natural  # the largest that the server takes
    heartbeat_ms: Natural  # who has heard nothing for so long pings; after three of these the other side is dead
    requests_max: Natural  # in flight on this connection


class Ping(ControlMessage, frozen=True):
    """Are you there?"""


class Pong(ControlMessage, frozen=True):
    """Yes."""


class Goodbye(ControlMessage, frozen=True):
    """Without a code: no new requests, answer what is under way, then part. With one: the connection ends here."""

    reason: str
    code: str | None = None
    retry_after_ms: Natural | None = None  # when to come back


class StoredPart(ControlMessage, frozen=True):
    """A batch that stands in places of a producer stream that a refused one was meant for."""

    first: Natural  # producer sequence
    count: Natural
    crc: Natural  # as the stored batch has it in its header


class Refusal(ControlMessage, frozen=True):
    """Instead of an answer; its frame is marked. Nothing was appended and nothing changed."""

    code: str  # the value of an `errors.Code`, or one that only a later version knows
    sentence: str
    retry_after_ms: Natural | None = None
    stored: list[StoredPart] | None = None  # `sequence_conflict`: what is there, in order; None: it is not known


class Done(ControlMessage, frozen=True):
    """The answer to a request that has nothing to tell but that it is durable."""


# --- producing -------------------------------------------------------------------------------------------------------


class Produce(ControlMessage, frozen=True):
    """One batch is attached. A subject exists from its first batch on."""

    subject: str
    is_pinned: bool = False  # it may be stored here already, so nobody else may get it: a group that drains takes it
    secret: bytes = b""  # of the batch's stream: shown from its first batch on, or never

    def __repr__(self) -> str:
        """Without the secret: a repr ends up in logs."""
        return f"Produce(subject={self.subject!r}, is_pinned={self.is_pinned}, secret=<{len(self.secret)} bytes>)"


class Produced(ControlMessage, frozen=True):
    """The batch is durable."""

    first_sequence: Natural
    count: Natural
    appended_ms: Natural
    is_duplicate: bool  # it had been stored before: this is the original receipt
    epoch: Natural


# --- consuming -------------------------------------------------------------------------------------------------------


class Join(ControlMessage, frozen=True):
    """Become, or come back as, a member of a group on a subject."""

    subject: str
    group: str
    consumer: str  # stable across restarts, so that what it had not acked comes back to it
    config_version: Natural  # the group configuration that this member was written for; 0 takes whatever holds
    arrived: Natural  # the number of the last pull response that reached it; 0 for none
    start: Whence = Whence.EARLIEST  # or LATEST: where a group that is new to this subject begins
    is_broadcast: bool = False  # this consumer is a group of its own
    policies: bytes | None = None  # of a group that is new, MessagePack: a part of its configuration
    secret: bytes = b""  # of the consumer's session: drawn before its first JOIN, shown with every one; or never

    def __repr__(self) -> str:
        """Without the secret: a repr ends up in logs."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Join({shown}, secret=<{len(self.secret)} bytes>)"


class Joined(ControlMessage, frozen=True):
    config: bytes  # the group's configuration in force, MessagePack
    config_version: Natural
    lease_ms: Natural
    has_gap: bool = False  # a broadcast consumer came back too late: messages were missed
    epoch: Natural = 0  # of the broker; another one than before: it may have forgotten handouts; 0: it does not tell
    leads_ms: Natural | None = None  # after this request no other copy leads for so long; nil: there is no other copy
    number: Natural = 0  # of the last response to this consumer that the broker knows of: what came later is forgotten


class Pull(ControlMessage, frozen=True):
    """Ask for messages; waits for the first one if it may."""

    subject: str
    group: str
    consumer: str
    messages_max: Natural
    bytes_max: Natural
    wait_ms: Natural  # 0: answer at once
    arrived: Natural
    run_max: Natural = 1  # messages of one key that it takes together and handles one after another, in a group by key


class WireLot(ControlMessage, frozen=True):
    """What is handed out: settled by naming it and the ranges in it. (first, attempt) names it."""

    first: Natural
    attempt: Natural
    spans: list[SequenceRange]  # the messages that are meant; others in the attached batches are not
    fence: Natural = 0  # of ordered groups: grows with every handout
    is_behind: bool = False  # its messages wait for those of the same key that come before them in this response


class AttachedBatch(ControlMessage, frozen=True):
    """What a batch of the response does not know of itself; in the order in which they are attached."""

    first_sequence: Natural
    appended_ms: Natural


class Pulled(ControlMessage, frozen=True):
    """The batches are attached. Empty: nothing came within the wait."""

    number: Natural  # counts this consumer's responses; the next request says what arrived
    lots: list[WireLot]
    batches: list[AttachedBatch]
    is_inbox: bool = False  # the sequences are those of the group's inbox subject
    leads_ms: Natural | None = None  # as in Joined


class Settlement(enum.IntEnum):
    """What became of messages that were handed out."""

    ACK = 1
    RETRY = 2
    REJECT = 3  # to dead letter at once
    RELEASE = 4  # hand it back untouched: does not count as an attempt


class Settle(ControlMessage, frozen=True):
    """One outcome for ranges of one lot."""

    kind: Settlement
    first: Natural  # of the lot
    attempt: Natural
    spans: list[SequenceRange]
    after_ms: Natural | None = None  # RETRY: instead of the group's backoff
    reason: str = ""
    is_inbox: bool = False
    fence: Natural = 0  # as the lot had it


class SettleAll(ControlMessage, frozen=True):
    """Outcomes of any number of lots, in one request."""

    subject: str
    group: str
    consumer: str
    outcomes: list[Settle]
    arrived: Natural


class Settled(ControlMessage, frozen=True):
    """Durable. Counts messages; the stale ones this consumer no longer held: their outcome is not its to say."""

    settled: Natural
    stale: Natural


class Heartbeat(ControlMessage, frozen=True):
    """Renews the leases of everything this consumer holds."""

    subject: str
    group: str
    consumer: str
    arrived: Natural


class Renewed(ControlMessage, frozen=True):
    """The lease runs anew from now."""

    lease_ms: Natural
    config_version: Natural  # in force; another one than at JOIN says: join again
    is_paused: bool = False  # pulls wait until somebody resumes the group or this consumer
    leads_ms: Natural | None = None  # as in Joined


class Leave(ControlMessage, frozen=True):
    """What it has not settled goes to the others at once; its waiting pulls are answered, empty."""

    subject: str
    group: str
    consumer: str
    arrived: Natural
