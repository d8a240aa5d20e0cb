"""The read throttle: in order, for a bounded time per turn, a bounded number of senders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fairway.runtime.clock import ManualClock
from fairway.serving.read_limits import FREE_TURNS, SENDERS_MAX, TURN_NS_MAX, ReadThrottle


class Crowd:
    """Waiters by name, each with so many helpings left, and a loop that is turned by hand."""

    def __init__(
        self, *, cost_ns: int = 0, is_sending: bool = False, used: Mapping[str, float] | None = None, **helpings: int
    ) -> None:
        self.clock = ManualClock()
        self.helpings = helpings
        self.served = ""
        self._cost_ns = cost_ns
        self._is_sending = is_sending
        self._soon: list[Callable[[], None]] = []
        self.read_throttle: ReadThrottle[str] = ReadThrottle(
            self.clock, self._soon.append, self._serve, lambda name: (used or {}).get(name, 0.0)
        )
        for name in helpings:
            self.read_throttle.join(name)

    def _serve(self, name: str) -> bool:
        self.served += name
        self.clock.advance(self._cost_ns / 1_000_000)
        self.helpings[name] -= 1
        if self.helpings[name]:
            self.read_throttle.join(name)
        return self._is_sending

    def turn(self) -> str:
        """What was served in one turn of the loop."""
        self.served, soon = "", self._soon[:]
        self._soon.clear()
        for callback in soon:
            callback()
        return self.served


def test_everybody_gets_a_helping_in_turn() -> None:
    assert Crowd(a=3, b=1, c=2).turn() == "abcaca"


def test_a_turn_has_its_time_and_the_next_one_goes_on() -> None:
    crowd = Crowd(cost_ns=TURN_NS_MAX // 2, a=3, b=2)
    assert [crowd.turn() for _ in range(4)] == ["ab", "ab", "a", ""]


def test_few_are_allowed_to_send_in_one_turn() -> None:
    crowd = Crowd(is_sending=True, a=1, b=1, c=1)
    assert SENDERS_MAX == 1
    assert [crowd.turn() for _ in range(4)] == ["a", "b", "c", ""]
    assert len(crowd.read_throttle) == 0


def test_after_a_large_chunk_some_turns_are_left_to_others() -> None:
    crowd = Crowd(is_sending=True, a=1, b=1, c=1)
    assert crowd.turn() == "a"
    crowd.read_throttle.rest()
    assert [crowd.turn() for _ in range(FREE_TURNS)] == [""] * FREE_TURNS
    assert [crowd.turn() for _ in range(3)] == ["b", "c", ""]


def test_free_turns_do_not_add_up() -> None:
    crowd = Crowd(is_sending=True, a=1)
    for _ in range(5):
        crowd.read_throttle.rest()
    assert [crowd.turn() for _ in range(FREE_TURNS + 1)] == [""] * FREE_TURNS + ["a"]
    assert len(crowd.read_throttle) == 0


def test_whoever_has_used_the_least_is_served_first() -> None:
    crowd = Crowd(a=1, b=1, c=1, used={"a": 3.0, "b": 1.0, "c": 2.0})
    assert crowd.turn() == "bca"
