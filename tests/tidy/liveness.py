"""No dead modules: whatever is in `src` is reached from an entry point. A module that only tests import is dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tests.tidy.source import Finding, Source

# Where users and programs come in, with the reason why no product code needs to import it. Keep this short.
ENTRY_POINTS: dict[str, str] = {
    "fairway": "the public surface",
    "fairway.aio": "the same for asyncio",
    "fairway.__main__": "the command line: `python -m fairway`",
    "fairway_cli": "the console script `fairway`",
    "fairway.testing": "for tests of users' programs",
    "fairway.spark": "for Spark programs",
    "pyspark_fairway": "what Spark finds by its name",
    "pyspark_fairway_delayed": "the same for what is pending",
    "pyspark_fairway_events": "the same for events",
    "fairway.pytest_plugin": "what pytest finds by its entry point",
    "fairway.simulation": "loop, clock, net and chance: what tests run a whole cluster on",
    "fairway.simulation.disk": "the simulated disk, for the same",
    "fairway.simulation.registry": "the simulated registry, for the same",
}


def dead(sources: Iterable[Source], entry_points: Mapping[str, str] = ENTRY_POINTS) -> Iterator[Finding]:
    """Every module is an entry point or imported, over however many steps, by one."""
    product = {source.module: source for source in sources if source.area == "src"}
    live = _reached(product, [entry for entry in entry_points if entry in product])
    for module in sorted(product.keys() - live):
        yield Finding(product[module].path, 1, f"`{module}` is dead: no entry point leads to it")
    for entry in sorted(entry_points.keys() - product.keys()):
        yield Finding("tests/tidy/liveness.py", 1, f"`{entry}` is an entry point that does not exist")


def _reached(product: Mapping[str, Source], entry_points: Iterable[str]) -> set[str]:
    live: set[str] = set()
    waiting = list(entry_points)
    while waiting:
        module = waiting.pop()
        if module in live or module not in product:
            continue
        live.add(module)
        for found in product[module].imports():
            waiting.extend(_prefixes(found.target))
        waiting.extend(_prefixes(module))
    return live


def _prefixes(target: str) -> Iterator[str]:
    """`a.b.c` → `a`, `a.b`, `a.b.c`: importing a module imports its packages, and `c` may be a module or a name."""
    parts = target.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))
