"""The writer of one directory: a thread, or the disk's owner where the device is fast.

A commit by the thread costs two changes of threads. On a loop that is never idle each change takes up to 3 ms: the
writer waits for the interpreter, and for the kernel to let it run (bench/hostile). If the device syncs before the
thread could even begin, a commit by the owner itself is cheaper.

On any other device the owner would stand still for as long as the device likes. So nobody assumes that a device is
fast. The writer thread measures the device, and the owner stops where the device proves slow:

    thread      every commit goes to the thread, which notes how long the small ones take. The owner takes over once
                a quarter of the last 16 took 0.1 ms or less. Most of them may take longer: they have also waited for
                the interpreter.
    owner       the owner carries out small commits at once. A commit that takes more than 0.1 ms is a debt. The debt
                melts as time passes, by 1 ms in 200 ms. At 5 ms the thread takes over, until the debt is gone and 16
                commits were measured again.

So a device that turns slow costs the owner 5 ms and the commit that goes beyond, and in the long run a two-hundredth of
its time. A commit that never waited, and was only interrupted so that another process could run, owes only its
processor time. On a busy machine any loop loses some milliseconds in that way.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from fairway import limits
from fairway.errors import StorageFault
from fairway.runtime.disk import Completion

DiskWork: TypeAlias = Callable[[], None]

INLINE_BYTES_MAX = 16 * limits.KIB  # of a commit that the owner carries out: copying it takes some microseconds
FAST_NS = 100_000  # what a commit by the thread costs the loop anyway, in changes of threads
SAMPLES = 16
FAST_SAMPLES_MIN = 4
DEBT_NS_MAX = 5_000_000
DEBT_SHARE = 200  # slow commits may take one part in so many of the owner's time

# The kernel rounds a thread's waits up by its timer slack, which is 0.05 ms by default.
_TIMER_SLACK_NS = 1_000
_PR_SET_TIMERSLACK = 29


class ThreadUsage(NamedTuple):
    """A thread's use of the machine."""

    waits: int  # how often it gave up the processor because it had to wait
    cpu_ns: int


def _usage_of_this_thread() -> ThreadUsage | None:
    if sys.platform != "linux":
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return ThreadUsage(usage.ru_nvcsw, int((usage.ru_utime + usage.ru_stime) * 1e9))


class InlineCommits:
    """Decides whether the owner carries out a small commit itself.

    Threads: the writer thread calls `measure`. The owner calls everything else, while the thread has nothing to do.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        usage: Callable[[], ThreadUsage | None] = _usage_of_this_thread,
    ) -> None:
        """`usage`: of the owner's thread so far; None where the platform cannot tell."""
        self._now_ns = now_ns
        self._usage = usage
        self._samples: deque[int] = deque(maxlen=SAMPLES)
        self._is_open = False
        self._debt_ns = 0.0
        self._debt_at_ns = 0  # the time of that debt

    def is_open(self) -> bool:
        """Whether the device is known to be fast, and no debt is left from before."""
        if not self._is_open and len(self._samples) == SAMPLES:
            self._melt()
            is_fast = sorted(self._samples)[FAST_SAMPLES_MIN - 1] <= FAST_NS
            self._is_open = is_fast and not self._debt_ns
        return self._is_open

    def measure(self, work: DiskWork) -> None:
        """Carry out work on the writer thread, and note its time."""
        begun_ns = self._now_ns()
        work()
        self._samples.append(self._now_ns() - begun_ns)

    def carry_out(self, work: DiskWork) -> None:
        """Carry out work on the owner's thread, and note a debt."""
        before = self._usage()
        begun_ns = self._now_ns()
        try:
            work()
        finally:
            took_ns = self._now_ns() - begun_ns
            if took_ns > FAST_NS:
                self._owe(took_ns, before)

    def _owe(self, took_ns: int, before: ThreadUsage | None) -> None:
        after = self._usage()
        if before is not None and after is not None and after.waits == before.waits:
            took_ns = after.cpu_ns - before.cpu_ns
        self._melt()
        self._debt_ns += took_ns
        if self._debt_ns > DEBT_NS_MAX:
            self._is_open = False
            self._samples.clear()

    def _melt(self) -> None:
        now_ns = self._now_ns()
        self._debt_ns = max(self._debt_ns - (now_ns - self._debt_at_ns) / DEBT_SHARE, 0.0)
        self._debt_at_ns = now_ns


class DirectoryWriter:
    """The thread that carries out the work of one directory, in order."""

    def __init__(
        self,
        directory: str,
        carry_out: Callable[[DiskWork, Completion], None],
        carry_out_here: Callable[[DiskWork, Completion], None],
        inline: InlineCommits | None,
        *,
        is_daemon: bool,
    ) -> None:
        """`carry_out` does the work on the thread, `carry_out_here` on the owner's; both have `done` called later, on
        the owner's. `inline`: None sends all work to the thread."""
        self._carry_out = carry_out
        self._carry_out_here = carry_out_here
        self._inline = inline
        self._under_way = 0  # given to the thread and not answered; only the owner counts
        self._jobs: queue.SimpleQueue[DiskWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"disk-writer:{directory}", daemon=is_daemon)
        self._thread.start()

    def _run(self) -> None:
        _wait_exactly()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees the written bytes: the next job may be long in coming

    def give(self, work: DiskWork, done: Completion) -> None:
        """Have the thread carry out work."""
        self._under_way += 1
        self._jobs.put(functools.partial(self._carry_out, work, functools.partial(self._answer, done)))

    def _answer(self, done: Completion, fault: StorageFault | None) -> None:
        """Back on the owner's thread."""
        self._under_way -= 1
        done(fault)

    def commit(self, work: DiskWork, done: Completion, *, size: int, is_named: bool) -> None:
        """Have a commit carried out, by the owner itself where that is quicker. Commits and their answers keep their
        order: the owner carries out a commit only after everything given to the thread is answered. `is_named`: the
        file's directory needs no sync."""
        inline = self._inline
        if inline is None or size > INLINE_BYTES_MAX:
            self.give(work, done)
        elif is_named and not self._under_way and inline.is_open():
            self._carry_out_here(functools.partial(inline.carry_out, work), done)
        else:
            self.give(functools.partial(inline.measure, work), done)

    def stop(self) -> None:
        """Let the thread finish its work and end."""
        self._jobs.put(None)

    def join(self) -> None:
        self._thread.join()


def _wait_exactly() -> None:
    """On Linux, end this thread's waits when they are due. Elsewhere they may end a little later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
