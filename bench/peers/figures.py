"""Figures from samples: medians of the rounds, their spread, and how many times a peer's figure ours is.

A ratio is taken within a round, of two measurements on the same machine minutes apart; what is shown is the median of
the rounds' ratios and the lowest and highest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.contenders import CONTENDERS, LATENCY_SYNCS_MAX, TARGETS
from bench.peers.rounds import Collected, Sample

OURS = CONTENDERS[0].name
DURABILITY = {each.name: each.durability for each in CONTENDERS}
IS_SYNCED = {each.name: each.is_synced for each in CONTENDERS}


def percentile(values: Sequence[int], percent: float) -> float:
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summary(collected: Collected) -> dict[str, Any]:
    """Everything that is printed, for a program."""
    workloads: dict[str, Any] = {}
    for workload, by_name in collected.samples.items():
        row = _latency if workload.startswith("latency") else _throughput
        ours = by_name.get(OURS, [])
        workloads[workload] = {name: row(workload, name, samples, ours) for name, samples in by_name.items()}
    return {"workloads": workloads, "skipped": collected.skipped}


def _row(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    return {"durability": DURABILITY[name], "is_synced": IS_SYNCED[name], "rounds": len(samples)}


def _throughput(workload: str, name: str, samples: Sequence[Sample], ours: Sequence[Sample]) -> dict[str, Any]:
    row = _row(name, samples) | {
        "messages_per_s": spread([sample.messages_per_s for sample in samples]),
        "messages": [sample.messages for sample in samples],
    }
    if ours and not name.startswith(OURS):
        pairs = zip(ours, samples, strict=False)
        row["fairway_times"] = spread([us.messages_per_s / max(them.messages_per_s, 1e-9) for us, them in pairs])
        row["target_times"] = TARGETS.get((workload, name))
    return row


def _latency(workload: str, name: str, samples: Sequence[Sample], ours: Sequence[Sample]) -> dict[str, Any]:
    row = _row(name, samples) | {
        "p50_ms": spread([percentile(sample.latencies_us, 50) / 1_000 for sample in samples]),
        "p99_ms": spread([percentile(sample.latencies_us, 99) / 1_000 for sample in samples]),
        "sync_p99_ms": spread([percentile(sample.syncs_us, 99) / 1_000 for sample in samples]),
    }
    row["p99_syncs"] = spread(
        [percentile(sample.latencies_us, 99) / max(percentile(sample.syncs_us, 99), 1) for sample in samples]
    )
    if ours and not name.startswith(OURS):
        pairs = list(zip(ours, samples, strict=False))
        row["fairway_times"] = spread(
            [percentile(us.latencies_us, 99) / max(percentile(them.latencies_us, 99), 1) for us, them in pairs]
        )
    elif name == OURS and workload == "latency 100/s":
        row["target_syncs_max"] = LATENCY_SYNCS_MAX
    return row


def verdict(row: dict[str, Any]) -> str:
    """Whether a target of the design is held; empty where there is none."""
    if row.get("target_times"):
        return "held" if row["fairway_times"]["median"] >= row["target_times"] else "missed"
    if row.get("target_syncs_max"):
        return "held" if row["p99_syncs"]["median"] <= row["target_syncs_max"] else "missed"
    return ""
