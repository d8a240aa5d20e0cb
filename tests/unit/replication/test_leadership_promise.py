"""What a copy has promised outlives its process."""

from __future__ import annotations

import pytest

from fairway.errors import StorageFault
from fairway.replication.leadership import FILE, EpochPromise
from fairway.simulation import Simulation, simulate
from fairway.simulation.disk import SimDisk


def new_disk(world: Simulation) -> SimDisk:
    return SimDisk(world.rng.child("disk"), world.loop.call_later)


def test_it_is_kept_through_a_power_cut_and_never_goes_back() -> None:
    async def scenario(world: Simulation) -> int:
        disk = new_disk(world)
        promise = EpochPromise(disk)
        assert promise.epoch == 0
        await promise.keep(7)
        await promise.keep(3)
        assert promise.epoch == 7
        return EpochPromise(disk.crash()).epoch

    assert simulate(scenario, 1).result == 7


def test_one_that_is_damaged_is_not_guessed_at() -> None:
    async def scenario(world: Simulation) -> None:
        disk = new_disk(world)
        await EpochPromise(disk).keep(7)
        disk.publish(FILE, [b"FWYPRM\r\n", bytes(12)])
        with pytest.raises(StorageFault, match="empty directory"):
            EpochPromise(disk)

    simulate(scenario, 1)
