"""A delay server's life from one seed, beside the model of what it owes (`delay_model`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fairway.batch import MessageId
from fairway.delay.schedule.pending_rows import RowState
from fairway.errors import Code, Refused
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimulatedPowerCut
from tests.property.delay_model import KEYS, Line, Modelled, check_empty
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, Fate, World


@dataclass(slots=True)
class Story(Modelled):
    """One run."""

    distances_ms = (-DAY_MS, 0, 10, SECOND_MS, 90 * SECOND_MS, 3 * HOUR_MS, 2 * DAY_MS, 40 * DAY_MS, 500 * DAY_MS)
    hops_ms = (0, 1, 50, SECOND_MS, HOUR_MS, 7 * HOUR_MS, DAY_MS, 9 * DAY_MS, 40 * DAY_MS)

    world: World = field(init=False)
    crashes: int = 0
    is_full: bool = False
    refusals: int = 0  # of pieces that found no room

    def __post_init__(self) -> None:
        self.rng = SeededRng(f"delay story {self.seed}")
        options = replace(OPTIONS, remembered_max=4, catalogue_messages=6)
        self.world = World(f"delay {self.seed}", options=options, apart=self.seed % 2 == 1, made=self.made)

    @property
    def around(self) -> World:
        return self.world

    def _step(self) -> None:
        choice = self.rng.below(100)
        if choice < 34:
            self._schedule(is_awaited=self.rng.below(4) > 0)
        elif choice < 58:
            self._hop()
        elif choice < 68:
            self._cancel()
        elif choice < 78:
            self._reschedule()
        elif choice < 81:
            self.world.routes[self._subject()] = [None, "east", "west"][self.rng.below(3)]
        elif choice < 84:
            self._jump()
        elif choice < 87:
            self._restart()
        elif choice < 90 and self.world.schedule_disk is not None:
            self._run_full()
        else:
            self._crash()

    # --- what clients do ---------------------------------------------------------------------------------------------

    def _schedule(self, *, is_awaited: bool) -> None:
        count = 1 + self.rng.below(5)
        payloads = [b"%d" % (self.number + index) for index in range(count)]
        self.number += count
        due_ms = [self._due_ms() for _ in range(count)]
        if self.rng.below(2):
            due_ms = due_ms[:1] * count
        keys = [KEYS[self.rng.below(len(KEYS))] for _ in range(count)]
        subject = self._subject()
        producer = self.number  # a stream each: months lie between them, and idle streams are forgotten
        try:
            ids = self.world.send(payloads, due_ms, subject=subject, producer=producer, keys=keys)
        except Refused as refused:
            if not self.is_full or refused.code is not Code.READ_ONLY:
                raise
            return
        if is_awaited:
            self.world.await_receipt()
        for message_id, payload, due, key in zip(ids, payloads, due_ms, keys, strict=True):
            self.lines[message_id] = Line(payload, subject, key, {due}, is_certain=is_awaited)

    def _cancel(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        message_id, line = chosen
        before = self._delivered()
        try:
            if line.key is not None and self.rng.below(2):
                ids = [each for each, of in self.lines.items() if (of.key, of.subject) == (line.key, line.subject)]
                decision = self.world.engine.cancel_key(line.subject, line.key)
            else:
                ids, decision = [message_id], self.world.engine.cancel(message_id)
        except Refused:  # it is still loading
            assert not self.world.engine.is_loaded
            return
        if self.rng.below(5) == 0:
            self._die()  # before the answer
            for each in ids:
                self.lines[each].may_be_cancelled = True
            return
        answer = self.world.decide(decision)
        if len(ids) == 1:
            self._believe(message_id, answer, before)
        for each in ids:
            if answer is Fate.CANCELLED and each not in before:
                self._note_cancelled(each)

    def _note_cancelled(self, message_id: MessageId) -> None:
        """It is cancelled, or was on its way: an intent that is not sent yet is not seen from here."""
        if self._state(message_id) == {RowState.CANCELLED}:
            self.lines[message_id].is_cancelled = True

    def _reschedule(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        message_id, line = chosen
        due_ms = self._due_ms()
        before = self._delivered()
        try:
            if line.key is not None and self.rng.below(2):
                ids = [each for each, of in self.lines.items() if (of.key, of.subject) == (line.key, line.subject)]
                pending = [each for each in ids if self._state(each) == {RowState.PENDING}]
                decision = self.world.engine.reschedule_key(line.subject, line.key, due_ms)
            else:
                pending, decision = [message_id], self.world.engine.reschedule(message_id, due_ms)
        except Refused:  # it is still loading
            assert not self.world.engine.is_loaded
            return
        if decision.answer is not Fate.RESCHEDULED:
            return
        assert not before.intersection(pending), "what was delivered is not put off"
        if self.rng.below(5) == 0:
            for each in pending:
                self.lines[each].due_ms.add(due_ms)
            self._die()
            return
        self.world.decide(decision)
        for each in pending:
            self.lines[each].due_ms = {due_ms}

    def _state(self, message_id: MessageId) -> set[int]:
        rows = self.world.engine._pending.by_id(message_id)
        return {int(each) for each in self.world.engine.rows.state[rows]}

    # --- what time does ----------------------------------------------------------------------------------------------

    def _ticks(self, count: int) -> None:
        for _ in range(count):
            self.world.tick()
            self.world.sleep(self.rng.below(20) / 10)

    def _jump(self) -> None:
        """Back is believed at once, forward only when it lasts."""
        reach_ms = (HOUR_MS, 3 * DAY_MS, 20 * DAY_MS)[self.rng.below(3)]
        self.world.clock.jump(self.rng.below(2 * reach_ms) - reach_ms)

    def _run_full(self) -> None:
        """The disk of the buckets is full for a while: what was answered stays, decisions are made, messages go out."""
        self.world.fill()
        self.is_full = True
        for _ in range(self.rng.below(4)):
            self._schedule(is_awaited=True)
            self._ticks(self.rng.below(20))
            self.world.sleep(self.rng.below(2_000))
            self._cancel()
        self.world.sleep(self.hops_ms[self.rng.below(len(self.hops_ms))])  # buckets want to be split
        self._ticks(self.rng.below(20))
        self.refusals += self.world.engine._appender.is_full
        if self.rng.below(3) == 0:
            self._die()
        self.world.make_room()
        self.is_full = False
        self.world.sleep(1_500)
        self._ticks(5)
        self.world.settle()

    # --- lives -------------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self.world.reopen()
        self.crashes += 1

    def _crash(self) -> None:
        """In the midst of something."""
        if self.rng.below(3) == 0:  # buckets are being split, and messages fall due
            self.world.sleep(self.hops_ms[self.rng.below(len(self.hops_ms))])
            self._ticks(self.rng.below(10))
        self._schedule(is_awaited=bool(self.rng.below(2)))
        self._ticks(self.rng.below(4))
        if self.rng.below(3) == 0:  # sent, and the note of it lost
            for intent in self.world.look():
                self.world.deliver(intent)
        self.world.sleep(self.rng.below(40) / 10)
        self._die()

    def _die(self) -> None:
        self.crashes += 1
        if self.rng.below(3):
            self.world.crash()
        else:
            self.world.kill()
        for _ in range(100):
            if self.rng.below(3) == 0:
                disk = self.world.schedule_disk or self.world.disk
                disk.crash_after(1 + self.rng.below(30))
            try:
                self.world.open()
            except SimulatedPowerCut:
                self.world.crash()
            else:
                for each in (self.world.disk, self.world.schedule_disk):
                    if each is not None:
                        each.crash_after(0)
                return
        raise AssertionError("it never comes up again")

    # --- the reckoning -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everybody is up, and three years pass."""
        self.world.routes = {}
        for _ in range(40):
            self.world.sleep(27 * DAY_MS)
            self.world.settle()
        self._check_all()
        check_empty(self.world.engine, self.world.files)
