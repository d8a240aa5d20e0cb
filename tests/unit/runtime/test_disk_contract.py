"""What both forms of the disk promise, checked on both."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from fairway.errors import DirectoryLocked, DiskFull, Misuse, NoSuchFile, StorageFault
from fairway.runtime.directory_writer import InlineCommits
from fairway.runtime.disk import Completion, Disk
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from tests.unit.runtime.inline_commits import AlwaysInline, NeverInline
from tests.unit.runtime.timers import Timers

WAIT_S = 30  # for a writer thread: far beyond what a sync takes on a loaded machine


class Bench(Protocol):
    """A disk and a way to let its completions arrive."""

    disk: Disk

    def settle(self, count: int) -> None:
        """Let exactly that many completions arrive."""

    def beside(self) -> Disk:
        """The same files, as another process would open them."""


class RealBench:
    def __init__(self, root: Path, inline: type[InlineCommits] = NeverInline) -> None:
        self._root = root
        self._posted: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = queue.SimpleQueue()
        self.disk: Disk = RealDisk(root, post=self._post, new_inline=inline)

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        self._posted.put((callback, args))

    def settle(self, count: int) -> None:
        for _ in range(count):
            callback, args = self._posted.get(timeout=WAIT_S)
            callback(*args)
        assert self._posted.empty()

    def beside(self) -> Disk:
        return RealDisk(self._root)


class SimBench:
    def __init__(self) -> None:
        self._timers = Timers()
        self._sim = SimDisk(SeededRng("contract"), self._timers.call_later)
        self.disk: Disk = self._sim

    def settle(self, count: int) -> None:
        self._timers.ring_all()

    def beside(self) -> Disk:
        return self._sim.beside()


@pytest.fixture(params=["real", "inline", "sim"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    inline = AlwaysInline if request.param == "inline" else NeverInline
    made: Bench = SimBench() if request.param == "sim" else RealBench(tmp_path / "data", inline)
    yield made
    made.disk.close()


@pytest.fixture
def disk(bench: Bench) -> Disk:
    return bench.disk


class Answers(list[tuple[str, StorageFault | None]]):
    """Who was answered, in order, and how."""

    def of(self, who: str) -> Completion:
        return lambda fault: self.append((who, fault))


def never(fault: StorageFault | None) -> None:
    raise AssertionError(f"answered, with {fault}")


# --- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_appends_its_parts_and_answers(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("log/1", create=True)
    bench.disk.commit(file, [b"he", bytearray(b"ll"), memoryview(b"o"), b""], answers.of("a"))
    bench.settle(1)
    assert answers == [("a", None)]
    assert (file.name, file.size, file.read(0, 100)) == ("log/1", 5, b"hello")


def test_a_commit_does_not_answer_before_it_returns(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    bench.disk.commit(file, [b"x"], answers.of("a"))
    assert answers == []
    bench.settle(1)
    assert answers == [("a", None)]


def test_commits_of_one_directory_keep_their_order(bench: Bench) -> None:
    answers = Answers()
    files = [bench.disk.open(f"log/{number}", create=True) for number in range(3)]
    for number in range(60):
        bench.disk.commit(files[number % 3], [b"%02d," % number], answers.of(str(number)), sync=number % 2 == 0)
    bench.settle(60)
    assert answers == [(str(number), None) for number in range(60)]
    assert files[1].read(0, 9) == b"01,04,07,"


def test_directories_go_side_by_side(bench: Bench) -> None:
    answers = Answers()
    for name in ("a/1", "b/1", "1"):
        for turn in range(5):
            bench.disk.commit(bench.disk.open(name, create=True), [b"x"], answers.of(f"{name} {turn}"))
    bench.settle(15)
    for name in ("a/1", "b/1", "1"):
        assert [who for who, _ in answers if who.startswith(f"{name} ")] == [f"{name} {turn}" for turn in range(5)]


def test_a_commit_of_nothing_is_a_sync(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    bench.disk.commit(file, [], answers.of("a"))
    bench.settle(1)
    assert answers == [("a", None)]
    assert file.size == 0


def test_a_commit_of_very_many_parts(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    bench.disk.commit(file, [b"%04d" % number for number in range(5_000)], answers.of("a"))
    bench.settle(1)
    assert file.size == 20_000
    assert file.read(4 * 4_321, 4) == b"4321"


def test_done_may_commit_again(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    bench.disk.commit(file, [b"x"], lambda _fault: bench.disk.commit(file, [b"y"], answers.of("second")))
    bench.settle(2 if isinstance(bench, RealBench) else 0)
    assert answers == [("second", None)]
    assert file.read(0, 9) == b"xy"


def test_close_finishes_what_was_given_and_answers_nobody(bench: Bench) -> None:
    file = bench.disk.open("a", create=True)
    for _ in range(10):
        bench.disk.commit(file, [b"xyz"], never)
    bench.disk.publish_later("b", [b"published"], never)
    other = bench.beside()
    bench.disk.close()
    bench.disk.close()
    assert other.open("a").read(0, 100) == b"xyz" * 10
    assert other.open("b").read(0, 100) == b"published"
    other.close()
    if isinstance(bench, SimBench):
        bench.settle(0)  # the timers of the closed disk ring in vain


def test_a_file_closed_while_its_commits_are_under_way_still_gets_them(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    for number in range(20):
        bench.disk.commit(file, [b"%02d" % number], answers.of("a"))
    file.close()
    bench.settle(20)
    assert answers == [("a", None)] * 20
    assert bench.disk.open("a").size == 40


# --- files -----------------------------------------------------------------------------------------------------------


def test_open_of_what_is_absent(disk: Disk) -> None:
    for name in ("a", "dir/a", "dir/dir/a"):
        with pytest.raises(NoSuchFile, match=name):
            disk.open(name)
    assert disk.listing("") == []


def test_open_finds_what_is_there(bench: Bench) -> None:
    bench.disk.publish("a/b/c", [b"0123456789"])
    file = bench.disk.open("a/b/c", create=True)
    assert (file.size, file.read(0, 10)) == (10, b"0123456789")


def test_one_file_per_name_until_its_last_close(bench: Bench) -> None:
    first = bench.disk.open("a", create=True)
    second = bench.disk.open("a")
    assert first is second
    first.close()
    assert second.read(0, 1) == b""
    second.close()
    second.close()
    with pytest.raises(Misuse):
        second.read(0, 1)
    with pytest.raises(Misuse):
        bench.disk.commit(second, [b"x"], never)


def test_reads_end_where_the_file_ends(disk: Disk) -> None:
    disk.publish("a", [b"0123456789"])
    file = disk.open("a")
    assert file.read(3, 4) == b"3456"
    assert file.read(8, 100) == b"89"
    assert file.read(10, 1) == file.read(99, 1) == file.read(5, 0) == b""
    with pytest.raises(Misuse):
        file.read(-1, 5)
    with pytest.raises(Misuse):
        file.read(0, -5)


def test_read_cached_gives_a_prefix_or_nothing(disk: Disk) -> None:
    disk.publish("a", [b"0123456789"])
    cached = disk.open("a").read_cached(2, 5)
    assert cached is None or b"23456".startswith(cached)
    past_the_end = disk.open("a").read_cached(10, 5)
    assert past_the_end is None or past_the_end == b""


def test_truncate_cuts_and_commits_go_on_from_there(bench: Bench) -> None:
    answers = Answers()
    bench.disk.publish("a", [b"0123456789"])
    file = bench.disk.open("a")
    bench.disk.truncate(file, 4)
    assert (file.size, file.read(0, 99)) == (4, b"0123")
    bench.disk.commit(file, [b"xy"], answers.of("a"))
    bench.settle(1)
    assert file.read(0, 99) == b"0123xy"


def test_truncate_never_lengthens(disk: Disk) -> None:
    file = disk.open("a", create=True)
    for size in (1, -1):
        with pytest.raises(Misuse, match="shortens"):
            disk.truncate(file, size)


def test_listing_is_sorted_and_shows_directories(disk: Disk) -> None:
    disk.lock()
    for name in ("z", "b/2", "b/10", "a"):
        disk.publish(name, [b"x"])
    assert disk.listing("") == ["a", "b", "z"]
    assert disk.listing("b") == ["10", "2"]
    assert disk.listing("absent") == disk.listing("absent/too") == []
    with pytest.raises(StorageFault, match=r"[Dd]irectory"):
        disk.listing("a")


def test_a_directory_is_no_file_and_a_file_no_directory(disk: Disk) -> None:
    disk.publish("dir/a", [b"x"])
    for attempt in (
        lambda: disk.open("dir"),
        lambda: disk.open("dir/a/b", create=True),
        lambda: disk.publish("dir/a/b", [b"x"]),
        lambda: disk.remove("dir"),
    ):
        with pytest.raises(StorageFault, match="dir"):
            attempt()
    assert disk.open("dir/a").read(0, 9) == b"x"


# --- publish and remove ----------------------------------------------------------------------------------------------


def test_publish_replaces_the_whole_file(disk: Disk) -> None:
    disk.publish("dir/a", [b"a long first version"])
    old = disk.open("dir/a")
    disk.publish("dir/a", [b"second", b" version"])
    assert old.read(0, 99) == b"a long first version"
    assert disk.open("dir/a").read(0, 99) == b"second version"
    assert disk.listing("dir") == ["a"]


def test_publish_later_and_remove_later(bench: Bench) -> None:
    answers = Answers()
    bench.disk.publish_later("dir/a", [b"x"], answers.of("publish"))
    bench.disk.publish_later("dir/b", [b"y"], answers.of("publish b"))
    bench.disk.remove_later("dir/a", answers.of("remove"))
    bench.disk.remove_later("dir/absent", answers.of("remove absent"))
    bench.settle(4)
    assert answers == [("publish", None), ("publish b", None), ("remove", None), ("remove absent", None)]
    assert bench.disk.listing("dir") == ["b"]


def test_remove_leaves_the_bytes_to_those_who_hold_them(disk: Disk) -> None:
    disk.publish("dir/a", [b"old"])
    old = disk.open("dir/a")
    disk.remove("dir/a")
    disk.remove("dir/a")
    disk.remove("nowhere/a")
    assert disk.listing("dir") == []
    assert old.read(0, 9) == b"old"
    new = disk.open("dir/a", create=True)
    assert (new.size, new is old) == (0, False)


# --- room ------------------------------------------------------------------------------------------------------------


def test_reserve_changes_no_size(bench: Bench) -> None:
    answers = Answers()
    file = bench.disk.open("a", create=True)
    bench.disk.reserve(file, 100_000)
    bench.disk.reserve(file, 0)
    assert (file.size, file.read(0, 9)) == (0, b"")
    bench.disk.commit(file, [b"x"], answers.of("a"))
    bench.settle(1)
    assert file.read(0, 9) == b"x"
    other = bench.beside()
    assert other.open("a").size == 1
    other.close()


def test_reserve_of_more_than_there_is(disk: Disk) -> None:
    file = disk.open("a", create=True)
    with pytest.raises(DiskFull, match="reserve"):
        disk.reserve(file, disk.free_bytes() + (1 << 40))
    assert file.size == 0


def test_free_bytes_is_known_before_anything_is_written(disk: Disk) -> None:
    assert disk.free_bytes() > 0
    assert disk.listing("") == []


# --- the lock --------------------------------------------------------------------------------------------------------


def test_the_lock_is_for_one(bench: Bench) -> None:
    bench.disk.lock()
    bench.disk.lock()
    other = bench.beside()
    with pytest.raises(DirectoryLocked, match="stop"):
        other.lock()
    assert other.listing("") == []
    bench.disk.close()
    other.lock()
    other.close()


# --- misuse ----------------------------------------------------------------------------------------------------------

BAD_NAMES = ["", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a\0b", "\ud800", "lock", "x" * 252]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_leave_the_root_are_refused(disk: Disk, name: str) -> None:
    for attempt in (
        lambda: disk.open(name),
        lambda: disk.open(name, create=True),
        lambda: disk.publish(name, [b"x"]),
        lambda: disk.publish_later(name, [b"x"], never),
        lambda: disk.remove(name),
        lambda: disk.remove_later(name, never),
    ):
        with pytest.raises(Misuse, match="bad file name"):
            attempt()
    if name != "lock":
        with pytest.raises(Misuse, match="bad file name"):
            disk.listing(name or "/")


def test_a_temporary_name_can_only_be_removed(disk: Disk) -> None:
    for attempt in (lambda: disk.open("a.tmp", create=True), lambda: disk.publish("a.tmp", [])):
        with pytest.raises(Misuse, match="belongs to the disk"):
            attempt()
    disk.remove("a.tmp")


def test_a_file_of_another_disk(bench: Bench) -> None:
    bench.disk.publish("a", [b"x"])
    stranger = bench.beside()
    file = stranger.open("a")
    attempts: list[Callable[[], None]] = [
        lambda: bench.disk.commit(file, [b"x"], never),
        lambda: bench.disk.truncate(file, 0),
        lambda: bench.disk.reserve(file, 10),
    ]
    for attempt in attempts:
        with pytest.raises(Misuse, match="not an open file of this disk"):
            attempt()
    stranger.close()


def test_a_closed_disk(bench: Bench) -> None:
    file = bench.disk.open("a", create=True)
    bench.disk.close()
    attempts: list[Callable[[], object]] = [
        bench.disk.lock,
        bench.disk.free_bytes,
        lambda: bench.disk.listing(""),
        lambda: bench.disk.open("a"),
        lambda: bench.disk.publish("a", []),
        lambda: bench.disk.remove("a"),
        lambda: bench.disk.commit(file, [], never),
    ]
    for attempt in attempts:
        with pytest.raises(Misuse, match="closed"):
            attempt()
