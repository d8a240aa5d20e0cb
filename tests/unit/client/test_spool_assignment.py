"""What a spool sends to one group of brokers of a cluster, when the connection and the disk take turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from fairway import batch
from fairway.client.spool.assignment import PlacedBatch, SpoolAssignment
from fairway.client.spool.journal import Journal
from fairway.errors import Code, Refused
from fairway.protocol.line import Answer, ConnectionLost, RequestOutcome
from fairway.protocol.messages import Produced
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk

ROOM = 16


class Stage:
    """One journal, one group, and a disk whose completions come when they are told to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sent: list[bytes] = []
        self.under_way: list[PlacedBatch] = []
        self.line: Any = SimpleNamespace(is_open=True, add=self._add, run_later=self._run_later)
        self._callbacks: list[Callable[[], None]] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        connection: Any = SimpleNamespace(
            link=SimpleNamespace(lock=nullcontext(), stir=lambda: None),
            core=SimpleNamespace(line=self.line),
            producing=SimpleNamespace(note_success=lambda: None),
        )
        partitioner = SimpleNamespace(connections=(connection,), names=("a",), why="", is_ordered=False)
        cluster_client: Any = SimpleNamespace(meta=connection, seek=lambda _, **__: partitioner)
        rng = SeededRng(1)
        self.journal = Journal(SimDisk(rng.child("disk"), self._call_later), 0xFA12, self.clock, is_cluster=True)
        self.sorting: SpoolAssignment[Any] = SpoolAssignment(cluster_client, self.clock, rng, lambda: None)
        self.sorting.attach("a", connection)
        self.sorting.add(self.journal)
        self.pump()

    def _add(self, session: Any, now_ns: int) -> None:
        self._leg = session

    def _run_later(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _call_later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._timers, (seconds, next(self._numbers), callback, args))

    def keep(self, *numbers: int) -> None:
        def data(number: int) -> bytes:
            return batch.encode((b"%d" % number,), producer_id=7, first_sequence=number, created_ms=1)

        handed = [Handed("orders", 1, False, data(number), "a") for number in numbers]
        self.journal.keep(handed, lambda _: self.sorting.go_on())

    def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let the disk finish, or go on for so long."""
        while self._timers and not until():
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)
            self.pump()

    def pump(self) -> None:
        """What is to be sent now is, and who is to be told is."""
        for ask in self._leg.asks(ROOM if self.line.is_open else 0, self.clock.monotonic_ns()):
            self.under_way.append(ask.token)
            self.sent.append(bytes(batch.decode(ask.token.data).payloads[0]))
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def answer(self, outcome: RequestOutcome) -> None:
        """To all that is under way."""
        answered, self.under_way = self.under_way, []
        for spooled in answered:
            self._leg.answered(spooled, outcome, self.clock.monotonic_ns())
        self.pump()

    def is_being_noted(self, number: int) -> bool:
        return self.sorting._spooled_batches.get((self.journal.number, number), self) is None


STORED = Answer(Produced(0, 1, 0, is_duplicate=False, epoch=1))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_connection_that_comes_back_while_the_disk_notes_does_not_change_the_order(stage: Stage) -> None:
    """What was on its way is read again; what was about to follow it does not go before it."""
    stage.keep(0, 1)
    stage.settle()
    assert stage.sent == [b"0", b"1"]
    stage.keep(2)
    stage.settle(lambda: stage.is_being_noted(2))
    stage.line.is_open = False
    stage.answer(ConnectionLost("cut"))
    stage.line.is_open = True
    stage.pump()
    stage.sent.clear()
    stage.settle()
    stage.pump()
    assert stage.sent == [b"0", b"1", b"2"]
    stage.answer(STORED)
    assert stage.journal.is_empty


def test_streams_that_were_left_are_forgotten_when_nothing_is_left(stage: Stage) -> None:
    """There would be more of them with every trouble."""
    stage.keep(0)
    stage.settle()
    stage.answer(Refused(Code.UNKNOWN_PRODUCER, "who?"))
    stage.settle()
    stage.pump()
    assert stage.sent == [b"0", b"0"]
    assert stage.sorting._left_streams == {7}
    stage.answer(STORED)
    assert stage.journal.is_empty
    assert not stage.sorting._left_streams
