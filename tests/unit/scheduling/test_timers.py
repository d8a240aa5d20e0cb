"""One timer for all actors, early alarms are harmless, stale ones do not pile up."""

from __future__ import annotations

from fairway.runtime.clock import SimClock
from fairway.runtime.rng import SeededRng
from fairway.scheduling.actor import NEVER_NS, Actor
from fairway.scheduling.scheduler import STALE_MIN, ActorTimers
from fairway.simulation.loop import SimLoop

MS = 1_000_000


class Bell:
    def __init__(self) -> None:
        self.loop = SimLoop(SeededRng(1))
        self.rung: list[tuple[object, int]] = []
        self.timers = ActorTimers(SimClock(self.loop.now_ns), self.loop, 1 * MS, self._ring)

    def _ring(self, actor: Actor, now_ns: int) -> None:
        self.loop.spend(400_000)
        self.rung.append((actor.key, now_ns))
        if actor.key == "broken":
            raise ValueError

    def run(self, ns: int) -> None:
        self.loop.call_later(ns / 1e9, self.loop.stop)
        self.loop.run_forever()


def actor(key: object) -> Actor:
    return Actor(key, 1.0, 0.0, 0)


def test_alarms_ring_in_order_and_once() -> None:
    bell = Bell()
    first, second = actor("first"), actor("second")
    bell.timers.set(second, 20 * MS)
    bell.timers.set(first, 10 * MS)
    bell.run(100 * MS)
    assert bell.rung == [("first", 11 * MS), ("second", 21 * MS)]
    assert first.alarm_ns == second.alarm_ns == NEVER_NS


def test_alarm_replaces_the_one_before() -> None:
    bell = Bell()
    someone = actor("someone")
    for due_ms in (10, 50, 30):
        bell.timers.set(someone, due_ms * MS)
    bell.run(100 * MS)
    assert [key for key, _ in bell.rung] == ["someone"]
    assert 30 * MS <= bell.rung[0][1] <= 32 * MS


def test_many_alarms_at_once_let_the_loop_breathe() -> None:
    bell = Bell()
    for key in range(10):
        bell.timers.set(actor(key), 10 * MS)
    bell.run(100 * MS)
    assert len(bell.rung) == 10
    assert len({now_ns // (2 * MS) for _, now_ns in bell.rung}) > 1


def test_stale_alarms_do_not_pile_up() -> None:
    bell = Bell()
    someone = actor("someone")
    for due_ms in range(100_000, 90_000, -1):
        bell.timers.set(someone, due_ms * MS)
    assert len(bell.timers._heap) <= 2 * STALE_MIN


def test_alarms_go_on_after_one_that_throws() -> None:
    bell = Bell()
    bell.loop.set_exception_handler(lambda *_: None)
    bell.timers.set(actor("broken"), 10 * MS)
    bell.timers.set(actor("next"), 10 * MS)
    bell.run(50 * MS)
    assert [key for key, _ in bell.rung] == ["broken", "next"]


def test_closed_alarms_are_silent() -> None:
    bell = Bell()
    bell.timers.set(actor("someone"), 10 * MS)
    bell.timers.close()
    bell.run(50 * MS)
    assert bell.rung == []
