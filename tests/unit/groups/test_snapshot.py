"""The estimate of a group's memory against what Python has allocated for it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from fairway.broker.groups import GroupHost
from fairway.groups import GroupConfig, GroupStateMachine, JoinClaim, Order, SettleVerdict
from fairway.names import ConsumerName, GroupName

ANN = ConsumerName("ann".ljust(200, "x"))
START = 10**9  # numbers as large as those of a subject that is in use
NOW_MS, NOW_NS = 10**12, 10**15
RATIO_MIN, RATIO_MAX = 1.0, 3.2  # a held lot counts the attempt that it may become, and so three times what it takes


def _group(config: GroupConfig) -> GroupStateMachine:
    state_machine = GroupStateMachine()
    state_machine.apply_all(state_machine.configure(0, config, now_ms=1).events)
    state_machine.apply_all(state_machine.seek(START, now_ms=1).events)
    _join(state_machine, ANN)
    return state_machine


def _join(state_machine: GroupStateMachine, name: ConsumerName, secret: bytes = b"") -> None:
    decision = state_machine.join(
        name, version=0, arrived=0, resume_at=0, now_ns=NOW_NS, now_ms=NOW_MS, claim=JoinClaim(secret)
    )
    state_machine.apply_all(decision.events, NOW_NS)


def _hashes(first: int, count: int) -> list[int]:
    return [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(first, first + count)]


def _pull(state_machine: GroupStateMachine, count: int, arrived: int, keys: list[int]) -> int:
    pulled = state_machine.pull(
        ANN,
        arrived=arrived,
        messages_max=count,
        fresh=(state_machine.cursor, count),
        now_ns=NOW_NS,
        now_ms=NOW_MS,
        keys=keys,
    )
    state_machine.apply_all(pulled.events, NOW_NS)
    return pulled.number or arrived


def _hosts() -> list[GroupHost]:
    return [
        GroupHost(1_000 + number, 5_000, GroupName(f"{number}".ljust(200, "x")), _group(GroupConfig()))
        for number in range(500)
    ]


def _members() -> GroupStateMachine:
    state_machine = _group(GroupConfig())
    for number in range(5_000):
        _join(state_machine, ConsumerName(f"{number}".ljust(200, "x")), number.to_bytes(32, "little"))
    return state_machine


def _held() -> GroupStateMachine:
    state_machine, arrived = _group(GroupConfig(max_handling_ms=10**6)), 0
    for _ in range(4_000):
        arrived = _pull(state_machine, 1_000, arrived, [])
    return state_machine


def _retrying() -> GroupStateMachine:
    """Every lot in two parts that wait, each with its own reason."""
    state_machine, arrived = _group(GroupConfig()), 0
    for number in range(2_000):
        at = state_machine.cursor
        arrived = _pull(state_machine, 1_000, arrived, [])
        for ranges in ([(at, 1), (at + 2, 500)], [(at + 1, 1), (at + 502, 498)]):
            reason = f"{number} {ranges[0][0]}".ljust(200, "r")
            settled = state_machine.settle(
                ANN, SettleVerdict.RETRY, at, 1, ranges, now_ms=NOW_MS, after_ms=5_000, reason=reason
            )
            state_machine.apply_all(settled.events, NOW_NS)
    return state_machine


def _keyed() -> GroupStateMachine:
    """As many as make the tables grow for the last time."""
    state_machine, arrived = _group(GroupConfig(order=Order.KEY)), 0
    for _ in range(44):
        arrived = _pull(state_machine, 1_000, arrived, _hashes(state_machine.cursor, 1_000))
    return state_machine


def _parked() -> GroupStateMachine:
    """One behind each of many keys."""
    state_machine, arrived = _group(GroupConfig(order=Order.KEY)), 0
    keys = _hashes(START, 4_000)
    for start in range(0, 4_000, 1_000):
        arrived = _pull(state_machine, 1_000, arrived, keys[start : start + 1_000])
    for start in range(0, 4_000, 1_000):
        arrived = _pull(state_machine, 1_000, arrived, keys[start : start + 1_000])
    assert state_machine.describe(state_machine.cursor, now_ns=NOW_NS, now_ms=NOW_MS).parked == 4_000
    return state_machine


def _resting() -> GroupStateMachine:
    state_machine, arrived = _group(GroupConfig(order=Order.KEY, rate_per_key=0.001)), 0
    for _ in range(44):
        at = state_machine.cursor
        arrived = _pull(state_machine, 1_000, arrived, _hashes(at, 1_000))
        state_machine.apply_all(
            state_machine.settle(ANN, SettleVerdict.ACK, at, 1, [(at, 1_000)], now_ms=NOW_MS).events, NOW_NS
        )
    return state_machine


def _paused() -> GroupStateMachine:
    state_machine = _group(GroupConfig())
    for number in range(5_000):
        state_machine.apply_all(state_machine.pause(ConsumerName(f"{number}".ljust(200, "x")), now_ms=1).events)
    return state_machine


@pytest.mark.parametrize("make", [_hosts, _members, _held, _retrying, _keyed, _parked, _resting, _paused])
def test_the_estimate_is_no_less_than_what_is_allocated(
    make: Callable[[], GroupStateMachine | list[GroupHost]],
) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    laws = [host.state_machine for host in made] if isinstance(made, list) else [made]
    estimated = sum(state_machine.held_bytes for state_machine in laws)
    assert RATIO_MIN <= estimated / allocated <= RATIO_MAX


@pytest.mark.parametrize("make", [_members, _held, _retrying, _keyed, _parked, _resting, _paused])
def test_a_group_that_is_restored_weighs_the_same(make: Callable[[], GroupStateMachine]) -> None:
    state_machine = make()
    assert GroupStateMachine.restore(state_machine.snapshot()).held_bytes == state_machine.held_bytes


def test_what_fails_or_comes_back_weighs_no_more_than_what_was_held() -> None:
    state_machine = _held()
    before = state_machine.held_bytes
    at = START
    settled = state_machine.settle(
        ANN, SettleVerdict.RETRY, at, 1, [(at, 1_000)], now_ms=NOW_MS, after_ms=1, reason="r" * 200, may_grow=False
    )
    state_machine.apply_all(settled.events, NOW_NS)
    assert state_machine.held_bytes <= before
    state_machine.apply_all(state_machine.leave(ANN, now_ms=NOW_MS).events)
    assert state_machine.held_bytes <= before


def test_everything_settled_weighs_nothing() -> None:
    state_machine = _retrying()
    state_machine.apply_all(state_machine.seek(state_machine.cursor, now_ms=NOW_MS).events)
    assert state_machine.held_bytes == _group(GroupConfig()).held_bytes


def test_a_lot_is_not_split_where_there_is_no_memory_for_two() -> None:
    state_machine = _held()
    part = state_machine.settle(ANN, SettleVerdict.RETRY, START, 1, [(START, 1)], now_ms=NOW_MS, may_grow=False)
    assert part.outcome.value == "busy"
    acked = state_machine.settle(ANN, SettleVerdict.ACK, START, 1, [(START, 1)], now_ms=NOW_MS, may_grow=False)
    assert acked.settled == 1


def test_a_pull_takes_as_many_lots_as_there_is_memory_for_and_a_few_in_any_case() -> None:
    state_machine = _group(GroupConfig(lot_messages_max=1))

    def pull(arrived: int, bytes_left: int) -> int:
        pulled = state_machine.pull(
            ANN,
            arrived=arrived,
            messages_max=1_000,
            fresh=(state_machine.cursor, 1_000),
            now_ns=NOW_NS,
            now_ms=NOW_MS,
            bytes_left=bytes_left,
        )
        state_machine.apply_all(pulled.events, NOW_NS)
        return len(pulled.lots)

    assert pull(0, 0) == 2, "what the reserve of a group is for"
    assert pull(1, 0) == 0
    grown = state_machine.held_bytes
    assert pull(1, 10_000) == 6
    assert state_machine.held_bytes - grown <= 10_000
