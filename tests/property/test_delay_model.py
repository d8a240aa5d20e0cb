"""The delay engine against a model, on virtual time: months pass, the power goes, buckets split, clocks jump."""

from __future__ import annotations

import pytest

from tests.property.delay_story import Story


@pytest.mark.parametrize("seed", range(12))
def test_each_message_goes_out_once_never_early_and_never_after_cancelled(seed: int) -> None:
    Story(seed).run(steps=120)
