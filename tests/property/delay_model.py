"""A simple model of what a delay server owes, or two copies of one: one line per message, when it is due, and whether
it is cancelled, as far as that is certain. An operation that was under way when the power went may have happened or
not: such a message *may* be due at either time, may be cancelled, may not be there.

At the end everything that is certain must have been delivered exactly once, and nothing early, twice, or after a
"cancelled" that was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from fairway.batch import MessageId
from fairway.delay.engine import Engine
from fairway.names import Subject
from fairway.runtime.rng import SeededRng
from tests.unit.delay.helpers import BILLS, HOUR_MS, ORDERS, Fate, Surroundings

KEYS = ["a", "b", "c", None, None, None]


@dataclass(slots=True)
class Line:
    """What the model knows of one message."""

    payload: bytes
    subject: Subject
    key: str | None
    due_ms: set[int]  # it has one of these
    is_certain: bool = True  # it was answered
    is_cancelled: bool = False  # that was answered
    may_be_cancelled: bool = False


@dataclass(slots=True)
class Modelled(ABC):
    """A life from one seed, beside its model."""

    distances_ms: ClassVar[tuple[int, ...]]  # how far ahead messages are due
    hops_ms: ClassVar[tuple[int, ...]]  # how long nobody does anything

    seed: int
    made: type[Engine] = Engine
    rng: SeededRng = field(init=False)
    lines: dict[MessageId, Line] = field(default_factory=dict)
    number: int = 0

    @property
    @abstractmethod
    def around(self) -> Surroundings:
        """The server or servers, and the world that they are in."""

    def run(self, steps: int) -> None:
        with self.around:
            for _ in range(steps):
                self._step()
                self._check()
            self._finish()

    @abstractmethod
    def _step(self) -> None:
        """Something happens."""

    @abstractmethod
    def _finish(self) -> None:
        """Years pass, and all is reckoned up."""

    # --- what clients do ---------------------------------------------------------------------------------------------

    def _subject(self) -> Subject:
        return (ORDERS, BILLS)[self.rng.below(2)]

    def _due_ms(self) -> int:
        distance_ms = self.distances_ms[self.rng.below(len(self.distances_ms))]
        return self.around.now_ms + distance_ms + self.rng.below(HOUR_MS if distance_ms > HOUR_MS else 20)

    def _chosen(self) -> tuple[MessageId, Line] | None:
        if not self.lines:
            return None
        message_id = list(self.lines)[-1 - self.rng.below(min(len(self.lines), 20))]
        return message_id, self.lines[message_id]

    # --- what time does ----------------------------------------------------------------------------------------------

    def _hop(self) -> None:
        self.around.sleep(self.rng.below(self.hops_ms[self.rng.below(len(self.hops_ms))] + 1))
        if self.rng.below(3):
            self.around.settle()
        else:
            self._ticks(self.rng.below(6))

    @abstractmethod
    def _ticks(self, count: int) -> None:
        """So many looks at the clock, one soon after the other."""

    # --- the reckoning -----------------------------------------------------------------------------------------------

    def _deliveries(self) -> list[tuple[MessageId, bytes, int]]:
        brokers = self.around.brokers.values()
        return [(each.id, each.payload, each.latest_ms) for broker in brokers for each in broker.deliveries]

    def _delivered(self) -> set[MessageId]:
        return {message_id for message_id, _, _ in self._deliveries()}

    def _check(self) -> None:
        """Nothing early: when it went out, the wall clock had shown its time."""
        for message_id, payload, latest_ms in self._deliveries():
            line = self.lines[message_id]
            assert payload == line.payload
            assert latest_ms >= min(line.due_ms), f"{message_id} went out early"
            assert not line.is_cancelled, f"{message_id} went out after it was cancelled"

    def _believe(self, message_id: MessageId, answer: Fate, delivered: set[MessageId]) -> None:
        """What was answered when somebody cancelled it, and these had been delivered."""
        line = self.lines[message_id]
        if message_id in delivered:
            assert answer in (
                Fate.ALREADY_DISPATCHED,
                Fate.UNKNOWN,
            )  # unknown once its bucket is gone
        elif answer is Fate.UNKNOWN:
            assert not line.is_certain or line.is_cancelled or line.may_be_cancelled

    def _check_all(self) -> None:
        """When all that was certain is due."""
        self._check()
        seen = [message_id for message_id, _, _ in self._deliveries()]
        assert len(seen) == len(set(seen)), "delivered twice"
        for message_id, line in self.lines.items():
            if line.is_certain and not line.is_cancelled and not line.may_be_cancelled:
                assert message_id in set(seen), f"{message_id} is lost"


def check_empty(engine: Engine, files: list[str]) -> None:
    """It has nothing left to do, and keeps nothing."""
    assert engine.damaged == []
    assert engine.stuck == []
    assert engine.log.findings == []
    assert len(engine.rows) == 0
    assert files == []
