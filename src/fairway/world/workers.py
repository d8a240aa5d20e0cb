"""Threads of a program that handles messages, and the signals that end it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        """Whether it was asked by then."""
        return self._asked.wait(timeout_s)

    def on_signals(self) -> Callable[[], None]:
        """Listen to SIGTERM and SIGINT; call what this returns to stop listening. Elsewhere than in the main thread
        signals are somebody else's business, and nothing happens."""
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
    """Threads that each do one thing until it returns. They do not keep a program alive that wants to end."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def start_loop(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A thread with a loop of its own, which runs `main()`."""
        self.start(name, lambda: asyncio.run(main()))

    @property
    def alive(self) -> list[str]:
        """The names of those that have not returned."""
        return [each.name for each in self._threads if each.is_alive()]

    def join(self, timeout_s: float) -> list[str]:
        """Wait until all have returned; the names of those that have not by then."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return self.alive
