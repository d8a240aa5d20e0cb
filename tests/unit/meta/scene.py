"""Meta servers before a simulated registry, on virtual time; tests write the records of brokers themselves.

@staged()
async def test_something(scene: Scene) -> None:
    await scene.lead("g1")
    routed = await scene.route(Asker.PRODUCER, "orders", may_create=True)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import ClientRole, Govern, Governed, Route, RouteChange, Routed
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy, SubjectRecord
from fairway.simulation import Simulation
from fairway.simulation.registry import SimEnsemble
from fairway.simulation.registry_client import SimRegistry
from tests.support.client import Client

PORT = 20882
Story = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """One ensemble, one or more meta servers, one who writes what brokers would write."""

    def __init__(self, metas: tuple[str, ...], options: dict[str, Any]) -> None:
        self.sim = Simulation("meta")
        self.ensemble = SimEnsemble(self.sim)
        self.options = options
        self.names = metas
        self.metas: dict[str, MetaServer] = {}
        self.remarks: list[str] = []
        self.hand: SimRegistry = None  # type: ignore[assignment]  # from `start` on
        self._clients: dict[str, Client] = {}
        self._lives = 0

    def play(self, story: Story) -> None:
        with self.sim:
            self.sim.run(self._play(story))

    async def _play(self, story: Story) -> None:
        self.hand = self.ensemble.client("hand")
        for name in self.names:
            await self.start(name)
        await story(self)
        for name in [*self.metas]:
            await self.stop(name)
        await self.hand.close()

    # --- meta servers -------------------------------------------------------------------------------------------------

    async def start(self, name: str) -> MetaServer:
        self._lives += 1
        registry = self.ensemble.client(name)
        rng = self.sim.rng.child(f"{name} {self._lives}")
        world = MetaWorld(self.sim.clock, self.sim.net.host(name), rng, registry)
        options = MetaOptions(host=name, port=PORT, allow_remote=True, **self.options)
        self.metas[name] = await MetaServer.start(world, options, self.remarks.append)
        return self.metas[name]

    async def stop(self, name: str) -> None:
        self._clients.pop(name, None)
        await self.metas.pop(name).stop()

    async def client(self, meta: str = "m1") -> Client:
        if meta not in self._clients or self._clients[meta].is_gone:
            self._clients[meta] = await self.dial(meta)
        return self._clients[meta]

    async def dial(self, meta: str = "m1") -> Client:
        """A connection of its own."""
        return await Client.connect(self.sim.net.host("client"), self.sim.clock, meta, PORT)

    async def route(
        self, asker: ClientRole, *subjects: str, meta: str = "m1", client: Client | None = None, **more: Any
    ) -> Routed:
        asked = Route(asker, list(subjects), **more)
        return (await (client or await self.client(meta)).ask(asked, Routed))[0]

    async def govern(self, change: RouteChange, name: str, *groups: str, meta: str = "m1", **more: Any) -> str:
        """What was done, for people."""
        asked = Govern(change, name, list(groups), **more)
        return (await (await self.client(meta)).ask(asked, Governed))[0].sentence

    async def ask(self, message: ControlMessage, kind: type[Any], meta: str = "m1") -> Any:
        return (await (await self.client(meta)).ask(message, kind))[0]

    # --- brokers ------------------------------------------------------------------------------------------------------

    async def lead(self, group: str, directory: str = "", port: int = 1, **more: Any) -> None:
        """A copy lives and leads the group."""
        directory = directory or f"{group}-a"
        record = await self.record(GroupRecord, layout.group_path(group))
        values: dict[str, Any] = {"kind": "broker", "epoch": 1, "in_sync": [directory], "members": [directory], **more}
        if record is not None:
            values["epoch"] = max(record.epoch + 1, values["epoch"])
        await self.write(layout.group_path(group), GroupRecord(master=directory, **values))
        await self.live(group, directory, port)

    async def live(self, group: str, directory: str, port: int = 1, **more: Any) -> None:
        member = RegisteredCopy(directory, group, port, **more)
        await self.write(layout.member_path(group, directory), member, is_ephemeral=True)

    async def die(self, group: str, directory: str = "") -> None:
        await self.hand.remove(layout.member_path(group, directory or f"{group}-a"))

    async def write(
        self, path: str, record: GroupRecord | RegisteredCopy | SubjectRecord, *, is_ephemeral: bool = False
    ) -> None:
        node = await self.hand.get(path, fresh=True)
        if node is None:
            await self.hand.create(path, layout.pack(record), is_ephemeral=is_ephemeral)
        else:
            await self.hand.put(path, layout.pack(record), node.version)

    async def change_group(self, group: str, **more: Any) -> None:
        record = await self.record(GroupRecord, layout.group_path(group))
        assert record is not None
        await self.write(layout.group_path(group), msgspec.structs.replace(record, **more))

    async def record(self, kind: type[Any], path: str) -> Any:
        node = await self.hand.get(path, fresh=True)
        return None if node is None or not node.value else layout.unpack(kind, path, node.value)

    async def subject(self, name: str) -> SubjectRecord:
        record = await self.record(SubjectRecord, layout.subject_path(name))
        assert isinstance(record, SubjectRecord)
        return record

    async def settle(self) -> None:
        """Watches have been called and what follows from them is done."""
        await asyncio.sleep(1)


def staged(*metas: str, **options: Any) -> Callable[[Story], Callable[[], None]]:
    """A test that is a story; one meta server, `m1`, unless others are named."""

    def decorate(story: Story) -> Callable[[], None]:
        @functools.wraps(story)
        def test() -> None:
            Scene(metas or ("m1",), options).play(story)

        del test.__wrapped__  # pytest would look there for fixtures
        return test

    return decorate
