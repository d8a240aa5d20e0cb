"""A damaged record of a bucket gives back every message that the message log still has; the rest is reported lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway.limits import KIB, MIB
from fairway.storage import retention, segment
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, STORE, MessageId, World
from tests.unit.storage.helpers import content

BATCHES, EACH = 4, 50
LOG = segment.file_name("messages", 0)
NOT_CATALOGUED = 1 << 20
KEPT = replace(STORE, segment_bytes=256 * KIB, retention=retention.Policy(bytes_max=MIB))


def payload(number: int, at: int) -> bytes:
    return b"<batch %d message %d>" % (number, at)


ALL = [payload(number, at) for number in range(BATCHES) for at in range(EACH)]
LEFT = [payload(number, at) for number in (0, 1, 3) for at in range(EACH)]


def world_of(
    seed: str, *, catalogue_messages: int = NOT_CATALOGUED, remembered_max: int = OPTIONS.remembered_max
) -> World:
    options = replace(OPTIONS, store=KEPT, catalogue_messages=catalogue_messages, remembered_max=remembered_max)
    return World(seed, options=options)


def schedule(world: World, wait_ms: int = HOUR_MS, away_ms: int = 0) -> list[MessageId]:
    """Four batches, in one record. With `away_ms`, a message of the third one lies in another bucket, so that the
    sequences of the record have a gap."""
    ids = []
    for number in range(BATCHES):
        dues = [world.now_ms + wait_ms] * EACH
        if number == 2:
            dues[7] += away_ms
        ids += world.send([payload(number, at) for at in range(EACH)], dues, keys=[f"k-{at}" for at in range(EACH)])
    world.await_receipt()
    world.settle()
    return ids


def damage(world: World, in_bucket: bytes, *in_log: bytes) -> None:
    """Flip a bit in a bucket's record, and one in each of these messages of the message log."""
    (name,) = [f"schedule/{each}" for each in world.files if in_bucket in content(world.disk, f"schedule/{each}")]
    world.disk.flip(name, content(world.disk, name).index(in_bucket) * 8)
    for each in in_log:
        world.disk.flip(LOG, content(world.disk, LOG).index(each) * 8)


@pytest.mark.parametrize("is_catalogued", [True, False])
@pytest.mark.parametrize("wait_ms", [HOUR_MS, 3 * DAY_MS, 40 * DAY_MS])
@pytest.mark.parametrize("away_ms", [0, 60 * DAY_MS])
def test_what_the_message_log_has_of_a_damaged_record_is_delivered(
    is_catalogued: bool, wait_ms: int, away_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One of four batches has rotted in the message log, too: the three others go out at their time."""
    with world_of("salvage", catalogue_messages=32 if is_catalogued else NOT_CATALOGUED) as world:
        schedule(world, wait_ms, away_ms)
        due_ms = world.now_ms + wait_ms
        world.close()
        damage(world, payload(0, 3), payload(2, 5))
        world.open()
        world.settle()
        while world.now_ms < due_ms + HOUR_MS:
            world.advance(min(DAY_MS, due_ms + HOUR_MS - world.now_ms))
        assert sorted(world.broker.payloads) == sorted(LEFT)
        assert all(each.at_ms >= due_ms - SECOND_MS for each in world.broker.deliveries)
        lost = EACH - bool(away_ms)
        assert (world.engine.repairs.lost_messages, len(world.engine.damaged)) == (lost, 1)
        (told,) = [each for each in caplog.records if each.name == "fairway.delay" and each.levelname == "ERROR"]
        assert f"{lost} messages are lost" in told.getMessage()
        assert world.engine.rows.pending == bool(away_ms)


@pytest.mark.parametrize("end", ["close", "crash", "kill"])
@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("waited_ms", [0, 30, 61 * SECOND_MS])
def test_a_crash_neither_loses_what_is_left_nor_delivers_it_twice(end: str, lives: int, waited_ms: int) -> None:
    """Whether the messages are in another bucket already, on their way there, or in the message log alone."""
    with world_of(f"{end} {lives}") as world:
        ids = schedule(world, 2 * HOUR_MS)
        world.decide(world.engine.cancel(ids[4]))
        world.close()
        damage(world, payload(0, 3), payload(2, 5))
        for _ in range(lives):
            world.open()
            for _ in range(200):
                world.tick()
                world.sleep(1)
                if world.engine.is_loaded:
                    break
            for _ in range(max(waited_ms // SECOND_MS, 1)):
                world.tick()
                world.sleep(min(waited_ms, SECOND_MS))
            assert world.engine.repairs.lost_messages in (0, EACH)
            assert world.engine.rows.pending == len(LEFT) - 1
            {"close": world.close, "crash": world.crash, "kill": world.kill}[end]()
        world.open()
        world.advance(3 * HOUR_MS)
        assert sorted(world.broker.payloads) == sorted(set(LEFT) - {payload(0, 4)})


@pytest.mark.parametrize("is_catalogued", [True, False])
@pytest.mark.parametrize("steps", range(1, 120, 7))
def test_a_power_cut_at_any_step_of_the_way_to_another_bucket(steps: int, is_catalogued: bool) -> None:
    with world_of(f"cut {steps}", catalogue_messages=32 if is_catalogued else NOT_CATALOGUED) as world:
        schedule(world, 2 * HOUR_MS)
        world.close()
        damage(world, payload(0, 3), payload(2, 5))
        for _ in range(3):
            world.open()
            for step in range(steps):
                world.tick()
                world.sleep(0.3)
                if is_catalogued and step == steps // 2 and world.engine.is_loaded:
                    world.run(world.engine.page(world.engine.filter()))  # opens the record
            world.crash()
        world.open()
        world.advance(3 * HOUR_MS)
        assert sorted(world.broker.payloads) == sorted(LEFT)


def test_what_is_left_is_in_another_bucket_before_the_message_log_lets_it_go() -> None:
    """Segments of 4 KiB, of which none is kept that is not needed."""
    with World(options=replace(OPTIONS, catalogue_messages=NOT_CATALOGUED)) as world:
        schedule(world, 40 * DAY_MS)
        world.close()
        (name,) = [
            each for each in world.disk.listing("messages") if payload(2, 5) in content(world.disk, f"messages/{each}")
        ]
        (bucket,) = world.files
        world.disk.flip(f"messages/{name}", content(world.disk, f"messages/{name}").index(payload(2, 5)) * 8)
        world.disk.flip(f"schedule/{bucket}", content(world.disk, f"schedule/{bucket}").index(payload(0, 3)) * 8)
        world.open()
        world.settle()
        world.advance(2 * 60 * SECOND_MS)
        assert bucket not in world.files
        world.advance(2 * 60 * SECOND_MS)
        assert len(world.disk.listing("messages")) == 1
        world.reopen()
        world.settle()
        assert (world.engine.damaged, world.engine.rows.pending) == ([], len(LEFT))
        for _ in range(5):
            world.advance(9 * DAY_MS)
        assert sorted(world.broker.payloads) == sorted(LEFT)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_messages_that_were_sent_before_are_neither_lost_nor_sent_again(is_forgotten: bool) -> None:
    with world_of("sent", remembered_max=0 if is_forgotten else OPTIONS.remembered_max) as world:
        ids = schedule(world, 2 * HOUR_MS)
        for each in (ids[2], ids[2 * EACH + 2]):  # of an intact batch, and of the rotten one
            world.decide(world.engine.reschedule(each, world.now_ms + SECOND_MS))
        world.decide(world.engine.reschedule(ids[1], world.now_ms + 3 * HOUR_MS))
        world.advance(10 * SECOND_MS)
        assert sorted(world.broker.payloads) == [payload(0, 2), payload(2, 2)]
        assert len(world.engine.rows) == len(ALL) - 2 * is_forgotten
        world.close()
        damage(world, payload(0, 3), payload(2, 5))
        world.open()
        world.settle()
        assert world.engine.repairs.lost_messages == EACH - 1
        world.advance(2 * HOUR_MS)
        assert payload(0, 1) not in world.broker.payloads
        world.advance(2 * HOUR_MS)
        assert sorted(world.broker.payloads) == sorted([*LEFT, payload(2, 2)])


def test_intents_with_lost_messages_go_elsewhere_without_them() -> None:
    with world_of("intents", catalogue_messages=32) as world:
        schedule(world, HOUR_MS)
        world.sleep(2 * HOUR_MS)
        for _ in range(30):  # intents are made, and none of them is sent
            world.look()
            world.sleep(10)
        assert world.engine.in_transit() == {"east": len(ALL)}
        world.close()
        damage(world, payload(0, 3), payload(2, 5))
        world.open()
        world.routes = {world.engine.name_of(1): "west"}
        for _ in range(30):
            world.look()
            world.sleep(10)
        assert world.engine.redirect("east", is_reached=False)[1:3] == (len(LEFT), 0)
        assert world.engine.repairs.lost_messages == EACH
        world.settle()
        assert sorted(world.brokers["west"].payloads) == sorted(LEFT)


def test_a_rotten_batch_of_others_does_not_keep_a_record_from_its_repair() -> None:
    """The rotten batch lies between those of the record, and has no message in it."""
    with world_of("between") as world:
        due_ms = world.now_ms + HOUR_MS
        for number in range(3):
            at_ms = due_ms + (number == 1) * 20 * DAY_MS
            world.send([payload(number, at) for at in range(EACH)], [at_ms] * EACH)
        world.await_receipt()
        world.settle()
        world.close()
        damage(world, payload(0, 3), payload(1, 5))
        world.open()
        world.advance(2 * HOUR_MS)
        assert (world.engine.repairs.repaired, world.engine.damaged) == (1, [])
        assert sorted(world.broker.payloads) == sorted(payload(number, at) for number in (0, 2) for at in range(EACH))


def test_a_damaged_list_of_sequences_delivers_no_message_of_another_record() -> None:
    """The bit that is flipped makes the list name a message that lies in another bucket."""
    with world_of("list") as world:
        schedule(world, HOUR_MS, away_ms=20 * DAY_MS)
        world.close()
        names = [f"schedule/{each}" for each in world.files]
        (name,) = [each for each in names if payload(0, 0) in content(world.disk, each)]
        listed = (2 * EACH + 6).to_bytes(8, "little") + (2 * EACH + 8).to_bytes(8, "little")
        at = content(world.disk, name).index(listed)
        world.disk.flip(name, 8 * at)  # 106 becomes 107
        world.disk.flip(LOG, content(world.disk, LOG).index(payload(3, 5)) * 8)
        world.open()
        world.advance(2 * HOUR_MS)
        left = [
            payload(number, each)
            for number in (0, 1, 2)
            for each in range(EACH)
            if (number, each) not in {(2, 6), (2, 7)}
        ]
        assert sorted(world.broker.payloads) == sorted(left)
        assert world.engine.repairs.lost_messages == EACH + 1
        world.advance(21 * DAY_MS)
        assert sorted(world.broker.payloads) == sorted([*left, payload(2, 7)])
