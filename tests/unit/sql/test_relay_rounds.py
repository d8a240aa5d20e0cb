"""Streams that are taken in the order of their places: from the first row that nobody holds, again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from fairway import batch
from fairway.sql.database import make
from fairway.sql.outbox_rows import Before, Claimed, OutboxRows
from fairway.sql.outbox_table import PARKED_MS
from fairway.sql.relay_rounds import StreamRepair
from tests.support.outboxes import TABLE

NOW_MS = 1_800_000_000_000
LEASE_MS = 20_000
REST_MS = 1_000
BYTES_MAX = 1 << 20
FREE = "it was put off"


@pytest.fixture
def connection() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    make(engine, TABLE)
    with engine.begin() as began:
        yield began
    engine.dispose()


@pytest.fixture
def table(connection: sa.Connection) -> OutboxRows:
    return OutboxRows(TABLE, connection.dialect)


@pytest.fixture
def tangled(table: OutboxRows) -> StreamRepair:
    return StreamRepair(table, REST_MS)


def write(
    connection: sa.Connection, stream: int, *places: int, wake_ms: int = NOW_MS + 5_000, error: str | None = FREE
) -> None:
    """Rows that nobody holds, unless there is no error; their ids are in no order."""
    for place in places:
        body = batch.encode((b"x",), producer_id=stream, first_sequence=place, created_ms=NOW_MS)
        row = {"id": f"{place * 7 % 10}.{stream}.{place}", "wake_ms": wake_ms, "subject": "s", "messages": 1}
        row |= {"created_ms": NOW_MS, "stream": stream, "place": place, "body": body, "error": error}
        connection.execute(sa.insert(TABLE).values(row))


def taken(connection: sa.Connection, tangled: StreamRepair, rows_max: int = 3, now_ms: int = NOW_MS) -> Claimed:
    return tangled.take(connection, now_ms, LEASE_MS, rows_max, BYTES_MAX)


def places(claimed: Claimed) -> list[tuple[int | None, int | None]]:
    return [(row.stream, row.place) for row in claimed.rows]


def test_rows_are_taken_in_order_whatever_their_times(connection: sa.Connection, tangled: StreamRepair) -> None:
    write(connection, 1, 4, 2, 3, 1, 0)
    write(connection, 2, 0)
    tangled.add(1)
    assert places(taken(connection, tangled)) == [(1, 0), (1, 1), (1, 2)]
    assert places(taken(connection, tangled)) == [(1, 3), (1, 4)], "and the other stream is nobody's affair here"
    assert 1 in tangled
    assert 2 not in tangled


def test_a_stream_without_rows_is_forgotten(connection: sa.Connection, tangled: StreamRepair) -> None:
    write(connection, 1, 0)
    write(connection, 3, 0, wake_ms=PARKED_MS)
    for stream in (1, 2, 3):
        tangled.add(stream)
    assert places(taken(connection, tangled)) == [(1, 0)]
    assert [stream in tangled for stream in (1, 2, 3)] == [True, False, False]
    connection.execute(sa.delete(TABLE))
    assert taken(connection, tangled).rows == []
    assert 1 not in tangled
    assert not tangled.is_busy(NOW_MS)


def test_what_follows_something_that_was_not_stored_is_not_taken_before_it(
    connection: sa.Connection, table: OutboxRows, tangled: StreamRepair
) -> None:
    write(connection, 1, 0, 1, 2, 3)
    write(connection, 2, 0, 1)
    tangled.add(1)
    tangled.add(2)
    first = taken(connection, tangled, rows_max=2)
    assert places(first) == [(1, 0), (1, 1)]
    table.note(connection, [(row, NOW_MS + 5_000, "as it happens") for row in first.rows])
    tangled.begin_again({1})
    assert places(taken(connection, tangled)) == [(2, 0), (2, 1)], "the other one goes on where it was"
    assert places(taken(connection, tangled)) == [(1, 0), (1, 1), (1, 2)]


def test_a_stream_that_rests_is_left_alone_and_then_taken_again(
    connection: sa.Connection, tangled: StreamRepair
) -> None:
    write(connection, 1, 0)
    write(connection, 2, 0)
    tangled.add(1)
    tangled.add(2)
    tangled.rest({1, 3, None}, NOW_MS)
    assert places(taken(connection, tangled)) == [(2, 0)]
    assert 3 not in tangled, "that nobody has added"
    connection.execute(sa.delete(TABLE).where(TABLE.c.stream == 2))
    assert taken(connection, tangled, now_ms=NOW_MS + REST_MS - 1).rows == []
    assert not tangled.is_busy(NOW_MS + REST_MS - 1)
    assert tangled.is_busy(NOW_MS + REST_MS)
    assert places(taken(connection, tangled, now_ms=NOW_MS + REST_MS)) == [(1, 0)]


def test_rows_from_one_on_that_somebody_holds_are_not_taken(connection: sa.Connection, tangled: StreamRepair) -> None:
    write(connection, 1, 0, 2, 3)
    write(connection, 1, 1, error=None)
    tangled.add(1)
    assert places(taken(connection, tangled)) == [(1, 0)]


def test_a_stream_whose_first_row_somebody_holds_rests(connection: sa.Connection, tangled: StreamRepair) -> None:
    write(connection, 1, 1, 2)
    write(connection, 1, 0, error=None)
    tangled.add(1)
    assert taken(connection, tangled).rows == []
    assert 1 in tangled
    assert not tangled.is_busy(NOW_MS), "or the table would be read all the time"
    connection.execute(sa.delete(TABLE).where(TABLE.c.place == 0))  # he has stored it
    assert places(taken(connection, tangled, now_ms=NOW_MS + REST_MS)) == [(1, 1), (1, 2)]


def test_what_is_taken_is_held(connection: sa.Connection, table: OutboxRows, tangled: StreamRepair) -> None:
    write(connection, 1, 0, 1, 2, 3, 4)
    tangled.add(1)
    other = StreamRepair(table, REST_MS)
    other.add(1)
    held = taken(connection, tangled)
    assert places(held) == [(1, 0), (1, 1), (1, 2)]
    assert held.rows[0].error == FREE, "what was said of it is known to who has it"
    assert taken(connection, other).rows == []
    last = taken(connection, tangled).rows[-1]
    assert table.before(connection, last, NOW_MS) is Before.HELD
    assert table.before(connection, last, NOW_MS + LEASE_MS) is Before.FREE


def test_who_comes_too_late_begins_again(connection: sa.Connection, table: OutboxRows, tangled: StreamRepair) -> None:
    write(connection, 1, *range(6))
    other = StreamRepair(table, REST_MS)
    for each in (tangled, other):
        each.add(1)
        each._look(connection, NOW_MS)
    assert places(taken(connection, tangled)) == [(1, 0), (1, 1), (1, 2)]
    assert taken(connection, other).rows == [], "they are another's now"
    assert taken(connection, other).rows == [], "and what follows them would meet a gap"
    assert places(taken(connection, tangled)) == [(1, 3), (1, 4), (1, 5)]


def test_rows_that_there_is_no_room_for_come_next(connection: sa.Connection, tangled: StreamRepair) -> None:
    write(connection, 1, *range(4))
    tangled.add(1)
    size_bytes = connection.execute(sa.select(sa.func.length(TABLE.c.body)).limit(1)).scalar_one()
    first = tangled.take(connection, NOW_MS, LEASE_MS, 3, 2 * size_bytes)
    assert (places(first), first.is_cut) == ([(1, 0), (1, 1)], True)
    connection.execute(sa.delete(TABLE).where(TABLE.c.place < 2))
    assert places(taken(connection, tangled)) == [(1, 2), (1, 3)]


def test_streams_that_were_not_reached_are_not_forgotten(
    connection: sa.Connection, tangled: StreamRepair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairway.sql.relay_rounds.IDS_MAX", 2)
    for stream in (1, 2):
        write(connection, stream, 0, 1)
        tangled.add(stream)
    assert places(taken(connection, tangled)) == [(1, 0), (1, 1)]
    connection.execute(sa.delete(TABLE).where(TABLE.c.stream == 1))
    assert places(taken(connection, tangled)) == [(2, 0), (2, 1)]
