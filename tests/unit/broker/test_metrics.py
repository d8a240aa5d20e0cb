"""What the figures say after something has happened, and that the manual names only figures there are."""

from __future__ import annotations

import re
from pathlib import Path

from fairway.groups import GroupConfig
from fairway.protocol import Bytes, ControlMessage, codec
from fairway.protocol import messages as m
from fairway.protocol.frames import write
from fairway.replication.copies import CopyStatus
from fairway.replication.copies import families as figures_of_copies
from fairway.storage.retention import Policy
from tests.support.raw import Raw
from tests.unit.broker.scene import BROKER, PORT, Scene, options_of, staged, staged_with
from tests.unit.broker.test_maintenance import HOUR_S, fill, keeping

MANUAL = Path(__file__).parents[3] / "docs" / "how-to" / "operations.md"
BILLING = '{subject="orders",group="billing"}'


def figures(scene: Scene) -> dict[str, float]:
    lines = scene.broker.metrics.page().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@staged
async def test_dead_letters_and_their_return_are_counted(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    seen = figures(scene)
    assert seen["fairway_buried_messages_total"] == 3
    assert seen["fairway_buried_unreadable_messages_total"] == 0
    assert seen["fairway_group_dead" + BILLING] == 3
    assert (await scene.redrive()).count == 3
    seen = figures(scene)
    assert seen["fairway_redriven_messages_total"] == 3
    assert seen["fairway_group_dead" + BILLING] == 0


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000))))
async def test_what_retention_takes_is_counted_and_so_are_groups_that_go(scene: Scene) -> None:
    await scene.configure(GroupConfig(idle_ms_max=HOUR_S * 1_000))
    ann = await scene.worker("ann")
    await fill(scene, 5)
    await ann.drain()
    await ann.leave()
    before = scene.broker.store.messages.log.segments[0].base
    await scene.sleep(1.2 * HOUR_S)
    seen = figures(scene)
    assert seen["fairway_retired_segments_total"] == 5
    assert seen["fairway_retired_bytes_total"] == scene.broker.store.messages.log.segments[0].base - before
    assert seen["fairway_removed_groups_total"] == 1
    assert seen["fairway_forsaken_messages_total"] == 0


@staged_with(options_of(store=keeping(Policy(age_ms_max=HOUR_S * 1_000, owed_bytes_max=14_000))))
async def test_what_a_group_loses_to_retention_is_counted(scene: Scene) -> None:
    await scene.worker("ann")
    await fill(scene, 9)
    await scene.sleep(0.1 * HOUR_S)
    seen = figures(scene)
    assert seen["fairway_forsaken_messages_total"] == seen["fairway_group_lost_total" + BILLING] > 0


def said(message: ControlMessage, correlation: int) -> list[Bytes]:
    return write(codec.REQUESTS[type(message)], 0, 1, correlation, codec.encode(message))


@staged
async def test_what_the_connection_refuses_by_itself_is_counted(scene: Scene) -> None:
    odd = await Raw.connect(scene.sim.net.host("odd"), BROKER, PORT)
    odd.send(*write(1_000, 0, 1, 1, b"\x90"))
    odd.send(*said(m.Join("orders", "billing", "odd", 0, 0), 2))
    await scene.sleep(1)
    odd.send(*said(m.Pull("orders", "billing", "odd", 1, 1, 5_000, 0), 3))
    await scene.sleep(1)
    scene.broker.session_manager.close("enough")
    odd.send(*said(m.Leave("orders", "billing", "odd", 0), 4))
    await scene.sleep(1)
    seen = figures(scene)
    assert seen['fairway_refusals_total{code="unsupported"}'] == 1
    assert seen['fairway_refusals_total{code="draining"}'] == 1


@staged
async def test_the_manual_names_figures_that_exist(scene: Scene) -> None:
    await scene.worker("ann")
    families = set(re.findall(r"^# TYPE (fairway_\w+)", scene.broker.metrics.page(), re.MULTILINE))
    of_copies = figures_of_copies(CopyStatus("east", ()), scene.broker.store)
    families |= {f"fairway_{each.name}" for each in of_copies}
    named = set(re.findall(r"fairway_[a-z_]+[a-z]", MANUAL.read_text(encoding="utf-8")))
    assert len(named) > 10
    assert named <= families
