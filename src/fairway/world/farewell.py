"""One SIGTERM or SIGINT for several that are to end: candidates on one loop, say.

The signals' handlers are changed when the first one listens and given back when the last one has left, or when they
were called: a second signal has its usual effect. So it does not matter in which order they end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fairway.world.workers import Ending

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_listening: list[Ending] = []
_before: dict[signal.Signals, Any] = {}


def listen(ending: Ending) -> Callable[[], None]:
    """Ask this one when a signal comes; call what this returns to leave. Elsewhere than in the main thread signals are
    somebody else's business, and nothing happens."""
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
