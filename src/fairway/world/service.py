"""A process that serves until it is told to end: its loop, its signals, its descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own: uvloop's where it is installed, which is never required."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def asked_to_end() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. A second one has its usual effect, for whoever cannot wait."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask() -> None:
        asked.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    return asked


def raise_descriptor_limit() -> int:
    """Take all descriptors that this process may have; how many those are. A connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit of its own: then what we have must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft
