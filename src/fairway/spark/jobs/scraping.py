"""The figures that a server shows at its `/metrics`, read once, for a job that wants one of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from fairway.errors import FairwayError, Misuse
from fairway.redaction import without_password
from fairway.world.clock import RealClock
from fairway.world.wire import BlockingConnection, WireCut

PAGE_BYTES_MAX: Final = 64 << 20
_PATIENCE_S: Final = 10.0
_SAMPLE: Final = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?")
_LE: Final = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True)
class ScrapedHistogram:
    """How many values were at most so large, and larger than the bound before; the last bound is infinite."""

    bounds: list[float]
    counts: list[int]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class NoFigures(FairwayError):
    """Nobody shows figures there; the sentence says why."""


def page(url: str) -> str:
    """What is shown there now."""
    host, port, path = place(url)
    try:
        wire = BlockingConnection.dial([(host, port)])
        try:
            wire.write([f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()])
            return _body(_all(wire), url)
        finally:
            wire.close()
    except WireCut as problem:
        raise NoFigures(f"{without_password(url)} has not answered: {problem}") from problem


def histogram(text: str, name: str) -> ScrapedHistogram | None:
    """The one histogram of that name on a page; None: the page has none."""
    below: list[tuple[float, int]] = []
    total = 0.0
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        if found["name"] == f"{name}_bucket" and (bound := _LE.search(found["labels"] or "")):
            below.append((float(bound[1]), int(float(found["value"]))))
        elif found["name"] == f"{name}_sum":
            total = float(found["value"])
    if not below:
        return None
    below.sort()
    counts = [here - before for (_, here), (_, before) in zip(below, [(0.0, 0), *below], strict=False)]
    return ScrapedHistogram([bound for bound, _ in below], counts, total)


def together(many: Iterable[ScrapedHistogram]) -> ScrapedHistogram:
    """Of several servers as one, by bounds: those of another release may have others."""
    counts: Counter[float] = Counter()
    total = 0.0
    for each in many:
        counts.update(dict(zip(each.bounds, each.counts, strict=True)))
        total += each.total
    bounds = sorted(counts)
    return ScrapedHistogram(bounds, [counts[bound] for bound in bounds], total)


def place(url: str) -> tuple[str, int, str]:
    """Host, port and path; `Misuse` says how to write it."""
    found = urlsplit(url)
    if found.scheme != "http" or not found.hostname:
        shown = without_password(url)
        raise Misuse(f"--metrics {shown!r}: write http://HOST:PORT/metrics, as `--http-port` of the server opens it")
    try:
        port = found.port or 80
    except ValueError as error:
        raise Misuse(f"--metrics {without_password(url)!r}: {error}") from None
    return found.hostname, port, found.path if found.path.strip("/") else "/metrics"


def _all(wire: BlockingConnection) -> bytes:
    """Until the other side closes, which is how a page ends."""
    clock = RealClock()
    end_ns = clock.monotonic_ns() + int(_PATIENCE_S * 1e9)
    data = bytearray()
    while len(data) <= PAGE_BYTES_MAX:
        left_s = (end_ns - clock.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise WireCut(f"no whole page within {_PATIENCE_S:g} s")
        try:
            data += wire.read(left_s) or b""
        except WireCut:
            if data:
                return bytes(data)
            raise
    raise WireCut(f"a page of more than {PAGE_BYTES_MAX:,} bytes")


def _body(data: bytes, url: str) -> str:
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(words) < 2 or words[1] != b"200":
        said = head.split(b"\r\n", 1)[0].decode("ascii", "replace")[:100]
        raise NoFigures(
            f"{without_password(url)} has no figures: it says {said!r}; name the page /metrics of the server"
        )
    return body.decode("utf-8", "replace")


def seconds(bound: float) -> float | None:
    """A bound, where there is one."""
    return None if math.isinf(bound) else bound
