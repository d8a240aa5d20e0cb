"""A replica's price: CPU per message and latency with and without one, the split over two groups, failover time.

    python -m bench.cluster                 about six minutes
    python -m bench.cluster --quick         fewer and shorter rounds, a minute and a half
    python -m bench.cluster --json          the figures for a program

Brokers and three servers of ZooKeeper are processes of their own. *alone* is a broker without a registry, *replica* a
group of two copies, where an answer means that both have synced it. They take turns within a round; shown are medians
over the rounds, and of ratios the median of the rounds' own.

    produce    CPU-seconds per million messages of 100 bytes, 100 to a `send_many`, of the program and all brokers:
               their share of two cores says little about a rate, what they burn says it
    through    the same, and a consumer in the same program takes and acks everything
    latency    of single messages, sent at a fixed rate whatever becomes of them, from when each was due to its receipt
    split      where messages of a subject go that two broker groups carry
    failover   from SIGKILL of the master to the next receipt of a program that knows both copies, less the session
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fairway
from bench import machine
from bench.cluster_groups import Alone, BrokerGroup, meta
from tests.crash.career_rounds import percentile
from tests.support.zookeeper import Ensemble, ensemble

BAR = 2.2  # CPU with a replica, of without
SESSION_MS = 2_000
PAYLOAD = b"x" * 100
BATCH = 100
IN_FLIGHT = 20  # batches
ANSWER_S = 60.0
PER_S = 500  # single sends
SUBJECT = "order.changed"


@dataclass(frozen=True, slots=True)
class Sizes:
    rounds: int
    messages: int  # of a round and a way
    latency_s: float
    kills: int


FULL = Sizes(9, 200_000, 5.0, 12)
QUICK = Sizes(3, 60_000, 2.0, 3)
TINY = Sizes(1, 2_000, 0.3, 1)

Setup = Alone | BrokerGroup


# --- what a program does ----------------------------------------------------------------------------------------------


def produce(client: fairway.Client, subject: str, count: int) -> None:
    """As fast as it goes, with so many batches under way."""
    payloads = [PAYLOAD] * BATCH
    waiting: deque[Any] = deque()
    for _ in range(count // BATCH):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().result(ANSWER_S)
        waiting.append(client.send_many(subject, payloads))
    for each in waiting:
        each.result(ANSWER_S)


def consume(consumer: fairway.Consumer, count: int) -> None:
    deadline = time.monotonic() + ANSWER_S
    while count > 0 and time.monotonic() < deadline:
        messages = consumer.take(1_000, timeout=1.0)
        consumer.ack(messages)
        count -= len(messages)
    if count > 0 or not consumer.flush(ANSWER_S):
        raise RuntimeError(f"{count} messages did not come, or their acks were not answered")


def through(client: fairway.Client, subject: str, count: int) -> None:
    with client.consumer(subject, "all") as consumer:
        for _ in range(max(count // 10_000, 1)):
            part = min(count, 10_000)
            produce(client, subject, part)
            consume(consumer, part)


LOADS = {"produce": produce, "through": through}


def cpu_per_million(setup: Setup, load: str, subject: str, count: int) -> float:
    """Of this process and all brokers."""
    with fairway.connect(setup.url, patience=ANSWER_S) as client:
        client.send(subject + "-warm", b"").result(ANSWER_S)
        ours_s, theirs_s = time.process_time(), setup.cpu_s()
        LOADS[load](client, subject, count)
        return (time.process_time() - ours_s + setup.cpu_s() - theirs_s) / count * 1e6


def latencies_ms(setup: Setup, subject: str, seconds: float) -> list[float]:
    """Of single messages at a fixed rate."""
    found: list[float] = []
    with fairway.connect(setup.url, patience=ANSWER_S) as client:
        client.send(subject, b"").result(ANSWER_S)
        began = time.perf_counter()
        pending = []
        for number in range(round(seconds * PER_S)):
            due = began + number / PER_S
            time.sleep(max(due - time.perf_counter(), 0))
            pending.append(client.send(subject, PAYLOAD))
            pending[-1].add_done_callback(_stop_watch(due, found))
        for each in pending:
            each.result(ANSWER_S)
    return found


def _stop_watch(due: float, found: list[float]) -> Callable[[object], None]:
    return lambda _: found.append((time.perf_counter() - due) * 1e3)


def failovers_ms(group: BrokerGroup, kills: int) -> list[int]:
    """From the kill of the master to the next receipt, less the session."""
    found = []
    for number in range(kills):
        master = group.await_whole()
        with fairway.connect(group.url, patience=ANSWER_S) as client:
            for _ in range(20 + number):
                client.send("failover", PAYLOAD).result(ANSWER_S)
            group.kill(master)
            began = time.monotonic()
            client.send("failover", PAYLOAD).result(ANSWER_S)
            found.append(round((time.monotonic() - began) * 1e3) - SESSION_MS)
        group.start(master)
    return found


def split(zookeeper: Ensemble, folder: Path, count: int) -> dict[str, float]:
    """By broker group: its share of the messages of a subject that two carry."""
    shares: Counter[int] = Counter()
    with ExitStack() as running:
        groups = [BrokerGroup(folder, zookeeper, name, 1, SESSION_MS) for name in ("split-1", "split-2")]
        for group in groups:
            running.callback(group.close)
        url = running.enter_context(meta(zookeeper, SUBJECT, [group.name for group in groups]))
        with fairway.connect(url, patience=ANSWER_S) as client:
            produce(client, SUBJECT, count)
        for number, group in enumerate(groups):
            with fairway.connect(group.url, patience=ANSWER_S) as client:
                described = client.describe(SUBJECT).subjects
                shares[number] = sum(each.committed_end for each in described)
    total = shares.total()
    return {group.name: shares[number] / max(total, 1) for number, group in enumerate(groups)}


# --- the bench --------------------------------------------------------------------------------------------------------


def measure(sizes: Sizes, folder: Path) -> dict[str, Any]:
    cpu: dict[str, dict[str, list[float]]] = {load: {"alone": [], "replica": []} for load in LOADS}
    latency: dict[str, list[list[float]]] = {"alone": [], "replica": []}
    with ExitStack() as running:
        zookeeper = running.enter_context(ensemble(3))
        setups: dict[str, Setup] = {
            "alone": Alone(folder),
            "replica": BrokerGroup(folder, zookeeper, "pair", 2, SESSION_MS),
        }
        for setup in setups.values():
            running.callback(setup.close)
            cpu_per_million(setup, "through", "warm", min(sizes.messages, 20_000))
        for number in range(sizes.rounds):
            ways = list(setups)[:: -1 if number % 2 else 1]
            for load in LOADS:
                for way in ways:
                    cpu[load][way].append(cpu_per_million(setups[way], load, f"{load}-{number}", sizes.messages))
            for way in ways:
                latency[way].append(latencies_ms(setups[way], f"latency-{number}", sizes.latency_s))
        group = setups["replica"]
        failover = failovers_ms(group, sizes.kills) if isinstance(group, BrokerGroup) else []
        shares = split(zookeeper, folder, sizes.messages)
    return {"cpu": cpu, "latency": latency, "failover": failover, "split": shares}


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"bar": BAR, "session_ms": SESSION_MS}
    for load, ways in found["cpu"].items():
        ratios = [with_ / without for with_, without in zip(ways["replica"], ways["alone"], strict=True)]
        told[load] = {
            "alone_cpu_s": statistics.median(ways["alone"]),
            "replica_cpu_s": statistics.median(ways["replica"]),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    told["latency"] = {
        way: {
            "p50_ms": statistics.median(percentile_of(each, 50) for each in rounds),
            "p99_ms": statistics.median(percentile_of(each, 99) for each in rounds),
        }
        for way, rounds in found["latency"].items()
    }
    kills = found["failover"]
    told["failover"] = {"kills": len(kills), "p50_ms": percentile(kills, 50), "p99_ms": percentile(kills, 99)}
    told["split"] = found["split"]
    told["met"] = told["produce"]["ratio"] <= BAR
    return told


def percentile_of(samples: Sequence[float], percent: int) -> float:
    return percentile([round(each * 1_000) for each in samples], percent) / 1_000


def show(told: dict[str, Any], console: Console) -> None:
    table = Table("", title="CPU-seconds per million messages, program and brokers", title_justify="left")
    for head in ("alone", "replica", "ratio", "least", "most", ""):
        table.add_column(head, justify="right")
    for load in LOADS:
        row = told[load]
        verdict = f"{'met' if told['met'] else 'not met'}: at most {BAR}" if load == "produce" else ""
        ratios = (f"{row[name]:.2f}" for name in ("ratio", "ratio_min", "ratio_max"))
        table.add_row(load, f"{row['alone_cpu_s']:.2f}", f"{row['replica_cpu_s']:.2f}", *ratios, verdict)
    console.print(table)
    for way, row in told["latency"].items():
        console.print(f"latency at {PER_S}/s, {way}: {row['p50_ms']:.2f} ms p50, {row['p99_ms']:.2f} ms p99")
    failover = told["failover"]
    console.print(
        f"failover beyond a session of {SESSION_MS:,} ms: {failover['p50_ms']:,} ms p50, {failover['p99_ms']:,} ms p99 "
        f"of {failover['kills']} kills"
    )
    console.print("split over two broker groups: " + ", ".join(f"{share:.1%}" for share in told["split"].values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()), help="where; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    if options.rounds:
        sizes = Sizes(options.rounds, sizes.messages, sizes.latency_s, sizes.kills)
    with tempfile.TemporaryDirectory(prefix="fairway-cluster-", dir=options.data) as name:
        told = summarise(measure(sizes, Path(name)))
    told["machine"] = machine.describe(options.data)
    if options.json:
        print(json.dumps(told))
    else:
        show(told, Console(width=max(110, Console().width)))
        print(told["machine"])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
