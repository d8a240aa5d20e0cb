"""A broker as one copy of a broker group. `fairway.replication.copy_lifecycle` runs its life.

`GroupSwitches` are the consumer groups that are switched off on all brokers (`fairway subject pause`). The switch is in
the registry. The meta server notifies clients at once, and they stop pulling. The broker's check is for clients that
ask no meta server: the broker hands nothing out to a group that is off.

It knows the records of the subjects that consumers pull from. One watch on the tree of subjects names the changed ones.
`run` reads them, and subjects that are new to it, 100 at a time. It reads all of them again every 60 s, in case the
registry loses a watch. Until the first read of a subject, its groups are on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import FairwayError, Misuse
from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import Describe, Index, Names, Retrace, Scan
from fairway.registry.layout import SUBJECTS, SubjectRecord, subject_path, unpack
from fairway.registry.port import Node, Registry
from fairway.replication import leadership
from fairway.replication.copies import CopyOptions, CopyRuntime, CopyStatus, Face
from fairway.replication.copy_lifecycle import CopyLifecycle
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk
from fairway.serving.http import ProbePages
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability

__all__ = ["BrokerCopy", "CopyOptions", "CopyRuntime"]

AGAIN_S = 60.0  # everything is read again; subjects without a pull for so long are forgotten, unless a group is off
RETRY_S = 0.5
READ_AT_ONCE = 100
_NS = 1_000_000_000
_READS = (Scan, Describe, Index, Names, Retrace)


class _SeenSwitch:
    __slots__ = ("asked_ns", "off")

    def __init__(self) -> None:
        self.off: frozenset[str] = frozenset()
        self.asked_ns = 0


class GroupSwitches:
    """The switches, for one copy of a broker group. `run` reads the registry; `is_off` only looks up what `run` has
    read."""

    def __init__(self, registry: Registry, clock: Clock, on_change: Callable[[Subject], None]) -> None:
        self._on_change = on_change
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
                self._on_change(subject)
        return True


def _off(path: str, node: Node | None, before: frozenset[str]) -> frozenset[str]:
    try:
        return frozenset() if node is None else frozenset(unpack(SubjectRecord, path, node.value).paused)
    except FairwayError:  # unreadable: the last known switches stay in force
        return before


class BrokerCopy(CopyLifecycle[Broker]):
    """One copy. `await BrokerCopy.start(...)`, then `await member.stop()`."""

    kind = leadership.BROKER

    def __init__(self, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions) -> None:
        if options.store.durability is Durability.MEMORY:
            raise Misuse("durability `memory` is for a broker without replicas: leave it out, or leave out the group")
        face = Face(options.host, options.port, options.http_port, options.connection.name)
        copy_status = CopyStatus(membership.group, _READS)
        super().__init__(world, membership, face, copy_status, ProbePages(world.net, lambda: copy_status.why))
        self._options = replace(options, http_port=None)  # the copy answers probes, also while it has no server
        self._switches = GroupSwitches(world.registry, world.clock, self._wake_switched)
        self._measured: tuple[int, int, int] = (0, 0, 0)  # when, and the counts at that time

    @classmethod
    async def start(cls, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions) -> BrokerCopy:
        """Open the directory, listen, and begin to take part. The copy learns its role later."""
        member = cls(world, options, membership)
        await member.begin()
        return member

    async def begin(self) -> None:
        await super().begin()
        self._begin("switches", self._switches.run())

    async def stop(self) -> None:
        self._cancel("switches")
        await super().stop()

    @property
    def broker(self) -> Broker | None:
        """None while the directory is being opened."""
        return self.server

    async def _serve(self, disk: Disk, adopt: DirectoryIdentity | None) -> Broker:
        world = BrokerWorld(self._world.clock, disk, self._world.net, self._world.rng, self._world.pool)
        options = replace(self._options, port=self.face.port)
        return await Broker.follow(
            world, options, self.copy_status, adopt, jobs=self._world.jobs, is_off=self._switches.is_off
        )

    def _wake_switched(self, subject: Subject) -> None:
        if self.server is not None:
            self.server.wake_switched(subject)

    def _load(self, server: Broker, now_ns: int) -> dict[str, float]:
        before_ns, messages, size = self._measured
        passed_s = max(now_ns - before_ns, 1) / 1e9
        produced = server.produce
        self._measured = (now_ns, produced.messages, produced.bytes)
        return {
            "messages_per_s": max(round((produced.messages - messages) / passed_s), 0),
            "bytes_per_s": max(round((produced.bytes - size) / passed_s), 0),
            "free_bytes": server.store.free_bytes(),
            "subjects": len(server.store.messages.views.subjects),
            "rotten_spans": len(server.store.rotten),
        }
