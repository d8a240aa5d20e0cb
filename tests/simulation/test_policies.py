"""Simulated histories of a broker with groups that keep an order or coalesce, among all the others."""

from __future__ import annotations

import pytest

from tests.simulation import broker_history

SEEDS = (1, 3, 4, 5, 8, 10, 11, 12, 22)
CHUNK = 3


@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
def test_nothing_contradicts_the_model(first: int) -> None:
    for seed in SEEDS[first : first + CHUNK]:
        outcome = broker_history.run(seed, has_policies=True)
        assert not outcome.breaches, f"seed {seed}: {outcome.breaches[0]}"
        assert outcome.lives >= 4
