"""What a broker and a delay server agree on where they share a port: the *delay desk*.

The broker reads requests and knows which of them concern delayed messages; what becomes of them is the desk's affair.
Servers do not import one another, so this stands here, and the cli gives the one to the other (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeAlias

from fairway import batch
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.protocol import ControlMessage, RequestReceived
from fairway.protocol.delaying import Cancel, DelayTally, History, PendingListed, Reschedule, Resend
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.exposition import MetricsText
from fairway.serving.memory import MemoryAccount
from fairway.serving.requests import ServedRequest

DelayRequest: TypeAlias = ServedRequest[ControlMessage]

QUESTIONS = (
    Cancel,
    Reschedule,
    PendingListed,
    DelayTally,
    History,
    Resend,
)  # a union written where it is asked costs 1 µs
NO_DESK = Refused(
    Code.BAD_REQUEST,
    "this broker keeps no delayed messages: run `fairway up`, or give the client the address of a delay server, "
    "fairway://HOST:PORT?delay=HOST:PORT",
)


class DelayPort(Protocol):
    """Takes batches with due times, and questions about what is pending: a processor for the server's scheduler."""

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult: ...

    def expire(self, request: DelayRequest, expiry: Expiry) -> None: ...

    def fail(self, request: DelayRequest, error: Exception) -> None: ...

    def show(self, out: MetricsText) -> None:
        """The figures of what is behind it."""

    def memory_accounts(self) -> list[MemoryAccount]:
        """What clients make it hold in memory."""

    @property
    def damaged(self) -> int:
        """Records of delayed messages that the disk has lost."""


def concerns_delay(received: RequestReceived) -> bool:
    """Whether a request is one for the desk."""
    message = received.message
    if isinstance(message, Produce):
        return batch.is_delayed(received.attachments[0])
    return isinstance(message, QUESTIONS)


def key_of(message: ControlMessage) -> Hashable:
    """The actor that serves it: subjects do not crowd out one another, and questions hold up no messages."""
    return ("delay", Subject.parse(message.subject)) if isinstance(message, Produce) else ("delay",)
