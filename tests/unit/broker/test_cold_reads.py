"""Reads of what is not in memory: nothing is lost or altered, the right actor pays, and nobody else waits."""

from __future__ import annotations

import asyncio

import pytest

from fairway import batch
from fairway.errors import Code, Refused
from fairway.limits import KIB, MIB
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.storage.store import StoreOptions
from tests.support.client import ConnectionEnded, Stream
from tests.unit.broker.scene import Scene, Worker, options_of, refused, staged_with

SMALL = options_of(store=StoreOptions(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB, low_water_bytes=0))
COLD = "archive"
HOT = "orders"


async def fill(scene: Scene, subject: str, batches: int) -> list[bytes]:
    """Batches of ten messages of 200 bytes; what was sent."""
    sent = []
    stream = Stream(1 + scene.clock.monotonic_ns())  # a stream has one subject
    for number in range(batches):
        payloads = [b"%s %d %d " % (subject.encode(), number, index) + bytes(180) for index in range(10)]
        await scene.send(*payloads, subject=subject, stream=stream)
        sent += payloads
    return sent


async def evict(scene: Scene) -> None:
    """Everything that is complete leaves memory, its index included; the newest segment stays."""
    log = scene.broker.store.messages.log
    newest = log.file(log.segments[-1]).name
    for directory in ("messages", "index"):
        for name in scene.disk.listing(directory):
            if f"{directory}/{name}" != newest:
                scene.disk.evict(f"{directory}/{name}")


async def drain(worker: Worker, *, most: int = 100) -> list[bytes]:
    payloads: list[bytes] = []
    while (handed := await worker.pull(most=most, wait_s=0.5)).lots:
        payloads += handed.payloads
        await worker.ack(handed)
    return payloads


def elsewhere_ns(scene: Scene, group: str) -> int:
    """What the group's actor was charged for work off the loop."""
    [host] = [host for host in scene.broker.coordinator.groups if host.name == group]
    actor = scene.broker.scheduler.find(host.key)
    assert actor is not None
    return actor.elsewhere_ns


# --- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_delivered_exactly_when_half_of_all_looks_miss(seed: int) -> None:
    async def story(scene: Scene) -> None:
        scene.disk.cold = 0.5
        workers = [await scene.worker(f"worker-{number}", group=group) for group in ("a", "b") for number in range(3)]
        draining = [asyncio.create_task(drain(worker, most=25)) for worker in workers]
        sent = await fill(scene, HOT, 60)
        got = await asyncio.gather(*draining)
        for group in (got[:3], got[3:]):
            assert sorted(payload for part in group for payload in part) == sorted(sent)
        assert scene.broker.fetches is not None
        assert scene.broker.fetches.count > 10

    Scene(f"cold-{seed}", SMALL).play(story)


def test_one_seed_one_history() -> None:
    def run() -> str:
        async def story(scene: Scene) -> None:
            scene.disk.cold = 0.5
            await fill(scene, HOT, 20)
            await drain(await scene.worker("ann"))

        scene = Scene("replayed", SMALL)
        scene.play(story)
        return scene.sim.trace_hash()

    assert run() == run()


@staged_with(SMALL)
async def test_scans_are_whole_when_everything_is_cold(scene: Scene) -> None:
    sent = await fill(scene, HOT, 120)
    scene.disk.cold = 1.0
    control = await scene.control()
    got: list[bytes] = []
    begin = 0
    while True:
        scan = Scan(HOT, m.Whence.SEQUENCE, begin, None, 1 << 20)
        scanned, batches = await control.ask(scan, Scanned)
        got += [payload for data in batches for payload in batch.decode(data).payloads]
        if scanned.next_sequence == begin:
            break
        begin = scanned.next_sequence
    assert got == sent


@staged_with(SMALL)
async def test_subjects_that_lie_interleaved_are_fetched_in_few_reads(scene: Scene) -> None:
    sent: dict[str, list[bytes]] = {HOT: [], COLD: []}
    for _ in range(20):
        for subject in (HOT, COLD):
            sent[subject] += await fill(scene, subject, 1)
    scene.disk.cold = 1.0
    ann = await scene.worker("ann")
    assert await drain(ann, most=1_000) == sent[HOT]
    assert scene.broker.fetches is not None
    assert scene.broker.fetches.count <= 4


def test_what_lies_side_by_side_is_fetched_ahead() -> None:
    async def story(scene: Scene) -> None:
        old, filler = Stream(1), Stream(2)
        sent = [b"%d " % number + bytes(50_000) for number in range(40)]
        for payload in sent:
            await scene.send(payload, subject=COLD, stream=old)
        for _ in range(20):  # after these the others are no longer what was written just now
            await scene.send(bytes(MIB), subject=HOT, stream=filler)
        scene.disk.cold = 1.0
        assert await drain(await scene.worker("ann", subject=COLD), most=1) == sent
        assert scene.broker.fetches is not None
        assert scene.broker.fetches.count < len(sent) / 4

    large = StoreOptions(segment_bytes=4 * MIB, action_segment_bytes=64 * KIB, low_water_bytes=0)
    Scene("ahead", options_of(store=large), capacity_bytes=64 * MIB).play(story)


@staged_with(SMALL)
async def test_retries_of_old_messages_are_fetched_too(scene: Scene) -> None:
    sent = await fill(scene, HOT, 60)
    ann = await scene.worker("ann")
    first = await ann.pull(most=10)
    await ann.retry(first, after_s=1)
    await drain(ann)
    await evict(scene)
    await scene.sleep(2)
    assert await drain(ann) == sent[:10]
    assert elsewhere_ns(scene, ann.group) > 0


# --- who pays, and who waits -----------------------------------------------------------------------------------------


@staged_with(SMALL)
async def test_the_group_that_missed_is_charged(scene: Scene) -> None:
    sent = await fill(scene, COLD, 60)
    await fill(scene, HOT, 60)
    await evict(scene)
    cold = await scene.worker("ann", group="far-behind", subject=COLD)
    hot = await scene.worker("bob", group="up-to-date", subject=HOT)
    await scene.seek(m.Whence.LATEST, group="up-to-date")
    more = await fill(scene, HOT, 3)
    assert await drain(cold) == sent
    assert await drain(hot) == more
    assert elsewhere_ns(scene, "far-behind") > 10 * 20_000  # ten reads at least, at the disk's least latency
    assert elsewhere_ns(scene, "up-to-date") == 0


async def waits_s(scene: Scene, worker: Worker, pulls: int) -> list[float]:
    """How long each of these pulls took on virtual time."""
    found = []
    for _ in range(pulls):
        await fill(scene, worker.subject, 1)
        started_ns = scene.clock.monotonic_ns()
        handed = await worker.pull()
        found.append((scene.clock.monotonic_ns() - started_ns) / 1e9)
        assert handed.lots
        await worker.ack(handed)
    return found


@staged_with(SMALL)
async def test_a_hot_group_does_not_wait_for_a_cold_one(scene: Scene) -> None:
    await fill(scene, COLD, 200)
    await evict(scene)
    hot = await scene.worker("bob", group="up-to-date", subject=HOT)
    alone = await waits_s(scene, hot, 30)
    behind = [await scene.worker(f"ann-{number}", group=f"far-behind-{number}", subject=COLD) for number in range(5)]
    scene.disk.slowness = 100  # a fetch takes up to 50 ms now
    draining = [asyncio.create_task(drain(worker, most=10)) for worker in behind]
    await scene.sleep(0.2)
    beside = await waits_s(scene, hot, 30)
    assert not any(task.done() for task in draining)
    assert max(beside) < max(alone) + 0.001
    scene.disk.slowness = 1
    assert [len(got) for got in await asyncio.gather(*draining)] == [2_000] * 5


@staged_with(SMALL)
async def test_cold_groups_take_turns_at_the_device(scene: Scene) -> None:
    await fill(scene, COLD, 100)
    await evict(scene)
    behind = [await scene.worker(f"ann-{number}", group=f"group-{number}", subject=COLD) for number in range(6)]
    scene.disk.slowness = 20
    draining = [asyncio.create_task(drain(worker, most=10)) for worker in behind]
    await scene.sleep(0.4)
    shares = [elsewhere_ns(scene, f"group-{number}") for number in range(6)]
    assert min(shares) > 0.5 * max(shares)
    for task in draining:
        task.cancel()
    await asyncio.wait(draining)


# --- what may happen meanwhile ---------------------------------------------------------------------------------------


@staged_with(SMALL)
async def test_a_consumer_that_left_meanwhile_takes_nothing_with_it(scene: Scene) -> None:
    sent = await fill(scene, HOT, 10)
    scene.disk.cold, scene.disk.slowness = 1.0, 1_000
    ann = await scene.worker("ann")
    pull = asyncio.create_task(ann.pull())
    await scene.sleep(0.05)
    ann.client.abort()
    with pytest.raises(ConnectionEnded):
        await pull
    bob = await scene.worker("bob")
    assert await drain(bob) == sent


@staged_with(SMALL)
async def test_those_who_waited_are_served_from_one_fetch(scene: Scene) -> None:
    scene.disk.cold = 1.0
    workers = [await scene.worker(f"worker-{number}") for number in range(20)]
    pulls = [asyncio.create_task(worker.pull(most=1, wait_s=5)) for worker in workers]
    await scene.sleep(0.1)
    await scene.send(*[b"%d" % number for number in range(20)])
    got = [handed.payloads for handed in await asyncio.gather(*pulls)]
    assert sorted(got) == sorted([b"%d" % number] for number in range(20))
    assert scene.broker.fetches is not None
    assert scene.broker.fetches.count <= 20


@staged_with(SMALL)
async def test_a_sector_that_cannot_be_read_is_an_answer_and_no_end(scene: Scene) -> None:
    sent = await fill(scene, HOT, 10)
    ann = await scene.worker("ann")
    scene.disk.cold = 1.0
    scene.disk.fail_fetch()
    assert await refused(ann.pull()) is Code.BUSY
    assert await drain(ann) == sent


@staged_with(SMALL)
async def test_a_broker_that_stops_during_a_fetch(scene: Scene) -> None:
    sent = await fill(scene, HOT, 10)
    scene.disk.cold, scene.disk.slowness = 1.0, 1_000
    ann = await scene.worker("ann")
    pull = asyncio.create_task(ann.pull())
    await scene.sleep(0.02)
    scene.disk.slowness = 1
    await scene.restart()
    with pytest.raises((ConnectionEnded, Refused)):
        await pull
    assert await drain(await scene.worker("bob")) == sent


@staged_with(options_of(store=SMALL.store, fetches_at_once=0))
async def test_reads_that_block_for_comparison(scene: Scene) -> None:
    sent = await fill(scene, HOT, 100)
    scene.disk.cold = 1.0
    assert await drain(await scene.worker("ann")) == sent
    assert scene.broker.fetches is None


@staged_with(SMALL)
async def test_what_was_written_just_now_is_not_fetched_where_nobody_can_tell_what_is_in_memory(scene: Scene) -> None:
    scene.disk.is_blind = True
    worker = await scene.worker("ann", subject=HOT)
    sent = await fill(scene, HOT, 5)
    assert await drain(worker) == sent
    assert scene.broker.fetches is not None
    assert scene.broker.fetches.count == 0
