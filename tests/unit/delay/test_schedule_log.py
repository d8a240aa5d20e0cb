"""Buckets on disk: what a crash, a bad disk or a full one leaves, and the race between loading and appending."""

from __future__ import annotations

import pytest

from fairway.delay import manifest
from fairway.delay.manifest import NAME, Bucket, Manifest
from fairway.errors import Code, Refused, RemoteProtocolError, WrongDirectory
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, ORDERS, SECOND_MS, Answer, MessageId, World
from tests.unit.storage.helpers import content

MANIFEST = Manifest(7, 1_000, 4, [Bucket(3, 99, 1, 0, HOUR_MS, 640)])


def packed() -> bytes:
    return b"".join(bytes(part) for part in manifest.pack(MANIFEST))


def test_a_manifest_comes_back() -> None:
    assert manifest.unpack(packed()) == MANIFEST


def test_no_bit_of_a_manifest_may_flip() -> None:
    data = packed()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((RemoteProtocolError, WrongDirectory)):
            manifest.unpack(bytes(flipped))


def test_a_damaged_manifest_stops_the_start_and_touches_nothing() -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.close()
        world.disk.flip(NAME, 400)
        before = world.files
        with pytest.raises(WrongDirectory, match="manifest is damaged"):
            world.open()
        assert world.files == before


def test_a_lost_manifest_is_not_an_empty_system() -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.close()
        world.disk.remove(NAME)
        with pytest.raises(WrongDirectory, match="missing"):
            world.open()


def test_buckets_of_another_message_log_are_refused() -> None:
    with World(apart=True) as world, World("another", apart=True) as other:
        for each in (world, other):
            each.schedule([b"1"], [each.now_ms + DAY_MS])
            each.settle()
            each.close()
        world.schedule_disk = other.schedule_disk
        with pytest.raises(WrongDirectory, match="another message log"):
            world.open()


def test_a_rotten_piece_is_reported_and_the_rest_goes_out() -> None:
    with World() as world:
        due_ms = world.now_ms + DAY_MS
        for number in range(3):
            world.schedule([b"%d" % number], [due_ms])
            world.settle()  # a piece each
        world.close()
        (name,) = world.files
        at = content(world.disk, f"schedule/{name}").index(b"1", 64 + 230)
        world.disk.flip(f"schedule/{name}", at * 8)
        world.open()
        world.advance(2 * DAY_MS)
        assert len(world.engine.damaged) == 1
        assert len(world.broker.payloads) == 2


def test_a_full_disk_refuses_what_is_new_and_goes_on_when_there_is_room() -> None:
    with World(apart=True) as world:
        world.schedule([b"1"], [world.now_ms + 90 * DAY_MS])
        world.settle()
        world.fill()
        world.schedule([b"2"], [world.now_ms + 90 * DAY_MS])
        world.schedule([b"3"], [world.now_ms + 400 * DAY_MS], producer=2)  # a bucket of its own
        for _ in range(10):
            world.tick()
            world.sleep(10)
        with pytest.raises(Refused, match="full") as caught:
            world.send([b"4"], [world.now_ms + 90 * DAY_MS], producer=3)
        assert caught.value.code is Code.READ_ONLY
        assert world.engine.fault is None
        assert world.decide(world.engine.cancel(MessageId(2, 0))) is Answer.CANCELLED  # decisions are not held up
        world.make_room()
        world.advance(2 * SECOND_MS)
        world.schedule([b"4"], [world.now_ms + 90 * DAY_MS], producer=3)
        world.settle()
        world.crash()
        world.open()
        for _ in range(10):
            world.advance(10 * DAY_MS)
        assert sorted(world.broker.payloads) == [b"1", b"2", b"4"]


@pytest.mark.parametrize("steps", range(6))
def test_what_comes_into_a_bucket_that_is_being_loaded_is_there_once(steps: int) -> None:
    """The race that QMQ loses, at each point of the loading."""
    with World() as world:
        due_ms = world.now_ms + HOUR_MS
        for number in range(8):
            world.schedule([b"%d" % number], [due_ms])
        world.settle()
        world.reopen()
        for _ in range(steps):
            world.tick()  # loads two messages
        world.schedule([b"meanwhile"], [due_ms])
        world.sleep(5)
        world.settle()
        assert world.engine.pending().count(world.engine.filter(ORDERS)) == 9
        world.advance(HOUR_MS + SECOND_MS)
        assert sorted(world.broker.payloads) == sorted([b"%d" % number for number in range(8)] + [b"meanwhile"])


@pytest.mark.parametrize("ticks", range(14))
@pytest.mark.parametrize("end", ["crash", "kill"])
def test_a_split_may_be_cut_off_at_any_step(ticks: int, end: str) -> None:
    with World(f"{ticks} {end}") as world:
        first_ms = world.now_ms + 40 * DAY_MS
        dues = [first_ms + number * 7 * HOUR_MS for number in range(12)]
        for number, due_ms in enumerate(dues):
            world.schedule([b"%d" % number], [due_ms])
        world.settle()
        world.sleep(25 * DAY_MS)  # the month is to be cut into days
        for tick in range(ticks):
            world.tick()
            world.sleep(0.3)
            if tick == 3:
                world.schedule([b"meanwhile"], [dues[5]])
        (world.crash if end == "crash" else world.kill)()
        world.open()
        world.settle()
        expected = [b"%d" % number for number in range(12)] + [b"meanwhile"] * (ticks > 3)
        assert world.engine.pending().count(world.engine.filter()) == len(expected)
        for _ in range(20):
            world.advance(DAY_MS)
        assert sorted(world.broker.payloads) == sorted(expected)
        assert world.engine.log.findings == []
