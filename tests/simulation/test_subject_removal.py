"""A broker through random lives: sends, groups, removals, and crashes in the middle of them.

What was acknowledged after the last removal is there, nothing of before is, and no group is without its subject."""

from __future__ import annotations

import asyncio
import random

import pytest

from fairway.errors import Refused
from fairway.protocol.admin_messages import Removed, RemoveGroup, RemoveSubject
from tests.support.client import ConnectionEnded, Stream
from tests.unit.broker.scene import GROUP, Scene

SUBJECTS = ("a", "b", "c")
STEPS = 40
DEEDS = ("send", "send", "send", "work", "remove", "remove in a crash", "remove group", "kill", "cut", "restart")


class Model:
    """What must be there, by subject."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[int, bytes]] = {name: {} for name in SUBJECTS}
        self.ever: dict[tuple[str, int], bytes] = {}

    def sent(self, name: str, sequence: int, payload: bytes) -> None:
        assert (name, sequence) not in self.ever, "a sequence names one payload for ever"
        self.ever[name, sequence] = payload
        self.stored[name][sequence] = payload


async def content(scene: Scene, name: str) -> dict[int, bytes]:
    try:
        return {each.sequence: each.payload for each in await scene.scan(name)}
    except Refused:
        return {}


async def step(scene: Scene, model: Model, rng: random.Random, number: int) -> None:
    name = rng.choice(SUBJECTS)
    deed = rng.choice(DEEDS)
    if deed == "send":
        payload = b"%d" % number
        stored = await scene.send(payload, subject=name, stream=Stream(1_000 + number))
        model.sent(name, stored.first_sequence, payload)
    elif deed == "work":
        worker = await scene.worker("ann", subject=name)
        handed = await worker.pull(most=2)
        await (worker.reject(handed) if rng.random() < 0.3 else worker.ack(handed))
        await worker.leave()
    elif deed == "remove":
        await scene.ask(RemoveSubject(name, True), Removed)
        model.stored[name] = {}
    elif deed == "remove in a crash":
        asked = asyncio.ensure_future(scene.ask(RemoveSubject(name, True), Removed))
        await scene.sleep(rng.choice([0.0001, 0.001, 0.003, 0.01]))
        await (scene.power_cut() if rng.random() < 0.7 else scene.kill())
        asked.cancel()
        found = await content(scene, name)
        assert found in ({}, model.stored[name])
        model.stored[name] = found
    elif deed == "remove group":
        await scene.ask(RemoveGroup(name, GROUP, True, takes_dead=rng.random() < 0.5), Removed)
    else:
        await {"kill": scene.kill, "cut": scene.power_cut, "restart": scene.restart}[deed]()


async def check(scene: Scene, model: Model) -> None:
    for name in SUBJECTS:
        assert await content(scene, name) == model.stored[name]
    known = {each.id for each in scene.broker.store.messages.views.subjects}
    assert {host.subject_id for host in scene.broker.coordinator.groups} <= known


@pytest.mark.parametrize("seed", range(25))
def test_removals_and_crashes_in_any_order(seed: int) -> None:
    async def story(scene: Scene) -> None:
        model, rng = Model(), random.Random(seed)
        for number in range(STEPS):
            try:
                await step(scene, model, rng, number)
            except ConnectionEnded:
                raise AssertionError("nobody ended the connection") from None
            await check(scene, model)
        for name in SUBJECTS:  # every message that is left is handed out
            worker = await scene.worker("bob", group="fresh", subject=name)
            assert sorted(await worker.drain()) == sorted(model.stored[name].values())

    Scene(f"removal {seed}", capacity_bytes=64 << 20).play(story)
