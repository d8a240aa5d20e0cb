"""Runs one blocking job beside the loop, such as the recovery of a data directory: a thread, or virtual time.

A caller that is cancelled still waits until its job has ended, because the job may hold files or a lock. So whoever
returns from `run`, by whatever way, may close what the job used.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from fairway.world.rng import Rng

T = TypeVar("T")


class JobRunner(Protocol):
    """How a program runs blocking jobs."""

    async def run(self, job: Callable[[], T]) -> T:
        """The result of the job, or its error."""


class ThreadRunner:
    """Each job has a thread of its own; the loop goes on meanwhile."""

    async def run(self, job: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(job())
            except BaseException as error:  # it is raised again where it belongs, on the loop
                errors.append(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name="fairway-job", daemon=True).start()
        is_cancelled = False
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        if errors:
            raise errors[0]
        return results[0]


class SimRunner:
    """For simulations: the job runs at once, and its result arrives up to `late_s` later, as the seed decides."""

    def __init__(self, rng: Rng, late_s: float = 0.2) -> None:
        self.late_s = late_s
        self._rng = rng

    async def run(self, job: Callable[[], T]) -> T:
        result = job()
        await asyncio.sleep(self._rng.uniform() * self.late_s)
        return result
