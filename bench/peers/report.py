"""The figures as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.contenders import TITLES
from bench.peers.figures import verdict

_COLORS = {"held": "green", "missed": "red", "": "white"}


def show(summary: dict[str, Any], console: Console) -> None:
    for workload, rows in summary["workloads"].items():
        console.print(_latency(workload, rows) if workload.startswith("latency") else _throughput(workload, rows))
    for name, why in summary["skipped"].items():
        console.print(f"skipped: {name}: {why}", highlight=False, markup=False)
    console.print(
        f"100-byte messages, one producer, one consumer, Python clients; medians of {summary['rounds']} rounds of "
        f"{summary['seconds']:g} s, lowest and highest in brackets; fairway ÷ peer is taken round by round.\n"
        f"{summary['machine']}; load before the run {summary['load_before']:.1f}",
        highlight=False,
        markup=False,
    )


def _throughput(workload: str, rows: dict[str, Any]) -> Table:
    table = Table(title=TITLES[workload], title_justify="left")
    for name, side in (("", "left"), ("what is safe when confirmed", "left"), ("messages/s", "right")):
        table.add_column(name, justify="left" if side == "left" else "right")
    for name in ("fairway ÷ peer", "at least", ""):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        rate = row["messages_per_s"]
        table.add_row(
            name,
            row["durability"],
            f"{rate['median']:,.0f}  [{rate['lowest']:,.0f} – {rate['highest']:,.0f}]",
            _times(row.get("fairway_times")),
            f"{row['target_times']:g}" if row.get("target_times") else "",
            _word(row),
            style="bold" if name == "fairway" else None,
        )
    return table


def _latency(workload: str, rows: dict[str, Any]) -> Table:
    table = Table(title=f"{TITLES['latency']}, {workload.partition(' ')[2]}", title_justify="left")
    table.add_column("")
    table.add_column("what is safe when confirmed")
    for name in ("p50 ms", "p99 ms", "sync p99 ms", "p99 ÷ sync p99", "fairway's p99 ÷ peer's", ""):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        p99 = row["p99_ms"]
        table.add_row(
            name,
            row["durability"],
            f"{row['p50_ms']['median']:.2f}",
            f"{p99['median']:.2f}  [{p99['lowest']:.2f} – {p99['highest']:.2f}]",
            f"{row['sync_p99_ms']['median']:.2f}",
            f"{row['p99_syncs']['median']:.2f}",
            _times(row.get("fairway_times")),
            _word(row),
            style="bold" if name == "fairway" else None,
        )
    return table


def _times(times: dict[str, float] | None) -> str:
    if times is None:
        return ""
    return f"{times['median']:.3g}  [{times['lowest']:.3g} – {times['highest']:.3g}]"


def _word(row: dict[str, Any]) -> str:
    word = verdict(row)
    return f"[{_COLORS[word]}]{word}[/]"
