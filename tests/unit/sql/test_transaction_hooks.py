"""On PostgreSQL the outbox's row travels with COMMIT, whatever the driver has prepared, or forgotten, or is told."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import errors

from fairway.sql import Outbox, Relay, statement
from fairway.sql.outbox_rows import PIGGYBACK_ROWS_MAX
from fairway.sql.transaction_hooks import hooks_of
from tests.support.databases import fresh
from tests.support.outboxes import NIMBLE, Up, in_a_child, payloads, put

_numbers = count(1)
SECOND_AND_A_HALF = (  # that a commit takes, if there is a row in the table
    "CREATE TABLE slow (id INT)",
    "CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END$$",
    "CREATE CONSTRAINT TRIGGER nap AFTER INSERT ON slow INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION nap()",
)


@pytest.fixture
def engine(postgres_url: str) -> Iterator[sa.Engine]:
    named = {"application_name": f"riding-{next(_numbers)}"}
    made = sa.create_engine(fresh(postgres_url), connect_args=named, pool_size=1, max_overflow=0, pool_timeout=5)
    yield made
    made.dispose()


@pytest.fixture
def outbox(engine: sa.Engine) -> Iterator[Outbox]:
    made = Outbox(engine)
    made.create()
    yield made
    made.close()


def commit(engine: sa.Engine, outbox: Outbox, *payloads: bytes, sql: str = "SELECT 1") -> None:
    """One transaction with that statement, and a message for each payload, to a subject of its own."""
    with engine.begin() as connection:
        connection.exec_driver_sql(sql)
        for number, payload in enumerate(payloads):
            outbox.send(connection, f"s.{number}", payload, key="k", headers={"'": "\\"})


def rows(outbox: Outbox) -> int:
    return outbox.state().rows


def driver(connection: sa.Connection) -> Any:
    return connection.connection.driver_connection


def said(engine: sa.Engine, outbox: Outbox, *payloads: bytes) -> list[str]:
    """What the driver says to the database in such a transaction: libpq's own account of it."""
    with tempfile.TemporaryFile("w+") as account:
        with engine.connect() as connection:
            pgconn = driver(connection).pgconn
        pgconn.trace(account.fileno())
        commit(engine, outbox, *payloads)
        pgconn.untrace()
        account.seek(0)
        columns = [line.strip().split("\t") for line in account]
        return [each[3] for each in columns if each[1:2] == ["F"]]  # from the front


def exchanges(messages: list[str]) -> int:
    return sum(1 for each in messages if each in ("Sync", "Query"))


def test_a_message_costs_no_exchange_of_its_own(engine: sa.Engine, outbox: Outbox) -> None:
    for _ in range(10):
        commit(engine, outbox, b"x")
        commit(engine, outbox, b"x", b"y")
    without = said(engine, outbox)
    assert exchanges(said(engine, outbox, b"x")) == exchanges(without) == 3  # BEGIN, the statement, COMMIT
    assert exchanges(said(engine, outbox, b"x", b"y")) == 3


def test_what_comes_again_is_prepared_once(engine: sa.Engine, outbox: Outbox) -> None:
    first = [said(engine, outbox, b"x").count("Parse") for _ in range(10)]
    assert first[0] > 0
    assert first[-1] == 0
    with engine.connect() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").scalars().all()
    assert sum("fairway_outbox" in each for each in prepared) == 1


def test_the_driver_may_forget_at_any_time(engine: sa.Engine, outbox: Outbox) -> None:
    """After a rollback psycopg has the database forget everything that it had prepared; and so may a program."""
    for forgets in ("ROLLBACK", "DEALLOCATE ALL", "ALTER TABLE fairway_outbox ADD more INT", "DISCARD ALL"):
        for _ in range(8):
            commit(engine, outbox, b"x")
        before = rows(outbox)
        for _ in range(8):
            commit(engine, outbox, b"x")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(forgets)
        for _ in range(8):
            commit(engine, outbox, b"x")
        assert rows(outbox) == before + 16


def test_many_statements_beside_it(engine: sa.Engine, outbox: Outbox) -> None:
    """More than the driver keeps: what it drops is prepared again."""
    for number in range(250):
        commit(engine, outbox, b"x", sql=f"SELECT {number % 125}")
        with engine.begin() as connection:
            for each in range(3):
                driver(connection).execute(f"SELECT {number * 3 + each}", prepare=True)
    assert rows(outbox) == 250


def test_where_statements_must_not_be_prepared(postgres_url: str) -> None:
    """As with a pooler that gives each transaction another connection to the database."""
    engine = sa.create_engine(fresh(postgres_url), connect_args={"prepare_threshold": None})
    outbox = Outbox(engine)
    outbox.create()
    for _ in range(10):
        commit(engine, outbox, b"x")
    assert exchanges(said(engine, outbox, b"x")) == 3
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar_one() == 0
    outbox.close()
    engine.dispose()


def test_a_driver_that_has_another_cache(engine: sa.Engine, outbox: Outbox) -> None:
    piggyback = hooks_of(engine)._piggyback
    assert piggyback is not None
    assert piggyback._cache_type is not None  # as of the psycopg that is installed here
    piggyback._cache_type = None
    for _ in range(10):
        commit(engine, outbox, b"x")
    assert exchanges(said(engine, outbox, b"x")) == 3
    assert rows(outbox) == 11


def test_any_number_of_rows_and_any_bytes(engine: sa.Engine, outbox: Outbox, up: Up) -> None:
    bodies = [bytes(range(256)), b"'; DROP TABLE orders; --\\", b"", b"% %s {0}", os.urandom(1 << 20)]
    for _ in range(7):  # until they are prepared, and beyond
        for body in bodies:
            commit(engine, outbox, body)
        commit(engine, outbox, *bodies)
        commit(engine, outbox, *[b"many"] * (PIGGYBACK_ROWS_MAX + 1))
    with Relay(engine, up.url, options=NIMBLE):
        found = payloads(up.url, "s.0", 49)
    assert sorted(found) == sorted([*bodies, bodies[0], b"many"] * 7)


def test_a_transaction_of_messages_alone(engine: sa.Engine, outbox: Outbox) -> None:
    for number in range(10):
        with engine.begin() as connection:
            outbox.send(connection, "s", b"x")
        assert rows(outbox) == number + 1


def test_a_failed_transaction_is_not_committed_by_its_message(engine: sa.Engine, outbox: Outbox) -> None:
    for _ in range(8):
        commit(engine, outbox, b"x")
    with engine.connect() as connection:
        outbox.send(connection, "s", b"never")
        with pytest.raises(sa.exc.ProgrammingError):
            connection.exec_driver_sql("SELECT nothing FROM nowhere")
        with pytest.raises(sa.exc.DBAPIError) as raised:
            connection.commit()
        assert isinstance(raised.value.orig, errors.InFailedSqlTransaction)
    commit(engine, outbox, b"x")
    assert rows(outbox) == 9


def test_a_row_that_the_database_refuses_takes_the_transaction_along(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INT)")
        connection.exec_driver_sql("ALTER TABLE fairway_outbox ADD CHECK (subject <> 's.1')")
    for _ in range(8):
        commit(engine, outbox, b"x")
    with pytest.raises(sa.exc.IntegrityError, match="fairway_outbox"):
        commit(engine, outbox, b"x", b"refused", sql="INSERT INTO orders VALUES (1)")
    commit(engine, outbox, b"x", sql="INSERT INTO orders VALUES (2)")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM orders").scalars().all() == [2]
    assert rows(outbox) == 9


def test_a_commit_that_is_cancelled_or_interrupted(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.begin() as connection:
        for sql in SECOND_AND_A_HALF:
            connection.exec_driver_sql(sql)
    for _ in range(8):
        commit(engine, outbox, b"x")
    with engine.connect() as connection:
        its_driver = driver(connection)
    is_over = threading.Event()

    def cancel() -> None:
        while not is_over.wait(0.2):
            its_driver.cancel_safe()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(sa.exc.OperationalError, match="cancel"):
        commit(engine, outbox, b"never", sql="INSERT INTO slow VALUES (1)")
    is_over.set()
    canceller.join()
    interrupter = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupter.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        commit(engine, outbox, b"never", sql="INSERT INTO slow VALUES (1)")
    assert time.monotonic() - begun < 30
    interrupter.join()
    commit(engine, outbox, b"x")
    assert rows(outbox) == 9
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM slow").scalar_one() == 0


def test_why_the_database_ends_a_connection_is_told(engine: sa.Engine, outbox: Outbox) -> None:
    for _ in range(8):
        commit(engine, outbox, b"x")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 50")
        outbox.send(connection, "s", b"never")
        time.sleep(0.5)
        with pytest.raises(sa.exc.DBAPIError) as raised:
            connection.commit()
        assert isinstance(raised.value.orig, errors.IdleInTransactionSessionTimeout)
    commit(engine, outbox, b"x")
    assert rows(outbox) == 9


@pytest.mark.parametrize("schema", ["büro", 'a "b" %s', "50%"])
def test_a_schema_of_any_name(postgres_url: str, schema: str) -> None:
    engine = sa.create_engine(fresh(postgres_url))
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
    outbox = Outbox(engine, schema=schema)
    outbox.create()
    before = rows(outbox)
    for _ in range(10):
        commit(engine, outbox, b"x")
    assert rows(outbox) == before + 10
    outbox.close()
    engine.dispose()


def test_rows_larger_than_one_statement_takes(engine: sa.Engine, outbox: Outbox) -> None:
    for _ in range(8):
        commit(engine, outbox, *[b"x" * (1 << 20)] * 6)
    assert rows(outbox) == 48


def test_what_is_prepared_and_what_a_cursor_writes_is_the_same(engine: sa.Engine, outbox: Outbox) -> None:
    """Column by column, as the types of the one table have it."""
    for _ in range(8):
        commit(engine, outbox, b"x")
    with engine.begin() as connection:
        sql, values = statement("format", "s.0", b"x", "k", headers={"'": "\\"})
        driver(connection).execute(sql, values)
    with engine.connect() as connection:
        kinds = connection.exec_driver_sql(
            "SELECT DISTINCT length(id), subject, messages, stream, place, length(body), error, broker_group "
            "FROM fairway_outbox"
        ).all()
    assert len(kinds) == 1


def test_a_program_that_uses_up_its_pool_holds_up_nobody(engine: sa.Engine, up: Up, subject: str) -> None:
    """Rows are deleted, and sent by relays, over connections of the outbox's own."""
    with Outbox(engine, up.url, options=NIMBLE) as outbox:
        outbox.create()
        with engine.begin() as connection:
            outbox.send(connection, subject, b"sent after the commit")
        with engine.connect() as connection:  # the only one
            connection.exec_driver_sql("SELECT 1")
            assert outbox.flush(20)
            assert connection.exec_driver_sql("SELECT count(*) FROM fairway_outbox").scalar_one() == 0
            driver(connection).execute(*statement("format", subject, b"sent by the relay"))
            connection.commit()
            assert payloads(up.url, subject, 2) == [b"sent after the commit", b"sent by the relay"]


def test_what_committed_is_what_was_sent_though_connections_end_at_any_moment(
    engine: sa.Engine, up: Up, subject: str
) -> None:
    """In the middle of a commit, too: then nobody knows, and the relay finds what is there."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INT)")
    ended = 0
    with Outbox(engine, up.url, options=NIMBLE) as outbox:
        outbox.create()
        begun = time.monotonic()
        killer = _Killer(engine)
        killer.start()
        number = 0
        while killer.kills < 60 and time.monotonic() - begun < 60:
            number += 1
            try:
                with engine.begin() as connection:
                    connection.exec_driver_sql(f"INSERT INTO orders VALUES ({number})")
                    outbox.send(connection, subject, b"%d" % number)
            except sa.exc.DBAPIError:
                ended += 1
        killer.stop()
        engine.dispose()
        with engine.connect() as connection:
            committed = connection.exec_driver_sql("SELECT id FROM orders").scalars().all()
        found = payloads(up.url, subject, len(committed))
    assert ended > 0
    assert sorted(map(int, found)) == sorted(committed)


class _Killer(threading.Thread):
    """Ends connections that are made as those of an engine, each with an even chance."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(daemon=True)
        with engine.connect() as connection:
            self._name = connection.exec_driver_sql("SHOW application_name").scalar_one()
        self._engine = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._ending = threading.Event()
        self.kills = 0

    def run(self) -> None:
        query = sa.text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND application_name = :name AND random() < 0.5"
        )
        with self._engine.connect() as connection:
            while not self._ending.wait(0.02):
                self.kills += len(connection.execute(query, {"name": self._name}).all())

    def stop(self) -> None:
        self._ending.set()
        self.join()
        self._engine.dispose()


def test_listeners_on_the_engine_hear_of_the_connections_apart(engine: sa.Engine, up: Up, subject: str) -> None:
    """As those that a program sets a role by."""
    heard: list[sa.Connection] = []
    sa.event.listen(engine, "engine_connect", heard.append)
    with Outbox(engine, up.url, options=NIMBLE, relays=False) as outbox:
        outbox.create()
        with engine.begin() as connection:
            outbox.send(connection, subject, b"x")
        assert outbox.flush()
        assert any(each.engine.pool is not engine.pool for each in heard)


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(engine: sa.Engine, up: Up, subject: str) -> None:
    outbox = Outbox(engine, up.url, relays=False, options=NIMBLE)
    outbox.create()
    with engine.begin() as connection:
        outbox.send(connection, subject, b"parent")
    assert outbox.flush()

    def sends() -> bool:
        engine.dispose(close=False)
        put(engine, outbox, subject, b"child")
        is_sent = outbox.flush()
        outbox.close()
        return is_sent

    assert in_a_child(sends)
    with engine.begin() as connection:
        outbox.send(connection, subject, b"parent again")
    assert outbox.flush()
    assert payloads(up.url, subject, 3) == [b"parent", b"child", b"parent again"]
    assert (outbox.trouble, outbox.counts.deleted) == (None, 2)
    outbox.close()
