"""A program that books payments into a database, to be killed: `python -m tests.crash.inbox_worker ORDERS`.

Each payment adds to the balance of an account, and a row says that it was booked; nothing in these tables keeps a
payment from being booked twice. The inbox does, unless it is left out. SIGTERM: finish what is in hand and leave.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import fairway
from fairway.runtime.host import Ending
from fairway.sql.inbox import SqlInbox
from tests.support.databases import on_loop

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

ACCOUNTS = 20
FAIL_ONE_IN = 50  # payments
LINGER_MS = 100.0  # of acks: long, so that a kill finds some that were not sent
PATIENCE_S = 90.0

# Just after a commit, when the ack is not sent; and just before it, when record and effect are written.
DOOMS = ("checkin", "commit")

METADATA = sa.MetaData()
BALANCES = sa.Table(
    "balances",
    METADATA,
    sa.Column("account", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
)
BOOKED = sa.Table("booked", METADATA, sa.Column("payment", sa.BigInteger, nullable=False))


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    face: str  # session, connection, batch, aio or once
    url: str
    database: str
    subject: str
    group: str
    seed: str
    is_idempotent: bool = True
    doom: str = ""  # where it kills itself: one of DOOMS
    doom_at: int = 1  # the how-manieth time


class Payment(msgspec.Struct, frozen=True):
    """What a message says."""

    number: int
    account: int
    cents: int


class Teller:
    """Books payments; now and then it raises, before or after it has booked."""

    def __init__(self, orders: Orders) -> None:
        self._rng = random.Random(orders.seed)

    def statements(self, message: fairway.Message) -> list[sa.Executable]:
        payment = msgspec.json.decode(message.payload, type=Payment)
        added = BALANCES.c.cents + payment.cents
        return [
            sa.update(BALANCES).where(BALANCES.c.account == payment.account).values(cents=added),
            sa.insert(BOOKED).values(payment=payment.number),
        ]

    @contextmanager
    def failing_at_times(self) -> Iterator[None]:
        if self._rng.randrange(FAIL_ONE_IN) == 0:
            raise fairway.Retry("before it was booked", after=0)
        yield
        if self._rng.randrange(FAIL_ONE_IN) == 0:
            raise LookupError("after it was booked")

    def book(self, message: fairway.Message, session: sa.orm.Session) -> None:
        self.transfer(message, session.connection())

    def transfer(self, message: fairway.Message, connection: sa.Connection) -> None:
        with self.failing_at_times():
            for statement in self.statements(message):
                connection.execute(statement)

    def book_all(self, messages: Sequence[fairway.Message], connection: sa.Connection) -> None:
        for message in messages:
            if self._rng.randrange(FAIL_ONE_IN) == 0:
                message.retry(after=0)
                continue
            for statement in self.statements(message):
                connection.execute(statement)
        with self.failing_at_times():
            pass

    async def book_async(self, message: fairway.Message, session: AsyncSession) -> None:
        with self.failing_at_times():
            for statement in self.statements(message):
                await session.execute(statement)


# --- faces -----------------------------------------------------------------------------------------------------------


def serve(orders: Orders) -> None:
    """An app with an inbox."""
    teller = Teller(orders)
    app = fairway.App(orders.url)
    handlers: dict[str, Callable[..., None]] = {
        "session": teller.book,
        "connection": teller.transfer,
        "batch": teller.book_all,
    }
    if orders.face == "aio":
        engine = create_async_engine(on_loop(orders.database), connect_args=patience_of(orders.database))
        arm(engine.sync_engine, orders)
        _listen(app, orders, idempotent=SqlInbox(engine))(teller.book_async)
    else:
        inbox = SqlInbox(armed(orders))
        listen = _listen(app, orders, batch=orders.face == "batch", idempotent=inbox)
        listen(handlers[orders.face])
    say_begun()
    app.run()


def serve_bare(orders: Orders) -> None:
    """The same without: a transaction for each message, and then the ack."""
    teller, app, engine = Teller(orders), fairway.App(orders.url), armed(orders)

    @_listen(app, orders)
    def book(message: fairway.Message) -> None:
        with engine.begin() as connection:
            teller.transfer(message, connection)

    say_begun()
    app.run()


def serve_by_hand(orders: Orders) -> None:
    """A consumer without an app."""
    teller, engine, ending = Teller(orders), armed(orders), Ending()
    inbox = SqlInbox(engine)
    ending.on_signals()
    with fairway.connect(orders.url, patience=PATIENCE_S) as client:
        say_begun()
        with client.consumer(orders.subject, orders.group, linger_ms=LINGER_MS) as consumer:
            while not ending.is_asked:
                for message in consumer.take(20, timeout=0.2):
                    _handle_by_hand(message, inbox, engine, teller)


def _handle_by_hand(message: fairway.Message, inbox: SqlInbox, engine: sa.Engine, teller: Teller) -> None:
    try:
        with engine.begin() as connection:
            if inbox.once(connection, message):
                teller.transfer(message, connection)
    except (fairway.Retry, LookupError, sa.exc.DBAPIError) as error:
        message.retry(after=0, reason=repr(error))
    else:
        message.ack()


def _listen(
    app: fairway.App, orders: Orders, *, batch: bool = False, idempotent: SqlInbox | None = None
) -> Callable[[HandlerT], HandlerT]:
    return app.listener(
        orders.subject,
        group=orders.group,
        concurrency=3,
        batch=batch,
        batch_max=8,
        idempotent=idempotent,
        linger_ms=LINGER_MS,
    )


# --- databases -------------------------------------------------------------------------------------------------------


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(url, connect_args=patience_of(url))


def armed(orders: Orders) -> sa.Engine:
    engine = engine_of(orders.database)
    arm(engine, orders)
    return engine


def arm(engine: sa.Engine, orders: Orders) -> None:
    """SIGKILL by its own hand, at an instant that one from outside hits rarely."""
    times = itertools.count(1)

    def die(*_: object) -> None:
        if next(times) == orders.doom_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if orders.doom:
        sa.event.listen(engine, orders.doom, die)


def patience_of(url: str) -> dict[str, object]:
    """SQLite has one writer at a time, and five seconds of patience unless told otherwise."""
    return {"timeout": 60} if url.startswith("sqlite") else {}


def prepare(url: str) -> None:
    """Empty books."""
    engine = engine_of(url)
    METADATA.create_all(engine)
    SqlInbox(engine).create()
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.execute(sa.insert(BALANCES), [{"account": each, "cents": 0} for each in range(ACCOUNTS)])
    engine.dispose()


def say_begun() -> None:
    sys.stdout.write(f"begun {time.time()}\n")
    sys.stdout.flush()


def main(raw: str) -> None:
    orders = msgspec.json.decode(raw, type=Orders)
    if not orders.is_idempotent:
        serve_bare(orders)
    elif orders.face == "once":
        serve_by_hand(orders)
    else:
        serve(orders)


if __name__ == "__main__":
    main(sys.argv[1])
