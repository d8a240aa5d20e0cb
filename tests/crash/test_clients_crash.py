"""Programs that use the public clients, among which a broker is killed and which are killed themselves; and proof that
the checker sees what it is for: with programs that lie, and with planted lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash import clients_rounds
from tests.crash.clients_diary import ClientReading, ClientTruth
from tests.crash.clients_rounds import ClientCounts, ClientStage
from tests.crash.clients_worker import Orders
from tests.simulation.broker_truth import Promise

SECONDS = 3.5
AWAY_S = 2.0
LEASE_MS = 100
MS = 1_000_000


def test_nothing_is_lost_when_the_broker_and_its_clients_are_killed() -> None:
    counts = clients_rounds.run(SECONDS, 7, ClientCounts())
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.kills + counts.stops >= 3
    assert counts.acknowledged > 100
    assert counts.acked > 100


def test_programs_wait_for_a_broker_that_is_away_and_go_on_without_an_error() -> None:
    counts = clients_rounds.run_away(AWAY_S, 8, ClientCounts())
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.longest_away_s == AWAY_S


# --- programs that lie -----------------------------------------------------------------------------------------------


def misbehave(stage: ClientStage) -> None:
    stage.start_broker()
    port = stage.port
    stage.start(
        [
            Orders("p-claims", "sync", "1", port, "claims", flaw="claims"),
            Orders("c-claims", "sync", "2", port, "claims", "g"),
            Orders("p-first", "many", "3", port, "first"),
            Orders("c-first", "sync", "4", port, "first", "g", flaw="acks first"),
            Orders("p-hasty", "many", "5", port, "hasty"),
            Orders("c-hasty", "sync", "6", port, "hasty", "g", flaw="does not wait"),
        ]
    )
    stage.await_progress("at first")
    time.sleep(0.5)  # by now it has acked what it will look at in half a second
    stage.kill("c-first")
    stage.suspend_broker()  # without a connection a consumer would begin nothing more
    time.sleep(0.6)  # for the others to say what is not so
    stage.kill_broker()
    stage.kill("p-claims")
    stage.kill("c-hasty")
    stage.start_broker()


def test_checker_sees_programs_that_lie() -> None:
    counts = clients_rounds.on_stage(9, ClientCounts(), misbehave)
    assert counts.failures == []
    found = {(breach.promise, name) for breach in counts.breaches for name in SUBJECTS if name in breach.sentence}
    assert found == {
        (Promise.LOST, "claims"),  # told of receipts that it did not have
        (Promise.LOST, "first"),  # acked before it had looked
        (Promise.ACKED_AGAIN, "hasty"),  # took its own ack for the broker's word
    }


SUBJECTS = ("claims", "first", "hasty")


# --- planted lines ---------------------------------------------------------------------------------------------------

SENT = [1 * MS, "sent", ["orders", ["a", "b"], 1 * MS]]
RECEIPT = [2 * MS, "receipt", ["orders", 0, ["a", "b"]]]


def seen(at_ms: int, name: str = "c", *, asked_ms: int = 3, text: str = "a") -> list[list[Any]]:
    """One message, shown to a program; the client had asked for it then at the earliest."""
    return [
        [at_ms * MS, "contact", ["g", "orders", name, asked_ms * MS, at_ms * MS]],
        [at_ms * MS, "delivery", ["g", "orders", name, [[0, text]], asked_ms * MS, at_ms * MS]],
    ]


ACKING = [5 * MS, "acking", ["g", "orders", [0]]]
CONFIRMED = [6 * MS, "confirmed", ["g", "orders", [0], 6 * MS]]
CRASH = [7 * MS, "crash", [7 * MS]]
HISTORY = [SENT, RECEIPT, *seen(4), ACKING, CONFIRMED]


def judged(history: list[list[Any]], folder: Path) -> set[Promise]:
    path = folder / "said"
    path.write_text("".join(json.dumps(line) + "\n" for line in history) + '[9, "half a li')
    truth = ClientTruth()
    ClientReading(truth, LEASE_MS).read([path], [])
    return {breach.promise for breach in truth.breaches}


@pytest.mark.parametrize(
    ("history", "promises"),
    [
        (HISTORY, set()),
        ([*HISTORY, *seen(9, "d", asked_ms=8)], {Promise.ACKED_AGAIN, Promise.DUPLICATE}),
        ([*HISTORY, CRASH, *seen(9, "d", asked_ms=8)], {Promise.ACKED_AGAIN}),
        ([*HISTORY, *seen(9, "d", asked_ms=5)], {Promise.ACKED_AGAIN, Promise.DUPLICATE}),
        ([*HISTORY, CRASH, *seen(9, "d", asked_ms=5)], set()),
        ([SENT, RECEIPT, *seen(4), *seen(9, "d", asked_ms=8)], {Promise.DUPLICATE}),
        ([SENT, RECEIPT, *seen(4), [5 * MS, "crash", [5 * MS]], *seen(9, "d", asked_ms=8)], set()),
        ([SENT, RECEIPT, *seen(4, text="z")], {Promise.PHANTOM}),
        ([SENT, RECEIPT, *seen(4, text="b")], {Promise.REPEATED, Promise.RENAMED}),
    ],
    ids=[
        "good",
        "acked, and handed out again",
        "a crash undoes no ack",
        "acked, and in another's hand without a reason",
        "in another's hand since before the crash",
        "twice",
        "twice after a crash",
        "never sent",
        "another's payload",
    ],
)
def test_checker_judges(history: list[list[Any]], promises: set[Promise], tmp_path: Path) -> None:
    assert judged(history, tmp_path) == promises
