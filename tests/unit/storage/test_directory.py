"""Whose directory is this? And what a start does to one that is not, or not quite, ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairway.batch import checksum
from fairway.errors import DirectoryLocked, WrongDirectory
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng, SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import directory
from fairway.storage.directory import IDENTITY, DirectoryIdentity
from fairway.storage.store import Store
from tests.unit.storage.helpers import FIRST_ACTIONS, FIRST_MESSAGES, ROOMY, World, content, messages


def empty() -> SimDisk:
    return SimDisk(SeededRng(0), lambda *_: None)


def test_an_empty_directory_is_claimed_once() -> None:
    disk = empty()
    assert directory.identify(disk) is None
    identity, remark = directory.claim(disk, SeededRng(1))
    assert remark is None
    assert directory.claim(disk, SeededRng(2)) == (identity, None)


def test_a_first_start_that_was_killed_leaves_a_directory_that_is_still_empty() -> None:
    disk = empty()
    disk.open("lost+found/x", create=True)
    assert directory.identify(disk) is None


def test_a_directory_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"beach")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path, post=loop.call_soon_threadsafe)
        try:
            with pytest.raises(WrongDirectory, match="no Fairway data"):
                Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon)
        finally:
            disk.close()

    asyncio.run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_second_process_is_refused() -> None:
    with World(options=ROOMY) as world:
        with pytest.raises(DirectoryLocked):
            world.open(disk=world.disk.beside())
        world.produce([b"undisturbed"])


def test_no_flipped_bit_of_the_identity_passes() -> None:
    disk = empty()
    directory.claim(disk, SeededRng(1))
    for bit in range(directory.IDENTITY_BYTES * 8):
        disk.flip(IDENTITY, bit)
        with pytest.raises(WrongDirectory):
            directory.identify(disk)
        disk.flip(IDENTITY, bit)


@pytest.mark.parametrize("harm", ["missing", "flipped", "empty"])
def test_a_lost_identity_is_made_again_from_the_segments_under_a_new_directory_id(harm: str) -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        before = world.store.identity
        world.close()
        if harm == "missing":
            world.disk.remove(IDENTITY)
        elif harm == "flipped":
            world.disk.flip(IDENTITY, 100)
        else:
            world.disk.chop(IDENTITY, 0)
        store = world.open()
        assert store.identity.directory_id != before.directory_id
        assert store.identity[1:] == before[1:]
        assert messages(store) == {0: b"a"}
        assert any(IDENTITY in remark for remark in store.remarks)


def test_a_lost_identity_without_any_readable_segment_is_refused() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.kill()
        world.disk.remove(IDENTITY)
        for name in (FIRST_MESSAGES, FIRST_ACTIONS):
            world.disk.flip(name, 3)
        with pytest.raises(WrongDirectory, match="restore"):
            world.open()


@pytest.mark.parametrize("at", [8, 12])
def test_a_newer_version_of_the_identity_is_refused(at: int) -> None:
    disk = empty()
    directory.claim(disk, SeededRng(1))
    data = bytearray(content(disk, IDENTITY)[:-4])
    data[at] ^= 2
    disk.publish(IDENTITY, [bytes(data), checksum(bytes(data)).to_bytes(4, "little")])
    with pytest.raises(WrongDirectory, match=r"newer|version"):
        directory.identify(disk)


def test_ids_are_drawn_from_the_whole_range() -> None:
    drawn = [directory.claim(empty(), SeededRng(seed))[0] for seed in range(20)]
    assert len({each for identity in drawn for each in identity}) == 60
    assert any(max(each) >= 1 << 62 for each in drawn)
    assert all(max(each) < 1 << 63 for each in drawn), "an id fits into a signed number of any language"
    assert isinstance(drawn[0], DirectoryIdentity)
