"""The transactional outbox: a message is sent if, and only if, the transaction that it was given in commits.

    outbox = Outbox(engine, "fairway://127.0.0.1:20880")
    outbox.create()                                                     # once: the table
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "order.changed", b"...", key="o-42")

Messages become rows of the same transaction (`outbox_writer`). After the commit, the thread that committed sends them
(`outbox_sender`). After the broker's receipt, a thread of the outbox deletes the rows, many in one statement. A relay
(`relay`) sends the rows that a crash or an absent broker left behind. One relay runs beside each outbox, unless
`relays=False`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Self

from sqlalchemy import Engine, MetaData

from fairway.batch import MessageId
from fairway.client import url as urls
from fairway.client.core import Duration, seconds_of
from fairway.errors import Misuse
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.host import Ending, forks
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.threads import Lock, Wakeup, Workers
from fairway.sql.database import Bound, apart, make, own
from fairway.sql.outbox_batches import OutboxBatch
from fairway.sql.outbox_encoding import OutboxStream, Picker
from fairway.sql.outbox_rows import OutboxState, RefusedBatch, check_engine
from fairway.sql.outbox_sender import OutboxSender
from fairway.sql.outbox_table import NAME, outbox_table
from fairway.sql.outbox_writer import OutboxBatches, OutboxWriter
from fairway.sql.relay import DATABASE_TROUBLE, TROUBLE_S, Relay, first_line
from fairway.sql.relay_rounds import RelayOptions

CLOSE_S: Final = 10.0
AWAY_S: Final = 0.2  # the same while no broker answers: rows are safe in the table
_LOOK_S: Final = 0.005  # between two checks whether all rows are deleted
UNDELETED_MAX: Final = 100_000  # ids kept while the database fails; relays take care of the rest


@dataclass
class OutboxCounts:
    """Counts of this process since its start, for people: threads may occasionally lose an increment."""

    committed: int = 0  # messages given in transactions that have committed
    sent: int = 0  # of those: messages that this process sent itself, right after the commit
    repeats: int = 0  # of those sent: messages that the broker had stored before
    left: int = 0  # messages left to relays: a broker was away or refused them
    deleted: int = 0  # rows


class CommittedRows:
    """Makes batches of committed rows, and gathers the ids of stored rows, which are to be deleted. Threads and loops
    share the class."""

    def __init__(self, counts: OutboxCounts, wake: Callable[[], None]) -> None:
        """`wake` is called when a batch is stored."""
        self.counts = counts
        self.trouble: str | None = None  # why stored rows cannot be deleted
        self.stored: deque[str] = deque(maxlen=UNDELETED_MAX)
        self._wake = wake

    def outbox_batches(self, committed: OutboxBatches) -> list[OutboxBatch]:
        found = []
        for row, stream in committed:
            self.counts.committed += row.messages
            if stream is None:  # no broker group was known: a relay chooses
                self.counts.left += row.messages
                continue
            settled = partial(self._settled, row.id, row.messages, stream)
            group = row.group or ""
            outbox_batch = OutboxBatch(
                row.subject, row.body, settled, is_resent=True, group=group, lone=row.lone, secret=row.shown
            )  # fmt: skip
            found.append(outbox_batch)
        return found

    def _settled(self, id: str, messages: int, stream: OutboxStream, outbox_batch: OutboxBatch) -> None:
        if outbox_batch.fate is SendOutcome.STORED:
            self.counts.sent += messages
            self.counts.repeats += messages if outbox_batch.is_repeat else 0
            self.stored.append(id)
            self._wake()
        else:
            self.counts.left += messages
            stream.is_left = True  # later batches of this stream would meet a gap

    def take_stored(self, most: int) -> list[str]:
        """Take the ids of rows to delete."""
        return [self.stored.popleft() for _ in range(min(most, len(self.stored)))]

    def put_back(self, ids: Sequence[str], problem: BaseException) -> None:
        """Keep the ids of rows that could not be deleted."""
        self.trouble = f"rows that were sent cannot be deleted: {first_line(problem)}"
        self.stored.extendleft(reversed(ids))


class OutboxBase:
    """What outboxes for threads and for asyncio have in common: the table, the writer and the counts."""

    def __init__(
        self, engine: Engine, url: str | None, table: str, schema: str | None, options: RelayOptions | None,
        clock: Clock | None, rng: Rng | None, on_committed: Callable[[OutboxBatches], None],
        picker: Callable[[], Picker],
    ) -> None:  # fmt: skip
        """`on_committed` sends the rows of a transaction that has just committed. `picker` gives what chooses broker
        groups for rows, in a cluster."""
        is_cluster = url is not None and bool(urls.parse_any(url).meta)
        check_engine(engine, is_shared=url is not None)
        self._clock, self._rng = clock or RealClock(), rng or RealRng()
        self._options = options or RelayOptions()
        self._url = url
        self.metadata = MetaData()
        self.table = outbox_table(self.metadata, table, schema)
        self.counts = OutboxCounts()
        self._is_closed = False
        self._writer = OutboxWriter(
            engine,
            self.table,
            self._clock,
            self._rng,
            grace_ms=int(self._options.grace_s * 1_000) if url is not None else 0,
            on_committed=None if url is None else on_committed,
            picker=picker if is_cluster else None,
        )


class Outbox(OutboxBase):
    """The outbox for Engine, Session and Connection; `AioOutbox` is the one for asyncio.

    Without `url` the outbox only writes rows, and a relay elsewhere sends them. With `relays=False` this process sends
    what it commits itself, and leaves the rest to relays elsewhere.
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
        if url is not None:
            apart(engine)  # a pool that cannot be recreated must fail here, not after a commit
        super().__init__(engine, url, table, schema, options, clock, rng, self._on_committed, self._picker)
        self._has_relay = relays
        self._engine = engine
        self._own_engine = own(engine)
        self._lock = Lock()
        self._running: _Running | None = None
        self._orphans: list[_Running] = []  # of the process before a fork: nobody may touch them

    # --- for programs ------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the table and its index if they are missing."""
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
        """Add a message to the transaction of that Session or Connection; returns the message's final id.

        The outbox writes all messages of the transaction together just before the commit, and sends them just after.
        With `after` or `at` the message is delivered at that time, never before; `after` counts from now.
        """
        if self._is_closed:
            raise Misuse("this outbox is closed: make another")
        return self._writer.send(bound, subject, payload, key, tags, headers, after, at)

    def check(self) -> None:
        """Raise `Misuse` if the table is missing."""
        with self._own_engine.connect() as connection:
            self._writer.rows.check_table(connection)

    def state(self) -> OutboxState:
        """The table's present state: messages pending, the age of the oldest, messages set aside."""
        with self._own_engine.connect() as connection:
            return self._writer.rows.state(connection, self._clock)

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent or deleted now; None: no problem is known."""
        running = self._running
        return None if running is None else running.trouble

    def set_aside(self, limit: int = 100) -> list[RefusedBatch]:
        """Batches that brokers refused for good, oldest first."""
        with self._own_engine.connect() as connection:
            return self._writer.rows.set_aside(connection, limit)

    def retry(self, ids: Sequence[str] | None = None) -> list[str]:
        """Let relays send again the given rows that were set aside, or all of them. Returns the ids of those rows."""
        with self._own_engine.begin() as connection:
            return self._writer.rows.retry(connection, ids, self._clock.wall_ms())

    def discard(self, ids: Sequence[str]) -> list[str]:
        """Delete rows that were set aside: their messages are never sent. Returns the ids of the deleted rows."""
        with self._own_engine.begin() as connection:
            return self._writer.rows.discard(connection, ids)

    def flush(self, timeout: Duration = CLOSE_S) -> bool:
        """Wait until the messages that this process committed are sent and deleted; False: some remain in the table."""
        running = self._running
        return running is None or running.flush(seconds_of(timeout))

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """`flush`, then end. Unsent rows stay in the table, for a relay or the next start."""
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
        """Begin at once to send the rows of earlier runs, without waiting for the first commit."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Connect to the broker and start the threads; otherwise the first commit does."""
        if self._url is not None:
            self._live(self._url)

    # --- after a commit ----------------------------------------------------------------------------------------------

    def _on_committed(self, committed: OutboxBatches) -> None:
        if self._url is not None and not self._is_closed:
            self._live(self._url).send(committed)

    def _picker(self) -> Picker:
        if self._url is None or self._is_closed:
            return Picker()
        return self._live(self._url).picker

    def _live(self, url: str) -> _Running:
        """The running part of this process. A forked child starts its own."""
        running = self._running
        if running is None or running.forks != forks():
            with self._lock:
                running = self._running
                if running is not None and running.forks != forks():
                    self._orphans.append(running)
                    running = None
                if running is None:
                    running = self._running = _Running(self, url)
                    running.start()
        return running


class _Running:
    """The connections and threads of an outbox in one process."""

    def __init__(self, outbox: Outbox, url: str) -> None:
        clock, rng, options, table = outbox._clock, outbox._rng, outbox._options, outbox.table
        self.forks = forks()
        self.engine = engine = apart(outbox._engine)
        self._outbox = outbox
        self._options = options
        self._wakeup = Wakeup()
        self._flush_wakeup = Wakeup()  # a caller waits for the deletions
        self._committed = CommittedRows(outbox.counts, self._wakeup.signal)
        self._outbox_sender = OutboxSender(url, clock, rng, partial(outbox.close, 1.0), linger_s=options.send_linger_s)
        self._relay: Relay | None = None
        if outbox._has_relay:
            self._relay = Relay(
                engine, url, table=table.name, schema=table.schema, options=options, clock=clock, rng=rng
            )
        self._ending = Ending()
        self._workers = Workers()
        self._relaying = Ending()
        self._is_deleting = False

    @property
    def picker(self) -> Picker:
        return self._outbox_sender.picker or Picker()

    @property
    def trouble(self) -> str | None:
        relay = None if self._relay is None else self._relay.trouble
        return self._committed.trouble or self._outbox_sender.trouble or relay

    def start(self) -> None:
        self._workers.start("fairway-outbox", self._delete)
        relay = self._relay
        if relay is not None:
            self._workers.start("fairway-outbox-relay", lambda: self._run(relay))

    def send(self, committed: OutboxBatches) -> None:
        self._outbox_sender.put(self._committed.outbox_batches(committed))

    def flush(self, timeout_s: float) -> bool:
        is_quiet = self._outbox_sender.wait_quiet(timeout_s)
        for _ in range(int(timeout_s / _LOOK_S)):
            if not self._committed.stored and not self._is_deleting:
                return is_quiet
            self._flush_wakeup.signal()
            self._wakeup.signal()
            self._ending.wait(_LOOK_S)
        return False

    def close(self, timeout_s: float) -> None:
        self._relaying.ask()
        self.flush(timeout_s if self._outbox_sender.is_open else min(timeout_s, AWAY_S))
        self._ending.ask()
        self._flush_wakeup.signal()
        self._wakeup.signal()
        self._workers.join(timeout_s)
        self._outbox_sender.close()

    # --- in the threads ----------------------------------------------------------------------------------------------

    def _run(self, relay: Relay) -> None:
        while not self._relaying.is_asked:
            try:
                with self._outbox._engine.connect() as connection:  # before engines derived from it (`database.apart`)
                    self._outbox._writer.rows.look(connection)
                    break
            except DATABASE_TROUBLE as problem:
                relay.note(f"the database: {first_line(problem)}")
                self._relaying.wait(TROUBLE_S)
        relay.run(self._outbox_sender, self._relaying)

    def _delete(self) -> None:
        """Delete stored rows, many at a time, until the end is asked for."""
        options = self._options
        while True:
            self._wakeup.wait(None)
            is_last = self._ending.is_asked
            if not is_last and len(self._committed.stored) < options.delete_rows_max:
                self._flush_wakeup.wait(options.delete_linger_s)
            self._is_deleting = True
            while self._committed.stored and self._delete_some(options.delete_rows_max):
                pass
            self._is_deleting = False
            if is_last:
                return

    def _delete_some(self, most: int) -> bool:
        """Delete one portion; False: the database failed."""
        ids = self._committed.take_stored(most)
        try:
            with self.engine.begin() as connection:
                self._outbox.counts.deleted += self._outbox._writer.rows.delete(connection, ids)
        except DATABASE_TROUBLE as problem:
            self._committed.put_back(ids, problem)
            if not self._ending.wait(TROUBLE_S):
                self._wakeup.signal()
            return False
        self._committed.trouble = None
        return True
