"""The inbox on each database: record and effect come and go together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import fairway
from fairway.client.app import App
from fairway.client.idempotence import REPLAY_ID
from fairway.runtime.clock import ManualClock
from fairway.sql.inbox import SqlInbox
from fairway.testing import MemoryBroker
from tests.support.databases import fresh, on_loop

SUBJECT, GROUP = "order.paid", "ledger"
ID = fairway.MessageId(7, 7)
DAY_MS = 86_400_000


class Base(DeclarativeBase): ...


class Booking(Base):
    __tablename__ = "bookings"
    number: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(database_url)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def bookings(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(Booking.cents).order_by(Booking.number)).scalars())


def rows(engine: sa.Engine, inbox: SqlInbox) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(inbox.table)).scalar_one()


class Stage:
    """An app with one listener, and messages for it."""

    def __init__(self, broker: MemoryBroker, inbox: SqlInbox, handler: Callable[..., Any], **options: Any) -> None:
        self.broker = broker
        self.app = App(broker.url)
        self.app.listener(SUBJECT, group=GROUP, idempotent=inbox, **options)(handler)
        self.fw = broker.connect()

    def send(self, *cents: int, key: str | None = None, headers: dict[str, str] | None = None, id: Any = ID) -> None:
        for each in cents:
            self.fw.send(SUBJECT, str(each).encode(), key, headers=headers, id=id).result()
        self.broker.handle(self.app)

    def later(self) -> None:
        self.broker.clock.advance(seconds=20)
        self.broker.handle(self.app)

    @property
    def state(self) -> Any:
        return self.fw.describe(SUBJECT, GROUP).subjects[0].groups[0]


def book(message: fairway.Message, session: Session) -> None:
    session.add(Booking(cents=int(message.payload)))


# --- one by one ------------------------------------------------------------------------------------------------------


def test_the_effect_happens_once(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, book)
    stage.send(5, 5, 5)
    assert bookings(engine) == [5]
    assert (stage.state.lag, stage.state.retrying, rows(engine, inbox)) == (0, 0, 1)
    assert (inbox.counts.recorded, inbox.counts.done_before) == (1, 2)


def test_a_connection_will_do(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    def by_hand(message: fairway.Message, connection: sa.Connection) -> None:
        connection.execute(sa.insert(Booking).values(cents=int(message.payload)))

    stage = Stage(fairway_broker, SqlInbox(engine), by_hand)
    stage.send(5, 5)
    assert bookings(engine) == [5]


@pytest.mark.parametrize("failure", [LookupError("no such account"), fairway.Retry("not now", after=1)])
def test_what_raises_rolls_back_effect_and_record(
    engine: sa.Engine, fairway_broker: MemoryBroker, failure: Exception
) -> None:
    failures = [failure]

    def fragile(message: fairway.Message, session: Session) -> None:
        book(message, session)
        session.flush()
        if failures:
            raise failures.pop()

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, fragile)
    stage.send(5)
    assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([], 0, 1)
    stage.later()
    assert (bookings(engine), rows(engine, inbox)) == ([5], 1)


def test_what_was_rejected_is_done_when_it_is_redriven(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    refusing = [True]

    def strict(message: fairway.Message, session: Session) -> None:
        book(message, session)
        if refusing:
            raise fairway.Reject("no such account")

    stage = Stage(fairway_broker, SqlInbox(engine), strict)
    stage.send(5)
    assert (bookings(engine), stage.state.dead) == ([], 1)
    refusing.clear()
    assert stage.fw.redrive(SUBJECT, GROUP).count == 1
    stage.broker.handle(stage.app)
    assert bookings(engine) == [5]


def test_what_was_done_is_not_done_again_when_it_is_redriven(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, book)
    stage.fw.send(SUBJECT, b"5", id=ID).result()
    with stage.fw.consumer(SUBJECT, group=GROUP) as consumer:
        [message] = consumer.take(1, timeout=5)
        inbox.guard(book, is_async=False, is_batch=False)([message])
        message.reject("its acks were lost until all attempts were used up")
    fairway_broker.clock.advance(seconds=1)
    assert stage.fw.redrive(SUBJECT, GROUP).count == 1
    assert fairway_broker.handle(stage.app) == 1
    assert (bookings(engine), stage.state.lag, stage.state.retrying) == ([5], 0, 0)


def test_replays_and_keys(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    stage = Stage(fairway_broker, SqlInbox(engine, by="key"), book)
    for key, replay in (("a", None), ("A", None), ("a ", None), ("a", None), ("a", "march"), ("a", "march")):
        stage.send(5, key=key, headers={REPLAY_ID: replay} if replay else None, id=None)
    stage.send(5, key="ä" * 500, id=None)
    stage.send(5, key="ä" * 500, id=None)
    assert len(bookings(engine)) == 5  # a, A, a with a space, the replay, the long one


def test_groups_and_subjects_are_apart(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    inbox, app, fw = SqlInbox(engine), App(fairway_broker.url), fairway_broker.connect()
    for group in ("ledger", "Ledger"):
        app.listener(SUBJECT, group=group, idempotent=inbox)(book)
    app.listener("order.refunded", group="ledger", idempotent=inbox)(book)
    for subject in (SUBJECT, "order.refunded", SUBJECT):
        fw.send(subject, b"5", id=ID).result()
    fairway_broker.handle(app)
    assert bookings(engine) == [5, 5, 5]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_of_a_list_only_what_is_new_is_handled(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    lists: list[list[bytes]] = []

    def book_all(messages: Sequence[fairway.Message], session: Session) -> None:
        lists.append([message.payload for message in messages])
        for message in messages:
            if message.payload == b"9" and len(lists) == 1:
                message.retry(after=1)
            else:
                book(message, session)

    inbox = SqlInbox(engine, by="key")
    stage = Stage(fairway_broker, inbox, book_all, batch=True)
    for cents in ([1, 2, 1, 9], [2, 3], [3]):
        payloads = [str(each).encode() for each in cents]
        stage.fw.send_many(SUBJECT, payloads, keys=[str(each) for each in cents]).result()
        stage.broker.handle(stage.app)
    stage.later()
    assert lists == [[b"1", b"2", b"9"], [b"3"], [b"9"]]
    assert (sorted(bookings(engine)), rows(engine, inbox), stage.state.lag) == ([1, 2, 3, 9], 4, 0)


def test_a_list_on_a_database_without_returning(mariadb_url: str, fairway_broker: MemoryBroker) -> None:
    """As MySQL is, which otherwise is like MariaDB: the rows go one by one."""
    engine = sa.create_engine(fresh(mariadb_url))
    Base.metadata.create_all(engine)
    inbox = SqlInbox(engine, by="key")
    inbox.create()
    engine.dialect.insert_returning = False

    def book_all(messages: Sequence[fairway.Message], session: Session) -> None:
        for message in messages:
            book(message, session)

    stage = Stage(fairway_broker, inbox, book_all, batch=True)
    for cents in ([1, 2, 1], [2, 3]):
        stage.fw.send_many(SUBJECT, [b"%d" % each for each in cents], keys=[str(each) for each in cents]).result()
        stage.broker.handle(stage.app)
    assert bookings(engine) == [1, 2, 3]
    engine.dispose()


def test_of_a_list_that_fails_nothing_stays(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    calls: list[int] = []

    def book_all(messages: Sequence[fairway.Message], session: Session) -> None:
        calls.append(len(messages))
        for message in messages:
            message.ack()  # too early: it holds only if all this is committed
            book(message, session)
            session.flush()
        if len(calls) == 1:
            raise LookupError("no such account")

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, book_all, batch=True)
    stage.fw.send_many(SUBJECT, [b"1", b"2", b"3"]).result()
    stage.broker.handle(stage.app)
    assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([], 0, 3)
    stage.later()
    assert (bookings(engine), rows(engine, inbox), calls) == ([1, 2, 3], 3, [3, 3])


# --- handlers that meddle with the transaction -----------------------------------------------------------------------


def test_a_commit_of_the_session_does_not_part_record_and_effect(
    engine: sa.Engine, fairway_broker: MemoryBroker
) -> None:
    failing = [True]

    def hasty(message: fairway.Message, session: Session) -> None:
        book(message, session)
        session.commit()
        book(message, session)
        session.commit()
        if failing.pop() if failing else False:
            raise LookupError("after the commit")

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, hasty)
    stage.send(5)
    assert (bookings(engine), rows(engine, inbox)) == ([], 0)
    stage.later()
    assert (bookings(engine), rows(engine, inbox)) == ([5, 5], 1)


def test_a_handler_that_rolls_back_and_returns_has_not_done_it(
    engine: sa.Engine, fairway_broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    def giving_up(message: fairway.Message, session: Session) -> None:
        book(message, session)
        session.flush()
        session.rollback()

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, giving_up)
    stage.send(5)
    assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([], 0, 1)
    assert "has ended the transaction" in caplog.text


def test_a_commit_of_the_connection_takes_the_record_along(
    engine: sa.Engine, fairway_broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    def hasty(message: fairway.Message, connection: sa.Connection) -> None:
        connection.execute(sa.insert(Booking).values(cents=int(message.payload)))
        connection.commit()

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, hasty)
    stage.send(5)
    assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([5], 1, 1)
    assert "has ended the transaction" in caplog.text
    stage.later()
    assert (bookings(engine), stage.state.retrying) == ([5], 0)


def test_a_swallowed_error_does_not_make_an_ack_of_a_rollback(
    engine: sa.Engine, fairway_broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL answers the COMMIT of a transaction in which a statement has failed with a ROLLBACK, and no error."""

    def careless(message: fairway.Message, connection: sa.Connection) -> None:
        connection.execute(sa.insert(Booking).values(cents=int(message.payload)))
        with pytest.raises(sa.exc.DBAPIError):
            connection.execute(sa.text("SELECT nothing FROM nowhere"))

    inbox = SqlInbox(engine)
    stage = Stage(fairway_broker, inbox, careless)
    stage.send(5)
    if engine.dialect.name == "postgresql":
        assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([], 0, 1)
    else:  # only the statement failed
        assert (bookings(engine), rows(engine, inbox), stage.state.retrying) == ([5], 1, 0)


def test_an_error_within_a_savepoint_is_the_handlers_own(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    def careful(message: fairway.Message, connection: sa.Connection) -> None:
        connection.execute(sa.insert(Booking).values(number=1, cents=int(message.payload)))
        with pytest.raises(sa.exc.DBAPIError), connection.begin_nested():
            connection.execute(sa.insert(Booking).values(number=1, cents=0))

    stage = Stage(fairway_broker, SqlInbox(engine), careful)
    stage.send(5, 5)
    assert (bookings(engine), stage.state.retrying) == ([5], 0)


def test_sessions_of_the_users_own_making(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    seen: list[dict[Any, Any]] = []

    def note(message: fairway.Message, session: Session) -> None:
        seen.append(dict(session.info))
        book(message, session)

    inbox = SqlInbox(engine, session=sessionmaker(engine, info={"tenant": "hotel"}))
    Stage(fairway_broker, inbox, note).send(5, 5)
    assert (seen, bookings(engine)) == ([{"tenant": "hotel"}], [5])


# --- two at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_second_consumer_waits_for_the_first(
    engine: sa.Engine, fairway_broker: MemoryBroker, is_failing: bool
) -> None:
    """The database's own lock: the second goes on when the first has committed, or has not."""
    inbox = SqlInbox(engine)
    inbox.create()
    fw = fairway_broker.connect()
    for _ in range(2):
        fw.send(SUBJECT, b"5", id=ID).result()
    first, second = fw.consumer(SUBJECT, group=GROUP).take(2, timeout=5)
    begun, outcomes = threading.Event(), list[bool]()

    def wait_for_it() -> None:
        begun.set()
        with engine.begin() as connection:
            is_mine = inbox.once(connection, second)
            outcomes.append(is_mine)
            if is_mine:
                connection.execute(sa.insert(Booking).values(cents=5))

    with engine.connect() as connection:
        assert inbox.once(connection, first)
        connection.execute(sa.insert(Booking).values(cents=5))
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        begun.wait(10)
        thread.join(0.2)
        assert outcomes == []
        connection.rollback() if is_failing else connection.commit()
        thread.join(30)
    assert outcomes == [is_failing]
    assert bookings(engine) == [5]


def test_many_threads_make_the_table_at_once(database_url: str) -> None:
    failures: list[BaseException] = []

    def make() -> None:
        engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        try:
            SqlInbox(engine).create()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- on a loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["session", "connection"])
def test_coroutines_have_the_same(
    engine: sa.Engine, database_url: str, fairway_broker: MemoryBroker, scope: str
) -> None:
    failures = [LookupError("no such account")]

    async def by_session(message: fairway.Message, session: AsyncSession) -> None:
        session.add(Booking(cents=int(message.payload)))
        await session.flush()
        if failures:
            raise failures.pop()

    async def by_connection(message: fairway.Message, connection: AsyncConnection) -> None:
        await connection.execute(sa.insert(Booking).values(cents=int(message.payload)))
        if failures:
            raise failures.pop()

    fw = fairway_broker.connect()
    for _ in range(3):
        fw.send(SUBJECT, b"5", id=ID).result()
    messages = fw.consumer(SUBJECT, group=GROUP).take(3, timeout=5)

    async def main() -> SqlInbox:
        inbox = SqlInbox(create_async_engine(on_loop(database_url)))
        handler = by_session if scope == "session" else by_connection
        guarded = inbox.guard(handler, is_async=True, is_batch=False)
        with pytest.raises(LookupError):
            await guarded(messages[:1])
        await asyncio.gather(guarded(messages[1:2]), guarded(messages[2:]))
        await guarded(messages[:1])
        await inbox.close_async()
        return inbox

    inbox = asyncio.run(main())
    assert (bookings(engine), rows(engine, inbox), inbox.counts.done_before) == ([5], 1, 2)


def test_once_on_a_loop(engine: sa.Engine, database_url: str, fairway_broker: MemoryBroker) -> None:
    fw = fairway_broker.connect()
    fw.send(SUBJECT, b"5", id=ID).result()
    [message] = fw.consumer(SUBJECT, group=GROUP).take(1, timeout=5)

    async def attempt(engine: AsyncEngine, inbox: SqlInbox) -> bool:
        async with engine.begin() as connection:
            return await inbox.once_async(connection, message)

    async def main() -> list[bool]:
        made = create_async_engine(on_loop(database_url))
        inbox = SqlInbox(made, keep=0)
        await inbox.create_async()
        found = [await attempt(made, inbox), await attempt(made, inbox)]
        await asyncio.sleep(0.002)
        assert await inbox.expire_async() == 1
        found.append(await attempt(made, inbox))
        await made.dispose()
        return found

    assert asyncio.run(main()) == [True, False, True]


def test_a_session_will_do_for_once(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    inbox = SqlInbox(engine)
    inbox.create()
    fw = fairway_broker.connect()
    fw.send(SUBJECT, b"5", id=ID).result()
    [message] = fw.consumer(SUBJECT, group=GROUP).take(1, timeout=5)
    for expected in (True, False):
        with Session(engine) as session, session.begin():
            assert inbox.once(session, message) is expected


# --- old rows --------------------------------------------------------------------------------------------------------


def test_old_rows_go_in_small_batches(engine: sa.Engine) -> None:
    clock = ManualClock()
    inbox = SqlInbox(engine, keep=timedelta(days=7), clock=clock)
    inbox.create()
    ages_ms = [clock.wall_ms() - 8 * DAY_MS + number // 3 for number in range(2_500)] + [clock.wall_ms()] * 10
    with engine.begin() as connection:
        connection.execute(
            sa.insert(inbox.table),
            [
                {"subject": SUBJECT, "consumer_group": GROUP, "message": str(number), "recorded_ms": ms}
                for number, ms in enumerate(ages_ms)
            ],
        )
    with engine.begin() as connection:
        assert 1_000 <= inbox._expire_in(connection) <= 1_002  # those of one ms go together
    assert inbox.expire() + inbox.counts.expired >= 2_500
    assert rows(engine, inbox) == 10
    assert inbox.expire() == 0
    clock.advance(7 * DAY_MS + 1)
    assert inbox.expire() == 10


def test_listeners_remove_old_rows_by_themselves(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    clock = ManualClock()
    inbox = SqlInbox(engine, keep=timedelta(days=1), clock=clock)

    def nothing(messages: Sequence[fairway.Message], session: Session) -> None: ...

    stage = Stage(fairway_broker, inbox, nothing, batch=True)
    for _ in range(4):
        stage.fw.send_many(SUBJECT, [b"x"] * 500).result()
        stage.broker.handle(stage.app)
        clock.advance(DAY_MS + 1)
    assert rows(engine, inbox) == 500
    assert inbox.counts.expired == 1_500


def test_rows_of_a_time_in_which_the_clock_was_behind_are_kept(engine: sa.Engine, fairway_broker: MemoryBroker) -> None:
    """Two minutes, and it is put right: the rows are not taken for a year old, not even after an hour."""
    clock = ManualClock()
    inbox = SqlInbox(engine, keep=timedelta(days=7), clock=clock)

    def nothing(messages: Sequence[fairway.Message], session: Session) -> None: ...

    stage = Stage(fairway_broker, inbox, nothing, batch=True)
    clock.jump(-365 * DAY_MS)
    stage.fw.send_many(SUBJECT, [b"x"] * 5).result()
    stage.broker.handle(stage.app)
    clock.advance(120_000)
    clock.jump(365 * DAY_MS)
    for _ in range(3):
        assert inbox.expire() == 0
        clock.advance(3_600_000)
    clock.advance(7 * DAY_MS)
    assert inbox.expire() == 5


@pytest.mark.parametrize("verb", ["DELETE", "SELECT recorded_ms"])
def test_old_rows_are_found_by_an_index(verb: str) -> None:
    """On SQLite, which says what it can do; the planners of servers go by statistics."""
    engine = sa.create_engine("sqlite://")
    SqlInbox(engine).create()
    with engine.connect() as connection:
        plan = connection.execute(sa.text(f"EXPLAIN QUERY PLAN {verb} FROM fairway_inbox WHERE recorded_ms <= 5")).all()
    assert [("USING" in row[-1], "ix_fairway_inbox_recorded_ms" in row[-1]) for row in plan] == [(True, True)]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_that_commits_every_statement_is_refused(database_url: str, is_async: bool) -> None:
    if is_async:
        engine = create_async_engine(on_loop(database_url), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with pytest.raises(fairway.Misuse, match="a rollback takes nothing back"):
            asyncio.run(SqlInbox(engine).create_async())
    else:
        sync_engine = sa.create_engine(database_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with pytest.raises(fairway.Misuse, match="a rollback takes nothing back"):
            SqlInbox(sync_engine).create()
        assert rows(sync_engine, SqlInbox(sync_engine)) == 0


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_misuse_is_told_when_the_listener_is_declared() -> None:
    engine, on_a_loop = sa.create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
    app = App("fairway://127.0.0.1:20880")

    def alone(message: fairway.Message) -> None: ...

    def other(message: fairway.Message, db: object) -> None: ...

    async def task(message: fairway.Message, session: AsyncSession) -> None: ...

    listen = app.listener(SUBJECT, group=GROUP, idempotent=SqlInbox(engine))
    with pytest.raises(fairway.Misuse, match=r"alone takes \(message\).*`session` or `connection`"):
        listen(alone)
    with pytest.raises(fairway.Misuse, match=r"other takes \(message, db\)"):
        listen(other)
    with pytest.raises(fairway.Misuse, match=r"task is `async def`.*create_async_engine"):
        listen(task)
    with pytest.raises(fairway.Misuse, match=r"book is `def`.*create_engine`"):
        app.listener(SUBJECT, group=GROUP, idempotent=SqlInbox(on_a_loop))(book)
    with pytest.raises(fairway.Misuse, match="an Engine or an AsyncEngine of SQLAlchemy, not str"):
        SqlInbox("sqlite://")  # type: ignore[arg-type]
    with pytest.raises(fairway.Misuse, match="create_async"):
        SqlInbox(on_a_loop).create()
    with pytest.raises(fairway.Misuse, match=r"create\(\)"):
        asyncio.run(SqlInbox(engine).create_async())
    with pytest.raises(fairway.Misuse, match="holds no transaction"):
        SqlInbox(engine).once(engine, None)  # type: ignore[arg-type]
    assert app.listeners == []
