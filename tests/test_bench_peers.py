"""The comparison with peers: ratios are taken round by round, targets marked, who is missing is skipped with a word.

No peer is started here: none is needed to test Fairway.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.peers import contenders, figures, report, rounds
from bench.peers.contenders import CONTENDERS, TARGETS, TITLES, Contender
from bench.peers.install import NotInstalled
from bench.peers.rounds import Collected, Plan, Sample
from bench.peers.servers import Server

BY_NAME = {each.name: each for each in CONTENDERS}


def collected(workload: str, **rates: list[float]) -> Collected:
    found = Collected()
    for name, values in rates.items():
        for value in values:
            found.add(workload, BY_NAME[name.replace("_", " ")], Sample(messages_per_s=value, messages=1))
    return found


def test_a_ratio_is_of_two_measurements_of_the_same_round() -> None:
    found = collected("produce_many", fairway=[300, 100, 200], kafka_flush=[100, 100, 50])
    row = figures.summary(found)["workloads"]["produce_many"]["kafka flush"]
    assert row["fairway_times"] == {"median": 3, "lowest": 1, "highest": 4}
    assert figures.verdict(row) == "held"


def test_a_target_that_is_not_reached_is_marked() -> None:
    found = collected("consume_batches", fairway=[900], redis_always=[100])
    row = figures.summary(found)["workloads"]["consume_batches"]["redis always"]
    assert (row["target_times"], figures.verdict(row)) == (10, "missed")


def test_latency_is_held_against_the_syncs_of_the_same_run() -> None:
    found = Collected()
    sample = Sample(100, 4, latencies_us=(1_000, 2_000, 3_000, 8_000), syncs_us=(500, 600, 2_000))
    found.add("latency 100/s", BY_NAME["fairway"], sample)
    row = figures.summary(found)["workloads"]["latency 100/s"]["fairway"]
    assert row["p99_ms"]["median"] == 8
    assert row["p99_syncs"]["median"] == 4
    assert figures.verdict(row) == "missed"


def test_tables_show_every_contender_and_who_was_skipped() -> None:
    found = collected("produce_many", fairway=[300], kafka_flush=[100])
    found.skipped["rabbitmq quorum"] = "no rabbitmq-server on this machine"
    console = Console(width=160, record=True, file=io.StringIO())
    summary = figures.summary(found) | {"machine": "a machine", "load_before": 0.1, "rounds": 1, "seconds": 1.0}
    report.show(summary, console)
    shown = console.export_text()
    for text in ("kafka flush", "acks=all, flush.messages=1", "no rabbitmq-server on this machine", "a machine"):
        assert text in shown


class MissingServer(Server):
    """A server that is not on this machine."""

    scheme = "missing"

    def start(self) -> None:
        raise NotInstalled("no missing-server on this machine")


def test_a_peer_that_is_not_installed_is_skipped_with_a_word() -> None:
    missing = Contender("missing", "none", False, MissingServer, "fairway_client", ("produce_many",))
    found = rounds.run(Plan(2, 0.1, 0.0, ("produce_many",), None), [missing], lambda _what: None)
    assert found.samples == {}
    assert found.skipped == {"missing": "no missing-server on this machine"}


def test_fairway_is_always_among_the_chosen() -> None:
    assert [each.name for each in contenders.chosen(["kafka f"])] == ["fairway", "kafka flush"]


@pytest.mark.parametrize(("workload", "name"), TARGETS)
def test_targets_name_what_is_measured(workload: str, name: str) -> None:
    assert workload in TITLES
    assert workload in BY_NAME[name].workloads
