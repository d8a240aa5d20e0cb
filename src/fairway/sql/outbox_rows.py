"""The SQL statements on the outbox's table.

`OutboxRows` has a few statements, each for many rows at once. Each runs on a connection that the caller gives, so
threads and asyncio (`run_sync`) share them. Writing a row costs one statement with a fixed text and values in the
driver's own form: in the middle of a user's transaction every microsecond counts (bench/outbox).

`contents` reads all rows page by page, to compare them with what brokers have.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Dialect, Engine, Table
from sqlalchemy.exc import NoSuchTableError

from fairway.errors import Misuse
from fairway.runtime.clock import Clock
from fairway.sql.database import shown, unknown
from fairway.sql.outbox_encoding import OutboxRow
from fairway.sql.outbox_table import COLUMNS, ERROR_CHARS_MAX, GROUP, NAME, PARKED_MS, SECRET, outbox_table
from fairway.sql.transaction_hooks import PiggybackStatement, PipelinedStatement

RETRY_ROWS_MAX: Final = 10_000  # rows set aside that one transaction retries or discards
ROWS_MAX: Final = 500  # per INSERT; SQLite takes 32,766 parameters, PostgreSQL 65,535
INSERT_BYTES_MAX: Final = 4 << 20  # per INSERT; MySQL takes 16 MiB unless configured otherwise
PIGGYBACK_ROWS_MAX: Final = 16  # with one COMMIT: each number of rows is a statement of its own to prepare
_PAGE_ROWS: Final = 100  # of `contents`, in memory at once, each with a batch of any size
PACKET_SPARE_BYTES: Final = 64 << 10  # of MySQL's largest packet, for the rest of a row

REMEDY: Final = (
    "call outbox.create() once, `fairway outbox create`, or make it with your migrations (fairway.sql.outbox_table)"
)

# The mark for a value, by the driver's paramstyle of PEP 249. The last two are SQLAlchemy's, for asyncpg.
MARKS: Final = {
    "qmark": "?", "format": "%s", "pyformat": "%s", "numeric": ":{}", "numeric_dollar": "${}"
}  # fmt: skip


_ADDED: Final = frozenset({GROUP, SECRET})  # columns that later versions added
_TEXT: Final = (1043, 0)  # PostgreSQL's number of the type, and the format of values: 0 text, 1 binary
_INT8: Final = (20, 1)
_BINARY: Final = {
    "id": _TEXT, "wake_ms": _INT8, "subject": _TEXT, "messages": _INT8, "created_ms": _INT8, "stream": _INT8,
    "place": _INT8, "body": (17, 1), GROUP: _TEXT, SECRET: _TEXT,
}  # fmt: skip
_int8: Final = struct.Struct(">q").pack


def insert_text(
    table_name: str, paramstyle: str, rows: int, *, is_hex: bool = False, columns: Sequence[str] = COLUMNS
) -> str:
    """An INSERT of so many rows; `is_hex`: bodies are given as hexadecimal text."""
    mark = MARKS.get(paramstyle)
    if mark is None:
        raise Misuse(f"the paramstyle {paramstyle!r} is none of {', '.join(MARKS)}")
    forms = [f"UNHEX({mark})" if is_hex and name == "body" else mark for name in columns]
    width = len(columns)
    tuples = (
        ", ".join(form.format(row * width + column) for column, form in enumerate(forms, 1)) for row in range(rows)
    )
    return f"INSERT INTO {table_name} ({', '.join(columns)}) VALUES ({'), ('.join(tuples)})"  # noqa: S608  no values


@dataclass(frozen=True, slots=True)
class OutboxState:
    """What is in the outbox. Counts are of messages, except `rows`."""

    pending: int = 0  # not yet sent, as far as the database knows
    oldest_s: float = 0.0  # the age of the oldest pending message
    overdue: int = 0  # pending messages that a relay should have taken by now
    set_aside: int = 0
    rows: int = 0  # batches, pending and set aside
    subjects: dict[str, int] = field(default_factory=dict)  # pending messages, by subject


@dataclass(frozen=True, slots=True)
class RefusedBatch:
    """A batch that a broker refused for good."""

    id: str
    subject: str
    messages: int
    created_ms: int
    error: str
    body: bytes


class Claimed(NamedTuple):
    """Rows that the caller has leased."""

    rows: list[OutboxRow]
    is_cut: bool = False  # more rows were due, and `bytes_max` left no room for them


class Before(enum.Enum):
    """The state of the first unsent row before another in its stream."""

    NOTHING = "nothing"  # there is no such row
    HELD = "held"  # a relay, or its writer, has it under way
    FREE = "free"  # any relay may take it


class _Form:
    """The statements that depend on which columns the table has."""

    def __init__(self, table: Table, some: sa.ColumnElement[bool], extra: Sequence[str]) -> None:
        """`extra`: columns besides those that every table has."""
        self.extra = tuple(extra)
        self.columns = (*COLUMNS, *extra)
        self.inserts: dict[int, str] = {}
        self.piggyback: dict[int, PipelinedStatement] = {}
        columns = table.c
        named = [*(columns[name] for name in COLUMNS), columns.error, *(columns[name] for name in extra)]
        self.reading = sa.select(*named)
        self.reading_some = self.reading.where(some)
        given: dict[str, Any] = {"stream": sa.bindparam("into"), "place": sa.bindparam("at")}
        given |= {name: sa.bindparam(f"own_{name}") for name in extra}
        self.stamping = sa.update(table).where(columns.id == sa.bindparam("one")).values(given)

    def of(self, row: OutboxRow) -> tuple[str | None, ...]:
        """A row's values in the extra columns."""
        return tuple(row.group if name == GROUP else row.secret for name in self.extra)


class OutboxRows:
    """The statements for one table, in the form that the database takes.

    Relays of a cluster and relays of one broker leave each other's rows alone: only relays of the kind that began a
    stream know where its rows must be sent.
    """

    def __init__(self, table: Table, dialect: Dialect, *, is_cluster: bool = False) -> None:
        self.table = table
        self._is_cluster = is_cluster
        self._known: frozenset[str] = frozenset()  # columns of `_ADDED` that the table has
        self._name = dialect.identifier_preparer.format_table(table)
        self._paramstyle = dialect.paramstyle
        # aiomysql 0.3 asks PyMySQL to quote bytes with a function that PyMySQL 1.2 no longer has.
        self._is_hex = dialect.driver == "aiomysql"
        columns = table.c
        self._some = some = _some(columns.id, dialect)
        self._form = _Form(table, some, [GROUP] if is_cluster else [])
        self._sizes = sa.select(columns.id, sa.func.length(columns.body))
        self._deleting = sa.delete(table).where(some)
        self._leasing = sa.update(table).where(some).values(wake_ms=sa.bindparam("wake"), error=None)
        self._noting = sa.update(table).where(some).values(wake_ms=sa.bindparam("wake"), error=sa.bindparam("sentence"))
        self._unstamping = sa.update(table).where(some)

    # --- writing -----------------------------------------------------------------------------------------------------

    def insert(self, connection: Any, rows: Sequence[OutboxRow]) -> None:
        """Insert the rows in the transaction of the driver's connection."""
        cursor, form = connection.cursor(), self._form
        try:
            if len(rows) == 1:
                cursor.execute(self._insert(form, 1), self._values(form, rows[0]))
                return
            for some in _portions(rows):
                values = tuple(chain.from_iterable(self._values(form, row) for row in some))
                cursor.execute(self._insert(form, len(some)), values)
        finally:
            cursor.close()

    def piggyback_statement(self, rows: Sequence[OutboxRow]) -> PiggybackStatement | None:
        """The INSERT for a commit on PostgreSQL to take along. None: the rows are too many or too large, or the table's
        name has letters beyond ASCII, which would have to be written in the database's own encoding."""
        if len(rows) > PIGGYBACK_ROWS_MAX or not self._name.isascii():
            return None
        if sum(len(row.body) for row in rows) > INSERT_BYTES_MAX:
            return None
        form = self._form
        statement = form.piggyback.get(len(rows))
        if statement is None:
            name = self._name.replace("%%", "%")  # SQLAlchemy doubles it for drivers that look for %s in the text
            text = insert_text(name, "numeric_dollar", len(rows), columns=form.columns)
            types, formats = zip(*(_BINARY[column] for column in form.columns), strict=True)
            statement = PipelinedStatement(text.encode(), types * len(rows), formats * len(rows))
            form.piggyback[len(rows)] = statement
        return PiggybackStatement(statement, [value for row in rows for value in self._binary(form, row)])

    def _binary(self, form: _Form, row: OutboxRow) -> tuple[bytes | None, ...]:
        place = (None, None) if row.stream is None or row.place is None else (_int8(row.stream), _int8(row.place))
        values = (
            row.id.encode(), _int8(row.wake_ms), row.subject.encode(), _int8(row.messages), _int8(row.created_ms),
            *place, row.body,
        )  # fmt: skip
        return (*values, *(None if text is None else text.encode() for text in form.of(row)))

    def _values(self, form: _Form, row: OutboxRow) -> tuple[Any, ...]:
        values = (*row.values[:-1], row.body.hex()) if self._is_hex else row.values
        return (*values, *form.of(row))

    def _insert(self, form: _Form, rows: int) -> str:
        text = form.inserts.get(rows)
        if text is None:
            text = insert_text(self._name, self._paramstyle, rows, is_hex=self._is_hex, columns=form.columns)
            form.inserts[rows] = text
        return text

    def delete(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete the rows in one statement; returns how many were still there."""
        return connection.execute(self._deleting, {"ids": sorted(ids)}).rowcount

    # --- for relays --------------------------------------------------------------------------------------------------

    def begin(self, connection: Connection) -> None:
        """On SQLite, take the write lock with a write that changes nothing. SQLite refuses a transaction that reads
        before it writes at once if another connection writes meanwhile, whatever the timeout."""
        if connection.dialect.name == "sqlite":
            connection.execute(self._leasing, {"ids": [""], "wake": 0})

    def claim(self, connection: Connection, now_ms: int, lease_ms: int, rows_max: int, bytes_max: int) -> Claimed:
        """Lease rows whose time has come. No other relay gets them before the lease ends. The caller commits."""
        columns = self.table.c
        self.look(connection)
        query = self._sizes.where(columns.wake_ms <= now_ms).order_by(columns.wake_ms, columns.id).limit(rows_max)
        if self._is_cluster:
            query = query.where(columns.stream.is_(None) | columns[GROUP].is_not(None))
        elif GROUP in self._known:
            query = query.where(columns[GROUP].is_(None))
        return self._claimed(connection, query, {}, now_ms + lease_ms, bytes_max)

    def claim_those(
        self, connection: Connection, ids: Sequence[str], now_ms: int, lease_ms: int, bytes_max: int
    ) -> Claimed:
        """Lease those of the given rows that are not held, whether their time has come or not."""
        if not ids:
            return Claimed([])
        columns = self.table.c
        query = self._sizes.where(self._some, columns.wake_ms < PARKED_MS, ~self._is_held(now_ms))
        query = query.order_by(columns.stream, columns.place)
        return self._claimed(connection, query, {"ids": sorted(ids)}, now_ms + lease_ms, bytes_max)

    def _claimed(
        self, connection: Connection, query: sa.Select[Any], values: dict[str, Any], wake_ms: int, bytes_max: int
    ) -> Claimed:
        """Lease as many of the rows as there is room for, and at least one."""
        query = query.with_for_update(skip_locked=skips_locked(connection.dialect))
        sizes = connection.execute(query, values).all()
        room = sum(1 for total in accumulate(size for _, size in sizes) if total <= bytes_max)
        ids = [str(each.id) for each in sizes[: room or 1]]
        if not ids:
            return Claimed([])
        some = {"ids": sorted(ids)}
        # With their errors, which the lease clears.
        rows = {row.id: row for row in map(_row, connection.execute(self._form.reading_some, some))}
        connection.execute(self._leasing, some | {"wake": wake_ms})
        return Claimed([rows[each] for each in ids], len(ids) < len(sizes))

    def in_order(
        self, connection: Connection, streams: Sequence[int], now_ms: int, rows_max: int
    ) -> list[tuple[str, int, bool]]:
        """Rows of these streams from the first on: the id, the stream, and whether the row is held. The
        statement reads the whole table: an index would cost every program that writes a row."""
        columns = self.table.c
        query = (
            sa.select(columns.id, columns.stream, self._is_held(now_ms))
            .where(columns.stream.in_(streams), columns.wake_ms < PARKED_MS)
            .order_by(columns.stream, columns.place)
            .limit(rows_max)
        )
        return [(str(row_id), int(stream), bool(is_held)) for row_id, stream, is_held in connection.execute(query)]

    def _is_held(self, now_ms: int) -> sa.ColumnElement[bool]:
        """Whether a relay, or the process that wrote the row, has it under way: until they settle it or time is up."""
        columns = self.table.c
        return (columns.wake_ms > now_ms) & columns.error.is_(None)

    def stamp(self, connection: Connection, rows: Sequence[OutboxRow]) -> None:
        """Write down the stream and the place of each row."""
        form = self._form
        given = [
            {"one": row.id, "into": row.stream, "at": row.place}
            | {f"own_{name}": value for name, value in zip(form.extra, form.of(row), strict=True)}
            for row in rows
        ]
        connection.execute(form.stamping, given)

    def note(self, connection: Connection, noted: Sequence[tuple[OutboxRow, int, str]]) -> None:
        """Record why rows could not be sent, and when a relay is to look at them again. This ends their lease."""
        alike: dict[tuple[int, str], list[str]] = {}
        for row, wake_ms, sentence in noted:
            alike.setdefault((wake_ms, sentence[:ERROR_CHARS_MAX]), []).append(row.id)
        for (wake_ms, sentence), ids in alike.items():
            connection.execute(self._noting, {"ids": sorted(ids), "wake": wake_ms, "sentence": sentence})

    def unstamp(self, connection: Connection, ids: Sequence[str], wake_ms: int) -> int:
        """Let a relay choose another stream for rows that are not stored, or whose fate is unknown."""
        return connection.execute(self._unstamped(connection, self._unstamping, wake_ms), {"ids": sorted(ids)}).rowcount

    def leave_streams(self, connection: Connection, rows: Sequence[OutboxRow], wake_ms: int) -> set[str]:
        """`unstamp` for rows that are still at the place the caller knows; returns their ids. A relay whose lease has
        ended may come too late: another relay has moved the row, and the new stream may have it stored."""
        columns = self.table.c
        is_there = (columns.id == sa.bindparam("one"), columns.stream == sa.bindparam("old"))
        update = sa.update(self.table).where(*is_there, columns.place == sa.bindparam("old_place"))
        update = self._unstamped(connection, update, wake_ms)
        found = set()
        for row in sorted(rows, key=lambda row: row.id):
            if connection.execute(update, {"one": row.id, "old": row.stream, "old_place": row.place}).rowcount:
                found.add(row.id)
        return found

    def _unstamped(self, connection: Connection, update: sa.Update, wake_ms: int) -> sa.Update:
        self.look(connection)
        free: dict[str, Any] = {"wake_ms": wake_ms, "stream": None, "place": None, "error": None}
        return update.values(free | dict.fromkeys(self._known))

    def abandon(self, connection: Connection, stream: int, wake_ms: int) -> int:
        """`unstamp` for all unsent rows of a stream."""
        columns = self.table.c
        statement = sa.update(self.table).where(columns.stream == stream, columns.wake_ms < PARKED_MS)
        return connection.execute(self._unstamped(connection, statement, wake_ms)).rowcount

    def at(self, connection: Connection, stream: int, first: int, end: int) -> list[OutboxRow]:
        """The rows whose places in a stream are in the range, in order, held or not."""
        columns = self.table.c
        query = self._form.reading.where(columns.stream == stream, columns.place >= first, columns.place < end)
        return [_row(found) for found in connection.execute(query.order_by(columns.place))]

    def before(self, connection: Connection, row: OutboxRow, now_ms: int) -> Before:
        """Whether an earlier batch of this row's stream is still to be sent."""
        columns = self.table.c
        query = (
            sa.select(self._is_held(now_ms))
            .where(columns.stream == row.stream, columns.place < row.place, columns.wake_ms < PARKED_MS)
            .order_by(columns.place)
            .limit(1)
        )
        first = connection.execute(query).first()
        if first is None:
            return Before.NOTHING
        return Before.HELD if first[0] else Before.FREE

    # --- for people --------------------------------------------------------------------------------------------------

    def state(self, connection: Connection, clock: Clock) -> OutboxState:
        columns, now_ms = self.table.c, clock.wall_ms()
        is_parked = (columns.wake_ms >= PARKED_MS).label("is_parked")
        messages = sa.func.sum(columns.messages)
        overdue = sa.func.sum(sa.case((columns.wake_ms <= now_ms, columns.messages), else_=0))
        query = sa.select(
            columns.subject, is_parked, messages, sa.func.count(), sa.func.min(columns.created_ms), overdue
        ).group_by(columns.subject, is_parked)
        found = connection.execute(query).all()
        waiting = [each for each in found if not each.is_parked]
        oldest_ms = min((each[4] for each in waiting), default=now_ms)
        return OutboxState(
            pending=int(sum(each[2] for each in waiting)),
            oldest_s=max(now_ms - oldest_ms, 0) / 1_000,
            overdue=int(sum(each[5] for each in waiting)),
            set_aside=int(sum(each[2] for each in found if each.is_parked)),
            rows=int(sum(each[3] for each in found)),
            subjects={each[0]: int(each[2]) for each in sorted(waiting, key=lambda each: str(each[0]))},
        )

    def left_of(self, connection: Connection, before_ms: int) -> int:
        """The number of rows that were written by then and are still to be sent."""
        columns = self.table.c
        query = sa.select(sa.func.count()).where(columns.created_ms <= before_ms, columns.wake_ms < PARKED_MS)
        return int(connection.execute(query).scalar_one())

    def set_aside(self, connection: Connection, limit: int) -> list[RefusedBatch]:
        """Batches that brokers refused for good, oldest first."""
        columns = self.table.c
        query = (
            sa.select(columns.id, columns.subject, columns.messages, columns.created_ms, columns.error, columns.body)
            .where(columns.wake_ms >= PARKED_MS)
            .order_by(columns.created_ms, columns.id)
            .limit(limit)
        )
        return [RefusedBatch(*each[:4], each[4] or "", each[5]) for each in connection.execute(query)]

    def retry(self, connection: Connection, ids: Sequence[str] | None, now_ms: int) -> list[str]:
        """Let relays send again the given rows that are set aside, or all of them. Returns the ids of those rows."""
        found = self._parked_ids(connection, ids)
        if found:
            self.unstamp(connection, found, now_ms)
        return found

    def discard(self, connection: Connection, ids: Sequence[str]) -> list[str]:
        """Delete the given rows that are set aside. Returns the ids of the deleted rows."""
        found = self._parked_ids(connection, ids)
        if found:
            self.delete(connection, found)
        return found

    def _parked_ids(self, connection: Connection, ids: Sequence[str] | None) -> list[str]:
        """The ids of rows that are set aside, of these; None: of all."""
        columns = self.table.c
        query = sa.select(columns.id).where(columns.wake_ms >= PARKED_MS).order_by(columns.id).limit(RETRY_ROWS_MAX)
        if ids is not None:
            query = query.where(columns.id.in_(sorted(ids)))
        return [str(each) for each in connection.execute(query).scalars()]

    # --- the table itself --------------------------------------------------------------------------------------------

    def check_table(self, connection: Connection) -> None:
        """Raise `Misuse` if the table is missing."""
        if not sa.inspect(connection).has_table(self.table.name, schema=self.table.schema):
            raise Misuse(f"there is no table {self._name} in {shown(connection.engine.url)}: {REMEDY}")
        self.look(connection)
        if self._is_cluster and GROUP not in self._known:
            raise Misuse(
                f"the table {self._name} is of an earlier version, and has no place for broker groups of a cluster: "
                f"call outbox.create() once, `fairway outbox create`, or add the column {GROUP} with your migrations"
            )

    @property
    def keeps_secrets(self) -> bool:
        """Whether the table is known to have a column for secrets."""
        return SECRET in self._known

    def look(self, connection: Connection) -> None:
        """Look up which columns the table has, while some are missing: a migration may add them at any time."""
        if self._known == _ADDED:
            return
        try:
            found = sa.inspect(connection).get_columns(self.table.name, schema=self.table.schema)
        except NoSuchTableError:
            return
        known = _ADDED & {column["name"] for column in found}
        if SECRET in known and not self.keeps_secrets:
            self._form = _Form(self.table, self._some, [GROUP, SECRET] if self._is_cluster else [SECRET])
        self._known = known


def _some(column: sa.Column[str], dialect: Dialect) -> sa.ColumnElement[bool]:
    """The condition that the id is one of `ids`. PostgreSQL takes them as an array: one statement for any number."""
    if dialect.name == "postgresql":
        ids = sa.bindparam("ids", type_=sa.ARRAY(sa.String))
        return column == sa.any_(ids)
    return column.in_(sa.bindparam("ids", expanding=True))


def _row(found: Any) -> OutboxRow:
    """A row from the columns of `COLUMNS`, the error, and the extra columns."""
    named = found._mapping
    row = OutboxRow(*found[: len(COLUMNS) + 1])
    row.group, row.secret = named.get(GROUP), named.get(SECRET)
    return row


def bytes_max(connection: Connection) -> int | None:
    """The largest value that MySQL or MariaDB takes in one row; None: another database, which takes every message."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        return None
    packet = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
    return (int(packet) - PACKET_SPARE_BYTES) // 2  # where the driver escapes bytes, each may become two


def skips_locked(dialect: Dialect) -> bool:
    """Whether a statement can skip rows that another relay has locked."""
    version = dialect.server_version_info or ()
    if dialect.name == "postgresql":
        return version >= (9, 5)
    if dialect.name in ("mysql", "mariadb"):
        return version >= ((10, 6) if getattr(dialect, "is_mariadb", False) else (8, 0, 1))
    return False


def check_engine(engine: Engine, *, is_shared: bool) -> None:
    """Raise `Misuse` for a database that cannot hold an outbox."""
    if engine.dialect.name not in ("sqlite", "postgresql", "mysql", "mariadb"):
        raise unknown(engine.dialect)
    is_in_memory = engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:")
    if is_shared and (is_in_memory or isinstance(engine.pool, sa.StaticPool)):
        raise Misuse(
            "an SQLite in memory, or a StaticPool, has one connection for all, and whoever commits commits for all: "
            "use a file, or leave the URL of the broker out and run a relay of your own"
        )


def _portions(rows: Sequence[OutboxRow]) -> list[list[OutboxRow]]:
    """The rows in order, in portions that are small enough for one statement."""
    portions: list[list[OutboxRow]] = [[]]
    size_bytes = 0
    for row in rows:
        if portions[-1] and (len(portions[-1]) >= ROWS_MAX or size_bytes + len(row.body) > INSERT_BYTES_MAX):
            portions.append([])
            size_bytes = 0
        portions[-1].append(row)
        size_bytes += len(row.body)
    return portions


class OutboxContent(NamedTuple):
    """One row for a comparison; a row is one batch."""

    subject: str
    body: bytes
    aside: str | None  # why a broker refused the batch; None: it waits to be sent


def contents(
    engine: Engine, table: str = NAME, schema: str | None = None, *, page_rows: int = _PAGE_ROWS
) -> Iterator[OutboxContent]:
    """All rows by id, with a transaction per page. Rows that are written or deleted meanwhile may be among them or not.
    Raises `Misuse` if the table is missing."""
    of = outbox_table(sa.MetaData(), table, schema)
    with engine.connect() as connection:
        OutboxRows(of, engine.dialect).check_table(connection)
    columns = of.c
    wanted = sa.select(columns.id, columns.subject, columns.body, columns.wake_ms, columns.error)
    after = ""
    while True:
        with engine.connect() as connection:
            page = connection.execute(wanted.where(columns.id > after).order_by(columns.id).limit(page_rows)).all()
        for each in page:
            is_aside = each.wake_ms >= PARKED_MS
            yield OutboxContent(
                str(each.subject), bytes(each.body), (each.error or "it was refused") if is_aside else None
            )
        if len(page) < page_rows:
            return
        after = str(page[-1].id)
