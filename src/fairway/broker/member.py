"""One copy of a broker group; `replication.member` has the life of it."""

from __future__ import annotations

from dataclasses import replace

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.broker.switches import GroupSwitches
from fairway.errors import Misuse
from fairway.protocol.admin import Describe, Scan
from fairway.protocol.tracing import Index, Names, Retrace
from fairway.replication import law
from fairway.replication.member import CopyLifecycle
from fairway.replication.membership import CopyOptions, CopyRuntime, Face
from fairway.replication.standing import CopyStatus
from fairway.scheduling import RunOrder
from fairway.serving.http import Pages
from fairway.serving.probe_pages import ProbePages
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability
from fairway.world.disk import Disk

__all__ = ["BrokerCopy", "CopyOptions", "CopyRuntime"]

_READS = (Scan, Describe, Index, Names, Retrace)


class BrokerCopy(CopyLifecycle[Broker]):
    """One copy. `await BrokerCopy.start(...)`, then `await member.stop()`."""

    kind = law.BROKER

    def __init__(
        self, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions, order: RunOrder | None = None
    ) -> None:
        if options.store.durability is Durability.MEMORY:
            raise Misuse("durability `memory` is for a broker without replicas: leave it out, or leave out the group")
        face = Face(options.host, options.port, options.http_port, options.connection.name)
        super().__init__(world, membership, face, CopyStatus(membership.group, _READS))
        self._options = replace(
            options, http_port=None
        )  # probes are answered by the copy, whatever becomes of a server
        self._probes = ProbePages(world.net, lambda: self.standing.why)
        self._order = order
        self._switches = GroupSwitches(world.registry, world.clock)
        self._measured: tuple[int, int, int] = (0, 0, 0)  # when, and how much there had been

    @classmethod
    async def start(
        cls, world: CopyRuntime, options: BrokerOptions, membership: CopyOptions, order: RunOrder | None = None
    ) -> BrokerCopy:
        """Open the directory, listen, and begin to take part. What this copy does is decided by and by."""
        member = cls(world, options, membership, order)
        await member.begin()
        return member

    async def begin(self) -> None:
        http_port = await self._probes.listen(self.face.host, self.face.http_port)
        self.face = replace(self.face, http_port=http_port)
        try:
            await super().begin()
        except BaseException:  # also where it is called off
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
        """What probes are shown, whatever becomes of the data directory."""
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
        broker = await Broker.follow(world, options, self.standing, adopt, self._order, jobs=self._world.jobs)
        self._probes.opened(broker.pages)
        broker.desk.is_off, self._switches.on_change = self._switches.is_off, broker.wake_switched
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
