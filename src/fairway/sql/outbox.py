"""The transactional outbox: a message that is sent if, and only if, the transaction commits that it was given in.

    outbox = Outbox(engine, "fairway://127.0.0.1:20880")
    outbox.create()                                                     # once: the table
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "order.changed", b"...", key="o-42")

What is given becomes rows of the same transaction (`writing`); after the commit it is sent by the thread that committed
(`posts`), and deleted a moment after the broker's receipt, many rows in one statement. Whatever comes between, a crash,
a broker that is away, is made up for by a relay (`relay`): one runs beside each outbox, unless told otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Final, Self

from sqlalchemy import Engine, MetaData

from fairway.batch import MessageId
from fairway.client import url as urls
from fairway.client.core import Duration, seconds_of
from fairway.errors import Misuse
from fairway.sql.engines import apart, own
from fairway.sql.inserting import Bound
from fairway.sql.letters import Nobody, Picker
from fairway.sql.making import make
from fairway.sql.posting import OutboxBatch, SendOutcome
from fairway.sql.posts import AnyOutboxSender, post_to
from fairway.sql.relay import DATABASE_TROUBLE, TROUBLE_S, Relay, first_line
from fairway.sql.relaying import RelayOptions
from fairway.sql.rows import OutboxState, RefusedBatch, check_engine
from fairway.sql.streams import OutboxStream
from fairway.sql.tables import NAME, outbox_table
from fairway.sql.writing import OutboxWriter, Parcels
from fairway.world.bell import Bell
from fairway.world.clock import Clock, RealClock
from fairway.world.gate import Lock
from fairway.world.lineage import forks
from fairway.world.rng import RealRng, Rng
from fairway.world.workers import Ending, Workers

CLOSE_S: Final = 10.0
AWAY_S: Final = 0.2  # the same while no broker answers: rows are safe where they are
_LOOK_S: Final = 0.005  # between two looks whether all is deleted
UNDELETED_MAX: Final = 100_000  # ids that wait for a database that fails; the rest are left to relays
RETRY_ROWS_MAX: Final = 10_000  # of what is set aside, in one transaction


@dataclass
class OutboxCounts:
    """Of this process, since it began. Threads may count past each other now and then: figures for people."""

    committed: int = 0  # messages given in transactions that have committed
    sent: int = 0  # of them, those that this process has sent itself, right after the commit
    repeats: int = 0  # of those, what the broker had stored before
    left: int = 0  # to relays: a broker was away or refused them
    deleted: int = 0  # rows


class Sender:
    """Sends what has committed, and gathers the ids of what a broker has stored. The same for threads and loops."""

    def __init__(self, counts: OutboxCounts, wake: Callable[[], None]) -> None:
        """`wake` is called when something is stored."""
        self.counts = counts
        self.stored: deque[str] = deque(maxlen=UNDELETED_MAX)
        self._wake = wake

    def parcels(self, committed: Parcels) -> list[tuple[OutboxBatch, bool]]:
        found = []
        for row, stream in committed:
            self.counts.committed += row.messages
            if stream is None:  # nobody could say where to
                self.counts.left += row.messages
                continue
            settled = partial(self._settled, row.id, row.messages, stream)
            group = row.group or ""
            parcel = OutboxBatch(
                row.subject, row.body, settled, is_resent=True, group=group, lone=row.lone, secret=row.shown
            )  # fmt: skip
            found.append((parcel, row.is_due))
        return found

    def _settled(self, id: str, messages: int, stream: OutboxStream, parcel: OutboxBatch) -> None:
        if parcel.fate is SendOutcome.STORED:
            self.counts.sent += messages
            self.counts.repeats += messages if parcel.is_repeat else 0
            self.stored.append(id)
            self._wake()
        else:
            self.counts.left += messages
            stream.is_left = True  # what comes behind it would find a gap

    def take_stored(self, most: int) -> list[str]:
        """Ids of rows to delete."""
        return [self.stored.popleft() for _ in range(min(most, len(self.stored)))]


class Outbox:
    """For Engine, Session and Connection; `AioOutbox` for those of asyncio.

    Without `url` it only writes rows, and a relay elsewhere sends them. `relays=False`: this process sends what it
    commits itself, and leaves the rest to relays elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        url: str | None = None,
        *,
        table: str = NAME,
        schema: str | None = None,
        relays: bool = True,
        options: RelayOptions | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise Misuse(f"an Outbox is made on an Engine, not on {type(engine).__name__}; AioOutbox on an AsyncEngine")
        is_cluster = url is not None and bool(urls.parse_any(url).meta)
        check_engine(engine, is_shared=url is not None)
        if url is not None:
            apart(engine)  # a pool that cannot be made again is to be heard of here, and not after a commit
        self._clock, self._rng = clock or RealClock(), rng or RealRng()
        self._options = options or RelayOptions()
        self._engine = engine
        self._own_engine = own(engine)
        self._url = url
        self._has_relay = relays
        self.metadata = MetaData()
        self.table = outbox_table(self.metadata, table, schema)
        self.counts = OutboxCounts()
        self._lock = Lock()
        self._running: _Running | None = None
        self._orphans: list[_Running] = []  # of the process that this one was forked from: nobody is to touch them
        self._is_closed = False
        self._writer = OutboxWriter(
            engine,
            self.table,
            self._clock,
            self._rng,
            grace_ms=int(self._options.grace_s * 1_000) if url is not None else 0,
            on_committed=None if url is None else self._on_committed,
            picker=self._picker if is_cluster else None,
        )

    # --- for programs ------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the table and its index, where they are missing."""
        make(self._engine, self.table)

    def send(
        self,
        bound: Bound,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> MessageId:
        """A message that is a part of the transaction of that Session or Connection. Its id is the one it keeps.

        It is written just before the commit, with all others of the transaction in one statement, and sent just after.
        With `after` or `at` it is delivered then, and never before; `after` counts from now.
        """
        if self._is_closed:
            raise Misuse("this outbox is closed: make another")
        return self._writer.send(bound, subject, payload, key, tags, headers, after, at)

    def check(self) -> None:
        """`Misuse` where there is no table."""
        with self._own_engine.connect() as connection:
            self._writer.rows.check_table(connection)

    def state(self) -> OutboxState:
        """What lies in the table now: pending, how old the oldest is, what was set aside."""
        with self._own_engine.connect() as connection:
            return self._writer.rows.state(connection, self._clock)

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent or deleted now; None: nothing is known to be wrong."""
        running = self._running
        return None if running is None else running.trouble

    def set_aside(self, limit: int = 100) -> list[RefusedBatch]:
        """What brokers have refused for good, oldest first."""
        with self._own_engine.connect() as connection:
            return self._writer.rows.set_aside(connection, limit)

    def retry(self, ids: Sequence[str] | None = None) -> list[str]:
        """Let relays send again what was set aside: those rows, or all. Returns the ids that were."""
        with self._own_engine.begin() as connection:
            found = self._writer.rows.parked_ids(connection, ids, RETRY_ROWS_MAX)
            if found:
                self._writer.rows.unstamp(connection, found, self._clock.wall_ms())
        return found

    def discard(self, ids: Sequence[str]) -> list[str]:
        """Delete rows that were set aside: their messages are never sent. Returns the ids that were there."""
        with self._own_engine.begin() as connection:
            found = self._writer.rows.parked_ids(connection, ids, RETRY_ROWS_MAX)
            if found:
                self._writer.rows.delete(connection, found)
        return found

    def flush(self, timeout: Duration = CLOSE_S) -> bool:
        """Wait until what this process has committed is sent and deleted; False: it is not, and waits in the table."""
        running = self._running
        return running is None or running.flush(seconds_of(timeout))

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """`flush`, and end. What is not sent by then lies in the table, for a relay or the next start."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            running, self._running = self._running, None
        if running is not None and running.forks != forks():
            self._orphans.append(running)
        elif running is not None:
            try:
                running.close(seconds_of(timeout))
            finally:
                if running.engine.pool is not self._engine.pool:
                    running.engine.dispose()
        self._writer.close()

    def __enter__(self) -> Self:
        """Begin at once to send what is left of earlier runs, and not with the first commit."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect to the broker and start the threads, which otherwise happens with the first commit."""
        if self._url is not None:
            self._live(self._url)

    # --- after a commit ----------------------------------------------------------------------------------------------

    def _on_committed(self, committed: Parcels) -> None:
        if self._url is not None and not self._is_closed:
            self._live(self._url).send(committed)

    def _picker(self) -> Picker:
        if self._url is None or self._is_closed:
            return Nobody()
        return self._live(self._url).picker or Nobody()

    def _live(self, url: str) -> _Running:
        """What runs in this process: a forked child has its own."""
        running = self._running
        if running is None or running.forks != forks():
            with self._lock:
                running = self._running
                if running is not None and running.forks != forks():
                    self._orphans.append(running)
                    running = None
                if running is None:
                    running = self._running = _Running(self, url, apart(self._engine))
                    running.start()
        return running

    def new_relay(self, url: str, engine: Engine) -> Relay | None:
        if not self._has_relay:
            return None
        return Relay(
            engine, url, table=self.table.name, schema=self.table.schema, options=self._options,
            clock=self._clock, rng=self._rng,
        )  # fmt: skip

    def touch(self) -> None:
        """Connect by the program's own engine, before others do that are made from it (`engines.apart`). And see which
        columns the table has, where no transaction could tell."""
        with self._engine.connect() as connection:
            self._writer.rows.look(connection)

    def delete(self, ids: Sequence[str], engine: Engine) -> None:
        with engine.begin() as connection:
            self.counts.deleted += self._writer.rows.delete(connection, ids)

    def new_post(self, url: str) -> AnyOutboxSender:
        at_exit = partial(self.close, 1.0)
        return post_to(url, self._clock, self._rng, at_exit, linger_s=self._options.send_linger_s)

    @property
    def options(self) -> RelayOptions:
        return self._options


class _Running:
    """The connections and the threads of one process."""

    def __init__(self, outbox: Outbox, url: str, engine: Engine) -> None:
        self.forks = forks()
        self.engine = engine
        self._outbox = outbox
        self._bell = Bell()
        self._hurry = Bell()  # somebody waits for the deletions
        self._sender = Sender(outbox.counts, self._bell.ring)
        self._post = outbox.new_post(url)
        self._relay = outbox.new_relay(url, engine)
        self._ending = Ending()
        self._workers = Workers()
        self._relaying = Ending()
        self._is_deleting = False
        self._deleting_trouble: str | None = None

    @property
    def picker(self) -> Picker | None:
        return self._post.picker

    @property
    def trouble(self) -> str | None:
        relay = None if self._relay is None else self._relay.trouble
        return self._deleting_trouble or self._post.trouble or relay

    def start(self) -> None:
        self._workers.start("fairway-outbox", self._delete)
        relay = self._relay
        if relay is not None:
            self._workers.start("fairway-outbox-relay", lambda: self._run(relay))

    def send(self, committed: Parcels) -> None:
        self._post.put(self._sender.parcels(committed))

    def flush(self, timeout_s: float) -> bool:
        is_quiet = self._post.wait_quiet(timeout_s)
        for _ in range(int(timeout_s / _LOOK_S)):
            if not self._sender.stored and not self._is_deleting:
                return is_quiet
            self._hurry.ring()
            self._bell.ring()
            self._ending.wait(_LOOK_S)
        return False

    def close(self, timeout_s: float) -> None:
        self._relaying.ask()
        self.flush(timeout_s if self._post.is_open else min(timeout_s, AWAY_S))
        self._ending.ask()
        self._hurry.ring()
        self._bell.ring()
        self._workers.join(timeout_s)
        self._post.close()

    # --- in the threads ----------------------------------------------------------------------------------------------

    def _run(self, relay: Relay) -> None:
        while not self._relaying.is_asked:
            try:
                self._outbox.touch()
                break
            except DATABASE_TROUBLE as problem:
                relay.note(f"the database: {first_line(problem)}")
                self._relaying.wait(TROUBLE_S)
        relay.run(self._post, self._relaying)

    def _delete(self) -> None:
        """Rows that are stored, many at a time, until the end is asked for."""
        options = self._outbox.options
        while True:
            self._bell.wait(None)
            is_last = self._ending.is_asked
            if not is_last and len(self._sender.stored) < options.delete_rows_max:
                self._hurry.wait(options.delete_linger_s)
            self._is_deleting = True
            while self._sender.stored and self._delete_some(options.delete_rows_max):
                pass
            self._is_deleting = False
            if is_last:
                return

    def _delete_some(self, most: int) -> bool:
        """Whether the database takes more."""
        ids = self._sender.take_stored(most)
        try:
            self._outbox.delete(ids, self.engine)
        except DATABASE_TROUBLE as problem:
            self._deleting_trouble = f"rows that were sent cannot be deleted: {first_line(problem)}"
            self._sender.stored.extendleft(reversed(ids))
            if not self._ending.wait(TROUBLE_S):
                self._bell.ring()
            return False
        self._deleting_trouble = None
        return True
