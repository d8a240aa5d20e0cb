"""A root that was locked stays the same directory for its owner, wherever its path leads."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from fairway.errors import DirectoryMoved, StorageFault
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.runtime.shared_directory import SharedDirectory
from tests.unit.runtime.test_real_disk import Owner

NOTICED_S = 0.6  # a commit looks every half second


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_committed_is_in_the_directory_that_was_locked(tmp_path: Path, is_replaced: bool) -> None:
    owner = Owner(tmp_path / "data")
    owner.disk.lock()
    assert owner.commit("log/a", b"1") is None
    (tmp_path / "data").rename(tmp_path / "moved")
    if is_replaced:
        (tmp_path / "data" / "log").mkdir(parents=True)
    faults = [owner.commit("log/a", b"2")]
    time.sleep(NOTICED_S)
    faults.append(owner.commit("log/a", b"3"))
    assert isinstance(faults[-1], DirectoryMoved)
    assert (tmp_path / "moved" / "log" / "a").read_bytes() == b"12"[: 2 if faults[0] is None else 1]
    assert not (tmp_path / "data" / "log" / "a").exists()
    owner.disk.close()


def test_nothing_is_made_in_a_directory_that_is_not_the_one_that_was_locked(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "data")
    disk.lock()
    disk.publish("log/a", [b"1"])
    (tmp_path / "data").rename(tmp_path / "moved")
    for make in (lambda: disk.publish("log/a", [b"2"]), lambda: disk.open("log/b", create=True)):
        with pytest.raises(DirectoryMoved, match="no longer the directory that this process locked"):
            make()
    with pytest.raises(DirectoryMoved):
        disk.move("log/a", "aside/a")
    disk.remove("log/a")  # of the directory that was locked
    assert not (tmp_path / "data").exists()
    assert [each.name for each in (tmp_path / "moved").iterdir() if each.is_dir()] == ["log"]
    assert not list((tmp_path / "moved" / "log").iterdir())
    disk.close()


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("removed", ["data", "data/log"])
def test_of_a_directory_that_was_removed_nobody_says_that_nothing_is_lost(
    tmp_path: Path, removed: str, is_replaced: bool
) -> None:
    disk = RealDisk(tmp_path / "data")
    disk.lock()
    disk.publish("log/a", [b"1"])
    shutil.rmtree(tmp_path / removed)
    if is_replaced:
        (tmp_path / removed).mkdir()
    with pytest.raises(DirectoryMoved, match=r"it was removed, .* is gone with it\. Restore it"):
        disk.publish("log/b", [b"2"])
    disk.close()


def test_a_directory_below_the_root_is_held_too(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "data")
    disk.lock()
    disk.publish("log/a", [b"1"])
    (tmp_path / "data" / "log").rename(tmp_path / "log")
    with pytest.raises(DirectoryMoved, match="data/log"):
        disk.publish("log/b", [b"2"])
    assert not (tmp_path / "data" / "log").exists()
    disk.close()


def test_the_watch_tells_an_owner_who_writes_nothing(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "data")
    owner.disk.lock()
    told: list[StorageFault] = []
    owner.disk.watch(told.append)
    (tmp_path / "data").rename(tmp_path / "moved")
    owner.answers.append(None)
    owner.take()
    assert isinstance(told[0], DirectoryMoved)
    owner.disk.close()


def test_shared_directories_are_not_made_again(tmp_path: Path) -> None:
    """What clients spool would be hidden once the file system is mounted again."""
    shared = SharedDirectory(tmp_path / "spool")
    number, disk = shared.make(SeededRng(1))
    (tmp_path / "spool").rename(tmp_path / "moved")
    with pytest.raises(DirectoryMoved):
        shared.make(SeededRng(2))
    with pytest.raises(DirectoryMoved):
        disk.publish("log/a", [b"1"])
    assert shared.discard(f"{number:016x}", disk) is False
    shared.close()
    assert not (tmp_path / "spool").exists()
