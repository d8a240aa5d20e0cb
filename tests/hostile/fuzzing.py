"""The command line of the fuzzers: how many inputs, which seed, a progress bar, and the counts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EXAMPLES = 10
EXAMPLE_CHARS = 2_000


def main(what: str, description: str, inputs: int, run: Callable[..., Any]) -> int:
    """`run(inputs, seed, tick)` gives a report: counts, `examples` of what went wrong, whether it is `clean`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--inputs", type=int, default=inputs)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, without a progress bar")
    options = parser.parse_args()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with nullcontext() if options.json else Progress(*columns) as progress:
        if progress is None:
            report = run(options.inputs, options.seed)
        else:
            task = progress.add_task("inputs", total=options.inputs)
            report = run(options.inputs, options.seed, lambda done: progress.update(task, completed=done))
    counts = asdict(report)
    examples = counts.pop("examples")[:EXAMPLES]
    if options.json:
        print(json.dumps({"seed": options.seed, **counts, "examples": examples}))
    else:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items())
        print(f"seed {options.seed}: {shown}")
        print("\n".join(example[:EXAMPLE_CHARS] for example in examples), file=sys.stderr)
    return 0 if report.clean else 1
