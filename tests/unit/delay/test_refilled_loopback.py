"""The same on real sockets and disks: a second copy comes when the first has long let go of what its logs had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fairway import batch
from fairway.delay import maintenance
from fairway.delay.server import DelayCopy, ServerOptions
from fairway.lookup.registries import RemoteRegistry
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.registry.sqlite import SqliteRegistry
from fairway.replication.copies import CopyOptions, CopyRuntime
from fairway.runtime.net import Address
from fairway.runtime.threads import ThreadRunner
from tests.support.client import Client
from tests.unit.delay.helpers import DAY_MS, OPTIONS
from tests.unit.delay.snapshots import known
from tests.unit.delay.test_cluster_loopback import CLOCK, HOST, LOOK_S, LOOKS_MAX, NET, RNG, disk, schedule

COUNT = 120


async def _start(root: Path, name: str, metas: tuple[Address, ...]) -> DelayCopy:
    registry = await RemoteRegistry.open(NET, CLOCK, RNG, metas)
    world = CopyRuntime(CLOCK, lambda: disk(root / name / "logs"), NET, RNG, registry, ThreadRunner())
    options = ServerOptions(host=HOST, port=0, delay=OPTIONS)
    return await DelayCopy.start(
        world, options, CopyOptions("d1", look_ms=50), metas, lambda: disk(root / name / "buckets")
    )


async def _until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(LOOKS_MAX):
        if holds():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError(what)


def _in_sync(member: DelayCopy) -> int:
    return 0 if member.copy_status.leader is None else len(member.copy_status.leader.in_sync)


async def _story(root: Path) -> None:
    owner = await SqliteRegistry.open(str(root / "meta"), clock=CLOCK)
    meta = await MetaServer.start(MetaWorld(CLOCK, NET, RNG, owner, owner), MetaOptions(host=HOST, port=0))
    metas = ((HOST, meta.port),)
    first = await _start(root, "first", metas)
    await _until(lambda: first.copy_status.is_master, "it never leads")
    client = await Client.connect(NET, CLOCK, HOST, first.port)
    for number in range(COUNT):
        due_ms = CLOCK.wall_ms() + (1 + number % 50) * DAY_MS
        data = batch.encode([b"x" * 300], producer_id=7, first_sequence=number, created_ms=0, due_ms=[due_ms])
        await schedule(client, "orders", data)
    client.abort()
    assert first.server is not None
    engine = first.server.delay.engine
    await _until(lambda: engine.store.first_bases()[0] > 0, "the logs are never let go of")
    second = await _start(root, "second", metas)
    await _until(lambda: _in_sync(first) == 2, f"it is never filled: {second.sentence()}, {second.findings}")
    assert any("begins anew" in each for each in second.findings), second.findings
    wanted = known(engine)
    await first.stop()
    await _until(lambda: second.copy_status.is_master, "it never leads")
    assert second.server is not None
    heir = second.server.delay.engine
    await _until(lambda: heir.is_loaded, "it is never loaded")
    assert known(heir) == wanted
    assert len(wanted) == COUNT
    await second.stop()
    await meta.stop()


@pytest.mark.slow
def test_a_new_copy_is_filled_over_real_sockets_and_has_everything_that_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "EVERY_MS", 200)
    asyncio.run(_story(tmp_path))
