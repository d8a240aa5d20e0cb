"""What a client's line and the sessions on it agree on.

A line is one connection to one broker, lost and found again as often as it must be. Sessions (a producer, a consumer, a
question of the command line) live on it: the line asks each what it wants to ask the broker, writes that, and brings
the outcome back. No session sees a socket, a byte of framing or a clock.

Exactly one outcome comes for every question. `ConnectionLost` says that nobody knows whether it was carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fairway.errors import Refused
from fairway.protocol.messages import ControlMessage
from fairway.world.buffers import Bytes


@dataclass(slots=True, frozen=True)
class Ask:
    """A request that a session wants to make; `token` comes back with its outcome."""

    message: ControlMessage
    attachments: Sequence[Bytes] = ()
    token: object = None


@dataclass(slots=True, frozen=True)
class Answer:
    """The broker's answer."""

    message: ControlMessage
    attachments: Sequence[Bytes] = ()


@dataclass(slots=True, frozen=True)
class ConnectionLost:
    """The connection ended before an answer came: the request may or may not have been carried out."""

    sentence: str


RequestOutcome: TypeAlias = Answer | Refused | ConnectionLost


class ClientSession(Protocol):
    """One user of a line. Called by the line only, in one thread at a time."""

    def opened(self, now_ns: int) -> None:
        """The connection is open, for the first time or again: the broker may have restarted meanwhile."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        """What it wants to ask now, at most `room` requests. Called after every change and at every deadline."""

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """How a question ended."""

    def next_deadline(self) -> int | None:
        """When `asks` is to be called even if nothing happens, on the monotonic clock in ns; None: never."""
