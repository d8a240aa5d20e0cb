"""Bugs that the simulated campaign found, each as the shortest story that shows it, with the seed that found it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from fairway import batch
from fairway.errors import Refused, StorageFault
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import index_file, record
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.open_store import open_directory
from fairway.storage.recovery import DamageVerdict
from fairway.storage.retention import Policy
from tests.unit.storage.helpers import FIRST_MESSAGES, ORDERS, SMALL, World, batch_of, messages

FILLER = "filler"
CAPACITY = 256 * KIB
LARGE = b"L" * 3_000  # does not fit behind the small ones: it begins a segment of its own


def leave_room_for(world: World, size: int) -> None:
    world.disk.publish(FILLER, [bytes(world.disk.free_bytes() - size)])


@pytest.mark.parametrize("seed", range(20))
def test_what_a_full_disk_refused_does_not_come_back_after_a_power_cut(seed: int) -> None:
    """Seed 127: the file was cut back, but the cut was not synced, and the power cut brought the batch back."""
    with World(seed, capacity_bytes=CAPACITY) as world:
        world.produce([b"stored"])
        leave_room_for(world, 500)
        refused = world.send([b"refused"])
        world.send([b"too large" * 100])
        with pytest.raises(Refused):
            world.run(world.store.durable(refused))
        world.crash()
        world.open()
        assert messages(world.store) == {0: b"stored"}
        assert not world.store.findings


def roll_in_vain(world: World) -> None:
    """The first segment is complete and sealed, and a full disk undoes the second."""
    world.produce([b"1" * 1_000])
    leave_room_for(world, 1_000)
    world.send([b"2" * 200])
    world.send([LARGE])
    world.sequences[1] -= 1
    world.settle_undone()
    assert len(world.store.messages.log.segments) == 1
    world.disk.remove(FILLER)


def test_a_sealed_segment_is_not_written_to_again() -> None:
    """Seed 229: the next batch went into the sealed segment, its entry into the next one's index; it was read twice."""
    with World("sealed", capacity_bytes=CAPACITY) as world:
        roll_in_vain(world)
        for payload in (b"3", b"4" * 3_000, b"5" * 3_000):
            world.produce([payload])
        world.checkpoint()
        world.close()
        world.disk.remove(index_file.file_name(0))
        world.open()
        assert messages(world.store) == {0: b"1" * 1_000, 1: b"2" * 200, 2: b"3", 3: b"4" * 3_000, 4: b"5" * 3_000}


def test_a_checkpoint_leaves_the_index_of_a_sealed_segment_alone() -> None:
    """Seed 371: it took the sealed segment for the open one, and replaced its index by an empty one."""
    with World("index", capacity_bytes=CAPACITY) as world:
        roll_in_vain(world)
        world.checkpoint()
        world.reopen()
        assert messages(world.store) == {0: b"1" * 1_000, 1: b"2" * 200}


@pytest.mark.parametrize("seed", range(10))
def test_what_a_failed_sync_left_in_memory_is_written_again(seed: int) -> None:
    """Seed 3: the next process read it from the page cache, took it for synced, and confirmed it; the disk never had
    it."""
    with World(seed) as world:
        world.produce([b"one"])
        world.disk.fail_sync()
        receipt = world.send([b"two"])
        with pytest.raises(StorageFault):
            world.run(world.store.durable(receipt))
        world.kill()
        world.open()
        again = world.store.produce(ORDERS, batch_of([b"two"], first=1))
        world.run(world.store.durable(again))
        world.crash()
        world.open()
        assert messages(world.store) == {0: b"one", 1: b"two"}


@pytest.mark.parametrize("killed_at", range(1, 7))
@pytest.mark.parametrize("cut_at", range(1, 9))
def test_a_first_start_may_be_killed_and_the_second_lose_its_power(killed_at: int, cut_at: int) -> None:
    """Seed 22735: the identity had its name in memory only, the directories made after it were on disk, and the third
    start took it all for the property of another program."""
    disk = SimDisk(SeededRng(f"{killed_at} {cut_at}"), lambda *_: None)
    for operations, end in ((killed_at, SimDisk.crash_process), (cut_at, SimDisk.crash)):
        disk.crash_after(operations)
        with suppress(SimulatedPowerCut):
            open_directory(disk, SeededRng("first"))
            disk.open(FIRST_MESSAGES, create=True)
        disk = end(disk)
    open_directory(disk, SeededRng("third"))


@pytest.mark.parametrize("seed", range(4))
def test_segments_are_deleted_only_once_the_checkpoint_that_says_so_is_safe(seed: int) -> None:
    """A process killed between the rename of a checkpoint and the sync of its directory: the next one obeyed the new
    checkpoint, the power cut brought the old one back, and that one missed what had been deleted."""
    policy = Policy(bytes_max=8 * KIB)
    for delay_us in range(0, 12_000, 100):
        with World(seed, options=replace(SMALL, retention=policy)) as world:
            for number in range(16):
                world.produce([bytes([number]) * 1_000])
            world.checkpoint()
            assert world.store.retain().doomed
            world.run(asyncio.sleep(delay_us / 1_000_000))
            world.kill()
            open_directory(world.disk, SeededRng("next"))
            world.crash()
            assert not world.open().findings


def test_rot_that_reaches_into_a_torn_tail_counts_the_same_at_every_start() -> None:
    """Seed 0 on a disk that lies: the first start skipped sequences for the torn part too, the second did not."""
    with World("straddling") as world:
        world.produce([b"before"])
        rotten = world.produce([b"r" * 900])
        world.send([b"torn" * 300])
        witness = world.send([b"knows of the synced end between the two"])
        world.run(world.store.durable(witness))
        world.kill()
        rotten_at = rotten.end - record.HEADER_BYTES - len(batch_of([b"r" * 900]))
        for position in (rotten_at, rotten.end):  # the headers of both: one damaged span
            world.disk.flip(FIRST_MESSAGES, position * 8)
        first, second = (open_directory(world.disk, SeededRng("again")) for _ in range(2))
        assert [finding.verdict for finding in first.findings] == [DamageVerdict.ROTTEN, DamageVerdict.TORN]
        assert [each.next_sequence for each in first.views.subjects] == [
            each.next_sequence for each in second.views.subjects
        ]


def header(first: int, epoch: int) -> batch.BatchHeader:
    return batch.peek(batch_of([b"x"], first=first, epoch=epoch))


def window() -> DedupeWindow:
    """A batch of epoch 0 that ends at position 100, then one of epoch 1 that ends at 200."""
    made = DedupeWindow()
    for first, epoch in ((0, 0), (1, 1)):
        made.note(header(first, epoch), 1, first, 100 * first + 100, 0)
    return made


def test_with_a_batch_its_epoch_is_undone() -> None:
    """Seed 30: the stream stayed taken over by a batch that a full disk had undone, and its owner was locked out."""
    undone = window()
    undone.cut(100, dict)
    assert undone.judge(header(1, 0), 1) is None


def test_a_checkpoint_knows_no_epoch_that_is_not_committed() -> None:
    """Seed 55: the same by way of a checkpoint and a crash."""
    restarted = DedupeWindow.unpack(window().pack(100, dict))
    assert restarted.judge(header(1, 0), 1) is None


def test_what_was_stored_is_answered_for_whoever_has_taken_over_since() -> None:
    """Seed 37: a producer that could not know the outcome of its last batches was told of a conflict for ever."""
    original = window().judge(header(0, 0), 1)
    assert original is not None
    assert original.end == 100
