"""`outbox` for asyncio: AsyncEngine, AsyncSession, AsyncConnection.

    async with AioOutbox(engine, "fairway://127.0.0.1:20880") as outbox:
        async with AsyncSession(engine) as session, session.begin():
            session.add(order)
            await outbox.send(session, "order.changed", b"...", key="o-42")

What SQLAlchemy says about a transaction it says on the loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, Self

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from fairway.batch import MessageId
from fairway.client import url as urls
from fairway.client.core import Duration, seconds_of
from fairway.errors import Misuse
from fairway.sql.engines import apart_async, own_async
from fairway.sql.inserting import AsyncBound
from fairway.sql.letters import Nobody, Picker
from fairway.sql.making import make_async
from fairway.sql.outbox import AWAY_S, CLOSE_S, RETRY_ROWS_MAX, OutboxCounts, Sender
from fairway.sql.posts import AnyAioOutboxSender, aio_post_to
from fairway.sql.relay import DATABASE_TROUBLE, TROUBLE_S, AioRelay, first_line, heard
from fairway.sql.relaying import RelayOptions
from fairway.sql.rows import OutboxState, RefusedBatch, check_engine
from fairway.sql.tables import NAME, outbox_table
from fairway.sql.writing import OutboxWriter, Parcels
from fairway.world.clock import Clock, RealClock
from fairway.world.net import Net, RealNet
from fairway.world.rng import RealRng, Rng

_POLL_S: Final = 0.02


class AioOutbox:
    """An outbox on one loop; `Outbox` says what its arguments mean."""

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
        is_cluster = url is not None and bool(urls.parse_any(url).meta)
        check_engine(engine.sync_engine, is_shared=url is not None)
        self._clock, self._rng, self._net = clock or RealClock(), rng or RealRng(), net or RealNet()
        self._options = options or RelayOptions()
        self._engine = engine
        self._own_engine = own_async(engine)
        self._apart = apart_async(engine)
        self._url = url
        self._has_relay = relays
        self.metadata = MetaData()
        self.table = outbox_table(self.metadata, table, schema)
        self.counts = OutboxCounts()
        self._stored = asyncio.Event()
        self._sender = Sender(self.counts, self._stored.set)
        self._post: AnyAioOutboxSender | None = None
        self._relay: AioRelay | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._relaying = asyncio.Event()  # set: no more
        self._is_closed = False
        self._is_deleting = False
        self._deleting_trouble: str | None = None
        self._writer = OutboxWriter(
            engine.sync_engine,
            self.table,
            self._clock,
            self._rng,
            grace_ms=int(self._options.grace_s * 1_000) if url is not None else 0,
            on_committed=None if url is None else self._on_committed,
            picker=self._picker if is_cluster else None,
        )

    # --- for programs ------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Make the table and its index, where they are missing."""
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
        """A message that is a part of the transaction of that AsyncSession or AsyncConnection."""
        if self._url is not None and self._post is None:
            raise Misuse("this outbox is not open: `async with AioOutbox(engine, url) as outbox`")
        if not isinstance(bound, AsyncSession | AsyncConnection):
            raise Misuse(
                f"a {type(bound).__name__} holds no transaction for asyncio: give the AsyncConnection or the "
                "AsyncSession that has begun it, or make an Outbox"
            )
        return await bound.run_sync(self._writer.send, subject, payload, key, tags, headers, after, at)

    async def state(self) -> OutboxState:
        """What lies in the table now: pending, how old the oldest is, what was set aside."""
        async with self._own_engine.connect() as connection:
            return await connection.run_sync(self._writer.rows.state, self._clock)

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent or deleted now; None: nothing is known to be wrong."""
        post = None if self._post is None else self._post.trouble
        return self._deleting_trouble or post or (None if self._relay is None else self._relay.trouble)

    async def set_aside(self, limit: int = 100) -> list[RefusedBatch]:
        """What brokers have refused for good, oldest first."""
        async with self._own_engine.connect() as connection:
            return await connection.run_sync(self._writer.rows.set_aside, limit)

    async def retry(self, ids: Sequence[str] | None = None) -> list[str]:
        """Let relays send again what was set aside: those rows, or all. Returns the ids that were."""
        rows = self._writer.rows
        async with self._own_engine.begin() as connection:
            found = await connection.run_sync(rows.parked_ids, ids, RETRY_ROWS_MAX)
            if found:
                await connection.run_sync(rows.unstamp, found, self._clock.wall_ms())
        return found

    async def discard(self, ids: Sequence[str]) -> list[str]:
        """Delete rows that were set aside: their messages are never sent. Returns the ids that were there."""
        rows = self._writer.rows
        async with self._own_engine.begin() as connection:
            found = await connection.run_sync(rows.parked_ids, ids, RETRY_ROWS_MAX)
            if found:
                await connection.run_sync(rows.delete, found)
        return found

    async def flush(self, timeout: Duration = CLOSE_S) -> bool:  # noqa: ASYNC109  as in the sync face
        """Wait until what this process has committed is sent and deleted; False: it is not, and waits in the table."""
        timeout_s = seconds_of(timeout)
        is_quiet = self._post is None or await self._post.wait_quiet(timeout_s)
        for _ in range(int(timeout_s / _POLL_S)):
            if not self._sender.stored and not self._is_deleting:
                return is_quiet
            await asyncio.sleep(_POLL_S)
        return False

    async def open(self) -> None:
        """Connect and begin; `async with` does it."""
        if self._is_closed:
            raise Misuse("this outbox is closed: make another")
        if self._url is None or self._post is not None:
            return
        linger_s = self._options.send_linger_s
        post = self._post = aio_post_to(self._url, self._clock, self._rng, self._net, linger_s=linger_s)
        self._tasks = [asyncio.create_task(self._delete(), name="fairway-outbox")]
        if self._has_relay:
            relay = self._relay = AioRelay(
                self._apart, self._url, table=self.table.name, schema=self.table.schema, options=self._options,
                clock=self._clock, rng=self._rng, net=self._net,
            )  # fmt: skip
            self._tasks.append(asyncio.create_task(self._run(relay, post), name="fairway-outbox-relay"))

    async def close(self, timeout: Duration = CLOSE_S) -> None:  # noqa: ASYNC109
        """`flush`, and end. What is not sent by then lies in the table, for a relay or the next start."""
        if self._is_closed:
            return
        self._is_closed = True
        self._relaying.set()
        post = self._post
        if post is None:
            self._writer.close()
            return
        await self.flush(seconds_of(timeout) if post.is_open else AWAY_S)
        self._ending.set()
        self._stored.set()
        try:
            ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await post.close()
            self._post = None
            self._writer.close()
            if self._apart.pool is not self._engine.pool:
                await self._apart.dispose()
        for surprise in filter(None, ended):
            raise surprise

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # --- after a commit ----------------------------------------------------------------------------------------------

    def _picker(self) -> Picker:
        return (None if self._post is None else self._post.picker) or Nobody()

    def _on_committed(self, committed: Parcels) -> None:
        if self._post is not None:
            self._post.put(self._sender.parcels(committed))

    async def _run(self, relay: AioRelay, post: AnyAioOutboxSender) -> None:
        while not self._relaying.is_set():
            try:
                async with (
                    self._engine.connect() as connection
                ):  # before others that are made from it (`engines.apart`)
                    await connection.run_sync(self._writer.rows.look)
                    break
            except DATABASE_TROUBLE as problem:
                relay.note(f"the database: {first_line(problem)}")
                await heard(self._relaying, TROUBLE_S)
        await relay.run(post, self._relaying)

    async def _delete(self) -> None:
        """Rows that are stored, many at a time, until the end is asked for."""
        while not self._ending.is_set():
            await self._stored.wait()
            self._stored.clear()
            await heard(self._ending, self._options.delete_linger_s)
            self._is_deleting = True
            while self._sender.stored and await self._delete_some():
                pass
            self._is_deleting = False

    async def _delete_some(self) -> bool:
        """Whether the database takes more."""
        ids = self._sender.take_stored(self._options.delete_rows_max)
        try:
            async with self._apart.begin() as connection:
                self.counts.deleted += await connection.run_sync(self._writer.rows.delete, ids)
        except DATABASE_TROUBLE as problem:
            self._deleting_trouble = f"rows that were sent cannot be deleted: {first_line(problem)}"
            self._sender.stored.extendleft(reversed(ids))
            if not await heard(self._ending, TROUBLE_S):
                self._stored.set()
            return False
        self._deleting_trouble = None
        return True
