"""The golden archives: what `fairway pipeline archive` of format version 1 has written, with the rows that it holds.

    python -m tests.golden.archive        writes them where they are not there yet

`archive_v1` has two subjects, a compaction and commits behind it. `archive_v1_killed` is the same archive a moment before
its compaction was committed, left there by a run that was killed. Neither is ever written again: they stand for
archives that lie on people's disks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import fairway
from fairway.batch import MessageId
from fairway.client.sync.client import Client
from fairway.spark import session
from fairway.spark.jobs import archive, archive_log
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.archive_log import ArchiveRunRecord

HOME = Path(__file__).parent
FOLDER, KILLED, EXPECTED = HOME / "archive_v1", HOME / "archive_v1_killed", HOME / "archive_v1.json"
TEXTS = ("subject", "broker_group", "sequence", "id", "key", "tags", "headers")


class Killed(Exception):
    """The process is gone at this point."""


class Dying(Files):
    """Files whose owner dies when it has moved everything and writes the commit."""

    def write(self, path: str, data: bytes, *, temporary: str) -> None:
        raise Killed(path)


def rows(frame: DataFrame) -> list[list[Any]]:
    """As JSON has them: times in microseconds, the payload as text."""
    chosen = [*TEXTS, "cast(payload as string)", "unix_micros(created_at)", "unix_micros(appended_at)", "string(date)"]
    found = frame.selectExpr(*chosen).orderBy("subject", "sequence").collect()
    return [list(row) for row in found]


def send(client: Client, subject: str, first: int, count: int) -> None:
    numbers = range(first, first + count)
    client.send_many(
        subject,
        [f"{subject} {at}".encode() for at in numbers],
        keys=[None if at % 3 == 0 else f"key-{at % 5}" for at in numbers],
        tags=[["paid", "eu"] if at % 4 == 0 else None for at in numbers],
        headers=[{"number": str(at)} if at % 2 else None for at in numbers],
        ids=[MessageId(0xFA1, at + (1_000 if subject == "orders" else 2_000)) for at in numbers],
    ).result(30)


def write(spark: SparkSession, url: str) -> None:
    path = Path(tempfile.mkdtemp()) / "archive"
    options = archive.ArchiveOptions(str(path), ("orders",), url, once=True, compact=False)
    with fairway.connect(url) as client:
        for number in range(archive.FAN_IN):
            send(client, "orders", 3 * number, 3)
            archive.run(spark, options)
        shutil.copytree(path, KILLED.with_name("before"))
        try:
            with archive_log.settings(spark):
                archive.compact(spark, ArchiveRunRecord(Dying(spark, str(path))))
        except Killed:
            shutil.copytree(path, KILLED)
        shutil.rmtree(path)
        shutil.move(KILLED.with_name("before"), path)
        send(client, "bills.EU-1_x", 0, 4)
        send(client, "orders", 3 * archive.FAN_IN, 2)
        both = archive.ArchiveOptions(str(path), ("orders", "bills.*"), url, once=True)
        archive.run(spark, both)
        send(client, "orders", 3 * archive.FAN_IN + 2, 2)
        archive.run(spark, both)
    shutil.copytree(path, FOLDER)
    expected = {
        each.name: {
            "ranges": {name: [vars(span) for span in of] for name, of in archive.contents(spark, str(each)).ranges.items()},
            "rows": rows(archive.read(spark, str(each))),
        }
        for each in (FOLDER, KILLED)
    }
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def expected() -> dict[str, Any]:
    """By the name of the archive: its ranges and its rows."""
    held: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return held


def main() -> None:
    from tests.spark.conftest import Server

    if FOLDER.exists():
        return
    served = Server(Path(tempfile.mkdtemp()) / "data")
    spark = session("golden", "local[1]", {"spark.ui.enabled": "false"})
    try:
        write(spark, served.url)
    finally:
        spark.stop()
        served.stop()


if __name__ == "__main__":
    main()
