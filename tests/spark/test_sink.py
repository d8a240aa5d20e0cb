"""A task of the sink against a real broker: what runs again is stored once, and what is not the same is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import fairway
from fairway.batch import MessageId
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse
from fairway.spark import sink
from fairway.spark.sink import NotTheSame, TaskIdentity
from tests.spark.conftest import Server
from tests.spark.helpers import batch_reader, rows, write

STAMP = pa.timestamp("us", tz="UTC")


def payloads(url: str, subject: str) -> list[bytes]:
    return [row["payload"] for row in rows(batch_reader(url, subject))]


def table(count: int, size: int = 0) -> pa.Table:
    return pa.table({"payload": pa.array([b"%d" % at + bytes(size) for at in range(count)], pa.binary())})


def test_task_that_runs_again_stores_nothing(client: Client, url: str) -> None:
    task = TaskIdentity("q-again", 3, 0)
    first = write(url, table(10_000), task, subject="again")
    assert (first.messages, first.duplicates) == (10_000, 0)
    again = write(url, table(10_000), task, frame_rows=777, subject="again")
    assert (again.messages, again.duplicates) == (10_000, 10_000), "whatever the frames in which the rows come"
    assert payloads(url, "again") == [b"%d" % at for at in range(10_000)]
    other = write(url, table(5), TaskIdentity("q-again", 4, 0), subject="again")
    assert other.duplicates == 0


def test_task_that_was_cut_off_goes_on(client: Client, url: str) -> None:
    task = TaskIdentity("q-cut", 0, 1)
    write(url, table(8_192), task, subject="cut")
    whole = write(url, table(20_000), task, subject="cut")
    assert (whole.messages, whole.duplicates) == (20_000, 8_192)
    assert len(payloads(url, "cut")) == 20_000


def test_copies_of_a_task_at_once_store_it_once(client: Client, url: str) -> None:
    """As Spark runs them, to be sure of one that is slow."""
    task = TaskIdentity("q-twins", 0, 0)
    with ThreadPoolExecutor(3) as pool:
        copies = [pool.submit(write, url, table(20_000), task, subject="twins") for _ in range(3)]
        stored = [each.result(60) for each in copies]
    assert [each.messages for each in stored] == [20_000] * 3
    assert payloads(url, "twins") == [b"%d" % at for at in range(20_000)]


def test_more_batches_than_the_broker_remembers_of_a_stream(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "BATCH_ROWS", 10)
    task = TaskIdentity("q-long", 0, 0)
    write(url, table(2_000), task, subject="long")
    assert write(url, table(2_000), task, subject="long").duplicates == 2_000
    assert len(payloads(url, "long")) == 2_000


def test_other_rows_are_refused_with_the_remedy(client: Client, url: str) -> None:
    task = TaskIdentity("q-other", 0, 0)
    write(url, table(100), task, subject="other")
    with pytest.raises(NotTheSame, match="must give the same rows each time it runs"):
        write(url, table(99), task, subject="other")
    assert len(payloads(url, "other")) == 100, "nothing was added"


def test_large_messages_make_small_batches(client: Client, url: str) -> None:
    write(url, table(8, 400_000), TaskIdentity("q-large", 0, 0), subject="large")
    assert [len(each) for each in payloads(url, "large")] == [400_001] * 8


def test_every_column_arrives(client: Client, url: str) -> None:
    born = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    kept = [str(MessageId(7, 1)), str(MessageId(7, 2))]
    full = pa.table(
        {
            "subject": ["col.a", "col.b"],
            "payload": pa.array(["x", "y"], pa.string()),
            "key": pa.array(["k", None], pa.string()),
            "tags": pa.array([["eu"], []], pa.list_(pa.string())),
            "headers": pa.array([[("n", "1")], None], pa.map_(pa.string(), pa.string())),
            "created_at": pa.array([born, born + timedelta(seconds=1)], STAMP),
            "id": kept,
        }
    )
    write(url, full, TaskIdentity("q-columns", 0, 0), keepIds="true")
    [first], [second] = rows(batch_reader(url, "col.a")), rows(batch_reader(url, "col.b"))
    assert (first["payload"], first["key"], first["tags"], dict(first["headers"])) == (b"x", "k", ["eu"], {"n": "1"})
    assert (second["payload"], second["key"], second["headers"]) == (b"y", None, None)
    assert [first["id"], second["id"]] == kept
    assert [first["created_at"], second["created_at"]] == [born, born + timedelta(seconds=1)]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"payload": pa.array([b"x", None], pa.binary())}, "column payload has a null"),
        ({"payload": ["x"], "key": ["k" * 2_000]}, "column key: at most 1024 bytes each, and one has 2000"),
        ({"payload": ["x"], "tags": [["t"] * 17]}, "column tags: a message has at most 16, and one has 17"),
        ({"payload": ["x"], "id": ["no id"]}, "message ids of 26 characters"),
    ],
)
def test_row_that_is_no_message_is_named(url: str, columns: dict[str, object], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        write(url, pa.table(columns), TaskIdentity("q-bad", 0, 0), subject="bad", keepIds=str("id" in columns).lower())


def test_subject_that_takes_nothing_is_named(client: Client, url: str) -> None:
    client.read_only("closed", True)
    with pytest.raises(FairwayError, match="does not take messages to closed: READ_ONLY"):
        write(url, table(1), TaskIdentity("q-closed", 0, 0), subject="closed")


def test_sink_outlives_a_broker_that_is_killed(tmp_path: Path) -> None:
    served = Server(tmp_path)
    try:
        whole = table(40_000)
        frames = whole.to_batches(max_chunksize=1_000)

        def interrupted() -> object:
            for at, frame in enumerate(frames):
                if at in {12, 30}:
                    served.stop(9)
                    served.start()
                yield frame

        from fairway.spark.options import write_options

        told = write_options({"url": served.url, "subject": "orders"})
        stored = sink._Writing(told, ["payload"], TaskIdentity("q", 0, 0), 0).write(interrupted())  # type: ignore[arg-type]
        assert stored.messages == 40_000
        found = payloads(served.url, "orders")
    finally:
        served.stop()
    assert found == [b"%d" % at for at in range(40_000)]


def test_one_group_alone_gets_what_is_meant_for_it(client: Client, url: str) -> None:
    client.send("alone", b"for all").result(30)
    with client.consumer("alone", "billing") as mine, client.consumer("alone", "shipping") as other:
        for each in (mine, other):
            [message] = each.take(1, timeout=30)
            message.ack()
        task = TaskIdentity("q-alone", 0, 0)
        kept = [str(MessageId(9, number)) for number in range(100)]
        meant = table(100).append_column("id", pa.array(kept)).append_column("subject", pa.array(["alone"] * 100))
        first = write(url, meant, task, group="billing", keepIds="true")
        again = write(url, meant, task, group="billing", keepIds="true")
        assert (first.messages, first.duplicates, again.duplicates) == (100, 0, 100)
        got: list[str] = []
        while len(got) < 100:
            taken = mine.take(100, timeout=30)
            got += [str(message.id) for message in taken]
            for message in taken:
                message.ack()
        assert got == kept
        assert not other.take(1, timeout=0.2)
        assert not mine.take(1, timeout=0.2)
    assert payloads(url, "alone") == [b"for all"]
    assert len(payloads(url, "inbox:billing:alone")) == 100
    for subject, group, words in (
        ("alone", "nobody", "there is no group 'nobody' on alone"),
        ("alon", "g", "no subject 'alon'"),
    ):
        with pytest.raises(Misuse, match=words):
            write(url, table(1), TaskIdentity("q-nobody", 0, 0), subject=subject, group=group)


def test_due_rows_are_scheduled(client: Client, url: str) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1)
    mixed = pa.table({"payload": ["now", "later"], "due_at": pa.array([None, soon], STAMP)})
    task = TaskIdentity("q-due", 0, 0)
    assert write(url, mixed, task, subject="due").messages == 2
    assert write(url, mixed, task, subject="due").duplicates == 2
    assert payloads(url, "due") == [b"now"]
    with fairway.connect(url) as other, other.consumer("due", "readers") as consumer:
        found = [consumer.poll(timeout=20) for _ in range(2)]
        assert {message.payload for message in found if message is not None} == {b"now", b"later"}
