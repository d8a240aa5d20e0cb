"""Fairness: a small group beside a large one, a hot one beside a cold one, seventy at once; actors and a plain queue.

    python -m bench.fairness                    tables
    python -m bench.fairness --quick            the same in a few seconds: says that it works, not how fast
    python -m bench.fairness --only crowds      these parts: shares, cold, crowds
    python -m bench.fairness --json             the figures for a program
    python -m bench.fairness --plot FILE.png    and a picture
    python -m bench.fairness --spark            and beside a Spark job (bench/fairness_spark)

The broker is a process of its own on loopback, and so is each crowd of consumers; all share this machine's cores. The
plain queue is the same broker with one queue for all requests, first come, first served, and reads that block.

Shares: group `large` has 100 consumers, `small` has 2, both pull from a backlog in memory as fast as they are answered.
The measure is the time of the broker's loop that each group got.

Cold: one consumer of group `hot` pulls ten messages at a steady pace from what is in memory, alone, and beside 20
consumers of group `cold` that drain a backlog whose pages were dropped. Rounds are interleaved; shown are medians of
the rounds' percentiles. A pull does not wait for a sync; what a settle, which does, takes is shown apart. The cold
group's rate ends with its last message, where it had the whole backlog before the time was over.

A broker that is ready to run and has no core, because others use the machine, answers late whatever its order. Every
figure shows that part of the time. Above a few per cent the figures are about the machine.

Crowds: 70 groups on one subject, 200 consumers in all and 500 messages a second, then 1,000 and 1,000. All keep up
where the group that is farthest behind is, in the median of 40 looks, at most half a second behind what is committed,
and half a second after the last message nobody is. The consumers' own CPU is shown too: on two cores they may be what
falls behind. The time from send to hand is that of every message in every group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import machine
from bench.loads import Arrival, Crowd, CrowdProcess, PacedProcess, PaceProducer, fill, rate_of, seek
from bench.processes import BrokerProcess

KINDS = {"actors": False, "plain queue": True}
PACE_PER_S = 250
LOOKS = 40  # at the lags of the crowd's groups
CROWD_CORES_MAX = 0.5  # of the broker, with 70 groups, 200 consumers and 500 messages a second

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it."""

    share_rounds: int = 5
    share_s: float = 0.8
    share_batches: int = 10_000  # a plain queue has taken 3,000 before anybody can look
    large: int = 100
    cold_rounds: int = 10
    cold_s: float = 3.0  # 750 pulls: of fewer a p99 is mostly luck
    cold_batches: int = 5_000
    cold_consumers: int = 20
    crowd_groups: int = 70
    crowds: tuple[tuple[int, int], ...] = ((200, 500), (1_000, 1_000))  # consumers, messages a second
    crowd_s: float = 20.0


QUICK = Scale(1, 0.4, 1_500, 100, 2, 0.5, 1_000, 20, 70, ((200, 500),), 2.0)
TINY = Scale(1, 0.1, 300, 10, 1, 0.1, 40, 3, 5, ((10, 200),), 0.3)
PARTS = ("shares", "cold", "crowds")


def steps_of(scale: Scale, parts: Sequence[str]) -> int:
    steps = {
        "shares": len(KINDS) * scale.share_rounds,
        "cold": len(KINDS) * 2 * scale.cold_rounds,
        "crowds": len(scale.crowds),
    }
    return sum(steps[part] for part in parts)


def jain(shares: Sequence[float]) -> float:
    """1 where all are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def queued_part(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The part of the time in which the broker was ready to run and had no core."""
    part: float = (after["queued_s"] - before["queued_s"]) / max(after["at_s"] - before["at_s"], 1e-9)
    return part


@contextmanager
def directory(under: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fairness-", dir=under, ignore_cleanup_errors=True) as made:
        yield Path(made)


# --- shares ----------------------------------------------------------------------------------------------------------


def share_round(is_plain: bool, scale: Scale, under: str | None) -> dict[str, float]:
    with directory(under) as root, BrokerProcess(root, is_plain=is_plain) as broker:
        asyncio.run(fill(broker.port, "backlog", scale.share_batches, 50, 1_000))
        with (
            CrowdProcess(broker.port, Crowd("backlog", ("large",), scale.large)) as large,
            CrowdProcess(broker.port, Crowd("backlog", ("small",), 2)) as small,
        ):
            large.start()
            small.start()
            time.sleep(scale.share_s / 8)
            before = broker.figures()
            deadline_s = time.monotonic() + scale.share_s
            after = before
            while time.monotonic() < deadline_s:  # as long as both are backlogged
                time.sleep(scale.share_s / 20)
                now = broker.figures()
                if min(group["lag"] for group in now["groups"].values()) == 0:
                    break
                after = now
            large.pause()
            small.pause()
    loop_ns = {
        name: after["groups"][name]["loop_ns"] - before["groups"][name]["loop_ns"] for name in ("large", "small")
    }
    elapsed_s = max(after["at_s"] - before["at_s"], 1e-9)
    total_ns = max(sum(loop_ns.values()), 1)
    return {
        "small_share": loop_ns["small"] / total_ns,
        "jain": jain([loop_ns["small"], loop_ns["large"]]) if total_ns > 1 else 0.0,
        "queued": queued_part(before, after),
        "messages_per_s": (after["pulled"] - before["pulled"]) / elapsed_s,
    }


def measure_shares(scale: Scale, under: str | None, step: Step) -> dict[str, dict[str, Any]]:
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(scale.share_rounds):
        for kind, is_plain in KINDS.items():
            step(f"shares, {kind}")
            rounds[kind].append(share_round(is_plain, scale, under))
    return {
        kind: {name: statistics.median(each[name] for each in found) for name in found[0]}
        | {"shares": [round(each["small_share"], 3) for each in found]}
        for kind, found in rounds.items()
    }


# --- hot beside cold -------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


class ColdStage:
    """A broker with a backlog on disk, a hot group and a cold one."""

    def __init__(self, broker: BrokerProcess, hot: PacedProcess, cold: CrowdProcess, scale: Scale) -> None:
        self._broker = broker
        self._hot = hot
        self._cold = cold
        self._scale = scale

    def alone(self) -> dict[str, float]:
        before = self._broker.figures()
        found = self._figures(self._hot.measure(self._scale.cold_s, PACE_PER_S))
        return found | {"queued": queued_part(before, self._broker.figures())}

    def beside(self) -> dict[str, float]:
        asyncio.run(seek(self._broker.port, "archive", "cold"))
        self._broker.evict()
        self._cold.arrivals()
        read_before = self._broker.figures()
        self._cold.start()
        began_s = time.perf_counter()
        found = self._figures(self._hot.measure(self._scale.cold_s, PACE_PER_S))
        self._cold.pause()
        read_after = self._broker.figures()
        arrivals = self._cold.arrivals()
        found["cold_messages_per_s"] = rate_of(arrivals, began_s, self._scale.cold_s)
        found["cold_drained"] = float(sum(each.messages for each in arrivals) >= self._scale.cold_batches * 100)
        found["fetches"] = read_after["fetches"] - read_before["fetches"]
        found["queued"] = queued_part(read_before, read_after)
        time.sleep(0.05)
        return found

    def _figures(self, found: dict[str, list[float]]) -> dict[str, float]:
        return {
            "p50_ms": percentile(found["pull"], 50),
            "p99_ms": percentile(found["pull"], 99),
            "settle_p99_ms": percentile(found["settle"], 99),
        }


def measure_cold(scale: Scale, under: str | None, step: Step) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, list[dict[str, float]]]] = {kind: {"alone": [], "beside": []} for kind in KINDS}
    crowd = Crowd("archive", ("cold",), scale.cold_consumers, bytes_max=256 * 1024, gives_way=True)
    with directory(under) as one, directory(under) as other:
        roots = dict(zip(KINDS, (one, other), strict=True))
        for root in roots.values():
            with BrokerProcess(root) as broker:
                asyncio.run(fill(broker.port, "archive", scale.cold_batches, 100, 1_000))
                asyncio.run(fill(broker.port, "orders", max(scale.cold_batches // 10, 10), 10, 100))
        for number in range(scale.cold_rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                with (
                    BrokerProcess(roots[kind], is_plain=KINDS[kind]) as broker,
                    PacedProcess(broker.port, "orders", "hot") as hot,
                    CrowdProcess(broker.port, crowd) as cold,
                ):
                    stage = ColdStage(broker, hot, cold, scale)
                    hot.measure(0.1, PACE_PER_S)
                    step(f"hot alone, {kind}")
                    found[kind]["alone"].append(stage.alone())
                    step(f"hot beside cold, {kind}")
                    found[kind]["beside"].append(stage.beside())
    for kind, sides in found.items():
        medians = {
            side: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            for side, rounds in sides.items()
        }
        ratios = [
            beside["p99_ms"] / max(alone["p99_ms"], 1e-9)
            for alone, beside in zip(sides["alone"], sides["beside"], strict=True)
        ]
        result[kind] = medians | {
            "p99_ratio": medians["beside"]["p99_ms"] / max(medians["alone"]["p99_ms"], 1e-9),
            "p99_ratio_by_round": [round(ratio, 2) for ratio in ratios],
        }
    plain = found["plain queue"]["beside"]
    for kind, sides in found.items():
        pairs = zip(sides["beside"], plain, strict=True)
        ratios = [ours["cold_messages_per_s"] / max(theirs["cold_messages_per_s"], 1e-9) for ours, theirs in pairs]
        result[kind]["cold_ratio"] = statistics.median(ratios)
        result[kind]["cold_ratio_by_round"] = [round(ratio, 3) for ratio in ratios]
    return result


# --- the crowd -------------------------------------------------------------------------------------------------------


def lag_max(figures: dict[str, Any]) -> int:
    """Of the group that is farthest behind what is committed."""
    return max((group["lag"] for group in figures["groups"].values()), default=0)


def hand_ms(sent: dict[str, Any], arrivals: Sequence[Arrival]) -> list[float]:
    """From sending to a consumer's hand, of each message in each group; of those that were sent in that time."""
    first, each, sent_at_s = sent["first"], sent["each"], sent["sent_at_s"]
    found: list[float] = []
    for arrival in arrivals:
        begin, end = max(arrival.first, first), min(arrival.first + arrival.messages, first + each * len(sent_at_s))
        found += [(arrival.at_s - sent_at_s[(at - first) // each]) * 1e3 for at in range(begin, end)]
    return found


def measure_crowd(scale: Scale, count: int, per_s: int, under: str | None, step: Step) -> dict[str, Any]:
    step(f"{scale.crowd_groups} groups, {count:,} consumers")
    groups = tuple(f"group-{number:02d}" for number in range(scale.crowd_groups))
    crowd = Crowd("news", groups, count, wait_ms=5_000)
    with (
        directory(under) as root,
        BrokerProcess(root) as broker,
        CrowdProcess(broker.port, crowd) as consumers,
        PaceProducer(broker.port, "news", per_s) as producer,
    ):
        consumers.start()
        producer.send_for(min(1.0, scale.crowd_s / 4))
        lags: list[int] = []

        def look() -> None:
            time.sleep(scale.crowd_s / LOOKS)
            lags.append(lag_max(broker.figures()))

        before, pulls_before = broker.figures(), consumers.counts()
        sent = producer.send_for(scale.crowd_s, look)
        after, pulls_after = broker.figures(), consumers.counts()
        time.sleep(0.5)
        settled, counts = broker.figures(), consumers.counts()
        ways_ms = hand_ms(sent, consumers.arrivals())
    elapsed_s = after["at_s"] - before["at_s"]
    return {
        "groups": len(after["groups"]),
        "consumers": count,
        "messages_per_s_in": sent["sent"] / elapsed_s,
        "deliveries_per_s": (after["pulled"] - before["pulled"]) / elapsed_s,
        "slowest_receipt_ms": sent["slowest_ms"],
        "hand_p50_ms": percentile(ways_ms, 50),
        "hand_p99_ms": percentile(ways_ms, 99),
        "pulls_per_s": (pulls_after["pulls"] - pulls_before["pulls"]) / elapsed_s,
        "lag_max_median": statistics.median(lags or [0]),
        "lag_max": max(lags, default=0),
        "lag_max_half_a_second_later": lag_max(settled),
        "all_keep_up": len(after["groups"]) == scale.crowd_groups
        and statistics.median(lags or [0]) <= per_s // 2
        and lag_max(settled) == 0,
        "refused": counts["refused"],
        "broker_cpu": (after["cpu_s"] - before["cpu_s"]) / elapsed_s,
        "broker_queued": queued_part(before, after),
        "consumers_cpu": (pulls_after["cpu_s"] - pulls_before["cpu_s"]) / elapsed_s,
        "producer_cpu": sent["cpu_s"] / elapsed_s,
        "broker_resident_mib": after["resident_bytes"] / (1 << 20),
    }


# --- showing it ------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    console = Console(width=max(100, Console().width))
    if "shares" in result:
        console.print(_shares(result["shares"]))
    if "cold" in result:
        console.print(_cold(result["cold"]))
    if "spark" in result:
        alone, beside = result["spark"]["alone"], result["spark"]["beside"]
        print(
            f"a hot group beside a Spark job of {result['spark']['rows_per_s']:,.0f} rows/s: pull p50 / p99 "
            f"{alone['p50_ms']:.2f} / {alone['p99_ms']:.2f} ms alone, {beside['p50_ms']:.2f} / {beside['p99_ms']:.2f} "
            f"ms beside, p99 ratio {result['spark']['p99_ratio']:.2f}"
        )
    if "crowds" in result:
        console.print(_crowds(result["crowds"]))
    if "machine" in result:
        print(f"{result['machine']}. {machine.QUIET}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _shares(rows: dict[str, dict[str, Any]]) -> Table:
    title = "100 consumers beside 2: the share of the broker's time that the 2 had; 0.5 is fair"
    table = _table(title, "", "share", "Jain's index", "messages/s", "without a core")
    for kind, row in rows.items():
        rate = f"{row['messages_per_s']:,.0f}"
        table.add_row(kind, f"{row['small_share']:.3f}", f"{row['jain']:.4f}", rate, f"{row['queued']:.0%}")
    return table


def _cold(rows: dict[str, dict[str, Any]]) -> Table:
    title = "a hot group's pulls alone, and beside a cold group that drains a backlog"
    columns = ("p50 / p99 ms", "beside", "p99 ÷", "settle p99 ms", "cold/s", "÷ plain", "without a core")
    table = _table(title, "", *columns)
    for kind, row in rows.items():
        alone, beside = row["alone"], row["beside"]
        is_drained = " to its end" if beside["cold_drained"] else ""
        table.add_row(
            kind,
            f"{alone['p50_ms']:.2f} / {alone['p99_ms']:.2f}",
            f"{beside['p50_ms']:.2f} / {beside['p99_ms']:.2f}",
            f"{row['p99_ratio']:.2f}",
            f"{alone['settle_p99_ms']:.1f}, {beside['settle_p99_ms']:.1f}",
            f"{beside['cold_messages_per_s']:,.0f}{is_drained}",
            f"{row['cold_ratio']:.3f}",
            f"{alone['queued']:.0%}, {beside['queued']:.0%}",
        )
    return table


CROWD_FIGURES = {
    "messages/s in": ("messages_per_s_in", ",.0f"),
    "deliveries/s": ("deliveries_per_s", ",.0f"),
    "pulls/s": ("pulls_per_s", ",.0f"),
    "broker, cores": ("broker_cpu", ".2f"),
    "of the time without one": ("broker_queued", ".0%"),
    "broker, MiB": ("broker_resident_mib", ".0f"),
    "all consumers, cores": ("consumers_cpu", ".2f"),
    "send to hand p50, ms": ("hand_p50_ms", ".1f"),
    "send to hand p99, ms": ("hand_p99_ms", ".1f"),
    "largest lag, median": ("lag_max_median", ",.0f"),
    "largest lag": ("lag_max", ",.0f"),
}


def _crowds(crowds: Sequence[dict[str, Any]]) -> Table:
    heads = (f"{crowd['groups']} groups, {crowd['consumers']:,} consumers" for crowd in crowds)
    table = _table(f"crowds on one subject; asked of 200 consumers: at most {CROWD_CORES_MAX:g} cores", "", *heads)
    for name, (key, form) in CROWD_FIGURES.items():
        table.add_row(name, *(f"{crowd[key]:{form}}" for crowd in crowds))
    table.add_row("", *("all keep up" if crowd["all_keep_up"] else "SOME FALL BEHIND" for crowd in crowds))
    return table


def run(scale: Scale, under: str | None, parts: Sequence[str], *, is_silent: bool) -> dict[str, Any]:
    columns = (TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=is_silent, transient=True) as progress:
        task = progress.add_task("", total=steps_of(scale, parts))

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what)

        measured: dict[str, Callable[[], Any]] = {
            "shares": lambda: measure_shares(scale, under, step),
            "cold": lambda: measure_cold(scale, under, step),
            "crowds": lambda: [measure_crowd(scale, *crowd, under, step) for crowd in scale.crowds],
        }
        told = {"machine": machine.describe(Path(under or tempfile.gettempdir()))}
        return told | {part: measured[part]() for part in parts}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="fairness among consumer groups, beside a plain queue")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="smaller still, for the test that this runs at all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--spark", action="store_true", help="also a hot group beside a Spark job")
    parser.add_argument("--only-spark", action="store_true", help="nothing but that")
    parser.add_argument("--directory", help="where the data goes; the default is the system's temporary directory")
    options = parser.parse_args(argv)
    scale = TINY if options.tiny else QUICK if options.quick else Scale()
    if options.plot and len(options.only) < len(PARTS):
        parser.error("the picture is of all parts")
    parts = [] if options.only_spark else [part for part in PARTS if part in options.only]
    result = run(scale, options.directory, parts, is_silent=options.json)
    if options.spark or options.only_spark:
        from bench import fairness_spark

        with directory(options.directory) as root:
            result["spark"] = fairness_spark.measure(root, scale.cold_rounds, scale.cold_s)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    if options.plot:
        from bench.fairness_plot import draw

        draw(result, Path(options.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
