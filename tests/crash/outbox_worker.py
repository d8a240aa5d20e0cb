"""A program that sells things and says so in messages, to be killed: `python -m tests.crash.outbox_worker ORDERS`.

Every message has a row in the table `sales`, written in the same transaction: what is in the table in the end is what
must have been sent, and nothing else. Some transactions are rolled back, whole or to a savepoint. SIGTERM: finish the
one in hand and leave.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairway
from fairway.runtime.host import Ending
from fairway.sql import AioOutbox, Outbox, RelayOptions, insert
from tests.support.databases import on_loop

FACES = ("session", "connection", "aio", "plain", "writer")
UNDONE_ONE_IN = 6  # transactions
DUE_ONE_IN = 8  # messages
DUE_S_MAX = 0.5
OPTIONS = RelayOptions(grace_s=0.5, poll_s=0.1, lease_s=2.0, answer_s=1.0, delete_linger_s=0.05)

METADATA = sa.MetaData()
SALES = sa.Table(
    "sales",
    METADATA,
    sa.Column("name", sa.String(60), primary_key=True),
    sa.Column("id", sa.String(26), nullable=False),
)


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    face: str
    url: str
    database: str
    subject: str
    name: str  # that nobody else has
    is_flawed: bool = False  # it has no outbox


class Undone(Exception):
    """A transaction that is to be rolled back."""


def engine_of(database: str) -> sa.Engine:
    patience = {"timeout": 60} if database.startswith("sqlite") else {}
    return sa.create_engine(database, connect_args=patience)


def prepare(database: str) -> None:
    engine = engine_of(database)
    METADATA.create_all(engine)
    Outbox(engine).create()
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # readers do not wait for writers
    engine.dispose()


class Seller:
    """Transactions, one after the other."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.rng = random.Random(orders.name)
        self.ending = Ending()
        self.ending.on_signals()
        self._sold = 0
        self._has_begun = False

    def note_begun(self) -> None:
        """Something is sold: from here on it is worth being killed."""
        if not self._has_begun:
            self._has_begun = True
            print("begun", flush=True)

    def sales(self) -> Iterator[tuple[str, float | None]]:
        """Names of what is sold in one transaction, and when its message is due."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            self._sold += 1
            due_s = self.rng.random() * DUE_S_MAX if self.rng.randrange(DUE_ONE_IN) == 0 else None
            yield f"{self.orders.name}.{self._sold}" + (".due" if due_s is not None else ""), due_s

    @property
    def is_undone(self) -> bool:
        return self.rng.randrange(UNDONE_ONE_IN) == 0

    def pause_s(self) -> float:
        return self.rng.random() * 0.004

    def run(self) -> None:
        engine = engine_of(self.orders.database)
        if self.orders.is_flawed:
            self._run_flawed(engine)
            return
        url = None if self.orders.face == "writer" else self.orders.url
        with Outbox(engine, url, options=OPTIONS) as outbox:
            while not self.ending.is_asked:
                try:
                    self._sell(engine, outbox)
                    self.note_begun()
                except Undone:
                    pass
                except sa.exc.OperationalError:  # SQLite was locked for too long, MariaDB found a deadlock
                    time.sleep(0.05)
                time.sleep(self.pause_s())

    def _sell(self, engine: sa.Engine, outbox: Outbox) -> None:
        if self.orders.face == "plain":
            self._sell_plainly(engine)
            return
        if self.orders.face == "connection":
            with engine.begin() as connection:
                self._fill(connection, outbox)
            return
        with Session(engine) as session, session.begin():
            self._fill(session, outbox)

    def _fill(self, bound: Session | sa.Connection, outbox: Outbox) -> None:
        for name, due_s in self.sales():
            try:
                with bound.begin_nested():
                    told = outbox.send(bound, self.orders.subject, name.encode(), after=due_s)
                    bound.execute(SALES.insert().values(name=name, id=str(told)))
                    if self.is_undone:
                        raise Undone
            except Undone:
                pass
        if self.is_undone:
            raise Undone

    def _sell_plainly(self, engine: sa.Engine) -> None:
        """As a program without SQLAlchemy would."""
        connection = engine.raw_connection()
        try:
            cursor = connection.cursor()
            mark = "?" if engine.dialect.name == "sqlite" else "%s"
            for name, due_s in self.sales():
                told = insert(cursor, self.orders.subject, name.encode(), after=due_s)
                cursor.execute(f"INSERT INTO sales (name, id) VALUES ({mark}, {mark})", (name, str(told)))
            connection.rollback() if self.is_undone else connection.commit()
        except engine.dialect.loaded_dbapi.OperationalError:
            connection.rollback()
        finally:
            connection.close()

    # --- on a loop ---------------------------------------------------------------------------------------------------

    async def run_on_loop(self) -> None:
        patience = {"timeout": 60} if self.orders.database.startswith("sqlite") else {}
        engine = create_async_engine(on_loop(self.orders.database), connect_args=patience)
        async with AioOutbox(engine, self.orders.url, options=OPTIONS) as outbox:
            while not self.ending.is_asked:
                try:
                    async with AsyncSession(engine) as session, session.begin():
                        await self._fill_on_loop(session, outbox)
                    self.note_begun()
                except Undone:
                    pass
                except sa.exc.OperationalError:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(self.pause_s())
        await engine.dispose()

    async def _fill_on_loop(self, session: AsyncSession, outbox: AioOutbox) -> None:
        for name, due_s in self.sales():
            try:
                async with session.begin_nested():
                    told = await outbox.send(session, self.orders.subject, name.encode(), after=due_s)
                    await session.execute(SALES.insert().values(name=name, id=str(told)))
                    if self.is_undone:
                        raise Undone
            except Undone:
                pass
        if self.is_undone:
            raise Undone

    # --- without an outbox -------------------------------------------------------------------------------------------

    def _run_flawed(self, engine: sa.Engine) -> None:
        """As people do it, slowly: so that the judge has something to find."""
        with fairway.connect(self.orders.url, patience=60) as client:
            while not self.ending.is_asked:
                for name, _ in self.sales():
                    with engine.connect() as connection:
                        connection.execute(SALES.insert().values(name=name, id=""))
                        connection.rollback() if self.is_undone else connection.commit()
                    self.note_begun()
                    time.sleep(0.1)
                    client.send(self.orders.subject, name.encode())


def main(raw: str) -> None:
    orders = msgspec.json.decode(raw, type=Orders)
    seller = Seller(orders)
    if orders.face == "aio" and not orders.is_flawed:
        asyncio.run(seller.run_on_loop())
    else:
        seller.run()


if __name__ == "__main__":
    main(sys.argv[1])
