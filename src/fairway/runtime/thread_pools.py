"""Work beside the loop, on threads or on virtual time: blocking jobs, reads, computations.

`JobRunner` runs one blocking job, such as the recovery of a data directory. A cancelled caller still waits until its
job has ended, because the job may hold files or a lock. So a caller that has left `run`, in any way, may close what the
job used.

`ReaderPool` has the threads that read from the device. A fetch goes from `give` on the loop into one queue, to
whichever reader is free; its answer is made on that reader's thread.

`WorkPool` runs short computations that would hold up the loop and wait for nothing, such as the decompression of a
large batch. A job goes from `run` on the loop into one queue, to whichever thread is free, then to `done` on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from fairway.runtime.rng import Rng

T = TypeVar("T")


class JobRunner(Protocol):
    """Runs blocking jobs."""

    async def run(self, job: Callable[[], T]) -> T:
        """Return the result of the job, or raise its error."""


class ThreadRunner:
    """Runs each job on a thread of its own, while the loop continues."""

    async def run(self, job: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(job())
            except BaseException as error:  # raised again on the loop
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


_Read: TypeAlias = Callable[[], None]


class ReaderPool:
    """A fixed number of threads, started on demand. All calls come from one thread, the owner's."""

    def __init__(self, readers: int, *, is_daemon: bool = False) -> None:
        self._readers = readers
        self._is_daemon = is_daemon
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def give(self, job: _Read) -> None:
        """Have a job carried out soon. The job may not raise."""
        if len(self._threads) < self._readers:
            name = f"disk-reader:{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=self._is_daemon)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let the threads finish their jobs, and end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


PoolTask: TypeAlias = Callable[[], None]
# Jobs at a time. Each holds the memory of one decompressed batch and keeps a core busy. On two cores a second worker
# decompressed no more batches and doubled the p50 of a client beside 20 senders of 8 MiB (0.7 ms with one worker).
WORKERS = 1


class WorkPool(Protocol):
    """Runs computations for a server."""

    def run(self, job: PoolTask, done: Callable[[], None]) -> None:
        """Carry out the job soon, then call `done` on the loop. The job may not raise."""


class ThreadPool:
    """A fixed number of threads, started on demand, which end with the process. Used by one loop."""

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
    """For simulations: a job runs when its turn comes, and takes up to `late_s`, as the seed decides."""

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
