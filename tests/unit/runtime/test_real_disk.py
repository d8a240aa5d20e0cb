"""The real disk where it meets a real machine: full, read-only, locked, killed, closed under readers."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairway.errors import DirectoryLocked, DiskFull, Misuse, NoSuchFile, ReadOnlyDisk, StorageFault
from fairway.runtime.directory_writer import InlineCommits
from fairway.runtime.file_system import RealFile, fault
from fairway.runtime.real_disk import POINTS, RealDisk
from tests.unit.runtime.inline_commits import AlwaysInline, NeverInline

WAIT_S = 30


class Owner:
    """Stands for the loop that owns a store: takes completions one by one."""

    def __init__(
        self, root: Path, at: Callable[[str], None] | None = None, inline: type[InlineCommits] = NeverInline
    ) -> None:
        self._posted: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = queue.SimpleQueue()
        self.disk = RealDisk(root, post=self._post, at=at, new_inline=inline)
        self.answers: list[StorageFault | None] = []

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        self._posted.put((callback, args))

    def take(self) -> StorageFault | None:
        """Wait for one completion; its answer."""
        callback, args = self._posted.get(timeout=WAIT_S)
        callback(*args)
        return self.answers[-1]

    def commit(self, name: str, data: bytes) -> StorageFault | None:
        self.disk.commit(self.disk.open(name, create=True), [data], self.answers.append)
        return self.take()


INLINE = pytest.mark.parametrize("inline", [NeverInline, AlwaysInline])


@pytest.fixture(params=[NeverInline, AlwaysInline])
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Owner]:
    made = Owner(tmp_path / "data", inline=request.param)
    yield made
    made.disk.close()


def succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def mount(target: Path, *options: str) -> bool:
    return succeeds("mount", *options, str(target))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    if not mount(target, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        pytest.skip("mounting a small tmpfs needs rights this user does not have")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 4 MiB in a file."""
    image, target = tmp_path / "image", tmp_path / "ext4"
    target.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 4 << 20)
    if not succeeds("mkfs.ext4", "-q", "-m", "0", str(image)) or not mount(target, "-o", "loop", str(image)):
        pytest.skip("mounting an ext4 image needs loop devices and rights this user does not have")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def python(code: str, *args: str) -> subprocess.Popen[str]:
    """Another process, in the same environment."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


# --- a full disk -----------------------------------------------------------------------------------------------------


def fill(owner: Owner) -> None:
    """Take all the room there is."""
    while owner.commit("ballast", bytes(4096)) is None:
        pass


def check_full(root: Path, inline: type[InlineCommits]) -> None:
    owner = Owner(root / "data", inline=inline)
    assert owner.commit("log/1", b"kept") is None
    assert isinstance(owner.commit("log/1", bytes(8 << 20)), DiskFull)
    file = owner.disk.open("log/1")
    assert file.size == (root / "data/log/1").stat().st_size == 4
    assert owner.commit("log/1", b" and more") is None
    owner.disk.close()
    assert (root / "data/log/1").read_bytes() == b"kept and more"


@INLINE
def test_a_commit_that_finds_no_room_leaves_the_file_as_it_was(small: Path, inline: type[InlineCommits]) -> None:
    check_full(small, inline)


@INLINE
def test_the_same_on_ext4(small_ext4: Path, inline: type[InlineCommits]) -> None:
    check_full(small_ext4, inline)


@INLINE
def test_small_commits_that_find_no_room(small: Path, inline: type[InlineCommits]) -> None:
    owner = Owner(small / "data", inline=inline)
    assert owner.commit("log/1", b"kept") is None
    fill(owner)
    rest = b"x" * 4096
    file = owner.disk.open("log/1")
    for each in (rest, b"behind it"):
        owner.disk.commit(file, [each], owner.answers.append)
    for _ in range(2):
        assert isinstance(owner.take(), DiskFull)
    assert file.size == (small / "data/log/1").stat().st_size == 4
    assert owner.commit("log/1", b" and more") is None
    assert file.read(0, 99) == b"kept and more"
    owner.disk.close()


def test_commits_given_before_the_bad_news_are_refused_too(small: Path) -> None:
    owner = Owner(small / "data")
    file = owner.disk.open("a", create=True)
    owner.disk.commit(file, [bytes(2 << 20)], owner.answers.append)
    owner.disk.commit(file, [b"behind it"], owner.answers.append)
    owner.disk.commit(owner.disk.open("b", create=True), [b"beside it"], owner.answers.append)
    assert isinstance(owner.take(), DiskFull)
    owner.disk.commit(file, [b"after the news"], owner.answers.append)
    assert isinstance(owner.take(), DiskFull)
    assert owner.take() is None
    assert owner.take() is None
    assert file.read(0, 99) == b"after the news"
    owner.disk.close()


def test_publish_that_finds_no_room_keeps_the_old(small: Path) -> None:
    owner = Owner(small / "data")
    owner.disk.publish("a", [b"old"])
    with pytest.raises(DiskFull, match=r"a\.tmp"):
        owner.disk.publish("a", [bytes(2 << 20)])
    assert owner.disk.open("a").read(0, 9) == b"old"
    assert owner.disk.listing("") == ["a"]
    owner.disk.close()


def check_reservation(root: Path, inline: type[InlineCommits]) -> None:
    owner = Owner(root / "data", inline=inline)
    actions = owner.disk.open("actions/1", create=True)
    before = owner.disk.free_bytes()
    owner.disk.reserve(actions, 256 << 10)
    assert before - owner.disk.free_bytes() >= 256 << 10
    fill(owner)
    owner.disk.reserve(actions, 256 << 10)  # again: it is there already
    assert isinstance(owner.commit("actions/1", bytes(8 << 20)), DiskFull)  # what the cut gives away is taken again
    assert isinstance(owner.commit("ballast", bytes(64 << 10)), DiskFull)
    for _ in range(4):
        assert owner.commit("actions/1", bytes(64 << 10)) is None
    assert actions.size == 256 << 10
    owner.disk.close()


@INLINE
def test_reserved_room_is_there_when_the_disk_is_full(small: Path, inline: type[InlineCommits]) -> None:
    check_reservation(small, inline)


@INLINE
def test_reserved_room_on_ext4(small_ext4: Path, inline: type[InlineCommits]) -> None:
    check_reservation(small_ext4, inline)


def test_a_disk_so_full_that_nothing_can_be_cut_back() -> None:
    full = os.open("/dev/full", os.O_RDWR)  # takes no byte, and cannot be truncated
    file = RealFile("full", "/dev/full", full, writable=True, forget=lambda _: None)
    with pytest.raises(StorageFault, match="cut") as caught:
        file.write([b"x"])
    assert type(caught.value) is StorageFault
    file.close()


def test_a_write_that_fails_half_way_poisons_the_file(owner: Owner) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        answer = owner.commit("a", bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert type(answer) is StorageFault
    assert os.strerror(errno.EFBIG) in str(answer)
    assert "earlier fault" in str(owner.commit("a", b"x"))
    assert owner.commit("b", b"x") is None


# --- a disk that may only be read ------------------------------------------------------------------------------------


def test_a_read_only_disk(small: Path) -> None:
    first = Owner(small / "data")
    first.disk.publish("a", [b"x"])
    first.disk.lock()
    first.disk.close()
    if not mount(small, "-o", "remount,ro"):
        pytest.skip("remounting needs rights this user does not have")
    owner = Owner(small / "data")
    file = owner.disk.open("a")
    assert file.read(0, 9) == b"x"
    attempts: list[Callable[[], object]] = [
        owner.disk.lock,
        lambda: owner.disk.open("b", create=True),
        lambda: owner.disk.publish("a", [b"y"]),
        lambda: owner.disk.remove("a"),
        lambda: owner.disk.truncate(file, 0),
        lambda: owner.disk.reserve(file, 10),
    ]
    for attempt in attempts:
        with pytest.raises(ReadOnlyDisk, match="writ"):
            attempt()
    owner.disk.commit(file, [b"y"], owner.answers.append)
    assert isinstance(owner.take(), ReadOnlyDisk)
    assert file.read(0, 9) == b"x"
    owner.disk.close()


# --- the lock --------------------------------------------------------------------------------------------------------

HOLD = """
    import sys, time
    from fairway.runtime.real_disk import RealDisk
    disk = RealDisk(sys.argv[1])
    disk.lock()
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    holder = python(HOLD, str(tmp_path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    disk = RealDisk(tmp_path)
    with pytest.raises(DirectoryLocked, match=rf"{tmp_path}.* {holder.pid} "):
        disk.lock()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    disk.lock()
    disk.close()


CHILDREN = """
    import os, subprocess, sys
    from fairway.errors import Misuse
    from fairway.runtime.real_disk import RealDisk
    disk = RealDisk(sys.argv[1], post=lambda *args: None)
    disk.lock()
    file = disk.open("a", create=True)
    executed = subprocess.Popen(["sleep", "600"], close_fds=False)
    forked = os.fork()
    if forked == 0:
        try:
            disk.commit(file, [b"x"], print)
        except Misuse:
            os.kill(os.getpid(), 19)  # stop, and stay
        os._exit(1)
    os.waitpid(forked, os.WUNTRACED)
    print(executed.pid, forked, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_no_child_inherits_the_lock(tmp_path: Path) -> None:
    parent = python(CHILDREN, str(tmp_path))
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.wait()
    parent.stdout.close()
    disk = RealDisk(tmp_path)
    try:
        for pid in children:
            os.kill(pid, 0)  # both are alive
        disk.lock()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        disk.close()


# --- killed at a named point -----------------------------------------------------------------------------------------

VICTIM = """
    import os, queue, signal, sys
    from fairway.runtime.real_disk import RealDisk
    from tests.unit.runtime import inline_commits
    root, fatal, turn, inline = sys.argv[1], sys.argv[2], int(sys.argv[3]), getattr(inline_commits, sys.argv[4])
    passed = 0
    def at(point):
        global passed
        passed += point == fatal
        if passed == turn:
            os.kill(os.getpid(), signal.SIGKILL)
    posted = queue.SimpleQueue()
    disk = RealDisk(root, post=lambda *call: posted.put(call), at=at, new_inline=inline)
    disk.lock()
    file = disk.open("log/1", create=True)
    for number in range(3):
        answers = []
        disk.commit(file, [b"%d" % number * 1000], answers.append)
        callback, *args = posted.get()
        callback(*args)
        print("committed", number, *answers, flush=True)
        disk.publish("view", [b"%d" % number * 1000])
        print("published", number, flush=True)
        disk.publish("gone", [b"x"])
        disk.remove("gone")
        print("removed", number, flush=True)
    disk.truncate(file, 2500)
    print("cut", flush=True)
    disk.close()
"""


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("point", POINTS)
@INLINE
def test_killed_at(point: str, turn: int, tmp_path: Path, inline: type[InlineCommits]) -> None:
    victim = python(VICTIM, str(tmp_path), point, str(turn), inline.__name__)
    said, _ = victim.communicate(timeout=WAIT_S)
    once = point in ("after-dirsync", "after-truncate", "after-truncate-sync")
    assert victim.returncode == (0 if once and turn == 2 else -signal.SIGKILL)
    disk = RealDisk(tmp_path)
    disk.lock()
    committed = said.count("committed")
    log = disk.open("log/1")
    content = log.read(0, 99_999)
    assert b"".join(b"%d" % number * 1000 for number in range(3)).startswith(content)
    assert log.size >= min(committed * 1000, 2500)  # the cut comes last
    if "published" in said:
        view = disk.open("view").read(0, 9999)
        assert view in [b"%d" % number * 1000 for number in range(said.count("published") - 1, 3)]
    assert set(disk.listing("")) <= {"log", "view", "view.tmp", "gone", "gone.tmp"}
    disk.close()


# --- faults in words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_errno_becomes_a_fault_that_says_it_all(number: int) -> None:
    made = fault(OSError(number, os.strerror(number)), "write", "/data/log/1")
    assert isinstance(made, StorageFault)
    assert not isinstance(made, OSError)
    assert str(made).startswith(f"cannot write /data/log/1: {os.strerror(number)}; ")


def test_the_kinds_of_fault() -> None:
    kinds = {number: type(fault(OSError(number, "why"), "write", "a")) for number in errno.errorcode}
    assert [kinds[number] for number in (errno.ENOSPC, errno.EDQUOT)] == [DiskFull, DiskFull]
    assert [kinds[number] for number in (errno.EROFS, errno.EACCES, errno.EPERM)] == [ReadOnlyDisk] * 3
    assert kinds[errno.ENOENT] is NoSuchFile
    assert kinds[errno.EIO] is StorageFault


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    disk = RealDisk(tmp_path / "data")
    attempts: list[Callable[[], object]] = [
        disk.lock,
        lambda: disk.listing(""),
        lambda: disk.open("a"),
        lambda: disk.open("a", create=True),
        lambda: disk.publish("a", [b"x"]),
        lambda: disk.remove("a"),
    ]
    for attempt in attempts:
        with pytest.raises(StorageFault, match="data"):
            attempt()
    disk.close()


def test_a_bug_on_the_writer_thread_is_answered(owner: Owner) -> None:
    owner.disk.commit(owner.disk.open("a", create=True), ["text"], owner.answers.append)  # type: ignore[list-item]
    assert "unexpectedly" in str(owner.take())


def test_without_a_loop_there_is_nobody_to_answer(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("a", create=True)
    attempts: list[Callable[[], None]] = [
        lambda: disk.commit(file, [b"x"], print),
        lambda: disk.publish_later("a", [b"x"], print),
        lambda: disk.remove_later("a", print),
    ]
    for attempt in attempts:
        with pytest.raises(Misuse, match="call_soon_threadsafe"):
            attempt()
    disk.close()


# --- on a loop -------------------------------------------------------------------------------------------------------


def test_on_a_loop_of_asyncio(tmp_path: Path) -> None:
    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path, post=loop.call_soon_threadsafe)
        file = disk.open("a", create=True)
        answered: asyncio.Future[StorageFault | None] = loop.create_future()
        disk.commit(file, [b"x"], answered.set_result)
        assert await answered is None
        disk.close()
        return (tmp_path / "a").read_bytes()

    assert asyncio.run(main()) == b"x"


def test_a_loop_that_is_gone_when_the_answer_comes(tmp_path: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "after-write":
            reached.set()
            go.wait(WAIT_S)

    loop = asyncio.new_event_loop()
    disk = RealDisk(tmp_path, post=loop.call_soon_threadsafe, at=at)
    disk.commit(disk.open("a", create=True), [b"x"], print)
    assert reached.wait(WAIT_S)
    with pytest.raises(Misuse, match="under way"):
        disk.truncate(disk.open("a"), 0)
    loop.close()
    go.set()
    disk.close()
    assert (tmp_path / "a").read_bytes() == b"x"


# --- reading ---------------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_not_seen(tmp_path: Path) -> None:
    seen = []

    def at(point: str) -> None:
        seen.append((point, file.size, file.read(0, 99), file.read_cached(0, 99) or b""))

    watched = Owner(tmp_path, at)
    file = watched.disk.open("a", create=True)
    assert watched.commit("a", b"x") is None
    watched.disk.close()
    assert seen == [(point, 0, b"", b"") for point in ("before-write", "after-write", "after-sync", "after-dirsync")]


def test_read_cached_of_what_was_evicted(owner: Owner, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    assert owner.commit("a", content) is None
    file = owner.disk.open("a")
    hot = file.read_cached(100, 2 << 20)
    assert hot is None or content[100:].startswith(hot)
    fd = os.open(tmp_path / "data/a", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    for position in range(0, 3 << 20, 100_000):
        cold = file.read_cached(position, 50_000)
        assert cold is None or content[position : position + 50_000].startswith(cold)
        assert file.read(position, 50_000) == content[position : position + 50_000]


def test_readers_and_close_do_not_meet_on_a_descriptor(tmp_path: Path) -> None:
    """A closed descriptor's number is given to the next file: a late reader must not read that one."""
    disk = RealDisk(tmp_path)
    disk.publish("a", [b"a" * 100])
    disk.publish("b", [b"b" * 100])
    wrong: list[bytes] = []
    stop = threading.Event()
    current = [disk.open("a")]

    def read() -> None:
        while not stop.is_set():
            try:
                data = current[0].read(0, 100)
            except Misuse:
                continue
            if data != b"a" * 100:
                wrong.append(data)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(2_000):
        current[0].close()
        other = disk.open("b")
        current[0] = disk.open("a")
        other.close()
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    disk.close()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    threads = threading.active_count()  # other tests of this process may have theirs
    owner = Owner(tmp_path / "data")
    owner.disk.lock()
    for number in range(20):
        assert owner.commit(f"d{number % 3}/{number}", b"x") is None
        owner.disk.publish(f"d{number % 3}/{number}", [b"y"])
    owner.disk.open("d0/0")
    owner.disk.remove("d0/0")
    with pytest.raises(NoSuchFile):
        owner.disk.open("absent")
    owner.disk.close()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before
    assert threading.active_count() == threads
