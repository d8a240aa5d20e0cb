"""Copies of a delay server in one simulated world: with a registry, a meta server, and brokers that nothing befalls."""

from __future__ import annotations

from typing import Any

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.delay.engine import DelayOptions
from fairway.delay.server import DelayCopy, ServerOptions
from fairway.limits import KIB
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.route_messages import Govern, Governed, RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.replication.copies import CopyOptions
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.storage import retention
from fairway.storage.store import StoreOptions
from tests.simulation.broker_clients import PORT
from tests.simulation.cluster_world import Cluster
from tests.simulation.copies_history import MEMBER, SIMULATED_FAULTS, TICK_MS
from tests.support.client import Client

META, META_PORT = "m1", 20882
BROKERS = ("east", "west")
SUBJECTS = {"orders": ("east",), "trips": ("east", "west")}
STORE = StoreOptions(  # little is kept in logs: who was away for a while, or is new, needs a snapshot
    segment_bytes=4 * KIB,
    action_segment_bytes=4 * KIB,
    low_water_bytes=0,
    checkpoint_every_bytes=4 * KIB,
    retention=retention.Policy(bytes_max=0),
    keeps_actions=False,
)
OPTIONS = DelayOptions(store=STORE, messages_per_step=16, hold_ms=20, catalogue_messages=16, remembered_max=30)


class DelayCluster(Cluster):
    """The copies of one delay group, and those it sends to."""

    def __init__(
        self, world: Simulation, copies: int = 2, *, membership: CopyOptions = MEMBER, options: DelayOptions = OPTIONS
    ) -> None:
        super().__init__(world, copies, membership=membership, tick_ms=TICK_MS, simulated_faults=SIMULATED_FAULTS)
        self.options = options
        self.brokers: dict[str, Broker] = {}
        self.meta: MetaServer | None = None

    async def found(self) -> None:
        """Brokers, each alone in its group, and a meta server that knows them."""
        hand = self.ensemble.client("hand")
        for name in BROKERS:
            disk = SimDisk(self.world.rng.child(f"disk-{name}"), self.world.loop.call_later)
            world = BrokerWorld(self.world.clock, disk, self.world.net.host(name), self.world.rng.child(name))
            store = StoreOptions(action_segment_bytes=64 * KIB, low_water_bytes=0)
            options = BrokerOptions(host=name, port=PORT, allow_remote=True, store=store)
            self.brokers[name] = await Broker.start(world, options)
            record = GroupRecord("broker", 1, f"{name}-copy", [f"{name}-copy"])
            await hand.create(layout.group_path(name), layout.pack(record))
            shown = RegisteredCopy(f"{name}-copy", name, PORT, role="master")
            await hand.create(layout.member_path(name, f"{name}-copy"), layout.pack(shown))
        registry = self.ensemble.client(META)
        meta = MetaWorld(self.world.clock, self.world.net.host(META), self.world.rng.child(META), registry)
        self.meta = await MetaServer.start(meta, MetaOptions(host=META, port=META_PORT, allow_remote=True))
        client = await Client.connect(self.world.net.host("operator"), self.world.clock, META, META_PORT)
        for subject, groups in SUBJECTS.items():
            await client.ask(Govern(RouteChange.CREATE, subject, list(groups)), Governed)
        client.close()

    async def start(self, name: str) -> Any:
        copy = self.copies[name]
        options = ServerOptions(host=name, port=PORT, allow_remote=True, drain_ms_max=100, delay=self.options)
        member = await DelayCopy.start(self._new_life(copy), options, self.membership, ((META, META_PORT),))
        copy.member = member  # type: ignore[assignment]
        return member

    def _hush(self, member: Any) -> None:
        if member.server is not None:
            for each in (member.server._target_finder, member.server._snapshots):
                if each is not None:
                    each.close()
            member.server.delay.fall_silent()

    @property
    def engines(self) -> dict[str, Any]:
        """Of the copies that live and are open, by name."""
        members: dict[str, Any] = {copy.name: copy.member for copy in self.copies.values()}
        return {
            name: each.server.delay.engine
            for name, each in members.items()
            if each is not None and each.server is not None
        }

    def _ends(self, member: Any) -> object:
        store = None if member.server is None else member.server.store
        return None if store is None else (store.ends(), store.committed_ends(), store.first_bases())
