"""Reads off the loop, on both forms of the disk."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairway.errors import Misuse, StorageFault
from fairway.runtime.disk import FETCHES_MAX, READERS, Disk
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import Latency, SimDisk
from tests.unit.runtime.test_disk_contract import WAIT_S, Answers, Bench, RealBench, SimBench
from tests.unit.runtime.timers import Timers


@pytest.fixture(params=["real", "sim"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made: Bench = RealBench(tmp_path / "data") if request.param == "real" else SimBench()
    yield made
    made.disk.close()


@pytest.fixture
def disk(bench: Bench) -> Disk:
    bench.disk.publish("a", [b"0123456789"])
    return bench.disk


def unwanted(found: bytes | StorageFault) -> None:
    raise AssertionError(f"answered, with {found!r}")


def test_a_fetch_answers_later_with_what_a_read_gives(bench: Bench, disk: Disk) -> None:
    found: list[bytes | StorageFault] = []
    file = disk.open("a")
    for position, size in ((2, 5), (8, 100), (10, 1), (5, 0)):
        disk.fetch(file, position, size, found.append)
    assert found == []
    bench.settle(4)
    assert sorted(map(bytes, (each for each in found if isinstance(each, bytes)))) == [b"", b"", b"23456", b"89"]


def test_a_fetch_ends_where_commits_ended_when_it_was_given(bench: Bench, disk: Disk) -> None:
    answers, found = Answers(), list[bytes | StorageFault]()
    file = disk.open("a")
    disk.commit(file, [b"abc"], answers.of("commit"))
    disk.fetch(file, 8, 100, found.append)
    bench.settle(2)
    assert found == [b"89"]
    disk.fetch(file, 8, 100, found.append)
    bench.settle(1)
    assert found[1] == b"89abc"


def test_a_file_closed_or_removed_meanwhile_is_still_read(bench: Bench, disk: Disk) -> None:
    found: list[bytes | StorageFault] = []
    file = disk.open("a")
    for _ in range(20):
        disk.fetch(file, 0, 4, found.append)
    file.close()
    disk.remove("a")
    bench.settle(20)
    assert found == [b"0123"] * 20


def test_done_may_fetch_again(bench: Bench, disk: Disk) -> None:
    found: list[bytes | StorageFault] = []
    file = disk.open("a")
    disk.fetch(file, 0, 1, lambda _data: disk.fetch(file, 1, 1, found.append))
    bench.settle(2 if isinstance(bench, RealBench) else 0)
    assert found == [b"1"]


def test_close_answers_nobody(bench: Bench, disk: Disk) -> None:
    file = disk.open("a")
    for _ in range(20):
        disk.fetch(file, 0, 10, unwanted)
    disk.close()
    with pytest.raises(Misuse, match="closed"):
        disk.fetch(file, 0, 1, unwanted)
    if isinstance(bench, SimBench):
        bench.settle(0)


def test_there_is_a_bound_and_past_it_nothing_is_taken(bench: Bench, disk: Disk) -> None:
    found: list[bytes | StorageFault] = []
    file = disk.open("a")
    for _ in range(FETCHES_MAX):
        disk.fetch(file, 3, 1, found.append)
    with pytest.raises(Misuse, match="wait for some"):
        disk.fetch(file, 3, 1, unwanted)
    bench.settle(FETCHES_MAX)
    assert found == [b"3"] * FETCHES_MAX
    disk.fetch(file, 3, 1, found.append)
    bench.settle(1)


def test_bad_ranges_and_strangers_are_refused_at_once(bench: Bench, disk: Disk) -> None:
    for position, size in ((-1, 1), (0, -1)):
        with pytest.raises(Misuse, match="negative"):
            disk.fetch(disk.open("a"), position, size, unwanted)
    stranger = bench.beside()
    with pytest.raises(Misuse, match="not an open file"):
        disk.fetch(stranger.open("a"), 0, 1, unwanted)
    stranger.close()


def test_commits_do_not_wait_for_fetches(bench: Bench, disk: Disk) -> None:
    answers, found = Answers(), list[bytes | StorageFault]()
    file = disk.open("a")
    for _ in range(10):
        disk.fetch(file, 0, 10, found.append)
    disk.commit(file, [b"x"], answers.of("commit"))
    bench.settle(11)
    assert (answers, len(found)) == ([("commit", None)], 10)


# --- the real one ----------------------------------------------------------------------------------------------------


def test_no_more_threads_than_readers(tmp_path: Path) -> None:
    bench = RealBench(tmp_path)
    bench.disk.publish("a", [bytes(1 << 20)])
    file = bench.disk.open("a")
    before = threading.active_count()
    for _ in range(50):
        bench.disk.fetch(file, 0, 1 << 20, lambda _found: None)
    assert threading.active_count() - before == READERS
    bench.settle(50)
    bench.disk.close()
    assert threading.active_count() == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs to find a descriptor")
def test_a_device_that_fails_is_a_fault_of_the_fetch_alone(tmp_path: Path) -> None:
    bench = RealBench(tmp_path)
    bench.disk.publish("a", [b"x"])
    file = bench.disk.open("a")
    found: list[bytes | StorageFault] = []
    descriptors = [int(each) for each in os.listdir("/proc/self/fd") if each.isdecimal()]
    mine = next(fd for fd in descriptors if _leads_to(fd, tmp_path / "a"))
    unreadable = os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
    os.dup2(unreadable, mine)
    os.close(unreadable)
    bench.disk.fetch(file, 0, 1, found.append)
    bench.settle(1)
    assert isinstance(found[0], StorageFault)
    assert "cannot read" in str(found[0])
    bench.disk.close()


def _leads_to(fd: int, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


def test_without_a_loop_to_answer_to(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.publish("a", [b"x"])
    with pytest.raises(Misuse, match="no loop"):
        disk.fetch(disk.open("a"), 0, 1, unwanted)
    disk.close()


def test_on_a_loop(tmp_path: Path) -> None:
    async def scenario() -> bytes | StorageFault:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path, post=loop.call_soon_threadsafe)
        disk.publish("a", [b"hello"])
        told: asyncio.Future[bytes | StorageFault] = loop.create_future()
        disk.fetch(disk.open("a"), 1, 3, told.set_result)
        try:
            return await asyncio.wait_for(told, WAIT_S)
        finally:
            disk.close()

    assert asyncio.run(scenario()) == b"ell"


# --- the simulated one -----------------------------------------------------------------------------------------------


def test_a_planned_failure_strikes_once() -> None:
    timers = Timers()
    disk = SimDisk(SeededRng("fetch"), timers.call_later)
    disk.publish("a", [b"x"])
    found: list[bytes | StorageFault] = []
    disk.fail_fetch(2)
    for _ in range(3):
        disk.fetch(disk.open("a"), 0, 1, found.append)
    timers.ring_all()
    assert [isinstance(each, StorageFault) for each in found].count(True) == 1
    assert found.count(b"x") == 2


def test_only_as_many_at_a_time_as_there_are_readers() -> None:
    delays: list[float] = []
    timers = Timers()

    def call_later(delay_s: float, callback: Callable[..., object], *args: object) -> None:
        delays.append(delay_s)
        timers.call_later(delay_s, callback, *args)

    disk = SimDisk(SeededRng("fetch"), call_later, latency=Latency(0.001, 0.002))
    disk.publish("a", [b"x"])
    for _ in range(10):
        disk.fetch(disk.open("a"), 0, 1, lambda _found: None)
    assert len(delays) == READERS
    timers.ring_all()
    assert len(delays) == 10
    assert all(0.001 <= delay <= 0.002 for delay in delays)


def test_what_was_evicted_is_fetched_and_never_cached() -> None:
    timers = Timers()
    disk = SimDisk(SeededRng("fetch"), timers.call_later)
    for name in ("a", "b"):
        disk.publish(name, [b"xyz"])
    disk.evict("a")
    found: list[bytes | StorageFault] = []
    disk.fetch(disk.open("a"), 0, 3, found.append)
    timers.ring_all()
    assert found == [b"xyz"]
    assert disk.open("a").read_cached(0, 3) is None
    assert disk.open("b").read_cached(0, 3) == b"xyz"


def test_a_fetch_does_not_outlive_a_crash() -> None:
    timers = Timers()
    disk = SimDisk(SeededRng("fetch"), timers.call_later)
    disk.publish("a", [b"x"])
    disk.fetch(disk.open("a"), 0, 1, unwanted)
    disk.crash()
    timers.ring_all()
