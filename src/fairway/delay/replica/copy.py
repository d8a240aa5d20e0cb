"""One copy of a group of delay servers.

The lifecycle of a copy is in `fairway.replication.copy_lifecycle`; this module adds what a delay server needs.

The two logs of a copy are its master's: the scheduled messages, and the decisions about them. Its buckets are its own,
made from these logs by its engine.

A master sends due messages to the brokers that meta servers name. If meta servers keep the registry, its URL names
them. Otherwise the copy reads them from the registry, where they register, and notices new ones. While none is
registered, the copy still tries the ones it knew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fairway.delay.dispatch.targets import parse_place
from fairway.delay.engine import Engine
from fairway.delay.replica import install, snapshot
from fairway.delay.replica.snapshot import SnapshotReceiver
from fairway.delay.server import DelayServer, ServerOptions
from fairway.delay.service import DelayWorld
from fairway.protocol.admin_messages import Describe
from fairway.registry import layout
from fairway.registry.port import RegistryError, SessionState
from fairway.replication import leadership
from fairway.replication.copies import CopyOptions, CopyRuntime, CopyStatus, Face
from fairway.replication.copy_lifecycle import CopyLifecycle
from fairway.replication.follower import TooFarBehind
from fairway.replication.leader import QUESTIONS
from fairway.runtime.blocking_connection import Address
from fairway.runtime.disk import Disk
from fairway.serving.http import Pages, ProbePages
from fairway.storage.directory import DirectoryIdentity

_READS = (Describe,)
_QUESTIONS = (*QUESTIONS, *snapshot.QUESTIONS)
_RETRY_S = 1.0
_TARGETS_SHOWN_MAX = 16
_FREE_BYTES_STEP = 64 << 20  # a metric that is reported only when it has changed by so much


class DelayCopy(CopyLifecycle[DelayServer]):
    """One copy. `await DelayCopy.start(...)`, then `await member.stop()`."""

    kind = leadership.DELAY

    def __init__(
        self,
        world: CopyRuntime,
        options: ServerOptions,
        membership: CopyOptions,
        metas: tuple[Address, ...] = (),
        open_schedule_disk: Callable[[], Disk] | None = None,
    ) -> None:
        """`metas`: the meta servers; empty: those that the registry names. With `open_schedule_disk`, the logs have the
        copy's disk for themselves, and the buckets are on the schedule disk."""
        face = Face(options.host, options.port, options.http_port, options.connection.name)
        super().__init__(world, membership, face, CopyStatus(membership.group, _READS, _QUESTIONS))
        self._options = replace(options, http_port=None)  # the copy answers probes, also while it has no server
        self._probes = ProbePages(world.net, lambda: self.copy_status.why)
        self._metas = metas
        self._open_schedule_disk = open_schedule_disk
        self._looked = asyncio.Event()
        self._measured: tuple[int, int] = (0, 0)  # when, and how many messages there were

    @classmethod
    async def start(
        cls,
        world: CopyRuntime,
        options: ServerOptions,
        membership: CopyOptions,
        metas: tuple[Address, ...] = (),
        open_schedule_disk: Callable[[], Disk] | None = None,
    ) -> DelayCopy:
        """Open the directory, listen, and begin to take part. The copy becomes master or replica later."""
        member = cls(world, options, membership, metas, open_schedule_disk)
        await member.begin()
        return member

    async def begin(self) -> None:
        http_port = await self._probes.listen(self.face.host, self.face.http_port)
        self.face = replace(self.face, http_port=http_port)
        try:
            await super().begin()
        except BaseException:  # also a cancellation
            self._probes.close()
            raise
        if not self._metas:
            self._world.registry.watch(layout.METAS, self._looked.set)
            self._begin("metas", self._look())

    async def stop(self) -> None:
        self._cancel("metas")
        try:
            await super().stop()
        finally:
            self._probes.close()

    @property
    def pages(self) -> Pages:
        """The pages for probes, also while the data directory is closed."""
        return self._probes.pages

    def _let_go(self) -> None:
        super()._let_go()
        self._probes.closed()

    # --- the server --------------------------------------------------------------------------------------------------

    async def _serve(self, disk: Disk, adopt: DirectoryIdentity | None) -> DelayServer:
        clock, net, rng = self._world.clock, self._world.net, self._world.rng
        if self._open_schedule_disk is None:
            world = DelayWorld(clock, disk, net, rng)
        else:
            world = DelayWorld(clock, self._open_schedule_disk(), net, rng, log_disk=disk)
        options = replace(self._options, port=self.face.port)
        server = await DelayServer.follow(world, options, self.copy_status, adopt, jobs=self._world.jobs)
        server.ask_at(self._metas)
        self._probes.opened(server.pages)
        return server

    def _refill(self, server: DelayServer) -> SnapshotReceiver:
        return SnapshotReceiver(server.delay.engine, server.disks)

    def _begin_anew(self, remedy: TooFarBehind, adopt: DirectoryIdentity) -> list[str]:
        """Install the received snapshot. Messages that wait longest are in no log any more, so logs alone do not
        suffice."""
        logs = self._world.open_disk()
        schedule = logs if self._open_schedule_disk is None else self._open_schedule_disk()
        try:
            aside = install.install(logs, schedule, self._world.rng, adopt, remedy.epoch)
        finally:
            logs.close()
            schedule.close()
        return [f"set aside: {name}" for name in aside]

    def _load(self, server: DelayServer, now_ns: int) -> dict[str, float]:
        engine = server.delay.engine
        before_ns, before = self._measured
        self._measured = (now_ns, engine.scheduled_total)
        passed_s = max(now_ns - before_ns, 1) / 1e9
        free_bytes = server.store.free_bytes() // _FREE_BYTES_STEP * _FREE_BYTES_STEP
        return {
            "messages_per_s": max(round((engine.scheduled_total - before) / passed_s, 1), 0.0),
            "pending_messages": float(engine.messages_pending),
            "free_bytes": float(free_bytes),
            "rotten_spans": float(len(server.store.rotten) + server.delay.request_handler.damaged),
            **self._in_transit(engine),
        }

    def _in_transit(self, engine: Engine) -> dict[str, float]:
        """Messages that wait for a broker group, for the 16 groups with the most."""
        found = engine.in_transit() if self.copy_status.is_master else {}
        most = sorted(found, key=lambda name: (-found[name], name))[:_TARGETS_SHOWN_MAX]
        return {f"{layout.IN_TRANSIT}{name}": float(found[name]) for name in most}

    def _why_closed(self, server: DelayServer) -> str:
        return "" if server.store.has_room else "its disk is nearly full: make room"

    # --- meta servers ------------------------------------------------------------------------------------------------

    def _on_session(self, state: SessionState) -> None:
        super()._on_session(state)
        self._looked.set()

    async def _look(self) -> None:
        """Watch which meta servers are registered."""
        while True:
            self._looked.clear()
            try:
                names = await self._world.registry.children(layout.METAS)
            except RegistryError:
                await asyncio.sleep(_RETRY_S)
                continue
            self._metas = tuple(parse_place(name) for name in names) or self._metas
            if self.server is not None:
                self.server.ask_at(self._metas)
            await self._looked.wait()
