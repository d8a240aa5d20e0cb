"""The figures as tables for people, at most 100 columns wide; `--json` has every digit."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.peers.contenders import title
from bench.peers.figures import asked, verdict
from bench.presenting import short

_COLORS = {"held": "green", "missed": "red"}


def show(summary: dict[str, Any], console: Console) -> None:
    for workload, rows in summary["workloads"].items():
        console.print(_latency(workload, rows) if workload.startswith("latency") else _throughput(workload, rows))
    known = {name: row for rows in summary["workloads"].values() for name, row in rows.items()}
    for name, row in known.items():
        safety = "survives a power cut" if row["is_synced"] else "may be lost in a power cut"
        console.print(f"{name}: {row['durability']}; {safety}", highlight=False, markup=False)
    for name, why in summary["skipped"].items():
        console.print(f"skipped: {name}: {why}", highlight=False, markup=False)
    console.print(
        "100-byte messages, one producer, one consumer, Python clients. Medians of the rounds (here "
        f"{summary['rounds']} of {summary['seconds']:g} s), ± is the round farthest from it. µs: processor time per "
        "message, of all processes of the server, of all of the client. rate ÷, CPU ÷, p50 ÷, p99 ÷: Fairway's figure "
        "÷ the peer's, round by round.\n"
        f"{summary['machine']}; load before the run {summary['load_before']:.1f}. {machine.QUIET}",
        highlight=False,
        markup=False,
    )


def _table(name: str, *columns: str) -> Table:
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(("", *columns)):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    table.add_column("asked")
    return table


def _throughput(workload: str, rows: dict[str, Any]) -> Table:
    table = _table(title(workload), "messages/s", "server µs", "client µs", "rate ÷", "CPU ÷")
    for name, row in rows.items():
        table.add_row(
            name,
            _spread(row["messages_per_s"]),
            short(row["server_us"]["median"]),
            short(row["client_us"]["median"]),
            _spread(row.get("fairway_times")),
            _spread(row.get("fairway_cpu_times")),
            _asked(row),
            style="bold" if name == "fairway" else None,
        )
    return table


def _latency(workload: str, rows: dict[str, Any]) -> Table:
    table = _table(title(workload), "p50 ms", "p99 ms", "sync p99", "p99 ÷ sync", "p50 ÷", "p99 ÷")
    for name, row in rows.items():
        table.add_row(
            name,
            _spread(row["p50_ms"]),
            _spread(row["p99_ms"]),
            short(row["sync_p99_ms"]["median"]),
            _spread(row["p99_syncs"]),
            _spread(row.get("fairway_p50_times")),
            _spread(row.get("fairway_times")),
            _asked(row),
            style="bold" if name == "fairway" else None,
        )
    return table


def _spread(found: dict[str, float] | None) -> str:
    """The median, and how far the round that is farthest from it was."""
    if found is None:
        return ""
    middle = found["median"]
    farthest = max(found["highest"] - middle, middle - found["lowest"]) / max(middle, 1e-9)
    return f"{short(middle)} ±{farthest:.0%}" if farthest else short(middle)


def _asked(row: dict[str, Any]) -> str:
    word = verdict(row)
    return f"{asked(row)}: [{_COLORS[word]}]{word}[/]" if word else ""
