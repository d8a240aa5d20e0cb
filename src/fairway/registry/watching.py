"""Who wants to know of which node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable


class Watching:
    """One who does."""

    def __init__(self, watches: Watches, path: str, changed: Callable[[], None]) -> None:
        self._watches = watches
        self._path = path
        self._changed = changed
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        self._watches.drop(self._path, self)

    def call(self) -> None:
        if not self._is_cancelled:
            self._changed()


class Watches:
    """The watches of one session. They are called by the loop, one by one, never from within a call to the registry."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: dict[str, list[Watching]] = {}

    def add(self, path: str, changed: Callable[[], None]) -> Watching:
        watching = Watching(self, path, changed)
        self._at.setdefault(path, []).append(watching)
        return watching

    def drop(self, path: str, watching: Watching) -> None:
        left = [each for each in self._at.get(path, ()) if each is not watching]
        if left:
            self._at[path] = left
        else:
            self._at.pop(path, None)

    @property
    def paths(self) -> list[str]:
        return list(self._at)

    def __contains__(self, path: str) -> bool:
        return path in self._at

    def tell(self, paths: Iterable[str]) -> None:
        """These have changed, or may have."""
        for path in paths:
            for watching in self._at.get(path, ()):
                self._loop.call_soon(watching.call)

    def tell_all(self) -> None:
        self.tell(self.paths)

    def clear(self) -> None:
        for watchings in list(self._at.values()):
            for watching in watchings:
                watching.cancel()
