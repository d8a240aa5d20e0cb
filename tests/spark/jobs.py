"""What the tests of jobs share: messages, and what is on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row

from fairway.client.sync.client import Client

COLUMNS = ("subject", "sequence", "id", "key", "tags", "headers", "payload", "created_at", "appended_at")


def send(client: Client, subject: str, count: int, first: int = 0, **more: Any) -> None:
    """Messages that tell one another apart."""
    client.send_many(subject, [b"%d" % number for number in range(first, first + count)], **more).result(30)


def rows(frame: DataFrame) -> list[Row]:
    return frame.select(*COLUMNS).orderBy("subject", "sequence").collect()


def visible(path: Path) -> list[str]:
    """The files that a plain reader sees."""
    found = (each.relative_to(path).as_posix() for each in path.glob("subject=*/date=*/*.parquet"))
    return sorted(found)
