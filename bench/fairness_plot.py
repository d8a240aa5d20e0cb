"""The picture of `bench.fairness`: who got how much of the broker, and what a hot group noticed of a cold one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ACTORS, PLAIN, SMALL, LARGE, INK = "#0b7a75", "#c8553d", "#f2a541", "#5b8e7d", "#333333"


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with pyplot.rc_context(style):
        figure, (shares, latency) = pyplot.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1, 1.15))
        _draw_shares(shares, result["shares"])
        _draw_latency(latency, result["cold"])
        crowd = result["crowds"][-1]
        figure.text(
            0.5,
            0.015,
            f"{crowd['groups']} groups, {crowd['consumers']:,} consumers, {crowd['messages_per_s_in']:,.0f} messages/s "
            f"in: largest lag {crowd['lag_max_median']:.0f} messages, {crowd['broker_cpu']:.2f} cores, "
            f"{crowd['broker_resident_mib']:.0f} MiB   ·   {result['machine']}",
            ha="center",
            fontsize=8.5,
            color="#777777",
        )
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _draw_shares(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    for place, row in enumerate(rows.values()):
        small = row["small_share"]
        axes.barh(place, small, color=SMALL, height=0.55)
        axes.barh(place, 1 - small, left=small, color=LARGE, height=0.55)
        axes.text(small / 2, place, f"{small:.0%}", ha="center", va="center", color="white", fontweight="bold")
        axes.text((1 + small) / 2, place, f"{1 - small:.0%}", ha="center", va="center", color="white")
        axes.text(1.02, place, f"Jain {row['jain']:.3f}", va="center", fontsize=9)
    axes.axvline(0.5, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "fair: half", "all"])
    axes.invert_yaxis()
    axes.set_title("Broker time: 2 consumers (left) beside 100", loc="left", fontweight="bold")


def _draw_latency(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    marks = [("p50_ms", "median"), ("p99_ms", "p99")]
    for place, (kind, row) in enumerate(rows.items()):
        color = ACTORS if kind == "actors" else PLAIN
        for offset, (name, label) in enumerate(marks):
            height = place + (offset - 0.5) * 0.36
            alone, beside = row["alone"][name], row["beside"][name]
            axes.plot([alone, beside], [height, height], color=color, linewidth=5, alpha=0.35, solid_capstyle="round")
            axes.scatter([alone], [height], s=70, facecolor="white", edgecolor=color, linewidth=2, zorder=3)
            axes.scatter([beside], [height], s=80, color=color, zorder=3)
            times = beside / max(alone, 1e-9)
            axes.annotate(
                f"{label} × {times:.1f}", (max(alone, beside), height), (9, 0), textcoords="offset points", va="center"
            )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 3)
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g} ms")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title("A hot group's pull: alone (○) and beside a cold one (●)", loc="left", fontweight="bold")
