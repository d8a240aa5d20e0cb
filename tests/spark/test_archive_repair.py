"""A plain reader of an archive, which looks at directories alone, sees what is committed, once, and nothing else, from
the start of the next run on: wherever a run was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from fairway.client.sync.client import Client
from fairway.errors import Misuse, StorageFault, Unreachable
from fairway.spark.jobs import archive, archive_log, manifest
from fairway.spark.jobs.archive_log import ArchiveRunRecord, Overtaken
from fairway.spark.jobs.files import Files, NameTaken
from fairway.spark.jobs.manifest import ArchivedRange
from tests.golden import archive as golden
from tests.spark.jobs import send, visible
from tests.spark.test_job_archive import new_folder

STEP = 10  # rows of a commit, in two files
LOG = "00000000000000aa"
_DEADLINE_S = 120.0


class Killed(Exception):
    """The process is gone at this point."""


class Mortal(Files):
    """Files whose owner is killed before its `lives`-th change of the disk."""

    lives = 1_000_000

    def live(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Killed

    def move(self, path: str, to: str) -> None:
        self.live()
        super().move(path, to)

    def make_folder(self, path: str) -> None:
        self.live()
        super().make_folder(path)

    def remove(self, path: str) -> None:
        """A directory goes in two steps, since its files go one by one."""
        self.live()
        children = [each.path for each in self.walk(path)] if self.is_directory(path) else []
        if children:
            super().remove(children[0])
            self.live()
        super().remove(path)

    def write(self, path: str, data: bytes, *, temporary: str) -> None:
        self.live()
        super().write(path, data, temporary=temporary)

    def _link(self, path: str, to: str) -> bool:
        self.live()
        return super()._link(path, to)

    def _carry_checksum(self, path: str, to: str) -> None:
        self.live()
        super()._carry_checksum(path, to)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files with the rows from one sequence to another, by name."""
    home = tmp_path_factory.mktemp("rows")
    sequences = spark.range(100, numPartitions=1).withColumnRenamed("id", "sequence")
    sequences.write.parquet(str(home / "made"))
    table = pq.ParquetFile(next((home / "made").glob("*.parquet"))).read()
    for first in range(0, 100, STEP // 2):
        pq.write_table(table.slice(first, STEP // 2), home / f"{first}.parquet")
        pq.write_table(table.slice(0, first), home / f"all-{first}.parquet")
    return home


def append(mine: ArchiveRunRecord, rows: Path, mortal: Mortal | None = None) -> None:
    """The next rows, as Spark would stage them."""
    first = mine.state.end("orders") or 0
    folder = new_folder(mine)
    for part in range(2):
        if mortal is not None:
            mortal.live()
        shutil.copy(rows / f"{first + STEP // 2 * part}.parquet", folder / f"part-{part:05}.parquet")
    mine.commit(mine.staged(), [ArchivedRange("orders", LOG, first, first + STEP, STEP)])


def compact(mine: ArchiveRunRecord, rows: Path, mortal: Mortal | None = None) -> None:
    folder = new_folder(mine)
    if mortal is not None:
        mortal.live()
    shutil.copy(rows / f"all-{mine.state.end('orders')}.parquet", folder / "part-00000.parquet")
    mine.commit(mine.staged(), [], list(mine.state.files.values()))


def life(spark: SparkSession, path: Path, rows: Path, lives: int) -> bool:
    """A run that compacts, and appends; whether it was killed."""
    mortal = Mortal(spark, str(path))
    mortal.lives = lives
    try:
        mine = ArchiveRunRecord(mortal)
        compact(mine, rows, mortal)
        append(mine, rows, mortal)
    except Killed:
        return True
    return False


def seen(path: Path) -> list[int]:
    """By a reader that knows nothing of commits."""
    return sorted(
        sequence
        for each in visible(path)
        for sequence in pq.ParquetFile(path / each).read(["sequence"]).column("sequence").to_pylist()
    )


def check(spark: SparkSession, path: Path) -> None:
    """What is committed is there, and nothing else is."""
    state = archive_log.load(Files(spark, str(path)))
    assert visible(path) == sorted(state.files)
    assert seen(path) == list(range(state.end("orders") or 0))
    assert not [name for name in Files(spark, str(path)).names(manifest.STAGING) if int(name[:12]) <= state.number]


@pytest.fixture
def two_commits(spark: SparkSession, rows: Path, tmp_path: Path) -> Path:
    path = tmp_path / "before"
    mine = ArchiveRunRecord(Files(spark, str(path)))
    for _ in range(2):
        append(mine, rows)
    return path


def test_compaction_that_was_killed_before_its_commit_is_gone_at_the_next_start(
    spark: SparkSession, rows: Path, two_commits: Path
) -> None:
    class Dying(Files):
        def write(self, path: str, data: bytes, *, temporary: str) -> None:
            raise Killed(path)

    with pytest.raises(Killed):
        compact(ArchiveRunRecord(Dying(spark, str(two_commits))), rows)
    assert seen(two_commits) == sorted([*range(20), *range(20)]), "every row twice, for a reader of directories"
    ArchiveRunRecord(Files(spark, str(two_commits)))  # with nothing new to archive
    check(spark, two_commits)
    append(ArchiveRunRecord(Files(spark, str(two_commits))), rows)
    check(spark, two_commits)


@pytest.mark.slow
def test_killed_before_any_change_of_the_disk(
    spark: SparkSession, rows: Path, two_commits: Path, tmp_path: Path
) -> None:
    """And the run that repairs is killed before any change of its own, too."""
    is_killed, lives, doubled = True, 0, 0
    while is_killed:
        path = tmp_path / f"killed-{lives}"
        shutil.copytree(two_commits, path)
        is_killed = life(spark, path, rows, lives)
        is_doubled = len(seen(path)) != len(set(seen(path)))
        doubled += is_doubled
        for repairs in _repairs(spark, path) if is_doubled else ():
            check(spark, repairs)
        ArchiveRunRecord(Files(spark, str(path)))
        check(spark, path)
        append(ArchiveRunRecord(Files(spark, str(path))), rows)
        check(spark, path)
        lives += 1
    assert lives > 25
    assert doubled > 5


def _repairs(spark: SparkSession, path: Path) -> Iterator[Path]:
    """Copies of an archive whose repair was killed, and begun again."""
    lives, is_killed = 0, True
    while is_killed:
        copy = path.with_name(f"{path.name}-{lives}")
        shutil.copytree(path, copy)
        mortal = Mortal(spark, str(copy))
        mortal.lives = lives
        try:
            ArchiveRunRecord(mortal)
            is_killed = False
        except Killed:
            ArchiveRunRecord(Files(spark, str(copy)))
        yield copy
        shutil.rmtree(copy)
        lives += 1


def test_failing_disk_leaves_nothing_for_plain_readers(spark: SparkSession, rows: Path, two_commits: Path) -> None:
    class Full(Files):
        moves = 0

        def move(self, path: str, to: str) -> None:
            self.moves += 1
            if self.moves == 2:
                raise StorageFault("the disk is full")
            super().move(path, to)

    with pytest.raises(StorageFault, match="is full"):
        append(ArchiveRunRecord(Full(spark, str(two_commits))), rows)
    check(spark, two_commits)


def test_run_whose_number_is_taken_by_a_repair_is_told(spark: SparkSession, rows: Path, two_commits: Path) -> None:
    class Slow(Files):
        """The next run begins when all is moved, and nothing committed."""

        def write(self, path: str, data: bytes, *, temporary: str) -> None:
            ArchiveRunRecord(Files(spark, str(two_commits)))
            super().write(path, data, temporary=temporary)

    with pytest.raises(Overtaken, match="another run writes to"):
        append(ArchiveRunRecord(Slow(spark, str(two_commits))), rows)
    check(spark, two_commits)
    assert archive_log.load(Files(spark, str(two_commits))).end("orders") == 2 * STEP


def test_one_of_all_that_claim_a_name_gets_it(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, str(tmp_path))

    def claim(at: int) -> bool:
        try:
            files.write(f"commits/{at // 4}.json", b"%d" % at, temporary=f"staging/{at}.json")
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(claim, range(80)))
    winners = [at for at in range(80) if won[at]]
    assert [at // 4 for at in winners] == list(range(20)), "each name has one owner"
    assert [files.read(f"commits/{at // 4}.json") for at in winners] == [b"%d" % at for at in winners]


def test_object_stores_are_refused(spark: SparkSession, url: str, client: Client) -> None:
    send(client, "repair.store", 1)
    with pytest.raises(Misuse, match=r"s3a://bucket/archive: on s3a:// a rename does not fail.*hdfs://"):
        archive.run(spark, archive.ArchiveOptions("s3a://bucket/archive", ("repair.store",), url, once=True))


# --- archives of earlier releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [golden.FOLDER, golden.KILLED])
def test_golden_archive_opens_unchanged_and_is_repaired(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    expected = golden.expected()[folder.name]
    for path in (folder, tmp_path / "archive"):
        if path != folder:
            shutil.copytree(folder, path)
            ArchiveRunRecord(Files(spark, str(path)))
            assert visible(path) == sorted(archive.contents(spark, str(path)).files)
            assert pq.read_table(path).num_rows == len(expected["rows"])
            with duckdb.connect() as database:
                count = (
                    f"select count(*) from read_parquet('{path}/subject=*/date=*/*.parquet', hive_partitioning = true)"
                )
                assert database.execute(count).fetchone() == (len(expected["rows"]),)
            assert spark.read.parquet(str(path)).count() == len(expected["rows"])
        state = archive.contents(spark, str(path))
        assert {name: [vars(span) for span in of] for name, of in state.ranges.items()} == expected["ranges"]
        assert golden.rows(archive.read(spark, str(path))) == expected["rows"]


# --- a real run, killed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_run_that_is_killed_in_a_compaction(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    """And the next one has no new messages to archive, or no broker to ask."""
    path, subjects, sent = tmp_path / "archive", 30, 0
    plain = archive.ArchiveOptions(str(path), ("repair.kill.*",), url, once=True, compact=False)
    for _ in range(8):
        for number in range(subjects):
            send(client, f"repair.kill.{number}", 5)
        sent += 5 * subjects
        archive.run(spark, plain)
    files = len(visible(path))
    shutil.copytree(path, tmp_path / "before")
    send(client, "repair.kill.0", 1)  # a run compacts when it has archived something
    for _ in range(5):
        _kill_when(path, url, lambda: len(visible(path)) > files + 2)
        committed = archive.contents(spark, str(path))
        uncommitted = [each for each in visible(path) if each not in committed.files]
        if uncommitted and int(uncommitted[-1].rpartition("/")[2].split("-")[1]) > committed.number:
            break
        shutil.rmtree(path)  # it was too quick: once more
        shutil.copytree(tmp_path / "before", path)
    else:
        pytest.fail("no run was killed between moving files and its commit")
    assert pq.read_table(path).num_rows > committed.rows, "a reader of directories sees rows twice"
    with pytest.raises(Unreachable):
        archive.run(
            spark,
            archive.ArchiveOptions(str(path), ("repair.kill.*",), "fairway://127.0.0.1:1", once=True, patience_s=1),
        )
    assert pq.read_table(path).num_rows == committed.rows
    assert archive.run(spark, plain).rows == sent + 1 - committed.rows
    assert pq.read_table(path).num_rows == spark.read.parquet(str(path)).count() == sent + 1


def _kill_when(path: Path, url: str, is_time: Callable[[], bool]) -> None:
    command = [sys.executable, "-m", "fairway", "pipeline", "archive", "repair.kill.*", "--path", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [*command, "--once", "--url", url, "--master", "local[1]", "--json"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + _DEADLINE_S
    while driver.poll() is None and time.monotonic() < deadline and not is_time():
        time.sleep(0.001)
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(30)
