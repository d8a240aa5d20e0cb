"""Batches that one producer has and another brings to another broker.

A subject may be with several groups of brokers, and a client has a producer for each. What one of them has sealed and
certainly not stored may go elsewhere: it is lent. It stays on the books of the one that lent it, which counts it, waits
for it and tells its sender; the one that has borrowed it numbers it and says in the end what became of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fairway.errors import FairwayError, invariant
from fairway.protocol.lane import SealedBatch
from fairway.protocol.pending import BatchReceipt, PendingBatch

Repay: TypeAlias = Callable[[SealedBatch, BatchReceipt | FairwayError], None]


class Borrowed(PendingBatch):
    """In the place of the outcome that somebody waits for: it is passed on, under the lock of who has borrowed."""

    __slots__ = ("_lent", "_repay")

    def __init__(self, lent: SealedBatch, repay: Repay) -> None:
        super().__init__(lent.pending.subject, _nobody_calls)
        self.count = lent.pending.count
        self.is_seen = True  # its failure is looked at where it came from
        self._lent = lent
        self._repay = repay

    def settle(self, outcome: BatchReceipt | Exception) -> None:
        super().settle(outcome)
        if isinstance(outcome, BatchReceipt | FairwayError):
            self._repay(self._lent, outcome)


def _nobody_calls(_: Callable[[], None]) -> None:
    invariant(False, "what is borrowed has no callbacks of users")
