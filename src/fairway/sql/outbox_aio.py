"""The transactional outbox for asyncio: AsyncEngine, AsyncSession, AsyncConnection.

    async with AioOutbox(engine, "fairway://127.0.0.1:20880") as outbox:
        async with AsyncSession(engine) as session, session.begin():
            session.add(order)
            await outbox.send(session, "order.changed", b"...", key="o-42")

SQLAlchemy reports the course of a transaction on the loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final, Self

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from fairway.batch import MessageId
from fairway.client.core import Duration, seconds_of
from fairway.errors import Misuse
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net, RealNet
from fairway.runtime.rng import Rng
from fairway.sql.database import AsyncBound, apart_async, make_async, own_async
from fairway.sql.outbox import AWAY_S, CLOSE_S, CommittedRows, OutboxBase
from fairway.sql.outbox_encoding import Picker
from fairway.sql.outbox_rows import OutboxState, RefusedBatch
from fairway.sql.outbox_sender import AioOutboxSender
from fairway.sql.outbox_table import NAME
from fairway.sql.outbox_writer import OutboxBatches
from fairway.sql.relay import DATABASE_TROUBLE, TROUBLE_S, AioRelay, first_line, heard
from fairway.sql.relay_rounds import RelayOptions

_POLL_S: Final = 0.02


class AioOutbox(OutboxBase):
    """An outbox on one loop. `Outbox` explains the arguments."""

    def __init__(
        self,
        engine: AsyncEngine,
        url: str | None = None,
        *,
        table: str = NAME,
        schema: str | None = None,
        relays: bool = True,
        options: RelayOptions | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        net: Net | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise Misuse(f"an AioOutbox is made on an AsyncEngine, not on {type(engine).__name__}; Outbox on an Engine")
        self._apart = apart_async(engine)
        super().__init__(engine.sync_engine, url, table, schema, options, clock, rng, self._on_committed, self._picker)
        self._has_relay = relays
        self._net = net or RealNet()
        self._engine = engine
        self._own_engine = own_async(engine)
        self._stored = asyncio.Event()
        self._committed = CommittedRows(self.counts, self._stored.set)
        self._outbox_sender: AioOutboxSender | None = None
        self._relay: AioRelay | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._relaying = asyncio.Event()  # set: the relay stops
        self._is_deleting = False

    # --- for programs ------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Make the table and its index if they are missing."""
        await make_async(self._engine, self.table)

    async def send(
        self,
        bound: AsyncBound,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> MessageId:
        """Add a message to the transaction of that AsyncSession or AsyncConnection; returns the message's final id."""
        if self._url is not None and self._outbox_sender is None:
            raise Misuse("this outbox is not open: `async with AioOutbox(engine, url) as outbox`")
        if not isinstance(bound, AsyncSession | AsyncConnection):
            raise Misuse(
                f"a {type(bound).__name__} holds no transaction for asyncio: give the AsyncConnection or the "
                "AsyncSession that has begun it, or make an Outbox"
            )
        return await bound.run_sync(self._writer.send, subject, payload, key, tags, headers, after, at)

    async def state(self) -> OutboxState:
        """The table's present state: messages pending, the age of the oldest, messages set aside."""
        async with self._own_engine.connect() as connection:
            return await connection.run_sync(self._writer.rows.state, self._clock)

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent or deleted now; None: no problem is known."""
        sender = None if self._outbox_sender is None else self._outbox_sender.trouble
        return self._committed.trouble or sender or (None if self._relay is None else self._relay.trouble)

    async def set_aside(self, limit: int = 100) -> list[RefusedBatch]:
        """Batches that brokers refused for good, oldest first."""
        async with self._own_engine.connect() as connection:
            return await connection.run_sync(self._writer.rows.set_aside, limit)

    async def retry(self, ids: Sequence[str] | None = None) -> list[str]:
        """Let relays send again the given rows that were set aside, or all of them. Returns the ids of those rows."""
        async with self._own_engine.begin() as connection:
            return await connection.run_sync(self._writer.rows.retry, ids, self._clock.wall_ms())

    async def discard(self, ids: Sequence[str]) -> list[str]:
        """Delete rows that were set aside: their messages are never sent. Returns the ids of the deleted rows."""
        async with self._own_engine.begin() as connection:
            return await connection.run_sync(self._writer.rows.discard, ids)

    async def flush(self, timeout: Duration = CLOSE_S) -> bool:  # noqa: ASYNC109  as in the sync face
        """Wait until the messages that this process committed are sent and deleted; False: some remain in the table."""
        timeout_s = seconds_of(timeout)
        is_quiet = self._outbox_sender is None or await self._outbox_sender.wait_quiet(timeout_s)
        for _ in range(int(timeout_s / _POLL_S)):
            if not self._committed.stored and not self._is_deleting:
                return is_quiet
            await asyncio.sleep(_POLL_S)
        return False

    async def open(self) -> None:
        """Connect and start the tasks; `async with` calls this."""
        if self._is_closed:
            raise Misuse("this outbox is closed: make another")
        if self._url is None or self._outbox_sender is not None:
            return
        linger_s = self._options.send_linger_s
        sender = self._outbox_sender = AioOutboxSender(self._url, self._clock, self._rng, self._net, linger_s=linger_s)
        self._tasks = [asyncio.create_task(self._delete(), name="fairway-outbox")]
        if self._has_relay:
            relay = self._relay = AioRelay(
                self._apart, self._url, table=self.table.name, schema=self.table.schema, options=self._options,
                clock=self._clock, rng=self._rng, net=self._net,
            )  # fmt: skip
            self._tasks.append(asyncio.create_task(self._run(relay, sender), name="fairway-outbox-relay"))

    async def close(self, timeout: Duration = CLOSE_S) -> None:  # noqa: ASYNC109
        """`flush`, then end. Unsent rows stay in the table, for a relay or the next start."""
        if self._is_closed:
            return
        self._is_closed = True
        self._relaying.set()
        sender = self._outbox_sender
        if sender is None:
            self._writer.close()
            return
        await self.flush(seconds_of(timeout) if sender.is_open else AWAY_S)
        self._ending.set()
        self._stored.set()
        try:
            ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await sender.close()
            self._outbox_sender = None
            self._writer.close()
            if self._apart.pool is not self._engine.pool:
                await self._apart.dispose()
        for surprise in filter(None, ended):
            raise surprise

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- after a commit ----------------------------------------------------------------------------------------------

    def _picker(self) -> Picker:
        return (None if self._outbox_sender is None else self._outbox_sender.picker) or Picker()

    def _on_committed(self, committed: OutboxBatches) -> None:
        if self._outbox_sender is not None:
            self._outbox_sender.put(self._committed.outbox_batches(committed))

    async def _run(self, relay: AioRelay, sender: AioOutboxSender) -> None:
        while not self._relaying.is_set():
            try:
                async with self._engine.connect() as connection:  # before engines derived from it (`database.apart`)
                    await connection.run_sync(self._writer.rows.look)
                    break
            except DATABASE_TROUBLE as problem:
                relay.note(f"the database: {first_line(problem)}")
                await heard(self._relaying, TROUBLE_S)
        await relay.run(sender, self._relaying)

    async def _delete(self) -> None:
        """Delete stored rows, many at a time, until the end is asked for."""
        while not self._ending.is_set():
            await self._stored.wait()
            self._stored.clear()
            await heard(self._ending, self._options.delete_linger_s)
            self._is_deleting = True
            while self._committed.stored and await self._delete_some():
                pass
            self._is_deleting = False

    async def _delete_some(self) -> bool:
        """Delete one portion; False: the database failed."""
        ids = self._committed.take_stored(self._options.delete_rows_max)
        try:
            async with self._apart.begin() as connection:
                self.counts.deleted += await connection.run_sync(self._writer.rows.delete, ids)
        except DATABASE_TROUBLE as problem:
            self._committed.put_back(ids, problem)
            if not await heard(self._ending, TROUBLE_S):
                self._stored.set()
            return False
        self._committed.trouble = None
        return True
