"""How a group behaves: one versioned value for all its members.

A member that filters by other tags, or counts attempts otherwise, would drop what the others are owed. So there is one
configuration per group, it has a version, and a new version is rolled out by command (compare-and-set).
"""

from __future__ import annotations

import enum

import msgspec

from fairway import limits
from fairway.batch.hashing import may_hold, tag_mask
from fairway.errors import Misuse, RemoteProtocolError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Misuse(f"{what} of {value}: it is from {low} to {high}")


class Mode(enum.Enum):
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"  # settled by being handed out


class Backoff(msgspec.Struct, frozen=True, array_like=True):
    """How long a failed message waits: `first_ms`, then doubled with each attempt, up to `cap_ms`."""

    first_ms: int = 5_000
    cap_ms: int = 15 * 60_000  # sixteen attempts take about two hours: an outage, but not a weekend
    jitter: float = 0.2  # at most this part is taken off, so that what failed together does not return together

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
    """Which messages a group wants: those with any, or with all, of these tags. No tags: every message."""

    tags: tuple[str, ...] = ()
    is_all: bool = False

    def __post_init__(self) -> None:
        _within("number of tags in a filter", len(self.tags), 0, limits.BATCH_TAGS_MAX)
        for tag in self.tags:
            _within("bytes of a tag", len(tag.encode()), 1, limits.TAG_BYTES_MAX)

    def may_match(self, batch_filter: int) -> bool:
        """False: nothing in a batch with this filter is wanted, skip it unread. True: the client looks closer."""
        if not self.tags:
            return True
        wanted = (may_hold(batch_filter, tag_mask(tag)) for tag in self.tags)
        return all(wanted) if self.is_all else any(wanted)


class GroupConfig(msgspec.Struct, frozen=True):
    """Everything that holds for all members of a group. Fields may be added with a default, never renamed."""

    version: int = 1
    mode: Mode = Mode.AT_LEAST_ONCE
    lease_ms: int = 15_000
    max_handling_ms: int | None = None  # a lot that is held longer is taken away, though the lease is renewed
    attempts_max: int = 16
    backoff: Backoff = Backoff()
    tags: TagFilter = TagFilter()
    lot_messages_max: int = limits.LOT_MESSAGES_MAX
    lots_max: int = limits.GROUP_LOTS_MAX
    idle_ms_max: int = 30 * DAY_MS  # a group without members for so long is removed
    is_broadcast: bool = False  # the group of one consumer
    broadcast_ms_max: int = 1 * HOUR_MS  # a broadcast consumer away for longer is told that it missed messages

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

    @property
    def members_max(self) -> int:
        return 1 if self.is_broadcast else limits.MEMBERS_MAX

    @property
    def absence_ms_max(self) -> int:
        """How long the group is kept while it has no members."""
        return self.broadcast_ms_max if self.is_broadcast else self.idle_ms_max


def encode(config: GroupConfig) -> bytes:
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> GroupConfig:
    try:
        return msgspec.msgpack.decode(data, type=GroupConfig)
    except (msgspec.DecodeError, Misuse) as error:
        raise RemoteProtocolError(f"a group's configuration cannot be read: {error}") from error
