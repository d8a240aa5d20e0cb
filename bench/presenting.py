"""The parts that benches share when they show figures: rounds, rows, a table or JSON, three digits, the machine."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Rows: TypeAlias = list[dict[str, Any]]


def short(figure: float) -> str:
    """About three digits, for a column of a table."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if figure >= size:
            return f"{figure / size:.3g}{unit}"
    return f"{figure:.3g}" if figure < 100 else f"{figure:.0f}"


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
