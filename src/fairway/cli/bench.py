"""`fairway bench`: measure this machine with a running broker, in a few seconds. bench/ compares with other systems.

All runs use one subject, so that ten runs leave one subject behind and not ten.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from fairway import Client
from fairway.cli import output
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.errors import Code, Refused
from fairway.groups.config import GroupConfig, encode
from fairway.protocol.admin_messages import Depth
from fairway.runtime import terminal
from fairway.runtime.clock import RealClock

_SUBJECT = "fairway.bench"
_GROUP = "fairway.bench"
_SINGLES_PART = 5  # one `send` each: a fifth of the messages
_LONE = 200  # sends that wait for their receipt, one after the other
_SILENCE_S = 30.0

Messages = Annotated[int, typer.Option("--messages", "-n", min=100, metavar="N", help="Messages to send in bulk.")]
Size = Annotated[int, typer.Option("--size", min=1, max=1_000_000, metavar="BYTES", help="Size of each payload.")]


class BenchResult(msgspec.Struct, frozen=True):
    """What the bench measured, in messages a second and milliseconds."""

    messages: int
    size_bytes: int
    durability: str
    send_many_per_s: float
    send_per_s: float
    consume_per_s: float
    lone_send_p50_ms: float
    lone_send_p99_ms: float


@common_options
def bench(messages: Messages = 100_000, size: Size = 100, *, common: CommonOptions) -> None:
    """Measure a running broker: send in bulk, one by one and waiting for each; consume and ack.

    Messages go to the subject fairway.bench, and stay as long as the broker
    keeps messages.
    """
    with common.connected("bench") as client:
        result = _Bench(client, messages, size).run()
    if common.json:
        output.write_json(result)
        return
    table = output.table(
        f"{messages:,} messages of {size:,} bytes, durability {result.durability}", "what", "figure>", "unit"
    )
    rows = [
        ("send_many", f"{result.send_many_per_s:,.0f}", "messages/s"),
        ("send, one call each", f"{result.send_per_s:,.0f}", "messages/s"),
        ("consume and ack", f"{result.consume_per_s:,.0f}", "messages/s"),
        ("send and wait, median", f"{result.lone_send_p50_ms:.2f}", "ms"),
        ("send and wait, 99th percentile", f"{result.lone_send_p99_ms:.2f}", "ms"),
    ]
    output.show_rows(table, rows, "")


class _Bench:
    """The measurements, in order."""

    def __init__(self, client: Client, messages: int, size: int) -> None:
        self._client = client
        self._messages = messages
        self._payload = b"x" * size
        self._clock = RealClock()

    def run(self) -> BenchResult:
        errors = terminal.console(err=True)
        with errors.status("sending in bulk") as status:
            first, many_s = self._send_many()
            status.update("sending one by one")
            singles = max(self._messages // _SINGLES_PART, 1)
            start_ns = self._clock.monotonic_ns()
            for _ in range(singles):
                self._client.send(_SUBJECT, self._payload)
            self._client.flush()
            single_s = self._since_s(start_ns)
            status.update("waiting for each")
            lone_ms = self._send_lone()
            status.update("consuming")
            total = self._messages + singles + _LONE
            consume_s = self._consume(first, total)
            broker, _ = describe(self._client, Depth.SUBJECTS, _SUBJECT)
        return BenchResult(
            messages=self._messages,
            size_bytes=len(self._payload),
            durability=broker.durability,
            send_many_per_s=self._messages / many_s,
            send_per_s=singles / single_s,
            consume_per_s=total / consume_s,
            lone_send_p50_ms=lone_ms[len(lone_ms) // 2],
            lone_send_p99_ms=lone_ms[len(lone_ms) * 99 // 100],
        )

    def _since_s(self, start_ns: int) -> float:
        return max(self._clock.monotonic_ns() - start_ns, 1) / 1e9

    def _send_many(self) -> tuple[int, float]:
        """Send all in one call; returns the first sequence and the seconds."""
        start_ns = self._clock.monotonic_ns()
        receipts = self._client.send_many(_SUBJECT, [self._payload] * self._messages).result()
        return receipts[0].first_sequence, self._since_s(start_ns)

    def _send_lone(self) -> list[float]:
        found = []
        for _ in range(_LONE):
            start_ns = self._clock.monotonic_ns()
            self._client.send(_SUBJECT, self._payload).result()
            found.append(self._since_s(start_ns) * 1_000)
        return sorted(found)

    def _consume(self, first: int, count: int) -> float:
        """Consume from the first message of this run on: an earlier run may have left its group behind."""
        try:
            self._client.configure(_SUBJECT, _GROUP, encode(GroupConfig()), expected_version=0)
        except Refused as refused:
            if refused.code is not Code.STALE_CONFIG:
                raise
        self._client.seek(_SUBJECT, _GROUP, first)
        start_ns = self._clock.monotonic_ns()
        with self._client.consumer(_SUBJECT, _GROUP) as consumer:
            left = count
            while left > 0:
                found = consumer.take(timeout=_SILENCE_S)
                if not found:
                    raise TimeoutError(f"{left} messages did not come within {_SILENCE_S:g} s")
                consumer.ack(found)
                left -= len(found)
        return self._since_s(start_ns)
