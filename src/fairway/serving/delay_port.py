"""The port between a broker and a delay server that share an address.

The broker reads requests and passes those that concern delayed messages to a `DelayPort`. Servers do not import one
another, so the protocol is here, and the command line gives the delay server to the broker (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeAlias

from fairway import batch
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.protocol import ControlMessage, RequestReceived
from fairway.protocol.delay_messages import Cancel, DelayTally, History, PendingListed, Reschedule, Resend
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.memory_plan import MemoryAccount
from fairway.serving.metrics import MetricsText
from fairway.serving.requests import ServedRequest

DelayRequest: TypeAlias = ServedRequest[ControlMessage]

QUESTIONS = (
    Cancel,
    Reschedule,
    PendingListed,
    DelayTally,
    History,
    Resend,
)  # a union written where it is needed costs 1 µs
NO_DELAY_PORT = Refused(
    Code.BAD_REQUEST,
    "this broker keeps no delayed messages: run `fairway up`, or give the client the address of a delay server, "
    "fairway://HOST:PORT?delay=HOST:PORT",
)


class DelayPort(Protocol):
    """Takes batches with due times, and requests about pending messages: a processor for the server's scheduler."""

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult: ...

    def expire(self, request: DelayRequest, expiry: Expiry) -> None: ...

    def fail(self, request: DelayRequest, error: Exception) -> None: ...

    def show(self, out: MetricsText) -> None:
        """Write the figures of the delay server."""

    def memory_accounts(self) -> list[MemoryAccount]:
        """The memory accounts of the delay server."""

    @property
    def damaged(self) -> int:
        """Records of delayed messages that the disk has lost."""


def concerns_delay(received: RequestReceived) -> bool:
    """Whether a request is for the delay port."""
    message = received.message
    if isinstance(message, Produce):
        return batch.is_delayed(received.attachments[0])
    return isinstance(message, QUESTIONS)


def key_of(message: ControlMessage) -> Hashable:
    """The key of the actor: subjects do not crowd out one another, and requests about pending messages delay no
    batches."""
    return ("delay", Subject.parse(message.subject)) if isinstance(message, Produce) else ("delay",)
