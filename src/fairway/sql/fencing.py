"""Fences: no effect of a deposed leader is accepted, because its token is checked in the transaction of the effect.

Each reign of a career has a token, larger than those before. The fence keeps, for each career, the largest token that
was ever seen, and a transaction that shows a smaller one is refused:

    with engine.begin() as connection:
        fence.check(connection, "billing", token)        # Deposed: a later leader has been here
        connection.execute(...)                          # the effect

The row stays locked until the transaction ends. So a new leader's first effect waits until an old leader's last one is
committed or rolled back, and after it the old leader can do nothing more, however late it learns of its fall.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, Table, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from fairway import limits
from fairway.errors import Deposed, Misuse
from fairway.names import GroupName
from fairway.sql.inserting import AsyncBound, Bound, connection_of, insert_one
from fairway.sql.making import ascii_text, make, make_async

_TOKEN_MAX = (1 << 63) - 1


class Fence:
    """A table of the largest tokens; one serves all careers of a database. `create` it once."""

    def __init__(self, engine: Engine | AsyncEngine, table: str = "fairway_fences") -> None:
        self._engine = engine
        self.table = Table(
            table,
            MetaData(),
            Column("career", ascii_text(limits.NAME_CHARS_MAX), primary_key=True),
            Column("token", BigInteger, nullable=False),
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
        )

    def create(self) -> None:
        """Make the table where it is missing."""
        make(self._engine, self.table)

    async def create_async(self) -> None:
        await make_async(self._engine, self.table)

    def check(self, connection: Bound, career: str, token: int) -> None:
        """Go on only if no later leader has been here: otherwise `Deposed`, which is to roll the transaction back."""
        GroupName.parse(career)  # the same alphabet
        if not 0 <= token <= _TOKEN_MAX:
            raise Misuse(f"token {token} of career {career}: a token is from 0 to 2**63 - 1")
        self._pass(connection_of(connection), career, token)

    async def check_async(self, connection: AsyncBound, career: str, token: int) -> None:
        """`check` in a transaction on a loop."""
        await connection.run_sync(lambda bound: self.check(bound, career, token))

    def _pass(self, connection: Connection, career: str, token: int) -> None:
        """Mostly one statement, which locks the row and reads what is committed, whatever the isolation."""
        if self._raise(connection, career, token):
            return
        if insert_one(connection, self.table, {"career": career, "token": token}):
            return
        if self._raise(connection, career, token):  # another has just inserted it, with no larger one
            return
        seen = select(self.table.c.token).where(self.table.c.career == career).with_for_update()
        raise Deposed(career, token, f"token {connection.execute(seen).scalar_one()} was seen")

    def _raise(self, connection: Connection, career: str, token: int) -> bool:
        columns = self.table.c
        raised = update(self.table).where(columns.career == career, columns.token <= token).values(token=token)
        return connection.execute(raised).rowcount > 0
