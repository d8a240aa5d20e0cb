"""The golden outbox tables: dumps of SQLite databases, drained by every later version.

    python -m tests.golden.outbox        writes the one of this version where it is not there yet

`outbox_v1.sql` was written by a version whose table has no column `secret`. Neither is ever written again.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa

from fairway.sql.database import make
from fairway.sql.outbox_table import PARKED_MS, outbox_table
from fairway.sql.outbox_writer import OutboxWriter
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng

FILE = Path(__file__).parent / "outbox_v1.sql"
SECRET_FILE = Path(__file__).parent / "outbox_v2.sql"
START_MS = 1_700_000_000_000
SENT = [b"lone 0", b"lone 1", b"one of three", b"two of three", b"three of three", b"unstamped"]  # and one set aside


def dump(path: Path) -> str:
    """The database as SQL, from fixed inputs: rows that are to be sent, one without a stream, one set aside."""
    engine = sa.create_engine(f"sqlite:///{path}")
    table = outbox_table(sa.MetaData())
    make(engine, table)
    clock = ManualClock(START_MS)
    sending = OutboxWriter(engine, table, clock, SeededRng("golden"), grace_ms=0, on_committed=lambda _: None)
    for payloads in ([b"lone 0"], [b"lone 1"], [b"one of three", b"two of three", b"three of three"], [b"set aside"]):
        with engine.begin() as connection:
            for payload in payloads:
                sending.send(connection, "orders", payload, key="k", tags=["paid"], headers={"trace": "7"})
        clock.advance(1_000)
    sending.close()
    writing = OutboxWriter(engine, table, clock, SeededRng("relays choose"), grace_ms=0, on_committed=None)
    with engine.begin() as connection:
        writing.send(connection, "orders", b"unstamped")
    writing.close()
    with engine.begin() as connection:
        of = sa.select(sa.func.max(table.c.place)).where(table.c.stream.is_not(None)).scalar_subquery()
        parked = sa.update(table).where(table.c.place == of, table.c.stream.is_not(None))
        connection.execute(parked.values(wake_ms=PARKED_MS, error="BAD_NAME: no"))
    engine.dispose()
    with sqlite3.connect(path) as database:
        return "\n".join(database.iterdump()) + "\n"


def load(file: Path, path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(file.read_text(encoding="utf-8"))


def write(file: Path, path: Path) -> None:
    if not file.exists():
        file.write_text(dump(path), encoding="utf-8")


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(sys.argv[1]) if len(sys.argv) > 1 else SECRET_FILE, Path(folder) / "shop.db")
