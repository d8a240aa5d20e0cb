"""`fairway trace`: the history of a message, from the logs of a real broker and from an archive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import fairway
from fairway.batch import MessageId
from fairway.groups import GroupConfig
from fairway.groups.config import Backoff, Mode
from tests.unit.cli.running import Cli

WAIT_S = 30


@pytest.fixture(scope="module")
def fw(cli: Cli) -> Iterator[fairway.Client]:
    with cli.client() as client:
        yield client


def told(story: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each.get(name) for name in names) for each in story["events"]]


def test_acked_in_one_group_and_waiting_for_another(cli: Cli, fw: fairway.Client) -> None:
    first, second = (fw.send("two.groups", b"%d" % number, key=f"k{number}").result(WAIT_S) for number in range(2))
    with fw.consumer("two.groups", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].retry(after=0.01, reason="no stock")
        for _ in range(2):
            ann.take(1, timeout=WAIT_S)[0].ack()
    with fw.consumer("two.groups", "fraud", consumer="bob"):
        pass
    story = cli.json("trace", str(first.id))
    assert story["message"]["subject"] == "two.groups"
    assert (story["message"]["sequence"], story["message"]["key"], story["message"]["payload"]) == (0, "k0", "0")
    assert told(story, "event", "group", "consumer", "attempt") == [
        ("created", None, None, None),
        ("stored", None, None, None),
        ("pulled", "billing", "ann", 1),
        ("retried", "billing", "ann", 1),
        ("pulled", "billing", "ann", 2),
        ("acked", "billing", "ann", 2),
    ]
    assert story["events"][3]["detail"] == "no stock"
    billing, fraud = story["groups"]
    assert (billing["group"], billing["state"], billing["pulls"], billing["acks"]) == ("billing", "acked", 2, 1)
    assert billing["total_ms"] >= 0
    assert (fraud["group"], fraud["state"], fraud["pulls"]) == ("fraud", "waiting", 0)
    text = cli.run("trace", str(second.id).lower(), "--subject", "two.groups")
    assert "sequence 1" in text
    assert "billing: acked" in text
    assert "fraud: waiting" in text


def test_dead_and_redriven(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("sorrow", b"x").result(WAIT_S)
    with fw.consumer("sorrow", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].reject("nonsense")
        wait_for_state(cli, str(receipt.id), "dead")
        assert fw.redrive("sorrow", "billing").count == 1
        assert cli.json("trace", str(receipt.id))["groups"][0]["state"] in {"waiting", "in hand"}
        ann.take(1, timeout=WAIT_S)[0].ack()
    story = cli.json("trace", str(receipt.id))
    assert [each for (each,) in told(story, "event")] == [
        "created", "stored", "pulled", "rejected", "dead", "redriven", "pulled", "acked",
    ]  # fmt: skip
    assert story["events"][-1]["subject"] == "inbox:billing:sorrow"
    (billing,) = story["groups"]
    assert (billing["state"], billing["pulls"], billing["acks"]) == ("acked", 2, 1)


def test_attempts_are_counted_over_redrives_as_dead_list_counts_them(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("count", b"x").result(WAIT_S)
    with fw.consumer("count", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].reject("first")
        wait_for_state(cli, str(receipt.id), "dead")
        assert fw.redrive("count", "billing").count == 1
        ann.take(1, timeout=WAIT_S)[0].retry(after=0.01, reason="second")
        ann.take(1, timeout=WAIT_S)[0].reject("third")
        wait_for_state(cli, str(receipt.id), "dead")
    (letter,) = cli.json("dead", "list", "count", "billing")["letters"]
    assert letter["headers"]["fairway.dead.attempts"] == "3"
    story = cli.json("trace", str(receipt.id))
    attempts = [(each["event"], each["attempt"]) for each in story["events"] if "attempt" in each]
    assert attempts == [
        ("pulled", 1), ("rejected", 1), ("dead", 1),
        ("pulled", 2), ("retried", 2), ("pulled", 3), ("rejected", 3), ("dead", 3),
    ]  # fmt: skip


def wait_for_state(cli: Cli, id: str, state: str, *options: str) -> None:
    for _ in range(1_000):
        if cli.json("trace", id, *options)["groups"][0]["state"] == state:
            return
    pytest.fail(f"{id} never was {state}")


def test_in_hand_then_handed_back_when_the_consumer_leaves(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("held", b"x").result(WAIT_S)
    with fw.consumer("held", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)
        wait_for_state(cli, str(receipt.id), "in hand")  # a handout is synced within 20 ms
    story = cli.json("trace", str(receipt.id))
    assert story["groups"][0]["state"] == "returned"
    assert story["events"][-1]["event"] in {"left", "released"}


def test_a_seek_back_is_told_and_so_is_what_was_done_twice(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("again", b"x").result(WAIT_S)
    with fw.consumer("again", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].ack()
    fw.seek("again", "billing", "earliest")
    story = cli.json("trace", str(receipt.id))
    assert (story["groups"][0]["state"], story["events"][-1]["event"]) == ("waiting", "sought")
    with fw.consumer("again", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].ack()
    once, twice = cli.json("trace", str(receipt.id)), cli.json("trace", str(receipt.id), "--to-end")
    assert once["groups"][0]["acks"] == 1  # all groups were done with it, so nobody read on
    assert twice["groups"][0]["acks"] == 2
    assert "acked 2 times" in cli.run("trace", str(receipt.id), "--to-end")


def test_before_a_group_began_and_at_most_once(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("once", b"x").result(WAIT_S)
    with fw.consumer("once", "late", start="latest"):
        pass
    fw.configure("once", "quick", GroupConfig(mode=Mode.AT_MOST_ONCE), expected_version=0)
    with fw.consumer("once", "quick", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)
    states = {each["group"]: each["state"] for each in cli.json("trace", str(receipt.id))["groups"]}
    assert states == {"late": "skipped", "quick": "handed out"}


def test_a_message_that_carries_its_id(cli: Cli, fw: fairway.Client) -> None:
    born = MessageId(4_711, 42)
    fw.send("carried", b"before").result(WAIT_S)
    fw.send("carried", b"x", id=born).result(WAIT_S)
    story = cli.json("trace", str(born))
    assert (story["message"]["subject"], story["message"]["sequence"]) == ("carried", 1)
    assert story["groups"] == []
    assert "no group consumes it" in cli.run("trace", str(born))


def test_one_that_waits_for_its_time(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("later", b"x", after=3_600).result(WAIT_S)
    assert "waits for its time" in cli.run("trace", str(receipt.id))
    assert cli.json("trace", str(receipt.id))["pending"]["subject"] == "later"


def test_what_is_not_there(cli: Cli, fw: fairway.Client, tmp_path: Path) -> None:
    fw.send("somewhere", b"x").result(WAIT_S)
    nobody = str(MessageId(1, 2))
    assert f"no message {nobody}: the broker has none" in cli.fails("trace", nobody, status=1)
    assert "somewhere has none" in cli.fails("trace", nobody, "--subject", "somewhere", status=1)
    assert "26" in cli.fails("trace", "short", status=2)
    assert "nothing was ever sent to nowhere" in cli.fails("trace", nobody, "--subject", "nowhere", status=1)
    assert "not an archive" in cli.fails("trace", nobody, "--archive", str(tmp_path), status=2)
    assert "not on a local disk" in cli.fails("trace", nobody, "--archive", "s3a://bucket/a", status=2)
    assert Cli("fairway://127.0.0.1:1").fails("trace", nobody, status=3)


def archive_of(path: Path, subject: str, sequence: int, id: str, log_id: int = 0, group: str = "default") -> None:
    """One message, as the archive job leaves it; where its broker group has a name, another one has that sequence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    moment = datetime.now(UTC) if log_id else datetime(2026, 3, 1, 12, tzinfo=UTC)
    name = f"subject={subject}/date=2026-03-01/fairway-000000000001-00000000-00000.parquet"
    (path / name).parent.mkdir(parents=True)
    row = {
        "broker_group": group, "sequence": sequence, "id": id, "key": "k", "tags": ["a"],
        "headers": [("tenant", "t")], "payload": b"x", "created_at": moment, "appended_at": moment,
    }  # fmt: skip
    stamp = pa.timestamp("us", tz="UTC")
    types = [pa.string(), pa.int64(), pa.string(), pa.string(), pa.list_(pa.string())]
    types += [pa.map_(pa.string(), pa.string()), pa.binary(), stamp, stamp]
    pq.write_table(pa.Table.from_pylist([row], pa.schema(list(zip(row, types, strict=True)))), path / name)
    home = path / "_fairway"
    (home / "commits").mkdir(parents=True)
    (home / "archive.json").write_text(json.dumps({"fairway_archive": 1}))
    span = {"subject": subject, "first": sequence, "end": sequence + 1, "rows": 1}
    of = {} if group == "default" else {"broker_group": group}
    others = [{**span, "log_id": f"{log_id + 1:016x}"}] if of else []
    commit = {
        "fairway_archive": 1, "number": 1, "at_ms": 0, "removed": [],
        "ranges": [*others, {**span, **of, "log_id": f"{log_id:016x}"}],
        "added": [{**span, **of, "path": name, "date": "2026-03-01", "size_bytes": 1}],
    }  # fmt: skip
    (home / "commits" / "000000000001.json").write_text(json.dumps(commit))


def test_one_that_only_an_archive_has(cli: Cli, fw: fairway.Client, tmp_path: Path) -> None:
    gone = str(MessageId(77, 7))
    archive_of(tmp_path / "archive", "gone", 3, gone)
    story = cli.json("trace", gone, "--archive", str(tmp_path / "archive"))
    assert story["is_archived_only"]
    message = story["message"]
    assert (message["subject"], message["sequence"], message["tags"]) == ("gone", 3, ["a"])
    assert message["headers"] == {"tenant": "t"}
    text = cli.run("trace", gone, "--archive", str(tmp_path / "archive"), "-s", "gone")
    assert "in the archive only" in text
    assert "of another log" in text
    missing = cli.fails("trace", str(MessageId(77, 8)), "--archive", str(tmp_path / "archive"), status=1)
    assert "nor" in missing


def test_attempts_that_run_out(cli: Cli, fw: fairway.Client) -> None:
    config = GroupConfig(attempts_max=2, backoff=Backoff(first_ms=1, cap_ms=1))
    receipt = fw.send("tired", b"x").result(WAIT_S)
    fw.configure("tired", "billing", config, expected_version=0)
    with fw.consumer("tired", "billing", consumer="ann") as ann:
        for _ in range(2):
            ann.take(1, timeout=WAIT_S)[0].retry(reason="busy")
        wait_for_state(cli, str(receipt.id), "dead")
    events = [each for (each,) in told(cli.json("trace", str(receipt.id)), "event")]
    assert events == ["created", "stored", "pulled", "retried", "pulled", "retried", "dead"]


@pytest.mark.parametrize("group", ["default", "g2"])
def test_one_that_retention_has_taken_has_its_events_still(
    cli: Cli, fw: fairway.Client, tmp_path: Path, group: str
) -> None:
    subject = f"taken.{group}"
    archive_of(tmp_path / "archive", subject, 0, str(MessageId(78, 1)), fw.describe().broker.log_id, group)
    fw.send(subject, b"stands for it").result(WAIT_S)
    with fw.consumer(subject, "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].ack()
    story = cli.json("trace", str(MessageId(78, 1)), "--archive", str(tmp_path / "archive"))
    assert story["is_archived_only"]
    assert [each for (each,) in told(story, "event")] == ["created", "stored", "pulled", "acked"]
    assert story["groups"][0]["state"] == "acked"


def test_a_group_that_was_removed_and_made_again_goes_on_under_its_name(cli: Cli, fw: fairway.Client) -> None:
    receipt = fw.send("anew", b"x").result(WAIT_S)
    with fw.consumer("anew", "billing", consumer="ann") as ann:
        ann.take(1, timeout=WAIT_S)[0].ack()
    fw.remove_group("anew", "billing")
    with fw.consumer("anew", "billing", consumer="bob") as bob:
        bob.take(1, timeout=WAIT_S)
        wait_for_state(cli, str(receipt.id), "in hand", "--to-end")
        story = cli.json("trace", str(receipt.id), "--to-end")
    (billing,) = story["groups"]
    assert (billing["state"], billing["pulls"], billing["acks"]) == ("in hand", 2, 1)
    assert told(story, "event", "consumer")[2:] == [
        ("pulled", "ann"), ("acked", "ann"), ("sought", None), ("pulled", "bob"),
    ]  # fmt: skip
