"""An inbox in an app that runs: threads and a loop, a real broker, and an end that leaves nothing open."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairway
from fairway.sql import SqlInbox
from tests.unit.client.broker import running as running_broker
from tests.unit.client.test_app import running, until

METADATA = sa.MetaData()
BOOKED = sa.Table("booked", METADATA, sa.Column("payload", sa.String(20)), sa.Column("by", sa.String(20)))


def test_threads_and_tasks_book_once(tmp_path: Path) -> None:
    path = tmp_path / "books.db"
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})
    on_loop = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 60})
    METADATA.create_all(engine)
    with running_broker(tmp_path / "data") as broker, fairway.connect(broker.url) as client:
        app = fairway.App(broker.url)

        @app.listener("order.paid", group="threads", concurrency=3, idempotent=SqlInbox(engine))
        def in_thread(message: fairway.Message, session: Session) -> None:
            session.execute(sa.insert(BOOKED).values(payload=message.payload.decode(), by="thread"))

        @app.listener("order.paid", group="tasks", concurrency=3, idempotent=SqlInbox(on_loop))
        async def in_task(message: fairway.Message, session: AsyncSession) -> None:
            await session.execute(sa.insert(BOOKED).values(payload=message.payload.decode(), by="task"))
            await asyncio.sleep(0)

        for _ in range(2):
            ids = [fairway.MessageId(1, number) for number in range(20)]
            client.send_many("order.paid", [b"%d" % number for number in range(20)], ids=ids).result()

        def is_drained() -> bool:
            groups = client.describe("order.paid").subjects[0].groups
            return len(groups) == 2 and not any(each.lag or each.lots for each in groups)

        with running(app):
            until(is_drained)
    with engine.connect() as connection:
        counted = connection.execute(sa.select(BOOKED.c.by, sa.func.count()).group_by(BOOKED.c.by)).all()
    assert sorted(map(tuple, counted)) == [("task", 20), ("thread", 20)]
    engine.dispose()
    del app, in_task, in_thread
    gc.collect()  # what was left open would complain here
