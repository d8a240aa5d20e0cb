"""Delayed messages: the rate of scheduling, how late they are, ten million pending; beside NATS and beanstalkd.

    python -m bench.delay                     all of it: about ten minutes, and 5 GB of disk for a while
    python -m bench.delay --quick             smaller, a minute or two
    python -m bench.delay --parts lateness    only this: rates, lateness or pending
    python -m bench.delay --only fairway      without peers; they are skipped with a word where they are not installed
    python -m bench.delay --json              the figures for a program

Servers and clients are processes of their own; `make bench ARGS="peers --install"` fetches the peers. Rates are medians
of interleaved rounds; of lateness the median round is shown. It is of as many messages a second as are scheduled
meanwhile, each due two seconds after it was sent: 20,000 a second for Fairway, for a peer a quarter of what it can
schedule. It is taken at three places: by the broker's stamp on the message, at the broker's receipt (as the delay
server counts it), and in a consumer's hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import delay_pending, machine
from bench.peers import install, servers
from bench.peers.driving import Result, Task
from bench.peers.figures import percentile
from bench.peers.install import NotInstalled
from bench.peers.rounds import DriverFailed, drive
from bench.peers.servers import CannotRun, Server
from bench.peers.syncs import sync_us

LATE_MS_MAX = 20.0  # beyond a sync, at the 99th percentile
WARM_DUE_S = 1.0
CLIENTS_NICE = 5  # lateness is the servers' doing: whoever sends and receives gives way to them, with every contender
PARTS = ("rates", "lateness", "pending")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int
    rate_s: float
    warm_s: float
    due_per_s: int
    due_s: float
    pending: int


FULL = Sizes(3, 2.0, 0.5, 20_000, 10.0, 10_000_000)
QUICK = Sizes(1, 1.5, 0.5, 20_000, 5.0, 200_000)
TINY = Sizes(1, 0.2, 0.1, 200, 0.5, 2_000)


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that delays, and the driver of its client."""

    name: str
    durability: str
    server: type[Server]
    driver: str

    @property
    def is_ours(self) -> bool:
        return self.driver == "fairway_delay"

    def python(self) -> Path:
        return Path(sys.executable) if self.is_ours else install.client_python()


CONTENDERS = (
    Contender("fairway", "synced before the receipt", servers.FairwayDelay, "fairway_delay"),
    Contender("fairway up", "the same, in one process", servers.FairwayUp, "fairway_delay"),
    Contender("nats always", "file store, sync_interval always", servers.Nats, "nats_schedules"),
    Contender("nats default", "file store, synced every 2 minutes", servers.NatsInterval, "nats_schedules"),
    Contender("beanstalkd always", "log, synced before the answer", servers.Beanstalk, "beanstalk"),
    Contender("beanstalkd default", "log, synced every 50 ms", servers.BeanstalkInterval, "beanstalk"),
)


@dataclass
class Collected:
    """What was measured so far."""

    rates: dict[str, dict[str, list[float]]]  # by contender, by way
    lateness: dict[str, list[dict[str, Any]]]  # by contender, a row for each round
    skipped: dict[str, str]


# --- rates -----------------------------------------------------------------------------------------------------------


def rates(contender: Contender, sizes: Sizes, folder: Path) -> dict[str, float]:
    """Messages a second by way; one after the other on one server."""
    ways = ("many", "each") if contender.is_ours else ("each",)
    found = {}
    with contender.server(folder / "server") as server:
        for way in ways:
            task = Task(f"schedule_{way}", server.url, f"bench-{way}", sizes.rate_s, sizes.warm_s)
            [result] = drive(contender.python(), contender.driver, [task])
            found[way] = result.messages / result.elapsed_s
    return found


def measure_rates(contenders: Sequence[Contender], sizes: Sizes, folder: Path, found: Collected) -> None:
    for number in range(sizes.rounds):
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            if contender.name in found.skipped:
                continue
            try:
                for way, per_s in rates(contender, sizes, folder).items():
                    found.rates.setdefault(contender.name, {}).setdefault(way, []).append(per_s)
            except (NotInstalled, CannotRun, DriverFailed) as why:
                found.skipped[contender.name] = str(why)


# --- lateness --------------------------------------------------------------------------------------------------------


def measure_lateness(contenders: Sequence[Contender], sizes: Sizes, folder: Path, found: Collected) -> None:
    for _ in range(sizes.rounds):
        for contender in contenders:
            if contender.name in found.skipped:
                continue
            try:
                found.lateness.setdefault(contender.name, []).append(lateness(contender, sizes, folder, found))
            except (NotInstalled, CannotRun, DriverFailed) as why:
                found.skipped[contender.name] = str(why)


def lateness(contender: Contender, sizes: Sizes, folder: Path, found: Collected) -> dict[str, Any]:
    """Of one round; before it the same load for a second."""
    per_s = sizes.due_per_s
    if not contender.is_ours:
        known = found.rates.get(contender.name, {}).get("each")
        can_do = statistics.median(known) if known else rates(contender, sizes, folder)["each"]
        per_s = max(100, min(per_s, int(can_do / 400) * 100))
    syncs = sync_us(folder, 0.5)
    with contender.server(folder / "server") as server:
        _due(contender, server, "warm", WARM_DUE_S, per_s)
        before = _metrics(server)
        received, scheduled = _due(contender, server, "bench", sizes.due_s, per_s)
        after = _metrics(server)
    syncs += sync_us(folder, 0.5)
    row: dict[str, Any] = {
        "due_per_s": per_s,
        "messages": received.messages,
        "missing": scheduled.messages - received.messages,
        "scheduling_s": scheduled.elapsed_s,
        "sync_p99_ms": percentile(syncs, 99) / 1e3,
        "in_hand": _spread(received.latencies_us),
        "early": sum(each < 0 for each in received.stored_us or received.latencies_us),
    }
    if received.stored_us:
        row["stored"] = _spread(received.stored_us)
    if after:
        row["receipt_p99_ms"] = percentile_of(after, before, "fairway_delay_lateness_seconds", 99)
        row["bar_ms"] = LATE_MS_MAX + row["sync_p99_ms"]
        row["met"] = row["receipt_p99_ms"] <= row["bar_ms"] and not row["early"] and not row["missing"]
    return row


def _due(contender: Contender, server: Server, subject: str, seconds: float, per_s: int) -> list[Result]:
    names = ("receive_due", "schedule_paced")
    tasks = [Task(name, server.url, subject, seconds, rate_per_s=per_s, nice=CLIENTS_NICE) for name in names]
    return drive(contender.python(), contender.driver, tasks)


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round whose 99th percentile is the median."""
    ordered = sorted(rows, key=lambda row: row.get("receipt_p99_ms", row["in_hand"]["p99_ms"]))
    return ordered[len(ordered) // 2]


def _spread(values_us: Sequence[int]) -> dict[str, float]:
    return {
        "p50_ms": percentile(values_us, 50) / 1e3,
        "p99_ms": percentile(values_us, 99) / 1e3,
        "max_ms": max(values_us) / 1e3,
    }


def _metrics(server: Server) -> str:
    return servers.metrics(server.http_port) if isinstance(server, servers.FairwayDelay) else ""


def percentile_of(after: str, before: str, name: str, percent: float) -> float:
    """Of what a histogram in seconds has counted in between, in ms; within a bucket it is taken to be even."""
    known = _buckets(before, name)
    edges = [(0.0, 0.0), *((bound, count - known.get(bound, 0.0)) for bound, count in _buckets(after, name).items())]
    wanted = edges[-1][1] * percent / 100
    for (low, below), (high, count) in itertools.pairwise(edges):
        if count >= wanted and count > below:
            top = low if high == float("inf") else high
            return 1e3 * (low + (top - low) * (wanted - below) / (count - below))
    return 0.0


def _buckets(exposition: str, name: str) -> dict[float, float]:
    """By upper bound, how many lie below it."""
    found = {}
    for line in exposition.splitlines():
        if line.startswith(f"{name}_bucket"):
            found[float(line.partition('le="')[2].partition('"')[0])] = float(line.rpartition(" ")[2])
    return found


# --- all of it -------------------------------------------------------------------------------------------------------


def measure(folder: Path, sizes: Sizes, parts: Sequence[str], only: Sequence[str]) -> dict[str, Any]:
    contenders = [each for each in CONTENDERS if not only or any(each.name.startswith(word) for word in only)]
    found = Collected({}, {}, {})
    if "rates" in parts:
        measure_rates(contenders, sizes, folder, found)
    if "lateness" in parts:
        measure_lateness(contenders, sizes, folder, found)
    summary = asdict(found)
    if "pending" in parts:
        summary["pending"] = delay_pending.measure(folder, sizes.pending)
    return summary


def show(summary: dict[str, Any], console: Console) -> None:
    durability = {each.name: each.durability for each in CONTENDERS}
    if summary["rates"]:
        table = Table("scheduling, messages/s", "when it confirms", title="rate of scheduling", title_justify="left")
        for name in ("many in a call", "one by one"):
            table.add_column(name, justify="right")
        for name, ways in summary["rates"].items():
            figures = [f"{statistics.median(ways[way]):,.0f}" if way in ways else "" for way in ("many", "each")]
            table.add_row(name, durability[name], *figures)
        console.print(table)
    if summary["lateness"]:
        rows = {name: middle(rows) for name, rows in summary["lateness"].items() if rows}
        console.print(_lateness_table(rows))
    if summary.get("pending"):
        console.print(delay_pending.table(summary["pending"]))
    for name, why in summary["skipped"].items():
        console.print(f"skipped: {name}: {why}", highlight=False, markup=False)
    console.print(summary["machine"], highlight=False, markup=False)


def _lateness_table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("", title="lateness in ms, while as many are scheduled", title_justify="left")
    heads = ("due/s", "stamp p50", "p99", "max", "receipt p99", "in hand p50", "p99", "max", "sync p99", "bar")
    for head in (*heads, "early", "missing", ""):
        table.add_column(head, justify="right")
    for name, row in rows.items():
        stored = row.get("stored", {})
        keys = ("p50_ms", "p99_ms", "max_ms")
        table.add_row(
            name,
            f"{row['due_per_s']:,}",
            *(f"{stored[key]:.1f}" if stored else "" for key in keys),
            f"{row['receipt_p99_ms']:.1f}" if "receipt_p99_ms" in row else "",
            *(f"{row['in_hand'][key]:.1f}" for key in keys),
            f"{row['sync_p99_ms']:.1f}",
            f"{row['bar_ms']:.1f}" if "bar_ms" in row else "",
            str(row["early"]),
            str(row["missing"]),
            {True: "met", False: "not met"}.get(row.get("met"), ""),  # type: ignore[arg-type]
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.delay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller: a minute or two")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, by how their names begin")
    parser.add_argument("--messages", type=int, help="how many are pending; default: ten million")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()), help="where; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    if options.messages is not None:
        sizes = Sizes(sizes.rounds, sizes.rate_s, sizes.warm_s, sizes.due_per_s, sizes.due_s, options.messages)
    with tempfile.TemporaryDirectory(prefix="fairway-delay-", dir=options.data) as name:
        summary = measure(Path(name), sizes, options.parts, options.only)
    summary["machine"] = machine.describe(options.data)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary, Console(width=max(150, Console().width)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
