"""The cost of a send in the client's core: no socket, no lock, no broker; only the steps that every message takes.

    python -m bench.client            a table
    python -m bench.client --json     the same figures for a program

A call adds messages of 100 bytes, takes the bytes that a socket would be given, and feeds the answers (their bytes
are made in the call: 1 to 3 µs per batch). The yardstick of a batch is to encode it; of a lone message, to encode it
and write its frame. `single sends` has a frame for each message, too, with 960 of them in flight at a time. It is CPU
time, so that what else the machine does has less of a say; rounds are interleaved and the median is shown.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.batch import ROUND_NS, Call
from bench.presenting import present
from fairway import batch
from fairway.protocol import Connection, Role, Verb, codec, frames
from fairway.protocol.connection_states import ConnectionOptions
from fairway.protocol.line import Line
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.receipts import Pending, PendingBatch
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng

ROUNDS = 9
BATCH = 1_000
PAYLOAD = b"x" * 100
SUBJECT = "order.changed"
WINDOW = 64  # batches in flight for a subject
SUBJECTS = [f"order.{number}" for number in range(15)]
YARDSTICKS = {
    "send": "encode",
    "send, with a key": "encode",
    "send, with a tag": "encode",
    "send_many": "encode",
    "lone send": "lone encode and write",
    "single sends": "lone encode and write",
}


class Sender:
    """A producer on an open line; whoever feeds it says that everything is stored."""

    def __init__(self, batch_messages_max: int = BATCH) -> None:
        self.clock = RealClock()
        self.line = Line(RealRng())
        options = ProducerOptions(batch_messages_max=batch_messages_max, linger_ms=1_000, window=WINDOW)
        self.producing: ProducerSession[Pending, PendingBatch] = ProducerSession(
            self.clock, RealRng(), options, run_later=self.line.run_later
        )
        now_ns = self.clock.monotonic_ns()
        self.line.add(self.producing, now_ns)
        self.line.connected(now_ns)
        server = Connection(Role.SERVER, now_ns, ConnectionOptions(requests_max=len(SUBJECTS) * WINDOW))
        server.feed(b"".join(self.line.take(now_ns)), now_ns)
        self.line.feed(b"".join(server.take()), now_ns)
        self.answered = 0

    def send(self, count: int, **columns: Any) -> None:
        """As many calls as messages."""
        add = self.producing.add
        for _ in range(count):
            add(SUBJECT, PAYLOAD, **columns)
        self.settle(1)

    def send_singles(self) -> None:
        """A batch for each message, and a receipt; as many as the windows of all subjects hold."""
        add = self.producing.add
        pendings = [add(subject, PAYLOAD) for subject in SUBJECTS for _ in range(WINDOW)]
        self.settle(len(pendings))
        for pending in pendings:
            pending.receipt()

    def send_many(self, payloads: list[bytes]) -> None:
        self.producing.add_many(SUBJECT, payloads)
        self.settle(1)

    def settle(self, batches: int) -> None:
        """Everything leaves, and everything is answered."""
        now_ns = self.clock.monotonic_ns()
        self.line.take(now_ns)
        parts: list[Bytes] = []
        for _ in range(batches):
            self.answered += 1
            answer = codec.encode(Produced(0, BATCH, 1, False, 1))
            parts += frames.write(Verb.PRODUCE, frames.RESPONSE, 1, self.answered, answer)
        self.line.feed(b"".join(parts), now_ns)
        self.line.take(now_ns)
        self.line.next_deadline()


def encode(payloads: Sequence[bytes]) -> bytes:
    return batch.encode(payloads, producer_id=7, first_sequence=0, created_ms=1)


def calls() -> dict[str, tuple[Call, int]]:
    """Name: what to call, and how many messages that is."""
    plain, keyed, tagged, many, lone = (Sender() for _ in range(5))
    singles = Sender(batch_messages_max=1)
    payloads = [PAYLOAD] * BATCH
    control = codec.encode(Produce(SUBJECT))
    return {
        "encode": (lambda: encode(payloads), BATCH),
        "send": (lambda: plain.send(BATCH), BATCH),
        "send, with a key": (lambda: keyed.send(BATCH, key="o-42"), BATCH),
        "send, with a tag": (lambda: tagged.send(BATCH, tags=("paid",)), BATCH),
        "send_many": (lambda: many.send_many(payloads), BATCH),
        "lone encode and write": (lambda: frames.write(16, 0, 1, 7, control, [encode([PAYLOAD])]), 1),
        "lone send": (lambda: lone.send(1), 1),
        "single sends": (singles.send_singles, len(SUBJECTS) * WINDOW),
    }


def cpu_ns(call: Call) -> float:
    """One round: what a call costs, from as many calls as fit."""
    calls, started = 0, time.process_time_ns()
    while (spent := time.process_time_ns() - started) < ROUND_NS:
        for _ in range(10):
            call()
        calls += 10
    return spent / calls


def medians(timed: dict[str, tuple[Call, int]], rounds: int) -> dict[str, float]:
    """Nanoseconds of CPU per message."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, (call, count) in timed.items():
            times[name].append(cpu_ns(call) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(rounds: int) -> list[dict[str, Any]]:
    us = {name: each / 1e3 for name, each in medians(calls(), rounds).items()}
    return [
        {
            "what": name,
            "us": round(each, 3),
            "per_s": round(1e6 / each),
            "ratio": round(each / us[YARDSTICKS[name]], 1) if name in YARDSTICKS else None,
        }
        for name, each in us.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("what", "µs per message", "messages/s", "times the yardstick", title="the client's core")
    for row in rows:
        ratio = f"{row['ratio']} × {YARDSTICKS[row['what']]}" if row["ratio"] else ""
        table.add_row(row["what"], f"{row['us']:,.3f}", f"{row['per_s']:,}", ratio)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what a send costs in the client's core", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
