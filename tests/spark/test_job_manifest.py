"""What an archive says of itself, and which of its files become one: decided without Spark."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fairway.errors import Misuse, Unreachable
from fairway.limits import MIB
from fairway.runtime.clock import ManualClock
from fairway.spark.jobs import archive, job, manifest
from fairway.spark.jobs.job import Point, ProgressCounter
from fairway.spark.jobs.manifest import ArchiveDamaged, ArchivedRange, ArchiveFile, ArchiveState, Commit, NotAnArchive
from fairway.spark.session import SETTINGS


def file(
    first: int, end: int, size_bytes: int = 1_000, date: str = "2026-01-01", subject: str = "orders"
) -> ArchiveFile:
    return ArchiveFile(
        f"subject={subject}/date={date}/{first}.parquet", subject, date, first, end, end - first, size_bytes
    )


def span(first: int, end: int, log_id: str = "00000000000000aa") -> ArchivedRange:
    return ArchivedRange("orders", log_id, first, end, end - first)


def step(number: int, first: int, end: int) -> Commit:
    return Commit(number, 0, (span(first, end),), (file(first, end),))


def written(commits: list[Commit]) -> dict[str, bytes]:
    """The files of a row of commits."""
    state, found = ArchiveState(), {}
    for commit in commits:
        state.apply(commit)
        found[manifest.name_of(commit.number).rpartition("/")[2]] = manifest.encode(commit, state)
    return found


def read_back(files: dict[str, bytes]) -> ArchiveState:
    state = ArchiveState()
    for number in manifest.wanted(files):
        name = manifest.name_of(number)
        manifest.decode(files[name.rpartition("/")[2]], name, state)
    return state


def test_commits_add_up_to_ranges_and_files() -> None:
    state = read_back(written([step(1, 0, 10), step(2, 10, 25), step(3, 30, 31)]))
    assert state.ranges == {"orders": [span(0, 25), span(30, 31)]}  # a gap stays one
    assert sorted(each.first for each in state.files.values() if each.subject == "orders") == [0, 10, 30]
    assert (state.end("orders"), state.end("payments"), state.rows) == (31, None, 26)


def test_full_commit_makes_older_ones_superfluous() -> None:
    steps = [step(number, number, number + 1) for number in range(1, 131)]
    files = written(steps)
    recent = {name: data for name, data in files.items() if name >= "000000000128"}
    assert min(recent) == "000000000128.full.json"
    assert len(recent) == 3
    assert read_back(recent) == read_back(files)
    assert manifest.wanted(files) == [128, 129, 130]


def test_compaction_changes_files_and_not_rows() -> None:
    merged = replace(file(0, 25), path="merged.parquet")
    commits = [step(1, 0, 10), step(2, 10, 25)]
    removed = (file(0, 10).path, file(10, 25).path)
    state = read_back(written([*commits, Commit(3, 0, added=(merged,), removed=removed)]))
    assert list(state.files) == ["merged.parquet"]
    assert (state.rows, state.end("orders")) == (25, 25)


@pytest.mark.parametrize(
    ("commit", "why"),
    [
        (step(3, 10, 20), "commit 2 of the archive is missing"),
        (step(2, 9, 20), "archives orders from 9 on, which ends at 10"),
        (Commit(2, 0, removed=("none.parquet",)), "which is not in the archive"),
        (Commit(2, 0, added=(file(0, 10),)), "in the archive already"),
    ],
)
def test_what_cannot_be_is_damage(commit: Commit, why: str) -> None:
    state = ArchiveState()
    state.apply(step(1, 0, 10))
    with pytest.raises(ArchiveDamaged, match=why):
        state.apply(commit)


def test_other_versions_and_other_files_are_told_apart() -> None:
    with pytest.raises(NotAnArchive, match="version 2, and this release of fairway reads version 1"):
        manifest.check_mark(json.dumps({"fairway_archive": 2}).encode(), "a/_fairway/archive.json")
    with pytest.raises(ArchiveDamaged, match="not JSON"):
        manifest.decode(b"{", "a/1.json", ArchiveState())
    with pytest.raises(ArchiveDamaged, match="no commit of an archive"):
        manifest.decode(b'{"fairway_archive": 1}', "a/1.json", ArchiveState())
    assert manifest.number_of("000000000064.full.json") == 64
    for name in ("000000000064.json", "64.json", "000000000001.json.tmp", ".000000000001.json.crc"):
        assert manifest.number_of(name) is None


# --- what broker groups are called ------------------------------------------------------------------------------------

LOG_A, LOG_B, LOG_C = "00000000000000aa", "00000000000000bb", "00000000000000cc"


def grown() -> ArchiveState:
    """An archive that began with the address of one broker, and went on when that was in a cluster of two."""
    state = ArchiveState()
    state.apply(step(1, 0, 10))
    other = replace(file(0, 5), path="other.parquet", broker_group="g2")
    state.apply(Commit(2, 0, (ArchivedRange("orders", LOG_B, 0, 5, 5, "g2"),), (other,)))
    return state


def called(state: ArchiveState) -> dict[str, tuple[str, str]]:
    """By log: the name of its ranges, and that of the rows in its files."""
    (names,) = [{each.log_id: each.broker_group for each in of} for of in state.ranges.values()]
    stored = {each.broker_group: each.stored_as for each in state.files.values()}
    return {log_id: (name, stored[name]) for log_id, name in names.items()}


@pytest.mark.parametrize(
    ("now", "names"),
    [
        ({"g1": LOG_A, "g2": LOG_B}, {LOG_A: ("g1", "default"), LOG_B: ("g2", "")}),
        ({"default": LOG_A}, {LOG_A: ("default", ""), LOG_B: ("g2", "")}),
        # The other one by its address: what was called so before is not taken for it.
        ({"default": LOG_B}, {LOG_A: (LOG_A, "default"), LOG_B: ("default", "g2")}),
        ({"default": LOG_C}, {LOG_A: ("default", ""), LOG_B: ("g2", "")}),
    ],
)
def test_logs_have_the_names_that_broker_groups_have_now(
    now: dict[str, str], names: dict[str, tuple[str, str]]
) -> None:
    state = grown()
    named = state.named(now)
    assert called(named) == names
    assert (named.rows, named.number) == (state.rows, state.number)
    assert called(state) == {LOG_A: ("default", ""), LOG_B: ("g2", "")}, "what is written down stays as it is"
    assert [state.name_of("orders", each) for each in (LOG_A, LOG_B, LOG_C)] == ["default", "g2", None]


# --- which files become one -------------------------------------------------------------------------------------------


def test_eight_small_neighbours_become_one() -> None:
    files = [file(number, number + 1) for number in range(9)]
    assert archive.plan(files[:7]) == []
    assert archive.plan(reversed(files)) == [files]


def test_large_files_are_left_alone_and_results_are_no_larger() -> None:
    large = [file(number, number + 1, 100 * MIB) for number in range(20)]
    assert archive.plan(large) == []
    medium = [file(number, number + 1, 9 * MIB) for number in range(20)]
    assert [len(group) for group in archive.plan(medium)] == [14]


def test_day_that_is_over_is_put_together() -> None:
    old = [file(0, 5, 30 * MIB), file(5, 6), file(6, 9)]
    assert archive.plan(old) == []
    assert archive.plan([*old, file(9, 10, date="2026-01-02")]) == [old]


def test_rows_are_rewritten_a_few_times_only() -> None:
    """A thousand commits of one day: what compaction writes, against what was archived."""
    files: list[ArchiveFile] = []
    rewritten = 0
    for number in range(1_000):
        files.append(file(number, number + 1, 50_000))
        for group in archive.plan(files):
            size_bytes = sum(each.size_bytes for each in group)
            rewritten += size_bytes
            merged = replace(file(group[0].first, group[-1].end, size_bytes), path=f"merged-{number}")
            files = [merged if each is group[0] else each for each in files if each is group[0] or each not in group]
    assert len(files) < 40
    assert rewritten < 6 * 1_000 * 50_000


# --- errors and progress ----------------------------------------------------------------------------------------------

TRACE = """An error occurred while calling o71.parquet.
: org.apache.spark.SparkException: [PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):
  File "reading.py", line 1, in read
fairway.runtime.net.WireCut: cut

During handling of the above exception, another exception occurred:
fairway.errors.Unreachable: no broker at fairway://h:1: cut. Is it running there?

\tat org.apache.spark.sql
"""


def test_error_of_a_task_is_one_sentence() -> None:
    found = job.translated(TRACE, "archiving to a")
    assert isinstance(found, Unreachable)
    assert str(found) == "archiving to a: no broker at fairway://h:1: cut. Is it running there?"
    lost = job.translated("x\nfairway.spark.reading.DataLoss: messages 0 to 4 are gone\n", "reading")
    assert str(lost) == "reading: messages 0 to 4 are gone"
    assert isinstance(job.translated("pyspark.X: fairway.errors.Misuse: no subject 'a'", "reading"), Misuse)
    assert str(job.translated("\n[SOME_CLASS] of Spark's own\nmore", "reading")) == (
        "reading: [SOME_CLASS] of Spark's own"
    )


def test_progress_says_rate_and_what_remains() -> None:
    clock, points = ManualClock(), list[Point]()
    pace = ProgressCounter(points.append, "archive", clock)
    clock.advance(2_000)
    pace.add(1_000, 4_000)
    clock.advance(2_000)
    pace.add(3_000, 1_000)
    assert points[-1].sentence == "archive: 4,000 rows, 1,000 rows/s, 1,000 to go, about 1 s"
    assert points[0].left_s == 8


def test_command_has_the_settings_of_every_session_and_its_own_log() -> None:
    name = "spark.driver.defaultJavaOptions"
    made = job.settings("OFF")[name]
    assert made.startswith(f"{SETTINGS[name]} ")
    assert made.endswith("-Dfairway.spark.log=OFF")
