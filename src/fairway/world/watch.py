"""Something that several threads change, and wait for changes of."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class ConditionVariable:
    """A lock with a bell. `with` it to look or to change; `ring` after a change; `wait` for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._changed.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._changed.release()

    def ring(self) -> None:
        """Something has changed. With the lock."""
        self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Let others have the lock until one of them rings, or for so long. With the lock."""
        self._changed.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
