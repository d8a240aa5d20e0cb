"""The threads that read what is not in memory, so that the loop does not wait for the device.

A fetch travels: `give` on the loop → one queue for all → whichever reader is free → `answer`, on that reader's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

_Read: TypeAlias = Callable[[], None]


class ReaderPool:
    """A fixed number of threads, started as they are needed. All calls come from one thread, the owner's."""

    def __init__(self, readers: int, *, is_daemon: bool = False) -> None:
        self._readers = readers
        self._is_daemon = is_daemon
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def give(self, job: _Read) -> None:
        """Have it carried out soon. It may not raise."""
        if len(self._threads) < self._readers:
            name = f"disk-reader:{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=self._is_daemon)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let them finish what they were given, and end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
