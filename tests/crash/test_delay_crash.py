"""Delay servers and brokers that are killed for a few seconds among programs that schedule; and proof that the checker
sees what it is for, with planted lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash import delay_rounds
from tests.crash.delay_ledger import DelayLedger, Promise, Shifts
from tests.crash.delay_pair import PairStage
from tests.crash.delay_rounds import DelayCounts
from tests.crash.delay_server import Doom

SECONDS = 1.5
# Append, move, dispatch: what is intended and not sent, what is sent and not noted.
DOOMS = [
    Doom("messages:after-sync", 2),
    Doom("schedule:after-write", 2),
    Doom("actions:after-sync", 3),
    Doom("noted", 3),
]


@pytest.mark.parametrize("form", ["serve", "up"])
def test_nothing_is_lost_or_repeated_when_delay_server_and_broker_are_killed(form: str) -> None:
    counts = delay_rounds.run(form, SECONDS, 7, DelayCounts())
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.kills + counts.stops >= 1
    assert counts.told["acknowledged"] > 10
    assert counts.told["delivered"] > 10


def test_nothing_is_lost_or_repeated_when_the_delay_server_dies_at_named_places() -> None:
    counts = delay_rounds.run("places", SECONDS, 8, DelayCounts(), planned=iter(DOOMS * 9))
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.place_kills >= 1
    assert counts.told["delivered"] > 10


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_when_copies_are_killed_by_turns() -> None:
    counts = delay_rounds.run("pair", 20 * SECONDS, 9, DelayCounts(), made=PairStage)
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.delay_kills >= 5
    assert counts.told["delivered"] > 10


# --- planted lines ----------------------------------------------------------------------------------------------------

SENDING = [1, "sending", ["s", [["a", "ka", 100], ["b", "kb", 100]]]]
RECEIPTS = [2, "receipts", [[["a", "ID-A"], ["b", "ID-B"]]]]
TRIO = [1, "sending", ["s", [["x", "k", 100], ["y", "k", 100], ["z", "k", 100]]]]
TRIO_RECEIPTS = [2, "receipts", [[["x", "ID-X"], ["y", "ID-Y"], ["z", "ID-Z"]]]]


def seen(name: str, sequence: int = 0, at_ms: int = 105, message_id: str | None = None) -> list[Any]:
    key = f"k{name}" if name in "ab" else "k"
    return [110, "seen", [[["s", sequence, message_id or f"ID-{name.upper()}", name, key, at_ms]]]]


def asking(*names: str, due_ms: int = 0) -> list[Any]:
    return [50, "asking", ["1", "reschedule" if due_ms else "cancel", list(names), due_ms]]


def told(fate: str, messages: int = 0, at_ms: int = 60) -> list[Any]:
    return [at_ms, "told", ["1", fate, messages]]


GOOD = [SENDING, RECEIPTS, seen("a"), seen("b", 1)]
THREE = [TRIO, TRIO_RECEIPTS]


def judged(lines: list[list[Any]], folder: Path, shifts: Shifts | None = None) -> set[Promise]:
    path = folder / "said"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '[9, "half a li')
    ledger = DelayLedger(shifts)
    ledger.read([path])
    return {breach.promise for breach in ledger.judge()}


@pytest.mark.parametrize(
    ("lines", "promises"),
    [
        (GOOD, set()),
        ([*GOOD, seen("a")], set()),
        ([SENDING, seen("a")], set()),
        ([SENDING, RECEIPTS, seen("a")], {Promise.LOST}),
        ([*GOOD, seen("a", 2)], {Promise.REPEATED}),
        ([SENDING, RECEIPTS, seen("a"), seen("b", 1, at_ms=99)], {Promise.EARLY}),
        ([*GOOD, seen("c", 2)], {Promise.PHANTOM}),
        ([SENDING, RECEIPTS, seen("b"), seen("a", 1, message_id="ID-B")], {Promise.CHANGED}),
        ([*GOOD, asking("a"), told("cancelled", 1)], {Promise.UNSTOPPED}),
        ([SENDING, RECEIPTS, seen("b"), asking("a"), told("cancelled", 1)], set()),
        ([SENDING, RECEIPTS, seen("b"), asking("a"), told("cancelled", 0)], set()),
        ([SENDING, RECEIPTS, seen("b"), asking("a")], set()),
        ([*GOOD, asking("a")], set()),
        ([SENDING, RECEIPTS, seen("b"), asking("a"), told("unknown")], {Promise.LOST, Promise.UNTRUE}),
        ([*GOOD, asking("a"), told("already_dispatched", at_ms=100)], set()),
        ([*GOOD, asking("a"), told("already_dispatched", at_ms=99)], {Promise.UNTRUE}),
        ([*GOOD, asking("a", due_ms=106), told("rescheduled", 1)], {Promise.EARLY}),
        ([*GOOD, asking("a", due_ms=106)], set()),
        ([*THREE, seen("x"), asking("x", "y", "z"), told("cancelled", 2)], set()),
        ([*THREE, seen("x"), seen("y", 1), asking("x", "y", "z"), told("cancelled", 2)], {Promise.UNSTOPPED}),
        ([*THREE, asking("x", "y", "z"), told("already_dispatched", at_ms=100)], {Promise.LOST, Promise.UNTRUE}),
        ([*THREE, seen("x"), asking("x", "y", "z"), told("already_dispatched", at_ms=100)], set()),
        ([*THREE, seen("x"), asking("x"), told("already_dispatched", at_ms=100)], {Promise.LOST}),
    ],
    ids=lambda value: None if not isinstance(value, set) else "-".join(sorted(each.name for each in value)) or "good",
)
def test_checker_judges(lines: list[list[Any]], promises: set[Promise], tmp_path: Path) -> None:
    assert judged(lines, tmp_path) == promises


def test_a_repeated_cancel_may_find_its_message_forgotten(tmp_path: Path) -> None:
    """The first one was carried out, its answer was lost, and days passed on the server's clock before the second."""
    lines = [SENDING, RECEIPTS, seen("b"), asking("a"), told("unknown", at_ms=60)]
    shifts = Shifts()
    shifts.note(0, 0)
    assert judged(lines, tmp_path, shifts) == {Promise.LOST, Promise.UNTRUE}
    shifts.note(55, 86_400_000)
    assert judged(lines, tmp_path, shifts) == set()
    assert judged([*lines[:-1], told("already_dispatched", at_ms=60)], tmp_path, shifts) == {
        Promise.LOST,
        Promise.UNTRUE,
    }


def test_what_is_early_is_told_by_the_delay_servers_clock(tmp_path: Path) -> None:
    shifts = Shifts()
    shifts.note(0, 0)
    shifts.note(103, 1_000)
    lines = [[1, "sending", ["s", [["a", "ka", 600]]]], [2, "receipts", [[["a", "ID-A"]]]]]
    assert judged([*lines, seen("a", at_ms=103)], tmp_path, shifts) == set()
    assert judged([*lines, seen("a", at_ms=102)], tmp_path, shifts) == {Promise.EARLY}
