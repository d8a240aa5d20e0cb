"""The requests of a consumer's session: what each was for, and not before when it may be made again."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fairway.protocol.backoff import RetryDelays
from fairway.world.rng import Rng

_BACKOFF_FIRST_MS = 20
_BACKOFF_MOST_MS = 5_000


class Doing(enum.Enum):
    """What a request was for; SETTLE has a token of its own."""

    JOIN = "join"
    PULL = "pull"
    HEARTBEAT = "heartbeat"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class RequestToken:
    """The token of a request."""

    doing: Doing
    sent_ns: int
    life: int  # of the connection
    stumbles: int = 0  # of a PULL in a group of strict order: how often a message had failed by then


class Attempts:
    """One kind of request: whether it is in flight, and not before when it may be made."""

    __slots__ = ("_backoff", "is_in_flight", "not_before_ns")

    def __init__(self, rng: Rng) -> None:
        self._backoff = RetryDelays(rng, first_ms=_BACKOFF_FIRST_MS, most_ms=_BACKOFF_MOST_MS)
        self.is_in_flight = False
        self.not_before_ns = 0

    def may_ask(self, now_ns: int) -> bool:
        return not self.is_in_flight and now_ns >= self.not_before_ns

    def due_ns(self, wanted_ns: int | None) -> int | None:
        """When what is wanted then may be asked; None: not before something happens."""
        return None if self.is_in_flight or wanted_ns is None else max(wanted_ns, self.not_before_ns)

    def granted(self) -> None:
        self.is_in_flight = False
        self.not_before_ns = 0
        self._backoff.reset()

    def put_off(self, now_ns: int, retry_after_ms: int | None = None) -> None:
        self.is_in_flight = False
        self.not_before_ns = now_ns + self._backoff.next_ns(retry_after_ms)

    def abandon(self) -> None:
        """Its outcome does not matter any more, or will never come."""
        self.is_in_flight = False
        self.not_before_ns = 0
