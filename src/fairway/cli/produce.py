"""`fairway produce SUBJECT`: lines of stdin, of a file, or from the command line, each a message."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from fairway import Client, Pending
from fairway.cli import arguments, output
from fairway.cli.arguments import Subject
from fairway.cli.connections import CommonOptions, common_options
from fairway.errors import Misuse
from fairway.runtime import host
from fairway.runtime.clock import RealClock

Payloads = Annotated[
    list[str] | None, typer.Argument(metavar="PAYLOAD", help="Payloads; none: lines of stdin or of --file.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Send the lines of this file.")]
Rate = Annotated[float | None, typer.Option("--rate", min=0.001, metavar="N", help="At most N messages a second.")]
Count = Annotated[
    int | None,
    typer.Option(
        "--count", "-n", min=1, metavar="N", help="Send N messages: the first N lines, or the PAYLOADs in turn."
    ),
]
Key = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every message.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", "-t", metavar="TAG", help="A tag of every message; may be repeated.")
]
After = Annotated[
    str | None,
    typer.Option("--after", metavar="SPAN", help=f"Deliver after this delay: {arguments.SPAN_HELP}."),
]
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help="Deliver at this time: 2027-01-01T00:00:00Z.")]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header of every message; may be repeated.")
]


@common_options
def produce(
    subject: Subject,
    payloads: Payloads = None,
    file: File = None,
    rate: Rate = None,
    count: Count = None,
    key: Key = None,
    tags: Tags = None,
    headers: Headers = None,
    after: After = None,
    at: At = None,
    *,
    common: CommonOptions,
) -> None:
    """Send messages: lines of stdin or of a file, or payloads from the command line.

    Exit status: 0 all messages are stored, 1 some were refused, 3 no broker
    answers.

    With --after or --at messages are delayed: `fairway delay` lists and cancels
    them.
    """
    with common.connected("produce") as client:
        when = _when(after, at)
        sending = _Sending(client, subject, key, tuple(tags or ()), _headers(headers or []), when)
        total = count if payloads and count else (len(payloads) if payloads else count)
        is_typed = not payloads and file is None and sys.stdin.isatty()
        with output.slow_bar("sending", total, is_wanted=not is_typed) as advance:
            for payload in _paced(_lines(payloads, file, count), rate):
                sending.send(payload)
                advance(sending.count)
            client.flush()
        common.say(*sending.summary())


class _When(TypedDict, total=False):
    """The delay that `send` takes; empty to deliver at once."""

    after: timedelta
    at: datetime


def _when(after: str | None, at: str | None) -> _When:
    when: _When = {}
    if after is not None:
        when["after"] = arguments.span(after)
    if at is not None:
        when["at"] = arguments.due(at)
    if len(when) > 1:
        raise Misuse("give --after or --at, not both")
    return when


@dataclass
class _Sending:
    """Sends messages, and prints their receipts."""

    client: Client
    subject: str
    key: str | None
    tags: Sequence[str]
    headers: dict[str, str]
    when: _When
    first: Pending | None = None
    last: Pending | None = None
    count: int = 0

    def send(self, payload: bytes) -> None:
        self.last = self.client.send(self.subject, payload, self.key, self.tags, self.headers, **self.when)
        self.first = self.first or self.last
        self.count += 1

    def summary(self) -> tuple[dict[str, object], str]:
        """What was sent, as a document and as a sentence."""
        receipts = [pending.result() for pending in (self.first, self.last) if pending is not None]
        name = "id" if self.when else "sequence"
        first, last = [getattr(receipt, name) for receipt in receipts] or [None, None]
        document = {"subject": self.subject, "messages": self.count, f"first_{name}": first, f"last_{name}": last}
        what = output.count(self.count, "message")
        if self.when:
            span = "" if first is None else f": {first}" if first == last else f": {first} to {last}"
            return document, f"{what} scheduled for {self.subject}{span}"
        span = "" if first is None else f", {first:,}" if first == last else f", {first:,} to {last:,}"
        return document, f"{what} stored in {self.subject}{span}"


def _headers(raw: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in raw]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise Misuse(f"--header {name!r} is not NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _lines(payloads: list[str] | None, file: Path | None, count: int | None) -> Iterator[bytes]:
    if payloads:
        if file is not None:
            raise Misuse("give PAYLOADs or --file, not both")
        texts = [each.encode() for each in payloads]
        return islice(cycle(texts), count or len(texts))
    return islice(_read(file), count)


def _read(file: Path | None) -> Iterator[bytes]:
    """Lines without their ends, as they come: a typed line leaves at once."""
    if file is None or str(file) == "-":
        for line in sys.stdin.buffer:
            yield line.removesuffix(b"\n")
        return
    try:
        with file.open("rb") as opened:
            for line in opened:
                yield line.removesuffix(b"\n")
    except OSError as error:
        raise Misuse(f"{file} cannot be read: {error.strerror}") from error


def _paced(payloads: Iterator[bytes], rate: float | None) -> Iterator[bytes]:
    """At most `rate` payloads a second, counted from the first."""
    if rate is None:
        yield from payloads
        return
    clock = RealClock()
    start_ns = clock.monotonic_ns()
    for number, payload in enumerate(payloads):
        host.sleep(number / rate - (clock.monotonic_ns() - start_ns) / 1e9)
        yield payload
