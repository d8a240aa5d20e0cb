"""The control messages of the protocol: one per frame, with batches attached where there are any.

A control message is MessagePack: an array of its fields in the order given here. A new field goes to the end, with a
default, and a reader ignores fields that it does not know. Batches follow the control message unchanged: nobody between
producer and consumer opens a batch. Names are raw strings here; the broker parses them.

This module holds the messages of the connection, of producing and of consuming. `admin_messages` holds requests of
operators, tools and Spark, `delay_messages` requests about delayed messages, `route_messages` requests to meta servers,
and `replication_messages` requests between copies. `codec` maps messages to verbs, and `docs/internals/protocol.md` is
the specification.

`Terms` is the part of a group's configuration that a consumer needs: how to settle messages, which ones the group
wants, and how often a message may fail. `Joined` carries the whole configuration, as a MessagePack map. A program may
state `Policies` that it needs: a new group is created with them, and an existing group with others is an error.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Annotated, Literal, TypeAlias

import msgspec

from fairway.errors import RemoteProtocolError

OrderPolicy: TypeAlias = Literal["none", "key", "strict"]
CoalescePolicy: TypeAlias = Literal["none", "decline", "latest"]


class WantedTags(msgspec.Struct, frozen=True, array_like=True):
    """A filter: messages with any, or with all, of these tags; without tags, every message."""

    tags: tuple[str, ...] = ()
    is_all: bool = False

    def accepts(self, tags: Collection[str]) -> bool:
        if not self.tags:
            return True
        has = (tag in tags for tag in self.tags)
        return all(has) if self.is_all else any(has)

    def means(self, other: WantedTags) -> bool:
        """Whether both filters accept the same messages."""
        is_same_way = self.is_all == other.is_all or len(set(self.tags)) < 2
        return set(self.tags) == set(other.tags) and is_same_way

    def __str__(self) -> str:
        word = " and " if self.is_all else " or "
        return word.join(self.tags) if self.tags else "every message"


class Policies(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a group's configuration, by the same names; None: any value."""

    order: OrderPolicy | None = None
    coalesce: CoalescePolicy | None = None
    rate_per_s: float | None = None
    rate_per_key: float | None = None

    @property
    def encoded(self) -> bytes | None:
        """The bytes for JOIN; None if no policy is stated."""
        is_stated = any(value is not None for value in msgspec.structs.asdict(self).values())
        return msgspec.msgpack.encode(self) if is_stated else None

    def difference(self, terms: Terms) -> str:
        """The stated policies that the configuration contradicts, for people; empty if there are none."""
        stated = msgspec.structs.asdict(self).items()
        return ", ".join(
            f"its {name} is {getattr(terms, name)!r} and not {value!r}"
            for name, value in stated
            if value is not None and value != getattr(terms, name)
        )


class Terms(msgspec.Struct, frozen=True):
    """The part of a group's configuration in force that a consumer needs."""

    mode: Literal["at_least_once", "at_most_once"] = "at_least_once"
    tags: WantedTags = WantedTags()
    order: OrderPolicy = "none"
    coalesce: CoalescePolicy = "none"
    rate_per_s: float = 0.0
    rate_per_key: float = 0.0
    attempts_max: int = 16  # a message that fails so often is a dead letter

    @property
    def is_at_most_once(self) -> bool:
        return self.mode == "at_most_once"


def read(config: bytes) -> Terms:
    try:
        return msgspec.msgpack.decode(config, type=Terms)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error


# No number on the wire is negative, and every number fits a signed 64-bit integer of other languages.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Verb(enum.IntEnum):
    """The kind of a request. The number is on the wire; 1 to 15 concern the connection itself."""

    HELLO = 1
    PING = 2
    GOODBYE = 3  # no new requests after it: answer those in flight, then close

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
    PENDING = 31  # count them
    TALLY = 32  # count them
    RETRACE = 33  # the action log, as it is stored
    NAMES = 34  # of the numbers in the action log
    INDEX = 35  # the batches of a subject
    HISTORY = 36  # of delayed messages
    ROUTE = 37  # of subjects, from a meta server
    REGISTER = 38  # the registry that a meta server keeps
    FOLLOW = 39  # a replica begins to follow
    COMPARE = 40
    REPLICATE = 41
    MEND = 42
    GOVERN = 43  # change a subject or a group of servers, at a meta server
    GIVE = 44  # bring bytes that have rotted on the master
    SNAPSHOT = 45  # of a delay server, for a replica that lacks more than the logs have
    FETCH = 46  # a part of a snapshot
    RESEND = 47  # delayed messages that were made for a broker group that is gone
    REMOVE_SUBJECT = 48
    REMOVE_GROUP = 49  # from a subject


FIRST_REQUEST_VERB = 16  # below it: the connection's own


class Whence(enum.IntEnum):
    """A place in a subject."""

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
    frame_bytes_max: Natural  # the largest frame that the client takes


class Welcome(ControlMessage, frozen=True):
    """The server's answer."""

    version: Natural
    features: list[str]  # those that both sides have
    server: str
    frame_bytes_max: Natural  # the largest frame that the server takes
    heartbeat_ms: Natural  # a side that receives nothing for so long pings; after three of these the peer is dead
    requests_max: Natural  # in flight on this connection


class Ping(ControlMessage, frozen=True):
    """Ask whether the peer is alive."""


class Pong(ControlMessage, frozen=True):
    """The answer to Ping."""


class Goodbye(ControlMessage, frozen=True):
    """Without a code: no new requests, answer those in flight, then close. With a code: the connection ends here."""

    reason: str
    code: str | None = None
    retry_after_ms: Natural | None = None  # when to come back


class StoredPart(ControlMessage, frozen=True):
    """A stored batch at the place of a refused batch, in the same producer stream."""

    first: Natural  # producer sequence
    count: Natural
    crc: Natural  # from the stored batch's header


class Refusal(ControlMessage, frozen=True):
    """A refusal in place of an answer; the frame is marked. Nothing was appended and nothing changed."""

    code: str  # the value of an `errors.Code`, or one that only a later version knows
    sentence: str
    retry_after_ms: Natural | None = None
    stored: list[StoredPart] | None = None  # `sequence_conflict`: the batches at that place, in order; None: not known


class Done(ControlMessage, frozen=True):
    """The answer to a request that reports nothing but that its effect is durable."""


# --- producing -------------------------------------------------------------------------------------------------------


class Produce(ControlMessage, frozen=True):
    """Store the attached batch. The first batch of a subject creates it."""

    subject: str
    is_pinned: bool = False  # it may be stored here already, so a draining group takes it too
    secret: bytes = b""  # of the batch's stream: shown from its first batch on, or never

    def __repr__(self) -> str:
        """Leave out the secret: a repr ends up in logs."""
        return f"Produce(subject={self.subject!r}, is_pinned={self.is_pinned}, secret=<{len(self.secret)} bytes>)"


class Produced(ControlMessage, frozen=True):
    """The batch is durable."""

    first_sequence: Natural
    count: Natural
    appended_ms: Natural
    is_duplicate: bool  # the broker had stored the batch before: this is the original receipt
    epoch: Natural


# --- consuming -------------------------------------------------------------------------------------------------------


class Join(ControlMessage, frozen=True):
    """Become a member of a group on a subject, or come back as one."""

    subject: str
    group: str
    consumer: str  # stable across restarts, so that unacked messages come back to the consumer
    config_version: Natural  # the configuration version that this member was written for; 0: any
    arrived: Natural  # the number of the last pull response that arrived; 0 for none
    start: Whence = Whence.EARLIEST  # or LATEST: where a group begins that is new to this subject
    is_broadcast: bool = False  # this consumer is a group of its own
    policies: bytes | None = None  # MessagePack, a part of the configuration: a new group gets it
    secret: bytes = b""  # of the consumer's session: drawn before its first JOIN, shown with every JOIN; or never

    def __repr__(self) -> str:
        """Leave out the secret: a repr ends up in logs."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Join({shown}, secret=<{len(self.secret)} bytes>)"


class Joined(ControlMessage, frozen=True):
    config: bytes  # the group's configuration in force, MessagePack
    config_version: Natural
    lease_ms: Natural
    has_gap: bool = False  # a broadcast consumer came back too late and missed messages
    epoch: Natural = 0  # of the broker; after another epoch it may have forgotten handouts; 0: not sent
    leads_ms: Natural | None = None  # for so long no other copy becomes master; nil: there is no other copy
    number: Natural = 0  # of the last response to this consumer that the broker knows of; it has forgotten later ones


class Pull(ControlMessage, frozen=True):
    """Ask for messages. The broker may wait up to `wait_ms` for the first."""

    subject: str
    group: str
    consumer: str
    messages_max: Natural
    bytes_max: Natural
    wait_ms: Natural  # 0: answer at once
    arrived: Natural
    run_max: Natural = 1  # in a group by key: messages of one key that the consumer takes together and handles in order
    extends_runs: bool = False  # more of them may come behind those of earlier responses


class WireLot(ControlMessage, frozen=True):
    """A lot on the wire. (first, attempt) names it; a settlement gives that name and ranges."""

    first: Natural
    attempt: Natural
    spans: list[SequenceRange]  # the messages of the lot; others in the attached batches do not belong to it
    fence: Natural = 0  # of ordered groups: grows with every handout
    is_behind: bool = False  # its messages wait for earlier ones of the same key, in this response or earlier ones


class AttachedBatch(ControlMessage, frozen=True):
    """The place of an attached batch, which the batch itself does not hold; in the order of attachment."""

    first_sequence: Natural
    appended_ms: Natural


class Pulled(ControlMessage, frozen=True):
    """The lots handed out, with their batches attached. Empty: no message came within the wait."""

    number: Natural  # counts this consumer's responses; the next request confirms this number
    lots: list[WireLot]
    batches: list[AttachedBatch]
    is_inbox: bool = False  # the sequences are those of the group's inbox subject
    leads_ms: Natural | None = None  # as in Joined


class Settlement(enum.IntEnum):
    """The outcome of messages that were handed out."""

    ACK = 1
    RETRY = 2
    REJECT = 3  # a dead letter at once
    RELEASE = 4  # handed back untouched: does not count as an attempt


class Settle(ControlMessage, frozen=True):
    """One outcome for ranges of one lot."""

    kind: Settlement
    first: Natural  # of the lot
    attempt: Natural
    spans: list[SequenceRange]
    after_ms: Natural | None = None  # RETRY: instead of the group's backoff
    reason: str = ""
    is_inbox: bool = False
    fence: Natural = 0  # as in the lot


class SettleAll(ControlMessage, frozen=True):
    """Outcomes of any number of lots, in one request."""

    subject: str
    group: str
    consumer: str
    outcomes: list[Settle]
    arrived: Natural


class Settled(ControlMessage, frozen=True):
    """The outcomes are durable. Both fields count messages; stale: this consumer no longer held them, so not
    settled."""

    settled: Natural
    stale: Natural


class Heartbeat(ControlMessage, frozen=True):
    """Renew the leases of everything that this consumer holds."""

    subject: str
    group: str
    consumer: str
    arrived: Natural


class Renewed(ControlMessage, frozen=True):
    """The lease is renewed from now on."""

    lease_ms: Natural
    config_version: Natural  # in force; if it differs from the one at JOIN, join again
    is_paused: bool = False  # pulls wait until an operator resumes the group or this consumer
    leads_ms: Natural | None = None  # as in Joined


class Leave(ControlMessage, frozen=True):
    """Leave the group: other consumers get the unsettled messages at once, and waiting pulls are answered, empty."""

    subject: str
    group: str
    consumer: str
    arrived: Natural
