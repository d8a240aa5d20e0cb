"""Wake-ups, syncs and system calls per delivered message, in broker, sender and receiver, at 100/s and at 1,000/s.

    python -m bench.wakeups            a table, about four minutes
    python -m bench.wakeups --quick    one short round
    python -m bench.wakeups --json     the same figures for a program

An open loop: a program with the sync client sends single messages at a steady rate, another takes each in its handler's
place and acks it, and so the figures stand beside the latency from send to handler. They are those of the drivers of
`bench.peers`. Nothing here can be missed: the bench only prints.

Syncs are the broker's own count. Processor time, context switches and write calls are the kernel's counters, taken over
a time in which nobody looks on. A voluntary switch is a thread that waits, and so a wake-up later. System calls are
counted by strace, where there is strace and it may attach, in runs of their own, one program at a time. It slows that
program: the latency with the broker under strace says how much. `sync p99` is that of an fdatasync of 4 KiB on the same
disk, just before and after.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.kernel_counters import Counters
from bench.peers.driving import Task
from bench.peers.figures import percentile
from bench.peers.rounds import drivers
from bench.peers.servers import FairwayMetered, metrics
from bench.peers.syncs import sync_us
from bench.presenting import short

RATES_PER_S = (100, 1_000)
WHO = ("broker", "sender", "receiver")
LEAD_S = 0.5  # of load before a count begins
TRAIL_S = 0.4  # and after it has ended
ATTACH_S_MAX = 10.0

_CALLED = re.compile(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)")  # a line of `strace -c`
_SYNCS = re.compile(r"^\w*syncs_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)

# What a system call is for; what is in none of these is in `all`.
KINDS = {
    "waits: epoll, poll, select": ("epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "ppoll", "select", "pselect6"),
    "futex": ("futex",),
    "sends": ("write", "writev", "sendto", "sendmsg", "sendmmsg"),
    "reads": ("read", "readv", "recvfrom", "recvmsg", "recvmmsg"),
    "file writes, synced in them": ("pwrite64", "pwritev", "pwritev2"),
    "fdatasync, fsync": ("fdatasync", "fsync", "sync_file_range"),
    "sleeps": ("nanosleep", "clock_nanosleep"),
}
ALL = "all system calls"
COUNTER_NAMES = tuple(field.name for field in fields(Counters))


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int
    seconds: float  # of a count


FULL = Scale(3, 5.0)
QUICK = Scale(1, 1.5)
TINY = Scale(1, 0.3)


class NoStrace(Exception):
    """It may not attach; the message says why."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Per delivered message, by program."""

    counters: dict[str, Counters]
    calls: dict[str, float]  # by kind, of the program that strace looked at
    syncs: float
    latencies_us: tuple[int, ...]
    syncs_us: tuple[int, ...]


# --- one count -------------------------------------------------------------------------------------------------------


@contextmanager
def strace(pid: int, folder: Path) -> Iterator[Path]:
    """Counts the system calls of a process, all its threads, meanwhile; its report is complete afterwards."""
    report = folder / f"calls-{pid}"
    command = ["strace", "-f", "-c", "-p", str(pid), "-o", str(report)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stderr.readline() if process.stderr is not None else ""
            if "attached" not in said:
                raise NoStrace(f"strace may not look on: {said.strip()}")
            yield report
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ATTACH_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()


def calls_of(report: str) -> dict[str, int]:
    """By kind, from the table that `strace -c` writes."""
    calls: Counter[str] = Counter()
    for line in report.splitlines():
        if (found := _CALLED.match(line)) is not None and found[2] != "total":
            calls[found[2]] += int(found[1])
    return {kind: sum(calls[name] for name in names) for kind, names in KINDS.items()} | {ALL: calls.total()}


def syncs_of(server: FairwayMetered) -> float:
    return sum(map(float, _SYNCS.findall(metrics(server.http_port))))


def count(server: FairwayMetered, rate_per_s: int, seconds: float, subject: str, traced: str) -> Counted:
    """One sender and one receiver for so many seconds; what each message cost, over the time in their midst.

    strace looks at the program `traced`, if any.
    """
    sync_s = min(seconds, 1.0)
    syncs_us = sync_us(server.data, sync_s)
    task = Task("receive_paced", server.url, subject, LEAD_S + seconds + TRAIL_S, rate_per_s=rate_per_s)
    with ExitStack() as running:
        tasks = (task, replace(task, workload="send_paced"))
        receiver, sender = running.enter_context(drivers(Path(sys.executable), "fairway_client", tasks))
        pids = dict(zip(WHO, (server.pids[-1], sender.pid, receiver.pid), strict=True))
        receiver.go()
        sender.go()
        time.sleep(LEAD_S)
        with ExitStack() as looking:
            report = looking.enter_context(strace(pids[traced], server.data)) if traced else None
            synced, began_s = syncs_of(server), time.perf_counter()
            before = {who: Counters.of(pid) for who, pid in pids.items()}
            time.sleep(seconds)
            after = {who: Counters.of(pid) for who, pid in pids.items()}
            per = (time.perf_counter() - began_s) * rate_per_s
            synced = syncs_of(server) - synced
        sender.result()
        ways_us = receiver.result().latencies_us
    return Counted(
        {who: after[who].since(before[who], per) for who in WHO},
        {kind: calls / per for kind, calls in calls_of(report.read_text()).items()} if report is not None else {},
        synced / per,
        ways_us,
        (*syncs_us, *sync_us(server.data, sync_s)),
    )


# --- all of them -----------------------------------------------------------------------------------------------------


def measure(scale: Scale, under: str | None) -> dict[str, Any]:
    """By rate, the figures of all ways to look on; and why there are no system calls, where there are none."""
    turns = [(rate, traced) for traced in ("", *WHO) for rate in RATES_PER_S]
    found: dict[tuple[int, str], list[Counted]] = {turn: [] for turn in turns}
    skipped = "" if shutil.which("strace") else "no strace on this machine"
    with (
        tempfile.TemporaryDirectory(prefix="wakeups-", dir=under, ignore_cleanup_errors=True) as folder,
        FairwayMetered(Path(folder) / "server") as server,
    ):
        for number in range(scale.rounds):
            for rate, traced in turns:
                if traced and skipped:
                    continue
                subject = f"paced.{rate}.{number}.{traced or 'alone'}"
                try:
                    found[rate, traced].append(count(server, rate, scale.seconds, subject, traced))
                except NoStrace as reason:
                    skipped = str(reason)
    rates = {
        str(rate): figures(found[rate, ""])
        | {"traced": {} if skipped else {who: figures(found[rate, who]) for who in WHO}}
        for rate in RATES_PER_S
    }
    return {"rates": rates, "skipped": skipped, "rounds": scale.rounds, "seconds": scale.seconds}


def figures(rounds: Sequence[Counted]) -> dict[str, Any]:
    """Medians of the rounds."""

    def middle(of: Callable[[Counted], float]) -> float:
        return statistics.median(map(of, rounds))

    return {
        "p50_ms": middle(lambda each: percentile(each.latencies_us, 50)) / 1e3,
        "p99_ms": middle(lambda each: percentile(each.latencies_us, 99)) / 1e3,
        "sync_p99_ms": middle(lambda each: percentile(each.syncs_us, 99)) / 1e3,
        "syncs": middle(lambda each: each.syncs),
        "counters": {
            who: {
                name: statistics.median(getattr(each.counters[who], name) for each in rounds) for name in COUNTER_NAMES
            }
            for who in WHO
        },
        "calls": {kind: statistics.median(each.calls[kind] for each in rounds) for kind in rounds[0].calls},
    }


# --- showing it ------------------------------------------------------------------------------------------------------

COUNTED = {
    "processor, µs": ("cpu_s", 1e6),
    "voluntary switches": ("voluntary_switches", 1),
    "involuntary switches": ("involuntary_switches", 1),
    "write calls": ("write_calls", 1),
    "bytes written": ("written_bytes", 1),
    "bytes to the disk": ("device_bytes", 1),
}


def show(told: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("per delivered message", no_wrap=True)
    for rate in told["rates"]:
        for who in WHO:
            table.add_column(f"{who}\n{int(rate):,}/s", justify="right", no_wrap=True)
    rows = list(told["rates"].values())
    table.add_row("syncs", *(cell for row in rows for cell in (short(row["syncs"]), "", "")))
    for name, (key, unit) in COUNTED.items():
        table.add_row(name, *(short(row["counters"][who][key] * unit) for row in rows for who in WHO))
    if not told["skipped"]:
        table.add_section()
        for kind in (*KINDS, ALL):
            table.add_row(kind, *(short(row["traced"][who]["calls"][kind]) for row in rows for who in WHO))
    console.print(table)
    for rate, row in told["rates"].items():
        traced = row["traced"].get("broker")
        under = f"; under strace {traced['p50_ms']:.2f}, {traced['p99_ms']:.2f}" if traced else ""
        console.print(
            f"send to handler at {int(rate):,}/s: p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, "
            f"{row['p99_ms'] / max(row['sync_p99_ms'], 1e-9):.2f} × sync p99 ({row['sync_p99_ms']:.2f} ms){under}",
            highlight=False,
        )
    if told["skipped"]:
        console.print(f"skipped: system calls: {told['skipped']}", highlight=False, markup=False)
    console.print(f"Medians of {told['rounds']} rounds of {told['seconds']:g} s. {told['machine']}. {machine.QUIET}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.wakeups", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--directory", help="where the data goes; the default is the system's temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    scale = TINY if options.tiny else QUICK if options.quick else FULL
    scale = Scale(options.rounds or scale.rounds, scale.seconds)
    told = measure(scale, options.directory)
    told["machine"] = machine.describe(Path(options.directory or tempfile.gettempdir()))
    if options.json:
        print(json.dumps(told))
    else:
        show(told, Console(width=max(100, Console().width)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
