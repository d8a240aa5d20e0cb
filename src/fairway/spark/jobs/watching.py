"""Progress of a job: rows, rate, what remains. The job says how far it is; who watches decides whether to show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fairway.world import terminal
from fairway.world.clock import Clock, RealClock

NS = 1_000_000_000


@dataclass(frozen=True)
class Point:
    """How far a job is."""

    doing: str
    rows: int  # done so far
    remaining: int | None = None  # rows, as far as is known
    rate_per_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        return self.remaining / self.rate_per_s if self.remaining is not None and self.rate_per_s > 0 else None

    @property
    def sentence(self) -> str:
        parts = [f"{self.doing}: {self.rows:,} rows"]
        if self.rate_per_s > 0:
            parts.append(f"{self.rate_per_s:,.0f} rows/s")
        if self.remaining is not None:
            parts.append(f"{self.remaining:,} to go")
        if self.left_s is not None and self.remaining:
            parts.append(f"about {self.left_s:,.0f} s")
        return ", ".join(parts)


class ProgressListener(Protocol):
    """Who is told."""

    def __call__(self, point: Point, /) -> None:
        """A job is at this point now."""


def unwatched(_point: Point) -> None:
    """Nobody looks."""


class ProgressCounter:
    """Counts rows since a start, and tells a watch."""

    def __init__(self, watch: ProgressListener, doing: str, clock: Clock | None = None) -> None:
        self._watch = watch
        self._doing = doing
        self._clock = clock or RealClock()
        self._start_ns = self._clock.monotonic_ns()
        self.rows = 0

    @property
    def elapsed_s(self) -> float:
        return (self._clock.monotonic_ns() - self._start_ns) / NS

    def add(self, rows: int, remaining: int | None) -> None:
        self.rows += rows
        elapsed_s = self.elapsed_s
        self._watch(Point(self._doing, self.rows, remaining, self.rows / elapsed_s if elapsed_s > 0 else 0.0))


@contextmanager
def on_terminal() -> Iterator[ProgressListener]:
    """A line on stderr that is drawn anew, where stderr is a terminal; else nothing."""
    from rich.text import Text

    errors = terminal.console(err=True)
    if not errors.is_terminal:
        yield unwatched
        return
    with errors.status("starting Spark") as status:
        yield lambda point: status.update(Text(terminal.escaped(point.sentence)))
