"""`fairway produce SUBJECT`: lines of stdin, of a file, or from the command line, each a message."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Subject, Url, connected
from fairway.cli.settings import ConfigFile
from fairway.errors import Misuse
from fairway.world import host
from fairway.world.clock import RealClock

if TYPE_CHECKING:
    from fairway import Client, Pending

Payloads = Annotated[
    list[str] | None, typer.Argument(metavar="[PAYLOAD]...", help="The messages; none: lines of stdin or of --file.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Send the lines of this file.")]
Rate = Annotated[float | None, typer.Option("--rate", min=0.001, metavar="N", help="At most so many a second.")]
Count = Annotated[
    int | None,
    typer.Option("--count", "-n", min=1, metavar="N", help="So many: of the lines, or the PAYLOADs over and over."),
]
Key = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every message.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", "-t", metavar="TAG", help="A tag of every message; repeat.")]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header of every message; repeat.")
]


def produce(
    subject: Subject,
    payloads: Payloads = None,
    file: File = None,
    rate: Rate = None,
    count: Count = None,
    key: Key = None,
    tags: Tags = None,
    headers: Headers = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send messages: one for each line of stdin or of a file, or those on the command line.

    Returns when all of them are stored: exit status 0. Exit status 1: some were refused. 3: nobody answers.
    """
    with connected("produce", config, url, patience_s) as client:
        sending = _Sending(client, subject, key, tuple(tags or ()), _headers(headers or []))
        total = count if payloads and count else (len(payloads) if payloads else count)
        is_typed = not payloads and file is None and sys.stdin.isatty()
        with output.slow_bar("sending", total, is_wanted=not is_typed) as advance:
            for payload in _paced(_lines(payloads, file, count), rate):
                sending.send(payload)
                advance(sending.count)
            client.flush()
        sending.say(as_json=json)


class _Sending:
    """What is sent, and what came of it."""

    def __init__(
        self, client: Client, subject: str, key: str | None, tags: Sequence[str], headers: dict[str, str]
    ) -> None:
        self._client = client
        self._subject = subject
        self._key = key
        self._tags = tags
        self._headers = headers
        self._first: Pending | None = None
        self._last: Pending | None = None
        self.count = 0

    def send(self, payload: bytes) -> None:
        self._last = self._client.send(self._subject, payload, self._key, self._tags, self._headers)
        self._first = self._first or self._last
        self.count += 1

    def say(self, *, as_json: bool) -> None:
        first = None if self._first is None else self._first.result().sequence
        last = None if self._last is None else self._last.result().sequence
        if as_json:
            document = {"subject": self._subject, "messages": self.count, "first_sequence": first}
            output.write_json({**document, "last_sequence": last})
            return
        span = "" if first is None else f", {first:,}" if first == last else f", {first:,} to {last:,}"
        typer.echo(f"{output.count(self.count, 'message')} stored in {self._subject}{span}")


def _headers(raw: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in raw]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise Misuse(f"--header {name}: write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _lines(payloads: list[str] | None, file: Path | None, count: int | None) -> Iterator[bytes]:
    if payloads:
        if file is not None:
            raise Misuse("either PAYLOADs or --file, not both")
        texts = [each.encode() for each in payloads]
        return islice(cycle(texts), count or len(texts))
    return islice(_read(file), count)


def _read(file: Path | None) -> Iterator[bytes]:
    """Lines without their ends, as they come: a line that somebody types leaves at once."""
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
    """No faster than that many a second, counted from the first."""
    if rate is None:
        yield from payloads
        return
    clock = RealClock()
    start_ns = clock.monotonic_ns()
    for number, payload in enumerate(payloads):
        host.sleep(number / rate - (clock.monotonic_ns() - start_ns) / 1e9)
        yield payload
