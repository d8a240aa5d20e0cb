"""Elections by a lease in a database: who may take over, and when; with answers that are lost and leaders that stop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from fairway.career.state_machine import Confirmation
from fairway.errors import Misuse
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.sql import SqlElection
from fairway.sql.election import NoElection, _Row
from tests.unit.career.stage import Candidate, Clerk, Diary, running

LEASE_MS = 600


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 10})
    SqlElection(made, "clerk").create()
    yield made
    made.dispose()


def stand(who: str, diary: Diary, engine: sa.Engine) -> Candidate:
    return Candidate(Clerk(who, diary), SqlElection(engine, "clerk", lease_ms=LEASE_MS))


def test_office_that_is_handed_over_is_taken_up_with_a_larger_token(engine: sa.Engine) -> None:
    diary = Diary()
    first = stand("first", diary, engine)
    diary.until("first executes")
    second = stand("second", diary, engine)
    with running(first, second):
        first.end()
        diary.until("second executes")
        assert isinstance(first.career, Clerk)
        assert isinstance(second.career, Clerk)
        assert (first.career.tokens, second.career.tokens) == ([1], [2])
    assert diary.lines == [f"{who} {does}" for who in ("first", "second")
                           for does in ("inaugurates", "executes", "hands over")]  # fmt: skip


def test_leader_that_is_cut_off_from_the_database_stops_before_another_one_rules(
    engine: sa.Engine, tmp_path: Path
) -> None:
    diary = Diary()
    cut_off = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    is_cut: list[bool] = []

    @sa.event.listens_for(cut_off, "before_cursor_execute")
    def fail(*_: Any) -> None:
        if is_cut:
            raise OperationalError("statement", {}, Exception("the network is down"))

    first = stand("first", diary, cut_off)
    diary.until("first executes")
    second = stand("second", diary, engine)
    held: list[bool] = []

    class Watching(Clerk):
        def inaugurate(self) -> None:
            held.append(first.career._leadership is not None and first.career._leadership.holds)
            super().inaugurate()

    second.career.__class__ = Watching
    with running(second, first):
        is_cut.append(True)
        diary.until("second executes")
        assert held == [False]
        diary.until("first hands over")
        is_cut.clear()
        second.end()
        diary.until("first executes", times=2)
    cut_off.dispose()


def test_row_that_somebody_takes_away_is_an_office_lost(engine: sa.Engine) -> None:
    diary = Diary()
    first = stand("first", diary, engine)
    with running(first):
        diary.until("first executes")
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE fairway_elections SET token = 40, holder = ''"))
        diary.until("first executes", times=2)
        assert isinstance(first.career, Clerk)
        assert first.career.tokens == [1, 41]


def test_missing_table_is_said_with_its_remedy() -> None:
    lost = Candidate(Clerk("first", Diary()), SqlElection(sa.create_engine("sqlite://"), "clerk"))
    lost.join()
    assert isinstance(lost.raised, NoElection)
    assert "no such table: fairway_elections. `create()` makes its table" in str(lost.raised)


def test_what_cannot_be_right_is_said() -> None:
    with pytest.raises(Misuse, match="at least 100"):
        SqlElection(sa.create_engine("sqlite://"), "clerk", lease_ms=1)
    with pytest.raises(Misuse, match="give it an Engine, not str"):
        SqlElection("sqlite://", "clerk")  # type: ignore[arg-type]


# --- every order of steps --------------------------------------------------------------------------------------------


class Witness:
    """What one candidate was told."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.confirmation: Confirmation | None = None
        self.tokens: list[int] = []

    def elected(self, confirmation: Confirmation) -> None:
        self.confirmation = confirmation
        self.tokens.append(confirmation.token)

    def confirmed(self, confirmation: Confirmation) -> None:
        assert self.confirmation is not None
        assert confirmation.token == self.confirmation.token
        self.confirmation = confirmation

    def suspended(self) -> None:
        """It says nothing about who rules."""

    def lost(self, token: int) -> None:
        assert self.confirmation is not None
        assert token == self.confirmation.token
        self.confirmation = None

    resigned = closed = suspended

    def failed(self, error: Exception) -> None:
        raise error

    @property
    def is_certain(self) -> bool:
        return self.confirmation is not None and self._clock.monotonic_ns() < self.confirmation.until_ns


class Shaky(SqlElection):
    """Its statements fail now and then, before or after they are done; and time passes meanwhile."""

    chance: random.Random
    time: ManualClock

    def _hits(self, statement: Any) -> bool:
        self.time.advance(self.chance.random() * LEASE_MS / 4)
        kind = self.chance.randrange(8)
        if kind == 0:
            raise OperationalError("statement", {}, Exception("not sent"))
        done = super()._hits(statement)
        self.time.advance(self.chance.random() * LEASE_MS / 4)
        if kind == 1:
            raise OperationalError("statement", {}, Exception("not answered"))
        return done


class Hasty(Shaky):
    """Planted: it waits for a fifth of a lease only."""

    def _is_dead(self, row: _Row) -> bool:
        return super()._is_dead(row._replace(lease_ms=row.lease_ms // 5))


def play(seed: int, kind: type[Shaky]) -> int:
    """How many reigns there were; AssertionError where two were certain at once, or a token was not larger."""
    chance, clock = random.Random(seed), ManualClock()
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    elections = [
        kind(engine, "clerk", lease_ms=LEASE_MS, clock=clock, rng=SeededRng(f"{seed}/{number}")) for number in range(3)
    ]
    elections[0].create()
    witnesses = [Witness(clock) for _ in elections]
    for election in elections:
        election.chance, election.time = chance, clock
    for _ in range(150):
        number = chance.randrange(len(elections))
        election, witness = elections[number], witnesses[number]
        if chance.randrange(25) == 0:
            election._withdraw()
            witness.confirmation = None
        else:
            election._attend(witness)
        clock.advance(chance.random() * LEASE_MS / 3)
        assert sum(each.is_certain for each in witnesses) <= 1, "two are certain at once"
    tokens = [each.tokens for each in witnesses]
    assert all(own == sorted(set(own)) for own in tokens)
    everybody = [token for own in tokens for token in own]
    assert len(everybody) == len(set(everybody))
    engine.dispose()
    return len(everybody)


def test_two_are_never_certain_at_once() -> None:
    assert sum(play(seed, Shaky) for seed in range(15)) > 45


def test_haste_would_be_seen() -> None:
    with pytest.raises(AssertionError, match="certain at once"):
        _ = [play(seed, Hasty) for seed in range(20)]


def test_lost_answer_of_taking_over_is_found_out() -> None:
    """It was done though nobody said so: the candidate rules, and does not wait for itself to die."""

    class Mute(SqlElection):
        is_mute = True

        def _hits(self, statement: Any) -> bool:
            done = super()._hits(statement)
            if self.is_mute:
                self.is_mute = False
                raise OperationalError("statement", {}, Exception("not answered"))
            return done

    clock = ManualClock()
    election = Mute(sa.create_engine("sqlite://", poolclass=sa.StaticPool), "clerk", clock=clock)
    election.create()
    witness = Witness(clock)
    election._attend(witness)
    assert witness.confirmation is None
    election._attend(witness)
    assert witness.tokens == [1]


def test_candidates_wait_as_long_as_the_leader_has_chosen(engine: sa.Engine) -> None:
    clock = ManualClock()
    leader = SqlElection(engine, "clerk", lease_ms=10_000, clock=clock)
    other = SqlElection(engine, "clerk", lease_ms=1_000, clock=clock)
    told, watching = Witness(clock), Witness(clock)
    leader._attend(told)
    for _ in range(5):
        other._attend(watching)
        clock.advance(1_999)
    other._attend(watching)
    assert not watching.tokens
    clock.advance(100)
    other._attend(watching)
    assert watching.tokens == [2]
    assert not told.is_certain
