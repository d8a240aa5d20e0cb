"""Who wants to know of which node, or of everything below one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from fairway.registry.tree import is_below

_WatchTable: TypeAlias = "dict[str, list[Watching]]"


class Watching:
    """One who does."""

    def __init__(self, table: _WatchTable, path: str, changed: Callable[..., None]) -> None:
        self._table = table
        self._path = path
        self._changed = changed
        self._is_cancelled = False
        table.setdefault(path, []).append(self)

    def cancel(self) -> None:
        self._is_cancelled = True
        left = [each for each in self._table.get(self._path, ()) if each is not self]
        if left:
            self._table[self._path] = left
        else:
            self._table.pop(self._path, None)

    def call(self, *below: str) -> None:
        if not self._is_cancelled:
            self._changed(*below)


class SessionWatches:
    """The watches of one session. They are called by the loop, one by one, never from within a call to the registry."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: _WatchTable = {}
        self._below: _WatchTable = {}

    def add(self, path: str, changed: Callable[[], None]) -> Watching:
        return Watching(self._at, path, changed)

    def add_tree(self, path: str, changed: Callable[[str], None]) -> Watching:
        return Watching(self._below, path, changed)

    @property
    def paths(self) -> list[str]:
        return list(self._at)

    @property
    def trees(self) -> list[str]:
        """The nodes below which everything is watched."""
        return list(self._below)

    def __contains__(self, path: str) -> bool:
        return path in self._at

    def tell(self, paths: Iterable[str]) -> None:
        """These have changed, or may have."""
        for path in paths:
            for watching in self._at.get(path, ()):
                self._loop.call_soon(watching.call)

    def tell_below(self, paths: Iterable[str]) -> None:
        """The same to those who watch a tree that they are in."""
        for path in paths:
            for root, watchings in self._below.items():
                if is_below(path, root):
                    for watching in watchings:
                        self._loop.call_soon(watching.call, path)

    def tell_tree(self, root: str) -> None:
        """Anything below that node may have changed."""
        for watching in self._below.get(root, ()):
            self._loop.call_soon(watching.call, root)

    def tell_all(self) -> None:
        self.tell(self.paths)
        for root in self.trees:
            self.tell_tree(root)

    def clear(self) -> None:
        for table in (self._at, self._below):
            for watchings in list(table.values()):
                for watching in watchings:
                    watching.cancel()
