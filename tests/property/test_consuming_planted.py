"""The model of consumers finds what it is for: each of these sessions has one fault that a client may well have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fairway.errors import InvariantViolated
from fairway.protocol.consumer_lease import Lease
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.line import ConnectionLost, RequestOutcome
from fairway.protocol.lots import ConsumerLot
from fairway.protocol.messages import Joined
from fairway.protocol.settlements import Settling
from tests.property.test_consuming_model import Consumers
from tests.property.test_consuming_runs import KeyedConsumers


class HandsOutWhatIsHeld(ConsumerSession):
    """Every handout is taken to be a new one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unacked.overlapping = self._none  # type: ignore[method-assign]

    def _none(self, lot: ConsumerLot) -> list[ConsumerLot]:
        return [lot][:0]


class ForgetsLostAcks(ConsumerSession):
    """An ack whose answer was lost is taken to have arrived."""

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if isinstance(token, Settling) and isinstance(outcome, ConnectionLost):
            for piece in token.pieces:
                self._unacked.confirm(piece)
            token.pieces.clear()
        super().answered(token, outcome, now_ns)


class NeverSaysWhatArrived(ConsumerSession):
    def asks(self, room: int, now_ns: int) -> Any:
        self._arrived, kept = min(self._arrived, 1), self._arrived
        try:
            return super().asks(room, now_ns)
        finally:
            self._arrived = kept


class SettlesUnderTheOldName(ConsumerSession):
    """What came again is not handed out again, but its outcome goes out under a name that nobody knows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gather = self._settler.gather

        def forgetful(now_ns: int, *, is_urgent: bool) -> None:
            for lot in self._unacked:
                lot.heirs.clear()
            gather(now_ns, is_urgent=is_urgent)

        self._settler.gather = forgetful  # type: ignore[method-assign]


class HandsOutWhatNobodyWants(ConsumerSession):
    def _on_joined(self, *args: Any) -> None:
        super()._on_joined(*args)
        self._terms = type(self._terms)()


class TrustsEveryBroker(ConsumerSession):
    """What was not begun is begun, though the broker is another one by now and may have forgotten it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settlements.lease = self._lease = TrustingLease()


class TrustingLease(Lease):
    def join(self, sent_ns: int, told: Joined) -> bool:
        super().join(sent_ns, told)
        return True


class ForgetsTails(ConsumerSession):
    """A message that comes behind those of an earlier response begins at once."""

    def _on_pulled(self, *args: Any) -> None:
        self._behind._tail_lots.clear()
        super()._on_pulled(*args)


class BeginsBehindFailures(ConsumerSession):
    """A message that comes behind a failed one of an earlier response begins at once."""

    def _on_pulled(self, *args: Any) -> None:
        lots, sequences = self._behind._tail_lots, self._behind._tail_sequences
        for key in [key for key in lots if sequences[key] - lots[key].first in lots[key].failed]:
            del lots[key]
        super()._on_pulled(*args)


PLANTED = (
    TrustsEveryBroker,
    HandsOutWhatIsHeld,
    ForgetsLostAcks,
    NeverSaysWhatArrived,
    SettlesUnderTheOldName,
    HandsOutWhatNobodyWants,
)


@pytest.mark.parametrize(
    ("fault", "consumers"),
    [
        *((fault, Consumers) for fault in PLANTED),
        (ForgetsTails, KeyedConsumers),
        (BeginsBehindFailures, KeyedConsumers),
    ],
    ids=lambda each: each.__name__,
)
def test_a_planted_fault_is_found(fault: type[ConsumerSession], consumers: type[Consumers]) -> None:
    class Planted(consumers):  # type: ignore[valid-type,misc]
        kind = fault
        seek = None  # no rule: a seek hands out again what was acked, and excuses the fault

    with pytest.raises((AssertionError, InvariantViolated)):
        run_state_machine_as_test(
            Planted,
            settings=settings(
                max_examples=3_000,  # what is drawn depends on the modules that are imported: leave it room
                stateful_step_count=60,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
