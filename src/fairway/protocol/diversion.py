"""Where a producer's batches go when they cannot go to the broker: the port, whose other side is the client's spool.

    DIRECT   all is well: batches go to the broker
    HOLD     what went the other way has nearly arrived: batches wait for the last of it, so that order is kept
    DIVERT   batches are handed over, with the number and the bytes that they will have for ever

A batch that was handed over is settled once it is kept (by a receipt of its own kind), and is no longer the producer's:
whoever keeps it brings it to the broker. One that was sent before and may be stored keeps the number that it was sent
under, so the broker's dedupe window recognises it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fairway.batch import MessageId
from fairway.errors import FairwayError
from fairway.protocol.pending import SpoolBatchReceipt


class SendPath(enum.Enum):
    """Which way batches go now."""

    DIRECT = "direct"
    HOLD = "hold"
    DIVERT = "divert"


class Handed(NamedTuple):
    """A batch that is handed over."""

    subject: str
    messages: int
    was_sent: bool  # before, under its number: it may be stored already
    data: bytes
    group: str = ""  # of brokers that it was meant for, in a cluster; and where it may be stored


class Buffer(Protocol):
    """What the other side sees of a producer."""

    messages: int

    def oldest_ns(self) -> int | None:
        """When the oldest message that is not settled was added; not cheap."""

    @property
    def is_failing(self) -> bool:
        """Whether the broker has failed again and again: the circuit is open."""

    @property
    def is_crammed(self) -> bool:
        """Whether somebody found the buffer full, and that is to be the reason."""


class SpoolPort(Protocol):
    """The other way."""

    @property
    def way(self) -> SendPath: ...

    @property
    def stream_key(self) -> bytes:
        """What the secrets of the producer's streams are to be derived from: it is kept with what is handed over."""

    @property
    def fault(self) -> FairwayError | None:
        """Why nothing can be kept ever again; None while all is well."""

    @property
    def trouble(self) -> str:
        """Why nothing more is kept for now, for people; empty where there is room."""

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the way."""

    def next_look_ns(self) -> int | None:
        """When to look again although nothing happens."""

    def room_for(self, messages: int, size_bytes: int) -> bool:
        """Whether so much more can be kept."""

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        """Keep these, in this order; `done(None)` when they are safe. After `DiskFull` none of them is kept, after any
        other fault nobody knows."""

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        """For a batch that is kept."""
