"""A local disk does the same without Hadoop as through it, checksums included; few tasks list an archive."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from fairway.errors import StorageFault
from fairway.spark.jobs import archive_log
from fairway.spark.jobs.files import Files, HadoopDisk, Listed, LocalDisk, NameTaken
from fairway.spark.jobs.manifest import ArchiveFile

Disk = HadoopDisk | LocalDisk


@pytest.fixture(params=["hadoop", "local"])
def disk(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Disk:
    """With files that Hadoop has written."""
    hadoop = HadoopDisk(spark, str(tmp_path))
    for name in ("a/one", "a/b/two", "_hidden/three", "a/.hidden/four", "five"):
        hadoop.create(name, name.encode() * 100)
    return hadoop if request.param == "hadoop" else LocalDisk(hadoop.root_path)


def there(path: Path) -> set[str]:
    return {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}


def test_listings_leave_checksums_out(disk: Disk) -> None:
    assert disk.names("") == ["_hidden", "a", "five"]
    assert disk.names("a") == [".hidden", "b", "one"]
    assert sorted(disk.walk("a")) == [("a/.hidden/four", 1_400), ("a/b/two", 700), ("a/one", 500)]
    assert sorted(disk.visible()) == ["a/b/two", "a/one", "five"]
    assert [disk.exists(name) for name in ("", "a", "a/one", "a/two")] == [True, True, True, False]
    assert [disk.is_directory(name) for name in ("", "a", "a/one", "a/two")] == [True, True, False, False]
    with pytest.raises(StorageFault, match="cannot list"):
        disk.names("nowhere")
    with pytest.raises(StorageFault, match="cannot list"):
        list(disk.walk("nowhere"))


def test_file_moves_with_its_checksum(disk: Disk, tmp_path: Path, spark: SparkSession) -> None:
    disk.make_folder("c/d")
    disk.make_folder("c/d")
    before = there(tmp_path)
    disk.rename("a/one", "c/d/moved")
    assert before - there(tmp_path) == {"a/one", "a/.one.crc"}
    assert there(tmp_path) - before == {"c/d/moved", "c/d/.moved.crc"}
    with pytest.raises(NameTaken, match="c/d/moved"):
        disk.rename("five", "c/d/moved")
    with pytest.raises(StorageFault, match="cannot write"):
        disk.rename("a/one", "c/d/other")
    assert disk.tail(Listed("c/d/moved", 500), 7) == b"a/onea/one"[-7:]
    assert len(disk.tail(Listed("c/d/moved", 500), 10_000)) == 500
    hadoop = HadoopDisk(spark, str(tmp_path))
    assert hadoop.read("c/d/moved") == b"a/one" * 100
    (tmp_path / "c/d/moved").write_bytes(b"A/one" * 100)
    with pytest.raises(StorageFault, match="ChecksumException"):
        hadoop.read("c/d/moved")


def test_file_is_removed_with_its_checksum(disk: Disk, tmp_path: Path) -> None:
    for name in ("a/one", "a/one", "five", "nowhere/at/all"):
        disk.remove(name)
    assert there(tmp_path) == {
        *("a/b/two", "a/b/.two.crc", "_hidden/three", "_hidden/.three.crc", "a/.hidden/four", "a/.hidden/.four.crc")
    }
    disk.remove("a")
    assert there(tmp_path) == {"_hidden/three", "_hidden/.three.crc"}
    assert not (tmp_path / "a").exists()


def test_link_to_a_directory_is_removed_and_the_directory_is_not(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    LocalDisk(str(tmp_path)).remove("link")
    assert there(tmp_path) == {"kept/file"}


@pytest.mark.parametrize("encoding", ["ANSI_X3.4-1968", "UTF-8"])
def test_names_that_the_jvm_cannot_write_are_left_to_the_jvm(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(HadoopDisk, "writes_utf_8", encoding == "UTF-8")
    assert isinstance(Files(spark, str(tmp_path / "plain"))._disk, LocalDisk)
    expected = LocalDisk if encoding == "UTF-8" else HadoopDisk
    assert isinstance(Files(spark, str(tmp_path / "Größe"))._disk, expected)


def test_few_tasks_list_the_files_of_an_archive(spark: SparkSession, tmp_path: Path) -> None:
    """Spark by itself has a task for each of more than 32 files."""
    spark.range(1).write.parquet(str(tmp_path / "made"))
    data = next((tmp_path / "made").glob("*.parquet")).read_bytes()
    files = []
    for number in range(100):
        file = ArchiveFile(
            f"subject=s{number}/date=2026-01-01/{number}.parquet", f"s{number}", "2026-01-01", 0, 1, 1, 1
        )
        (tmp_path / file.path).parent.mkdir(parents=True)
        (tmp_path / file.path).write_bytes(data)
        files.append(file)
    context = spark.sparkContext
    context.setJobGroup("listing", "tasks that list files")
    try:
        archive_log.frame(spark, str(tmp_path), files)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    tracker = context.statusTracker()
    jobs = [info for job in tracker.getJobIdsForGroup("listing") if (info := tracker.getJobInfo(job)) is not None]
    stages = [told for info in jobs for stage in info.stageIds if (told := tracker.getStageInfo(stage)) is not None]
    assert [told.numTasks for told in stages] == [2 * context.defaultParallelism]
    assert archive_log.LISTING not in spark.conf.getAll
    fresh = spark.newSession()
    fresh.conf.set(archive_log.LISTING, "3")
    archive_log.frame(fresh, str(tmp_path), files)
    assert fresh.conf.get(archive_log.LISTING) == "3", "a user's own setting is kept"
