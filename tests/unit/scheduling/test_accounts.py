"""Accounts of connections: who uses many names gets no more than who uses one, and waits behind nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count

import pytest

from fairway.scheduling import Account, Actor, TurnResult, VirtualTime
from fairway.scheduling.actor import SWEEP_ITEMS
from fairway.scheduling.virtual_time import DEBIT_NS
from tests.unit.scheduling.stage import Ask, Stage

MS = 1_000_000
US = 1_000


class Connection:
    """Always has so many requests in flight, each for the actor that `name` says next."""

    def __init__(
        self, stage: Stage, name: Callable[[], Hashable], *, requests: int = 1, cost_ns: int = 20 * US
    ) -> None:
        self.account = Account()
        self.used_ns = 0
        self._stage = stage
        self._name = name
        self._cost_ns = cost_ns
        for _ in range(requests):
            self._next()

    def _next(self) -> None:
        self._stage.ask(self._name(), self._cost_ns, work=self._follow, account=self.account)

    def _follow(self, _: Ask, __: Actor) -> TurnResult:
        self.used_ns += self._cost_ns
        self._next()
        return TurnResult.DONE


def share_of(stage: Stage, one: Connection, ns: int = 200 * MS) -> float:
    used_ns, began_ns = one.used_ns, stage.now_ns
    stage.run(ns)
    return (one.used_ns - used_ns) / (stage.now_ns - began_ns)


@pytest.mark.parametrize("requests", [1, 100])
@pytest.mark.parametrize("attackers", [1, 20])
def test_new_names_without_end_take_no_more_than_their_connections_share(attackers: int, requests: int) -> None:
    stage, names = Stage(), count()
    steady = Connection(stage, lambda: "steady", requests=3)
    for _ in range(attackers):
        Connection(stage, lambda: next(names), requests=requests)
    assert share_of(stage, steady, ns=20 * (attackers + 1) * MS) >= 0.95 / (attackers + 1)


def test_new_connections_without_end_do_not_starve_one_that_stays() -> None:
    """Each of 20 comes back at once, as somebody else and with another name."""
    stage, names = Stage(), count()
    steady = Connection(stage, lambda: "steady", requests=3)

    def come_back(_: Ask, __: Actor) -> TurnResult:
        stage.ask(next(names), 20 * US, work=come_back, account=Account())
        return TurnResult.DONE

    for _ in range(20):
        stage.ask(next(names), 20 * US, work=come_back, account=Account())
    assert share_of(stage, steady, ns=400 * MS) >= 0.95 / 21


def test_a_hundred_connections_of_one_group_have_the_share_of_one_group() -> None:
    stage = Stage()
    small = Connection(stage, lambda: "small", requests=2)
    for _ in range(100):
        Connection(stage, lambda: "large")
    assert share_of(stage, small) == pytest.approx(0.5, abs=0.025)


def test_names_and_connections_together_are_bounded_by_the_smaller_share() -> None:
    """Three contenders: one actor alone, one with a hundred connections, one connection with a hundred actors."""
    stage, names = Stage(), count()
    alone = Connection(stage, lambda: "alone", requests=2)
    many = [Connection(stage, lambda: "crowd") for _ in range(100)]
    spread = Connection(stage, lambda: next(names) % 100, requests=50)
    stage.run(300 * MS)
    used = [alone.used_ns, sum(each.used_ns for each in many), spread.used_ns]
    assert used == [pytest.approx(sum(used) / 3, rel=0.05)] * 3


def test_within_an_actor_a_connection_with_one_request_goes_before_one_with_a_thousand() -> None:
    stage = Stage()
    flood = Account()
    for _ in range(1_000):
        stage.ask("subject", 50 * US, account=flood)
    stage.run(5 * MS)
    lone = stage.ask("subject", 50 * US, account=Account())
    stage.run(DEBIT_NS + MS // 2)  # the flood has 45 ms to go
    assert lone.fates == ["done"]


def test_the_requests_of_a_connection_to_an_actor_keep_their_order() -> None:
    stage, accounts = Stage(), [Account() for _ in range(5)]
    asks = [stage.ask("subject", 10 * US, account=accounts[number % 5]) for number in range(200)]
    stage.run(10 * MS)
    for at in range(5):
        ends = [ask.ended_ns for ask in asks[at::5]]
        assert ends == sorted(ends)


def test_a_connection_that_floods_elsewhere_does_not_hold_up_an_actor_that_it_shares() -> None:
    stage, names = Stage(), count()
    flood = Connection(stage, lambda: ("elsewhere", next(names)), requests=100)
    stage.run(50 * MS)
    behind = [stage.ask("shared", 20 * US, account=flood.account) for _ in range(20)]
    good = stage.ask("shared", 20 * US, account=Account())
    stage.run(1 * MS)
    assert good.fates == ["done"]
    assert all(not ask.fates or good.ended_ns < ask.ended_ns for ask in behind)


def test_time_that_a_connection_used_outside_of_actors_counts() -> None:
    stage = Stage()
    reading = Account()
    stage.ask("a", account=reading)
    stage.run(1 * MS)
    Connection(stage, lambda: "c")
    assert stage.scheduler.charge(reading, 20 * MS, stage.scheduler.ready_weight)
    first = stage.ask("b", 100 * US, account=reading)
    stage.run(18 * MS)  # as long as it was read itself, `c` is served
    assert first.fates == []
    stage.run(4 * MS)
    assert first.fates == ["done"]
    stage.run(1 * MS)
    assert not stage.scheduler.charge(reading, 0, stage.scheduler.ready_weight)


def test_reading_for_one_actor_does_not_put_others_behind_it() -> None:
    """Reading took half of the time: virtual time ran ahead of the actor that was busy, and whoever came later waited
    until that one had caught up."""
    stage = Stage()
    flood = Connection(stage, lambda: "busy", requests=50)
    good = Account()
    stage.ask("good", account=good)
    stage.run(2 * MS)
    for _ in range(200):
        stage.scheduler.charge(flood.account, 200 * US, stage.scheduler.ready_weight)
        stage.run(200 * US)
    late = stage.ask("good", account=good)
    stage.run(1 * MS)
    assert late.fates == ["done"]


def test_one_that_has_the_loop_to_itself_is_not_behind_when_others_come() -> None:
    """Each of its requests was read alone, and half of that time counted as taken from others: after a second it had to
    wait for 0.1 s."""
    stage = Stage()
    alone = Account()
    for _ in range(5_000):
        began = stage.scheduler.ready_weight
        stage.ask("alone", 50 * US, account=alone)
        stage.scheduler.charge(alone, 100 * US, began)
        stage.run(200 * US)
    Connection(stage, lambda: "other", requests=50)
    stage.run(2 * MS)
    late = stage.ask("alone", 50 * US, account=alone)
    stage.run(1 * MS)
    assert late.fates == ["done"]


def test_what_is_to_be_called_first_is_called_before_the_next_slice() -> None:
    stage, said = Stage(), list[str]()

    def work(_: Ask, __: Actor) -> TurnResult:
        said.append("slice")
        return TurnResult.DONE

    def is_ready() -> None:
        stage.ask("a", 10 * US, work=work)
        stage.loop.call_soon(stage.scheduler.call_first, lambda: said.append("first"))
        stage.ask("b", 300 * US, work=work)
        stage.ask("c", 10 * US, work=work)

    stage.loop.call_soon(is_ready)
    stage.run(2 * MS)
    assert said == ["slice", "slice", "first", "slice"]


def test_what_a_slice_wants_to_be_called_is_called_in_its_own_turn() -> None:
    stage, said = Stage(), list[str]()

    def work(ask: Ask, _: Actor) -> TurnResult:
        said.append(str(ask.key))
        if ask.key == "a":
            stage.scheduler.call_first(lambda: said.append("answer"))
        return TurnResult.DONE

    stage.ask("a", 300 * US, work=work)
    stage.ask("b", 10 * US, work=work)
    stage.loop.call_later(0, said.append, "next turn")
    stage.run(2 * MS)
    assert said == ["a", "answer", "next turn", "b"]


def test_one_that_comes_back_after_a_nap_is_served_at_once_and_has_saved_nothing() -> None:
    stage, names = Stage(), count()
    visitor = Account()
    stage.ask("visitor", account=visitor)
    stage.run(1 * MS)
    other = Connection(stage, lambda: next(names), requests=10)
    stage.run(100 * MS)
    asks = [stage.ask("visitor", 50 * US, account=visitor) for _ in range(1_000)]
    stage.run(1 * MS)
    assert asks[0].fates == ["done"]
    used_ns = other.used_ns
    stage.run(40 * MS)
    assert other.used_ns - used_ns >= 18 * MS


def test_a_long_mailbox_is_swept_step_by_step_and_nobody_is_missed() -> None:
    """A slow actor, so that most of them are in its mailbox when their time is up or their senders are gone."""
    stage, accounts = Stage(), [Account() for _ in range(7)]
    asks = [
        Ask("slow", 1 * MS, deadline_ns=(200 + number % 7) * MS, account=accounts[number * number % 7])
        for number in range(3 * SWEEP_ITEMS)
    ]
    for ask in asks:
        stage.scheduler.dispatch(ask.key, ask, stage)
    stage.run(100 * MS)
    for ask in asks[::5]:
        ask.is_cancelled = True
    stage.run(300 * MS)
    assert all(len(ask.fates) == 1 for ask in asks)
    assert {ask.fates[0] for ask in asks} == {"done", "late", "gone"}
    assert len(stage.actor("slow").mailbox) == 0


def test_a_connection_far_ahead_costs_the_same_however_many_requests_wait() -> None:
    """Each turn puts off what a connection has asked for beyond its share: once for all, not request by request."""

    class Counting(VirtualTime):
        looks = 0

        def _least_start_ns(self, account: Account | None) -> float:
            self.looks += 1
            return super()._least_start_ns(account)

    order = Counting()
    stage = Stage(order=order)
    Connection(stage, lambda: "one", requests=1_000, cost_ns=10 * US)
    Connection(stage, lambda: "other")
    stage.run(200 * MS)
    assert order.looks < 4 * len(stage.served)
