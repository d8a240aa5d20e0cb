"""An election by a lease in a user's own database: for programs that have one, and no ZooKeeper.

    fairway.elect(Billing(), election=SqlElection(engine, "billing"))

One row per career: the token of the last reign, who holds it, and a *beat*, a number that the leader raises six times
per lease. No clock of the database is used, nor compared with another: a candidate that has seen the same beat for a
whole lease, by its own monotonic clock, takes the office over, by a compare-and-set that demands that very beat. So

- nobody takes over before a lease has passed since the candidate first saw the leader's last beat, which was after the
  leader sent it; the leader counts its certainty from before it sent it, and for two thirds of a lease;
- of several candidates one succeeds, and the token grows by one with each reign;
- what the candidate read may have been old: the beat in the statement is compared with what is committed now.

A lease lasts as long as the row says, which is what its leader has chosen. Candidates look six times per lease, so that
is how soon an office that was handed over is taken up; an office whose leader vanished is empty for a lease and a bit.
Give it the primary database: on a replica nobody can rule.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, MetaData, Table, Update, select, update
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from fairway.career.election import ElectionListener
from fairway.career.law import Confirmation
from fairway.career.secretary import ElectionThread
from fairway.errors import FairwayError, Misuse
from fairway.names import GroupName
from fairway.sql.inserting import insert_unless_there
from fairway.sql.making import ascii_text, make
from fairway.world.clock import Clock, RealClock
from fairway.world.rng import RealRng, Rng

LEASE_MS = 10_000
LEASE_MS_MIN = 100

_CERTAIN = 2 / 3  # of a lease
_LOOKS_PER_LEASE = 6
_NOBODY = ""

_log = logging.getLogger("fairway.career")


class NoElection(FairwayError):
    """The database cannot hold the election; the sentence says why."""


class _Row(NamedTuple):
    token: int
    holder: str
    beat: int
    lease_ms: int


class SqlElection(ElectionThread):
    """One candidate's place before a row. There is no line: of those who look, the first one that may takes over."""

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
        self._word = ""  # of this standing
        self._seen: _Row | None = None
        self._seen_ns = 0
        self._token = 0
        self._is_elected = False
        self._is_suspended = False
        self._forget()
        self.table = Table(
            table,
            MetaData(),
            Column("career", ascii_text(200), primary_key=True),
            Column("token", BigInteger, nullable=False),
            Column("holder", ascii_text(24), nullable=False),
            Column("beat", BigInteger, nullable=False),
            Column("lease_ms", Integer, nullable=False),
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
        )

    def create(self) -> None:
        """Make the table where it is missing; all careers of a database share it."""
        make(self._engine, self.table)

    # --- the form ----------------------------------------------------------------------------------------------------

    def _attend(self, listener: ElectionListener) -> float | None:
        try:
            if self._is_elected:
                self._confirm(listener)
            else:
                self._look(listener)
        except ProgrammingError as error:  # no such table, no permission: nothing that passes
            self._fail(listener, error)
            return None
        except DBAPIError as error:
            if isinstance(error, OperationalError) and "no such table" in str(error.orig):  # SQLite's way to say it
                self._fail(listener, error)
                return None
            _log.warning("election of %s: the database does not answer: %s", self._career, error.orig)
            if self._is_elected and not self._is_suspended:
                self._is_suspended = True
                listener.suspended()
        return self._lease_ms / 1e3 / _LOOKS_PER_LEASE

    def _withdraw(self) -> None:
        """Leave the row to whoever comes; where it cannot be reached, its lease runs out."""
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
        if row.holder == self._word:  # taken by a statement whose answer was lost: see whether it still is ours
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
        """Whether it has changed the row, in a transaction that is committed."""
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
        """Whether this very beat was seen a whole lease ago."""
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
            return
        token = self._token
        self._forget()
        self._is_running = False
        listener.lost(token)

    def _confirmation(self, asked_ns: int) -> Confirmation:
        lease_ns = self._lease_ms * 1_000_000
        return Confirmation(self._token, asked_ns + int(_CERTAIN * lease_ns), asked_ns + lease_ns)

    # --- going -------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """The next standing has another word: what this one may have left behind is not its own."""
        self._is_elected = self._is_suspended = False
        self._seen = None
        self._word = f"{self._rng.bits(96):024x}"

    def _fail(self, listener: ElectionListener, error: DBAPIError) -> None:
        self._is_running = False
        failure = NoElection(f"the election of {self._career}: {error.orig}. `create()` makes its table")
        failure.__cause__ = error
        listener.failed(failure)
