"""Delivery of bytes in the simulated net: late, in order, and held back while the route is cut.

A `SimulatedRoute` leads from one host to another and belongs to the net. A `SimulatedWire` is one direction of one
connection on that route. All events for the other end (bytes, acknowledgements, the end, a reset) go through the wire.
So nothing overtakes anything within a connection, and a cut holds back acknowledgements as well as bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVarTuple

from fairway.errors import Misuse
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.simulation.loop import SimLoop

Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Conditions:
    """The behaviour of the net without injected faults. The defaults are those of one data centre."""

    latency_us: int = 100  # one way, at least
    jitter_us: int = 400  # one way, at most that much more
    window_bytes: int = 64 * KIB  # sent and not yet read, per direction: what the two kernels would hold
    drop_chance: float = 0.0  # that a connection breaks, per event that arrives on it
    is_choppy: bool = True  # reads get pieces that the seed cuts; False: all bytes that are there
    told_bytes: int = 1  # bytes read before the sender learns of the room: a larger number makes fewer events

    def __post_init__(self) -> None:
        is_odd = min(self.latency_us, self.jitter_us) < 0 or self.window_bytes < 1 or not 0 <= self.drop_chance <= 1
        if is_odd or not 1 <= self.told_bytes <= max(self.window_bytes // 2, 1):  # else a sender waits for ever
            raise Misuse(f"no net is like this: {self}")


class SimulatedRoute:
    """From one host to another: its conditions, and whether anything gets through."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.is_cut = False
        self._held: list[SimulatedWire] = []

    def hold(self, wire: SimulatedWire) -> None:
        """Wake this wire when the route is open again."""
        self._held.append(wire)

    def cut(self) -> None:
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        held, self._held = self._held, []
        for wire in held:
            wire.wake()


class SimulatedWire:
    """One direction of one connection."""

    def __init__(self, loop: SimLoop, rng: SeededRng, way: SimulatedRoute, on_drop: Callable[[], None]) -> None:
        self._loop = loop
        self._rng = rng
        self._way = way
        self._on_drop = on_drop
        self._travelling: deque[tuple[float, Callable[[], object]]] = deque()  # due time, and the call on arrival
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def send(self, arrive: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `arrive` at the other end, after everything that was sent before."""
        if self._closed:
            return
        self._travelling.append((self._loop.time() + self._delay_s(), partial(arrive, *args)))
        if len(self._travelling) == 1:
            self._expect_next()

    def wake(self) -> None:
        """The route is open again: held-back events travel once more."""
        if self._travelling and self._timer is None:
            self._timer = self._loop.call_later(self._delay_s(), self._arrive)

    def close(self) -> None:
        """Forget the events under way, and all later ones."""
        self._closed = True
        self._travelling.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _expect_next(self) -> None:
        self._timer = self._loop.call_at(self._travelling[0][0], self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        if self._way.is_cut:
            self._way.hold(self)
        elif self._rng.uniform() < self._way.conditions.drop_chance:
            self._on_drop()
        else:
            _, arrive = self._travelling.popleft()
            if self._travelling:
                self._expect_next()
            arrive()

    def _delay_s(self) -> float:
        conditions = self._way.conditions
        return (conditions.latency_us + self._rng.below(conditions.jitter_us + 1)) / 1e6
