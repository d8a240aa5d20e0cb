"""New files and directories are for their owner alone, whatever the umask; planted links and pipes are refused."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairway.errors import StorageFault
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.runtime.shared_directory import SharedDirectory
from fairway.runtime.sqlite_file import SqliteFile, look

SCHEMA = ("CREATE TABLE t (a INTEGER)",)


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    """Of everything below, by name."""
    return {str(each.relative_to(root)): stat.S_IMODE(each.lstat().st_mode) for each in root.rglob("*")}


def use(disk: RealDisk) -> None:
    """Make a file in every way there is."""
    disk.lock()
    disk.publish("checkpoints/1", [b"x"])
    disk.open("messages/1", create=True)
    disk.open("top", create=True)
    disk.move("top", "aside/top")


def test_what_a_disk_makes_is_its_owners_alone(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "deep" / "data")
    use(disk)
    disk.close()
    assert modes(tmp_path) == {
        "deep": 0o700,
        "deep/data": 0o700,
        "deep/data/lock": 0o600,
        "deep/data/aside": 0o700,
        "deep/data/aside/top": 0o600,
        "deep/data/checkpoints": 0o700,
        "deep/data/checkpoints/1": 0o600,
        "deep/data/messages": 0o700,
        "deep/data/messages/1": 0o600,
    }


def test_what_is_there_keeps_its_modes(tmp_path: Path) -> None:
    (tmp_path / "messages").mkdir(0o755)
    for name in ("lock", "messages/1"):
        (tmp_path / name).touch(0o644)
    disk = RealDisk(tmp_path)
    use(disk)
    disk.close()
    found = modes(tmp_path)
    assert [found[name] for name in ("messages", "lock", "messages/1")] == [0o755, 0o644, 0o644]


def test_a_narrower_umask_holds(tmp_path: Path) -> None:
    os.umask(0o377)
    disk = RealDisk(tmp_path)
    disk.open("a", create=True)
    disk.close()
    assert modes(tmp_path) == {"a": 0o400}


def test_what_processes_share_is_their_users_alone(tmp_path: Path) -> None:
    yard = SharedDirectory(tmp_path / "spool")
    number, disk = yard.make(RealRng())
    disk.close()
    yard.close()
    name = f"spool/{number:016x}"
    assert modes(tmp_path) == {"spool": 0o700, "spool/lock": 0o600, name: 0o700, f"{name}/lock": 0o600}


async def opened(path: Path) -> dict[str, int]:
    """The modes of an SQLite file and its log while it is open."""
    file = SqliteFile(str(path))
    await file.open(SCHEMA, 1)
    found = modes(path.parent)
    file.close()
    return found


def test_an_sqlite_file_and_its_log_are_their_owners_alone(tmp_path: Path) -> None:
    found = asyncio.run(opened(tmp_path / "registry.sqlite"))
    assert set(found) == {"registry.sqlite", "registry.sqlite-wal", "registry.sqlite-shm"}
    assert set(found.values()) == {0o600}


# --- planted links ----------------------------------------------------------------------------------------------------


def _open_below(disk: RealDisk) -> None:
    disk.lock()
    disk.open("messages/1", create=True)


CALLS: dict[str, Callable[[RealDisk], object]] = {
    "lock": RealDisk.lock,
    "checkpoints/1.tmp": lambda disk: disk.publish("checkpoints/1", [b"ours"]),
    "messages/1": lambda disk: disk.open("messages/1", create=True),
    "messages/2": lambda disk: disk.open("messages/2"),
    "messages": _open_below,
}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of somebody else, which nobody may touch."""
    made = tmp_path / "victim"
    made.write_text("precious")
    yield made
    assert made.read_text() == "precious"
    assert stat.S_IMODE(made.stat().st_mode) == 0o666


@pytest.mark.parametrize("is_dangling", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_planted_link_is_refused_and_named(name: str, is_dangling: bool, tmp_path: Path, victim: Path) -> None:
    planted = tmp_path / "data" / name
    planted.parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere" if is_dangling else victim if "/" in name or name == "lock" else tmp_path
    planted.symlink_to(elsewhere)
    before = set(modes(tmp_path))
    disk = RealDisk(tmp_path / "data")
    with pytest.raises(StorageFault) as caught:
        CALLS[name](disk)
    disk.close()
    assert f"{planted}: it is a symbolic link, and Fairway follows none; remove the link" in str(caught.value)
    assert planted.is_symlink()
    assert set(modes(tmp_path)) - before <= {"data/lock"}


def test_a_planted_pipe_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    disk = RealDisk(tmp_path)
    for call in (disk.owner, disk.lock):
        with pytest.raises(StorageFault, match="lock: it is no regular file; move it away"):
            call()
    disk.close()


def test_a_link_to_the_data_directory_itself_is_the_operators_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to("real")
    disk = RealDisk(tmp_path / "data")
    use(disk)
    disk.close()
    assert (tmp_path / "real" / "lock").is_file()


def test_a_lock_of_a_shared_directory_that_is_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "lock").symlink_to(victim)
    with pytest.raises(StorageFault, match="spool/lock: it is a symbolic link"):
        SharedDirectory(tmp_path / "spool").make(RealRng())


def test_a_disk_of_a_shared_directory_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "0123456789abcdef").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageFault, match="spool/0123456789abcdef: it is a symbolic link"):
        SharedDirectory(tmp_path / "spool").claim("0123456789abcdef")
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_an_sqlite_file_that_is_a_link(suffix: str, tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "registry.sqlite"
    if suffix:
        asyncio.run(opened(path))
    planted = tmp_path / f"registry.sqlite{suffix}"
    planted.symlink_to(victim)
    sentence = f"{planted}: it is a symbolic link"
    with pytest.raises(StorageFault) as caught:
        asyncio.run(opened(path))
    assert sentence in str(caught.value)
    with pytest.raises(StorageFault) as caught:
        look(str(path), "SELECT 1")
    assert sentence in str(caught.value)
