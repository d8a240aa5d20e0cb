"""All that lies in an outbox, page by page: for who holds it against what brokers have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Engine

from fairway.sql.rows import OutboxRows
from fairway.sql.tables import NAME, PARKED_MS, outbox_table

PAGE_ROWS: Final = 100  # at once in memory, each with a batch of as many bytes as somebody gave it


class OutboxContent(NamedTuple):
    """A row: one batch."""

    subject: str
    body: bytes
    aside: str | None  # why a broker refused it; None: it waits to be sent


def contents(
    engine: Engine, table: str = NAME, schema: str | None = None, *, page_rows: int = PAGE_ROWS
) -> Iterator[OutboxContent]:
    """By id, in transactions of a page each: what is written or deleted meanwhile may be among it or not. `Misuse` if
    there is no such table."""
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
