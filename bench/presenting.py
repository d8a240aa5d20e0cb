"""The parts that benches of a pure core share: rounds, rows, a table or JSON, the machine."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Rows: TypeAlias = list[dict[str, Any]]


def present(
    argv: Sequence[str] | None,
    description: str,
    rounds: int,
    measure: Callable[[int], Rows],
    show: Callable[[Rows], None],
) -> int:
    """Measure in so many rounds, unless told otherwise, and show it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = measure(options.rounds)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return 0
    show(rows)
    print(machine)
    return 0
