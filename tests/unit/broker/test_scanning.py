"""Scans beside groups: whoever reads everything leaves the loop to those who wait for a message."""

from __future__ import annotations

import asyncio

from fairway.broker.scan import BESIDE_GROUPS_BYTES_MAX
from fairway.limits import KIB, MIB
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned
from tests.unit.broker.scene import SUBJECT, Scene, staged

BATCHES = 20


async def scanned(scene: Scene, begin: int = 0, *, is_dry: bool = False) -> Scanned:
    asked = Scan(SUBJECT, m.Whence.SEQUENCE, begin, None, MIB, is_dry=is_dry)
    found, _ = await (await scene.control()).ask(asked, Scanned)
    return found


@staged
async def test_a_scan_is_answered_in_smaller_parts_while_groups_are_at_work(scene: Scene) -> None:
    for number in range(BATCHES):
        await scene.send(b"%d" % number * 16 * KIB)
    ann = await scene.worker("ann")
    await asyncio.sleep(1)
    assert len((await scanned(scene)).batches) == BATCHES
    await ann.ack(await ann.pull())
    part = await scanned(scene)
    assert 1 <= len(part.batches) < BATCHES
    assert part.size_bytes <= BESIDE_GROUPS_BYTES_MAX
    rest = await scanned(scene, part.next_sequence)
    assert rest.batches[0].first_sequence == part.next_sequence  # nothing is left out


@staged
async def test_how_much_there_is_does_not_depend_on_who_is_at_work(scene: Scene) -> None:
    for number in range(BATCHES):
        await scene.send(b"%d" % number * 16 * KIB)
    ann = await scene.worker("ann")
    await ann.ack(await ann.pull())
    assert (await scanned(scene, is_dry=True)).next_sequence == BATCHES
