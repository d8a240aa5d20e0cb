"""Many seeds on a few processes, in order, with a progress bar and an end in sight."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

PROCESSES = 2
CHUNK_SEEDS = 8


def outcomes(work: Callable[[int], T], seeds: Iterable[int], processes: int = PROCESSES) -> Iterator[T]:
    """The outcome of every seed, in order."""
    if processes == 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(work, seeds, CHUNK_SEEDS)


def watched(
    title: str, work: Callable[[int], T], seeds: range, *, processes: int, minutes: float | None, quiet: bool
) -> Iterator[T]:
    """The same beside a progress bar; those that the time allows."""
    deadline = time.monotonic() + 60 * minutes if minutes is not None else None
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet) as progress:
        bar = progress.add_task(title, total=len(seeds))
        for outcome in outcomes(work, seeds, min(processes, len(seeds))):
            progress.advance(bar)
            yield outcome
            if deadline is not None and time.monotonic() > deadline:
                return
