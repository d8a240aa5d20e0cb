"""Runs short computations beside the loop, a few at a time: threads, or virtual time.

For work that would hold up the loop and waits for nothing, such as the decompression of a large batch. A job travels:
`run` on the loop → one queue for all → whichever thread is free → `done`, on the loop again.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from fairway.world.rng import Rng

PoolTask: TypeAlias = Callable[[], None]
# Jobs at a time. Each holds the memory of one decompressed batch and keeps a core busy. On two cores a second worker
# decompressed no more batches and doubled the p50 of a client beside 20 senders of 8 MiB (0.7 ms with one worker).
WORKERS = 1


class WorkPool(Protocol):
    """How a server has computations done."""

    def run(self, job: PoolTask, done: Callable[[], None]) -> None:
        """Carry out the job soon, then call `done` on the loop. The job may not raise."""


class ThreadPool:
    """A fixed number of threads, started as they are needed, which end with the process. Used by one loop."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._jobs: queue.SimpleQueue[PoolTask] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, job: PoolTask, done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            job()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done)

        if len(self._threads) < self._workers:
            thread = threading.Thread(target=self._run, name=f"worker:{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(work)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class SimPool:
    """For simulations: a job is carried out when its turn comes, and takes up to `late_s`, as the seed decides."""

    def __init__(self, rng: Rng, workers: int = WORKERS, late_s: float = 0.02) -> None:
        self._rng = rng
        self._free = workers
        self._late_s = late_s
        self._waiting: deque[tuple[PoolTask, Callable[[], None]]] = deque()

    def run(self, job: PoolTask, done: Callable[[], None]) -> None:
        self._waiting.append((job, done))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._free:
            self._free -= 1
            late_s = self._rng.uniform() * self._late_s
            asyncio.get_running_loop().call_later(late_s, self._end, *self._waiting.popleft())

    def _end(self, job: PoolTask, done: Callable[[], None]) -> None:
        self._free += 1
        job()
        done()
        self._begin()
