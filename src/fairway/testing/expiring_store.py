"""A store in memory for `fairway.ExpiringInbox`, on a clock that tests may move."""

from __future__ import annotations

from typing import NamedTuple

from fairway.client.idempotence import ClaimState
from fairway.runtime.clock import Clock, RealClock


class _ExpiringEntry(NamedTuple):
    holder: str | None  # None: done
    until_ns: int


class MemoryStore:
    """An `ExpiringStore` for handlers that are plain functions. Several inboxes may share a store, as with Redis."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._entries: dict[str, _ExpiringEntry] = {}

    def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        now_ns = self._clock.monotonic_ns()
        mine = _ExpiringEntry(holder, now_ns + hold_ms * 1_000_000)
        found = self._entries.setdefault(key, mine)  # atomic among threads
        if found is mine:
            return ClaimState.MINE
        if found.until_ns <= now_ns:
            self._remove(key, found)
            return self.claim(key, holder, hold_ms)
        return ClaimState.DONE if found.holder is None else ClaimState.BUSY

    def finish(self, key: str, keep_ms: int) -> None:
        self._entries[key] = _ExpiringEntry(None, self._clock.monotonic_ns() + keep_ms * 1_000_000)

    def drop(self, key: str, holder: str) -> None:
        found = self._entries.get(key)
        if found is not None and found.holder == holder:
            self._remove(key, found)

    def _remove(self, key: str, entry: _ExpiringEntry) -> None:
        if self._entries.get(key) is entry:
            self._entries.pop(key, None)


class AsyncMemoryStore:
    """An `AsyncExpiringStore`, for `async def` handlers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._store = MemoryStore(clock)

    async def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        return self._store.claim(key, holder, hold_ms)

    async def finish(self, key: str, keep_ms: int) -> None:
        self._store.finish(key, keep_ms)

    async def drop(self, key: str, holder: str) -> None:
        self._store.drop(key, holder)
