"""A good client beside bad ones: how long does send, pull and ack take, alone and under each attack of tests/hostile?

The broker, the attacker and the good client are a process each. Rounds are interleaved: alone, then under attack. The
ratio of the medians of the rounds' p99 should stay within 2.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fairway.world.process import Child
from tests.hostile.broker_attacks import ATTACKS, client
from tests.support.client import Client, Stream

ROUND_S = 1.5
RATIO_MAX = 2.0


async def _round(one: Client, stream: Stream, arrived: int, attack: str | None, port: int) -> tuple[list[float], int]:
    """Milliseconds of every send, pull, ack; for as long as the attack lasts, or a while without one."""
    took: list[float] = []
    attacker = Child("tests.hostile.broker_attacks", attack, str(port)) if attack is not None else None
    try:
        if attacker is not None:
            await asyncio.sleep(0.7)  # for the interpreter to start
        end = time.perf_counter() + ROUND_S
        while time.perf_counter() < end:
            begun = time.perf_counter()
            await one.produce("good", stream.batch([b"x" * 100]))
            got = await one.pull("good", "group", "ann", arrived=arrived, wait_ms=1_000)
            await one.settle("good", "group", "ann", got.lots, arrived=got.number)
            arrived = got.number
            took.append((time.perf_counter() - begun) * 1_000)
            await asyncio.sleep(0.002)
    finally:
        if attacker is not None:
            attacker.__exit__(None, None, None)
    return took, arrived


def _p99(took: list[float]) -> float:
    return statistics.quantiles(took, n=100)[98]


async def _measure(port: int, rounds: int) -> None:
    one = await client(port)
    await one.join("good", "group", "ann")
    stream, arrived = Stream(77), 0
    print(f"{'attack':<20} {'alone p99':>10} {'attacked':>10} {'ratio':>6}   (ms; a round trip is send + pull + ack)")
    for attack in ATTACKS:
        alone: list[float] = []
        attacked: list[float] = []
        for _ in range(rounds):
            took, arrived = await _round(one, stream, arrived, None, port)
            alone.append(_p99(took))
            took, arrived = await _round(one, stream, arrived, attack.__name__, port)
            attacked.append(_p99(took))
        calm, rough = statistics.median(alone), statistics.median(attacked)
        verdict = "" if rough <= RATIO_MAX * calm else f"   more than {RATIO_MAX:g}"
        print(f"{attack.__name__:<20} {calm:>10.2f} {rough:>10.2f} {rough / calm:>6.2f}{verdict}")
    one.abort()
    await asyncio.sleep(0.1)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench hostile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        Child("fairway.cli.main", "broker", "--data", str(Path(folder) / "data"), "--port", "0") as broker,
    ):
        ready = broker.line(timeout_s=60) or ""
        port = int(ready.split(",")[0].rsplit(":", 1)[1])
        asyncio.run(_measure(port, arguments.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
