"""A server process: its log lines, its loop, its signals, its memory and its descriptors.

`run_server` runs a server until it is asked to end. `EscapingFormatter` and `TimedFormatter` format the lines of
Python's logging for servers and apps: the time in UTC, the logger, the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import UTC, datetime
from types import FrameType
from typing import Any, TypeVar

from fairway.runtime import terminal


def stamp(wall_ms: int) -> str:
    """A UTC time such as 2026-11-18T01:42:03.123Z."""
    return datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{wall_ms % 1_000:03d}Z"


class EscapingFormatter(logging.Formatter):
    """For a handler that writes to stderr: a terminal shows the text of a record, and obeys none of it. A message stays
    on its line; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the name is logging's)
        return terminal.shown(super().formatMessage(record), err=True)

    def format(self, record: logging.LogRecord) -> str:
        return terminal.shown(super().format(record), err=True, keep=terminal.LINES)


class TimedFormatter(EscapingFormatter):
    """`TIME LOGGER: SENTENCE`."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return f"{stamp(int(record.created * 1_000))} {super().format(record)}"


async def cancel(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancel one task after another, and wait for its end. Raises what a task had failed with."""
    for task in [*tasks]:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


T = TypeVar("T")

_ENDING = (signal.SIGTERM, signal.SIGINT)
_INTERRUPTED = 130  # the exit status that a shell reports for a program that SIGINT has ended

# mallopt's names, and our values. From 128 KiB on, glibc returns memory at the top of its heap to the kernel, only to
# ask for it again, page by page, for the next response (13.5 µs against 3.8 for a batch that is read, bench/storage).
# 64 MiB is one frame of the largest kind.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 64 * 1024 * 1024
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 4 * 1024 * 1024

# How many more containers than before there must be for Python's collector to look at the newest ones, and how often it
# looks at older ones. With its own choice (700, 10, 10) a collection took 25 ms under a flood of requests, with
# (1,000, 50, 20) 8 ms while clients made groups (bench/hostile). So the collector looks at few, and rarely at all.
_COLLECT_AT = (500, 3, 700)


_DESCRIPTORS_LOOK_S = 0.5  # between two checks for a free descriptor: 5 µs each


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a new loop: uvloop's where it is installed, which is never required."""
    _keep_freed_memory()
    gc.freeze()  # imported objects stay: a collection of them takes 30 ms, and nobody is served meanwhile
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with _signals_as_before(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """`run` for a coroutine that begins with `asked_to_end`. Ctrl-C before that ends the process, with status 130.

    Without this, asyncio's runner would cancel `main`. The cancellation reaches `main` at its first pause, when the
    server may already serve. The threads of its disk then keep the process alive, and nobody listens to signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return run(main)
    with _signals_as_before():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
            signal.signal(signal.SIGINT, _end)
        return run(main)


def _end(_number: int, _frame: FrameType | None) -> None:
    """Exit at once: nothing has begun that would have to be finished."""
    os._exit(_INTERRUPTED)


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """Restore the signal handlers at the end: a closed uvloop loop keeps its signals, and nobody handles them."""
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
    """Raise glibc's thresholds for returning memory; other C libraries are left alone."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for option, value in ((_TRIM_THRESHOLD, _TRIM_BYTES), (_MMAP_THRESHOLD, _MMAP_BYTES)):
            if mallopt is not None:
                mallopt(option, value)


def resident_bytes() -> int:
    """The resident memory of this process; its peak, where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def settle_memory() -> None:
    """Call when a server is ready: loaded and recovered objects stay, so the collector need not look at them again
    while clients wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def asked_to_end() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. A second one has its usual effect."""
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
    """Raise the limit to the most that this process may have; return it. A connection needs one descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own: keep the current one then
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def watch_descriptors(report: Callable[[str], None]) -> None:
    """From now on, report when no descriptor is free, and when some are free again.

    The loop reports neither: it closes connections that it cannot accept, or lets them wait, and continues as soon as
    there are descriptors.
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
