"""Consumer groups that are switched off on all brokers (`fairway subject pause`): the switch is in the registry.

The meta server notifies clients at once, and they stop pulling. The broker's check is for clients that ask no meta
server: the broker hands nothing out to a group that is off.

`GroupSwitches` knows the records of the subjects that consumers pull from. One watch on the tree of subjects names the
changed ones. `run` reads them, and subjects that are new to it, 100 at a time. It reads all of them again every 60 s,
in case the registry loses a watch. Until the first read of a subject, its groups are on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain, islice

from fairway.errors import FairwayError
from fairway.names import GroupName, Subject
from fairway.registry.layout import SUBJECTS, SubjectRecord, subject_path, unpack
from fairway.registry.port import Node, Registry
from fairway.runtime.clock import Clock

AGAIN_S = 60.0  # everything is read again; subjects without a pull for so long are forgotten, unless a group is off
RETRY_S = 0.5
READ_AT_ONCE = 100
_NS = 1_000_000_000


class _SeenSwitch:
    __slots__ = ("asked_ns", "off")

    def __init__(self) -> None:
        self.off: frozenset[str] = frozenset()
        self.asked_ns = 0


class GroupSwitches:
    """The switches, for one copy of a broker group. `run` reads the registry; `is_off` only looks up what `run` has
    read."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self.on_change: Callable[[Subject], None] = lambda _: None
        self._registry = registry
        self._now_ns = clock.monotonic_ns
        self._seen: dict[Subject, _SeenSwitch] = {}
        self._by_path: dict[str, Subject] = {}
        self._turned: dict[Subject, None] = {}  # changed: read first
        self._stale: dict[Subject, None] = {}  # not read yet, or possibly changed
        self._stirred = asyncio.Event()

    def is_off(self, subject: Subject, group: GroupName) -> bool:
        seen = self._seen.get(subject)
        if seen is None:
            seen = self._seen[subject] = _SeenSwitch()
            self._by_path[subject_path(str(subject))] = subject
            self._mark(subject)
        seen.asked_ns = self._now_ns()
        return group in seen.off

    async def run(self) -> None:
        """Read the registry until cancelled."""
        watch = self._registry.watch_tree(SUBJECTS, self._changed)
        again_ns = self._now_ns() + int(AGAIN_S * _NS)
        try:
            while True:
                try:
                    async with asyncio.timeout(max(again_ns - self._now_ns(), 0) / _NS):
                        await self._stirred.wait()
                except TimeoutError:
                    again_ns = self._now_ns() + int(AGAIN_S * _NS)
                    self._forget()
                    self._changed(SUBJECTS)
                if not await self._read():
                    await asyncio.sleep(RETRY_S)
                if not self._turned and not self._stale:
                    self._stirred.clear()
        finally:
            watch.cancel()

    def _changed(self, path: str) -> None:
        if path == SUBJECTS:
            for subject in self._seen:
                self._mark(subject)
        elif (known := self._by_path.get(path)) is not None:
            self._turned[known] = None
            self._stirred.set()

    def _mark(self, subject: Subject) -> None:
        self._stale[subject] = None
        self._stirred.set()

    def _forget(self) -> None:
        """Forget subjects that no consumer has pulled from of late. Subjects with a group that is off stay: otherwise
        the next pull would find the group on."""
        before_ns = self._now_ns() - int(AGAIN_S * _NS)
        for subject, seen in [*self._seen.items()]:
            if seen.asked_ns < before_ns and not seen.off:
                del self._seen[subject]
                del self._by_path[subject_path(str(subject))]
                self._stale.pop(subject, None)
                self._turned.pop(subject, None)

    async def _read(self) -> bool:
        """Read the next subjects. False: the registry does not answer, and the last known switches stay in force."""
        subjects = [*dict.fromkeys(islice(chain(self._turned, self._stale), READ_AT_ONCE))]
        for subject in subjects:
            self._turned.pop(subject, None)
            self._stale.pop(subject, None)
        paths = [subject_path(str(subject)) for subject in subjects]
        try:
            nodes = await self._registry.get_many(paths)
        except FairwayError:
            self._stale.update(dict.fromkeys(each for each in subjects if each in self._seen))
            return False
        for subject, path, node in zip(subjects, paths, nodes, strict=True):
            seen = self._seen.get(subject)
            if seen is not None and (off := _off(path, node, seen.off)) != seen.off:
                seen.off = off
                self.on_change(subject)
        return True


def _off(path: str, node: Node | None, before: frozenset[str]) -> frozenset[str]:
    try:
        return frozenset() if node is None else frozenset(unpack(SubjectRecord, path, node.value).paused)
    except FairwayError:  # unreadable: the last known switches stay in force
        return before
