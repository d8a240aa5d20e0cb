"""How long nothing could be produced or consumed: from the times of what succeeded, and of what was done to a group."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.crash.career_rounds import percentile

MS_NS = 1_000_000


class Gap(NamedTuple):
    """Between two successes."""

    began_ns: int
    ended_ns: int

    @property
    def ms(self) -> int:
        return (self.ended_ns - self.began_ns) // MS_NS


def longest_gap(times_ns: Sequence[int], from_ns: int, to_ns: int) -> Gap | None:
    """The longest one that overlaps the span; None where there was no success before it, or none after."""
    first = bisect_right(times_ns, from_ns) - 1
    last = bisect_left(times_ns, to_ns)
    if first < 0 or last >= len(times_ns):
        return None
    around = times_ns[first : last + 1]
    return max((Gap(*pair) for pair in pairwise(around)), key=lambda gap: gap.ms, default=None)


@dataclass
class Successes:
    """Read from what programs write down, as it comes."""

    produced_ns: list[int] = field(default_factory=list)  # receipts
    consumed_ns: list[int] = field(default_factory=list)  # messages
    last_ns: dict[Path, int] = field(default_factory=dict)  # by program: its last receipt, or its last fruitful pull
    _read_bytes: dict[Path, int] = field(default_factory=dict)

    def read(self, paths: Iterable[Path]) -> None:
        """Half a line is for later."""
        for path in paths:
            with path.open("rb") as said:
                said.seek(self._read_bytes.get(path, 0))
                whole, newline, _ = said.read().rpartition(b"\n")
            if newline:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                self._take(path, whole)
        self.produced_ns.sort()
        self.consumed_ns.sort()

    def _take(self, path: Path, whole: bytes) -> None:
        for line in whole.splitlines():
            if b'"receipt"' in line[:40]:
                at_ns = json.loads(line)[0]
                self.produced_ns.append(at_ns)
                self.last_ns[path] = at_ns
            elif b'"delivery"' in line[:40]:
                at_ns, _, arguments = json.loads(line)
                self.consumed_ns.append(at_ns)
                self.last_ns[path] = arguments[4]  # not when it was seen, but when it was pulled


@dataclass
class Spans:
    """Milliseconds of one kind."""

    ms: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{percentile(self.ms, 50):,} / {percentile(self.ms, 99):,}" if self.ms else "–"

    def figures(self) -> dict[str, int]:
        return {"n": len(self.ms), "p50 ms": percentile(self.ms, 50), "p99 ms": percentile(self.ms, 99)}
