"""The comparison with peers: ratios are taken round by round, targets marked, who is missing is skipped with a word.

No peer is started here: none is needed to test Fairway.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.peers import contenders, figures, report, rounds
from bench.peers.contenders import CONTENDERS, CPU_TARGETS, P50_TARGETS, TARGETS, TITLES, Contender
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
    found = collected("consume_batches", fairway=[400], redis_always=[100])
    row = figures.summary(found)["workloads"]["consume_batches"]["redis always"]
    assert figures.asked(row) == f"≥ {TARGETS['consume_batches', 'redis always']:g}"
    assert figures.verdict(row) == "missed"


def test_a_rate_that_costs_too_much_is_missed() -> None:
    found = Collected()
    for name, server_us in (("fairway", 20.0), ("redis always", 10.0)):
        found.add("many_connections 100", BY_NAME[name], Sample(100, 1, server_us=server_us, client_us=1.0))
    row = figures.summary(found)["workloads"]["many_connections 100"]["redis always"]
    assert (row["fairway_times"]["median"], row["fairway_cpu_times"]["median"]) == (1, 2)
    assert (figures.asked(row), figures.verdict(row)) == ("≥ 1, CPU ≤ 1.3", "missed")


def test_latency_is_held_against_the_syncs_of_the_same_run() -> None:
    found = Collected()
    sample = Sample(100, 4, latencies_us=(1_000, 2_000, 3_000, 8_000), syncs_us=(500, 600, 2_000))
    found.add("latency 100/s", BY_NAME["fairway"], sample)
    row = figures.summary(found)["workloads"]["latency 100/s"]["fairway"]
    assert row["p99_ms"]["median"] == 8
    assert row["p99_syncs"]["median"] == 4
    assert figures.verdict(row) == "missed"


def test_the_median_is_held_against_a_peer() -> None:
    found = Collected()
    for name, latency_us in (("fairway", 900), ("rabbitmq quorum", 1_000)):
        found.add("latency 1000/s", BY_NAME[name], Sample(1_000, 1, latencies_us=(latency_us,), syncs_us=(500,)))
    row = figures.summary(found)["workloads"]["latency 1000/s"]["rabbitmq quorum"]
    assert (row["fairway_p50_times"]["median"], figures.verdict(row)) == (0.9, "held")


def test_tables_show_every_contender_and_who_was_skipped() -> None:
    found = collected("produce_many", fairway=[300], kafka_flush=[100])
    found.skipped["rabbitmq quorum"] = "no rabbitmq-server on this machine"
    console = Console(width=100, record=True, file=io.StringIO())
    summary = figures.summary(found) | {"machine": "a machine", "load_before": 0.1, "rounds": 1, "seconds": 1.0}
    report.show(summary, console)
    shown = console.export_text()
    for text in ("kafka flush", "acks=all, flush.messages=1", "no rabbitmq-server on this machine", "a machine"):
        assert text in shown


def test_single_messages_run_and_say_what_they_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "CONNECTIONS", (1, 3))
    plan = Plan(1, 0.1, 0.0, ("one_at_a_time", "many_connections"), str(tmp_path))
    found = rounds.run(plan, [BY_NAME["fairway"]], lambda _what: None)
    assert found.skipped == {}
    assert list(found.samples) == [
        *("one_at_a_time 1", "one_at_a_time 1000"),
        *("many_connections 1", "many_connections 3"),
    ]
    for [sample] in (by_name["fairway"] for by_name in found.samples.values()):
        assert sample.messages > 0
        assert sample.server_us > 0
        assert sample.client_us > 0


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


@pytest.mark.parametrize(("workload", "name"), [*TARGETS, *CPU_TARGETS, *P50_TARGETS])
def test_targets_name_what_is_measured(workload: str, name: str) -> None:
    kind = workload.partition(" ")[0]
    assert kind in TITLES
    assert kind in BY_NAME[name].workloads
