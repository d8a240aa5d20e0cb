"""A hot group alone, and beside a Spark job that scans a backlog as fast as it gets it; `bench.fairness --spark`.

The job is real: a session on local[2] that reads a subject to Spark's noop sink, again and again. It yields the cores
to broker and consumer, so that what is seen is what the broker does to them: scans are actors of their own with a low
weight. Rounds are interleaved; shown are medians of the rounds' percentiles.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from bench.fairness import PACE_PER_S, percentile
from bench.loads import PacedProcess, fill
from bench.processes import BrokerProcess, Child

START_S_MAX = 300  # of a session that yields to everybody
BATCHES, MESSAGES, PAYLOAD_BYTES = 2_500, 100, 1_000


class SparkProcess(Child):
    """`read` and, when the time is over, how many rows a second it got."""

    def __init__(self, port: int) -> None:
        super().__init__(_spark, port)
        self.hear(START_S_MAX)

    def read(self, seconds: float) -> None:
        self.tell("read", seconds)

    def rows_per_s(self) -> float:
        found: float = self.hear()
        return found


def _spark(port: int, pipe: Pipe) -> None:
    os.nice(19)
    from fairway.spark import session

    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "1g"}
    spark = session("fairness", "local[2]", settings)
    spark.sparkContext.setLogLevel("ERROR")
    stored = spark.read.format("fairway").options(url=f"fairway://127.0.0.1:{port}", subject="archive").load()

    def scan() -> None:
        stored.write.format("noop").mode("overwrite").save()

    scan()
    pipe.send("ready")
    while (command := pipe.recv())[0] == "read":
        begun, passes = time.monotonic(), 0
        while time.monotonic() - begun < command[1]:
            scan()
            passes += 1
        pipe.send(passes * BATCHES * MESSAGES / (time.monotonic() - begun))
    spark.stop()


def measure(root: Path, rounds: int, seconds: float) -> dict[str, Any]:
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    rates: list[float] = []
    with BrokerProcess(root) as broker:
        asyncio.run(fill(broker.port, "archive", BATCHES, MESSAGES, PAYLOAD_BYTES))
        asyncio.run(fill(broker.port, "orders", BATCHES // 10, 10, 100))
        with SparkProcess(broker.port) as spark, PacedProcess(broker.port, "orders", "hot") as hot:
            hot.measure(0.5, PACE_PER_S)
            for _ in range(rounds):
                alone.append(hot.measure(seconds, PACE_PER_S)["pull"])
                spark.read(seconds + 0.4)
                time.sleep(0.2)
                beside.append(hot.measure(seconds, PACE_PER_S)["pull"])
                rates.append(spark.rows_per_s())
    figures = {
        side: {f"p{rank}_ms": statistics.median(percentile(each, rank) for each in found) for rank in (50, 99)}
        for side, found in (("alone", alone), ("beside", beside))
    }
    ratio = figures["beside"]["p99_ms"] / max(figures["alone"]["p99_ms"], 1e-9)
    return figures | {"p99_ratio": ratio, "rows_per_s": statistics.median(rates)}
