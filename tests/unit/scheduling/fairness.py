"""What fair means, as checks that take any order: the right one passes, QMQ's and a plain queue do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fairway.scheduling import Actor, SchedulerOptions, TurnResult, VirtualTime
from fairway.scheduling.virtual_time import CREDIT_NS
from tests.unit.scheduling.stage import Ask, Group, Stage

MS = 1_000_000
SLICE_NS = SchedulerOptions().slice_ns
TOLERANCE = 0.05

MakeOrder = Callable[[], VirtualTime]


def shares(order: VirtualTime, groups: Sequence[tuple[int, int]], weights: Mapping[int, float], ns: int) -> list[float]:
    """Time per weight of groups of (consumers, cost), all with something to do all the time; their mean is 1."""
    stage = Stage(order=order)
    for key, weight in weights.items():
        stage.scheduler.set_weight(key, weight)
    for key, (consumers, cost_ns) in enumerate(groups):
        Group(stage, key, consumers, cost_ns)
    stage.run(ns)
    times = [stage.time_of(key) / weights.get(key, 1) for key in range(len(groups))]
    return [time * len(times) / sum(times) for time in times]


def check_shares(
    make_order: MakeOrder,
    groups: Sequence[tuple[int, int]],
    weights: Mapping[int, float] | None = None,
    ns: int = 300 * MS,
) -> None:
    """Each group gets its weight's share, however many consumers it has and whatever their requests cost."""
    found = shares(make_order(), groups, weights or {}, ns)
    assert all(abs(share - 1) <= TOLERANCE for share in found), found


def check_latecomer(make_order: MakeOrder, *, has_slept: bool) -> None:
    """One that sleeps (or is new) among two busy ones gets a third from then on: no more, no less, and soon."""
    stage = Stage(order=make_order())
    for key in ("busy", "busier"):
        Group(stage, key, 20, 50_000)
    if has_slept:
        stage.ask("late")
    stage.run(200 * MS)
    woken_ns = stage.now_ns
    first = stage.ask("late", 50_000)
    Group(stage, "late", 20, 50_000)
    stage.run(30 * MS)
    third_ns = (stage.now_ns - woken_ns) / 3
    used_ns = stage.time_of("late", woken_ns)
    assert abs(used_ns - third_ns) <= CREDIT_NS + SLICE_NS, f"{used_ns} ns of {third_ns:.0f}"
    assert 0 <= first.ended_ns - woken_ns <= 3 * 2 * SLICE_NS


def check_cold_reader(make_order: MakeOrder) -> None:
    """What a pool does on an actor's behalf is on its account: in all it uses no more than each hot group does."""
    stage = Stage(order=make_order())
    for key in ("hot", "hotter", "hottest"):
        Group(stage, key, 5, 50_000)
    read_ns = 4 * MS
    ColdReader(stage, "cold", read_ns)
    stage.run(300 * MS)
    cold = stage.actor("cold")
    used_ns = cold.served_ns + cold.elsewhere_ns
    hot_ns = stage.actor("hot").served_ns
    assert cold.elsewhere_ns > 0
    assert abs(used_ns - hot_ns) <= TOLERANCE * hot_ns + read_ns, f"cold {used_ns} ns, hot {hot_ns} ns"


class ColdReader:
    """A consumer whose every request needs a read in the pool: suspend, read, charge, resume, answer."""

    def __init__(self, stage: Stage, key: str, read_ns: int) -> None:
        self._stage = stage
        self._read_ns = read_ns
        self._key = key
        self._next()

    def _next(self) -> None:
        self._stage.ask(self._key, 5_000, work=self._read)

    def _read(self, ask: Ask, actor: Actor) -> TurnResult:
        if ask.looks == 2:
            self._next()
            return TurnResult.DONE
        actor.suspend()
        self._stage.loop.call_later(self._read_ns / 1e9, self._has_read, actor)
        return TurnResult.AGAIN

    def _has_read(self, actor: Actor) -> None:
        actor.charge(elapsed_ns=self._read_ns)
        self._stage.scheduler.resume(actor)
