"""Archive of many subjects against one subject with as many messages: first run, a run with nothing to do, compaction.

The rows are the same, so the ratio is the cost of files: listing, reading footers, moving, committing. Rounds are
interleaved on local[2]; shown are medians. Each round has archives of its own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fairway
from bench import machine
from fairway.world.process import Child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 20  # per subject and run
RUNS = 8  # the last of which compacts
FIRST, IDLE, COMPACTING = "first run", "nothing to do", "run that compacts"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compaction", action="store_true", help="leave the compaction out")
    told = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        taken = _measure(Path(folder), told)
    print(f"{'':20} {'one subject':>12} {f'{told.subjects} subjects':>14} {'ratio':>8}")
    for name in dict.fromkeys(name for name, _ in taken):
        one, many = (statistics.median(taken[name, kind]) for kind in ("one", "many"))
        print(f"{name:20} {one:10.2f} s {many:12.2f} s {many / one:7.1f}x")
    print(machine.describe(Path(tempfile.gettempdir())))
    return 0


def _measure(home: Path, told: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    from fairway.spark import session

    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "1g"}
    with Child("fairway.cli.main", "broker", "--data", str(home / "data"), "--port", "0") as broker:
        line = broker.line(timeout_s=30) or ""
        url = line[line.index("fairway://") :].partition(",")[0]
        spark = session("bench", "local[2]", settings)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            for number in range(told.rounds + 1):  # the first warms up, and does not count
                for kind, subjects in (("one", 1), ("many", told.subjects)):
                    count = MESSAGES * told.subjects // subjects
                    for name, seconds in _round(spark, url, home, f"{kind}.{number}", subjects, count, told):
                        print(f"  {kind:4} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
                        if number or not told.rounds:
                            taken[name, kind].append(seconds)
        finally:
            spark.stop()
    return taken


def _round(
    spark: SparkSession, url: str, home: Path, prefix: str, subjects: int, count: int, told: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    from fairway.spark.jobs import archive

    path = home / prefix
    options = archive.Options(str(path), (f"{prefix}.*",), url=url, once=True)
    with fairway.connect(url) as client:
        for run in range(1 if told.no_compaction else RUNS):
            for subject in range(subjects):
                client.send_many(f"{prefix}.{subject}", [b"%d" % at for at in range(count)])
            client.flush()
            started = time.monotonic()
            done = archive.run(spark, options)
            seconds = time.monotonic() - started
            if not run:
                yield FIRST, seconds
                started = time.monotonic()
                archive.run(spark, options)
                yield IDLE, time.monotonic() - started
            elif run == RUNS - 1:
                yield COMPACTING, seconds
                if done.compacted != (RUNS - 1) * subjects:
                    raise RuntimeError(f"{done.compacted} files were compacted, not {(RUNS - 1) * subjects}")
    shutil.rmtree(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
