"""A broker that is killed for a few seconds among real clients, and proof that the checker sees what it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash import broker_rounds
from tests.crash.broker_rounds import Counts
from tests.crash.broker_witness import Reading
from tests.simulation.broker_truth import Promise, Truth

SECONDS = 5.0
LEASE_MS = 100
MS = 1_000_000


def test_nothing_is_lost_when_the_broker_is_killed_among_its_clients() -> None:
    counts = broker_rounds.run(SECONDS, 7, Counts())
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.kills + counts.stops >= 3
    assert counts.acknowledged > 100
    assert counts.acked > 100


# --- the checker, with planted lines ---------------------------------------------------------------------------------

SENT = [1 * MS, "sent", ["orders", ["a", "b"], 1 * MS]]
RECEIPT = [2 * MS, "receipt", ["orders", 0, ["a", "b"]]]
JOINED = [2 * MS, "contact", ["g", "orders", "c", 2 * MS, 2 * MS]]
DELIVERY = [4 * MS, "delivery", ["g", "orders", "c", [[0, "a"], [1, "b"]], 3 * MS, 4 * MS]]
CONTACT = [4 * MS, "contact", ["g", "orders", "c", 3 * MS, 4 * MS]]
ACK = [5 * MS, "acked", ["g", "orders", [0, 1], 0]]
HISTORY = [SENT, RECEIPT, JOINED, DELIVERY, CONTACT, ACK]


def again(at_ms: int, name: str = "d") -> list[Any]:
    return [at_ms * MS, "delivery", ["g", "orders", name, [[0, "a"]], (at_ms - 1) * MS, at_ms * MS]]


def judged(lines: list[list[Any]], folder: Path) -> set[Promise]:
    path = folder / "said"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '[9, "half a li')
    truth = Truth()
    Reading(truth, LEASE_MS).read([path], [])
    truth.check_drained()
    return {breach.promise for breach in truth.breaches}


def test_a_good_history_has_no_breach(tmp_path: Path) -> None:
    assert judged(HISTORY, tmp_path) == set()


@pytest.mark.parametrize(
    ("lines", "promise"),
    [
        ([SENT, RECEIPT, JOINED, [4 * MS, "delivery", ["g", "orders", "c", [[0, "a"]], 0, 4 * MS]]], Promise.LOST),
        ([SENT, RECEIPT, JOINED, DELIVERY], Promise.STUCK),
        ([*HISTORY, [7 * MS, "delivery", ["g", "orders", "c", [[2, "z"]], 6 * MS, 7 * MS]]], Promise.PHANTOM),
        ([*HISTORY, [7 * MS, "delivery", ["g", "orders", "c", [[1, "a"]], 6 * MS, 7 * MS]]], Promise.RENAMED),
        ([*HISTORY, [7 * MS, "receipt", ["orders", 5, ["a", "b"]]]], Promise.REPEATED),
        ([*HISTORY, [8 * MS, "crash", [8 * MS]], again(300)], Promise.ACKED_AGAIN),
        ([SENT, RECEIPT, JOINED, DELIVERY, CONTACT, again(50)], Promise.DUPLICATE),
        ([*HISTORY, [50 * MS, "eviction", ["g", "orders", "c", 50 * MS]]], Promise.EVICTED),
        ([*HISTORY, [6 * MS, "blame", ["BROKE", "something else"]]], Promise.BROKE),
    ],
)
def test_checker_sees(lines: list[list[Any]], promise: Promise, tmp_path: Path) -> None:
    assert promise in judged(lines, tmp_path)


@pytest.mark.parametrize(
    "reason",
    [
        [[6 * MS, "asked", ["g", "orders", "c", [0], "retry"]], again(50)],
        [[6 * MS, "crash", [6 * MS]], again(50)],
        [again(150)],
    ],
    ids=["asked", "crash", "lease"],
)
def test_a_reason_excuses_a_second_delivery(reason: list[list[Any]], tmp_path: Path) -> None:
    assert Promise.DUPLICATE not in judged([SENT, RECEIPT, JOINED, DELIVERY, CONTACT, *reason], tmp_path)
