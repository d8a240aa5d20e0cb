"""A tree watch made of ordinary ones, for servers that have no other (ZooKeeper before 3.6): two levels deep.

One watch on the node and one on each of its children: it costs what there is below, at the start and after each
connection. Names that come and go are found by comparing lists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fairway.registry.port import Registry, RegistryError, Watch

_RETRY_S = 0.5


class TreeEmulation:
    """Calls `told` with the path of a child that was made, changed or removed, and with the root's after trouble."""

    def __init__(self, registry: Registry, root: str, told: Callable[[str], None]) -> None:
        self._registry = registry
        self._root = root
        self._told = told
        self._watches: dict[str, Watch] = {}
        self._changed = asyncio.Event()
        self._changed.set()
        self._watch = registry.watch(root, self._changed.set)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registry-tree")

    def cancel(self) -> None:
        self._task.cancel()
        self._watch.cancel()
        for watch in self._watches.values():
            watch.cancel()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                names = dict.fromkeys(await self._registry.children(self._root))
            except RegistryError:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
                continue
            for name in [each for each in self._watches if each not in names]:
                self._watches.pop(name).cancel()
                self._told(f"{self._root}/{name}")
            for name in names:
                if name not in self._watches:  # a watch is called once it is armed
                    path = f"{self._root}/{name}"
                    self._watches[name] = self._registry.watch(path, partial(self._told, path))
