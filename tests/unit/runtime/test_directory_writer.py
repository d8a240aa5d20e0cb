"""Who carries out a commit: the writer thread, or the owner where the device is fast."""

from __future__ import annotations

import errno
import os
import queue
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairway.errors import StorageFault
from fairway.runtime import directory_writer as rules
from fairway.runtime.directory_writer import InlineCommits, ThreadUsage
from fairway.runtime.real_disk import RealDisk
from tests.unit.runtime.inline_commits import AlwaysInline

WAIT_S = 30
MS_NS = 1_000_000


class Device:
    """A clock that goes on by as much as the work takes."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.waits = 0
        self.cpu_ns = 0
        self.inline = InlineCommits(lambda: self.now_ns, lambda: ThreadUsage(self.waits, self.cpu_ns))

    def takes(self, ns: int) -> Callable[[], None]:
        def work() -> None:
            self.now_ns += ns
            self.waits += 1

        return work

    def measure(self, *took_ns: int) -> None:
        for ns in took_ns:
            self.inline.measure(self.takes(ns))

    def carry_out(self, ns: int) -> None:
        self.inline.carry_out(self.takes(ns))


def fast() -> Device:
    device = Device()
    device.measure(*[10_000] * rules.SAMPLES)
    assert device.inline.is_open()
    return device


# --- the rule --------------------------------------------------------------------------------------------------------


def test_nobody_assumes_that_a_device_is_fast() -> None:
    device = Device()
    for _ in range(rules.SAMPLES - 1):
        device.measure(10_000)
        assert not device.inline.is_open()
    device.measure(10_000)
    assert device.inline.is_open()


def test_a_quarter_of_the_samples_decides() -> None:
    slow, quick = [5 * MS_NS] * (rules.SAMPLES - 4), [rules.FAST_NS] * 4
    device = Device()
    device.measure(*slow, *quick)
    assert device.inline.is_open()
    device = Device()
    device.measure(*slow, 5 * MS_NS, *quick[1:])
    assert not device.inline.is_open()
    device.measure(*quick[:1])  # the last sixteen count
    assert device.inline.is_open()


def test_one_interruption_changes_nothing() -> None:
    device = fast()
    device.carry_out(3 * MS_NS)
    assert device.inline.is_open()
    device.now_ns += 3 * MS_NS * rules.DEBT_SHARE
    device.carry_out(4 * MS_NS)  # the first one is forgotten
    assert device.inline.is_open()
    device.carry_out(2 * MS_NS)
    assert not device.inline.is_open()


def test_a_device_that_turns_slow_goes_to_the_thread_until_its_debt_is_gone() -> None:
    device = fast()
    device.carry_out(50 * MS_NS)
    device.measure(*[10_000] * rules.SAMPLES)
    assert not device.inline.is_open()
    device.now_ns += 49 * MS_NS * rules.DEBT_SHARE
    assert not device.inline.is_open()
    device.now_ns += 2 * MS_NS * rules.DEBT_SHARE
    assert device.inline.is_open()


def test_a_commit_that_another_process_interrupted_owes_only_what_it_used() -> None:
    device = fast()

    def interrupted() -> None:
        device.now_ns += 50 * MS_NS
        device.cpu_ns += 1 * MS_NS

    for _ in range(5):
        device.inline.carry_out(interrupted)
    assert device.inline.is_open()
    for _ in range(5):
        device.inline.carry_out(interrupted)
    assert not device.inline.is_open()


def test_where_the_platform_does_not_tell_every_slow_commit_is_the_devices() -> None:
    now_ns = 0
    inline = InlineCommits(lambda: now_ns, lambda: None)

    def work(ns: int) -> None:
        nonlocal now_ns
        now_ns += ns

    for _ in range(rules.SAMPLES):
        inline.measure(lambda: work(1_000))
    assert inline.is_open()
    inline.carry_out(lambda: work(50 * MS_NS))
    assert not inline.is_open()


def test_this_thread_is_known_to_have_waited() -> None:
    before = rules._usage_of_this_thread()
    if before is None:
        pytest.skip("only Linux tells it of a thread")
    threading.Event().wait(0.01)
    after = rules._usage_of_this_thread()
    assert after is not None
    assert after.waits > before.waits


def test_samples_from_before_it_turned_slow_do_not_count() -> None:
    device = fast()
    device.carry_out(50 * MS_NS)
    device.now_ns += 3_600_000 * MS_NS
    assert not device.inline.is_open()
    device.measure(*[5 * MS_NS] * rules.SAMPLES)
    assert not device.inline.is_open()


def test_a_fault_counts_as_time() -> None:
    device = fast()

    def fail() -> None:
        device.takes(50 * MS_NS)()
        raise StorageFault("planted")

    with pytest.raises(StorageFault):
        device.inline.carry_out(fail)
    assert not device.inline.is_open()


@pytest.mark.parametrize("seed", range(50))
def test_slow_commits_take_a_bounded_share_of_the_owner(seed: int) -> None:
    rng = random.Random(seed)
    device = Device()
    longest_ns, slow_ns, is_bad = rng.choice([1, 3, 20]) * MS_NS, 0, False
    for _ in range(20_000):
        is_bad ^= rng.random() < 0.001
        took_ns = rng.randrange(longest_ns) if rng.random() < (0.9 if is_bad else 0.02) else 20_000
        if device.inline.is_open():
            device.carry_out(took_ns)
            slow_ns += took_ns if took_ns > rules.FAST_NS else 0
        else:
            device.measure(took_ns)
        device.now_ns += rng.randrange(2 * MS_NS)
        assert slow_ns <= rules.DEBT_NS_MAX + longest_ns + device.now_ns / rules.DEBT_SHARE


# --- on a disk -------------------------------------------------------------------------------------------------------


class Owner:
    """Stands for the loop that owns the disk, and notes which thread passes the points of its commits."""

    def __init__(
        self, root: Path, *, is_guest: bool = False, inline: type[InlineCommits] | None = AlwaysInline
    ) -> None:
        self.posted: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = queue.SimpleQueue()
        self.threads: list[bool] = []  # whether it was the owner's, for each commit
        self.answers: list[tuple[str, StorageFault | None]] = []
        self.disk = RealDisk(root, post=self._post, at=self._at, is_guest=is_guest, new_inline=inline)

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        self.posted.put((callback, args))

    def _at(self, point: str) -> None:
        if point == "before-write":
            self.threads.append(threading.current_thread() is threading.main_thread())

    def give(self, name: str, data: bytes, who: str = "", *, sync: bool = True) -> None:
        file = self.disk.open(name, create=True)
        self.disk.commit(file, [data] if data else [], lambda fault: self.answers.append((who, fault)), sync=sync)

    def take(self) -> StorageFault | None:
        callback, args = self.posted.get(timeout=WAIT_S)
        callback(*args)
        return self.answers[-1][1]

    def commit(self, name: str, data: bytes, *, sync: bool = True) -> StorageFault | None:
        self.give(name, data, sync=sync)
        return self.take()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path / "data")
    yield made
    made.disk.close()


def test_small_commits_are_the_owners_once_the_directory_is_synced(owner: Owner) -> None:
    for _ in range(3):
        assert owner.commit("log/1", b"x") is None
    assert owner.commit("log/1", b"x", sync=False) is None
    assert owner.commit("log/2", b"x") is None
    assert owner.threads == [False, True, True, True, False]
    assert owner.disk.open("log/1").read(0, 9) == b"xxxx"


def test_large_commits_and_bare_syncs_are_the_threads(owner: Owner) -> None:
    assert owner.commit("log/1", b"x") is None
    assert owner.commit("log/1", bytes(rules.INLINE_BYTES_MAX)) is None
    assert owner.commit("log/1", bytes(rules.INLINE_BYTES_MAX + 1)) is None
    assert owner.commit("log/1", b"") is None
    assert owner.threads == [False, True, False, False]


def test_the_owner_overtakes_nothing_that_the_thread_was_given(owner: Owner) -> None:
    assert owner.commit("log/1", b"0") is None
    owner.give("log/1", bytes(1 << 20), "large")
    owner.give("log/1", b"1", "small")
    owner.take()
    owner.give("log/1", b"2", "before the second answer")
    owner.take()
    owner.take()
    owner.give("log/1", b"3", "behind all answers")
    owner.give("log/1", bytes(1 << 20), "large again")
    for _ in range(2):
        owner.take()
    named = [who for who, _ in owner.answers if who]
    assert named == ["large", "small", "before the second answer", "behind all answers", "large again"]
    assert owner.threads == [False, False, False, False, True, False]
    assert owner.disk.open("log/1").read((1 << 20) + 1, 3) == b"123"


def test_answers_that_are_there_are_delivered_on_demand(owner: Owner) -> None:
    assert owner.commit("log/1", b"0") is None
    assert owner.commit("log/2", b"0") is None
    owner.give("log/1", b"1", "first")
    owner.give("log/2", b"1", "second")
    assert not owner.answers[2:]
    owner.disk.deliver()
    assert owner.answers[2:] == [("first", None), ("second", None)]
    owner.give("log/1", b"2", "third")
    owner.take()  # what the loop was asked to do for the first two
    owner.take()
    assert [who for who, _ in owner.answers[2:]] == ["first", "second", "third"]
    owner.take()
    owner.disk.deliver()
    assert len(owner.answers) == 5


def test_delivery_ends_though_answers_begin_commits(owner: Owner) -> None:
    assert owner.commit("log/1", b"0") is None
    file = owner.disk.open("log/1")

    def again(fault: StorageFault | None) -> None:
        owner.answers.append(("again", fault))
        owner.disk.commit(file, [b"x"], again)

    owner.disk.commit(file, [b"x"], again)
    for _ in range(3):
        owner.disk.deliver()
    assert owner.answers[1:] == [("again", None)] * 3


def test_a_closed_disk_delivers_nothing(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    assert owner.commit("log/1", b"0") is None
    owner.give("log/1", b"1")
    owner.disk.close()
    owner.disk.deliver()
    owner.take()
    assert len(owner.answers) == 1


@pytest.mark.parametrize(("is_guest", "inline"), [(True, AlwaysInline), (False, None)], ids=["guest", "copy"])
def test_some_never_make_their_owner_wait(tmp_path: Path, is_guest: bool, inline: type[InlineCommits] | None) -> None:
    owner = Owner(tmp_path, is_guest=is_guest, inline=inline)
    for _ in range(3):
        assert owner.commit("log/1", b"x") is None
    assert owner.threads == [False] * 3
    owner.disk.close()


def test_a_measured_device(tmp_path: Path) -> None:
    """The rule as it is, whatever the device: the first commits go to the thread."""
    owner = Owner(tmp_path, inline=InlineCommits)
    for _ in range(200):
        assert owner.commit("log/1", b"x") is None
    assert owner.threads[: rules.SAMPLES] == [False] * rules.SAMPLES
    assert owner.disk.open("log/1").size == 200
    owner.disk.close()


def test_a_commit_of_the_owner_that_fails_half_way_poisons_the_file(owner: Owner) -> None:
    assert owner.commit("log/1", b"x") is None
    assert owner.commit("log/2", b"x") is None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))
    try:
        answer = owner.commit("log/1", bytes(2_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert type(answer) is StorageFault
    assert os.strerror(errno.EFBIG) in str(answer)
    assert "earlier fault" in str(owner.commit("log/1", b"x"))
    assert owner.commit("log/2", b"x") is None
    assert owner.threads == [False, False, True, True]  # one was refused before it was written


def test_a_bug_on_the_owners_thread_is_answered(owner: Owner) -> None:
    assert owner.commit("log/1", b"x") is None
    owner.give("log/1", "text")  # type: ignore[arg-type]
    assert "unexpectedly" in str(owner.take())
