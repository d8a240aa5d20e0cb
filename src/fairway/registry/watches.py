"""Watches of one registry session: on single nodes, and on everything below a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from fairway.registry.tree import is_below

_WatchTable: TypeAlias = "dict[str, list[Watching]]"


class Watching:
    """One watch."""

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
    """The watches of one session. The loop calls them one by one, never from within a call to the registry."""

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
        """Call the watches of these nodes, which have changed or may have changed."""
        for path in paths:
            for watching in self._at.get(path, ()):
                self._loop.call_soon(watching.call)

    def tell_below(self, paths: Iterable[str]) -> None:
        """Call the tree watches that these nodes are below of."""
        for path in paths:
            for root, watchings in self._below.items():
                if is_below(path, root):
                    for watching in watchings:
                        self._loop.call_soon(watching.call, path)

    def tell_tree(self, root: str) -> None:
        """Call the tree watches of a node: anything below it may have changed."""
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
