"""A bucket fills at its rate. Subjects are made at a rate, and one connection gets half of it."""

from __future__ import annotations

import gc

import pytest

from fairway import limits
from fairway.errors import Code, Refused
from fairway.runtime.clock import ManualClock
from fairway.serving.rates import CreationRate, TokenBucket

S_NS = 1_000_000_000


class Connection:
    """Whoever makes subjects."""


def makes(rate: CreationRate, connection: Connection, most: int) -> int:
    """How many it may make at once."""
    made, told = 0, None
    while made < most and told is None:
        try:
            rate.check(connection)
        except Refused as refused:
            told = refused
        else:
            rate.note(connection)
            made += 1
    if told is None:
        return made
    assert told.code is Code.BUSY
    assert told.retry_after_ms is not None
    assert 0 < told.retry_after_ms <= 1_000
    return made


def test_a_burst_and_then_a_rate() -> None:
    clock, flood, honest = ManualClock(), Connection(), Connection()
    rate = CreationRate(clock)
    half = limits.SUBJECTS_CREATED_BURST // 2
    assert makes(rate, flood, 10_000) == half
    assert makes(rate, honest, 500) == 500
    clock.advance(10_000)
    assert makes(rate, flood, 10_000) == 10 * limits.SUBJECTS_CREATED_PER_S // 2
    assert makes(rate, honest, 100) == 100


def test_any_number_of_connections_together_have_the_rate_of_all() -> None:
    clock = ManualClock()
    rate = CreationRate(clock)
    made = sum(makes(rate, Connection(), 100) for _ in range(40))
    assert made == limits.SUBJECTS_CREATED_BURST
    clock.advance(1_000)
    assert sum(makes(rate, Connection(), 100) for _ in range(5)) == limits.SUBJECTS_CREATED_PER_S


def test_a_connection_that_is_gone_is_forgotten() -> None:
    rate = CreationRate(ManualClock())
    connection = Connection()
    rate.note(connection)
    assert len(rate._shares) == 1
    del connection
    gc.collect()
    assert len(rate._shares) == 0


@pytest.mark.parametrize("wait_ms", [1, 1_000_000_000])
def test_no_more_than_the_burst_is_saved(wait_ms: int) -> None:
    clock = ManualClock()
    rate = CreationRate(clock)
    clock.advance(wait_ms)
    assert makes(rate, Connection(), 10_000) == limits.SUBJECTS_CREATED_BURST // 2


def test_a_bucket_fills_at_its_rate_and_no_further_than_its_brim() -> None:
    bucket = TokenBucket(10, 5, 0, is_full=True)
    assert bucket.tokens(0) == 5
    bucket.take(5)
    assert (bucket.tokens(0), bucket.wait_ns()) == (0, S_NS // 10)
    assert bucket.tokens(S_NS // 10) == 1
    assert bucket.tokens(100 * S_NS) == 5
    assert TokenBucket(10, 5, 0, is_full=False).tokens(0) == 0
