"""Signals that end a program that handles messages, and the threads of that program.

`listen` gives one SIGTERM or SIGINT to several objects that are to end, such as candidates on one loop. The first
listener changes the signal handlers. They are restored when the last listener has left, or when a signal came, so that
a second signal has its usual effect. So the order in which listeners end does not matter.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_listening: list[Ending] = []
_before: dict[signal.Signals, Any] = {}


def listen(ending: Ending) -> Callable[[], None]:
    """Call `ending.ask` when a signal comes; call the returned function to leave. Outside the main thread this does
    nothing: signals belong to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if not _before and not _listening:
        _before.update({number: signal.getsignal(number) for number in _SIGNALS})
        for number in _SIGNALS:
            signal.signal(number, _asked)
    _listening.append(ending)

    def leave() -> None:
        _listening.remove(ending)
        if not _listening:
            _restore()

    return leave


def _asked(_number: int, _frame: FrameType | None) -> None:
    _restore()
    for ending in _listening:
        ending.ask()


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


class Ending:
    """Whether the program is asked to end: by a signal, or by `ask`. A second signal has its usual effect."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the program was asked to end within the timeout."""
        return self._asked.wait(timeout_s)

    def on_signals(self) -> Callable[[], None]:
        """Listen to SIGTERM and SIGINT; call the returned function to stop. Outside the main thread this does nothing:
        signals belong to the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def asked(_number: int, _frame: FrameType | None) -> None:
            restore()
            self.ask()

        for number in _SIGNALS:
            signal.signal(number, asked)
        return restore


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
