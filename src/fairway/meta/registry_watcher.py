"""Registry watcher: keeps the cluster state as the registry has it. It reads everything once, and then each change.

There are few groups and copies, and each of their nodes has a watch of its own. There are many subjects: one watch on
their tree names the changed ones, and the watcher reads up to 500 of them at a time. So a new subject costs the same
however many subjects there are (bench/subjects).

While the registry cannot be reached, the cluster state stays, and is marked as old. Answers from it are still the best
there are, because live brokers also go on without the registry for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import islice
from typing import TypeVar

from fairway.errors import FairwayError, RemoteProtocolError
from fairway.meta.cluster_state import ClusterState, Key
from fairway.protocol.line import RetryDelays
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy, SubjectRecord
from fairway.registry.port import Node, Registry, SessionState, Watch
from fairway.registry.tree import above
from fairway.runtime.rng import Rng
from fairway.runtime.service import cancel

_AT_ONCE = 32  # reads in flight, so that other requests have a turn
_SUBJECTS_AT_ONCE = 500  # in one read: about 5 ms of the loop
_RETRY_FIRST_MS = 100
_RETRY_MOST_MS = 2_000
_NS = 1_000_000_000

RecordT = TypeVar("RecordT", GroupRecord, RegisteredCopy, SubjectRecord)


class RegistryWatcher:
    """Reads, watches, reads again. It calls `told` with changed keys, and `remark` with news for people."""

    def __init__(
        self,
        registry: Registry,
        cluster_state: ClusterState,
        rng: Rng,
        told: Callable[[list[Key]], None],
        remark: Callable[[str], None],
    ) -> None:
        self.trouble = "the registry has not been read yet"  # why the cluster state may be old; empty: it is not
        self._registry = registry
        self._cluster_state = cluster_state
        self._told = told
        self._remark = remark
        self._backoff = RetryDelays(rng, first_ms=_RETRY_FIRST_MS, most_ms=_RETRY_MOST_MS)
        self._readers: dict[str, Callable[[], Coroutine[None, None, None]]] = {}  # by watched path
        self._watches: dict[str, Watch] = {}
        self._dirty: dict[str, None] = {}
        self._stirred = asyncio.Event()
        self._is_suspended = False
        self._loaded = asyncio.Event()
        self._records: dict[str, GroupRecord | None] = {}
        self._living: dict[str, dict[str, RegisteredCopy | None]] = {}  # by group and node; None: not read yet
        self._is_list_stale = False  # of all subjects
        self._stale: dict[str, None] = {}  # subjects to be read
        self._tree: Watch | None = None
        self._unreadable: dict[str, str] = {}  # unreadable nodes, and the remark about each
        self._task: asyncio.Task[None] | None = None

    # --- for the server ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._follow(layout.GROUPS, self._read_groups)
        self._follow(layout.METAS, self._read_metas)
        self._tree = self._registry.watch_tree(layout.SUBJECTS, self._mark_subject)
        self._mark_subject(layout.SUBJECTS)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fairway-meta-keeper")

    async def loaded(self) -> None:
        """Return when everything has been read once."""
        await self._loaded.wait()

    async def failed(self) -> None:
        """Return when the watcher has ended by itself, which only a bug causes."""
        if self._task is not None:
            await asyncio.wait([self._task])

    @property
    def is_old(self) -> bool:
        return bool(self.trouble) or self._is_suspended

    def why_old(self) -> str:
        return self.trouble or ("there is no connection to the registry" if self._is_suspended else "")

    def session_is(self, state: SessionState) -> None:
        """Handle a change of the registry session's state."""
        was_suspended, self._is_suspended = self._is_suspended, state is not SessionState.OPEN
        if self._is_suspended and not was_suspended:
            self._remark("the registry cannot be reached: answers are from what was known before")
        elif was_suspended and not self._is_suspended:
            self._remark("the registry is back")
            for path in self._readers:
                self._mark(path)
            self._mark_subject(layout.SUBJECTS)

    async def stop(self) -> None:
        if self._tree is not None:
            self._tree.cancel()
        for watch in self._watches.values():
            watch.cancel()
        await cancel([self._task])

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _follow(self, path: str, read: Callable[[], Coroutine[None, None, None]]) -> None:
        if path not in self._readers:
            self._readers[path] = read
            self._watches[path] = self._registry.watch(path, lambda: self._mark(path))
            self._mark(path)

    def _leave(self, path: str) -> None:
        self._readers.pop(path, None)
        self._dirty.pop(path, None)
        watch = self._watches.pop(path, None)
        if watch is not None:
            watch.cancel()

    def _mark(self, path: str) -> None:
        self._dirty[path] = None
        self._stirred.set()

    async def _run(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._dirty or self._is_list_stale or self._stale:
                paths = [*islice(self._dirty, _AT_ONCE)]
                for path in paths:
                    del self._dirty[path]
                reads = [self._read(path, self._readers[path]) for path in paths]
                if self._is_list_stale or self._stale:
                    reads.append(self._read("", self._read_subjects))
                outcomes = await asyncio.gather(*reads)
                if all(outcomes):
                    self._backoff.reset()
                else:
                    await asyncio.sleep(self._backoff.next_ns() / _NS)
            self.trouble = ""
            self._loaded.set()

    async def _read(self, path: str, reader: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Run a reader. Return whether the registry has answered. `path`: to be read again if not; "": the reader
        knows."""
        try:
            await reader()
        except FairwayError as error:
            sentence = f"the registry does not answer: {error}"
            if not self.trouble:
                self._remark(sentence)
            self.trouble = sentence
            if path in self._readers:
                self._mark(path)
            return False
        return True

    # --- records -----------------------------------------------------------------------------------------------------

    async def _record(self, kind: type[RecordT], path: str, before: RecordT | None) -> RecordT | None:
        """The record of a node. An unreadable node is remarked on once, and its previous record stays in force."""
        return self._unpacked(kind, path, await self._registry.get(path), before)

    def _unpacked(self, kind: type[RecordT], path: str, node: Node | None, before: RecordT | None) -> RecordT | None:
        if node is None or not node.value:
            return None
        try:
            record = layout.unpack(kind, path, node.value)
        except RemoteProtocolError as error:
            if self._unreadable.get(path) != str(error):
                self._unreadable[path] = str(error)
                self._remark(str(error))
            return before
        self._unreadable.pop(path, None)
        return record

    async def _read_groups(self) -> None:
        names = await self._registry.children(layout.GROUPS)
        for name in [each for each in self._records if each not in names]:
            self._drop_group(name)
        for name in names:
            if name not in self._records:
                self._records[name] = None
                self._living[name] = {}
                self._follow(layout.group_path(name), partial(self._read_group, name))
                self._follow(layout.members_path(name), partial(self._read_members, name))

    def _drop_group(self, name: str) -> None:
        for place in self._living.pop(name):
            self._leave(layout.member_path(name, place))
        del self._records[name]
        self._leave(layout.group_path(name))
        self._leave(layout.members_path(name))
        self._say(self._cluster_state.put_group(name, None, {}))

    async def _read_group(self, name: str) -> None:
        record = await self._record(GroupRecord, layout.group_path(name), self._records.get(name))
        if name in self._records:
            self._records[name] = record
            self._say_group(name)

    async def _read_members(self, name: str) -> None:
        places = await self._registry.children(layout.members_path(name))
        living = self._living.get(name)
        if living is None:
            return
        for place in [each for each in living if each not in places]:
            del living[place]
            self._leave(layout.member_path(name, place))
        for place in places:
            if place not in living:
                living[place] = None
                self._follow(layout.member_path(name, place), partial(self._read_member, name, place))
        self._say_group(name)

    async def _read_member(self, name: str, place: str) -> None:
        before = self._living.get(name, {}).get(place)
        member = await self._record(RegisteredCopy, layout.member_path(name, place), before)
        living = self._living.get(name)
        if living is not None and place in living:
            living[place] = member
            self._say_group(name)

    def _say_group(self, name: str) -> None:
        living = layout.by_directory(each for each in self._living[name].values() if each is not None)
        self._say(self._cluster_state.put_group(name, self._records[name], living))

    def _mark_subject(self, path: str) -> None:
        """Note that a subject has changed, or that any subject may have."""
        if path == layout.SUBJECTS:
            self._is_list_stale = True
        elif above(path) == layout.SUBJECTS:
            self._stale[path.removeprefix(f"{layout.SUBJECTS}/")] = None
        self._stirred.set()

    async def _read_subjects(self) -> None:
        """Read the list of names if it may have changed, or else the next changed subjects."""
        if self._is_list_stale:
            await self._read_names()
            return
        names = [*islice(self._stale, _SUBJECTS_AT_ONCE)]
        for name in names:
            del self._stale[name]
        try:
            nodes = await self._registry.get_many([*map(layout.subject_path, names)])
        except FairwayError:
            self._stale.update(dict.fromkeys(names))
            raise
        for name, node in zip(names, nodes, strict=True):
            before = self._cluster_state.subjects.get(name)
            self._say(
                self._cluster_state.put_subject(
                    name, self._unpacked(SubjectRecord, layout.subject_path(name), node, before)
                )
            )

    async def _read_names(self) -> None:
        self._is_list_stale = False
        try:
            names = await self._registry.children(layout.SUBJECTS)
        except FairwayError:
            self._is_list_stale = True
            raise
        known = self._cluster_state.subjects
        self._stale.update(dict.fromkeys(names))
        self._stale.update(dict.fromkeys(known.keys() - self._stale.keys()))  # they are gone, or were created just now

    async def _read_metas(self) -> None:
        self._say(self._cluster_state.put_metas(await self._registry.children(layout.METAS)))

    def _say(self, keys: list[Key]) -> None:
        if keys:
            self._told(keys)
