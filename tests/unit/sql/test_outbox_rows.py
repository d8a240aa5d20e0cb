"""All that lies in an outbox, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from fairway import batch
from fairway.errors import FairwayError, Misuse
from fairway.sql import Outbox
from fairway.sql.database import engine_at, split
from fairway.sql.outbox_rows import contents
from fairway.sql.outbox_table import PARKED_MS, outbox_table


def test_every_row_is_told_once_and_why_it_was_set_aside(tmp_path: Path) -> None:
    with engine_at(f"sqlite:///{tmp_path / 'shop.db'}", "--database") as engine:
        outbox = Outbox(engine, table="mine")
        outbox.create()
        told = []
        for _ in range(5):
            with engine.begin() as connection:
                told.append(str(outbox.send(connection, "s", b"x")))
        table = outbox_table(sa.MetaData(), "mine")
        with engine.begin() as connection:
            parked = table.update().where(table.c.id == told[3]).values(wake_ms=PARKED_MS, error="TOO_LARGE: no")
            connection.execute(parked)
        found = {str(batch.decode(each.body).id(0)): each for each in contents(engine, "mine", page_rows=2)}
    assert sorted(found) == sorted(told)
    assert [(born, each.aside) for born, each in found.items() if each.aside] == [(told[3], "TOO_LARGE: no")]


def test_no_table_and_no_database_are_named(tmp_path: Path) -> None:
    with engine_at(f"sqlite:///{tmp_path / 'shop.db'}", "--outbox") as engine, pytest.raises(Misuse, match="no table"):
        list(contents(engine))
    with pytest.raises(Misuse, match=r"--outbox 'shop\.db' is no address"), engine_at("shop.db", "--outbox"):
        pass
    nowhere = f"sqlite:///{tmp_path / 'no' / 'such' / 'shop.db'}"
    with pytest.raises(FairwayError, match="unable to open"), engine_at(nowhere, "--outbox") as engine:
        list(contents(engine))


def test_a_table_may_name_its_schema() -> None:
    assert split("fairway_outbox") == ("fairway_outbox", None)
    assert split("shop.fairway_outbox") == ("fairway_outbox", "shop")
