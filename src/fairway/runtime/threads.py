"""Threads: pools of them for work beside a loop, and what threads wait at.

`JobRunner` runs one blocking job, such as the recovery of a data directory. A cancelled caller still waits until its
job has ended, because the job may hold files or a lock. So a caller that has left `run`, in any way, may close what the
job used.

`JobThreads` carry out jobs. A job goes from `give` on the loop into one queue, to whichever thread is free. A disk has
such threads for its reads. `ThreadPool` has them for short computations that would hold up the loop and wait for
nothing, such as the decompression of a large batch; its jobs end with `done` on the loop.

`Workers` each run one function until it returns.

To wait at, between threads:

    Wakeup             wakes one thread, again and again; any other thread signals it
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
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar

from fairway.runtime.clock import Clock

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


ThreadJob: TypeAlias = Callable[[], None]


class JobThreads:
    """A fixed number of threads, started on demand, that carry out jobs. All calls come from one thread, the
    owner's."""

    def __init__(self, threads: int, name: str, *, is_daemon: bool = False) -> None:
        self._threads_max = threads
        self._name = name
        self._is_daemon = is_daemon
        self._jobs: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def give(self, job: ThreadJob) -> None:
        """Have a job carried out soon. The job may not raise."""
        if len(self._threads) < self._threads_max:
            name = f"{self._name}:{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=self._is_daemon)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees its bytes: the next job may be long in coming

    def close(self) -> None:
        """Let the threads finish their jobs, and end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


# Jobs at a time. Each holds the memory of one decompressed batch and keeps a core busy. On two cores a second worker
# decompressed no more batches and doubled the p50 of a client beside 20 senders of 8 MiB (0.7 ms with one worker).
WORKERS = 1


class WorkPool(Protocol):
    """Runs computations for a server."""

    def run(self, job: ThreadJob, done: Callable[[], None]) -> None:
        """Carry out the job soon, then call `done` on the loop. The job may not raise."""


class ThreadPool:
    """A `WorkPool` of threads that end with the process. Used by one loop."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._threads = JobThreads(workers, "worker", is_daemon=True)

    def run(self, job: ThreadJob, done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            job()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done)

        self._threads.give(work)


class Workers:
    """Threads that each run one function until it returns. They do not keep a program alive."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def start_loop(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a thread with a loop of its own, which runs `main()`."""
        self.start(name, lambda: asyncio.run(main()))

    @property
    def alive(self) -> list[str]:
        """The names of the threads that have not returned."""
        return [each.name for each in self._threads if each.is_alive()]

    def join(self, timeout_s: float) -> list[str]:
        """Wait until all have returned; return the names of those that have not by then."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return self.alive


class Wakeup:
    """Wakes one thread. A signal to which nobody listens is kept for the next wait; two of them count as one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def signal(self) -> None:
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether a signal came within the timeout."""
        is_signalled = self._event.wait(timeout_s)
        self._event.clear()
        return is_signalled


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
