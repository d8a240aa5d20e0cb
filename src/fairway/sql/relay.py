"""The relay: sends the rows that a crash, or an absent broker, left in the outbox; in a thread or on a loop.

    with Relay(engine, "fairway://127.0.0.1:20880"): ...                  a thread, until the block ends
    async with AioRelay(engine, "fairway://127.0.0.1:20880"): ...         a task
    fairway outbox relay --database URL                                   a process

Any number of relays may run. While no broker answers they leave the table alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from sqlalchemy import Engine, MetaData
from sqlalchemy.exc import NoSuchTableError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from fairway.client import url as urls
from fairway.errors import FairwayError, Misuse
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.host import Ending
from fairway.runtime.net import Net, RealNet
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.threaded_link import LinkFailed
from fairway.runtime.threads import Workers
from fairway.sql.database import own, own_async
from fairway.sql.outbox_rows import OutboxRows, OutboxState, check_engine
from fairway.sql.outbox_sender import AioOutboxSender, OutboxSender
from fairway.sql.outbox_table import NAME, outbox_table
from fairway.sql.relay_rounds import RelayCounts, RelayOptions, RelayRounds, Work

TROUBLE_S: Final = 2.0  # between attempts while the database fails
OPEN_S: Final = 1.0  # for a broker to answer, before the round ends
STOP_S: Final = 30.0

# Failures that databases have now and then: a restart, a deadlock, a lock held for too long.
DATABASE_TROUBLE: Final = (SQLAlchemyError, OSError)

log = logging.getLogger("fairway.outbox")


class _RelayBase:
    """What relays for threads and for asyncio have in common: the rounds, and the state for whoever relies on them."""

    trouble: str | None = None  # why nothing can be sent now, as far as is known
    has_failed = False  # an unexpected error has ended the relay

    def __init__(
        self, engine: Engine, url: str, table: str, schema: str | None, options: RelayOptions | None,
        clock: Clock | None, rng: Rng | None,
    ) -> None:  # fmt: skip
        check_engine(engine, is_shared=True)
        self._clock, self._rng = clock or RealClock(), rng or RealRng()
        self._url = url
        is_cluster = bool(urls.parse_any(url).meta)
        self.rows = OutboxRows(outbox_table(MetaData(), table, schema), engine.dialect, is_cluster=is_cluster)
        self.steps = RelayRounds(self.rows, self._clock, self._rng, options or RelayOptions())

    @property
    def counts(self) -> RelayCounts:
        return self.steps.counts

    def note(self, trouble: str | None) -> None:
        """Keep the trouble, and log it once."""
        if trouble is not None and trouble != self.trouble:
            log.warning("the outbox's relay waits: %s", trouble)
        self.trouble = trouble

    def _after(self, work: Work, sender: OutboxSender | AioOutboxSender) -> float:
        """How long to wait for the next round."""
        self.note(sender.trouble)
        is_more = work.is_full and sender.is_open  # else no broker could take more
        return 0.0 if is_more else self.steps.options.poll_s

    def _scattered(self, wait_s: float) -> float:
        """About so long: a hundred relays must not look at once."""
        return wait_s * (0.75 + self._rng.uniform() / 2)

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a bug of Fairway or of a driver
            self.has_failed = True
            self.trouble = f"the relay has ended: {error!r}"
            log.error("the outbox's relay has ended: %r", error)
            raise


class Relay(_RelayBase):
    """A relay in a thread. It runs from `start` (or the beginning of its `with`) to `stop`."""

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
        super().__init__(engine, url, table, schema, options, clock, rng)
        self._engine = own(engine)
        self._outbox_sender: OutboxSender | None = None
        self._ending = Ending()
        self._workers = Workers()

    def start(self) -> None:
        """Run in a thread of its own. Raises `Misuse` if the table is missing."""
        with self._engine.connect() as connection:
            self.rows.check_table(connection)
        sender = self._outbox_sender = OutboxSender(self._url, self._clock, self._rng, self.stop)
        self._workers.start("fairway-outbox-relay", lambda: self.run(sender, self._ending))

    def stop(self) -> None:
        """Stop after the present round."""
        self._ending.ask()
        self._workers.join(STOP_S)
        sender, self._outbox_sender = self._outbox_sender, None
        if sender is not None:
            sender.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def state(self) -> OutboxState:
        """What is in the outbox now."""
        with self._engine.connect() as connection:
            return self.rows.state(connection, self._clock)

    def left_of(self, before_ms: int) -> int:
        """The number of rows that were written by then and are still to be sent."""
        with self._engine.connect() as connection:
            return self.rows.left_of(connection, before_ms)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def run(self, sender: OutboxSender, ending: Ending) -> None:
        """Run round after round, until asked to end."""
        with self.watched():
            while not ending.is_asked:
                wait_s = self._round(sender)
                if wait_s:
                    ending.wait(self._scattered(wait_s))

    def _round(self, sender: OutboxSender) -> float:
        """One round; returns how long to wait for the next."""
        try:
            if not sender.wait_open(OPEN_S):
                self.note(sender.trouble or "no broker answers")
                return self.steps.options.poll_s
            work = self.once(sender)
        except DATABASE_TROUBLE as problem:
            self.note(f"the database: {first_line(problem)}")
            return TROUBLE_S
        except LinkFailed:
            raise  # nothing can ever be sent over this link again
        except FairwayError as problem:  # a fork, or the end of the program, closed the sender
            self.note(str(problem))
            return TROUBLE_S
        return self._after(work, sender)

    def once(self, sender: OutboxSender) -> Work:
        """Take rows, send them, settle them."""
        with self._engine.begin() as connection:
            work = self.steps.take(connection, sender.picker)
        self.steps.taken()
        if work.rows:
            sender.put(work.outbox_batches)
            left = len(work.outbox_batches) + 1
            while work.unanswered < left:  # wait on while answers come: a slow broker must not get the rows twice
                left = work.unanswered
                sender.wait(work.outbox_batches, self.steps.options.answer_s)
        if len(work):
            with self._engine.begin() as connection:
                self.steps.settle(connection, work)
            self.steps.settled()
        return work


class AioRelay(_RelayBase):
    """A relay as a task on the loop where `start` is called."""

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
        super().__init__(engine.sync_engine, url, table, schema, options, clock, rng)
        self._net = net or RealNet()
        self._engine = own_async(engine)
        self._outbox_sender: AioOutboxSender | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    async def start(self) -> None:
        async with self._engine.connect() as connection:
            await connection.run_sync(self.rows.check_table)
        sender = self._outbox_sender = AioOutboxSender(self._url, self._clock, self._rng, self._net)
        self._ending.clear()
        self._task = asyncio.create_task(self.run(sender, self._ending), name="fairway-outbox-relay")

    async def stop(self) -> None:
        """Stop after the present round. Raises the error that ended the relay before, if one did."""
        self._ending.set()
        task, self._task = self._task, None
        sender, self._outbox_sender = self._outbox_sender, None
        try:
            if task is not None:
                await task
        finally:
            if sender is not None:
                await sender.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def state(self) -> OutboxState:
        async with self._engine.connect() as connection:
            return await connection.run_sync(self.rows.state, self._clock)

    async def run(self, sender: AioOutboxSender, ending: asyncio.Event) -> None:
        with self.watched():
            while not ending.is_set():
                wait_s = await self._round(sender)
                if wait_s:
                    await heard(ending, self._scattered(wait_s))

    async def _round(self, sender: AioOutboxSender) -> float:
        try:
            if not await sender.wait_open(OPEN_S):
                self.note(sender.trouble or "no broker answers")
                return self.steps.options.poll_s
            work = await self.once(sender)
        except DATABASE_TROUBLE as problem:
            self.note(f"the database: {first_line(problem)}")
            return TROUBLE_S
        return self._after(work, sender)

    async def once(self, sender: AioOutboxSender) -> Work:
        async with self._engine.begin() as connection:
            work = await connection.run_sync(self.steps.take, sender.picker)
        self.steps.taken()
        if work.rows:
            sender.put(work.outbox_batches)
            left = len(work.outbox_batches) + 1
            while work.unanswered < left:
                left = work.unanswered
                await sender.wait(work.outbox_batches, self.steps.options.answer_s)
        if len(work):
            async with self._engine.begin() as connection:
                await connection.run_sync(self.steps.settle, work)
            self.steps.settled()
        return work


async def heard(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set; False: it was not set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


def first_line(problem: BaseException) -> str:
    if isinstance(problem, NoSuchTableError):  # its text is no more than the table's name
        return f"there is no table {problem}"
    return str(problem).partition("\n")[0]
