"""The cost of a message in the consumer's core: from the bytes of a pull's answer to the bytes of the acks, no socket.

    python -m bench.client_consume            a table
    python -m bench.client_consume --json     the same figures for a program

Answers of 1,000 messages of 100 bytes. Four ways, interleaved. `decode` is the batch alone, a floor. `one by one` hands
out and calls `message.ack()` on each. `as a list` acks a list at once. `a record each` is the usual design, an object
with an entry in a dictionary for each message, on the same decoded batch. The target is 1.0 µs per message.

Then one message in an answer, with `N on a line`: N consumers, of whom one after the other takes and acks a message.
Such a message costs the same however many consumers wait beside.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.presenting import present
from fairway import batch
from fairway.protocol import Connection, Role
from fairway.protocol.connection_states import ConnectionOptions, RequestReceived
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.line import Answer, Line
from fairway.protocol.messages import (
    AttachedBatch,
    ControlMessage,
    Join,
    Joined,
    Pull,
    Pulled,
    SequenceRange,
    SettleAll,
    Settled,
    WireLot,
)
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng

MESSAGES = 1_000
PAYLOAD = b"x" * 100
LEASE_MS = 3_600_000
ROUNDS = 15
CALLS = 50  # answers per round
COUNTS = (1, 10, 100, 1_000)  # consumers on a line
TARGET_NS = 1_000
CONFIG = b"\x80"  # an empty map: every default


class Stage:
    """A session on a line that answers every pull at once."""

    def __init__(self) -> None:
        self.session = ConsumerSession(ConsumerOptions("orders", "billing", "ann"), ManualClock(), SeededRng(1))
        self.data = batch.encode([PAYLOAD] * MESSAGES, producer_id=7, first_sequence=0, created_ms=1)
        self.number = 0
        self.session.opened(0)
        [join] = self.session.asks(8, 0)
        self.session.answered(join.token, Answer(Joined(CONFIG, 1, LEASE_MS)), 0)

    def answer(self) -> None:
        """Everything that the session asks now."""
        for ask in self.session.asks(8, 0):
            if isinstance(ask.message, Pull):
                first = self.number * MESSAGES
                self.number += 1
                lots = [WireLot(first, 1, [SequenceRange(first, MESSAGES)])]
                pulled = Pulled(self.number, lots, [AttachedBatch(first, 1)])
                self.session.answered(ask.token, Answer(pulled, [self.data]), 0)
            elif isinstance(ask.message, SettleAll):
                count = sum(span.count for outcome in ask.message.outcomes for span in outcome.spans)
                self.session.answered(ask.token, Answer(Settled(count, 0)), 0)

    def one_by_one(self) -> None:
        self.answer()
        for message in self.session.take_messages():
            message.ack()

    def as_a_list(self) -> None:
        self.answer()
        self.session.ack(self.session.take_messages())

    def decode(self) -> None:
        batch.decode(self.data)

    def a_record_each(self) -> None:
        """Sequence → record; acks are a list of sequences, folded to ranges by sorting."""
        opened = batch.decode(self.data)
        unacked: dict[int, Record] = {}
        acked: list[int] = []
        for sequence, payload in enumerate(opened.payloads):
            unacked[sequence] = Record(payload, sequence, unacked, acked)
        for record in list(unacked.values()):
            record.ack()
        acked.sort()
        ranges: list[list[int]] = []
        for sequence in acked:
            if ranges and ranges[-1][1] == sequence:
                ranges[-1][1] += 1
            else:
                ranges.append([sequence, sequence + 1])


class Consumers:
    """Sessions on a line. One after the other gets a message, and acks it."""

    def __init__(self, count: int) -> None:
        clock = ManualClock()
        self.line = Line(SeededRng(1))
        self.server = Connection(Role.SERVER, 0, ConnectionOptions(requests_max=4 * count))
        self.pulls: dict[str, int] = {}  # of each consumer that waits: the correlation id
        self.sessions = [
            ConsumerSession(ConsumerOptions("orders", "billing", f"c-{at}"), clock, SeededRng(at), call=self.line.call)
            for at in range(count)
        ]
        for session in self.sessions:
            self.line.add(session, 0, session.detach, is_on_call=True)
        self.line.connected(0)
        while len(self.pulls) < count:
            self.turn()
        self.data = batch.encode([PAYLOAD], producer_id=7, first_sequence=0, created_ms=1)
        self.number = 0

    def turn(self) -> None:
        for event in self.server.feed(b"".join(self.line.take(0)), 0):
            if isinstance(event, RequestReceived):
                self.on_request(event.correlation, event.message)
        self.line.feed(b"".join(self.server.take()), 0)
        self.line.next_deadline()

    def on_request(self, correlation: int, message: ControlMessage) -> None:
        if isinstance(message, Join):
            self.server.respond(correlation, Joined(CONFIG, 1, LEASE_MS))
        elif isinstance(message, Pull):
            self.pulls[message.consumer] = correlation
        else:
            self.server.respond(correlation, Settled(1, 0))

    def one_message(self) -> None:
        self.number += 1
        session = self.sessions[self.number % len(self.sessions)]
        lots = [WireLot(self.number, 1, [SequenceRange(self.number, 1)])]
        pulled = Pulled(self.number, lots, [AttachedBatch(self.number, 1)])
        self.server.respond(self.pulls.pop(session.consumer), pulled, [self.data])
        self.turn()
        for message in session.take_messages():
            message.ack()
        self.turn()
        self.turn()


@dataclass(slots=True)
class Record:
    payload: bytes
    sequence: int
    unacked: dict[int, Record]
    acked: list[int]

    def ack(self) -> None:
        del self.unacked[self.sequence]
        self.acked.append(self.sequence)


def nanoseconds(call: Callable[[], None], messages: int) -> float:
    """Of processor time, per message; a call is for so many messages."""
    started = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - started) / (CALLS * messages)


def measure(rounds: int) -> list[dict[str, Any]]:
    ways: dict[str, Callable[[], None]] = {
        "decode": Stage().decode,
        "one by one": Stage().one_by_one,
        "as a list": Stage().as_a_list,
        "a record each": Stage().a_record_each,
    }
    crowds = {f"{count} on a line": Consumers(count).one_message for count in COUNTS}
    found: dict[str, list[float]] = {name: [] for name in (*ways, *crowds)}
    gc.collect()
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(nanoseconds(way, MESSAGES))
        for name, way in crowds.items():
            found[name].append(nanoseconds(way, 1))
    usual = statistics.median(found["a record each"])
    rows = []
    for name, figures in found.items():
        middle = statistics.median(figures)
        row: dict[str, Any] = {"way": name, "ns": round(middle), "least_ns": round(min(figures))}
        ratio = round(usual / middle, 2) if name in ways else None
        rows.append(row | {"per_s": round(1e9 / middle), "ratio": ratio})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("way", "ns per message", "least", "messages/s", "× a record each", title="hand out and ack")
    for row in rows:
        table.add_row(
            row["way"], f"{row['ns']:,}", f"{row['least_ns']:,}", f"{row['per_s']:,}", f"{row['ratio'] or ''}"
        )
    Console().print(table)
    print(f"target: {TARGET_NS:,} ns or less, one by one")


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what the consumer's core costs per message", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
