"""The picture: what each contender did, workload by workload, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.contenders import title

OURS, SYNCED, LOOSE, INK = "#0b7a75", "#c8553d", "#e3b7a0", "#333333"


def draw(summary: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    workloads: dict[str, Any] = summary["workloads"]
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with pyplot.rc_context(style):
        columns = 2
        lines = -(-len(workloads) // columns)
        figure, grid = pyplot.subplots(lines, columns, figsize=(13, 0.6 + 3.1 * lines), squeeze=False)
        for axes, (workload, rows) in zip(grid.flat, workloads.items(), strict=False):
            _bars(axes, workload, rows)
        for axes in grid.flat[len(workloads) :]:
            axes.set_visible(False)
        figure.text(
            0.5,
            0.006,
            "dark: what is confirmed survives a power cut; light: it may not.   Lines: lowest and highest round.   "
            + str(summary["machine"]),
            ha="center",
            fontsize=7.5,
            color="#777777",
        )
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _bars(axes: Any, workload: str, rows: dict[str, Any]) -> None:
    is_latency = workload.startswith("latency")
    unit = "p99, ms" if is_latency else "messages/s"
    for place, (name, row) in enumerate(rows.items()):
        value = row["p99_ms"] if is_latency else row["messages_per_s"]
        axes.barh(place, value["median"], color=_color(name, row), height=0.62)
        axes.plot([value["lowest"], value["highest"]], [place, place], color=INK, linewidth=1)
        told = f"{value['median']:,.1f}" if is_latency else f"{value['median']:,.0f}"
        axes.annotate(told, (value["highest"], place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 2, high * 4)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_title(f"{title(workload)} ({unit})", loc="left", fontweight="bold")


def _color(name: str, row: dict[str, Any]) -> str:
    if name.startswith("fairway"):
        return OURS if row["is_synced"] else "#8cc5c1"
    return SYNCED if row["is_synced"] else LOOSE
