"""The relay: sends what a crash, or a broker that was away, has left in the outbox; in a thread or on a loop.

    with Relay(engine, "fairway://127.0.0.1:20880"): ...                  a thread, until the block ends
    async with AioRelay(engine, "fairway://127.0.0.1:20880"): ...         a task
    fairway outbox relay --database URL                                   a process

Any number of them may run. While no broker answers they leave the table alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from sqlalchemy import Engine, MetaData
from sqlalchemy.exc import NoSuchTableError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from fairway.client import url as urls
from fairway.errors import FairwayError, Misuse
from fairway.sql.engines import own, own_async
from fairway.sql.posts import AnyAioOutboxSender, AnyOutboxSender, aio_post_to, post_to
from fairway.sql.relaying import RelayCounts, RelayOptions, RelayRounds, Work
from fairway.sql.rows import OutboxRows, OutboxState, check_engine
from fairway.sql.tables import NAME, outbox_table
from fairway.world.clock import Clock, RealClock
from fairway.world.link import LinkFailed
from fairway.world.net import Net, RealNet
from fairway.world.rng import RealRng, Rng
from fairway.world.workers import Ending, Workers

TROUBLE_S: Final = 2.0  # between attempts while the database fails
OPEN_S: Final = 1.0  # for a broker to answer before the table is looked at again
STOP_S: Final = 30.0

# What a database does now and then: it restarts, finds a deadlock, is locked for too long.
DATABASE_TROUBLE: Final = (SQLAlchemyError, OSError)

log = logging.getLogger("fairway.outbox")


class _Watched:
    """How a relay fares, for whoever relies on it."""

    trouble: str | None = None  # why nothing can be sent now, as far as it is known
    has_failed = False  # it has ended by surprise

    def note(self, trouble: str | None) -> None:
        """Say it once."""
        if trouble is not None and trouble != self.trouble:
            log.warning("the outbox's relay waits: %s", trouble)
        self.trouble = trouble

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a bug, of ours or of a driver
            self.has_failed = True
            self.trouble = f"the relay has ended: {error!r}"
            log.error("the outbox's relay has ended: %r", error)
            raise


class Relay(_Watched):
    """Runs from `start` (or the beginning of its `with`) to `stop`."""

    def __init__(
        self,
        engine: Engine,
        url: str,
        *,
        table: str = NAME,
        schema: str | None = None,
        options: RelayOptions | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise Misuse(f"a Relay runs on an Engine, not on {type(engine).__name__}; AioRelay on an AsyncEngine")
        check_engine(engine, is_shared=True)
        self._clock, self._rng = clock or RealClock(), rng or RealRng()
        self._url = url
        self._engine = own(engine)
        is_cluster = bool(urls.parse_any(url).meta)
        self.rows = OutboxRows(outbox_table(MetaData(), table, schema), engine.dialect, is_cluster=is_cluster)
        self.steps = RelayRounds(self.rows, self._clock, self._rng, options or RelayOptions())
        self._post: AnyOutboxSender | None = None
        self._ending = Ending()
        self._workers = Workers()

    @property
    def counts(self) -> RelayCounts:
        return self.steps.counts

    def start(self) -> None:
        """In a thread of its own. Raises `Misuse` where there is no table."""
        with self._engine.connect() as connection:
            self.rows.check_table(connection)
        post = self._post = post_to(self._url, self._clock, self._rng, self.stop)
        self._workers.start("fairway-outbox-relay", lambda: self.run(post, self._ending))

    def stop(self) -> None:
        """Let the round that is under way end."""
        self._ending.ask()
        self._workers.join(STOP_S)
        post, self._post = self._post, None
        if post is not None:
            post.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def state(self) -> OutboxState:
        """What lies in the outbox now."""
        with self._engine.connect() as connection:
            return self.rows.state(connection, self._clock)

    def left_of(self, before_ms: int) -> int:
        """Rows that were written by then and are still to be sent."""
        with self._engine.connect() as connection:
            return self.rows.left_of(connection, before_ms)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def run(self, post: AnyOutboxSender, ending: Ending) -> None:
        """Round after round, until it is asked to end."""
        with self.watched():
            while not ending.is_asked:
                wait_s = self._round(post)
                if wait_s:
                    ending.wait(wait_s * (0.75 + self._rng.uniform() / 2))  # a hundred relays do not look all at once

    def _round(self, post: AnyOutboxSender) -> float:
        """One look at the table; how long to wait for the next."""
        try:
            if not post.wait_open(OPEN_S):
                self.note(post.trouble or "no broker answers")
                return self.steps.options.poll_s
            work = self.once(post)
        except DATABASE_TROUBLE as problem:
            self.note(f"the database: {first_line(problem)}")
            return TROUBLE_S
        except LinkFailed:
            raise  # nothing will ever be sent over it again
        except FairwayError as problem:  # the post was closed under us, by a fork or the end of the program
            self.note(str(problem))
            return TROUBLE_S
        self.note(post.trouble)
        is_more = work.is_full and post.is_open  # else there is nobody to send it to
        return 0.0 if is_more else self.steps.options.poll_s

    def once(self, post: AnyOutboxSender) -> Work:
        """Take what there is, send it, settle it."""
        with self._engine.begin() as connection:
            work = self.steps.take(connection, post.picker)
        self.steps.taken()
        if work.rows:
            post.put(work.to_post)
            left = len(work.parcels) + 1
            while work.unanswered < left:  # as long as there are answers: what is slow is not to be asked twice
                left = work.unanswered
                post.wait(work.parcels, self.steps.options.answer_s)
        if len(work):
            with self._engine.begin() as connection:
                self.steps.settle(connection, work)
            self.steps.settled()
        return work


class AioRelay(_Watched):
    """The same as a task on the loop where `start` is called."""

    def __init__(
        self,
        engine: AsyncEngine,
        url: str,
        *,
        table: str = NAME,
        schema: str | None = None,
        options: RelayOptions | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        net: Net | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise Misuse(f"an AioRelay runs on an AsyncEngine, not on {type(engine).__name__}; Relay on an Engine")
        check_engine(engine.sync_engine, is_shared=True)
        self._clock, self._rng, self._net = clock or RealClock(), rng or RealRng(), net or RealNet()
        self._url = url
        self._engine = own_async(engine)
        is_cluster = bool(urls.parse_any(url).meta)
        self.rows = OutboxRows(outbox_table(MetaData(), table, schema), engine.dialect, is_cluster=is_cluster)
        self.steps = RelayRounds(self.rows, self._clock, self._rng, options or RelayOptions())
        self._post: AnyAioOutboxSender | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @property
    def counts(self) -> RelayCounts:
        return self.steps.counts

    async def start(self) -> None:
        async with self._engine.connect() as connection:
            await connection.run_sync(self.rows.check_table)
        post = self._post = aio_post_to(self._url, self._clock, self._rng, self._net)
        self._ending.clear()
        self._task = asyncio.create_task(self.run(post, self._ending), name="fairway-outbox-relay")

    async def stop(self) -> None:
        """Let the round that is under way end. Raises what has ended the relay before, if anything has."""
        self._ending.set()
        task, self._task = self._task, None
        post, self._post = self._post, None
        try:
            if task is not None:
                await task
        finally:
            if post is not None:
                await post.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def state(self) -> OutboxState:
        async with self._engine.connect() as connection:
            return await connection.run_sync(self.rows.state, self._clock)

    async def run(self, post: AnyAioOutboxSender, ending: asyncio.Event) -> None:
        with self.watched():
            while not ending.is_set():
                wait_s = await self._round(post)
                if wait_s:
                    await heard(ending, wait_s * (0.75 + self._rng.uniform() / 2))

    async def _round(self, post: AnyAioOutboxSender) -> float:
        try:
            if not await post.wait_open(OPEN_S):
                self.note(post.trouble or "no broker answers")
                return self.steps.options.poll_s
            work = await self.once(post)
        except DATABASE_TROUBLE as problem:
            self.note(f"the database: {first_line(problem)}")
            return TROUBLE_S
        self.note(post.trouble)
        is_more = work.is_full and post.is_open  # else there is nobody to send it to
        return 0.0 if is_more else self.steps.options.poll_s

    async def once(self, post: AnyAioOutboxSender) -> Work:
        async with self._engine.begin() as connection:
            work = await connection.run_sync(self.steps.take, post.picker)
        self.steps.taken()
        if work.rows:
            post.put(work.to_post)
            left = len(work.parcels) + 1
            while work.unanswered < left:
                left = work.unanswered
                await post.wait(work.parcels, self.steps.options.answer_s)
        if len(work):
            async with self._engine.begin() as connection:
                await connection.run_sync(self.steps.settle, work)
            self.steps.settled()
        return work


async def heard(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether it was set by then."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


def first_line(problem: BaseException) -> str:
    if isinstance(problem, NoSuchTableError):  # of which it says the name, and no more
        return f"there is no table {problem}"
    return str(problem).partition("\n")[0]
