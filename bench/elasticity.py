"""More consumers for a backlog: how soon a doubled number of them works twice as fast, and whether the others pause.

    python -m bench.elasticity [--quick] [--json] [--cold] [--consumers N] [--handler-ms N] [--seconds N] [--rounds N]

Consumers are programs of their own, with the public client and a handler that sleeps. They work on a backlog; then as
many again, which have connected and wait, join the group. Time runs from the instant at which the servers get the
command. The rate is that of all, over the last fifth of a second. They have handled a few messages elsewhere before,
unless they are to be `--cold`: with the first larger batch a client imports numpy, where that is installed. Two
backlogs:

    long     far more than what consumers hold: newcomers are given what nobody has
    short    all of it is in the hands of the consumers that are there, who would be busy with it for a while
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fairway
from bench.client_rates import broker
from bench.machine import describe
from fairway.runtime.process import Child

GROUP = "hotel"
WARM_UP = "warm-up"
WARM_UP_MESSAGES = 200
PAYLOAD = bytes(100)
WINDOW_NS = 200_000_000
REACHED = 0.9  # of twice the rate: what counts as doubled
CHILD_S_MAX = 60.0
PREFETCH = 2_000  # messages that a consumer holds: the client's own measure


# --- a consumer, in its own process ----------------------------------------------------------------------------------


def consume(url: str, subject: str, handler_ms: float, *, is_cold: bool) -> None:
    """Connect, wait for SIGUSR1, join and handle; at SIGTERM say when each message was begun, and end."""
    is_told, is_over = [], []
    signal.signal(signal.SIGUSR1, lambda *_: is_told.append(True))
    signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
    begun_ns: list[int] = []
    with fairway.connect(url) as client:
        if not is_cold:
            with client.consumer(WARM_UP, group=f"{GROUP}-{os.getpid()}") as consumer:
                consumer.take(1, timeout=CHILD_S_MAX)
        print("ready", flush=True)
        while not is_told:
            time.sleep(0.001)
        with client.consumer(subject, group=GROUP) as consumer:
            while not is_over:
                message = consumer.poll(timeout=0.1)
                if message is not None:
                    begun_ns.append(time.monotonic_ns())
                    time.sleep(handler_ms / 1e3)
                    message.ack()
    print(json.dumps(begun_ns), flush=True)


# --- one round -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What is tried."""

    name: str
    consumers: int  # before they are doubled
    handler_ms: float
    before_s: float  # how long the first work alone, and how long both are watched
    backlog: int  # messages
    is_cold: bool  # a consumer's first message is its program's first


class Consumer(Child):
    """It is connected when it is made."""

    def __init__(self, case: Case, url: str, subject: str) -> None:
        told = ("--consume", url, subject, str(case.handler_ms), *(("--cold",) if case.is_cold else ()))
        super().__init__("bench.elasticity", *told)

    def tell(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def begun_ns(self) -> list[int]:
        """When it began each message; it ends by that."""
        self.terminate()
        found: list[int] = json.loads(self.line(timeout_s=CHILD_S_MAX) or "[]")
        return found


@dataclass(frozen=True, slots=True)
class Round:
    """What was seen, in ms unless it says otherwise."""

    rate_before: float  # messages per second
    rate_after: float
    first_ms: float | None  # until the first newcomer had a message
    all_ms: float | None  # until every newcomer had one
    doubled_ms: float | None  # until the rate was (nearly) twice what it had been
    gap_before_ms: float  # the longest pause between two messages of one of the first consumers
    gap_after_ms: float


def play(case: Case, url: str, subject: str) -> Round:
    with fairway.connect(url) as client:
        client.send_many(WARM_UP, [PAYLOAD] * WARM_UP_MESSAGES)
        client.send_many(subject, [PAYLOAD] * case.backlog)
    with ExitStack() as stack:
        everybody = [stack.enter_context(Consumer(case, url, subject)) for _ in range(2 * case.consumers)]
        for each in everybody:
            each.line(timeout_s=CHILD_S_MAX)
        old, new = everybody[: case.consumers], everybody[case.consumers :]
        started_ns = _tell(old)
        time.sleep(case.before_s)
        doubled_ns = _tell(new)
        time.sleep(case.before_s)
        ended_ns = time.monotonic_ns()
        return _judge(
            [_until(each.begun_ns(), ended_ns) for each in old],
            [_until(each.begun_ns(), ended_ns) for each in new],
            (started_ns, doubled_ns, ended_ns),
        )


def _until(begun_ns: list[int], ended_ns: int) -> list[int]:
    """Without what those who leave hand over to the others."""
    return [at for at in begun_ns if at < ended_ns]


def _tell(consumers: list[Consumer]) -> int:
    now_ns = time.monotonic_ns()
    for each in consumers:
        each.tell(signal.SIGUSR1)
    return now_ns


def _judge(old: list[list[int]], new: list[list[int]], times_ns: tuple[int, int, int]) -> Round:
    started_ns, doubled_ns, ended_ns = times_ns
    settled_ns = started_ns + (doubled_ns - started_ns) // 3  # joining is over by then
    firsts = sorted(each[0] for each in new if each)
    merged = sorted(at for each in (*old, *new) for at in each)
    rate_before = _rate(merged, settled_ns, doubled_ns)
    return Round(
        rate_before,
        _rate(merged, (doubled_ns + ended_ns) // 2, ended_ns),
        _since_ms(doubled_ns, firsts[0] if firsts else None),
        _since_ms(doubled_ns, firsts[-1] if len(firsts) == len(new) else None),
        _since_ms(doubled_ns, _reached_ns(merged, doubled_ns, ended_ns, 2 * REACHED * rate_before)),
        _gap_ms(old, settled_ns, doubled_ns),
        _gap_ms(old, doubled_ns, ended_ns),
    )


def _rate(merged: list[int], from_ns: int, to_ns: int) -> float:
    return sum(from_ns <= at < to_ns for at in merged) * 1e9 / (to_ns - from_ns)


def _since_ms(from_ns: int, at_ns: int | None) -> float | None:
    return None if at_ns is None else (at_ns - from_ns) / 1e6


def _reached_ns(merged: list[int], from_ns: int, to_ns: int, rate: float) -> int | None:
    """The first instant at which the window behind it, all of it after the doubling, has that rate."""
    for end_ns in range(from_ns + WINDOW_NS, to_ns, WINDOW_NS // 20):
        if _rate(merged, end_ns - WINDOW_NS, end_ns) >= rate:
            return end_ns
    return None


def _gap_ms(consumers: list[list[int]], from_ns: int, to_ns: int) -> float:
    """A consumer that began nothing in that time has paused for all of it."""
    longest_ns = 0
    for begun in consumers:
        marks = [from_ns, *(at for at in begun if from_ns <= at < to_ns), to_ns]
        longest_ns = max([longest_ns, *(later - sooner for sooner, later in pairwise(marks))])
    return longest_ns / 1e6


# --- the figures -----------------------------------------------------------------------------------------------------


def cases(consumers: int, handler_ms: float, seconds: float, *, is_cold: bool) -> list[Case]:
    per_s = 1e3 / handler_ms
    long = round(4 * consumers * per_s * seconds) + 2 * consumers * PREFETCH
    slow_ms = 1e3 * 2 * seconds / (PREFETCH // 10)  # a tenth of what they hold would keep them busy twice as long
    short = round(consumers * PREFETCH * 0.75)
    return [
        Case("long backlog", consumers, handler_ms, seconds, long, is_cold),
        Case("short backlog, slow handler", consumers, slow_ms, seconds, short, is_cold),
    ]


def measure(tried: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    rows = []
    with broker("sync") as (url, _):
        found: dict[str, list[Round]] = {case.name: [] for case in tried}
        for number in range(rounds):
            for index, case in enumerate(tried):
                found[case.name].append(play(case, url, f"orders-{index}-{number}"))
    for case in tried:
        figures = {name: [asdict(each)[name] for each in found[case.name]] for name in Round.__dataclass_fields__}
        rows.append({"case": asdict(case), "rounds": figures, "median": {k: _median(v) for k, v in figures.items()}})
    return rows


def _median(values: list[float | None]) -> float | None:
    """None is for ever."""
    found = statistics.median_high(float("inf") if value is None else value for value in values)
    return None if found == float("inf") else round(found, 1)


def show(row: dict[str, Any]) -> None:
    case, median = row["case"], row["median"]
    before, after = median["rate_before"], median["rate_after"]
    print(
        f"  {case['name']}: {case['consumers']} consumers, then {2 * case['consumers']}; {case['backlog']:,} messages, "
        f"handler {case['handler_ms']:g} ms\n"
        f"    {before:,.0f} messages/s, then {after:,.0f}: x {after / before if before else 0:.2f}\n"
        f"    first newcomer at work after {_ms(median['first_ms'])}, the last after {_ms(median['all_ms'])}, "
        f"{2 * REACHED:g} times the rate after {_ms(median['doubled_ms'])} (a window of {WINDOW_NS // 1_000_000} ms)\n"
        f"    longest pause of one of the others: {_ms(median['gap_before_ms'])} before, "
        f"{_ms(median['gap_after_ms'])} after"
    )


def _ms(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f} ms"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="how soon more consumers take effect, and whether others pause")
    parser.add_argument("--consumers", type=int, default=4, help="before they are doubled")
    parser.add_argument("--handler-ms", type=float, default=4.0)  # 8 of 1 ms use up two cores
    parser.add_argument("--seconds", type=float, default=4.0, help="before the doubling, and after it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round of two consumers")
    parser.add_argument("--cold", action="store_true", help="consumers that have handled nothing before")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--consume", nargs=3, metavar=("URL", "SUBJECT", "HANDLER_MS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.consume:
        url, subject, handler_ms = options.consume
        consume(url, subject, float(handler_ms), is_cold=options.cold)
        return 0
    if options.quick:
        options.consumers, options.seconds, options.rounds = 2, 1.5, 1
    tried = cases(options.consumers, options.handler_ms, options.seconds, is_cold=options.cold)
    rows = measure(tried, options.rounds)
    machine = describe(Path(tempfile.gettempdir()))
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return 0
    print(f"{machine}; the medians of {options.rounds}")
    for row in rows:
        show(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
