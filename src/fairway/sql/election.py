"""Leader election by a lease in the user's own database, and the fence against deposed leaders.

`Fence` refuses the effects of a deposed leader. Each reign of a career has a token, larger than all before. The fence
keeps the largest token that was seen for each career, and refuses a transaction that shows a smaller one:

    with engine.begin() as connection:
        fence.check(connection, "billing", token)        # Deposed: a later leader has been here
        connection.execute(...)                          # the effect

The row stays locked until the transaction ends. A new leader's first effect therefore waits until the old leader's last
effect is committed or rolled back. After that first effect the old leader can do nothing more, however late it learns
that it was deposed.

`SqlElection` is for programs that have a database and no ZooKeeper:

    fairway.elect(Billing(), election=SqlElection(engine, "billing"))

The table has one row per career: the token of the last reign, its holder, and a *beat*. The leader raises the beat six
times per lease. No clock of the database is used, or compared with another. A candidate that has seen the same beat for
a whole lease, by its own monotonic clock, takes the lead with a compare-and-set on that very beat. Three properties
follow:

- Nobody takes over before a lease has passed since the candidate first saw the leader's last beat. The candidate saw
  that beat after the leader sent it. The leader counts its certainty from before the sending, and only for two thirds
  of a lease.
- Of several candidates one succeeds, and the token grows by one with each reign.
- A candidate may have read old data. The database compares the beat in the statement with the committed beat.

The lease is the one in the row, which the leader chose. A candidate looks at the row six times per lease of its own, so
a lead that was handed over is soon taken up. After a leader vanishes, nobody leads for a lease and a little more. The
engine must be that of the primary database: on a read-only replica nobody can lead.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, Update, select, update
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine

from fairway import limits
from fairway.career.election import ElectionListener, ElectionThread
from fairway.career.state_machine import Confirmation
from fairway.errors import Deposed, FairwayError, Misuse
from fairway.names import GroupName
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.rng import RealRng, Rng
from fairway.sql.database import (
    AsyncBound,
    Bound,
    ascii_text,
    connection_of,
    insert_one,
    insert_unless_there,
    make,
    make_async,
    new_table,
)

_TOKEN_MAX = (1 << 63) - 1


class Fence:
    """A table with the largest token of each career. One table serves all careers of a database; `create` it once."""

    def __init__(self, engine: Engine | AsyncEngine, table: str = "fairway_fences") -> None:
        self._engine = engine
        self.table = new_table(
            table,
            Column("career", ascii_text(limits.NAME_CHARS_MAX), primary_key=True),
            Column("token", BigInteger, nullable=False),
        )

    def create(self) -> None:
        """Make the table where it is missing."""
        make(self._engine, self.table)

    async def create_async(self) -> None:
        await make_async(self._engine, self.table)

    def check(self, connection: Bound, career: str, token: int) -> None:
        """Raise `Deposed` if a later leader has been here; the caller then rolls its transaction back."""
        GroupName.parse(career)  # careers and groups have the same alphabet
        if not 0 <= token <= _TOKEN_MAX:
            raise Misuse(f"token {token} of career {career}: a token is from 0 to 2**63 - 1")
        self._pass(connection_of(connection), career, token)

    async def check_async(self, connection: AsyncBound, career: str, token: int) -> None:
        """`check` for asyncio."""
        await connection.run_sync(lambda bound: self.check(bound, career, token))

    def _pass(self, connection: Connection, career: str, token: int) -> None:
        """Mostly one statement, which locks the row and reads committed data under any isolation level."""
        if self._raise(connection, career, token):
            return
        if insert_one(connection, self.table, {"career": career, "token": token}):
            return
        if self._raise(connection, career, token):  # another transaction has just inserted a token that is not larger
            return
        seen = select(self.table.c.token).where(self.table.c.career == career).with_for_update()
        raise Deposed(career, token, f"token {connection.execute(seen).scalar_one()} was seen")

    def _raise(self, connection: Connection, career: str, token: int) -> bool:
        columns = self.table.c
        raised = update(self.table).where(columns.career == career, columns.token <= token).values(token=token)
        return connection.execute(raised).rowcount > 0


LEASE_MS = 10_000
LEASE_MS_MIN = 100

_CERTAIN = 2 / 3  # of a lease: for so long after a beat the leader is certain to lead
_LOOKS_PER_LEASE = 6
_NOBODY = ""

_log = logging.getLogger("fairway.career")


class NoElection(FairwayError):
    """The database cannot hold the election; the message says why."""


class _Row(NamedTuple):
    token: int
    holder: str
    beat: int
    lease_ms: int


class SqlElection(ElectionThread):
    """One candidate. Candidates form no queue: the first one that looks at a free row takes the lead."""

    def __init__(
        self,
        engine: Engine,
        career: str,
        *,
        lease_ms: int = LEASE_MS,
        table: str = "fairway_elections",
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise Misuse(f"an election asks in a thread of its own: give it an Engine, not {type(engine).__name__}")
        if lease_ms < LEASE_MS_MIN:
            raise Misuse(f"lease_ms={lease_ms}: at least {LEASE_MS_MIN}")
        super().__init__()
        self._engine = engine
        self._career = str(GroupName.parse(career))
        self._lease_ms = lease_ms
        self._clock = clock or RealClock()
        self._rng = rng or RealRng()
        self._word = ""  # this candidacy's random mark in the column `holder`
        self._seen: _Row | None = None
        self._seen_ns = 0
        self._forget()
        self.table = new_table(
            table,
            Column("career", ascii_text(200), primary_key=True),
            Column("token", BigInteger, nullable=False),
            Column("holder", ascii_text(24), nullable=False),
            Column("beat", BigInteger, nullable=False),
            Column("lease_ms", Integer, nullable=False),
        )

    def create(self) -> None:
        """Make the table where it is missing; all careers of a database share it."""
        make(self._engine, self.table)

    def _attend(self, listener: ElectionListener) -> float | None:
        try:
            if self._is_elected:
                self._confirm(listener)
            else:
                self._look(listener)
        except ProgrammingError as error:  # no such table, or no permission: retrying does not help
            self._fail(listener, self._failure(error), error)
            return None
        except DBAPIError as error:
            if isinstance(error, OperationalError) and "no such table" in str(error.orig):  # SQLite's form of it
                self._fail(listener, self._failure(error), error)
                return None
            _log.warning("election of %s: the database does not answer: %s", self._career, error.orig)
            self._suspend(listener)
        return self._lease_ms / 1e3 / _LOOKS_PER_LEASE

    def _withdraw(self) -> None:
        """Give the lead up. If the database cannot be reached, the lease runs out by itself."""
        try:
            if self._is_elected:
                self._hits(self._own(self._token).values(holder=_NOBODY))
        except DBAPIError as error:
            _log.warning("election of %s: the lease is left to run out: %s", self._career, error.orig)
        self._forget()

    # --- looking, taking, confirming ---------------------------------------------------------------------------------

    def _look(self, listener: ElectionListener) -> None:
        with self._engine.begin() as connection:
            row = self._read(connection)
        if row.holder == self._word:  # the answer to our UPDATE was lost: check that the row is still ours
            token, claim = row.token, self._beat(row.token)
        elif row.holder == _NOBODY or self._is_dead(row):
            token, claim = row.token + 1, self._take(row)
        else:
            return
        asked_ns = self._clock.monotonic_ns()
        if self._hits(claim):
            self._token, self._is_elected, self._seen = token, True, None
            listener.elected(self._confirmation(asked_ns))

    def _hits(self, statement: Update) -> bool:
        """Whether the statement changed the row. Its transaction is committed by then."""
        with self._engine.begin() as connection:
            count = connection.execute(statement).rowcount
        return count == 1

    def _read(self, connection: Connection) -> _Row:
        columns = self.table.c
        asked = select(columns.token, columns.holder, columns.beat, columns.lease_ms).where(
            columns.career == self._career
        )
        found = connection.execute(asked).one_or_none()
        if found is None:
            first = {"career": self._career, "token": 0, "holder": _NOBODY, "beat": 0, "lease_ms": self._lease_ms}
            connection.execute(insert_unless_there(self.table, connection.dialect), first)
            return _Row(0, _NOBODY, 0, self._lease_ms)
        return _Row(*found)

    def _is_dead(self, row: _Row) -> bool:
        """Whether this candidate first saw this very beat at least a lease ago."""
        now_ns = self._clock.monotonic_ns()
        if row != self._seen:
            self._seen, self._seen_ns = row, now_ns
        return now_ns - self._seen_ns >= row.lease_ms * 1_000_000

    def _take(self, row: _Row) -> Update:
        columns = self.table.c
        return (
            update(self.table)
            .where(columns.career == self._career, columns.token == row.token)
            .where(columns.holder == row.holder, columns.beat == row.beat)
            .values(token=row.token + 1, holder=self._word, beat=0, lease_ms=self._lease_ms)
        )

    def _beat(self, token: int) -> Update:
        return self._own(token).values(beat=self.table.c.beat + 1)

    def _own(self, token: int) -> Update:
        columns = self.table.c
        return update(self.table).where(
            columns.career == self._career, columns.token == token, columns.holder == self._word
        )

    def _confirm(self, listener: ElectionListener) -> None:
        asked_ns = self._clock.monotonic_ns()
        if self._hits(self._beat(self._token)):
            self._is_suspended = False
            listener.confirmed(self._confirmation(asked_ns))
        else:
            self._lose(listener)

    def _confirmation(self, asked_ns: int) -> Confirmation:
        lease_ns = self._lease_ms * 1_000_000
        return Confirmation(self._token, asked_ns + int(_CERTAIN * lease_ns), asked_ns + lease_ns)

    # --- going --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Choose a new mark for the next candidacy, which must not take an old row of this one for its own."""
        super()._forget()
        self._seen = None
        self._word = f"{self._rng.bits(96):024x}"

    def _failure(self, error: DBAPIError) -> NoElection:
        return NoElection(f"the election of {self._career}: {error.orig}. `create()` makes its table")
