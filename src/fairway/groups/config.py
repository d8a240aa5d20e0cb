"""The configuration of a group: one versioned value for all its members.

If members used different tag filters or attempt limits, some would drop messages that the others need. So a group has
one configuration with a version. Operators roll out a new version by compare and set.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from fairway import limits
from fairway.batch.checksum import may_hold, tag_mask
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RATE_MIN = 1 / (DAY_MS / 1_000)  # one a day: use delayed messages for rarer ones
RATE_MAX = 10_000_000


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Misuse(f"{what} of {value}: it is from {low} to {high}")


def _within_rates(what: str, value: float) -> None:
    if value and not RATE_MIN <= value <= RATE_MAX:  # a NaN is outside, too
        raise Misuse(f"{what} of {value}: it is from {RATE_MIN:g} to {RATE_MAX:,}, or 0 for no limit")


class Mode(enum.Enum):
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"  # settled by being handed out


class Order(enum.Enum):
    """How members of a group may work in parallel."""

    NONE = "none"  # without limits
    KEY = "key"  # messages of one key one after another; messages without a key in parallel
    STRICT = "strict"  # all messages one after another, by one member; the others stand by


class AfterDead(enum.Enum):
    """The reaction of an ordered group to a dead letter."""

    GO_ON = "go on"  # with the next message of the key
    HALT = "halt"  # the key, until an operator lets it go on


class Coalesce(enum.Enum):
    """What happens to a request while another of its key is in process and a third waits."""

    NONE = "none"  # it waits too
    DECLINE = "decline"  # it is declined: the waiting request does the same work
    LATEST = "latest"  # it replaces the waiting request, which is declined


class Backoff(msgspec.Struct, frozen=True, array_like=True):
    """The wait after a failure: `first_ms`, then doubled with each attempt, up to `cap_ms`."""

    first_ms: int = 5_000
    cap_ms: int = 15 * 60_000  # sixteen attempts take about two hours: long enough for an outage, not for a weekend
    jitter: float = 0.2  # at most this part is taken off, so that messages that fail together return apart

    def __post_init__(self) -> None:
        _within("backoff first_ms", self.first_ms, 1, self.cap_ms)
        _within("backoff cap_ms", self.cap_ms, 1, limits.RETRY_AFTER_MS_MAX)
        if not 0 <= self.jitter <= 1:
            raise Misuse(f"backoff jitter of {self.jitter}: it is a part, from 0 to 1")

    def delay_ms(self, attempt: int, draw: float) -> int:
        """The wait after attempt number `attempt` failed. `draw` is the caller's random number in [0, 1)."""
        doublings = min(attempt - 1, self.cap_ms.bit_length())  # more would only build a large number to cut it down
        delay_ms = min(self.first_ms << doublings, self.cap_ms)
        return max(1, round(delay_ms * (1 - self.jitter * draw)))


class TagFilter(msgspec.Struct, frozen=True, array_like=True):
    """A filter: messages with any, or with all, of these tags. No tags: every message."""

    tags: tuple[str, ...] = ()
    is_all: bool = False

    def __post_init__(self) -> None:
        _within("number of tags in a filter", len(self.tags), 0, limits.BATCH_TAGS_MAX)
        for tag in self.tags:
            _within("bytes of a tag", len(tag.encode()), 1, limits.TAG_BYTES_MAX)

    def may_match(self, batch_filter: int) -> bool:
        """False: the group wants no message of a batch with this filter, so skip the batch unread. True: the client
        decides."""
        if not self.tags:
            return True
        wanted = (may_hold(batch_filter, tag_mask(tag)) for tag in self.tags)
        return all(wanted) if self.is_all else any(wanted)


class GroupConfig(msgspec.Struct, frozen=True):
    """The settings that hold for all members of a group. New fields need a default, and no field is ever renamed."""

    version: int = 1
    mode: Mode = Mode.AT_LEAST_ONCE
    lease_ms: int = 15_000
    max_handling_ms: int | None = None  # a lot held longer is taken away, even if the lease is renewed
    attempts_max: int = 16
    backoff: Backoff = Backoff()
    tags: TagFilter = TagFilter()
    lot_messages_max: int = limits.LOT_MESSAGES_MAX
    lots_max: int = limits.GROUP_LOTS_MAX
    idle_ms_max: int = 30 * DAY_MS  # a group without members for so long is removed
    is_broadcast: bool = False  # the group of one consumer
    broadcast_ms_max: int = 1 * HOUR_MS  # a broadcast consumer away for longer gets a gap
    order: Order = Order.NONE
    after_dead: AfterDead = AfterDead.GO_ON
    parked_max: int = limits.GROUP_PARKED_MAX  # messages behind others of their keys; beyond that, the group waits
    rate_per_s: float = 0  # messages handed out to the whole group; 0: without limit
    burst: int = 0  # messages at once after a quiet time; 0: the rate of one second, at least one
    rate_per_key: float = 0  # of each key, in a group by key; 0: without limit
    coalesce: Coalesce = Coalesce.NONE  # any other value also hands out messages of one key one at a time

    def __post_init__(self) -> None:
        _within("version", self.version, 0, 2**32 - 1)
        _within("lease_ms", self.lease_ms, 100, DAY_MS)
        if self.max_handling_ms is not None:
            _within("max_handling_ms", self.max_handling_ms, 1, 365 * DAY_MS)
        _within("attempts_max", self.attempts_max, 1, limits.ATTEMPTS_MAX)
        _within("lot_messages_max", self.lot_messages_max, 1, limits.LOT_MESSAGES_MAX)
        _within("lots_max", self.lots_max, 1, limits.GROUP_LOTS_MAX)
        _within("idle_ms_max", self.idle_ms_max, 1, 3_650 * DAY_MS)
        _within("broadcast_ms_max", self.broadcast_ms_max, 1, 3_650 * DAY_MS)
        _within("parked_max", self.parked_max, 1, limits.GROUP_PARKED_MAX)
        _within_rates("rate_per_s", self.rate_per_s)
        _within_rates("rate_per_key", self.rate_per_key)
        _within("burst", self.burst, 0, 1_000_000)
        if self.burst and not self.rate_per_s:
            raise Misuse("a burst goes with a rate_per_s: give both, or none")
        if self.coalesce is not Coalesce.NONE and self.order is Order.STRICT:
            raise Misuse("coalescing is by key, and strict order knows no keys: choose one of the two")
        if self.rate_per_key and not self.is_keyed:
            raise Misuse("rate_per_key is for a group by key: give order='key' with it")
        if self.is_ordered and self.mode is Mode.AT_MOST_ONCE:
            sentence = "an ordered or coalescing group waits for acks, and an at-most-once group has none: choose one"
            raise Misuse(f"{sentence} of the two")

    @property
    def is_ordered(self) -> bool:
        return self.order is not Order.NONE or self.coalesce is not Coalesce.NONE

    @property
    def is_keyed(self) -> bool:
        """Whether handing out depends on the keys of messages."""
        return self.order is Order.KEY or self.coalesce is not Coalesce.NONE

    @property
    def may_run(self) -> bool:
        """Whether messages of one key may go out together, to be handled one after another by the same consumer. Not if
        each message has its own handling time or key rate, or waiting messages are declined."""
        is_plain = self.coalesce is Coalesce.NONE and not self.rate_per_key and self.max_handling_ms is None
        return self.order is Order.KEY and is_plain

    @property
    def burst_max(self) -> float:
        """Messages that may go out at once, by the rate of the group."""
        return self.burst or max(self.rate_per_s, 1)

    @property
    def key_rest_ms(self) -> int:
        """How long a key rests after a handout."""
        return round(1_000 / self.rate_per_key) if self.rate_per_key else 0

    @property
    def members_max(self) -> int:
        return 1 if self.is_broadcast else limits.MEMBERS_MAX

    @property
    def absence_ms_max(self) -> int:
        """How long the group is kept without members."""
        return self.broadcast_ms_max if self.is_broadcast else self.idle_ms_max


def with_policies(config: GroupConfig, policies: bytes) -> GroupConfig:
    """The configuration changed by the policies of the group's creator: a map of fields."""
    try:
        stated = msgspec.msgpack.decode(policies, type=dict[str, object])
        fixed = {name: getattr(config, name) for name in ("version", "is_broadcast")}
        return msgspec.convert({**msgspec.to_builtins(config), **stated, **fixed}, GroupConfig)
    except (msgspec.MsgspecError, Misuse) as error:
        raise Refused(Code.BAD_REQUEST, f"the policies of a new group: {error}") from error


def encode(config: GroupConfig) -> bytes:
    return msgspec.msgpack.encode(config)


def as_document(config: GroupConfig) -> dict[str, Any]:
    """The configuration by field names, for people and JSON."""
    document: dict[str, Any] = msgspec.to_builtins(config)
    first_ms, cap_ms, jitter = document["backoff"]
    tags, is_all = document["tags"]
    document["backoff"] = {"first_ms": first_ms, "cap_ms": cap_ms, "jitter": jitter}
    document["tags"] = {"tags": list(tags), "is_all": is_all}
    return document


def decode(data: bytes) -> GroupConfig:
    try:
        return msgspec.msgpack.decode(data, type=GroupConfig)
    except (msgspec.DecodeError, Misuse) as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error
