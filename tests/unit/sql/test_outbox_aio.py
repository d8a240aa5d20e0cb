"""The outbox on a loop, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fairway.errors import Misuse
from fairway.sql import AioOutbox, AioRelay, Outbox, OutboxState, RelayOptions
from tests.support.databases import on_loop
from tests.support.outboxes import NIMBLE, FailingRng, Up, payloads

WAIT_S = 60


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, WAIT_S))


@asynccontextmanager
async def engine_of(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(on_loop(url))
    try:
        yield engine
    finally:
        await engine.dispose()


async def eventually(look: Callable[[], Awaitable[OutboxState]], is_so: Callable[[OutboxState], bool]) -> None:
    for _ in range(WAIT_S * 50):
        if is_so(await look()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never")


def test_what_commits_is_sent_and_what_is_rolled_back_is_not(database_url: str, up: Up, subject: str) -> None:
    async def main() -> None:
        async with engine_of(database_url) as engine, AioOutbox(engine, up.url, options=NIMBLE) as outbox:
            await outbox.create()
            async with AsyncSession(engine) as session, session.begin():
                await outbox.send(session, subject, b"session", key="k")
                nested = await session.begin_nested()
                await outbox.send(session, subject, b"undone")
                await nested.rollback()
            async with engine.begin() as connection:
                await outbox.send(connection, subject, b"connection")
            async with engine.connect() as connection:
                await outbox.send(connection, subject, b"rolled back")
                await connection.rollback()
            assert await outbox.flush()
            assert (outbox.counts.sent, outbox.counts.left, (await outbox.state()).rows) == (2, 0, 0)

    run(main())
    assert payloads(up.url, subject, 2) == [b"session", b"connection"]


def test_many_tasks(database_url: str, up: Up, subject: str) -> None:
    async def main() -> None:
        async with engine_of(database_url) as engine, AioOutbox(engine, up.url, options=NIMBLE) as outbox:
            await outbox.create()

            async def work(name: str) -> None:
                for number in range(8):
                    async with engine.begin() as connection:
                        await outbox.send(connection, subject, f"{name}{number}".encode())

            await asyncio.gather(*(work(name) for name in "abc"))

    run(main())
    assert sorted(payloads(up.url, subject, 24)) == sorted(f"{name}{n}".encode() for name in "abc" for n in range(8))


def test_a_relay_as_a_task(database_url: str, up: Up, subject: str) -> None:
    async def main() -> None:
        async with engine_of(database_url) as engine:
            outbox = AioOutbox(engine)
            await outbox.create()
            async with AsyncSession(engine) as session, session.begin():
                await outbox.send(session, subject, b"left")
            async with AioRelay(engine, up.url, options=NIMBLE) as relay:
                await eventually(relay.state, lambda state: not state.rows)
            assert relay.counts.sent == 1
            await outbox.close()

    run(main())
    assert payloads(up.url, subject, 1) == [b"left"]


def test_a_relay_that_ends_by_surprise_says_so(tmp_path: Path, up: Up) -> None:
    async def main() -> None:
        async with engine_of(f"sqlite:///{tmp_path / 'test.db'}") as engine:
            await AioOutbox(engine).create()
            relay = AioRelay(engine, up.url, options=NIMBLE, rng=FailingRng(1))
            await relay.start()
            await asyncio.sleep(2 * NIMBLE.poll_s)
            with pytest.raises(RuntimeError, match="a surprise"):
                await relay.stop()
            assert relay.has_failed
            assert "a surprise" in (relay.trouble or "")

    run(main())


def test_what_is_set_aside(tmp_path: Path, up: Up, subject: str) -> None:
    async def main() -> None:
        lite = f"sqlite:///{tmp_path / 'lite.db'}"
        async with engine_of(lite) as engine, AioOutbox(engine, up.url, options=NIMBLE) as outbox:
            await outbox.create()
            async with engine.begin() as connection:
                await outbox.send(connection, subject, b"far", after=5 * 365 * 86_400)
                await outbox.send(connection, subject, b"farther", after=6 * 365 * 86_400)
            await eventually(outbox.state, lambda state: state.set_aside == 2)
            first, second = await outbox.set_aside()
            assert await outbox.discard([first.id]) == [first.id]
            assert await outbox.retry() == [second.id]
            await eventually(outbox.state, lambda state: state.set_aside == 1)

    run(main())


def test_mistakes(tmp_path: Path) -> None:
    sync_engine = sa.create_engine(f"sqlite:///{tmp_path / 'lite.db'}")

    async def main() -> None:
        async with engine_of(f"sqlite:///{tmp_path / 'lite.db'}") as engine:
            with pytest.raises(Misuse, match="Outbox on an Engine"):
                AioOutbox(sync_engine)  # type: ignore[arg-type]
            with pytest.raises(Misuse, match="AioOutbox on an AsyncEngine"):
                Outbox(engine)  # type: ignore[arg-type]
            with pytest.raises(Misuse, match="Relay on an Engine"):
                AioRelay(sync_engine, "fairway://127.0.0.1:1")  # type: ignore[arg-type]
            closed = AioOutbox(engine, "fairway://127.0.0.1:1", options=RelayOptions(grace_s=1))
            async with AsyncSession(engine) as session:
                with pytest.raises(Misuse, match="async with AioOutbox"):
                    await closed.send(session, "s", b"x")
            writer = AioOutbox(engine)
            with pytest.raises(Misuse, match="AsyncSession"):
                await writer.send(sync_engine, "s", b"x")  # type: ignore[arg-type]
            await writer.close()
            with pytest.raises(Misuse, match="make another"):
                await writer.open()

    run(main())
    sync_engine.dispose()
