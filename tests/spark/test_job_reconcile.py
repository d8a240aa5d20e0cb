"""Reconcile finds what was planted, by its id, and nothing where nothing is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from fairway.batch import MessageId
from fairway.client.idempotence import REPLAY_ID
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs import archive, audit, producer_records, reconcile, server_status
from fairway.spark.jobs.audit import STRETCH, Archive, Whole, holes
from fairway.spark.jobs.manifest import ArchivedRange
from fairway.spark.jobs.reconcile import Discrepancy, ReconcileOptions, ReconcileResult
from fairway.spark.plan import SubjectExtent
from fairway.spark.server_groups import SubjectPart
from tests.spark.jobs import visible
from tests.unit.client.broker import running

WAIT_S = 60
NEVER_LATE_S = 3_600.0  # a slow machine is no finding
_NOTHING = {"missing": 0, "duplicate": 0, "late": 0, "stuck": 0, "stranger": 0, "differing": 0}


def send(client: Client, subject: str, count: int, **more: Any) -> list[str]:
    """Messages one by one; their ids."""
    pending = [client.send(subject, b"%d" % number, **more) for number in range(count)]
    return [str(each.result(WAIT_S).id) for each in pending]


def consume(client: Client, subject: str, group: str, count: int, consumer: str = "bob") -> None:
    """Take so many, ack them, leave."""
    with client.consumer(subject, group, consumer=consumer) as hand:
        left = count
        while left:
            taken = hand.take(left, timeout=WAIT_S)
            assert taken, "nothing came"
            for message in taken:
                message.ack()
            left -= len(taken)


def joined(client: Client, subject: str, group: str) -> bool:
    """Wait until there is such a group."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if any(each.name == group for of in client.describe(subject).subjects for each in of.groups):
            return True
        time.sleep(0.01)
    return False


def table(path: Path, ids: Sequence[str], **more: Sequence[object]) -> str:
    """Business rows, as an outbox is exported."""
    pq.write_table(pa.table({"id": pa.array(ids), **more}), path)
    return str(path)


def named(result: ReconcileResult, kind: str) -> list[Discrepancy]:
    return [each for each in result.findings if each.kind == kind]


def doctored(path: Path, gone: str, twice: str) -> None:
    """An archive of which somebody has removed one row, and doubled another."""
    (name,) = visible(path)
    file = path / name
    rows = pq.ParquetFile(file).read()
    kept = [place for place, each in enumerate(rows.column("id").to_pylist()) if each != gone]
    again = rows.column("id").to_pylist().index(twice)
    pq.write_table(rows.take([*kept, again]), file)
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


def forged(path: Path, values: Mapping[int, tuple[str, object]]) -> None:
    """An archive of which somebody has changed a column of some rows, given by their sequences."""
    (name,) = visible(path)
    file = path / name
    table_ = pq.ParquetFile(file).read()
    rows = table_.to_pylist()
    for row in rows:
        if row["sequence"] in values:
            column, value = values[row["sequence"]]
            row[column] = value
    pq.write_table(pa.Table.from_pylist(rows, table_.schema), file)
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


# --- against a broker -------------------------------------------------------------------------------------------------


def test_clean_books_balance(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    ids = send(client, "rec.clean", 20, key="k")
    for group in ("billing", "stock"):
        consume(client, "rec.clean", group, 20)
    path = str(tmp_path / "archive")
    archive.run(spark, archive.ArchiveOptions(path, ("rec.clean",), url, once=True, group="archive"))
    rows = table(tmp_path / "rows.parquet", ids)
    options = ReconcileOptions(
        ("rec.clean",), url, archive=path, sent=rows, late_after_s=NEVER_LATE_S, stuck_after_s=0, is_strict=True
    )
    result = reconcile.run(spark, options)
    assert result.findings == []
    assert result.counts == _NOTHING
    assert result.is_balanced
    assert result.rows == {producer_records.STORED: 20}
    assert result.notes == []
    books = {each.group: each for each in result.books}
    assert set(books) == {"archive", "billing", "stock"}
    for group in ("billing", "stock"):
        book = books[group]
        assert (book.sent, book.stored, book.scheduled, book.missing, book.duplicates) == (20, 20, 0, 0, 0)
        assert (book.delivered, book.acked, book.retried, book.dead, book.outstanding) == (20, 20, 0, 0, 0)
        assert book.ack_p50_ms is not None
        assert book.ack_p99_ms is not None
        assert 0 <= book.ack_p50_ms <= book.ack_p99_ms
    assert (books["archive"].skipped, books["archive"].outstanding) == (20, 0)
    assert sum(each.stored for each in result.windows if each.group == "stock") == 20


def test_what_was_planted_is_found_by_id(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    subject, path = "rec.planted", tmp_path / "archive"
    begun_s = time.monotonic()
    good = send(client, subject, 8)
    consume(client, subject, "billing", 8)
    twice = str(MessageId(7, 1))
    for _ in range(2):
        send(client, subject, 1, id=twice)
    send(client, subject, 1, id=good[0], headers={REPLAY_ID: "r-1"})  # as it was told to
    consume(client, subject, "billing", 3)
    wait_s = max(0.5, 3 * (time.monotonic() - begun_s))  # whatever went well took a third of it at most
    (late,) = send(client, subject, 1)
    time.sleep(wait_s)
    consume(client, subject, "billing", 1)
    lost, strange = str(MessageId(7, 2)), good[7]
    archive.run(spark, archive.ArchiveOptions(str(path), (subject,), url, once=True))
    doctored(path, gone=good[2], twice=good[3])
    with client.consumer(subject, "billing", consumer="ann") as ann:
        (stuck,) = send(client, subject, 1)
        (held,) = ann.take(1, timeout=WAIT_S)
        rows = table(tmp_path / "rows.parquet", [*good[:7], twice, late, stuck, lost])
        page, output = tmp_path / "books.html", tmp_path / "out"
        options = ReconcileOptions(
            (subject,), url, archive=str(path), sent=rows, late_after_s=wait_s / 1.5, stuck_after_s=0, html=str(page),
            output=str(output),
        )  # fmt: skip
        time.sleep(0.01)  # held for longer than 0 ms, as the broker counts
        result = reconcile.run(spark, options)
        held.ack()
    assert not result.is_balanced
    assert {(each.reason, each.id) for each in named(result, "missing")} == {
        ("never stored", lost),
        ("not in the archive", good[2]),
    }
    assert {(each.reason, each.id, each.sequence) for each in named(result, "duplicate")} == {
        ("stored twice", twice, 9),
        ("archived twice", good[3], 3),
    }
    (held_up,) = named(result, "stuck")
    assert (held_up.reason, held_up.id, held_up.group, held_up.consumer) == ("in hand", stuck, "billing", "ann")
    (tardy,) = named(result, "late")
    assert (tardy.reason, tardy.id, tardy.sequence) == ("delivered late", late, 11)
    (stranger,) = named(result, "stranger")
    assert stranger.id == strange
    assert result.counts == {**_NOTHING, "missing": 2, "duplicate": 2, "late": 1, "stuck": 1, "stranger": 1}
    assert all(each.remedy and each.subject == subject for each in result.findings)
    assert all(each.since is not None for each in result.findings if each.id != lost)
    (book,) = result.books
    assert (book.sent, book.stored, book.delivered, book.acked, book.outstanding) == (11, 13, 13, 12, 1)
    assert (book.late, book.stuck, book.missing, book.duplicates) == (1, 1, 2, 2)

    shown = page.read_text(encoding="utf-8")
    assert all(each in shown for each in (lost, good[2], twice, late, stuck, "do not balance", "<svg"))
    assert spark.read.parquet(str(output / "findings")).count() == 7
    assert spark.read.parquet(str(output / "books")).selectExpr("sum(acked)").first() == (12,)


def test_mistakes_are_named(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    send(client, "rec.known", 1)
    consume(client, "rec.known", "billing", 1)
    rows = table(tmp_path / "rows.parquet", ["x"])
    other = tmp_path / "other.csv"
    other.write_text("name\nx\n", encoding="utf-8")
    cases: list[tuple[ReconcileOptions, str]] = [
        (ReconcileOptions(("rec.knwon",), url), "did you mean 'rec.known'"),
        (ReconcileOptions(("nowhere.*",), url), "no subject"),
        (ReconcileOptions(("rec.known",), url, groups=("biling",)), "did you mean 'billing'"),
        (ReconcileOptions(("rec.known",), url, sent=str(other)), "no column id"),
        (ReconcileOptions(("rec.known",), url, sent=str(tmp_path / "nothing.parquet")), "cannot be read"),
        (ReconcileOptions(("rec.known",), url, sent=rows, since=datetime.now(UTC)), "column sent_at"),
        (ReconcileOptions(("rec.known",), url, archive=str(tmp_path / "nothing")), "there is nothing at"),
    ]
    for options, said in cases:
        with pytest.raises(FairwayError, match=said):
            reconcile.run(spark, options)
    for wrong in ({"window_s": 0}, {"late_after_s": -1}, {"match": "subject"}):
        with pytest.raises(Misuse):
            ReconcileOptions(("rec.known",), url, **wrong)


@pytest.mark.slow
def test_rows_by_key_and_what_is_scheduled(spark: SparkSession, url: str, client: Client) -> None:
    subject = "rec.keys"
    ids = [send(client, subject, 1, key=key)[0] for key in ("o-1", "o-2", "o-2", "o-9")]
    client.send(subject, b"later", key="o-3", after=timedelta(hours=5)).result(WAIT_S)
    now = datetime.now(UTC)
    sent_at = {"o-1": now, "o-2": now, "o-3": now, "o-4": now - timedelta(hours=1), "o-5": now, "x": now}
    rows = spark.createDataFrame(
        [(key, "other" if key == "x" else subject, at) for key, at in sent_at.items()],
        "id string, subject string, sent_at timestamp",
    )
    result = reconcile.run(spark, ReconcileOptions((subject,), url, match="key", late_after_s=60), rows)
    assert result.rows == {
        producer_records.STORED: 2,
        producer_records.SCHEDULED: 1,
        producer_records.MISSING: 1,
        producer_records.UNDER_WAY: 1,
    }
    assert [each.id for each in named(result, "missing")] == ["o-4"]
    assert [(each.reason, each.id) for each in named(result, "duplicate")] == [("row stored twice", ids[2])]
    assert [each.key for each in named(result, "stranger")] == ["o-9"]
    (book,) = result.books
    assert (book.group, book.sent, book.stored, book.scheduled) == (None, 5, 4, 1)
    (due,) = (each for each in result.windows if each.scheduled)
    assert due.window is not None
    assert abs(due.window - (now + timedelta(hours=5))) <= timedelta(hours=1)


def test_broker_without_delayed_messages_has_none_scheduled(tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker:
        found = server_status.scheduled(broker.url, 30, ["orders"], 60_000)
    assert (found.is_there, dict(found.messages)) == (False, {})


@pytest.mark.slow
def test_groups_that_wait_retry_and_give_up(spark: SparkSession, url: str, client: Client) -> None:
    subject = "rec.groups"
    ids = send(client, subject, 1)
    consume(client, subject, "old", 1)  # and nobody comes again
    ids += send(client, subject, 2)
    with client.consumer(subject, "new", consumer="ann", start="latest") as late:
        assert joined(client, subject, "new"), "what is stored by now is not its concern"
        assert late.take(1, timeout=0) == []
    with client.consumer(subject, "busy", consumer="ann") as ann:
        for message in ann.take(3, timeout=WAIT_S):
            if message.sequence == 0:
                message.reject("nonsense")
            elif message.sequence == 1:
                message.retry(after=3_600)
            else:
                message.ack()
    time.sleep(0.01)
    result = reconcile.run(spark, ReconcileOptions((subject,), url, late_after_s=0, stuck_after_s=0))
    books = {each.group: each for each in result.books}
    assert (books["new"].skipped, books["new"].outstanding, books["new"].late) == (3, 0, 0)
    busy = books["busy"]
    assert (busy.delivered, busy.acked, busy.retried, busy.dead, busy.outstanding) == (3, 1, 1, 1, 1)
    assert busy.stuck == 0, "it waits for its time"
    old = books["old"]
    assert (old.delivered, old.acked, old.outstanding) == (1, 1, 2)
    waiting = {each.id for each in named(result, "late") if each.reason == "not delivered yet"}
    assert waiting == set(ids[1:])
    (stalled,) = named(result, "stuck")
    assert (stalled.reason, stalled.group, stalled.id, stalled.messages) == ("no acks", "old", ids[1], 2)
    assert result.counts["differing"] == 0

    only = reconcile.run(spark, ReconcileOptions((subject,), url, groups=("new",), late_after_s=0, stuck_after_s=0))
    assert [each.group for each in only.books] == ["new"]
    assert only.is_balanced
    sought = client.seek(subject, "busy", "earliest")
    assert sought.sequence == 0
    consume(client, subject, "busy", 3)
    again = reconcile.run(spark, ReconcileOptions((subject,), url, groups=("busy",), late_after_s=NEVER_LATE_S))
    assert [(each.reason, each.id) for each in named(again, "duplicate")] == [("acked twice", ids[2])]


@pytest.mark.slow
def test_times_cut_out_a_part(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    subject = "rec.times"
    ids = []
    for _ in range(3):
        ids += send(client, subject, 2)
        consume(client, subject, "billing", 2)
        time.sleep(0.02)
    stored = spark.read.format("fairway").options(url=url, subject=subject).load().orderBy("sequence").collect()
    middle = [stored[place]["appended_at"].astimezone(UTC) for place in (2, 4)]
    path = str(tmp_path / "archive")
    archive.run(spark, archive.ArchiveOptions(path, (subject,), url, once=True))
    rows = spark.createDataFrame(
        [(each, (middle[0] if each in ids[2:] else middle[0] - timedelta(days=1)).isoformat()) for each in ids],
        "id string, sent_at string",
    )
    options = ReconcileOptions(
        (subject,), url, archive=path, since=middle[0], until=middle[1], late_after_s=NEVER_LATE_S, stuck_after_s=0,
        window_s=1, is_strict=True,
    )  # fmt: skip
    result = reconcile.run(spark, options, rows)
    assert result.findings == []
    (book,) = result.books
    assert (book.stored, book.acked, book.outstanding) == (2, 2, 0)


# --- without one ------------------------------------------------------------------------------------------------------


def test_holes_are_found_wherever_they_are(spark: SparkSession) -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    there = [0, 1, 4, *range(STRETCH - 2, STRETCH + 3)]
    rows = spark.createDataFrame(
        [("a", "default", each, at) for each in there] + [("b", "default", each, at) for each in (5, 6)],
        "subject string, broker_group string, sequence long, appended_at timestamp",
    )
    assert holes(spark, rows, [Whole("a", 0, 2), Whole("b", 5, 7)]) is None
    wholes = [Whole("a", 0, STRETCH + 5), Whole("b", 5, 7), Whole("c", 3, 6), Whole("d", 0, 0)]
    found = holes(spark, rows, wholes)
    assert found is not None
    assert {(row["subject"], row["first"], row["end"]) for row in found.collect()} == {
        ("a", 2, 4),
        ("a", 5, STRETCH - 2),
        ("a", STRETCH + 3, STRETCH + 5),
        ("c", 3, 6),
    }


def test_forged_rows_of_an_archive_are_found(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    subject, path = "rec.forged", tmp_path / "archive"
    ids = send(client, subject, 8, key="k", tags=["paid"], headers={"b": "2", "a": "1"})
    archive.run(spark, archive.ArchiveOptions(str(path), (subject,), url, once=True))
    options = ReconcileOptions((subject,), url, archive=str(path), late_after_s=NEVER_LATE_S)
    assert reconcile.run(spark, options).is_balanced
    stranger, later = "07ZZZZZZZZZZZZZZZZZZZZZZZZ", datetime(2030, 1, 1, tzinfo=UTC)
    changes: dict[int, tuple[str, object]] = {
        0: ("payload", b"forged"), 1: ("key", "forged"), 2: ("id", stranger), 3: ("tags", ["paid", "forged"]),
        4: ("headers", [("a", "1"), ("b", "forged")]), 5: ("created_at", later), 6: ("key", None),
        7: ("headers", [("a", "1"), ("b", "2")]),  # the same, in another order
    }  # fmt: skip
    forged(path, changes)
    result = reconcile.run(spark, options)
    assert result.counts == {**_NOTHING, "differing": 7}
    assert not result.is_balanced
    found = {each.sequence: each for each in result.findings}
    assert {each.reason for each in found.values()} == {"archived otherwise"}
    for sequence, (column, _) in list(changes.items())[:-1]:
        finding = found[sequence]
        assert (finding.id, finding.key) == (ids[sequence], "k"), "what is true is what the log has"
        assert f"the archive has other {column}: " in (finding.detail or "")
        assert f"; the log has id {ids[sequence]}, key k" in (finding.detail or "")
    assert f"the archive has other id: id {stranger}, key k; " in (found[2].detail or "")
    assert f"the archive has other key: id {ids[1]}, key forged; " in (found[1].detail or "")
    assert f"the archive has other key: id {ids[6]}, no key; " in (found[6].detail or "")


def test_archive_alone_remembers_what_retention_took(spark: SparkSession) -> None:
    """Of 0 to 9, the log has 6 to 9; the archive has lost 3, and has 7, which the log has not."""
    at = datetime(2026, 3, 1, tzinfo=UTC)

    def rows(*sequences: int) -> Any:
        found = [("a", "default", each, f"id-{each}", None, None, None, b"", at, at) for each in sequences]
        return spark.createDataFrame(found, MESSAGES)

    log, extents = audit.with_content(rows(6, 8, 9)), {SubjectPart("a"): SubjectExtent(6, 10)}
    kept = Archive("path", rows(0, 1, 2, 4, 5, 6, 7, 8, 9), (ArchivedRange("a", "log", 0, 10, 10),), ())
    compared = audit.compared(spark, kept, log, extents, is_whole=True).collect()
    assert [(row["reason"], row["id"]) for row in compared] == [("only in the archive", "id-7")]
    gone = audit.gone(spark, kept, rows(6, 7, 8, 9), extents)
    assert gone is not None
    assert [(row["reason"], row["sequence"], row["messages"]) for row in gone.collect()] == [
        ("gone from the archive", 3, 1)
    ]
    whole = Archive("path", rows(*range(10)), (ArchivedRange("a", "log", 0, 10, 10),), ())
    assert audit.gone(spark, whole, rows(6, 7, 8, 9), extents) is None
