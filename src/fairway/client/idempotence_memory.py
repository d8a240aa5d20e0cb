"""An inbox in memory, for effects that live in this process too: a cache, a table of prices, a running sum.

When the process dies, effect and record are gone together, and the messages that were not acked come again.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from typing import Final

from fairway.client.core import Duration, seconds_of
from fairway.client.idempotence import By
from fairway.client.idempotence_claims import Claims
from fairway.errors import Misuse
from fairway.world.clock import Clock, RealClock
from fairway.world.gate import Lock
from fairway.world.latch import Latch

MESSAGES_MAX: Final = 100_000  # about 20 MB
KEEP: Final = timedelta(hours=1)


class MemoryInbox(Claims):
    """Remembers the last `messages_max` messages for `keep`. A message that another thread or task has in hand is
    waited for: if that one fails, it is handled here after all."""

    def __init__(
        self,
        messages_max: int = MESSAGES_MAX,
        keep: Duration = KEEP,
        *,
        by: By = None,
        replays: bool = True,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(by, replays=replays)
        if messages_max < 1:
            raise Misuse(f"MemoryInbox(messages_max={messages_max}): at least 1")
        self._messages_max = messages_max
        self._keep_ns = int(seconds_of(keep) * 1e9)
        self._clock = clock or RealClock()
        self._lock = Lock()
        self._in_process: dict[str, Latch] = {}
        self._done: OrderedDict[str, int] = OrderedDict()  # until when, in ns; those that end first are first

    def __len__(self) -> int:
        """Messages that are remembered as done."""
        return len(self._done)

    def _claim(self, key: str, holder: str) -> bool:
        while isinstance(found := self._look(key), Latch):
            found.wait()
        return found

    async def _claim_async(self, key: str, holder: str) -> bool:
        while isinstance(found := self._look(key), Latch):
            await found.wait_async()
        return found

    def _look(self, key: str) -> Latch | bool:
        """True: it is ours now. False: it is done. A latch: somebody is at it, until it opens."""
        with self._lock:
            self._forget()
            if key in self._done:
                return False
            if key in self._in_process:
                return self._in_process[key]
            self._in_process[key] = Latch()
            return True

    def _finish(self, key: str) -> None:
        with self._lock:
            self._done[key] = self._clock.monotonic_ns() + self._keep_ns
            latch = self._in_process.pop(key)
        latch.open()

    async def _finish_async(self, key: str) -> None:
        self._finish(key)

    def _drop(self, key: str, holder: str) -> None:
        with self._lock:
            latch = self._in_process.pop(key)
        latch.open()

    async def _drop_async(self, key: str, holder: str) -> None:
        self._drop(key, holder)

    def _forget(self) -> None:
        now_ns = self._clock.monotonic_ns()
        while self._done:
            key, until_ns = next(iter(self._done.items()))
            if until_ns > now_ns and len(self._done) <= self._messages_max:
                return
            del self._done[key]
