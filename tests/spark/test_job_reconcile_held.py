"""Reconcile from the business rows on: what a real outbox and a real spool still hold is outstanding, not lost."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import fairway
from fairway.batch import MessageId
from fairway.client.sync.client import Client
from fairway.errors import FairwayError
from fairway.spark.jobs import producer_records, reconcile
from fairway.spark.jobs.reconcile import ReconcileOptions
from fairway.sql import Outbox
from tests.spark.test_job_reconcile import NEVER_LATE_S, consume, named, table
from tests.support.outboxes import NIMBLE
from tests.support.ports import free_port

WAIT_S = 60


def one(outbox: Outbox, engine: sa.Engine, subject: str, key: str, at: datetime | None = None) -> str:
    """A message in a transaction of its own."""
    with engine.begin() as connection:
        return str(outbox.send(connection, subject, b"x", key=key, at=at))


def in_outbox(database: str, url: str, subject: str) -> tuple[str, str, str]:
    """One that was sent, one that a broker has refused, one that nobody has sent; their ids."""
    engine = sa.create_engine(database)
    far = datetime.now(UTC) + timedelta(days=5 * 365)  # more than a delay server takes
    with Outbox(engine, url, options=NIMBLE) as outbox:
        outbox.create()
        stored = one(outbox, engine, subject, "o-1")
        refused = one(outbox, engine, subject, "o-2", at=far)
        end_s = time.monotonic() + WAIT_S
        while outbox.state().set_aside != 1 or outbox.state().pending:
            assert time.monotonic() < end_s, outbox.state()
            time.sleep(0.02)
    left = one(Outbox(engine), engine, subject, "o-3")
    engine.dispose()
    return stored, refused, left


def in_spool(directory: Path, subject: str, count: int) -> list[str]:
    """Messages whose process has ended while its broker was away."""
    nobody = f"fairway://127.0.0.1:{free_port()}"
    with fairway.connect(nobody, spool=fairway.SpoolOptions(str(directory), after_ms=10)) as client:
        pending = [client.send(subject, b"x", key=f"s-{number}") for number in range(count)]
        return [str(each.result(WAIT_S).id) for each in pending]


@pytest.mark.slow
def test_what_producers_hold_is_outstanding_and_what_nobody_has_is_lost(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    subject, database, spool = "rec.held", f"sqlite:///{tmp_path / 'shop.db'}", tmp_path / "spool"
    stored, refused, left = in_outbox(database, url, subject)
    spooled = in_spool(spool, subject, 2)
    in_spool(spool, "rec.elsewhere", 1)
    consume(client, subject, "billing", 1)
    lost = str(MessageId(7, 9))
    rows = table(tmp_path / "rows.parquet", [stored, refused, left, *spooled[:1], lost])  # one is not in the table yet
    options = ReconcileOptions(
        (subject,), url, late_after_s=NEVER_LATE_S, sent=rows, outboxes=(database,), spools=(str(spool),)
    )
    result = reconcile.run(spark, options)
    assert result.rows == {
        producer_records.STORED: 1,
        producer_records.SET_ASIDE: 1,
        producer_records.AT_PRODUCER: 3,
        producer_records.MISSING: 1,
    }
    assert [each.id for each in named(result, "missing")] == [lost]
    (stuck,) = named(result, "stuck")
    assert (stuck.reason, stuck.id, stuck.key) == ("set aside at the producer", refused, "o-2")
    assert (stuck.detail or "").startswith("in the outbox: ")
    (book,) = result.books
    assert (book.sent, book.stored, book.unsent, book.missing) == (6, 1, 4, 1)
    assert result.notes == [
        "1 messages wait in the outbox: they are outstanding at the producer, not lost",
        "2 messages wait in the spool: they are outstanding at the producer, not lost",
    ]
    assert not result.is_balanced


@pytest.mark.slow
def test_without_a_table_of_rows_the_books_count_what_waits(
    spark: SparkSession, url: str, client: Client, tmp_path: Path
) -> None:
    subject, spool = "rec.waits", tmp_path / "spool"
    client.send(subject, b"x").result(WAIT_S)
    consume(client, subject, "billing", 1)
    spooled = in_spool(spool, subject, 3)
    patient = ReconcileOptions((subject,), url, late_after_s=NEVER_LATE_S, spools=(str(spool),))
    result = reconcile.run(spark, patient)
    assert result.is_balanced
    assert result.rows == {producer_records.AT_PRODUCER: 3}
    (book,) = result.books
    assert (book.sent, book.stored, book.unsent, book.missing) == (4, 1, 3, 0)
    with fairway.connect(url, spool=fairway.SpoolOptions(str(spool), adopt_ms=10)) as draining:
        assert draining.wait_drained(WAIT_S)
    consume(client, subject, "billing", 3)
    assert list(producer_records._messages(patient, [])) == []
    again = in_spool(spool, subject, 1)
    hasty = ReconcileOptions((subject,), url, late_after_s=NEVER_LATE_S, stuck_after_s=0, spools=(str(spool),))
    result = reconcile.run(spark, hasty)
    assert [(each.reason, each.id) for each in result.findings] == [("waits at the producer", again[0])]
    assert {each.id for each in result.findings}.isdisjoint(spooled)


def test_what_is_held_is_read_chunk_by_chunk(spark: SparkSession, tmp_path: Path) -> None:
    spooled = in_spool(tmp_path / "spool", "rec.chunks", 5)
    options = ReconcileOptions(("rec.*",), match="key", spools=(str(tmp_path / "spool"),))
    found = producer_records.load_held(spark, options, [], chunk_rows=2)
    assert found is not None
    keys = [f"s-{number}" for number in range(5)]
    assert sorted((row["id"], row["row"]) for row in found.collect()) == sorted(zip(spooled, keys, strict=True))


def test_mistakes_are_named(tmp_path: Path) -> None:
    sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}").dispose()
    cases = [
        ({"outboxes": ("nothing",)}, "--outbox 'nothing' is no address"),
        ({"outboxes": (f"sqlite:///{tmp_path / 'empty.db'}",)}, "there is no table fairway_outbox"),
        ({"spools": (str(tmp_path / "nowhere"),)}, "there is no spool at"),
    ]
    for wrong, said in cases:
        with pytest.raises(FairwayError, match=said):
            list(producer_records._messages(ReconcileOptions(("rec.known",), **wrong), []))  # type: ignore[arg-type]
