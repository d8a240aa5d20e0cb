"""The cluster campaign for people: a table of what was done and how long nothing went, and what came of it."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from tests.crash.cluster_rounds import SESSION_MS, ClusterCounts
from tests.crash.cluster_times import Spans


def table(counts: ClusterCounts) -> Table:
    """By kind of fault. A time is that between two successes of any program, p50 / p99."""
    shown = Table(
        "fault", title=f"{counts.runs} runs, {sum(counts.faults.values())} faults, sessions of {SESSION_MS:,} ms"
    )
    for head in ("times", "without produce, ms", "without consume, ms"):
        shown.add_column(head, justify="right")
    for kind, times in sorted(counts.faults.items()):
        shown.add_row(kind, str(times), str(counts.produce.get(kind, Spans())), str(counts.consume.get(kind, Spans())))
    told = counts.figures()
    shown.add_section()
    shown.add_row("all", str(sum(counts.faults.values())), *(
        "{p50 ms:,} / {p99 ms:,}".format(**told[name]) for name in ("without produce", "without consume")))  # fmt: skip
    return shown


def show(counts: ClusterCounts) -> None:
    console = Console(width=max(110, Console().width))
    console.print(table(counts))
    console.print(
        f"{counts.epochs} changes of masters; from an abrupt end of a master to the next receipt, beyond the session: "
        f"{counts.beyond} ms p50 / p99 of {len(counts.beyond.ms)}"
    )
    left_out = ("by kind", "failover beyond the session", "without produce", "without consume")
    rest = {name: value for name, value in counts.figures().items() if name not in left_out}
    said = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in rest.items())
    console.print(", ".join(said))
    for sentence in [*map(str, counts.breaches[:5]), *counts.failures[:5], *counts.disk.sentences[:5]]:
        print(sentence, file=sys.stderr)
