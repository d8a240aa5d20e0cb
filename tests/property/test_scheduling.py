"""What holds for the scheduler whatever the groups and their requests: shares, bounded waits, one fate per request."""

from __future__ import annotations

import contextlib
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairway.errors import Refused
from fairway.scheduling import Actor, SchedulerOptions, TurnResult, VirtualTime
from fairway.scheduling.virtual_time import CREDIT_NS
from tests.unit.scheduling.fairness import MS, SLICE_NS, check_shares
from tests.unit.scheduling.stage import Ask, Group, Planted, Stage

CONSUMERS = st.integers(1, 100)
COST_NS = st.sampled_from([5_000, 20_000, 100_000, 400_000, 900_000, 2 * MS])
GROUPS = st.lists(st.tuples(CONSUMERS, COST_NS), min_size=2, max_size=5)
LONGEST_NS = 3 * MS  # a request of 2 ms costs up to half as much again


@settings(max_examples=15)
@example([(100, 50_000), (2, 50_000)])
@example([(1, 5_000), (1, 2 * MS)])
@given(GROUPS)
def test_equal_weights_get_equal_time(groups: list[tuple[int, int]]) -> None:
    check_shares(VirtualTime, groups, ns=100 * len(groups) * MS)


@settings(max_examples=10)
@given(GROUPS, st.permutations([1, 2, 4, 1, 2]))
def test_time_goes_by_weight(groups: list[tuple[int, int]], weights: list[float]) -> None:
    """The least share must be long against the longest request, so the run is as long as it takes."""
    chosen = dict(enumerate(weights[: len(groups)]))
    ns = int(100 * MS * sum(chosen.values()) / min(chosen.values()))
    check_shares(VirtualTime, groups, chosen, ns)


@settings(max_examples=25)
@given(GROUPS)
def test_every_ready_actor_runs_within_a_bounded_time(groups: list[tuple[int, int]]) -> None:
    """Each other one can be ahead of it by what one slice may be charged, and then has a slice."""
    stage = Stage()
    for key, (consumers, cost_ns) in enumerate(groups):
        Group(stage, key, consumers, cost_ns)
    stage.run(100 * MS)
    bound_ns = 2 * len(groups) * (SLICE_NS + LONGEST_NS)
    for key in range(len(groups)):
        starts = [0, *(one.started_ns for one in stage.served if one.key == key), stage.now_ns]
        assert max(after - before for before, after in pairwise(starts)) <= bound_ns


@settings(max_examples=25)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(1, 40), st.booleans()), min_size=1, max_size=20),
)
def test_one_that_comes_and_goes_gets_no_more_than_its_share(busy: int, visits: list[tuple[int, int, bool]]) -> None:
    """Whatever the pattern of its naps: while it has something to do it gets its share, within a slice, a request and
    what it may keep through a nap."""
    stage = Stage()
    for key in range(busy):
        Group(stage, key, 3, 50_000)
    for nap_us, requests, is_long in visits:
        stage.run(nap_us * 1_000)
        woken_ns = stage.now_ns
        asks = [stage.ask("visitor", 250_000 if is_long else 25_000) for _ in range(requests)]
        while not all(ask.fates for ask in asks):
            stage.run(1 * MS)
        elapsed_ns = max(ask.ended_ns for ask in asks) - woken_ns
        used_ns = stage.time_of("visitor", woken_ns)
        assert used_ns <= elapsed_ns / (busy + 1) + CREDIT_NS + SLICE_NS + 250_000
        assert elapsed_ns <= (used_ns + 3 * SLICE_NS) * (busy + 1) + 2 * MS


# --- one fate per request --------------------------------------------------------------------------------------------

KEYS = st.integers(0, 2)
MOODS = st.sampled_from(["done", "done", "wait", "wait", "again", "throw", "cold"])
ASKS = st.tuples(
    st.just("ask"), KEYS, MOODS, st.integers(0, 3 * MS), st.integers(0, 60 * MS), st.integers(0, 60 * MS), st.booleans()
)
OPS = st.one_of(
    ASKS,
    ASKS,
    st.tuples(st.just("run"), st.integers(1, 20 * MS)),
    st.tuples(st.just("wake"), KEYS),
    st.tuples(st.just("cancel"), st.integers(0, 100)),
    st.tuples(st.just("suspend"), KEYS),
    st.tuples(st.just("resume"), KEYS),
    st.tuples(st.just("weight"), KEYS, st.sampled_from([0.5, 1.0, 3.0])),
)
SMALL = SchedulerOptions(mailbox_requests_max=4, actors_max=2, weights_max=2, idle_ns_max=30 * MS)


class Chaos:
    """A stage whose requests behave as the draw says, and whose actors are suspended from outside too."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.stage = Stage(options)
        self.suspended: list[Actor] = []

    def do(self, name: object, *arguments: object) -> None:
        with contextlib.suppress(Planted, Refused):  # a caller that cannot tell its client, a weight too many
            getattr(self, str(name))(*arguments)

    def close(self) -> None:
        try:
            self.stage.scheduler.close()
        except* Planted:
            pass

    def ask(self, key: int, mood: str, cost_ns: int, wait_ns: int, deadline_ns: int, throws: bool) -> None:
        now_ns = self.stage.now_ns
        self.stage.ask(
            key,
            cost_ns,
            work=getattr(self, f"_{mood}"),
            wait_until_ns=now_ns + wait_ns,
            deadline_ns=now_ns + 10 * MS + deadline_ns,
            throws_when_told=throws,
        )

    def run(self, ns: int) -> None:
        self.stage.run(ns)

    def wake(self, key: int) -> None:
        self.stage.scheduler.wake(key)

    def cancel(self, index: int) -> None:
        if index < len(self.stage.asked):
            self.stage.asked[index].is_cancelled = True

    def suspend(self, key: int) -> None:
        actor = self.stage.scheduler.find(key)
        if actor is not None:
            actor.suspend()
            self.suspended.append(actor)

    def resume(self, key: int) -> None:
        if self.suspended:
            self.stage.scheduler.resume(self.suspended.pop(key % len(self.suspended)))

    def weight(self, key: int, weight: float) -> None:
        self.stage.scheduler.set_weight(key, weight)

    def _done(self, _: Ask, __: Actor) -> TurnResult:
        return TurnResult.DONE

    def _wait(self, ask: Ask, _: Actor) -> TurnResult:
        return TurnResult.DONE if ask.looks >= 3 else TurnResult.WAIT

    def _again(self, ask: Ask, _: Actor) -> TurnResult:
        return TurnResult.DONE if ask.looks >= 3 else TurnResult.AGAIN

    def _throw(self, _: Ask, __: Actor) -> TurnResult:
        raise Planted

    def _cold(self, ask: Ask, actor: Actor) -> TurnResult:
        if ask.looks >= 2:
            return TurnResult.DONE
        actor.suspend()
        self.stage.loop.call_later(0.002, self._has_read, actor)
        return TurnResult.AGAIN

    def _has_read(self, actor: Actor) -> None:
        actor.charge(elapsed_ns=2 * MS, size_bytes=1_000)
        self.stage.scheduler.resume(actor)


@settings(max_examples=200)
@given(st.lists(OPS, max_size=40), st.booleans())
def test_every_request_has_exactly_one_fate(ops: list[tuple[object, ...]], stops_early: bool) -> None:
    chaos = Chaos(SMALL)
    minimum_ns = 0.0
    for name, *arguments in ops:
        chaos.do(name, *arguments)
        order = chaos.stage.scheduler._order
        assert isinstance(order, VirtualTime)
        assert order.minimum_ns >= minimum_ns
        minimum_ns = order.minimum_ns
        assert len(chaos.stage.scheduler) <= SMALL.actors_max
        requests_max = SMALL.mailbox_requests_max + 1  # and the one that was at hand when others took its place
        assert all(len(actor.mailbox) <= requests_max for actor in chaos.stage.scheduler)
    if stops_early:
        chaos.close()
    else:
        chaos.run(500 * MS)  # every deadline and every wait ends within 80 ms, suspended or not
    assert [ask for ask in chaos.stage.asked if len(ask.fates) != 1] == []
    assert all(isinstance(error, Planted) for error in chaos.stage.errors)


@settings(max_examples=50)
@given(st.lists(OPS, max_size=40))
def test_scheduler_is_empty_in_the_end(ops: list[tuple[object, ...]]) -> None:
    """Nothing is left behind: no actor, no alarm, no place in the run queue."""
    chaos = Chaos(SMALL)
    for name, *arguments in ops:
        chaos.do(name, *arguments)
    while chaos.suspended:
        chaos.resume(0)
    chaos.run(1_000 * MS)
    scheduler = chaos.stage.scheduler
    assert len(scheduler) == 0
    assert scheduler._ready == []
    assert scheduler._timers._timer is None
