"""A replica begins with files of its master: they arrive, take the place of what was there, and a crash at any step of
that leaves nothing half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fairway.batch import checksum
from fairway.delay import install
from fairway.errors import Misuse, WrongDirectory
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import directory
from fairway.storage.survey import survey
from tests.unit.delay.helpers import DAY_MS, HOUR_MS
from tests.unit.delay.snapshots import EPOCH, GROUP, REPLICA, Line, Stage, known
from tests.unit.storage.helpers import content, names

STEPS_MAX = 600
FOLDERS = ("", "messages", "actions", "checkpoints", "index", "schedule", "arriving", "aside")


def _ready(seed: int | str = 0, *, apart: bool = False) -> Stage:
    """A snapshot has arrived."""
    stage = Stage(seed, apart=apart)
    stage.live_a_while()
    stage.fetch()
    return stage


@pytest.mark.parametrize("apart", [False, True])
def test_an_empty_directory_becomes_what_its_master_has(apart: bool) -> None:
    with _ready(apart=apart) as stage:
        wanted = known(stage.world.engine)
        assert len(wanted) > 10
        aside = stage.install()
        assert names(stage.disk, "arriving") == names(stage.schedule_disk, "arriving") == []
        assert install.FILE not in stage.disk.listing("")
        identity = directory.identify(stage.disk)
        assert identity is not None
        assert identity[1:] == stage.identity[1:]
        assert identity.directory_id not in (stage.identity.directory_id, 0)
        assert len(aside) == 5  # two segments, two buckets, a manifest
        for name in aside:
            disk = stage.schedule_disk if "-schedule-" in name else stage.disk
            assert content(disk, name).startswith(b"old ")
        stage.end_life()
        engine = stage.open()
        assert (engine.store.findings, engine.log.findings, engine.damaged, engine.stuck) == ([], [], [], [])
        assert known(engine) == wanted
        assert survey(stage.disk, verify=True).is_sound


def test_the_replica_sends_what_was_pending_and_nothing_twice() -> None:
    with _ready() as stage:
        world = stage.world
        before = len(world.broker.deliveries)
        pending = len(known(world.engine))
        stage.install()
        stage.take_over()
        world.settle()
        for _ in range(40):
            world.advance(10 * DAY_MS)
        sent = world.broker.payloads
        assert len(sent) == len(set(sent)) == before + pending
        assert known(world.engine) == {}


def test_what_is_under_way_is_sent_again_with_the_same_bytes() -> None:
    with Stage() as stage:
        world = stage.world
        stage.live_a_while()
        world.sleep(3 * HOUR_MS)
        while not (intents := world.look()):
            world.sleep(5)
        world.deliver(intents[0])  # it arrives, and nobody learns of that
        stage.fetch()
        stage.install()
        stage.take_over()
        world.settle()
        assert world.broker.repeats == 1


def test_it_goes_on_while_the_master_does() -> None:
    """Messages come, go and are split away while the files are fetched: what arrives is what was there at first."""
    with Stage(apart=True) as stage:
        stage.live_a_while()
        world, line = stage.world, Line(stage.snapshots)
        refill, wanted = stage.refill(), dict[tuple[int, int], tuple[int, int]]()

        async def fetch() -> None:
            await refill.fetch(line, GROUP, EPOCH, REPLICA)

        fetching = world.sim.loop.create_task(fetch())
        while not refill.total_bytes:
            world.sleep(0.2)
        wanted = known(world.engine)
        for day in range(60):
            world.send([b"new %d" % day], [world.now_ms + day * DAY_MS])
            world.tick()
            world.sleep(1)
        world.advance(90 * DAY_MS)
        stage.checkpoint()
        world.run(asyncio.wait_for(fetching, 1_000))
        assert len(wanted) > 10
        stage.install()
        stage.end_life()
        found = known(stage.open())
        assert set(found) == set(wanted)
        assert refill.damaged == []


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "which"), [(False, 0), (True, 0), (True, 1)])
def test_an_installation_can_be_cut_off_at_every_step(apart: bool, which: int) -> None:
    """In each operation of a disk in turn, and then once more in what the next start does about it."""
    with _ready(apart=apart) as stage:
        wanted, files = known(stage.world.engine), _frozen(stage)
        for step in range(1, STEPS_MAX):
            stage.disk, stage.schedule_disk = _thawed(stage, files, step)
            if not _interrupted(stage, which, step, stage.install):
                break
            _interrupted(stage, which, 1 + step % 7, lambda: install.finish(stage.disk, stage.schedule_disk))
            install.finish(stage.disk, stage.schedule_disk)
            if names(stage.disk, "arriving"):
                stage.install()  # it had not even begun
            _check_installed(stage, wanted, is_opened=step % 9 == 0)
        assert 20 < step < STEPS_MAX - 1


def _frozen(stage: Stage) -> list[tuple[int, str, bytes]]:
    """Every file of the replica: the number of its disk, its name and content."""
    found = []
    for number, disk in enumerate((stage.disk, stage.schedule_disk)[: 1 + stage.apart]):
        for where in FOLDERS:
            paths = [f"{where}/{name}" if where else name for name in disk.listing(where) if name not in FOLDERS]
            found += [(number, path, content(disk, path)) for path in paths]
    return found


def _thawed(stage: Stage, files: list[tuple[int, str, bytes]], step: int) -> tuple[SimDisk, SimDisk]:
    disks = [SimDisk(SeededRng(f"{step} {each}"), stage.world.sim.loop.call_later) for each in range(1 + stage.apart)]
    for number, name, data in files:
        disks[number].publish(name, [data])
    return disks[0], disks[-1]


def _interrupted(stage: Stage, which: int, step: int, act: Callable[[], object]) -> bool:
    """Do it, with a power cut in the n-th operation of one disk; whether it was so many."""
    (stage.disk, stage.schedule_disk)[which].crash_after(step)
    try:
        act()
    except SimulatedPowerCut:
        stage.end_life(SimDisk.crash)
        return True
    stage.end_life()
    return False


def _check_installed(stage: Stage, wanted: object, *, is_opened: bool) -> None:
    assert install.FILE not in stage.disk.listing("")
    assert names(stage.disk, "arriving") == names(stage.schedule_disk, "arriving") == []
    aside = [(disk, name) for disk in stage.disks[: 1 + stage.apart] for name in names(disk, "aside")]
    assert len(aside) == 5
    assert all(content(disk, name).startswith(b"old ") for disk, name in aside)
    if is_opened:
        assert known(stage.open()) == wanted


@pytest.mark.parametrize("seed", range(3))
def test_a_transfer_survives_power_cuts_and_kills(seed: int) -> None:
    """It is gone on with: with what an earlier life left, torn or not."""
    with Stage(seed, apart=bool(seed % 2)) as stage:
        stage.live_a_while()
        wanted = known(stage.world.engine)
        rng = SeededRng(f"cuts {seed}")
        for life in range(5):
            line = Line(stage.snapshots)
            line.parts_max = 3 + rng.below(20) if life < 4 else None
            task = stage.world.sim.loop.create_task(stage.refill().fetch(line, GROUP, EPOCH, REPLICA))
            stage.world.sleep(20 + rng.below(400) if life < 4 else 60_000)
            if task.done():
                task.result()
                break
            task.cancel()
            stage.world.sleep(0)
            stage.end_life(SimDisk.crash if rng.below(2) else SimDisk.crash_process)
        else:
            raise AssertionError("it never comes to an end")
        stage.install()
        stage.end_life(SimDisk.crash)
        engine = stage.open()
        assert known(engine) == wanted
        assert (engine.damaged, engine.log.findings) == ([], [])


# --- what is not done ------------------------------------------------------------------------------------------------


def test_half_a_snapshot_is_not_installed() -> None:
    with Stage() as stage:
        stage.live_a_while()
        line = Line(stage.snapshots)
        line.parts_max = 6
        task = stage.world.sim.loop.create_task(stage.refill().fetch(line, GROUP, EPOCH, REPLICA))
        stage.world.sleep(1_000)
        task.cancel()
        stage.world.sleep(0)
        for name in [each for each in names(stage.disk, "arriving") if each.endswith("manifest")]:
            stage.disk.remove(name)
        with pytest.raises(Misuse, match="no whole snapshot of epoch 3"):
            stage.install()
        assert content(stage.disk, "schedule/manifest") == b"old schedule/manifest"


def test_what_an_installation_needs_is_asked_for() -> None:
    with _ready(apart=True) as stage:
        plan = install.InstallPlan(1, stage.identity, EPOCH, install.MOVE_IN)
        stage.disk.publish(install.FILE, [install.pack(plan)])
        with pytest.raises(WrongDirectory, match="name the two directories that it had before"):
            install.finish(stage.disk, stage._new_disk("another", 1 << 20))
        stage.disk.publish(install.FILE, [install.pack(plan)[:-1] + b"\1"])
        with pytest.raises(WrongDirectory, match="choose an empty directory"):
            install.finish(stage.disk, stage.schedule_disk)
        newer = bytearray(install.pack(plan))
        newer[8] = 2
        stage.disk.publish(install.FILE, [_sealed(newer)])
        with pytest.raises(WrongDirectory, match="format version 2"):
            install.finish(stage.disk, stage.schedule_disk)


def _sealed(data: bytearray) -> bytes:
    return bytes(data[:64]) + checksum(bytes(data[:64])).to_bytes(4, "little") + bytes(4)
