"""Twins of the runner and the pool of `fairway.runtime.threads`, on virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from fairway.runtime.rng import Rng
from fairway.runtime.threads import WORKERS, ThreadJob

T = TypeVar("T")


class SimRunner:
    """For simulations: the job runs at once, and its result arrives up to `late_s` later, as the seed decides."""

    def __init__(self, rng: Rng, late_s: float = 0.2) -> None:
        self.late_s = late_s
        self._rng = rng

    async def run(self, job: Callable[[], T]) -> T:
        result = job()
        await asyncio.sleep(self._rng.uniform() * self.late_s)
        return result


class SimPool:
    """For simulations: a job runs when its turn comes, and takes up to `late_s`, as the seed decides."""

    def __init__(self, rng: Rng, workers: int = WORKERS, late_s: float = 0.02) -> None:
        self._rng = rng
        self._free = workers
        self._late_s = late_s
        self._waiting: deque[tuple[ThreadJob, Callable[[], None]]] = deque()

    def run(self, job: ThreadJob, done: Callable[[], None]) -> None:
        self._waiting.append((job, done))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._free:
            self._free -= 1
            late_s = self._rng.uniform() * self._late_s
            asyncio.get_running_loop().call_later(late_s, self._end, *self._waiting.popleft())

    def _end(self, job: ThreadJob, done: Callable[[], None]) -> None:
        self._free += 1
        job()
        done()
        self._begin()
