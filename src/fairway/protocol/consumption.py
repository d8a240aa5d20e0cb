"""The values around a consumer's session: how it shall behave, what it counts, what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

from fairway import limits
from fairway.batch import MessageId
from fairway.errors import FairwayError, Misuse
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol.messages import Whence
from fairway.protocol.terms import CoalescePolicy, OrderPolicy, Policies, Terms, WantedTags


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a consumer behaves."""

    subject: str
    group: str
    consumer: str = ""  # stable across restarts, if given; otherwise random
    start: Whence = Whence.EARLIEST  # where a group that is new to the subject begins
    is_broadcast: bool = False  # every consumer gets every message: its group is `group.consumer`, for it alone
    config_version: int = 0  # of the group configuration that the program was written for; 0: whatever holds
    wanted: WantedTags | None = None  # the tags that the program expects the group to filter by; None: whatever holds
    order: OrderPolicy | None = None  # that the program counts on: a new group gets it; None: whatever holds
    coalesce: CoalescePolicy | None = None  # the same
    rate_per_s: float | None = None  # the same
    rate_per_key: float | None = None  # the same
    prefetch_messages: int = 2_000  # two lots at most: one in the hands of handlers, one ready (see `ahead`)
    prefetch_bytes: int = 8 * limits.MIB  # of batches as they are before compression
    decoded_bytes_max: int = limits.DECODED_BYTES_MAX  # kept decoded, and handed out by one `take`; one batch always is
    linger_ms: float = 5.0  # how long settlements wait for company while others are in flight
    settle_messages: int = 1_000  # so many settlements wait for nobody
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
        """What holds otherwise than the program counts on, of its group; empty: nothing."""
        if self.wanted is not None and not self.wanted.means(terms.tags):
            return f"wants {terms.tags}, this consumer {self.wanted}: configure the group"
        difference = self.policies.difference(terms)
        return f"exists, and {difference}: configure it, or take another group" if difference else ""


@dataclass(slots=True)
class ConsumerCounts:
    """Messages so far, unless it says otherwise."""

    handed_out: int = 0
    settled: int = 0
    stale: int = 0  # settled when they were no longer ours: somebody else has them
    repeated: int = 0  # came again while they were held, and were not handed out again
    filtered: int = 0  # without the tags that the group wants
    absent: int = 0  # meant, but in no batch
    lapsed: int = 0  # given back unbegun, because the lease may have run out
    forgone: int = 0  # of an at-most-once group, un-handled at the end
    joins: int = 0  # requests
    gaps: int = 0  # times that a broadcast consumer was away for too long, and missed messages


@dataclass(frozen=True, slots=True)
class HasJoined:
    """The session is a member (again)."""

    config_version: int
    lease_ms: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class JoinDelayed:
    """The broker does not let the consumer join yet, and the session asks again: as a rule another process has the same
    consumer id, or had it until it was killed, and the lease of that one has to end."""

    subject: str
    group: str
    consumer: str
    sentence: str  # the broker's
    now_ns: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A broadcast consumer was away for too long: it has missed messages."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody has paused or resumed the group or this consumer, at the broker."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has ended; with an error, by itself."""

    error: FairwayError | None


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """This consumer has rejected a message, or has failed on the last attempt, and the broker has stored that."""

    subject: str
    group: str
    broker_group: str  # in a cluster
    sequence: int
    id: MessageId | None  # None: it was handed out twice, and only the sequence is known
    attempt: int
    reason: str
    is_rejected: bool  # otherwise it was the last attempt
    is_certain: bool  # False: the broker says that some outcomes of the same request came too late to count


ConsumingEvent: TypeAlias = HasJoined | Gap | Paused | DeadLettered | Ended
