"""Every group gets its share of time; and the instrument: QMQ's two orders and a plain queue are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairway.scheduling import SchedulerOptions, VirtualTime
from tests.unit.scheduling.fairness import (
    MS,
    SLICE_NS,
    MakeOrder,
    check_cold_reader,
    check_latecomer,
    check_shares,
    shares,
)
from tests.unit.scheduling.orders import Arrival, LastExecution, TotalTime
from tests.unit.scheduling.stage import Group, Stage

CROWD_AND_PAIR = ((100, 50_000), (2, 50_000))
SHORT_AND_LONG = ((2, 5_000), (2, 2 * MS))


@pytest.mark.parametrize("groups", [CROWD_AND_PAIR, SHORT_AND_LONG, ((1, 30_000),) * 20], ids=str)
def test_equal_weights_get_equal_time(groups: tuple[tuple[int, int], ...]) -> None:
    check_shares(VirtualTime, groups, ns=400 * MS)


@pytest.mark.parametrize("cost_ns", [20_000, 300_000, 2 * MS])
def test_time_goes_by_weight(cost_ns: int) -> None:
    check_shares(VirtualTime, ((5, cost_ns), (50, cost_ns), (2, 40_000)), {0: 1, 1: 2, 2: 4}, ns=600 * MS)


def test_small_weight_is_not_lifted_by_the_bound_on_leads() -> None:
    check_shares(VirtualTime, ((5, 2 * MS), (5, 1 * MS)), {0: 0.01}, ns=8_000 * MS)


def test_weight_counts_from_the_moment_it_is_set() -> None:
    stage = Stage()
    for key in ("steady", "favoured"):
        Group(stage, key, 5, 50_000)
    stage.run(100 * MS)
    stage.scheduler.set_weight("favoured", 3)
    changed_ns = stage.now_ns
    stage.run(100 * MS)
    before = (stage.time_of(key) - stage.time_of(key, changed_ns) for key in ("steady", "favoured"))
    after = [stage.time_of(key, changed_ns) for key in ("steady", "favoured")]
    assert abs(next(before) - next(before)) <= SLICE_NS + MS
    assert after[1] / after[0] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("has_slept", [True, False], ids=["sleeper", "newcomer"])
def test_latecomer_gets_its_share_and_no_more(has_slept: bool) -> None:
    check_latecomer(VirtualTime, has_slept=has_slept)


def test_cold_reads_are_on_the_account() -> None:
    check_cold_reader(VirtualTime)


def test_bytes_are_on_the_account() -> None:
    stage = Stage()
    Group(stage, "light", 3, 50_000)
    Group(stage, "heavy", 3, 50_000, size_bytes=200_000)  # 50 µs for the bytes beside 50 µs of time
    stage.run(200 * MS)
    assert stage.time_of("light") / stage.time_of("heavy") == pytest.approx(2, rel=0.05)


def test_one_huge_charge_holds_an_actor_back_for_a_bounded_time() -> None:
    stage = Stage()
    Group(stage, "busy", 5, 50_000)
    Group(stage, "charged", 5, 50_000)
    stage.run(10 * MS)
    stage.actor("charged").charge(elapsed_ns=60_000 * MS)  # a disk that hung for a minute
    charged_ns = stage.now_ns
    stage.run(150 * MS)
    assert 50 * MS - 2 * SLICE_NS <= 2 * stage.time_of("charged", charged_ns) <= 50 * MS + 2 * SLICE_NS


def test_ready_actor_is_not_run_before_what_it_owes_is_counted() -> None:
    stage = Stage()
    for key in ("debtor", "other"):
        for _ in range(3):
            stage.ask(key, 600_000)  # a slice each
    stage.actor("debtor").charge(elapsed_ns=50 * MS)
    stage.run(10 * MS)
    assert [one.key for one in stage.served] == ["other"] * 3 + ["debtor"] * 3


def test_idle_actor_is_removed_and_comes_back_fair() -> None:
    stage = Stage(options=SchedulerOptions(idle_ns_max=20 * MS))
    Group(stage, "busy", 5, 50_000)
    stage.ask("visitor")
    stage.run(100 * MS)
    assert stage.scheduler.find("visitor") is None
    back_ns = stage.now_ns
    Group(stage, "visitor", 5, 50_000)
    stage.run(50 * MS)
    assert stage.time_of("visitor", back_ns) == pytest.approx(25 * MS, abs=2 * SLICE_NS)


# --- the instrument --------------------------------------------------------------------------------------------------


def test_arrival_is_first_come_first_served() -> None:
    stage = Stage(order=Arrival())
    for key in "abacabbca":
        stage.ask(key)
    stage.run(1 * MS)
    assert "".join(str(one.key) for one in stage.served) == "abacabbca"


def test_plain_queue_goes_by_the_number_of_requests() -> None:
    crowd, pair = shares(Arrival(), CROWD_AND_PAIR, {}, 200 * MS)
    assert crowd / pair == pytest.approx(50, rel=0.05)
    with pytest.raises(AssertionError):
        check_shares(Arrival, CROWD_AND_PAIR)


@pytest.mark.parametrize("has_slept", [True, False], ids=["sleeper", "newcomer"])
def test_total_time_lets_a_latecomer_starve_the_others(has_slept: bool) -> None:
    with pytest.raises(AssertionError):
        check_latecomer(TotalTime, has_slept=has_slept)


def test_last_execution_gives_equal_turns_not_equal_time() -> None:
    with pytest.raises(AssertionError):
        check_shares(LastExecution, SHORT_AND_LONG)
    with pytest.raises(AssertionError):
        check_shares(LastExecution, CROWD_AND_PAIR, {0: 1, 1: 2})


@pytest.mark.parametrize("make_order", [LastExecution, Arrival], ids=["last execution", "arrival"])
def test_other_orders_do_not_hold_a_cold_reader_back(make_order: MakeOrder) -> None:
    with pytest.raises(AssertionError):
        check_cold_reader(make_order)


@pytest.mark.parametrize("check", [check_shares, check_cold_reader], ids=["shares", "cold reader"])
def test_total_time_is_fair_among_those_that_never_sleep(check: Callable[..., None]) -> None:
    """What the checks above catch is the fault that each order has, not a difference in the harness."""
    if check is check_shares:
        check(TotalTime, SHORT_AND_LONG)
    else:
        check(TotalTime)
