"""A process that serves until it is told to end: its loop, its signals, its descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_ENDING = (signal.SIGTERM, signal.SIGINT)
_INTERRUPTED = 130  # the exit status that a shell reports for a program that SIGINT has ended

# mallopt's names for them, and what we want of glibc's allocator: it gives memory at the top of its heap back to the
# kernel from 128 KiB on, only to ask for it again, page by page, for the next response (13.5 µs against 3.8 for a batch
# that is read, bench/storage). 64 MiB is one frame of the largest kind.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 64 * 1024 * 1024
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 4 * 1024 * 1024

# How many more containers than before there must be for Python's collector to look at the newest ones, and how often it
# looks at older ones. With its own choice (700, 10, 10) it took 25 ms at a time under a flood of requests, with
# (1,000, 50, 20) 8 ms while clients made groups (bench/hostile): it should look at few at a time, and rarely at all.
_COLLECT_AT = (500, 3, 700)


_DESCRIPTORS_LOOK_S = 0.5  # between two looks whether any is free: 5 µs each


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own: uvloop's where it is installed, which is never required."""
    _keep_freed_memory()
    gc.freeze()  # what was imported stays: to look through it for garbage takes 30 ms, and nobody is served meanwhile
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with _signals_as_before(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """`run` for a coroutine that begins with `asked_to_end`. Ctrl-C before that ends the process, with status 130.

    asyncio's runner cancels `main` instead. The cancellation reaches `main` at its first pause, when the server may
    already serve: the threads of its disk then keep the process alive, and nobody listens to signals any more.
    """
    if threading.current_thread() is not threading.main_thread():
        return run(main)
    with _signals_as_before():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
            signal.signal(signal.SIGINT, _end)
        return run(main)


def _end(_number: int, _frame: FrameType | None) -> None:
    """Nothing has begun that would have to be finished."""
    os._exit(_INTERRUPTED)


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """A loop of uvloop that is closed keeps the signals that it was asked to listen to, and nobody hears them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.getsignal(number)) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _keep_freed_memory() -> None:
    """Where the C library is not glibc, it does what it does."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for option, value in ((_TRIM_THRESHOLD, _TRIM_BYTES), (_MMAP_THRESHOLD, _MMAP_BYTES)):
            if mallopt is not None:
                mallopt(option, value)


def resident_bytes() -> int:
    """What this process has in memory now; at its peak, where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def settle_memory() -> None:
    """When a server is ready: what it has loaded and recovered is there to stay, and the collector need not look at it
    again and again while clients wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def asked_to_end() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. A second one has its usual effect, for whoever cannot wait."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask() -> None:
        asked.set()
        for number in _ENDING:
            loop.remove_signal_handler(number)

    for number in _ENDING:
        loop.add_signal_handler(number, ask)
    return asked


def raise_descriptor_limit() -> int:
    """Take all descriptors that this process may have; how many those are. A connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own: then what we have must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def watch_descriptors(report: Callable[[str], None]) -> None:
    """From now on, report when the last descriptor is taken, and when there are some again.

    The loop says nothing of that: it closes connections that it cannot accept, or lets them wait, and goes on as soon
    as there are descriptors. So somebody has to look.
    """
    _DescriptorWatch(asyncio.get_running_loop(), report).look()


class _DescriptorWatch:
    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
        self._loop = loop
        self._report = report
        self._is_short = False

    def look(self) -> None:
        why = _why_no_descriptor()
        if bool(why) != self._is_short:
            self._is_short = bool(why)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._report(
                f"no descriptor is free ({why}; the limit of this process is {limit}): new connections are turned "
                "away, and files cannot be opened. Raise the limit (ulimit -n, LimitNOFILE=), or close connections"
                if why
                else "descriptors are free again"
            )
        self._loop.call_later(_DESCRIPTORS_LOOK_S, self.look)


def _why_no_descriptor() -> str:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""
