"""Buckets on disk: what a crash, a bad disk or a full one leaves, and the race between loading and appending."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway.delay.schedule import manifest
from fairway.delay.schedule.manifest import COPY, DAMAGED, NAME, BucketEntry, Manifest
from fairway.errors import Code, Refused, RemoteProtocolError, WrongDirectory
from fairway.storage import segment
from fairway.storage.record import Record
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, OPTIONS, ORDERS, SECOND_MS, Fate, MessageId, World
from tests.unit.storage.helpers import content

MANIFEST = Manifest(7, 1_000, 4, [BucketEntry(3, 99, 1, 0, HOUR_MS, 640)])


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
        world.disk.flip(COPY, 401)
        before = world.files
        with pytest.raises(WrongDirectory, match="manifest is damaged"):
            world.open()
        assert world.files == before


@pytest.mark.parametrize("name", [NAME, COPY])
def test_one_of_two_manifests_is_enough(name: str) -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.close()
        whole = content(world.disk, NAME)
        assert content(world.disk, COPY) == whole
        world.disk.flip(name, 400)
        damaged = content(world.disk, name)
        world.open()
        assert (content(world.disk, NAME), content(world.disk, COPY)) == (whole, whole)
        assert [each.log for each in world.engine.log.findings] == ([NAME] if name == NAME else [])
        if name == NAME:
            assert content(world.disk, DAMAGED) == damaged
        world.advance(2 * DAY_MS)
        assert world.broker.payloads == [b"1"]


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("name", [NAME, COPY])
def test_a_full_disk_does_not_stop_the_start_that_restores_a_manifest(name: str, is_gone: bool) -> None:
    """The start goes on with the manifest that can be read, and writes the other when there is room."""
    with World(apart=True) as world:
        for number, due_ms in enumerate((DAY_MS, 40 * DAY_MS)):
            world.schedule([b"%d" % number], [world.now_ms + due_ms])
        world.settle()
        world.close()
        disk = world.schedule_disk
        assert disk is not None
        whole = content(disk, NAME)
        if is_gone:
            disk.remove(name)
        else:
            disk.flip(name, 400)
        world.fill()
        world.open()
        if name == COPY:
            assert "manifest.copy" not in disk.listing("schedule"), "it would be out of date after the next deletion"
        world.crash()
        assert world.schedule_disk is not None
        assert content(world.schedule_disk, COPY if name == NAME else NAME) == whole
        world.schedule_disk.remove("else/where")
        world.fill()
        world.open()
        world.settle()
        with pytest.raises(Refused, match="full"):
            world.send([b"new"], [world.now_ms + DAY_MS], producer=3)
        world.make_room()
        world.advance(2 * SECOND_MS)
        world.settle()
        written = content(world.schedule_disk, NAME)
        assert content(world.schedule_disk, COPY) == written
        assert len(manifest.unpack(written).buckets) == 2
        world.schedule([b"new"], [world.now_ms + DAY_MS], producer=3)
        for _ in range(5):
            world.advance(9 * DAY_MS)
        assert sorted(world.broker.payloads) == [b"0", b"1", b"new"]


def test_a_copy_that_an_older_version_left_behind_is_not_believed() -> None:
    """That version has written the first one alone, and deleted a bucket which the copy still names."""
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.close()
        world.disk.flip(NAME, 400)
        (name,) = world.files
        world.disk.remove(f"schedule/{name}")
        with pytest.raises(WrongDirectory, match="its copy names a bucket that is gone"):
            world.open()


def test_a_lost_manifest_is_not_an_empty_system() -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.close()
        world.disk.remove(NAME)
        world.disk.remove(COPY)
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
            world.schedule([b"payload %d" % number], [due_ms])
            world.settle()  # a piece each
        world.close()
        (name,) = world.files
        for file in (f"schedule/{name}", segment.file_name("messages", 0)):  # where it could have come back from, too
            world.disk.flip(file, content(world.disk, file).index(b"payload 1") * 8)
        world.open()
        world.advance(2 * DAY_MS)
        assert len(world.engine.damaged) == 1
        assert len(world.broker.payloads) == 2


@pytest.mark.parametrize("is_catalogued", [True, False])
def test_a_piece_with_a_flipped_bit_comes_back_from_the_message_log(is_catalogued: bool) -> None:
    """Wherever the bit is: in a record's header, in its body, in a catalogue."""
    payloads = [b"payload %d" % number for number in range(9)]
    at = 8 * segment.HEADER_BYTES
    while True:
        with World(options=replace(OPTIONS, catalogue_messages=32 if is_catalogued else 1 << 20)) as world:
            due_ms = world.now_ms + DAY_MS
            for number in range(3):  # the last ones lie in two buckets, and so do not follow on one another
                dues = [due_ms, due_ms + (number == 2) * 9 * DAY_MS, due_ms]
                world.schedule(payloads[3 * number : 3 * number + 3], dues, keys=["a", None, "b"])
                world.settle()
            world.close()
            name = f"schedule/{world.files[0]}"
            if at >= 8 * len(content(world.disk, name)):
                return
            world.disk.flip(name, at)
            world.open()
            world.advance(2 * DAY_MS)
            world.advance(10 * DAY_MS)
            assert sorted(world.broker.payloads) == payloads, at
            assert world.engine.damaged == [] or is_catalogued, at  # a catalogue is not made again, nor is it needed
            at += 8 * 11 + 3


@pytest.mark.parametrize("damaged", [(1, 2), (0, 1, 2, 3, 4), (1, 2, 4)])
@pytest.mark.parametrize("is_rotten", [True, False])
def test_pieces_with_damaged_headers_side_by_side_come_back_or_are_reported(
    damaged: tuple[int, ...], is_rotten: bool
) -> None:
    """A scan finds one damage over several pieces, because it cannot tell where the first one ends."""
    payloads = [b"payload %d" % number for number in range(5)]
    with World(options=replace(OPTIONS, catalogue_messages=1 << 20)) as world:
        for payload in payloads:
            world.schedule([payload], [world.now_ms + 2 * DAY_MS])
            world.settle()  # a piece each
        (file,) = world.engine.log
        pieces = list(file.scan(segment.HEADER_BYTES, file.end))
        assert len(pieces) == 5
        positions = [each.header.position for each in pieces if isinstance(each, Record)]
        world.close()
        name = f"schedule/{world.files[0]}"
        for number in damaged:
            world.disk.flip(name, 8 * (positions[number] + 20) + 3)
        lost = damaged[1:2] if is_rotten else ()
        for number in lost:  # more than one bit: this header cannot be put right
            world.disk.flip(name, 8 * (positions[number] + 21) + 5)
        world.open()
        world.advance(3 * DAY_MS)
        assert [each.position for each in world.engine.damaged] == [positions[number] for number in lost]
        behind = damaged[1:] if 3 in damaged else damaged[1:2]  # where nothing intact follows, all is one damage
        hidden = {*behind} if is_rotten else set[int]()
        assert sorted(world.broker.payloads) == [each for at, each in enumerate(payloads) if at not in hidden]


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
        assert world.decide(world.engine.cancel(MessageId(2, 0))) is Fate.CANCELLED  # decisions are not held up
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
        assert world.count(ORDERS) == 9
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
        assert world.count() == len(expected)
        for _ in range(20):
            world.advance(DAY_MS)
        assert sorted(world.broker.payloads) == sorted(expected)
        assert world.engine.log.findings == []
