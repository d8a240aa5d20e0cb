"""The life of two copies of a delay server from one seed: either leads, dies, is deposed, is cut off, comes back, or
begins anew; months pass. Beside it the model of what they owe (`delay_model`).

Answers were committed, so the next leader owes them. Operations under way may have happened or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fairway.delay.schedule.pending_rows import RowState
from fairway.errors import Refused
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from tests.property.delay_model import KEYS, Line, Modelled, check_empty
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, Fate
from tests.unit.delay.pair import Pair, Side


@dataclass(slots=True)
class PairStory(Modelled):
    """One run."""

    distances_ms = (-DAY_MS, 0, 10, 200, SECOND_MS, 90 * SECOND_MS, 3 * HOUR_MS, 2 * DAY_MS, 40 * DAY_MS, 300 * DAY_MS)
    hops_ms = (0, 1, 5, 50, SECOND_MS, HOUR_MS, 7 * HOUR_MS, DAY_MS, 9 * DAY_MS)

    pair: Pair = field(init=False)
    reigns: int = 0

    def __post_init__(self) -> None:
        self.rng = SeededRng(f"delay pair story {self.seed}")
        options = replace(OPTIONS, remembered_max=4, catalogue_messages=6)
        if self.seed % 3:  # else nothing is kept, and a copy that was away begins anew
            kept = replace(OPTIONS.store, retention=replace(OPTIONS.store.retention, bytes_max=1 << 20))
            options = replace(options, store=replace(kept, actions_kept_bytes=1 << 20))
        skew_ms = (0, 0, 700, -HOUR_MS, 2 * HOUR_MS)[self.rng.below(5)]
        apart = self.seed % 2 == 1
        self.pair = Pair(f"delay pair {self.seed}", options=options, apart=apart, made=self.made, skew_ms=skew_ms)

    @property
    def around(self) -> Pair:
        return self.pair

    def _step(self) -> None:
        choice = self.rng.below(100)
        if choice < 32:
            self._schedule(is_awaited=self.rng.below(4) > 0)
        elif choice < 54:
            self._hop()
        elif choice < 63:
            self._cancel()
        elif choice < 72:
            self._reschedule()
        elif choice < 75:
            self.pair.routes[self._subject()] = [None, "east", "west"][self.rng.below(3)]
        elif choice < 80:
            self._disturb_copy()
        elif choice < 82:
            self.pair.deliver_late()
        else:
            self._change()

    # --- what clients do ---------------------------------------------------------------------------------------------

    def _schedule(self, *, is_awaited: bool) -> None:
        count = 1 + self.rng.below(5)
        payloads = [b"%d" % (self.number + index) + b"." * (700 * self.rng.below(3)) for index in range(count)]
        self.number += count
        due_ms = [self._due_ms() for _ in range(count)]
        keys = [KEYS[self.rng.below(len(KEYS))] for _ in range(count)]
        subject, producer = self._subject(), self.number
        ids = self.pair.send(payloads, due_ms, subject=subject, producer=producer, keys=keys)
        for message_id, payload, due, key in zip(ids, payloads, due_ms, keys, strict=True):
            self.lines[message_id] = Line(payload, subject, key, {due}, is_certain=False)
        if is_awaited:
            self.pair.await_receipt()
            for message_id in ids:
                self.lines[message_id].is_certain = True

    def _cancel(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        message_id, line = chosen
        before = self._delivered()
        try:
            decision = self.pair.engine.cancel(message_id)
        except Refused:  # it has just come to lead
            assert not self.pair.engine.is_loaded
            return
        if self.rng.below(4) == 0:
            line.may_be_cancelled = line.may_be_cancelled or decision.answer is Fate.CANCELLED
            self._change()  # before the answer
            return
        answer = self.pair.decide(decision)
        self._believe(message_id, answer, before)
        if answer is Fate.CANCELLED:
            line.is_cancelled = True

    def _reschedule(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        message_id, line = chosen
        due_ms = self._due_ms()
        before = self._delivered()
        try:
            decision = self.pair.engine.reschedule(message_id, due_ms)
        except Refused:
            assert not self.pair.engine.is_loaded
            return
        if decision.answer is not Fate.RESCHEDULED:
            return
        assert message_id not in before, "what was delivered is not put off"
        line.due_ms = line.due_ms | {due_ms}
        if self.rng.below(4) == 0:
            self._change()
            return
        self.pair.decide(decision)
        line.due_ms = {due_ms}

    # --- what time does ----------------------------------------------------------------------------------------------

    def _ticks(self, count: int) -> None:
        for _ in range(count):
            if self.rng.below(2):
                self.pair.tick(is_noted=self.rng.below(4) > 0)
            else:
                self.pair.pass_on(chunks_max=1)
            self.pair.sleep(self.rng.below(20) / 10)

    # --- lives -------------------------------------------------------------------------------------------------------

    def _disturb_copy(self) -> None:
        pair = self.pair
        if not pair.copy.is_up:
            pair.join()
        elif self.rng.below(2):
            pair.is_cut_off = not pair.is_cut_off
            if not pair.is_cut_off:
                pair.copy.abandon()
                pair.join()
        else:
            pair.copy.end(self._death())
            if self.rng.below(2):
                pair.join()

    def _death(self) -> Callable[[SimDisk], SimDisk]:
        return (SimDisk.crash, SimDisk.crash_process)[self.rng.below(2)]

    def _change(self) -> None:
        """Another reign, in the midst of something."""
        self.reigns += 1
        pair = self.pair
        self._schedule(is_awaited=bool(self.rng.below(2)))
        self._ticks(self.rng.below(4))
        if self.rng.below(3) == 0:  # some of it arrives before the change, some after, some never
            pair.give_out()
            if self.rng.below(2):
                pair.deliver_late()
        decided = self._decide_alone() if pair.in_sync and pair.copy.is_up and self.rng.below(3) == 0 else []
        pair.sleep(self.rng.below(40) / 10)
        if pair.in_sync and pair.copy.is_up and self.rng.below(5):
            pair.take_over(self._end_of_reign)
            for line in decided:
                line.may_be_cancelled = False  # nobody knows of it any more
        else:
            pair.lead_again(self._end_of_reign)
        if self.rng.below(2):
            pair.deliver_late()

    def _decide_alone(self) -> list[Line]:
        """The copy hears nothing any more. The master still waits for it, days pass, and buckets want to be split. What
        it has cancelled meanwhile."""
        pair, decided = self.pair, list[Line]()
        pair.is_cut_off = True
        for message_id in list(self.lines)[-12:] if pair.engine.is_loaded else ():
            line = self.lines[message_id]
            is_sure = line.is_certain and not line.may_be_cancelled
            if is_sure and self.rng.below(2) and pair.engine.cancel(message_id).messages:
                line.may_be_cancelled = True
                decided.append(line)
        pair.sleep(self.rng.below(self.hops_ms[self.rng.below(len(self.hops_ms))] + 1))
        for _ in range(self.rng.below(40)):
            pair.give_out()
            pair.sleep(2)
        return decided

    def _end_of_reign(self, side: Side) -> None:
        if self.rng.below(3) == 0:
            side.abandon()
        else:
            side.end(self._death())

    def _finish(self) -> None:
        """Everybody is up, and two years pass; now and then the other one leads."""
        pair = self.pair
        pair.routes = {}
        pair.deliver_late()
        pair.is_cut_off = False
        if pair.copy.is_up:
            pair.copy.abandon()
        pair.join()
        for number in range(30):
            pair.sleep(27 * DAY_MS)
            pair.settle()
            if number % 10 == 4:
                pair.take_over(self._end_of_reign)
        self._check_all()
        for side in (pair.master, pair.copy):
            check_empty(side.engine, side.files)
            assert len(side.engine.rows.in_state(RowState.FREE)) == side.engine.rows.end
