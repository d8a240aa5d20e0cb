"""What a group of servers still owes, as its master says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairway.errors import FairwayError
from fairway.meta import decommission_check
from fairway.protocol.delay_messages import Tallied, TransitReport


class Answering:
    """An `Inquirer` whose server always says the same."""

    def __init__(self, answer: Tallied) -> None:
        self._answer = answer

    async def ask(self, *_: Any) -> Tallied:
        return self._answer


def pending(answer: Tallied) -> str:
    return asyncio.run(decommission_check._pending(Answering(answer))).sentence  # type: ignore[arg-type]


def test_a_delay_server_owes_what_is_pending_and_what_is_on_its_way() -> None:
    assert pending(Tallied(0, [], [])) == ""
    transit = [TransitReport("west", 1_200, is_reachable=False)]
    said = pending(Tallied(3, [], transit))
    assert said == "3 delayed messages are pending and 1,200 are on their way to their broker groups (west 1,200)"


def test_a_delay_server_that_does_not_count_what_is_on_its_way_is_not_taken_for_empty() -> None:
    with pytest.raises(FairwayError, match="of an older version, which does not count what is on its way: upgrade it"):
        pending(Tallied(0))
