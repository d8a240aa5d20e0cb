"""The outbox on each database: what commits is sent, what is rolled back is not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fairway
from fairway.errors import BadName, Misuse
from fairway.sql import Outbox, outbox_table
from tests.support.databases import fresh
from tests.support.outboxes import NIMBLE, TABLE, Up, arrived, eventually, in_a_child, payloads, put, rows
from tests.support.outboxes import up as running


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(50))


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(database_url)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def outbox(engine: sa.Engine, up: Up) -> Iterator[Outbox]:
    with Outbox(engine, up.url, options=NIMBLE) as made:
        made.create()
        yield made


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'lite.db'}")
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def lite_outbox(lite: sa.Engine, up: Up) -> Iterator[Outbox]:
    with Outbox(lite, up.url, options=NIMBLE) as made:
        made.create()
        yield made


def orders(engine: sa.Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(sa.select(Order.name).order_by(Order.id)))


# --- what commits is sent ---------------------------------------------------------------------------------------------


def test_a_message_is_sent_after_the_commit_with_all_that_belongs_to_it(
    engine: sa.Engine, up: Up, subject: str
) -> None:
    with Outbox(engine, up.url, options=NIMBLE, relays=False) as outbox:  # a relay might be first where time is short
        outbox.create()
        with Session(engine) as session, session.begin():
            session.add(Order(name="o-1"))
            told = outbox.send(session, subject, b"\x00paid", key="ö-1", tags=["a", "b"], headers={"trace": "7"})
            assert rows(engine) == 0
        [message] = arrived(up.url, subject, 1)
        assert (message.payload, message.key, tuple(message.tags), dict(message.headers)) == (
            b"\x00paid", "ö-1", ("a", "b"), {"trace": "7"}
        )  # fmt: skip
        assert message.id == told
        assert outbox.flush()
        assert rows(engine) == 0
        assert orders(engine) == ["o-1"]
        assert (outbox.counts.committed, outbox.counts.sent, outbox.counts.deleted) == (1, 1, 1)


def test_what_is_rolled_back_is_never_sent(engine: sa.Engine, outbox: Outbox, up: Up, subject: str) -> None:
    with Session(engine) as session:
        session.add(Order(name="o-1"))
        outbox.send(session, subject, b"rolled back")
        session.rollback()
        outbox.send(session, subject, b"closed without a commit")
    with suppress(KeyError), engine.begin() as connection:
        outbox.send(connection, subject, b"raised")
        raise KeyError
    with engine.begin() as connection:
        outbox.send(connection, subject, b"kept")
    assert payloads(up.url, subject, 1) == [b"kept"]


def test_what_is_rolled_back_to_a_savepoint_is_never_sent(
    engine: sa.Engine, outbox: Outbox, up: Up, subject: str
) -> None:
    with Session(engine) as session, session.begin():
        outbox.send(session, subject, b"before")
        with session.begin_nested():
            outbox.send(session, subject, b"released")
        undone = session.begin_nested()
        outbox.send(session, subject, b"undone")
        with session.begin_nested():
            outbox.send(session, subject, b"undone with what is around it")
        undone.rollback()
        with suppress(KeyError), session.begin_nested():
            session.add(Order(name="no"))
            outbox.send(session, subject, b"raised")
            raise KeyError
        outbox.send(session, subject, b"after")
    assert payloads(up.url, subject, 3) == [b"before", b"released", b"after"]
    assert orders(engine) == []


def test_a_savepoint_before_the_first_message(lite: sa.Engine, lite_outbox: Outbox, up: Up, subject: str) -> None:
    with lite.begin() as connection:
        for _ in range(3):
            nested = connection.begin_nested()
            lite_outbox.send(connection, subject, b"undone")
            nested.rollback()
        lite_outbox.send(connection, subject, b"kept")
    assert payloads(up.url, subject, 1) == [b"kept"]


def test_the_first_message_of_a_program_is_written_though_others_write(
    lite: sa.Engine, lite_outbox: Outbox, up: Up, subject: str
) -> None:
    """SQLite refuses, however patient it is, who has read and would write, if another writes meanwhile. So the look for
    the table, at the first message, must not be a read in the transaction; and to lock the others out is no better."""
    with lite.begin() as connection:
        connection.begin_nested()  # Python's sqlite3 begins transactions late; for this one they are begun at once
        lite_outbox.send(connection, subject, b"the first")
        put(lite, Outbox(lite), subject, b"another's")
    assert sorted(payloads(up.url, subject, 2)) == [b"another's", b"the first"]


def test_a_missing_table_is_named_where_the_transaction_has_begun(lite: sa.Engine) -> None:
    outbox = Outbox(lite)
    connection = lite.connect()
    connection.begin_nested()
    outbox.send(connection, "order.changed", b"x")
    with pytest.raises(Misuse, match=r"no such table: fairway_outbox: call outbox.create\(\) once"):
        connection.commit()
    connection.close()
    outbox.create()
    put(lite, outbox, "order.changed", b"x")
    assert rows(lite) == 1


def test_one_connection_and_many_transactions(lite: sa.Engine, lite_outbox: Outbox, up: Up, subject: str) -> None:
    with lite.connect() as connection:
        for number in range(10):
            lite_outbox.send(connection, subject, b"%d" % number)
            connection.rollback() if number % 2 else connection.commit()
    assert payloads(up.url, subject, 5) == [b"0", b"2", b"4", b"6", b"8"]


def test_a_transaction_writes_its_messages_in_one_statement_and_they_are_deleted_in_one(
    lite: sa.Engine, up: Up, subject: str
) -> None:
    heard: list[str] = []
    lite.dispose()  # so that each connection is a new one
    sa.event.listen(lite, "connect", lambda driver, _: driver.set_trace_callback(heard.append))
    # The rows of both subjects wait for one another, and `flush` ends the wait.
    patient = replace(NIMBLE, delete_linger_s=60.0)
    with Outbox(lite, up.url, options=patient, relays=False) as outbox:
        outbox.create()
        with lite.begin() as connection:
            for number in range(100):
                outbox.send(connection, f"{subject}.{number % 2}", b"%d" % number)
        assert outbox.flush()
    written = [text.split()[0] for text in heard if TABLE.name in text]
    assert written[-2:] == ["INSERT", "DELETE"]
    assert (written.count("INSERT"), written.count("DELETE")) == (1, 1)
    assert payloads(up.url, f"{subject}.1", 50) == [b"%d" % number for number in range(1, 100, 2)]


def test_many_threads(postgres_url: str, up: Up, subject: str) -> None:
    engine = sa.create_engine(fresh(postgres_url))
    outbox = Outbox(engine, up.url, options=NIMBLE)
    outbox.create()

    def work(name: str) -> None:
        for number in range(25):
            with engine.begin() as connection:
                outbox.send(connection, subject, f"{name}.{number}".encode())

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = payloads(up.url, subject, 100)
    assert sorted(found) == sorted(f"{name}.{number}".encode() for name in "abcd" for number in range(25))
    for name in "abcd":
        of_one = [each for each in found if each.startswith(name.encode())]
        assert len(of_one) == 25
    assert (outbox.counts.left, outbox.counts.repeats) == (0, 0)
    outbox.close()
    engine.dispose()


def test_a_delayed_message_is_delivered_then(lite: sa.Engine, lite_outbox: Outbox, up: Up, subject: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=0.7)
    with lite.begin() as connection:
        lite_outbox.send(connection, subject, b"at once")
        told = lite_outbox.send(connection, subject, b"later", at=due)
    first, second = arrived(up.url, subject, 2)
    assert (first.payload, second.payload, second.id) == (b"at once", b"later", told)
    assert datetime.now(UTC) >= due


def test_a_session_on_an_outer_transaction_sends_when_that_commits(lite: sa.Engine, up: Up, subject: str) -> None:
    # Without a relay: one that waits to write lets no new reader in, and it would wait for this transaction.
    with Outbox(lite, up.url, options=NIMBLE, relays=False) as outbox, lite.connect() as connection:
        outbox.create()
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.send(session, subject, b"kept")
            session.commit()
            outbox.send(session, subject, b"undone")
            session.rollback()
        assert rows(lite) == 0
        outer.commit()
    assert payloads(up.url, subject, 1) == [b"kept"]


# --- when things fail -------------------------------------------------------------------------------------------------


def test_nothing_of_a_transaction_remains_whose_messages_cannot_be_written(
    engine: sa.Engine, outbox: Outbox, up: Up, subject: str
) -> None:
    with engine.begin() as connection:
        outbox.send(connection, subject, b"first")
    assert outbox.flush()
    TABLE.drop(engine)
    with Session(engine) as session:
        session.add(Order(name="lost its message"))
        outbox.send(session, subject, b"never")
        with pytest.raises(sa.exc.DBAPIError):
            session.commit()
        session.rollback()
        session.add(Order(name="without a message"))
        session.commit()
    assert orders(engine) == ["without a message"]
    outbox.create()
    with engine.begin() as connection:
        outbox.send(connection, subject, b"second")
    assert payloads(up.url, subject, 2) == [b"first", b"second"]


def test_a_commit_that_fails_sends_nothing(lite: sa.Engine, lite_outbox: Outbox, up: Up, subject: str) -> None:
    with lite.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE lines (id INTEGER PRIMARY KEY, "
            "order_id INTEGER REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
        )
    with lite.connect() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        connection.commit()
        connection.execute(sa.text("INSERT INTO lines VALUES (1, 999)"))
        lite_outbox.send(connection, subject, b"never")
        with pytest.raises(sa.exc.IntegrityError):
            connection.commit()
        connection.rollback()
        lite_outbox.send(connection, subject, b"kept")
        connection.connection.rollback()  # SQLite's transaction goes on after a commit that has failed
        connection.commit()
    assert payloads(up.url, subject, 1) == [b"kept"]


def test_a_commit_that_postgresql_refuses_sends_nothing(postgres_url: str, up: Up, subject: str) -> None:
    """There, the row and the commit go in one exchange."""
    engine = sa.create_engine(postgres_url)
    Base.metadata.create_all(engine)
    lines = f"lines_{subject.replace('.', '_')}"
    with Outbox(engine, up.url, options=NIMBLE) as outbox, engine.connect() as connection:
        outbox.create()
        connection.exec_driver_sql(f"CREATE TABLE {lines} (id INT REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
        connection.commit()
        connection.exec_driver_sql(f"INSERT INTO {lines} VALUES (999)")
        outbox.send(connection, subject, b"never")
        with pytest.raises(sa.exc.IntegrityError):
            connection.commit()
        connection.rollback()
        outbox.send(connection, subject, b"kept")
        connection.commit()
        assert payloads(up.url, subject, 1) == [b"kept"]
        connection.exec_driver_sql(f"DROP TABLE {lines}")
        connection.commit()
    engine.dispose()


def test_on_postgresql_in_a_pipeline_of_yours_and_in_a_schema_of_any_name(postgres_url: str) -> None:
    engine = sa.create_engine(fresh(postgres_url))
    with engine.begin() as connection:
        connection.execute(sa.text('CREATE SCHEMA "50%"'))
    outbox = Outbox(engine, schema="50%")
    outbox.create()
    with engine.begin() as connection:
        outbox.send(connection, "s", b"not in one")
        outbox.send(connection, "t", os.urandom(1_000))
    with engine.connect() as connection, connection.connection.driver_connection.pipeline():  # type: ignore[union-attr]
        outbox.send(connection, "s", b"in a pipeline")
        connection.commit()
    assert outbox.state().pending == 3
    outbox.close()
    engine.dispose()


def test_a_connection_that_postgresql_ends_at_the_commit_sends_nothing(postgres_url: str, up: Up, subject: str) -> None:
    engine = sa.create_engine(postgres_url)
    with Outbox(engine, up.url, options=NIMBLE) as outbox:
        outbox.create()
        with engine.connect() as connection, engine.connect() as other:
            outbox.send(connection, subject, b"never")
            backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            other.exec_driver_sql(f"SELECT pg_terminate_backend({backend})")
            other.commit()
            with pytest.raises(sa.exc.OperationalError):
                connection.commit()
        with engine.begin() as connection:
            outbox.send(connection, subject, b"kept")
        assert payloads(up.url, subject, 1) == [b"kept"]
    engine.dispose()


def test_rows_wait_for_a_broker_that_is_away(lite: sa.Engine, subject: str, tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker:
        broker.kill()
        with Outbox(lite, broker.url, options=NIMBLE) as outbox:
            outbox.create()
            for number in range(5):
                with lite.begin() as connection:
                    outbox.send(connection, subject, b"%d" % number)
            assert rows(lite) == 5
            eventually(lambda: outbox.trouble is not None, "it says what is wrong")
            assert outbox.state().pending == 5
            broker.start()
            assert payloads(broker.url, subject, 5) == [b"0", b"1", b"2", b"3", b"4"]
            eventually(lambda: rows(lite) == 0, "they are deleted")
            broker.kill()
            with lite.begin() as connection:
                outbox.send(connection, subject, b"5")
            broker.start()
            assert payloads(broker.url, subject, 6)[5:] == [b"5"]


def test_two_phases(mariadb_url: str, up: Up, subject: str) -> None:
    engine = sa.create_engine(fresh(mariadb_url))
    outbox = Outbox(engine, up.url, options=NIMBLE)
    outbox.create()
    with engine.connect() as connection:
        with connection.begin_twophase() as transaction:
            outbox.send(connection, subject, b"kept")
            transaction.prepare()
            transaction.commit()
        transaction = connection.begin_twophase()
        outbox.send(connection, subject, b"undone")
        transaction.prepare()
        transaction.rollback()
    assert payloads(up.url, subject, 1) == [b"kept"]
    outbox.close()
    engine.dispose()


def test_a_forked_child_sends_its_own(lite: sa.Engine, up: Up, subject: str) -> None:
    """Without a relay, which might be in the middle of something: SQLite would take the child for one that is, too."""
    lite_outbox = Outbox(lite, up.url, relays=False, options=NIMBLE)
    lite_outbox.create()
    with lite.begin() as connection:
        lite_outbox.send(connection, subject, b"parent")
    assert lite_outbox.flush()
    lite.dispose()

    def sends() -> bool:
        lite.dispose(close=False)
        put(lite, lite_outbox, subject, b"child")
        return lite_outbox.flush()

    assert in_a_child(sends)
    with lite.begin() as connection:
        lite_outbox.send(connection, subject, b"parent again")
    found = arrived(up.url, subject, 3)
    assert [message.payload for message in found] == [b"parent", b"child", b"parent again"]
    assert len({message.id.producer_id for message in found}) == 2
    lite_outbox.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_missing_table_is_named_with_its_remedy(lite: sa.Engine) -> None:
    with pytest.raises(Misuse, match=r"no table fairway_outbox.*outbox\.create\(\)"), lite.begin() as connection:
        Outbox(lite).send(connection, "s", b"x")


def test_mistakes_are_refused_before_the_commit(lite: sa.Engine) -> None:
    outbox = Outbox(lite)
    outbox.create()
    naive = datetime(2030, 1, 1)  # noqa: DTZ001
    with lite.begin() as connection:
        with pytest.raises(TypeError, match="encode"):
            outbox.send(connection, "s", "text")  # type: ignore[arg-type]
        with pytest.raises(BadName):
            outbox.send(connection, "no spaces", b"x")
        with pytest.raises(Misuse, match="time zone"):
            outbox.send(connection, "s", b"x", at=naive)
        with pytest.raises(Misuse, match="not by both"):
            outbox.send(connection, "s", b"x", at=datetime.now(UTC), after=3)
        with pytest.raises(Misuse, match="send a reference"):
            outbox.send(connection, "s", bytes(64 << 20))
        with pytest.raises(Misuse, match="keys have at most"):
            outbox.send(connection, "s", b"x", key="k" * 2_000)
        with pytest.raises(Misuse, match="holds no transaction"):
            outbox.send(lite, "s", b"x")  # type: ignore[arg-type]
    assert rows(lite) == 0


def test_what_is_no_transaction_of_that_database(lite: sa.Engine, tmp_path: Path) -> None:
    outbox = Outbox(lite)
    outbox.create()
    other = sa.create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with other.begin() as connection, pytest.raises(Misuse, match="same engine"):
        outbox.send(connection, "s", b"x")
    with (
        lite.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(Misuse, match="AUTOCOMMIT"),
    ):
        outbox.send(connection, "s", b"x")
    with lite.execution_options(logging_token="mine").begin() as connection:
        outbox.send(connection, "s", b"x")
    assert rows(lite) == 1
    other.dispose()


def test_engines_that_an_outbox_cannot_live_in() -> None:
    with pytest.raises(Misuse, match="use a file"):
        Outbox(sa.create_engine("sqlite://"), "fairway://127.0.0.1:1")
    with pytest.raises(Misuse, match="write fairway://"):
        Outbox(sa.create_engine("sqlite://"), "http://127.0.0.1")
    with pytest.raises(Misuse, match="AioOutbox on an AsyncEngine"):
        Outbox("sqlite://")  # type: ignore[arg-type]


def test_a_closed_outbox_takes_nothing_and_hears_nothing(lite: sa.Engine) -> None:
    with Outbox(lite) as outbox:
        outbox.create()
    with lite.begin() as connection, pytest.raises(Misuse, match="closed"):
        outbox.send(connection, "s", b"x")


def test_a_message_that_mariadb_would_not_take_is_refused_before_the_commit(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    outbox = Outbox(engine)
    outbox.create()
    with engine.begin() as connection:
        largest = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
        with pytest.raises(Misuse, match="max_allowed_packet"):
            outbox.send(connection, "s", bytes(largest))
    engine.dispose()


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_can_be_a_part_of_your_own_metadata(lite: sa.Engine) -> None:
    metadata = sa.MetaData()
    table = outbox_table(metadata)
    assert outbox_table(metadata) is table
    metadata.create_all(lite)
    with lite.begin() as connection:
        Outbox(lite).send(connection, "s", b"x")
    assert rows(lite) == 1
    assert [index["column_names"] for index in sa.inspect(lite).get_indexes(table.name)] == [["wake_ms"]]
    with pytest.raises(Misuse, match="letters, digits"):
        outbox_table(metadata, "drop table")


def test_two_outboxes_in_one_transaction(lite: sa.Engine) -> None:
    first, second = Outbox(lite, table="one"), Outbox(lite, table="two")
    first.create()
    second.create()
    with lite.begin() as connection:
        first.send(connection, "s", b"x")
        second.send(connection, "s", b"y", after=3)
    assert (first.state().subjects, second.state().subjects) == ({"s": 1}, {"s": 1})
    assert isinstance(first.state().oldest_s, float)
    assert fairway.MessageId.parse(_id_of(lite, "one"))


def _id_of(engine: sa.Engine, table: str) -> str:
    with engine.connect() as connection:
        return str(connection.exec_driver_sql(f"SELECT id FROM {table}").scalar_one())
