"""A broker as one copy of a broker group. `fairway.replication.copy_lifecycle` runs its life."""

from __future__ import annotations

from dataclasses import replace

from fairway.broker.group_switches import GroupSwitches
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Misuse
from fairway.protocol.admin_messages import Describe, Index, Names, Retrace, Scan
from fairway.replication import leadership
from fairway.replication.copies import CopyOptions, CopyRuntime, CopyStatus, Face
from fairway.replication.copy_lifecycle import CopyLifecycle
from fairway.runtime.disk import Disk
from fairway.scheduling import RunOrder
from fairway.serving.http import Pages, ProbePages
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability

__all__ = ["BrokerCopy", "CopyOptions", "CopyRuntime"]

_READS = (Scan, Describe, Index, Names, Retrace)


class BrokerCopy(CopyLifecycle[Broker]):
    """One copy. `await BrokerCopy.start(...)`, then `await member.stop()`."""

    kind = leadership.BROKER

    def __init__(
        self, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions, order: RunOrder | None = None
    ) -> None:
        if options.store.durability is Durability.MEMORY:
            raise Misuse("durability `memory` is for a broker without replicas: leave it out, or leave out the group")
        face = Face(options.host, options.port, options.http_port, options.connection.name)
        super().__init__(world, membership, face, CopyStatus(membership.group, _READS))
        self._options = replace(
            options, http_port=None
        )  # the copy answers probes itself, whatever becomes of its server
        self._probes = ProbePages(world.net, lambda: self.copy_status.why)
        self._order = order
        self._switches = GroupSwitches(world.registry, world.clock)
        self._measured: tuple[int, int, int] = (0, 0, 0)  # when, and the counts at that time

    @classmethod
    async def start(
        cls, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions, order: RunOrder | None = None
    ) -> BrokerCopy:
        """Open the directory, listen, and begin to take part. The copy learns its role later."""
        member = cls(world, options, membership, order)
        await member.begin()
        return member

    async def begin(self) -> None:
        http_port = await self._probes.listen(self.face.host, self.face.http_port)
        self.face = replace(self.face, http_port=http_port)
        try:
            await super().begin()
        except BaseException:  # also when the task is cancelled
            self._probes.close()
            raise
        self._begin("switches", self._switches.run())

    async def stop(self) -> None:
        self._cancel("switches")
        try:
            await super().stop()
        finally:
            self._probes.close()

    @property
    def pages(self) -> Pages:
        """The pages for probes, whatever becomes of the data directory."""
        return self._probes.pages

    def _let_go(self) -> None:
        super()._let_go()
        self._probes.closed()

    @property
    def broker(self) -> Broker | None:
        """None while the directory is being opened."""
        return self.server

    async def _serve(self, disk: Disk, adopt: DirectoryIdentity | None) -> Broker:
        world = BrokerWorld(self._world.clock, disk, self._world.net, self._world.rng, self._world.pool)
        options = replace(self._options, port=self.face.port)
        broker = await Broker.follow(world, options, self.copy_status, adopt, self._order, jobs=self._world.jobs)
        self._probes.opened(broker.pages)
        broker.coordinator.is_off, self._switches.on_change = self._switches.is_off, broker.wake_switched
        return broker

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
