"""Coalescing against a naive model, and proof that the model finds what it is for: books with one fault each."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fairway.client.coalescing import CoalescedRequest, CoalescingTable, RequestStatus, _KeyQueue
from tests.property.coalescing_model import BookMachine

TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=40)


class EndsForAnybody(CoalescingTable[str]):
    """As the machine was first written down: whoever calls it, the head is gone."""

    def end(self, place: CoalescedRequest[str], now_ns: int) -> bool:
        coordinator = self._queues.get(place.key)
        return coordinator is not None and coordinator.head is not None and super().end(coordinator.head, now_ns)


class NeverEvicts(CoalescingTable[str]):
    def _evict(self, key: str, coordinator: _KeyQueue[str], now_ns: int) -> None:
        coordinator.due_ns = now_ns + 1


class KeepsIdleMachines(CoalescingTable[str]):
    def sweep(self, now_ns: int) -> int:
        return 0


class ForgetsWhoWaits(CoalescingTable[str]):
    """The head takes the tail with it."""

    def _dequeue(self, key: str, coordinator: _KeyQueue[str], now_ns: int) -> None:
        if coordinator.tail is not None:
            coordinator.withdraw(coordinator.tail)
        super()._dequeue(key, coordinator, now_ns)


class LetsANewHeadInheritTheDeadline(CoalescingTable[str]):
    def _lead(self, key: str, coordinator: _KeyQueue[str], now_ns: int) -> None:
        """Nothing."""


class WithdrawsTheHead(CoalescingTable[str]):
    def withdraw(self, place: CoalescedRequest[str]) -> bool:
        return super().withdraw(place) or (place.status is RequestStatus.ACCEPTED and self.end(place, 0))


@pytest.mark.parametrize(
    "planted",
    [
        EndsForAnybody,
        NeverEvicts,
        KeepsIdleMachines,
        ForgetsWhoWaits,
        LetsANewHeadInheritTheDeadline,
        WithdrawsTheHead,
    ],
)
def test_model_finds_a_planted_fault(planted: type[CoalescingTable[str]]) -> None:
    machine = type(f"With{planted.__name__}", (BookMachine,), {"book_type": planted})
    chosen = settings(
        max_examples=500,
        stateful_step_count=30,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=chosen)
