"""Reads all rows of an outbox, page by page, to compare them with what brokers have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Engine

from fairway.sql.outbox_rows import OutboxRows
from fairway.sql.outbox_table import NAME, PARKED_MS, outbox_table

PAGE_ROWS: Final = 100  # in memory at once, each with a batch of any size


class OutboxContent(NamedTuple):
    """One row, which is one batch."""

    subject: str
    body: bytes
    aside: str | None  # why a broker refused the batch; None: it waits to be sent


def contents(
    engine: Engine, table: str = NAME, schema: str | None = None, *, page_rows: int = PAGE_ROWS
) -> Iterator[OutboxContent]:
    """All rows by id, with a transaction per page. Rows that are written or deleted meanwhile may be among them or not.
    Raises `Misuse` if the table is missing."""
    of = outbox_table(sa.MetaData(), table, schema)
    with engine.connect() as connection:
        OutboxRows(of, engine.dialect).check_table(connection)
    columns = of.c
    wanted = sa.select(columns.id, columns.subject, columns.body, columns.wake_ms, columns.error)
    after = ""
    while True:
        with engine.connect() as connection:
            page = connection.execute(wanted.where(columns.id > after).order_by(columns.id).limit(page_rows)).all()
        for each in page:
            is_aside = each.wake_ms >= PARKED_MS
            yield OutboxContent(
                str(each.subject), bytes(each.body), (each.error or "it was refused") if is_aside else None
            )
        if len(page) < page_rows:
            return
        after = str(page[-1].id)
