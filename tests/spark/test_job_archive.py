"""The archive job: what is in the log is in the archive, once, whatever happens in between."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import fairway
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.spark.jobs import archive, archive_log, manifest
from fairway.spark.jobs.archive import ArchiveOptions
from fairway.spark.jobs.archive_log import STAGED_BY, ArchiveRunRecord, Overtaken
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.job import Point
from fairway.spark.jobs.manifest import ArchivedRange, ArchiveState, Commit, NotAnArchive
from fairway.spark.plan import SubjectExtent
from fairway.spark.server_groups import BROKER_GROUP, SubjectPart
from tests.spark.conftest import Server
from tests.spark.jobs import rows, send, visible


def live(spark: SparkSession, url: str, subject: str) -> list[object]:
    return list(rows(spark.read.format("fairway").options(url=url, subject=subject).load()))


def archived(spark: SparkSession, path: Path) -> list[object]:
    return list(rows(archive.read(spark, str(path))))


def test_archive_is_the_log_row_for_row(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    keys, tags = ["a", None] * 50, [["x", "y"], None] * 50
    send(client, "arch.one", 100, keys=keys, tags=tags, headers=[{"n": "1"}, None] * 50)
    send(client, "arch.two", 7)
    options = ArchiveOptions(str(path), ("arch.*",), url, once=True, group="arch-job")
    first = archive.run(spark, options)
    assert (first.rows, first.batches, first.ends) == (107, 1, {"arch.one": 100, "arch.two": 7})
    assert archived(spark, path) == live(spark, url, "arch.*")

    send(client, "arch.one", 50, first=100)
    second = archive.run(spark, options)
    assert (second.rows, archive.run(spark, options).rows) == (50, 0)
    assert archived(spark, path) == live(spark, url, "arch.*")
    state = archive.contents(spark, str(path))
    assert [(each.first, each.end, each.rows) for each in state.ranges["arch.one"]] == [(0, 150, 150)]
    assert sorted(state.files) == visible(path)
    told = client.ask(Describe(Depth.GROUPS, "arch.one", "arch-job"), 30)
    assert isinstance(told, Described)
    assert told.subjects[0].groups[0].cursor == 150

    # without Fairway: one file with pyarrow, all of it with pyarrow (so does pandas), DuckDB and plain Spark
    file = min((each for each in state.files.values() if each.subject == "arch.one"), key=lambda each: each.first)
    table = pq.ParquetFile(path / file.path).read()
    assert table.schema.field("appended_at").type.tz == "UTC"
    assert table.column("payload").to_pylist()[0] == b"0"
    assert pq.read_table(path).num_rows == 157
    files = f"read_parquet('{path}/subject=*/date=*/*.parquet', hive_partitioning = true)"
    asked = f"select count(*), max(sequence), max(payload) from {files} where subject = 'arch.one'"
    with duckdb.connect() as database:
        assert database.execute(asked).fetchone() == (150, 149, b"99")
    plain = spark.read.parquet(str(path))
    assert plain.count() == 157
    day = plain.selectExpr("max(abs(datediff(date, date(appended_at))))").first()
    assert day is not None
    assert day[0] == 0


def test_continuous_run_ends_when_told_and_keeps_what_it_has(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "archive"
    send(client, "arch.flow", 10)
    seen: list[Point] = []
    options = ArchiveOptions(str(path), ("arch.flow",), url, starting="5", interval_s=0.0)

    def is_to_end() -> bool:
        if len(seen) == 1:
            send(client, "arch.flow", 10, first=10)
        return len(seen) == 2

    done = archive.run(spark, options, seen.append, is_to_end)
    assert (done.rows, done.ends) == (15, {"arch.flow": 20})
    assert archived(spark, path) == live(spark, url, "arch.flow")[5:]


@pytest.mark.slow
def test_small_files_become_one_and_strangers_are_left_out(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "archive"
    commits: list[Point] = []

    def is_to_end() -> bool:
        send(client, "arch.small", 20, first=20 * len(commits))
        return len(commits) == archive.FAN_IN

    client.send("arch.small", b"the first").result(30)
    done = archive.run(
        spark, ArchiveOptions(str(path), ("arch.small",), url, interval_s=0.0), commits.append, is_to_end
    )
    assert done.compacted == archive.FAN_IN - 1
    (only,) = visible(path)
    options = ArchiveOptions(str(path), ("arch.small",), url, once=True)
    archive.run(spark, options)
    assert archived(spark, path) == live(spark, url, "arch.small")
    sequences = pq.ParquetFile(path / only).read(columns=["sequence"]).column("sequence").to_pylist()
    assert sequences == list(range(len(sequences)))
    assert len(sequences) == 20 * archive.FAN_IN + 1

    # what no commit names is not a part of the archive; what is left of a run that was killed goes away
    stranger = path / only.rpartition("/")[0] / "mine.parquet"
    left = stranger.with_name("fairway-000000000001-00000000-00000.parquet")
    for copy in (stranger, left):
        shutil.copy(path / only, copy)
    assert archived(spark, path) == live(spark, url, "arch.small")
    archive.run(spark, options)
    assert stranger.exists()
    assert not left.exists()


# --- what cannot be archived ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_broker_that_dies_for_good_is_named_and_leaves_the_archive_whole(spark: SparkSession, tmp_path: Path) -> None:
    path, staging = tmp_path / "archive", tmp_path / "archive" / manifest.STAGING
    server = Server(tmp_path / "broker")
    with fairway.connect(server.url) as client:
        for first in range(0, 12, 4):
            client.send_many("arch.dying", [b"%d" % (first + at) + bytes(1 << 18) for at in range(4)]).result(30)
    options = ArchiveOptions(str(path), ("arch.dying",), server.url, once=True, batch_mib=1, patience_s=2)
    committed = threading.Event()

    def kill() -> None:
        """As soon as the second batch is begun, before a task has read it."""
        while not (committed.is_set() and any(staging.glob("*"))):
            time.sleep(0.001)
        server.stop(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(Unreachable, match=f"no broker at {server.url}"):
        archive.run(spark, options, lambda _point: committed.set())
    killer.join()
    state = archive.contents(spark, str(path))
    (kept,) = state.ranges["arch.dying"]
    assert (kept.first, kept.rows) == (0, kept.end)
    assert 0 < kept.end < 12
    assert [row["sequence"] for row in rows(archive.read(spark, str(path)))] == list(range(kept.end))
    assert visible(path) == sorted(state.files)
    assert Files(spark, str(path)).names(manifest.STAGING) == []
    server.start()
    assert archive.run(spark, options).rows == 12 - kept.end
    assert archived(spark, path) == live(spark, server.url, "arch.dying")
    server.stop()


def test_bad_input_is_a_sentence_and_leaves_nothing(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    send(client, "arch.bad", 3)
    path = tmp_path / "archive"
    with pytest.raises(Misuse, match=r"no subject 'arch.bat'.*did you mean 'arch.bad'"):
        archive.run(spark, ArchiveOptions(str(path), ("arch.bat",), url, once=True))
    assert not path.exists()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(NotAnArchive, match="is not empty, and not an archive"):
        archive.run(spark, ArchiveOptions(str(tmp_path / "mine"), ("arch.bad",), url, once=True))
    with pytest.raises(NotAnArchive, match="not an archive of fairway"):
        archive.read(spark, str(tmp_path / "mine"))
    with pytest.raises(NotAnArchive, match="there is nothing at"):
        archive.read(spark, str(path))
    with pytest.raises(Unreachable, match="no broker at"):
        archive.run(spark, ArchiveOptions(str(path), ("arch.bad",), "fairway://127.0.0.1:1", once=True, patience_s=1))


def test_archive_of_another_version_or_log_is_refused(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    send(client, "arch.other", 3)
    path = tmp_path / "archive"
    commits = ArchiveRunRecord(Files(spark, str(path)))
    commits.commit([], [ArchivedRange("arch.other", "00000000000000aa", 0, 0, 0)])
    options = ArchiveOptions(str(path), ("arch.other",), url, once=True)
    with pytest.raises(FairwayError, match=r"of another log .00000000000000aa. than the broker"):
        archive.run(spark, options)
    mark = path / manifest.MARK
    mark.write_text(json.dumps({"fairway_archive": 7}))
    mark.with_name(f".{mark.name}.crc").unlink()
    for attempt in (lambda: archive.run(spark, options), lambda: archive.read(spark, str(path))):
        with pytest.raises(NotAnArchive, match="version 7, and this release"):
            attempt()


def test_what_the_log_has_no_longer_is_an_error_or_a_gap() -> None:
    state, log_id = ArchiveState(), "00000000000000aa"
    state.apply(Commit(1, 0, (ArchivedRange("orders", log_id, 0, 10, 10),)))
    options = ArchiveOptions("archive", ("orders",), accept_loss=False)
    assert archive.resumed(state, SubjectPart("orders"), SubjectExtent(5, 20), log_id, options) == 10
    assert archive.resumed(state, SubjectPart("payments"), SubjectExtent(5, 20), log_id, options) == 5
    with pytest.raises(FairwayError, match=r"messages 10 to 11 of orders .*retention has taken them.*--accept-loss"):
        archive.resumed(state, SubjectPart("orders"), SubjectExtent(12, 20), log_id, options)
    assert (
        archive.resumed(
            state,
            SubjectPart("orders"),
            SubjectExtent(12, 20),
            log_id,
            ArchiveOptions("archive", ("orders",), accept_loss=True),
        )
        == 12
    )
    with pytest.raises(FairwayError, match="ends at 7, and archive has it up to 9"):
        archive.resumed(state, SubjectPart("orders"), SubjectExtent(0, 7), log_id, options)


def test_many_small_files_are_shared_among_the_cores() -> None:
    def batch(subjects: int, messages: int) -> dict[SubjectPart, SubjectExtent]:
        return {SubjectPart(f"s{number}"): SubjectExtent(5, 5 + messages) for number in range(subjects)}

    assert archive.has_small_files(batch(65, 999))
    assert not archive.has_small_files(batch(64, 1)), "one task has all their files open at once"
    assert not archive.has_small_files(batch(65, 1_000))
    assert not archive.has_small_files({**batch(65, 1), SubjectPart("hot"): SubjectExtent(0, 66_000)}), (
        "one core would write it"
    )


def test_archive_of_more_subjects_than_files_open_at_once(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    path, subjects = tmp_path / "archive", archive_log.WRITERS_MAX + 6
    for number in range(subjects):
        send(client, f"arch.many.{number}", 3)
    done = archive.run(spark, ArchiveOptions(str(path), ("arch.many.*",), url, once=True))
    assert (done.rows, done.files, done.batches) == (3 * subjects, subjects, 1)
    assert archived(spark, path) == live(spark, url, "arch.many.*")
    for each in visible(path):
        assert pq.ParquetFile(path / each).read(["sequence"]).column("sequence").to_pylist() == [0, 1, 2]
        assert (path / each).with_name(f".{(path / each).name}.crc").exists()
    assert pq.read_table(path).num_rows == 3 * subjects


# --- a run that dies between any two of its steps ---------------------------------------------------------------------


class Killed(Exception):
    """The process is gone at this point."""


class Mortal(Files):
    """Files whose owner dies when it has changed something so many times."""

    lives = 0

    def _live(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Killed

    def move(self, path: str, to: str) -> None:
        self._live()
        super().move(path, to)

    def remove(self, path: str) -> None:
        self._live()
        super().remove(path)


def new_folder(commits: ArchiveRunRecord) -> Path:
    """Where Spark would write rows of one broker group, subject and date."""
    folder = Path(commits.room) / f"{STAGED_BY}={BROKER_GROUP}" / "subject=orders" / "date=2026-01-01"
    folder.mkdir(parents=True)
    return folder


def stage(commits: ArchiveRunRecord, template: Path, first: int) -> None:
    """What Spark would have written for ten rows."""
    folder = new_folder(commits)
    for part in range(2):
        shutil.copy(template / f"{first + 5 * part}.parquet", folder / f"part-{part:05}.parquet")


def take_part(commits: ArchiveRunRecord, template: Path) -> None:
    """The next ten rows, and every fourth time a compaction."""
    first = commits.state.end("orders") or 0
    if len(commits.state.files) >= 4:
        shutil.copy(template / f"all-{first}.parquet", new_folder(commits) / "part-00000.parquet")
        commits.commit(commits.staged(), [], list(commits.state.files.values()))
    stage(commits, template, first)
    commits.commit(commits.staged(), [ArchivedRange("orders", "00000000000000aa", first, first + 10, 10)])


@pytest.mark.slow
def test_run_that_dies_anywhere_leaves_an_archive(spark: SparkSession, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    table = pq.ParquetFile(_one_file(spark, tmp_path)).read()
    for first in range(0, 400, 5):
        pq.write_table(table.slice(first, 5), template / f"{first}.parquet")
        pq.write_table(table.slice(0, first), template / f"all-{first}.parquet")
    path = tmp_path / "archive"
    deaths = 0
    for lives in range(14):
        mortal = Mortal(spark, str(path))
        mortal.lives = lives
        try:
            commits = ArchiveRunRecord(mortal)
            for _ in range(3):
                take_part(commits, template)
        except Killed:
            deaths += 1
        if manifest.MARK in {each.path for each in Files(spark, str(path)).walk()}:
            assert _sequences(spark, path) == list(range(archive.contents(spark, str(path)).end("orders") or 0))
    assert deaths >= 10
    commits = ArchiveRunRecord(Files(spark, str(path)))
    take_part(commits, template)
    assert _sequences(spark, path) == list(range(commits.state.end("orders") or 0))
    assert visible(path) == sorted(commits.state.files)  # and nothing is left lying about for plain readers
    assert Files(spark, str(path)).names(manifest.STAGING) == []


def test_second_run_on_the_same_archive_is_told(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "archive")
    one, two = ArchiveRunRecord(Files(spark, path)), ArchiveRunRecord(Files(spark, path))
    one.commit([], [ArchivedRange("orders", "00000000000000aa", 0, 0, 0)])
    with pytest.raises(Overtaken, match=r"another run writes to .*archive: it has made commit 1 meanwhile"):
        two.commit([], [ArchivedRange("orders", "00000000000000aa", 5, 5, 0)])
    assert archive.contents(spark, path).end("orders") == 0


def _one_file(spark: SparkSession, tmp_path: Path) -> Path:
    sequences = spark.range(400, numPartitions=1).withColumnRenamed("id", "sequence")
    sequences.write.parquet(str(tmp_path / "made"))
    return next((tmp_path / "made").glob("*.parquet"))


def _sequences(spark: SparkSession, path: Path) -> list[int]:
    files = archive.contents(spark, str(path)).files.values()
    return sorted(
        sequence
        for each in files
        for sequence in pq.ParquetFile(path / each.path).read().column("sequence").to_pylist()
    )


def test_dates_are_utc_whatever_the_session_says(spark: SparkSession) -> None:
    from fairway.spark.jobs.archive_log import utc_date

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        times = spark.sql(
            "select timestamp'2026-03-01 23:59:59.999999Z' as at union all select timestamp'2026-03-02 00:00:00Z'"
        )
        days = [row[0] for row in times.select(utc_date("at")).collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert days[1] - days[0] == timedelta(days=1)
    assert days[0].isoformat() == "2026-03-01"


def test_many_subjects_of_a_broker_group_have_another_name(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [("s7", "default"), ("s8", "g2"), ("other", "default")], "subject string, broker_group string"
    )
    names = {SubjectPart(f"s{number}"): "g1" for number in range(1_000)} | {SubjectPart("s8", "g2"): "g3"}
    found = archive_log.renamed(rows, names).collect()
    assert [tuple(row) for row in found] == [("s7", "g1"), ("s8", "g3"), ("other", "default")]
    assert archive_log.renamed(rows, {}).collect() == rows.collect()
