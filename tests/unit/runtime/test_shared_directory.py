"""The directory that processes share: one owner at a time for each disk, and none for those of the dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.errors import FairwayError, Misuse
from fairway.runtime.rng import SeededRng
from fairway.runtime.shared_directory import SharedDirectory


def test_a_disk_has_one_owner_until_it_is_let_go(tmp_path: Path) -> None:
    mine, other = SharedDirectory(tmp_path / "yard"), SharedDirectory(tmp_path / "yard")
    number, disk = mine.make(SeededRng(1))
    name = f"{number:016x}"
    assert other.names() == [name]
    assert other.claim(name) is None
    disk.publish("log/a", [b"x"])
    assert mine.discard(name, disk) is False, "something is in it"
    claimed = other.claim(name)
    assert claimed is not None
    assert mine.claim(name) is None
    claimed.remove("log/a")
    assert other.discard(name, claimed) is True
    assert mine.names() == []
    assert mine.claim(name) is None


def test_other_things_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "forwarder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    yard = SharedDirectory(tmp_path)
    number, disk = yard.make(SeededRng(1))
    assert yard.names() == [f"{number:016x}"]
    assert yard.discard(f"{number:016x}", disk)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["forwarder", "lock", "notes.txt"]


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="16 digits"):
        SharedDirectory(tmp_path).claim("../elsewhere")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FairwayError, match=r"file/yard"):
        SharedDirectory(tmp_path / "file" / "yard").make(SeededRng(1))
