"""What an earlier life left without a sync that succeeded: how the next one brings it down to the platter."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.errors import DiskFull, StorageFault
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from tests.unit.runtime.timers import Timers

SEEDS = range(30)


def content(disk: SimDisk | RealDisk, name: str = "a") -> bytes:
    file = disk.open(name)
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def commit(disk: SimDisk, timers: Timers, data: bytes) -> StorageFault | None:
    answers: list[StorageFault | None] = []
    disk.commit(disk.open("a", create=True), [data], answers.append)
    timers.ring_all()
    return answers[0]


def after_a_failed_sync(seed: int) -> SimDisk:
    """The next process sees "first.second.", the platter has "first."."""
    timers = Timers()
    disk = SimDisk(SeededRng(seed), timers.call_later)
    assert commit(disk, timers, b"first.") is None
    disk.fail_sync()
    assert type(commit(disk, timers, b"second.")) is StorageFault
    return disk.crash_process()


@pytest.mark.parametrize("seed", SEEDS)
def test_sync_writes_again_what_a_failed_sync_dropped(seed: int) -> None:
    disk = after_a_failed_sync(seed)
    disk.sync(disk.open("a"), len(b"first."))
    assert content(disk.crash()) == b"first.second."


@pytest.mark.parametrize("seed", SEEDS)
def test_power_that_goes_meanwhile_takes_nothing_that_was_synced(seed: int) -> None:
    disk = after_a_failed_sync(seed)
    disk.crash_after(1 + seed % 2)
    with pytest.raises(SimulatedPowerCut):
        disk.sync(disk.open("a"), len(b"first."))
    assert content(disk.crash()).startswith(b"first.")


def test_the_real_disk_leaves_every_byte_as_it_was(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    data = bytes(range(256)) * 10_000  # more than one piece
    disk.publish("a", [data])
    file = disk.open("a")
    for position in (0, 1, 1 << 20, len(data) - 1, len(data)):
        disk.sync(file, position)
        assert content(disk) == data
    assert file.size == len(data)
    disk.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_found_no_room_stays_away_after_a_power_cut(seed: int) -> None:
    timers = Timers()
    disk = SimDisk(SeededRng(seed), timers.call_later)
    assert commit(disk, timers, b"stored.") is None
    disk.fail_write()
    assert isinstance(commit(disk, timers, b"x" * 2_000), DiskFull)
    assert content(disk.crash()) == b"stored."


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_outlives_a_failed_sync_once_another_succeeds(seed: int) -> None:
    """It is metadata: the file system's journal has it."""
    timers = Timers()
    disk = SimDisk(SeededRng(seed), timers.call_later)
    assert commit(disk, timers, b"0123456789") is None
    disk.fail_sync()
    with pytest.raises(StorageFault):
        disk.truncate(disk.open("a"), 4)
    disk = disk.crash_process()
    disk.sync(disk.open("a"), 4)
    assert content(disk.crash()) == b"0123"
