"""Files that get another name, and bytes that are written over: promises of both forms of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway.errors import DiskFull, Misuse
from fairway.runtime.disk import Disk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from tests.unit.runtime.test_disk_contract import Bench, RealBench, SimBench
from tests.unit.runtime.timers import Timers


@pytest.fixture(params=["real", "sim"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made: Bench = RealBench(tmp_path / "data") if request.param == "real" else SimBench()
    yield made
    made.disk.close()


def _content(disk: Disk, name: str) -> bytes:
    file = disk.open(name)
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def test_a_file_moves_to_another_directory(bench: Bench) -> None:
    bench.disk.publish("log/1", [b"one"])
    bench.disk.publish("log/2", [b"two"])
    bench.disk.move("log/1", "aside/deep/one")
    assert bench.disk.listing("log") == ["2"]
    assert _content(bench.disk, "aside/deep/one") == b"one"
    bench.disk.move("log/2", "aside/deep/one")  # in place of what had the name
    assert _content(bench.beside(), "aside/deep/one") == b"two"


def test_what_is_absent_has_moved_already(bench: Bench) -> None:
    bench.disk.move("nowhere/1", "aside/1")
    bench.disk.publish("log/2", [b""])
    bench.disk.move("log/1", "aside/1")
    assert bench.disk.listing("log") == ["2"]
    assert bench.disk.listing("aside") == []
    for old, new in (("../x", "y"), ("x", "/y"), ("x", "y.tmp")):
        with pytest.raises(Misuse):
            bench.disk.move(old, new)


def test_bytes_are_written_over(bench: Bench) -> None:
    bench.disk.publish("log/1", [b"0123456789"])
    file = bench.disk.open("log/1")
    bench.disk.repair(file, 3, b"abc")
    assert (file.size, file.read(0, 20)) == (10, b"012abc6789")
    bench.disk.repair(file, 8, b"wxyz")
    bench.disk.repair(file, 12, b"!")
    assert (file.size, file.read(0, 20)) == (13, b"012abc67wxyz!")
    bench.disk.commit(file, [b"?"], lambda _: None)
    bench.settle(1)
    assert _content(bench.beside(), "log/1") == b"012abc67wxyz!?"


def test_a_repair_leaves_no_gap_and_meets_no_commit(bench: Bench) -> None:
    bench.disk.publish("log/1", [b"0123456789"])
    file = bench.disk.open("log/1")
    with pytest.raises(Misuse, match="no gap"):
        bench.disk.repair(file, 11, b"x")
    with pytest.raises(Misuse, match="no gap"):
        bench.disk.repair(file, -1, b"x")


def test_a_move_that_is_killed_loses_nothing() -> None:
    for step in range(1, 20):
        disk = SimDisk(SeededRng(f"move {step}"), Timers().call_later)
        disk.publish("log/1", [b"one"])
        disk.crash_after(step)
        try:
            disk.move("log/1", "aside/1")
        except SimulatedPowerCut:
            disk = disk.crash()
        else:
            assert step > 2
            return
        found = [_content(disk, f"{where}/1") for where in ("log", "aside") if disk.listing(where)]
        assert found in ([b"one"], [b"one", b"one"])
        disk.move("log/1", "aside/1")
        assert (disk.listing("log"), _content(disk, "aside/1")) == ([], b"one")
    raise AssertionError("it never ends")


def test_a_repair_that_is_killed_touches_nothing_else() -> None:
    for step in range(1, 20):
        disk = SimDisk(SeededRng(f"repair {step}"), Timers().call_later)
        disk.publish("log/1", [b"a" * 2_000])
        disk.crash_after(step)
        try:
            disk.repair(disk.open("log/1"), 600, b"b" * 800)
        except SimulatedPowerCut:
            disk = disk.crash()
        else:
            assert step > 1
            return
        found = _content(disk, "log/1")
        assert (len(found), found[:600], found[1_400:]) == (2_000, b"a" * 600, b"a" * 600)
    raise AssertionError("it never ends")


def test_a_repair_without_room_leaves_the_length() -> None:
    disk = SimDisk(SeededRng("full"), Timers().call_later, capacity_bytes=3_000)
    disk.publish("log/1", [b"a" * 2_000])
    file = disk.open("log/1")
    with pytest.raises(DiskFull):
        disk.repair(file, 1_500, b"b" * 2_000)
    assert (file.size, file.read(0, 1_500)) == (2_000, b"a" * 1_500)
