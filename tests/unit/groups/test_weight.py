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
    law = GroupStateMachine()
    law.apply_all(law.configure(0, config, now_ms=1).events)
    law.apply_all(law.seek(START, now_ms=1).events)
    _join(law, ANN)
    return law


def _join(law: GroupStateMachine, name: ConsumerName, secret: bytes = b"") -> None:
    decision = law.join(name, version=0, arrived=0, resume_at=0, now_ns=NOW_NS, now_ms=NOW_MS, claim=JoinClaim(secret))
    law.apply_all(decision.events, NOW_NS)


def _hashes(first: int, count: int) -> list[int]:
    return [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(first, first + count)]


def _pull(law: GroupStateMachine, count: int, arrived: int, keys: list[int]) -> int:
    pulled = law.pull(
        ANN, arrived=arrived, messages_max=count, fresh=(law.cursor, count), now_ns=NOW_NS, now_ms=NOW_MS, keys=keys
    )
    law.apply_all(pulled.events, NOW_NS)
    return pulled.number or arrived


def _hosts() -> list[GroupHost]:
    return [
        GroupHost(1_000 + number, 5_000, GroupName(f"{number}".ljust(200, "x")), _group(GroupConfig()))
        for number in range(500)
    ]


def _members() -> GroupStateMachine:
    law = _group(GroupConfig())
    for number in range(5_000):
        _join(law, ConsumerName(f"{number}".ljust(200, "x")), number.to_bytes(32, "little"))
    return law


def _held() -> GroupStateMachine:
    law, arrived = _group(GroupConfig(max_handling_ms=10**6)), 0
    for _ in range(4_000):
        arrived = _pull(law, 1_000, arrived, [])
    return law


def _retrying() -> GroupStateMachine:
    """Every lot in two parts that wait, each with its own reason."""
    law, arrived = _group(GroupConfig()), 0
    for number in range(2_000):
        at = law.cursor
        arrived = _pull(law, 1_000, arrived, [])
        for ranges in ([(at, 1), (at + 2, 500)], [(at + 1, 1), (at + 502, 498)]):
            reason = f"{number} {ranges[0][0]}".ljust(200, "r")
            settled = law.settle(ANN, SettleVerdict.RETRY, at, 1, ranges, now_ms=NOW_MS, after_ms=5_000, reason=reason)
            law.apply_all(settled.events, NOW_NS)
    return law


def _keyed() -> GroupStateMachine:
    """As many as make the tables grow for the last time."""
    law, arrived = _group(GroupConfig(order=Order.KEY)), 0
    for _ in range(44):
        arrived = _pull(law, 1_000, arrived, _hashes(law.cursor, 1_000))
    return law


def _parked() -> GroupStateMachine:
    """One behind each of many keys."""
    law, arrived = _group(GroupConfig(order=Order.KEY)), 0
    keys = _hashes(START, 4_000)
    for start in range(0, 4_000, 1_000):
        arrived = _pull(law, 1_000, arrived, keys[start : start + 1_000])
    for start in range(0, 4_000, 1_000):
        arrived = _pull(law, 1_000, arrived, keys[start : start + 1_000])
    assert law.describe(law.cursor, now_ns=NOW_NS, now_ms=NOW_MS).parked == 4_000
    return law


def _resting() -> GroupStateMachine:
    law, arrived = _group(GroupConfig(order=Order.KEY, rate_per_key=0.001)), 0
    for _ in range(44):
        at = law.cursor
        arrived = _pull(law, 1_000, arrived, _hashes(at, 1_000))
        law.apply_all(law.settle(ANN, SettleVerdict.ACK, at, 1, [(at, 1_000)], now_ms=NOW_MS).events, NOW_NS)
    return law


def _paused() -> GroupStateMachine:
    law = _group(GroupConfig())
    for number in range(5_000):
        law.apply_all(law.pause(ConsumerName(f"{number}".ljust(200, "x")), now_ms=1).events)
    return law


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
    laws = [host.law for host in made] if isinstance(made, list) else [made]
    estimated = sum(law.held_bytes for law in laws)
    assert RATIO_MIN <= estimated / allocated <= RATIO_MAX


@pytest.mark.parametrize("make", [_members, _held, _retrying, _keyed, _parked, _resting, _paused])
def test_a_group_that_is_restored_weighs_the_same(make: Callable[[], GroupStateMachine]) -> None:
    law = make()
    assert GroupStateMachine.restore(law.snapshot()).held_bytes == law.held_bytes


def test_what_fails_or_comes_back_weighs_no_more_than_what_was_held() -> None:
    law = _held()
    before = law.held_bytes
    at = START
    settled = law.settle(
        ANN, SettleVerdict.RETRY, at, 1, [(at, 1_000)], now_ms=NOW_MS, after_ms=1, reason="r" * 200, may_grow=False
    )
    law.apply_all(settled.events, NOW_NS)
    assert law.held_bytes <= before
    law.apply_all(law.leave(ANN, now_ms=NOW_MS).events)
    assert law.held_bytes <= before


def test_everything_settled_weighs_nothing() -> None:
    law = _retrying()
    law.apply_all(law.seek(law.cursor, now_ms=NOW_MS).events)
    assert law.held_bytes == _group(GroupConfig()).held_bytes


def test_a_lot_is_not_split_where_there_is_no_memory_for_two() -> None:
    law = _held()
    part = law.settle(ANN, SettleVerdict.RETRY, START, 1, [(START, 1)], now_ms=NOW_MS, may_grow=False)
    assert part.outcome.value == "busy"
    acked = law.settle(ANN, SettleVerdict.ACK, START, 1, [(START, 1)], now_ms=NOW_MS, may_grow=False)
    assert acked.settled == 1


def test_a_pull_takes_as_many_lots_as_there_is_memory_for_and_a_few_in_any_case() -> None:
    law = _group(GroupConfig(lot_messages_max=1))

    def pull(arrived: int, bytes_left: int) -> int:
        pulled = law.pull(
            ANN,
            arrived=arrived,
            messages_max=1_000,
            fresh=(law.cursor, 1_000),
            now_ns=NOW_NS,
            now_ms=NOW_MS,
            bytes_left=bytes_left,
        )
        law.apply_all(pulled.events, NOW_NS)
        return len(pulled.lots)

    assert pull(0, 0) == 2, "what the reserve of a group is for"
    assert pull(1, 0) == 0
    grown = law.held_bytes
    assert pull(1, 10_000) == 6
    assert law.held_bytes - grown <= 10_000
