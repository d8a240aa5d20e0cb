"""Starting, stopping, failing; and what a broker promises where durability is `memory`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fairway import limits
from fairway.broker.server import Broker, BrokerWorld
from fairway.errors import Code, Refused, StorageFault, Unreachable
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.storage.flusher import Durability
from tests.support.client import ConnectionEnded, Stream
from tests.unit.broker.scene import BROKER, STORE, Scene, options_of, staged, staged_with

IN_MEMORY = options_of(store=replace(STORE, durability=Durability.MEMORY))


@staged
async def test_stopping_answers_what_is_durable_and_refuses_the_rest(scene: Scene) -> None:
    worker = await scene.worker("ann")
    client = await scene.connect()
    poll = asyncio.create_task(worker.pull(wait_s=30))
    scene.disk.stall(2)
    produced = asyncio.create_task(client.produce("orders", Stream(1).batch([b"a"])))
    await asyncio.sleep(1)
    assert not produced.done()
    await scene.stop()
    assert (await produced).count == 1
    with pytest.raises(Refused, match="DRAINING"):
        await poll
    await scene.start()
    assert [each.payload for each in await scene.scan()] == [b"a"]


@staged
async def test_a_broker_that_has_stopped_lets_nobody_in(scene: Scene) -> None:
    stopping = asyncio.create_task(scene.stop())
    await asyncio.sleep(0)
    with pytest.raises(Unreachable):
        await scene.connect()
    await stopping
    await scene.start()


@staged
async def test_a_failed_sync_ends_it_all_without_another_word(scene: Scene) -> None:
    await scene.send(b"before")
    client = await scene.connect()
    failed = asyncio.create_task(scene.broker.failed())
    await asyncio.sleep(1)
    assert not failed.done()
    scene.disk.fail_sync()
    with pytest.raises(ConnectionEnded):
        await client.produce("orders", Stream(2).batch([b"unknown"]))
    await failed
    with pytest.raises(Unreachable):
        await scene.connect()
    with pytest.raises(StorageFault) as fault:
        await scene.broker.stop()
    assert fault.value is scene.broker.store.fault
    await scene.kill()
    assert [each.payload for each in await scene.scan()][:1] == [b"before"]


@staged
async def test_a_start_that_fails_lets_go_of_the_directory(scene: Scene) -> None:
    await scene.stop()
    world = BrokerWorld(scene.clock, scene.disk, scene.sim.net.host(BROKER), scene.sim.rng.child("second"))
    listener = await world.net.listen(asyncio.Protocol, BROKER, scene.options.port)
    with pytest.raises(Exception, match="cannot listen"):
        await Broker.start(world, scene.options)
    listener.close()
    await listener.wait_closed()
    scene.disk = scene.disk.crash_process()
    await scene.start()


@staged
async def test_names_that_are_none_leave_nothing_behind(scene: Scene) -> None:
    await scene.worker("ann")
    client = await scene.connect()
    actors = len(scene.broker.scheduler)
    for name in ("../../etc", "", "a/b", "x" * 201, "a\0b", "é", "dead:orders:billing", "inbox:orders:billing"):
        with pytest.raises(Refused, match="BAD_NAME"):
            await client.produce(name, Stream(1).batch([b"a"]))
        for ask in (
            client.ask(Scan(name, m.Whence.EARLIEST, 0, None, 1), Scanned),
            client.pull(name, "billing", "ann"),
            client.pull("orders", name or "?", "ann"),
            client.join("orders", "billing", name or "?"),
        ):
            with pytest.raises(Refused) as refused:
                await ask
            assert refused.value.code in (Code.BAD_NAME, Code.NO_SUCH_SUBJECT, Code.NO_SUCH_GROUP)
    assert len(scene.broker.scheduler) == actors
    assert len(scene.broker.store.messages.views.subjects) == 1


@staged
async def test_scans_of_any_number_of_subjects_share_a_few_weights(scene: Scene) -> None:
    client = await scene.connect()
    stream = Stream(1)
    for number in range(130):
        subject = f"subject-{number}"
        await client.produce(subject, Stream(100 + number).batch([b"a"]))
        await client.ask(Scan(subject, m.Whence.EARLIEST, 0, None, 1), Scanned)
    # One for all who read the action log, and one for all subjects that do not exist yet.
    assert len(scene.broker.scheduler._weights) == 64 + 2
    assert stream.next == 0


@staged_with(IN_MEMORY)
async def test_in_memory_mode_an_answer_does_not_wait_for_the_disk_to_sync(scene: Scene) -> None:
    stream = Stream(1)
    await scene.send(b"a", stream=stream)  # the first one claims sequences, and that is synced
    log = scene.broker.store.messages.log
    synced = log.flusher.syncs
    await scene.send(b"b", stream=stream)
    assert log.flusher.syncs == synced
    assert log.synced_end < log.committed_end
    worker = await scene.worker("ann")
    assert (await worker.pull()).payloads == [b"a", b"b"]
    await asyncio.sleep(0.3)
    assert log.synced_end == log.committed_end == log.end


@staged_with(IN_MEMORY)
async def test_in_memory_mode_the_death_of_the_process_loses_nothing(scene: Scene) -> None:
    worker = await scene.worker("ann")
    stream = Stream(1)
    for payload in (b"a", b"b", b"c"):
        await scene.send(payload, stream=stream)
    handed = await worker.pull(most=1)
    await worker.ack(handed)
    await scene.kill()
    await scene.sleep(60)
    again = await scene.worker("ann")
    assert sorted(await again.drain()) == [b"b", b"c"]


@staged_with(IN_MEMORY)
async def test_in_memory_mode_a_stop_syncs_everything(scene: Scene) -> None:
    stream = Stream(1)
    await scene.send(b"a", stream=stream)
    await scene.send(b"b", stream=stream)
    await scene.stop()
    await scene.power_cut()
    assert [each.sequence for each in await scene.scan()] == [0, 1]
    assert (await scene.send(b"c", stream=Stream(2))).first_sequence == 2


@pytest.mark.parametrize("seed", range(25))
def test_in_memory_mode_a_power_cut_gives_nobody_a_sequence_that_was_seen(seed: int) -> None:
    async def story(scene: Scene) -> None:
        seen: dict[int, bytes] = {}
        for life in range(3):
            worker = await scene.worker(f"ann-{life}")
            stream = Stream(100 + life)
            for number in range(6):
                await scene.send(b"%d/%d" % (life, number), stream=stream)
                await scene.sleep(0.02)
                handed = await worker.pull()
                for each in handed.messages:
                    assert seen.setdefault(each.sequence, each.payload) == each.payload
                if number % 2:
                    await worker.ack(handed)
            await scene.power_cut()
        await scene.sleep(60)
        final = await scene.worker("final")
        await scene.send(b"last", stream=Stream(999))
        rest = await final.drain()
        assert rest[-1] == b"last"  # what was claimed and lost is stepped over, not waited for

    Scene(f"memory {seed}", IN_MEMORY).play(story)


def test_there_is_room_for_the_longest_names_of_all_subjects_in_one_record() -> None:
    assert limits.SUBJECTS_MAX * (limits.NAME_CHARS_MAX + 16) < limits.BATCH_RAW_BYTES_MAX
