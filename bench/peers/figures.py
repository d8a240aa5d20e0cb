"""Figures from samples: medians of the rounds, their spread, and how many times a peer's figure ours is.

A ratio is taken within a round, of two measurements on the same machine minutes apart; what is shown is the median of
the rounds' ratios and the lowest and highest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.contenders import CONTENDERS, CPU_TARGETS, LATENCY_SYNCS_MAX, P50_TARGETS, TARGETS
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
    return {
        "durability": DURABILITY[name],
        "is_synced": IS_SYNCED[name],
        "rounds": len(samples),
        "server_us": spread([sample.server_us for sample in samples]),
        "client_us": spread([sample.client_us for sample in samples]),
    }


def _throughput(workload: str, name: str, samples: Sequence[Sample], ours: Sequence[Sample]) -> dict[str, Any]:
    row = _row(name, samples) | {
        "messages_per_s": spread([sample.messages_per_s for sample in samples]),
        "messages": [sample.messages for sample in samples],
    }
    if ours and not name.startswith(OURS):
        pairs = list(zip(ours, samples, strict=False))
        row["fairway_times"] = spread([us.messages_per_s / max(them.messages_per_s, 1e-9) for us, them in pairs])
        row["fairway_cpu_times"] = spread([us.server_us / max(them.server_us, 1e-9) for us, them in pairs])
        row["target_times"] = TARGETS.get((workload, name))
        row["target_cpu_max"] = CPU_TARGETS.get((workload, name))
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
        for rank, key in ((50, "fairway_p50_times"), (99, "fairway_times")):
            row[key] = spread(
                [percentile(us.latencies_us, rank) / max(percentile(them.latencies_us, rank), 1) for us, them in pairs]
            )
        row["target_p50_max"] = P50_TARGETS.get((workload, name))
    elif name == OURS:
        row["target_syncs_max"] = LATENCY_SYNCS_MAX
    return row


# Of a row: what is asked, the figure that it is asked of, whether the figure is to be at least or at most so large.
_ASKED = (
    ("target_times", "fairway_times", "≥ "),
    ("target_cpu_max", "fairway_cpu_times", "CPU ≤ "),
    ("target_p50_max", "fairway_p50_times", "p50 ≤ "),
    ("target_syncs_max", "p99_syncs", "÷ sync ≤ "),
)


def asked(row: dict[str, Any]) -> str:
    """The targets of the design for this row, in a word each; empty where there is none."""
    return ", ".join(f"{word}{row[target]:g}" for target, _, word in _ASKED if row.get(target))


def verdict(row: dict[str, Any]) -> str:
    """Whether all targets of the design for this row are held; empty where there is none."""
    held = [
        row[figure]["median"] >= row[target] if word == "≥ " else row[figure]["median"] <= row[target]
        for target, figure, word in _ASKED
        if row.get(target)
    ]
    return ("held" if all(held) else "missed") if held else ""
