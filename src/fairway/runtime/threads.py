"""Threads: pools of them for work beside a loop, and what threads wait at.

`JobRunner` runs one blocking job, such as the recovery of a data directory. A cancelled caller still waits until its
job has ended, because the job may hold files or a lock. So a caller that has left `run`, in any way, may close what the
job used.

`ReaderPool` has the threads that read from the device. A fetch goes from `give` on the loop into one queue, to
whichever reader is free; its answer is made on that reader's thread.

`WorkPool` runs short computations that would hold up the loop and wait for nothing, such as the decompression of a
large batch. A job goes from `run` on the loop into one queue, to whichever thread is free, then to `done` on the loop.
Runner and pool have twins on virtual time for simulations.

To wait at, between threads:

    Bell               wakes one thread, again and again; any other thread rings it
    Lock               protects a few instructions
    Gate               opens once; one thread waits at it
    Hub                a lock, and a wait for changes that several links bring
    Latch              opens once; threads, and tasks of any loop, wait at it
    ConditionVariable  a lock, and a wait for changes under it
    thread_id          the number of the calling thread
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from fairway.runtime.clock import Clock
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


class Bell:
    """A ring without a listener is kept for the next one; two rings count as one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was rung within the timeout."""
        heard = self._event.wait(timeout_s)
        self._event.clear()
        return heard


thread_id = threading.get_ident
Lock = threading.Lock  # for a few instructions at a time; never across a wait


class Gate:
    """Opened once, by any thread; one thread waits at it. A lock is the cheapest thing that a thread can wait for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):  # the gate is open already
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


_LOOK_S = 1.0  # a failed link announces nothing: the wait checks this often


class Hub:
    """A lock, and a wait for changes under it."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._changed = threading.Condition(self.lock)

    def announce(self) -> None:
        """Wake the waiting threads, which look again. Call it with the lock."""
        self._changed.notify_all()

    def wait(self, is_ready: Callable[[], bool], check: Callable[[], None], timeout_s: float | None) -> bool:
        """Wait until `is_ready` is true; False after the timeout. `is_ready` is called with the lock, `check` without
        it. `check` raises if no change will ever come."""
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            check()
            left_s = _LOOK_S if end_ns is None else min(_LOOK_S, (end_ns - self._clock.monotonic_ns()) / 1e9)
            with self._changed:
                if self._changed.wait_for(is_ready, max(left_s, 0)):
                    return True
            if left_s <= 0:
                return False


class Latch:
    """Closed until `open` is called, once and for all."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(event.set)

    def wait(self) -> None:
        """Block this thread."""
        self._event.wait()

    async def wait_async(self) -> None:
        """Wait without blocking the loop."""
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()


class ConditionVariable(threading.Condition):
    """A lock, and a wait for changes under it, which takes any timeout."""

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until another thread notifies, or until the timeout. Call it with the lock."""
        return super().wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
