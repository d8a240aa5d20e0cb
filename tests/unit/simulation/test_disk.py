"""The simulated disk: each fault shown, and what a crash may and may not leave."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import DiskFull, Misuse, NoSuchFile, StorageFault
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import Latency, SimDisk, SimFile, SimulatedPowerCut
from fairway.simulation.files import SECTOR_BYTES, Cut, Inode, Write
from tests.unit.runtime.timers import Timers

SEEDS = range(60)


class Life:
    """A disk on timers of its own, and what it answered."""

    def __init__(self, seed: int | str = 0, *, capacity_bytes: int = 1 << 20) -> None:
        self.timers = Timers()
        self.disk = SimDisk(SeededRng(seed), self.timers.call_later, capacity_bytes=capacity_bytes)
        self.answers: list[StorageFault | None] = []

    def give(self, name: str, data: bytes, *, sync: bool = True) -> None:
        self.disk.commit(self.disk.open(name, create=True), [data], self.answers.append, sync=sync)

    def commit(self, name: str, data: bytes, *, sync: bool = True) -> StorageFault | None:
        self.give(name, data, sync=sync)
        self.timers.ring_all()
        return self.answers[-1]

    def crash(self) -> None:
        self.disk = self.disk.crash()

    def crash_process(self) -> None:
        self.disk = self.disk.crash_process()

    def content(self, name: str) -> bytes:
        return self.disk.open(name).read(0, 1 << 30)


def outcomes(seeds: range, play: Callable[[Life], object]) -> list[object]:
    """What the same play leads to, seed by seed."""
    return [play(Life(seed)) for seed in seeds]


# --- what a power cut may leave --------------------------------------------------------------------------------------

commits = st.lists(st.tuples(st.sampled_from(["a", "d/a", "d/e/b"]), st.integers(0, 1500), st.booleans()), max_size=12)


def give_all(life: Life, plan: list[tuple[str, int, bool]], rings: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """Give the plan's commits and let some timers ring: all bytes given, and how many of them must survive, by name."""
    given_bytes: dict[str, bytes] = {}
    promised: dict[str, int] = {}

    def promise(name: str, end: int, sync: bool) -> Callable[[StorageFault | None], None]:
        def done(fault: StorageFault | None) -> None:
            assert fault is None
            if sync:
                promised[name] = end

        return done

    for number, (name, size, sync) in enumerate(plan):
        data = bytes([number + 1]) * size
        given_bytes[name] = given_bytes.get(name, b"") + data
        file = life.disk.open(name, create=True)
        life.disk.commit(file, [data], promise(name, len(given_bytes[name]), sync), sync=sync)
    for _ in range(rings):
        life.timers.ring_one()
    return given_bytes, promised


@given(st.integers(0, 1 << 32), commits, st.integers(0, 60))
def test_what_was_synced_survives_a_power_cut(seed: int, plan: list[tuple[str, int, bool]], rings: int) -> None:
    life = Life(seed)
    given_bytes, promised = give_all(life, plan, rings)
    life.crash()
    for name, size in promised.items():
        assert life.content(name)[:size] == given_bytes[name][:size]
        assert len(life.content(name)) <= len(given_bytes[name])


@given(st.integers(0, 1 << 32), commits, st.integers(0, 60))
def test_a_killed_process_leaves_a_prefix(seed: int, plan: list[tuple[str, int, bool]], rings: int) -> None:
    life = Life(seed)
    given_bytes, promised = give_all(life, plan, rings)
    life.crash_process()
    for name, data in given_bytes.items():
        left = life.content(name)
        assert data.startswith(left)
        assert len(left) >= promised.get(name, 0)


@given(st.integers(0, 1 << 32), st.integers(0, 700), st.lists(st.integers(1, 2000), min_size=1, max_size=4))
def test_a_file_keeps_a_subset_of_its_unsynced_sectors(seed: int, synced: int, sizes: list[int]) -> None:
    inode = Inode(b"s" * synced)
    cuts = {synced}  # where writes begin and end: between two of these and the sector edges all bytes share one fate
    for number, size in enumerate(sizes):
        inode.change(Write(len(inode.cached), bytes([number + 1]) * size))
        cuts.add(len(inode.cached))
    whole = bytes(inode.cached)
    left = bytes(inode.after_power_cut(SeededRng(seed)).cached)
    assert synced <= len(left) <= len(whole)
    assert left[:synced] == whole[:synced]
    edges = sorted({*cuts, *range(0, len(whole) + SECTOR_BYTES, SECTOR_BYTES)})
    for low, high in itertools.pairwise(edges):
        if low < synced or low >= len(left):
            continue
        kept = left[low:high].rstrip(b"\0")
        assert whole[low:high].startswith(kept)  # a prefix, then zeros
        if high not in cuts:
            assert len(kept) in (0, len(left[low:high]))  # not a write's last sector: all of it or nothing


def test_every_subset_of_sectors_every_size_and_every_tear_comes_up() -> None:
    inode = Inode()
    inode.change(Write(0, b"x" * (2 * SECTOR_BYTES + 4)))
    lefts = [bytes(inode.after_power_cut(SeededRng(seed)).cached) for seed in range(4_000)]
    full = [left for left in lefts if len(left) == 2 * SECTOR_BYTES + 4]
    subsets = {(left[0] != 0, left[SECTOR_BYTES] != 0, left[2 * SECTOR_BYTES :].count(b"x")) for left in full}
    assert subsets == {
        (first, second, tear) for first in (True, False) for second in (True, False) for tear in range(5)
    }
    assert len({len(left) for left in lefts}) > 500
    assert b"" in lefts
    assert b"x" * (2 * SECTOR_BYTES + 4) in lefts


def test_a_later_write_may_survive_an_earlier_one() -> None:
    inode = Inode()
    inode.change(Write(0, b"1" * SECTOR_BYTES))
    inode.change(Write(SECTOR_BYTES, b"2" * SECTOR_BYTES))
    lefts = {bytes(inode.after_power_cut(SeededRng(seed)).cached) for seed in SEEDS}
    assert bytes(SECTOR_BYTES) + b"2" * SECTOR_BYTES in lefts


def test_an_unsynced_cut_is_kept_or_lost() -> None:
    inode = Inode(b"0123456789")
    inode.change(Cut(4))
    inode.change(Write(4, b"abc"))
    lefts = {bytes(inode.after_power_cut(SeededRng(seed)).cached) for seed in range(500)}
    assert {b"0123456789", b"0123", b"0123abc", b"0123\0\0\0", b"0123ab\0"} <= lefts


def test_a_new_life_has_nothing_left_to_lose() -> None:
    life = Life("twice")
    life.give("a", b"x" * 5000)
    for _ in range(2):
        life.timers.ring_one()
    life.crash()
    names = life.disk.listing("")
    contents = [life.content(name) for name in names]
    for _ in range(5):
        life.crash()
        assert life.disk.listing("") == names
        assert [life.content(name) for name in names] == contents


def test_the_old_life_is_over() -> None:
    life = Life()
    life.disk.lock()
    file = life.disk.open("a", create=True)
    life.give("a", b"x")
    old = life.disk
    life.crash()
    life.timers.ring_all()
    assert life.answers == []
    life.disk.lock()
    attempts: list[Callable[[], object]] = [
        lambda: old.open("a"),
        lambda: file.read(0, 1),
        lambda: old.commit(file, [], life.answers.append),
        lambda: old.publish("a", []),
        old.free_bytes,
    ]
    for attempt in attempts:
        with pytest.raises(SimulatedPowerCut):
            attempt()
    old.close()
    file.close()
    assert not issubclass(SimulatedPowerCut, Exception)


# --- directories -----------------------------------------------------------------------------------------------------


def test_the_first_commit_makes_the_whole_path_durable() -> None:
    for seed in SEEDS:
        life = Life(seed)
        assert life.commit("a/b/c", b"x") is None
        life.crash()
        assert life.content("a/b/c") == b"x"


def test_a_file_that_a_killed_process_created_is_named_by_the_next_commit() -> None:
    for seed in SEEDS:
        life = Life(seed)
        life.disk.open("a/b", create=True)
        life.crash_process()
        assert life.commit("a/b", b"x") is None
        life.crash()
        assert life.content("a/b") == b"x"


def test_an_unsynced_creation_is_kept_or_lost() -> None:
    def play(life: Life) -> bool:
        life.disk.open("a", create=True)
        life.crash()
        return life.disk.listing("") == ["a"]

    assert set(outcomes(SEEDS, play)) == {True, False}


def test_a_publish_cut_anywhere_leaves_the_old_or_the_new() -> None:
    seen = set()
    for seed in SEEDS:
        for operation in range(1, 30):
            life = Life(f"{seed}/{operation}")
            life.disk.publish("d/a", [b"old" * 500])
            life.disk.crash_after(operation)
            try:
                life.disk.publish("d/a", [b"new" * 700])
            except SimulatedPowerCut:
                life.crash()
                assert life.content("d/a") in (b"old" * 500, b"new" * 700)
                seen.add((operation, life.content("d/a")[:3]))
            else:
                break
    assert seen == {(1, b"old"), (2, b"old"), (3, b"old"), (4, b"old"), (4, b"new"), (5, b"old"), (5, b"new")}


def test_a_publish_later_cut_between_any_two_steps() -> None:
    lefts = set()
    for seed in SEEDS:
        for rings in range(12):
            life = Life(f"{seed}/{rings}")
            life.disk.publish("a", [b"old"])
            life.disk.publish_later("a", [b"new"], life.answers.append)
            for _ in range(rings):
                life.timers.ring_one()
            answered = bool(life.answers)
            life.crash()
            lefts.add((answered, life.content("a"), "a.tmp" in life.disk.listing("")))
            life.disk.remove("a.tmp")
    assert lefts == {(False, b"old", False), (False, b"old", True), (False, b"new", False), (True, b"new", False)}


def test_a_remove_is_kept_once_it_returns() -> None:
    def play(life: Life) -> bool:
        life.disk.publish("a", [b"x"])
        life.disk.remove("a")
        life.crash()
        return life.disk.listing("") == []

    assert set(outcomes(SEEDS, play)) == {True}


# --- a cut in the middle of a blocking call --------------------------------------------------------------------------


def test_crash_after_counts_primitive_operations() -> None:
    life = Life()
    life.disk.publish("d/a", [b"x"])
    # mkdir, create, write, sync, rename, dirsync, dirsync of the root
    assert life.disk.operations == 7
    life.disk.crash_after(2)
    file = life.disk.open("d/a")
    with pytest.raises(SimulatedPowerCut):
        life.disk.truncate(file, 0)
    assert life.disk.operations == 9
    with pytest.raises(SimulatedPowerCut):
        file.read(0, 1)
    life.crash()
    assert life.disk.operations == 0
    with pytest.raises(Misuse):
        life.disk.crash_after(-1)


def test_a_truncate_cut_half_way_is_done_or_not() -> None:
    def play(life: Life) -> bytes:
        life.disk.publish("a", [b"0123456789"])
        life.disk.crash_after(1)
        with pytest.raises(SimulatedPowerCut):
            life.disk.truncate(life.disk.open("a"), 4)
        life.crash()
        return life.content("a")

    assert set(outcomes(SEEDS, play)) == {b"0123456789", b"0123"}


# --- syncs that fail and lie -----------------------------------------------------------------------------------------


def test_a_failed_sync_loses_its_bytes_and_the_next_one_lies() -> None:
    for seed in SEEDS:
        life = Life(seed)
        assert life.commit("a", b"first.") is None
        life.disk.fail_sync()
        assert type(life.commit("a", b"second.")) is StorageFault
        assert life.commit("a", b"") is None  # whoever tries again is told that all is well
        assert life.commit("a", b"third.") is None
        assert life.content("a") == b"first.second.third."
        life.crash()
        assert life.content("a") == b"first." + bytes(7) + b"third."


def test_fail_sync_strikes_the_nth_time_and_only_then() -> None:
    life = Life()
    life.disk.fail_sync(3)
    answers = [life.commit("a", b"x") for _ in range(5)]
    assert [type(answer) for answer in answers] == [type(None), type(None), StorageFault, type(None), type(None)]


def test_a_failed_sync_of_a_blocking_call_is_raised() -> None:
    life = Life()
    life.disk.fail_sync()
    with pytest.raises(StorageFault, match="sync"):
        life.disk.publish("a", [b"x"])
    assert life.disk.listing("") == ["a.tmp"]


def test_without_syncing_answers_are_lies() -> None:
    def play(life: Life) -> bool:
        life.disk.syncing = False
        assert life.commit("a", b"x" * 1000) is None
        life.crash()
        assert not life.disk.syncing
        return life.content("a") == b"x" * 1000

    assert set(outcomes(SEEDS, play)) == {True, False}


def test_without_syncing_of_directories_names_get_lost() -> None:
    def play(life: Life) -> bool:
        life.disk.dir_syncing = False
        assert life.commit("a", b"x") is None
        life.crash()
        return life.disk.listing("") == ["a"]

    assert set(outcomes(SEEDS, play)) == {True, False}


def test_a_commit_without_sync_survives_the_process_but_not_the_power() -> None:
    def play(life: Life) -> bool:
        assert life.commit("a", b"x") is None
        assert life.commit("a", b"y" * 600, sync=False) is None
        life.crash_process()
        assert life.content("a") == b"x" + b"y" * 600
        life.crash()
        assert life.content("a")[:1] == b"x"
        return life.content("a") == b"x" + b"y" * 600

    assert set(outcomes(SEEDS, play)) == {True, False}


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_file_as_it_was() -> None:
    life = Life(capacity_bytes=1000)
    assert life.commit("a", b"x" * 400) is None
    assert life.disk.free_bytes() == 600
    assert isinstance(life.commit("a", b"y" * 601), DiskFull)
    assert (life.content("a"), life.disk.free_bytes()) == (b"x" * 400, 600)
    assert life.commit("a", b"z" * 600) is None
    assert life.disk.free_bytes() == 0
    life.disk.remove("a")
    assert life.disk.free_bytes() == 1000


def test_a_reservation_is_for_its_file_alone() -> None:
    life = Life(capacity_bytes=1000)
    actions = life.disk.open("actions", create=True)
    life.disk.reserve(actions, 300)
    assert life.disk.free_bytes() == 700
    assert isinstance(life.commit("log", b"x" * 701), DiskFull)
    assert life.commit("log", b"x" * 700) is None
    assert life.commit("actions", b"a" * 300) is None
    assert life.disk.free_bytes() == 0
    assert isinstance(life.commit("actions", b"a"), DiskFull)
    with pytest.raises(DiskFull, match="reserve 301"):
        life.disk.reserve(actions, 301)
    life.disk.truncate(actions, 100)
    assert life.disk.free_bytes() == 200


def test_publish_needs_room_for_both_versions() -> None:
    life = Life(capacity_bytes=1000)
    life.disk.publish("a", [b"x" * 600])
    with pytest.raises(DiskFull, match=r"a\.tmp"):
        life.disk.publish("a", [b"y" * 401])
    assert (life.content("a"), life.disk.listing("")) == (b"x" * 600, ["a"])
    life.disk.publish("a", [b"y" * 400])
    assert life.disk.free_bytes() == 600


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 400), st.booleans()), max_size=20), st.integers())
def test_capacity_is_never_exceeded(plan: list[tuple[str, int, bool]], seed: int) -> None:
    life = Life(seed, capacity_bytes=1000)
    sizes = {"a": 0, "b": 0}
    for name, size, remove in plan:
        fits = size <= life.disk.free_bytes()
        answer = life.commit(name, bytes(size))
        assert isinstance(answer, DiskFull) != fits
        sizes[name] += size if fits else 0
        if remove:
            life.disk.remove(name)
            sizes[name] = 0
        assert life.disk.free_bytes() == 1000 - sum(sizes.values())


def test_fail_write_finds_no_room_at_the_nth_write() -> None:
    for seed in SEEDS:
        life = Life(seed)
        life.disk.fail_write(2)
        assert life.commit("a", b"first") is None
        assert isinstance(life.commit("a", b"second"), DiskFull)
        assert life.content("a") == b"first"
        assert life.commit("a", b"third") is None
        assert life.content("a") == b"firstthird"
        life.crash()
        assert life.content("a") == b"firstthird"


def test_commits_given_before_the_bad_news_are_refused_too() -> None:
    life = Life()
    life.disk.fail_write()
    life.give("a", b"1")
    life.give("a", b"2")
    life.give("b", b"3")
    life.timers.ring_all()
    assert [type(answer) for answer in life.answers] == [DiskFull, DiskFull, type(None)]
    assert life.commit("a", b"4") is None
    assert life.content("a") == b"4"


# --- damage ----------------------------------------------------------------------------------------------------------


def test_flip_rot_and_chop() -> None:
    life = Life()
    life.disk.publish("a", [bytes(100)])
    life.disk.flip("a", 8 * 50 + 3)
    assert life.content("a") == bytes(50) + b"\x08" + bytes(49)
    life.disk.flip("a", 8 * 50 + 3)
    flipped = life.disk.rot("a", 3, low=90)
    assert all(8 * 90 <= bit < 8 * 100 for bit in flipped)
    assert life.content("a")[:90] == bytes(90)
    rotten = life.content("a")
    life.crash()
    assert life.content("a") == rotten
    life.disk.chop("a", 95)
    life.crash()
    assert life.content("a") == rotten[:95]
    with pytest.raises(Misuse, match="bit 760"):
        life.disk.flip("a", 760)
    with pytest.raises(NoSuchFile):
        life.disk.chop("b", 0)


# --- time and caches -------------------------------------------------------------------------------------------------


def test_truncate_does_not_overtake_a_commit() -> None:
    life = Life()
    life.give("a", b"x")
    with pytest.raises(Misuse, match="under way"):
        life.disk.truncate(life.disk.open("a"), 0)


def test_slow_disks_and_stalls() -> None:
    timers = Timers()
    disk = SimDisk(SeededRng(1), timers.call_later, latency=Latency(0.001, 0.001))
    file = disk.open("a", create=True)

    def seconds_of_a_commit() -> float:
        start_s = timers.now_s
        disk.commit(file, [b"x"], lambda _fault: None)
        timers.ring_all()
        return timers.now_s - start_s

    seconds_of_a_commit()  # the first one also syncs the directory
    usual_s = seconds_of_a_commit()
    assert usual_s == pytest.approx(0.003)
    disk.slowness = 10.0
    assert seconds_of_a_commit() == pytest.approx(0.03)
    disk.slowness = 1.0
    disk.stall(5.0)
    assert seconds_of_a_commit() == pytest.approx(5.003)
    assert seconds_of_a_commit() == pytest.approx(usual_s)


def test_directories_overtake_each_other_by_the_seed() -> None:
    def play(life: Life) -> str:
        order: list[str] = []
        life.disk.commit(life.disk.open("a/1", create=True), [b"x"], lambda _fault: order.append("a/1"))
        life.disk.commit(life.disk.open("b/1", create=True), [b"x"], lambda _fault: order.append("b/1"))
        life.timers.ring_all()
        return order[0]

    assert set(outcomes(SEEDS, play)) == {"a/1", "b/1"}


def test_cold_reads() -> None:
    life = Life()
    life.disk.publish("a", [b"0123456789"])
    file = life.disk.open("a")
    assert [file.read_cached(0, 10) for _ in range(9)] == [b"0123456789"] * 9
    life.disk.cold = 0.5
    seen = [file.read_cached(0, 10) for _ in range(300)]
    assert None in seen
    assert seen.count(b"0123456789") > 100
    assert all(data is None or b"0123456789".startswith(data) for data in seen)
    assert len(set(seen)) == 11  # nothing, all, and each prefix between
    assert file.read(0, 10) == b"0123456789"


# --- one seed, one history -------------------------------------------------------------------------------------------


def history(seed: int) -> str:
    """A busy life and its crash, in one string."""
    life = Life(seed)
    for number in range(30):
        life.give(f"d{number % 4}/{number % 3}", bytes([number]) * (number * 97 % 1300), sync=number % 5 != 0)
        life.disk.publish_later(f"d{number % 4}/view", [b"%d" % number], life.answers.append)
        life.timers.ring_one()
    life.crash()
    found = [f"{name}/{file}" for name in life.disk.listing("") for file in life.disk.listing(name)]
    kept = [(name, life.content(name).hex()) for name in found]
    return f"{life.timers.now_s} {len(life.answers)} {kept}"


def test_the_same_seed_gives_the_same_history() -> None:
    assert history(1) == history(1)
    assert len({history(seed) for seed in range(20)}) == 20


def test_the_order_of_hashes_has_no_say() -> None:
    code = "from tests.unit.simulation.test_disk import history; print(history(7))"
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    assert told == [history(7)] * 2


def test_a_file_says_what_it_is() -> None:
    life = Life()
    file = life.disk.open("d/a", create=True)
    assert isinstance(file, SimFile)
    assert (file.name, file.size) == ("d/a", 0)
