"""A candidate in a process of its own: `python -m tests.crash.career_worker ORDERS`.

Its career writes one row per piece of work into a database, in a transaction that shows its token to a fence first. It
says what it does in lines of JSON, [monotonic ms, what, token], each as soon as it is so; on Linux that clock is the
same for all processes. SIGTERM: hand over, and end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

import fairway
from fairway.sql import Fence

CAREER = "ledger"
THINK_S = 0.03  # at most, before a piece of work is written down: most stops fall here
PIECES_MAX = 400  # then another one may have its turn
METADATA = sa.MetaData()
EFFECTS = sa.Table(
    "effects",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String(50), nullable=False),
)


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    name: str
    hosts: str
    path: str
    session_ms: int
    database: str
    seed: str
    in_hand: str = "finish"
    is_fenced: bool = True  # planted: one that trusts the election alone


def engine_of(url: str) -> sa.Engine:
    """A leader that stops in the middle of a transaction must not keep the fence locked for ever."""
    if url.startswith("sqlite"):
        return sa.create_engine(url, connect_args={"timeout": 30})
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def bound(connection: Any, _record: object) -> None:
        for name, ms in (("idle_in_transaction_session_timeout", 1_000), ("lock_timeout", 20_000)):
            connection.execute(f"SET {name} = {ms}")
        connection.commit()

    return engine


class Ledger(fairway.Career):
    """Rows with consecutive numbers, each with the token of the reign that wrote it."""

    name = CAREER

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._rng = random.Random(orders.seed)
        self._engine = engine_of(orders.database)
        self._fence = Fence(self._engine)
        self._pieces_left = 0

    def inaugurate(self) -> None:
        self._say("inaugurated", self.leadership.token)
        self._pieces_left = self._rng.randrange(1, PIECES_MAX)

    def execute(self, token: int) -> bool:
        time.sleep(self._rng.random() * THINK_S)
        try:
            self._write(token)
        except fairway.Deposed as error:
            self._say("refused" if "was seen" in str(error) else "aborted", token)
            raise
        except sa.exc.IntegrityError:  # two write at once: only where there is no fence
            if self._orders.is_fenced:
                raise
            return True
        except (sa.exc.OperationalError, sa.exc.InternalError) as error:
            if not any(word in str(error) for word in ("timeout", "terminat", "closed", "lost")):
                raise
            self._say("interrupted", token)  # its transaction was ended: it was stopped for too long
            self._engine.dispose()
            return True
        self._say("wrote", token)
        self._pieces_left -= 1
        return self._pieces_left > 0

    def _write(self, token: int) -> None:
        with self._engine.begin() as connection:
            if self._orders.is_fenced:
                self._fence.check(connection, CAREER, token)
            if self.in_hand == "abort":
                self.leadership.check()
            last = connection.execute(sa.select(sa.func.max(EFFECTS.c.number))).scalar() or 0
            row = {"number": last + 1, "token": token, "who": self._orders.name}
            connection.execute(sa.insert(EFFECTS), row)

    def hand_over(self) -> None:
        time.sleep(self._rng.random() * THINK_S)
        token = self.leadership.token
        self._say("handed over" if self.leadership.holds else "handed over late", token)

    def _say(self, what: str, token: int) -> None:
        sys.stdout.write(json.dumps([time.monotonic_ns() // 1_000_000, what, token]) + "\n")
        sys.stdout.flush()


class Hasty(Ledger):
    """The same, with what is in hand broken off."""

    in_hand = "abort"


def main(argv: Sequence[str]) -> int:
    orders = msgspec.json.decode(argv[0], type=Orders)
    career: Any = Hasty(orders) if orders.in_hand == "abort" else Ledger(orders)
    fairway.elect(career, zookeeper=orders.hosts, path=orders.path, session_ms=orders.session_ms)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
