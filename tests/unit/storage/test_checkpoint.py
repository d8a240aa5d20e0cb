"""The checkpoint: a convenience at start-up, a witness in court, and never the only one who knows."""

from __future__ import annotations

import asyncio

import pytest

from fairway.batch import checksum
from fairway.errors import RemoteProtocolError, StorageFault, WrongDirectory
from fairway.limits import KIB
from fairway.names import Subject
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import checkpoint, segment
from fairway.storage.checkpoint import Checkpoint, LogMark, RotMark
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.store import StoreOptions
from tests.unit.storage.counting import CountingDisk
from tests.unit.storage.helpers import (
    BILLS,
    FIRST_ACTIONS,
    FIRST_MESSAGES,
    ORDERS,
    ROOMY,
    SMALL,
    World,
    ack,
    batch_of,
    content,
    messages,
    names,
)

EXAMPLE = Checkpoint(
    7,
    1,
    2,
    3,
    LogMark(0, 640, {0: 5}),
    LogMark(64, 128, {64: 6}),
    b"s" * 8,
    b"d" * 8,
    [RotMark("messages", 1, 2, "why")],
)


SUBJECTS = [BILLS, Subject("third"), Subject("fourth")]


def packed(example: Checkpoint = EXAMPLE) -> bytes:
    return b"".join(bytes(part) for part in checkpoint.pack(example))


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_was_packed_is_unpacked() -> None:
    assert checkpoint.unpack(packed()) == EXAMPLE


def test_no_flipped_bit_and_no_cut_passes() -> None:
    data = packed()
    for bit in range(len(data) * 8):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            checkpoint.unpack(bytes(turned))
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            checkpoint.unpack(data[:size])


def test_a_newer_version_is_refused() -> None:
    data = bytearray(packed())
    data[8] = 2
    covered = bytes(data[: checkpoint.HEADER_BYTES - 8])
    data[checkpoint.HEADER_BYTES - 8 : checkpoint.HEADER_BYTES - 4] = checksum(covered).to_bytes(4, "little")
    with pytest.raises(WrongDirectory, match="newer"):
        checkpoint.unpack(bytes(data))


def test_a_checkpoint_of_another_directory_is_not_believed() -> None:
    """Found in review: one that was copied over by hand decided what retention had deleted."""
    disk = SimDisk(SeededRng(0), lambda *_: None)
    disk.publish(checkpoint.file_name(7), [packed()])
    assert checkpoint.newest(disk, DirectoryIdentity(9, 1, 2)) == (EXAMPLE, [])
    found, remarks = checkpoint.newest(disk, DirectoryIdentity(9, 1, 3))
    assert found is None
    assert "another data directory" in remarks[0]


def test_other_files_among_the_checkpoints_are_no_checkpoints() -> None:
    disk = SimDisk(SeededRng(0), lambda *_: None)
    for name in ("7.ckpt", "notes.txt", f"{'9' * 20}.ckpt.bak"):
        disk.publish(f"checkpoints/{name}", [b"?"])
    assert checkpoint.newest(disk, DirectoryIdentity(1, 1, 2)) == (None, [])


# --- start-up reads only what came after it --------------------------------------------------------------------------


def test_only_what_came_after_it_is_read() -> None:
    with World(options=SMALL) as world:
        for number in range(30):
            world.produce([b"%02d" % number * 100])
            world.act(ack(number, detail=b"d" * 50))
        world.checkpoint()
        covered = world.store.messages.log.committed_end, world.store.actions.log.committed_end
        world.produce([b"after"])
        world.act(ack(99))
        world.kill()
        there = [name for log in ("messages", "actions") for name in names(world.disk, log)]
        counting = CountingDisk(world.disk)
        world.open(disk=counting)
        for log, end in zip(("messages", "actions"), covered, strict=True):
            files = [name for name in there if name.startswith(log) and name.endswith(segment.SUFFIX)]
            for name in files[:-1]:
                assert counting.read_bytes(name) <= segment.HEADER_BYTES
            base = segment.base_of(files[-1].rpartition("/")[2])
            assert base is not None
            behind_header = [at for at, _ in counting.reads[files[-1]] if at >= segment.HEADER_BYTES]
            assert base + min(behind_header) == end
            assert counting.read_bytes(files[-1]) < 1_500
        assert len(messages(world.store)) == 31


def test_without_one_everything_is_read() -> None:
    with World(options=SMALL) as world:
        for number in range(30):
            world.produce([b"%02d" % number * 100])
        world.settle()
        total = sum(len(content(world.disk, name)) for name in names(world.disk, "messages"))
        world.kill()
        counting = CountingDisk(world.disk)
        world.open(disk=counting)
        assert sum(map(counting.read_bytes, names(world.disk, "messages"))) >= total
        assert len(messages(world.store)) == 30


# --- damaged ones ----------------------------------------------------------------------------------------------------


def two_checkpoints() -> World:
    world = World("two", options=ROOMY)
    for number in range(3):
        world.produce([b"%d" % number])
        world.produce([b"bill"], BILLS, producer=2)
        if number < 2:
            world.checkpoint()
    assert len(world.disk.listing("checkpoints")) == 2
    return world


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.parametrize("harm", ["flip", "empty", "remove"])
def test_a_damaged_one_means_the_one_before_it_and_none_a_full_rebuild(damaged: int, harm: str) -> None:
    with two_checkpoints() as world:
        world.kill()
        for name in names(world.disk, "checkpoints")[-damaged:]:
            if harm == "flip":
                world.disk.flip(name, 8 * 60)
            elif harm == "empty":
                world.disk.chop(name, 0)
            else:
                world.disk.remove(name)
        store = world.open()
        assert messages(store) == {0: b"0", 1: b"1", 2: b"2"}
        assert len(messages(store, BILLS)) == 3
        assert len([each for each in store.remarks if "ckpt" in each]) == (damaged if harm != "remove" else 0)
        assert store.produce(ORDERS, batch_of([b"2"], first=2)).is_duplicate
        world.produce([b"3"])
        assert len(messages(world.reopen())) == 4


def test_the_last_two_are_kept_and_numbers_go_on() -> None:
    with two_checkpoints() as world:
        for _ in range(3):
            world.checkpoint()
        assert checkpoint.numbers(world.disk) == [4, 5]
        world.reopen()
        world.checkpoint()
        assert checkpoint.numbers(world.disk) == [6, 7]


# --- while appends are in flight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_it_never_covers_more_than_is_committed(seed: int) -> None:
    with World(f"in flight {seed}", options=SMALL) as world:
        world.produce([b"first"])
        for number in range(12):
            world.send([b"%02d" % number * 40], SUBJECTS[number % 3], producer=10 + number % 3)
            world.store.act([ack(number)])
            if number % 4 == 1:
                world.store.checkpoint()
            if number % 3 == 2:
                world.run(asyncio.sleep(0.000_3 * (seed % 5)))
        confirmed = {subject: messages(world.store, subject) for subject in {ORDERS, *SUBJECTS}}
        world.run(asyncio.sleep(0.001 * (seed % 3)))
        committed = world.store.messages.log.committed_end
        known, _ = checkpoint.newest(world.disk, world.store.identity)
        assert known is None or known.messages.end <= committed
        confirmed = {subject: messages(world.store, subject) for subject in {ORDERS, *SUBJECTS}}
        world.crash()
        store = world.open()
        assert store.findings == [] or {each.verdict.value for each in store.findings} == {"torn"}
        for subject, before in confirmed.items():
            after = messages(store, subject)
            assert before.items() <= after.items()
            assert sorted(after) == list(range(len(after)))


def test_it_names_no_epoch_that_is_not_committed() -> None:
    """Records that are committed later, of the epoch before, would be called stale and cut."""
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.kill()
        world.open().checkpoint()  # before the record that opens epoch 2 is synced
        world.settle()
        known, _ = checkpoint.newest(world.disk, world.store.identity)
        assert known is not None
        assert known.epoch == 1


def test_it_is_written_by_itself_every_so_many_bytes() -> None:
    options = StoreOptions(
        segment_bytes=64 * KIB, action_segment_bytes=64 * KIB, low_water_bytes=0, checkpoint_every_bytes=2 * KIB
    )
    with World(options=options) as world:
        for number in range(60):
            world.produce([b"%02d" % number * 100])
        world.settle()
        assert max(checkpoint.numbers(world.disk)) >= 5
        world.kill()
        counting = CountingDisk(world.disk)
        world.open(disk=counting)
        assert counting.read_bytes(FIRST_MESSAGES) <= 4 * KIB


def test_a_full_disk_only_puts_it_off() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.settle()
        world.disk.fail_write()
        world.checkpoint()
        assert checkpoint.numbers(world.disk) == []
        assert any("not written" in each for each in world.store.remarks)
        world.produce([b"b"])
        world.checkpoint()
        assert checkpoint.numbers(world.disk) == [1]


def test_a_failed_sync_of_it_stops_the_store() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.settle()
        world.disk.fail_sync()
        world.checkpoint()
        assert world.store.fault is not None
        with pytest.raises(StorageFault, match="sync"):
            world.produce([b"b"])


def test_closing_leaves_one_that_covers_everything() -> None:
    with World(options=ROOMY) as world:
        world.send([b"a"])
        world.store.act([ack(0)])
        world.store.checkpoint()
        world.close()
        known, _ = checkpoint.newest(world.disk, world.store.identity)
        assert known is not None
        assert known.messages.end == len(content(world.disk, FIRST_MESSAGES))
        assert known.actions.end == len(content(world.disk, FIRST_ACTIONS))
