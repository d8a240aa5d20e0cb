"""What one thread is woken by, again and again; any other may ring."""

from __future__ import annotations

import threading


class Bell:
    """Rung while nobody listens, it is heard by whoever listens next; rung twice, it is heard once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was rung by then."""
        heard = self._event.wait(timeout_s)
        self._event.clear()
        return heard
