"""A registry file with one flipped bit: right values, or a refusal with a sentence. Never a wrong value."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fairway.errors import FairwayError
from fairway.registry.port import Node
from fairway.registry.sqlite import FILE_NAME, SqliteRegistry, survey
from fairway.runtime.sqlite_file import SqliteFile

LOG_NAME = f"{FILE_NAME}-wal"
FLIPS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several pages of every kind: tables, an index, overflow, free ones."""
    directory = tmp_path_factory.mktemp("registry")

    async def fill() -> None:
        registry = await SqliteRegistry.open(str(directory))
        await registry.create("/fairway/groups/east", b'{"epoch":3}')
        await registry.put("/fairway/groups/east", b'{"epoch":4}', 0)
        await registry.create("/fairway/groups/west", bytes(range(256)) * 30)
        for number in range(90):
            await registry.create(f"/fairway/subjects/s{number:03d}", b"subject %d" % number)
        for number in range(60, 90):
            await registry.remove(f"/fairway/subjects/s{number:03d}")
        for _ in range(3):
            await registry.create("/line/n-", is_numbered=True)
        lent = await registry.open_session(60_000)
        await lent.create("/fairway/members/b1", b"broker.example:7420", is_ephemeral=True)
        await registry.close()

    asyncio.run(fill())
    assert not (directory / f"{FILE_NAME}-wal").exists()
    return directory


async def content(directory: Path) -> dict[str, Node | None]:
    """All nodes, as a client sees them, and one more that it makes."""
    registry = await SqliteRegistry.open(str(directory))
    try:
        found: dict[str, Node | None] = {}
        todo = ["/"]
        while todo:
            path = todo.pop()
            found[path] = await registry.get(path)
            todo += [f"{path.rstrip('/')}/{name}" for name in await registry.children(path)]
        return found
    finally:
        await registry.close()


def served(directory: Path) -> tuple[dict[str, Node | None] | None, str]:
    """What the registry says, or the sentence with which it refuses to."""
    try:
        return asyncio.run(content(directory)), ""
    except FairwayError as error:
        return None, str(error)


async def change(directory: Path) -> str:
    registry = await SqliteRegistry.open(str(directory))
    try:
        node = await registry.get("/fairway/groups/east")
        assert node is not None
        await registry.put("/fairway/groups/east", b"changed", node.version)
        return (await registry.create("/line/n-", is_numbered=True)).path
    finally:
        await registry.close()


@pytest.mark.parametrize("place", [18, 19], ids=["write version", "read version"])
@pytest.mark.parametrize("bit", range(8))
def test_a_version_that_sqlite_does_not_know_is_known_to_verify(
    whole: Path, tmp_path: Path, place: int, bit: int
) -> None:
    """SQLite still reads a file whose write version it does not know."""
    data = bytearray((whole / FILE_NAME).read_bytes())
    data[place] ^= 1 << bit
    (tmp_path / FILE_NAME).write_bytes(data)
    is_sound = survey(str(tmp_path)).is_sound
    found, _ = served(tmp_path)
    assert is_sound == (found is not None)


@FLIPS
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(at=0.0, bit=0)
@example(at=0.1, bit=7)  # text that is no UTF-8
def test_one_flipped_bit_anywhere_is_never_served_as_a_value(whole: Path, tmp_path: Path, at: float, bit: int) -> None:
    expected = asyncio.run(content(whole))
    data = bytearray((whole / FILE_NAME).read_bytes())
    place = int(at * len(data))
    data[place] ^= 1 << bit
    directory = tmp_path / f"{place}-{bit}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / FILE_NAME).write_bytes(data)
    is_sound = survey(str(directory)).is_sound
    assert [path.name for path in directory.iterdir()] == [FILE_NAME], "a look changes nothing"
    found, refusal = served(directory)
    if found is None:
        assert FILE_NAME in refusal
        assert not is_sound, "what is refused is known to verify"
        return
    assert found == expected
    made = asyncio.run(change(directory))
    after = asyncio.run(content(directory))
    changed = Node("/fairway/groups/east", b"changed", 2, 0)
    assert after == expected | {"/fairway/groups/east": changed, made: Node(made, b"", 0, 0)}


def test_damage_names_the_node_and_the_remedy(whole: Path, tmp_path: Path) -> None:
    data = bytearray((whole / FILE_NAME).read_bytes())
    data[data.index(b'{"epoch":4}') + 9] ^= 1
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(FairwayError, match=r"node '/fairway/groups/east' fails its checksum.*restore a backup"):
        asyncio.run(content(tmp_path))
    [problem] = survey(str(tmp_path)).problems
    assert problem == "node '/fairway/groups/east' fails its checksum"


def test_a_row_that_is_gone_is_missed(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / FILE_NAME, tmp_path / FILE_NAME)
    with sqlite3.connect(tmp_path / FILE_NAME) as file:
        file.execute("DELETE FROM nodes WHERE path = '/fairway/groups/east'")
    file.close()
    with pytest.raises(FairwayError, match="not those that were sealed"):
        asyncio.run(content(tmp_path))


def test_verify_judges_a_registry(whole: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fairway.__main__ import app

    sound = CliRunner().invoke(app, ["verify", str(whole)])
    assert (sound.exit_code, "sound" in sound.output) == (0, True)
    data = bytearray((whole / FILE_NAME).read_bytes())
    data[data.index(b'{"epoch":4}') + 9] ^= 1
    (tmp_path / FILE_NAME).write_bytes(data)
    spoiled = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert spoiled.exit_code == 4
    assert "node '/fairway/groups/east' fails its checksum" in spoiled.output


# --- the files of a killed process ----------------------------------------------------------------------------------


Files = dict[str, bytes]


class Killed:
    """What is on disk at instants of one write, and the values before and after it."""

    def __init__(self, idle: Files, committed: Files, folded: Files, before: bytes, after: bytes) -> None:
        self.idle = idle  # every write is acknowledged
        self.committed = committed  # one more write is in the log, not yet in the main file
        self.folded = folded  # and now in the main file too
        self.before = before
        self.after = after


def files_of(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name.startswith(FILE_NAME)}


def put_files(files: Files, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)


async def epoch_of(directory: Path) -> bytes | None:
    registry = await SqliteRegistry.open(str(directory))
    try:
        node = await registry.get("/fairway/groups/east")
        return node and node.value
    finally:
        await registry.close()


def served_epoch(directory: Path) -> tuple[bytes | None, str]:
    try:
        return asyncio.run(epoch_of(directory)), ""
    except FairwayError as error:
        return None, str(error)


def flipped(files: Files, at: float, bit: int, suffixes: tuple[str, ...] = ("", "-wal", "-shm", "-journal")) -> Files:
    """One bit, in the first of these files that the place falls into."""
    place = int(at * sum(len(files.get(FILE_NAME + suffix, b"")) for suffix in suffixes))
    damaged = dict(files)
    for suffix in suffixes:
        data = bytearray(files.get(FILE_NAME + suffix, b""))
        if place < len(data):
            data[place] ^= 1 << bit
            damaged[FILE_NAME + suffix] = bytes(data)
            break
        place -= len(data)
    return damaged


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    directory = tmp_path_factory.mktemp("killed")
    taken: list[Files] = []
    fold = SqliteFile.fold

    def watched(file: SqliteFile) -> None:
        taken.append(files_of(directory))
        fold(file)
        taken.append(files_of(directory))

    async def live() -> Files:
        registry = await SqliteRegistry.open(str(directory))
        for number in range(40):
            await registry.create(f"/fairway/subjects/s{number:03d}", b"subject %d" % number)
        node = await registry.create("/fairway/groups/east", b"1")
        for epoch in range(2, 30):
            node = await registry.put("/fairway/groups/east", b"%d" % epoch, node.version)
        idle = files_of(directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqliteFile, "fold", watched)
            await registry.put("/fairway/groups/east", b"30" * 5_000, node.version)  # several pages
        await registry.close()
        return idle

    idle = asyncio.run(live())
    return Killed(idle, taken[0], taken[1], b"29", b"30" * 5_000)


@FLIPS
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), is_in_log=st.booleans())
def test_a_killed_registry_with_a_flipped_bit_serves_no_older_value(
    killed: Killed, tmp_path: Path, at: float, bit: int, is_in_log: bool
) -> None:
    suffixes = ("-wal", "-journal") if is_in_log else ("", "-wal", "-shm", "-journal")
    put_files(flipped(killed.idle, at, bit, suffixes), tmp_path / "flipped")
    is_sound = survey(str(tmp_path / "flipped")).is_sound
    found, refusal = served_epoch(tmp_path / "flipped")
    assert found == killed.before or (refusal and not is_sound)


def half_folded(killed: Killed, random: Random) -> Files:
    """The log has the write; any of its sectors are in the main file already."""
    old, new = killed.committed[FILE_NAME], killed.folded[FILE_NAME]
    old = old.ljust(len(new), b"\0")
    sectors = [random.choice((old, new))[at : at + 512] for at in range(0, len(new), 512)]
    return killed.committed | {FILE_NAME: b"".join(sectors)}


@FLIPS
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), random=st.randoms(use_true_random=False))
def test_a_flipped_bit_in_the_files_of_a_killed_write_serves_no_older_value(
    killed: Killed, tmp_path: Path, at: float, bit: int, random: Random
) -> None:
    put_files(flipped(half_folded(killed, random), at, bit), tmp_path / "flipped")
    found, refusal = served_epoch(tmp_path / "flipped")
    assert found in (killed.before, killed.after) or FILE_NAME in refusal


@FLIPS
@given(random=st.randoms(use_true_random=False))
def test_a_crash_while_the_main_file_is_written_loses_nothing(killed: Killed, tmp_path: Path, random: Random) -> None:
    put_files(half_folded(killed, random), tmp_path / "torn")
    assert survey(str(tmp_path / "torn")).problems == []
    assert served_epoch(tmp_path / "torn") == (killed.after, "")


@FLIPS
@given(end=st.floats(0, 1), random=st.randoms(use_true_random=False))
def test_a_crash_while_the_log_is_written_loses_nothing_acknowledged(
    killed: Killed, tmp_path: Path, end: float, random: Random
) -> None:
    log = killed.committed[LOG_NAME]
    put_files(killed.committed | {LOG_NAME: torn(log, 0, int(end * len(log)), random)}, tmp_path / "torn")
    found, refusal = served_epoch(tmp_path / "torn")
    assert (found in (killed.before, killed.after), refusal) == (True, "")


def torn(log: bytes, begin: int, end: int, random: Random) -> bytes:
    """The log from `begin` on as a crash leaves it: it ends anywhere, and any of its sectors were never written."""
    tail = bytearray(log[begin:end])
    for at in range(0, len(tail), 512):
        if random.random() < 0.2:
            tail[at : at + 512] = bytes(len(tail[at : at + 512]))
    return log[:begin] + bytes(tail)


# --- a log with several transactions: of an earlier version, or because another program read the file ---------------


class LongLog:
    def __init__(self, files: Files, ends: list[int], newest: bytes) -> None:
        self.files = files
        self.ends = ends  # of each transaction in the log
        self.newest = newest


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> LongLog:
    directory = tmp_path_factory.mktemp("long")

    async def live() -> LongLog:
        registry = await SqliteRegistry.open(str(directory))
        node = await registry.create("/fairway/groups/east", b"1")
        reader = sqlite3.connect(f"file:{directory / FILE_NAME}?mode=ro", uri=True)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM nodes").fetchall()
        ends = []
        for epoch in range(2, 30):
            node = await registry.put("/fairway/groups/east", b"%d" % epoch, node.version)
            ends.append((directory / LOG_NAME).stat().st_size)
        files = files_of(directory)
        reader.close()
        for _ in range(100):
            if (directory / LOG_NAME).stat().st_size == 0:
                break
            await asyncio.sleep(0.1)
        assert (directory / LOG_NAME).stat().st_size == 0, "nobody reads any more: the log is moved to the main file"
        await registry.close()
        return LongLog(files, ends, b"29")

    return asyncio.run(live())


@FLIPS
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(at=0.0, bit=0)
@example(at=0.0001, bit=3)
def test_a_flipped_bit_in_a_long_log_is_refused_and_nothing_is_touched(
    long_log: LongLog, tmp_path: Path, at: float, bit: int
) -> None:
    log = bytearray(long_log.files[LOG_NAME])
    place = int(at * long_log.ends[-3])  # behind it: it may look like a torn write
    log[place] ^= 1 << bit
    damaged = long_log.files | {LOG_NAME: bytes(log)}
    put_files(damaged, tmp_path / "flipped")
    [problem] = survey(str(tmp_path / "flipped")).problems
    found, refusal = served_epoch(tmp_path / "flipped")
    assert found is None
    assert "acknowledged changes follow" in problem
    assert problem in refusal
    assert "restore a backup" in refusal
    assert files_of(tmp_path / "flipped") == damaged


@FLIPS
@given(end=st.floats(0, 1), random=st.randoms(use_true_random=False))
def test_a_long_log_with_a_torn_tail_is_opened(long_log: LongLog, tmp_path: Path, end: float, random: Random) -> None:
    log, begin = long_log.files[LOG_NAME], long_log.ends[-2]
    tail = torn(log, begin, begin + int(end * (len(log) - begin)), random)
    put_files(long_log.files | {LOG_NAME: tail}, tmp_path / "torn")
    assert survey(str(tmp_path / "torn")).problems == []
    found, refusal = served_epoch(tmp_path / "torn")
    assert (found in (b"28", long_log.newest), refusal) == (True, "")
