"""Isolation: a small load beside a large one, each ÷ alone; cold beside hot, floods, bulk, scans, admin verbs.

    python -m bench.isolation                       a table, about ten minutes
    python -m bench.isolation --quick               two short rounds, about a minute and a half
    python -m bench.isolation --tiny                one round of a moment: says that it works, not how fast
    python -m bench.isolation --only flood admin    the cases whose name has one of these words
    python -m bench.isolation --json                the figures for a program

The broker is a process of its own on loopback, fresh for each case and round, and so is each load. In a round each load
works alone, and then both work at once; the order changes from round to round. A ratio is of two measurements of one
round; shown are medians. A rate is taken over just the time in which the small load was measured. Large loads yield the
cores to the rest, so that what is seen is what the broker does; with --equal they do not. The first case is that of
`bench.fairness`: the large load is compared with the same one beside a broker with one queue for all requests.

`core` is the part of the time in which the broker was ready to run and had none, because others used them. Above a few
per cent the figures are about the machine.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from bench import fairness, machine
from bench.client_loads import admin_calls, batch_consumer, flooder, small_senders
from bench.fairness import directory, percentile, queued_part
from bench.loads import Arrival, Crowd, CrowdProcess, PacedProcess, ScanProcess, fill, rate_of, seek
from bench.presenting import short
from bench.processes import BrokerProcess

PACE_PER_S = 100  # single sends, admin calls
SENDERS, SENDER_PER_S = 4, 50
ARCHIVE, ORDERS, FLOOD, SMALL = "archive", "orders", "flood", "small"
HOT = "hot"

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it."""

    rounds: int = 5
    seconds: float = 3.0
    batches: int = 5_000  # of the backlog, 100 messages of 1,000 bytes each
    bulk: int = 1_000_000  # messages of 100 bytes that wait for a batch consumer
    lead_s: float = 0.3  # that a large load has worked before the small one is measured
    gives_way: bool = True  # the large load, where it and the rest want the same core
    cold: fairness.Scale = fairness.Scale(cold_rounds=5)  # noqa: RUF009  it is frozen


FULL = Scale()
QUICK = Scale(2, 0.6, 1_000, 200_000, 0.2, cold=fairness.QUICK)
TINY = Scale(1, 0.15, 400, 20_000, 0.02, cold=fairness.TINY)


class Small(Protocol):
    """A load of a few calls at a steady pace."""

    def measure(self, seconds: float) -> Samples: ...


class Large(Protocol):
    """A load that works as fast as it can, and says what it did when."""

    def begin(self, seconds: float) -> None: ...
    def end(self) -> list[Arrival]: ...


class HotGroup:
    """Pulls a few messages from memory, and acks them."""

    def __init__(self, paced: PacedProcess) -> None:
        self._paced = paced

    def measure(self, seconds: float) -> Samples:
        return self._paced.measure(seconds, fairness.PACE_PER_S)


class ColdGroup:
    """Drains a backlog whose pages were dropped, from the first message on."""

    def __init__(self, broker: BrokerProcess, crowd: CrowdProcess) -> None:
        self._broker = broker
        self._crowd = crowd

    def begin(self, _seconds: float) -> None:
        asyncio.run(seek(self._broker.port, ARCHIVE, "cold"))
        self._broker.evict()
        self._crowd.arrivals()
        self._crowd.start()

    def end(self) -> list[Arrival]:
        self._crowd.pause()
        time.sleep(0.05)
        return self._crowd.arrivals()


# --- what the cases consist of ---------------------------------------------------------------------------------------


class Stage:
    """A fresh broker, and loads on it that end with it."""

    def __init__(self, broker: BrokerProcess, scale: Scale, running: ExitStack) -> None:
        self.broker = broker
        self._scale = scale
        self._running = running

    @property
    def url(self) -> str:
        return f"fairway://127.0.0.1:{self.broker.port}"

    def fill_archive(self) -> None:
        asyncio.run(fill(self.broker.port, ARCHIVE, self._scale.batches, 100, 1_000))

    def hot_group(self) -> Small:
        asyncio.run(fill(self.broker.port, ORDERS, 250, 10, 100))
        paced = self._running.enter_context(PacedProcess(self.broker.port, ORDERS, HOT))
        paced.measure(0.1, fairness.PACE_PER_S)
        return HotGroup(paced)

    def sender(self, subject: str = SMALL) -> Small:
        return self._running.enter_context(small_senders(self.url, (subject,), PACE_PER_S))

    def senders(self) -> Small:
        subjects = tuple(f"{SMALL}.{number}" for number in range(SENDERS))
        return self._running.enter_context(small_senders(self.url, subjects, SENDER_PER_S))

    def admin(self) -> Small:
        self.hot_group()
        return self._running.enter_context(admin_calls(self.url, ORDERS, HOT, PACE_PER_S))

    def flooder(self) -> Large:
        return self._running.enter_context(flooder(self.url, FLOOD, gives_way=self._scale.gives_way))

    def batch_consumer(self) -> Large:
        asyncio.run(fill(self.broker.port, "bulk", self._scale.bulk // 1_000, 1_000, 100))
        consumer = batch_consumer(self.url, "bulk", self._scale.bulk, gives_way=self._scale.gives_way)
        return self._running.enter_context(consumer)

    def scanner(self) -> Large:
        self.fill_archive()
        return self._running.enter_context(ScanProcess(self.broker.port, ARCHIVE, gives_way=self._scale.gives_way))

    def cold_group(self) -> Large:
        self.fill_archive()
        crowd = Crowd(ARCHIVE, ("cold",), 20, bytes_max=256 * 1024, gives_way=self._scale.gives_way)
        return ColdGroup(self.broker, self._running.enter_context(CrowdProcess(self.broker.port, crowd)))


@dataclass(frozen=True, slots=True)
class Case:
    """Two loads, and what is asked of each beside the other, ÷ alone."""

    name: str
    small: Callable[[Stage], Small]
    large: Callable[[Stage], Large]
    most: dict[str, float] = field(default_factory=dict)  # of a figure of the small load
    least: float = 0.0  # of the large load's rate


CASES = (
    Case("sender beside a flood, other subject", Stage.sender, Stage.flooder, {"send p50": 2.0}, 0.9),
    Case("sender beside a flood, same subject", lambda stage: stage.sender(FLOOD), Stage.flooder, {}, 0.9),
    Case("consumer beside a flood", Stage.hot_group, Stage.flooder, {}, 0.9),
    Case("4 senders beside send_many in bulk", Stage.senders, Stage.flooder, {"send p99": 2.0}, 0.9),
    Case("4 senders beside a batch consumer", Stage.senders, Stage.batch_consumer, {"send p99": 2.0}, 0.85),
    Case("hot group beside Spark's scans", Stage.hot_group, Stage.scanner, {"pull p99": 1.5}),
    Case("admin beside a flood", Stage.admin, Stage.flooder),
    Case("admin beside a cold group", Stage.admin, Stage.cold_group),
)
COLD = "cold beside hot"
COLD_LEAST, HOT_MOST = 0.4, 1.4


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """What a small load saw, and what a large one did, in the same time; either may be idle."""

    figures: dict[str, float]
    per_s: float
    queued: float


def played(stage: Stage, small: Small | None, large: Large | None, scale: Scale) -> Side:
    samples: Samples = {}
    before = stage.broker.figures()
    if large is not None:
        large.begin(scale.lead_s + scale.seconds)
        time.sleep(scale.lead_s)
    began_s = time.perf_counter()
    if small is not None:
        samples = small.measure(scale.seconds)
    else:
        time.sleep(scale.seconds)
    took_s = time.perf_counter() - began_s
    done = large.end() if large is not None else []
    queued = queued_part(before, stage.broker.figures())
    return Side(_figures(samples), rate_of(done, began_s, min(scale.seconds, took_s)), queued)


def _figures(samples: Samples) -> dict[str, float]:
    return {f"{name} p{rank}": percentile(took_ms, rank) for name, took_ms in samples.items() for rank in (50, 99)}


@contextmanager
def staged(case: Case, scale: Scale, under: str | None) -> Iterator[tuple[Stage, Small, Large]]:
    with directory(under) as root, BrokerProcess(root) as broker, ExitStack() as running:
        stage = Stage(broker, scale, running)
        yield stage, case.small(stage), case.large(stage)


def play(case: Case, scale: Scale, under: str | None, number: int) -> dict[str, Side]:
    """One round: by its turns, what both loads did."""
    sides: dict[str, Side] = {}
    with staged(case, scale, under) as (stage, small, large):
        turns = {"small": (small, None), "large": (None, large), "both": (small, large)}
        for name in list(turns)[:: -1 if number % 2 else 1]:
            sides[name] = played(stage, *turns[name], scale)
    return sides


def rows_of(case: Case, rounds: Sequence[dict[str, Side]]) -> list[dict[str, Any]]:
    """One row for each figure of the small load, and one for the rate of the large one."""
    rows = [
        _row(
            case.name,
            f"{name} ms",
            [(each["small"].figures[name], each["both"].figures[name]) for each in rounds],
            {"most": case.most.get(name)},
        )
        for name in rounds[0]["small"].figures
    ]
    rates = [(each["large"].per_s, each["both"].per_s) for each in rounds]
    rows.append(_row(case.name, "large load, messages/s", rates, {"least": case.least or None}))
    queued = statistics.median(each["both"].queued for each in rounds)
    return [row | {"queued": queued} for row in rows]


def _row(case: str, what: str, pairs: Sequence[tuple[float, float]], asked: dict[str, float | None]) -> dict[str, Any]:
    """Of pairs alone and beside, one of each round."""
    ratios = [beside / max(alone, 1e-9) for alone, beside in pairs]
    alone, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "case": case,
        "what": what,
        "alone": alone,
        "beside": beside,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **asked,
    }


def cold_rows(scale: Scale, under: str | None) -> list[dict[str, Any]]:
    """Of `bench.fairness`: here the rate ÷ that of the same group before one queue for all."""
    found = fairness.measure_cold(scale.cold, under, lambda _what: None)
    ours = found["actors"]
    hot = {"alone": ours["alone"]["p99_ms"], "beside": ours["beside"]["p99_ms"], "ratio": ours["p99_ratio"]}
    plain, rate_here = (found[kind]["beside"]["cold_messages_per_s"] for kind in ("plain queue", "actors"))
    cold = {"alone": plain, "beside": rate_here, "ratio": rate_here / max(plain, 1e-9)}
    queued = ours["beside"]["queued"]
    return [
        {"case": COLD, "what": "hot pull p99 ms", "most": HOT_MOST, "queued": queued, **hot},
        {"case": COLD, "what": "cold messages/s; alone: a plain queue", "least": COLD_LEAST, "queued": queued, **cold},
    ]


def measure(scale: Scale, under: str | None, only: Sequence[str]) -> list[dict[str, Any]]:
    def is_wanted(name: str) -> bool:
        return not only or any(word in name for word in only)

    cases = [case for case in CASES if is_wanted(case.name)]
    rounds: dict[str, list[dict[str, Side]]] = {case.name: [] for case in cases}
    rows = cold_rows(scale, under) if is_wanted(COLD) else []
    for number in range(scale.rounds):
        for case in cases:
            print(f"  round {number + 1} of {scale.rounds}: {case.name}", file=sys.stderr, flush=True)
            rounds[case.name].append(play(case, scale, under, number))
    for case in cases:
        rows += rows_of(case, rounds[case.name])
    return rows


# --- showing it ------------------------------------------------------------------------------------------------------


def verdict(row: dict[str, Any]) -> str:
    if row.get("most"):
        return f"≤ {row['most']:g}: {'held' if row['ratio'] <= row['most'] else 'missed'}"
    if row.get("least"):
        return f"≥ {row['least']:g}: {'held' if row['ratio'] >= row['least'] else 'missed'}"
    return ""


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "alone", "beside", "ratio", "core"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("asked", no_wrap=True)
    case = ""
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            table.add_row(f"[bold]{case}", "", "", "", f"{row['queued']:.0%}", "")
        figures = (short(row[name]) for name in ("alone", "beside"))
        table.add_row(f"  {row['what']}", *figures, short(row["ratio"]), "", verdict(row))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--equal", action="store_true", help="large loads do not yield the cores; cold beside hot does")
    parser.add_argument("--directory", help="where the data goes; the default is the system's temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    scale = TINY if options.tiny else QUICK if options.quick else FULL
    if options.rounds:
        cold = replace(scale.cold, cold_rounds=options.rounds)
        scale = replace(scale, rounds=options.rounds, cold=cold)
    rows = measure(replace(scale, gives_way=not options.equal), options.directory, options.only)
    told = machine.describe(Path(options.directory or tempfile.gettempdir()))
    if options.json:
        print(json.dumps({"machine": told, "rows": rows}))
    else:
        show(rows, Console(width=max(100, Console().width)))
        print(f"{told}. {machine.QUIET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
