"""A disk that fails a delay server: at whichever sync that is, its process ends, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fairway.cli.broker import run_to_end
from fairway.errors import StorageFault
from fairway.protocol.delay_messages import PendingListed, PendingPage, Which
from tests.unit.delay.helpers import OPTIONS
from tests.unit.delay.scene import Scene

SYNCS_MAX = 60


async def ended(scene: Scene, is_broken: Callable[[], bool]) -> bool:
    """Stop the delay server; whether it said that its disk has failed, and it must, if it has."""
    try:
        async with asyncio.timeout(60):
            await scene.delay.stop()
    except StorageFault:
        return True
    assert not is_broken(), "a fault that nobody is told of"
    return False


async def rest(scene: Scene) -> None:
    for machine in scene.machines.values():
        if machine.broker is not None:
            await machine.broker.stop()


@pytest.mark.parametrize("when", ["while it runs", "while it stops"])
def test_a_delay_server_ends_whichever_sync_of_its_disk_fails(when: str) -> None:
    """One sync fails in each life; the next life has the next one fail, until there is none left to fail."""
    lives = 0
    for nth in range(1, SYNCS_MAX):

        async def story(scene: Scene, nth: int = nth) -> None:
            nonlocal lives
            await scene.start()
            await scene.schedule([b"soon", b"later"], after_s=1)
            await scene.schedule([b"next month"], after_s=40 * 86_400)
            scene.disk.fail_sync(nth)
            if when == "while it runs":
                await asyncio.sleep(5)
            lives += await ended(scene, lambda: scene.delay.engine.fault is not None)
            await rest(scene)

        scene = Scene(f"{when} {nth}", ("east",), True, OPTIONS)
        with scene.sim:
            scene.sim.run(story(scene))
    assert 3 < lives < SYNCS_MAX - 1, "syncs fail, and at last there are no more to fail"


def test_a_question_ends_when_a_bucket_cannot_be_read() -> None:
    async def story(scene: Scene) -> None:
        await scene.start()
        await scene.schedule([b"far"], after_s=40 * 86_400, keys=["k"])
        await asyncio.sleep(3)
        await scene.delay.stop()
        await rest(scene)
        scene.disk = scene.disk.beside()
        scene.machines["east"].disk = scene.machines["east"].disk.beside()
        await scene.start()
        await asyncio.sleep(1)
        scene.disk.fail_fetch(1)
        asked = asyncio.ensure_future(scene.ask(PendingListed(Which(key_prefix="k")), PendingPage))
        await asyncio.sleep(1)
        assert isinstance(scene.delay.engine.fault, StorageFault)
        assert await ended(scene, lambda: True)
        asked.cancel()
        await rest(scene)

    scene = Scene("question", ("east",), True, OPTIONS)
    with scene.sim:
        scene.sim.run(story(scene))


@pytest.mark.parametrize("is_term", [False, True])
@pytest.mark.parametrize("dying", [("broker", "delay"), ("delay",), ("broker",)])
def test_a_broker_with_a_delay_server_inside_ends_when_its_disk_dies(dying: tuple[str, ...], is_term: bool) -> None:
    """As `fairway up` does, also when somebody asks it to end at that moment: with what the disk said, and soon."""

    async def story(scene: Scene) -> None:
        await scene.start()
        await scene.schedule([b"soon"], after_s=1)
        await scene.schedule([b"far"], after_s=40 * 86_400)
        await asyncio.sleep(5)
        broker = scene.machines["east"].broker
        assert broker is not None
        asked = asyncio.Event()
        running = asyncio.ensure_future(run_to_end(asked.wait, broker, scene.delay))
        if "broker" in dying:
            scene.machines["east"].disk.fail_sync()
        if "delay" in dying:
            scene.disk.fail_sync()
        sending = asyncio.ensure_future(scene.schedule([b"more"], after_s=0.5))
        await asyncio.sleep(1)
        if is_term:
            asked.set()
        with pytest.raises(StorageFault):
            async with asyncio.timeout(20):
                await running
        sending.cancel()

    scene = Scene(f"{dying} {is_term}", ("east",), True, OPTIONS)
    with scene.sim:
        scene.sim.run(story(scene))
