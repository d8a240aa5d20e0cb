"""The consumers of the demo: a shop with three groups, written as a user writes a program.

`billing` is quick, `mailer` slow, and `fraud` fails now and then. They run in one process until SIGTERM; the process
then prints a report of each group.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec

import fairway
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng

SUBJECT = "order.changed"
BILLING, MAILER, FRAUD = "billing", "mailer", "fraud"
GROUPS = (BILLING, MAILER, FRAUD)

_MAIL_S = 0.05  # four at a time: 80 a second, fewer than the orders
_MAILS_AT_ONCE = 4
_BUSY_ONE_IN = 40
_STOLEN_ONE_IN = 500  # orders, by number, that fail at every attempt
_LATENCIES = 20_000  # the latest that are kept


class ShopGroupReport(msgspec.Struct):
    """What a group did. `seen` are messages, each counted once however often it came."""

    handled: int = 0
    seen: int = 0
    retried: int = 0
    rejected: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class _Tally:
    """Written by one thread."""

    def __init__(self) -> None:
        self.told = ShopGroupReport()
        self._seen = bytearray()  # one byte for each sequence: an hour of the demo takes a megabyte
        self._latencies_ms: deque[float] = deque(maxlen=_LATENCIES)
        self._clock = RealClock()

    def note(self, message: fairway.Message) -> None:
        self.told.handled += 1
        missing = message.sequence + 1 - len(self._seen)
        if missing > 0:
            self._seen.extend(bytes(missing))
        self._seen[message.sequence] = 1
        self._latencies_ms.append(self._clock.wall_ms() - message.created_at.timestamp() * 1_000)

    def close(self) -> ShopGroupReport:
        ordered = sorted(self._latencies_ms) or [0.0]
        self.told.seen = sum(self._seen)
        self.told.p50_ms = ordered[len(ordered) // 2]
        self.told.p99_ms = ordered[len(ordered) * 99 // 100]
        return self.told


def run(url: str) -> dict[str, ShopGroupReport]:
    """Handle orders until SIGTERM or Ctrl-C; what was done."""
    logging.getLogger("fairway.app").setLevel(logging.ERROR)  # the demo has its own screen
    app, rng = fairway.App(url), RealRng()
    tallies = {group: _Tally() for group in GROUPS}

    @app.listener(SUBJECT, group=BILLING)
    def bill(message: fairway.Message) -> None:
        tallies[BILLING].note(message)

    @app.listener(SUBJECT, group=MAILER, concurrency=_MAILS_AT_ONCE)
    async def mail(message: fairway.Message) -> None:
        await asyncio.sleep(_MAIL_S)
        tallies[MAILER].note(message)

    @app.listener(SUBJECT, group=FRAUD)
    def check(message: fairway.Message) -> None:
        tally = tallies[FRAUD]
        if is_stolen(message.payload):
            tally.told.rejected += 1
            raise fairway.Reject("a stolen card")
        if rng.below(_BUSY_ONE_IN) == 0:
            tally.told.retried += 1
            raise fairway.Retry("the model is busy", after=1)
        tally.note(message)

    app.run()
    return {group: tally.close() for group, tally in tallies.items()}


def order(number: int) -> bytes:
    """The payload of an order."""
    return msgspec.json.encode({"order": number, "total": number % 97 + 0.5})


def is_stolen(payload: bytes) -> bool:
    number: int = msgspec.json.decode(payload)["order"]
    return number % _STOLEN_ONE_IN == 0
