"""Archive of many subjects against one subject with as many messages: first run, a run with nothing to do, compaction.

The rows are the same, so the ratio is the cost of files: listing, reading footers, moving, committing. Rounds are
interleaved on local[2]; shown are medians of the seconds, and of the CPU seconds of Spark and all that it starts, which
say more on a busy machine. Each round has archives of its own.
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
from typing import TYPE_CHECKING, NamedTuple

import fairway
from bench import machine
from bench.tree import Tree
from fairway.runtime.process import Child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fairway.spark.jobs.archive import Archived, ArchiveOptions

MESSAGES = 20  # per subject and run
RUNS = 8  # the last of which compacts
FIRST, IDLE, COMPACTING = "first run", "nothing to do", "run that compacts"


class Taken(NamedTuple):
    """How long a run took, and how much of that the processors worked."""

    wall_s: float
    cpu_s: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compaction", action="store_true", help="leave the compaction out")
    told = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        taken = _measure(Path(folder), told)
    print(f"{'':25} {'one subject':>12} {f'{told.subjects} subjects':>14} {'ratio':>8}")
    for name in dict.fromkeys(name for name, _ in taken):
        for place, unit in enumerate(("", ", CPU")):
            one, many = (statistics.median(each[place] for each in taken[name, kind]) for kind in ("one", "many"))
            print(f"{name + unit:25} {one:10.2f} s {many:12.2f} s {many / max(one, 0.01):7.1f}x")
    print(machine.describe(Path(tempfile.gettempdir())))
    return 0


def _measure(home: Path, told: argparse.Namespace) -> dict[tuple[str, str], list[Taken]]:
    from fairway.spark import session

    taken: dict[tuple[str, str], list[Taken]] = defaultdict(list)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "1g"}
    with Child("fairway", "broker", "--data", str(home / "data"), "--port", "0") as broker:
        line = broker.line(timeout_s=30) or ""
        url = line[line.index("fairway://") :].partition(",")[0]
        spark = session("bench", "local[2]", settings)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            for number in range(told.rounds + 1):  # the first warms up, and does not count
                for kind, subjects in (("one", 1), ("many", told.subjects)):
                    count = MESSAGES * told.subjects // subjects
                    for name, each in _round(spark, url, home, f"{kind}.{number}", subjects, count, told):
                        said = f"{each.wall_s:.2f} s, CPU {each.cpu_s:.2f} s"
                        print(f"  {kind:4} {name}: {said}", file=sys.stderr, flush=True)
                        if number or not told.rounds:
                            taken[name, kind].append(each)
        finally:
            spark.stop()
    return taken


def _round(
    spark: SparkSession, url: str, home: Path, prefix: str, subjects: int, count: int, told: argparse.Namespace
) -> Iterator[tuple[str, Taken]]:
    from fairway.spark.jobs import archive

    path = home / prefix
    options = archive.ArchiveOptions(str(path), (f"{prefix}.*",), url=url, once=True)
    with fairway.connect(url) as client:
        for run in range(1 if told.no_compaction else RUNS):
            for subject in range(subjects):
                client.send_many(f"{prefix}.{subject}", [b"%d" % at for at in range(count)])
            client.flush()
            done, took = _timed(spark, options)
            if not run:
                yield FIRST, took
                yield IDLE, _timed(spark, options)[1]
            elif run == RUNS - 1:
                yield COMPACTING, took
                if done.compacted != (RUNS - 1) * subjects:
                    raise RuntimeError(f"{done.compacted} files were compacted, not {(RUNS - 1) * subjects}")
    shutil.rmtree(path)


def _timed(spark: SparkSession, options: ArchiveOptions) -> tuple[Archived, Taken]:
    from fairway.spark.jobs import archive

    tree = Tree()
    started_s, worked_s = time.monotonic(), tree.cpu_s()
    done = archive.run(spark, options)
    return done, Taken(time.monotonic() - started_s, tree.cpu_s() - worked_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
