"""Routes expire while producers send by routes of any age and meta servers restart.

Every acknowledged message is on a broker group that the route of its subject names, one round of the audit later."""

from __future__ import annotations

import asyncio
import random

import pytest

from fairway import limits
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.route_messages import ClientRole, Route, Routed
from fairway.registry import layout
from fairway.registry.layout import SubjectRecord
from tests.simulation.cluster_steps import client_of, whole
from tests.simulation.cluster_world import Cluster
from tests.simulation.test_cluster import play
from tests.support.client import Client, Stream
from tests.unit.meta.brokers import GroupOfOne
from tests.unit.meta.scene import Scene

META_PORT = 20_882
SUBJECTS = tuple(f"s{number}" for number in range(8))
UNUSED_S = 5
STEPS = 150


class Producer:
    """Remembers routes, and asks for a new one only now and then."""

    def __init__(self, scene: Scene, groups: dict[str, GroupOfOne], rng: random.Random) -> None:
        self._scene = scene
        self._groups = groups
        self._rng = rng
        self._routes: dict[str, list[str]] = {}
        self.stored: set[tuple[str, str]] = set()  # subject and group of every acknowledged message
        self.stale = 0  # messages that were sent by a route that is none any more

    async def ask(self, subject: str) -> None:
        meta = self._rng.choice([*self._scene.metas])
        client = await self._scene.dial(meta)
        routed = await self._scene.route(ClientRole.PRODUCER, subject, may_create=True, client=client)
        client.close()
        if routed.subjects[0].writable:
            self._routes[subject] = routed.subjects[0].writable

    async def send(self, subject: str) -> None:
        if subject in self._routes:
            group = self._rng.choice(self._routes[subject])
            record = await self._scene.record(SubjectRecord, layout.subject_path(subject))
            self.stale += record is None or group not in record.groups
            await self._groups[group].send(subject)
            self.stored.add((subject, group))


async def live(scene: Scene, rng: random.Random) -> Producer:
    groups = {name: await GroupOfOne.lead(scene, name) for name in ("g1", "g2", "g3")}
    producer = Producer(scene, groups, rng)
    for _ in range(STEPS):
        deed, subject = rng.choice(("ask", "ask", "send", "wait", "wait", "restart")), rng.choice(SUBJECTS)
        if deed == "ask":
            await producer.ask(subject)
        elif deed == "send" and rng.random() < 0.15:
            await producer.send(subject)
        elif deed == "restart" and rng.random() < 0.2:
            name = rng.choice([*scene.metas])
            await scene.stop(name)
            await scene.start(name)
        else:
            await asyncio.sleep(rng.choice((0.01, 0.3, 1.0, 3.0)))
    return producer


@pytest.mark.parametrize("seed", range(10))
def test_every_acknowledged_message_has_a_route(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECT_UNUSED_MS", UNUSED_S * 1_000)

    async def story(scene: Scene) -> None:
        producer = await live(scene, random.Random(seed))
        await asyncio.sleep(2.5 * limits.ROUTES_AUDITED_EVERY_MS / 1_000)
        for subject, group in sorted(producer.stored):
            record = await scene.record(SubjectRecord, layout.subject_path(subject))
            assert record is not None, (seed, subject, group)
            assert group in record.groups, (seed, subject, group)
        unused = {*scene.metas["m1"].cluster_state.subjects} - {subject for subject, _ in producer.stored}
        await asyncio.sleep(6 * UNUSED_S)
        left = {*scene.metas["m1"].cluster_state.subjects}
        assert not unused & left, "nobody has used them"
        assert {subject for subject, _ in producer.stored} <= left

    Scene(("m1", "m2"), {}).play(story)


def test_the_lives_send_by_old_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is for does happen in it."""
    monkeypatch.setattr(limits, "SUBJECT_UNUSED_MS", UNUSED_S * 1_000)
    stale: list[int] = []

    async def story(scene: Scene, seed: int) -> None:
        stale.append((await live(scene, random.Random(seed))).stale)

    for seed in range(10):
        Scene(("m1", "m2"), {}).play(lambda scene, of=seed: story(scene, of))  # type: ignore[misc]
    assert sum(stale) >= 5


def test_copies_of_a_group_answer_through_a_change_of_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECT_UNUSED_MS", UNUSED_S * 1_000)

    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        world = cluster.world
        registry = cluster.ensemble.client("m1")
        meta = await MetaServer.start(
            MetaWorld(world.clock, world.net.host("m1"), world.rng.child("m1"), registry),
            MetaOptions(host="m1", port=META_PORT, allow_remote=True),
        )
        client = await Client.connect(world.net.host("client"), world.clock, "m1", META_PORT)
        asked = Route(ClientRole.PRODUCER, ["used", "unused"], may_create=True)
        await client.ask(asked, Routed)
        await (await client_of(cluster, "b1")).produce("used", Stream(7).batch([b"one"]))
        cluster.kill("b1")
        await cluster.master()
        await asyncio.sleep(4 * UNUSED_S)
        assert {*meta.cluster_state.subjects} == {"used"}
        await (await client_of(cluster, "b2")).produce("unused", Stream(8).batch([b"by an old route"]))
        await asyncio.sleep(1.5 * limits.ROUTES_AUDITED_EVERY_MS / 1_000)
        assert {*meta.cluster_state.subjects} == {"used", "unused"}
        await meta.stop()

    play(scenario)
