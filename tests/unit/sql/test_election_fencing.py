"""Fences on each database: whoever shows a smaller token than was ever seen changes nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from fairway.errors import Deposed, Misuse
from fairway.sql.election import Fence
from tests.support.databases import on_loop

METADATA = sa.MetaData()
EFFECTS = sa.Table("effects", METADATA, sa.Column("token", sa.Integer, nullable=False))


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(database_url)
    METADATA.create_all(made)
    Fence(made).create()
    yield made
    made.dispose()


def act(engine: sa.Engine, token: int, career: str = "billing") -> None:
    with engine.begin() as connection:
        Fence(engine).check(connection, career, token)
        connection.execute(sa.insert(EFFECTS).values(token=token))


def effects(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(EFFECTS.c.token)).scalars())


def test_a_deposed_leader_changes_nothing(engine: sa.Engine) -> None:
    for token in (3, 3, 5):
        act(engine, token)
    with pytest.raises(Deposed, match="token 3 of career billing is deposed: token 5"):
        act(engine, 3)
    act(engine, 1, "shipping")  # another career
    act(engine, 5)
    assert effects(engine) == [3, 3, 5, 1, 5]


def test_an_effect_that_is_rolled_back_raises_no_fence(engine: sa.Engine) -> None:
    act(engine, 3)
    with engine.connect() as connection:
        Fence(engine).check(connection, "billing", 9)
        connection.rollback()
    act(engine, 3)
    assert effects(engine) == [3, 3]


def test_the_new_leader_waits_for_the_old_ones_last_effect(engine: sa.Engine) -> None:
    act(engine, 3)
    begun, order = threading.Event(), list[str]()

    def succeed() -> None:
        begun.set()
        act(engine, 4)
        order.append("new")

    with engine.connect() as connection:
        Fence(engine).check(connection, "billing", 3)
        connection.execute(sa.insert(EFFECTS).values(token=3))
        successor = threading.Thread(target=succeed)
        successor.start()
        begun.wait(10)
        successor.join(0.2)
        order.append("old")
        connection.commit()
        successor.join(30)
    assert order == ["old", "new"]
    with pytest.raises(Deposed):
        act(engine, 3)
    assert effects(engine) == [3, 3, 4]


def test_a_session_and_a_loop_will_do(engine: sa.Engine, database_url: str) -> None:
    with Session(engine) as session, session.begin():
        Fence(engine).check(session, "billing", 5)

    async def main() -> None:
        made = create_async_engine(on_loop(database_url))
        fence = Fence(made)
        await fence.create_async()
        async with made.begin() as connection:
            await fence.check_async(connection, "billing", 6)
        with pytest.raises(Deposed):
            async with made.begin() as connection:
                await fence.check_async(connection, "billing", 5)
        await made.dispose()

    asyncio.run(main())


def test_misuse(engine: sa.Engine) -> None:
    fence = Fence(engine)
    with engine.connect() as connection:
        with pytest.raises(Misuse, match="from 0"):
            fence.check(connection, "billing", -1)
        with pytest.raises(Misuse, match="bad"):
            fence.check(connection, "no spaces", 1)
    with pytest.raises(Misuse, match="holds no transaction"):
        fence.check(engine, "billing", 1)  # type: ignore[arg-type]
