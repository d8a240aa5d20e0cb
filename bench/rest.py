"""The cost of a rest: the same few microseconds of Python at full speed, and after the processor has idled for a while.

`python -m bench.rest [--rounds N]`. A shared machine gives an idle core to others, and what was in its caches is gone
when it is back: a latency at a low rate is a figure of this too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe
from fairway import batch

RESTS_MS = (0, 1, 10)
RUNS = 200


def took_us(rest_ms: int) -> float:
    """The median time to encode and check a batch of one message after such a rest."""
    took: list[float] = []
    for number in range(RUNS):
        if rest_ms:
            time.sleep(rest_ms / 1_000)
        began = time.perf_counter()
        batch.check(batch.encode([b"x" * 100], producer_id=7, first_sequence=number, created_ms=1))
        took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench rest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(argv).rounds
    found: dict[int, list[float]] = {rest_ms: [] for rest_ms in RESTS_MS}
    for _ in range(rounds):
        for rest_ms, figures in found.items():
            figures.append(took_us(rest_ms))
    hot_us = statistics.median(found[0])
    print(describe(Path.cwd()))
    for rest_ms, figures in found.items():
        rest = f"after a rest of {rest_ms} ms" if rest_ms else "at full speed"
        median_us = statistics.median(figures)
        print(
            f"  {rest:<22}{median_us:>8.1f} µs   ({min(figures):.1f} - {max(figures):.1f}){median_us / hot_us:>8.1f} x"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
