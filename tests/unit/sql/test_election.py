"""A lease in each database: taken, kept, taken over, given back; and what a missing table is called there."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from fairway.runtime.clock import ManualClock
from fairway.sql import SqlElection
from fairway.sql.election import NoElection
from tests.unit.career.test_sql_election import Witness

LEASE_MS = 600


def test_office_changes_hands(engine: sa.Engine) -> None:
    clock = ManualClock()
    one, two = (SqlElection(engine, "clerk", lease_ms=LEASE_MS, clock=clock) for _ in range(2))
    first, second = Witness(clock), Witness(clock)
    one.create()
    two.create()
    one._attend(first)
    for _ in range(10):  # the leader lives: nobody else rules
        clock.advance(LEASE_MS / 2)
        one._attend(first)
        two._attend(second)
    assert (first.tokens, second.tokens) == ([1], [])
    clock.advance(LEASE_MS)
    two._attend(second)  # it does not beat any more
    assert second.tokens == [2]
    one._attend(first)
    assert first.confirmation is None
    two._withdraw()
    one._attend(first)
    assert first.tokens == [1, 3]


def test_missing_table_is_no_passing_trouble(engine: sa.Engine) -> None:
    with pytest.raises(NoElection, match="fairway_elections"):
        SqlElection(engine, "clerk")._attend(Witness(ManualClock()))
