"""The options, counters and events of a consumer's session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

from fairway import limits
from fairway.batch import MessageId
from fairway.errors import FairwayError, Misuse
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol.messages import CoalescePolicy, OrderPolicy, Policies, Terms, WantedTags, Whence


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The settings of a consumer."""

    subject: str
    group: str
    consumer: str = ""  # stable across restarts, if given; otherwise random
    start: Whence = Whence.EARLIEST  # where a group begins that is new to the subject
    is_broadcast: bool = False  # every consumer gets every message: its group is `group.consumer`, for it alone
    config_version: int = 0  # the configuration version that the program was written for; 0: any
    wanted: WantedTags | None = None  # the tags that the program expects the group to filter by; None: any
    order: OrderPolicy | None = None  # the order that the program needs: a new group gets it; None: any
    coalesce: CoalescePolicy | None = None  # the coalescing that the program needs, likewise
    rate_per_s: float | None = None  # the rate that the program needs, likewise
    rate_per_key: float | None = None  # the rate per key that the program needs, likewise
    prefetch_messages: int = 2_000  # two lots at most: one with handlers, one ready (see `PrefetchTarget`)
    prefetch_bytes: int = 8 * limits.MIB  # of uncompressed batches
    decoded_bytes_max: int = limits.DECODED_BYTES_MAX  # kept decoded, and delivered by one `take`; one batch always is
    linger_ms: float = 5.0  # how long settlements wait for others while a request is in flight
    settle_messages: int = 1_000  # so many settlements leave without a wait
    wait_ms: int | None = None  # of a pull, at the broker; None: as long as the lease and the broker allow

    def __post_init__(self) -> None:
        Subject.parse_joinable(self.subject)
        GroupName.parse(self.group)
        if self.consumer:
            ConsumerName.parse(self.consumer)
        if self.start not in (Whence.EARLIEST, Whence.LATEST):
            raise Misuse("a new group starts at EARLIEST or LATEST; seek afterwards")
        if min(self.prefetch_messages, self.prefetch_bytes, self.decoded_bytes_max, self.settle_messages) < 1:
            raise Misuse("prefetch, decoded_bytes_max and settle_messages are at least 1")
        if self.linger_ms < 0 or (self.wait_ms is not None and self.wait_ms < 0):
            raise Misuse("linger_ms and wait_ms are at least 0")
        if self.order not in (None, *get_args(OrderPolicy)):
            raise Misuse(f"order is one of {', '.join(get_args(OrderPolicy))}, not {self.order!r}")
        if self.coalesce not in (None, *get_args(CoalescePolicy)):
            raise Misuse(f"coalesce is one of {', '.join(get_args(CoalescePolicy))}, not {self.coalesce!r}")

    @property
    def policies(self) -> Policies:
        return Policies(self.order, self.coalesce, self.rate_per_s, self.rate_per_key)

    def objection(self, terms: Terms) -> str:
        """How the group's configuration contradicts the program's expectations; empty: not at all."""
        if self.wanted is not None and not self.wanted.means(terms.tags):
            return f"wants {terms.tags}, this consumer {self.wanted}: configure the group"
        difference = self.policies.difference(terms)
        return f"exists, and {difference}: configure it, or take another group" if difference else ""


@dataclass(slots=True)
class ConsumerCounts:
    """Counts of messages, unless the field says otherwise."""

    handed_out: int = 0
    settled: int = 0
    stale: int = 0  # settled too late: other consumers have them
    repeated: int = 0  # arrived again while held, and not delivered again
    filtered: int = 0  # without the tags that the group wants
    absent: int = 0  # in a lot, but in no batch
    lapsed: int = 0  # returned before they began, because the lease may have run out
    forgone: int = 0  # of an at-most-once group, not handled at the end
    joins: int = 0  # requests
    gaps: int = 0  # times that a broadcast consumer was away for too long and missed messages


@dataclass(frozen=True, slots=True)
class HasJoined:
    """The session is a member, for the first time or again."""

    config_version: int
    lease_ms: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class JoinDelayed:
    """The broker does not let the consumer join yet, and the session asks again. Usually another process has the same
    consumer id, or had it until it was killed, and the lease of that process must end first."""

    subject: str
    group: str
    consumer: str
    sentence: str  # the broker's
    now_ns: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A broadcast consumer was away for too long and has missed messages."""


@dataclass(frozen=True, slots=True)
class Paused:
    """An operator has paused or resumed the group or this consumer, at the broker."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has ended; `error` is set if the session ended by itself."""

    error: FairwayError | None


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """This consumer rejected a message or failed the last attempt, and the broker has stored that."""

    subject: str
    group: str
    broker_group: str  # in a cluster
    sequence: int
    id: MessageId | None  # None: the message was delivered twice, and only the sequence is known
    attempt: int
    reason: str
    is_rejected: bool  # otherwise this was the last attempt
    is_certain: bool  # False: the broker says that some outcomes of the same request were stale


ConsumingEvent: TypeAlias = HasJoined | Gap | Paused | DeadLettered | Ended
