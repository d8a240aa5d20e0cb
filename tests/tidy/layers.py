"""The import arrows of the design's "Layout", as a table. They point down only.

An import inside a function or for the type checker alone counts like any other: it is still knowledge of another part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.tidy.source import Finding, Source

_VALUES = frozenset({"names", "limits", "errors", "redaction"})
_GROUND = _VALUES | {"runtime", "batch", "coalesce", "group_events"}
_PARTS = frozenset({"protocol", "storage", "groups", "scheduling", "registry"})  # blind to one another
_SERVERS = frozenset({"broker", "delay", "meta"})  # blind to one another too: `fairway up` joins them, in the cli
_SHARED = frozenset({"replication", "serving"})  # what servers have in common
_ALIKE = frozenset({"lookup"})  # what clients and servers alike ask of meta servers
_SURFACE = frozenset({"", "aio"})  # `fairway` itself and its asyncio twin

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "limits": frozenset(),
    "redaction": frozenset(),
    "names": frozenset({"limits", "errors"}),
    "coalesce": frozenset({"errors"}),  # a law that clients and groups share
    "group_events": frozenset(),  # what groups decide, storage writes and readers of the log show
    "runtime": _VALUES,
    "batch": _VALUES | {"runtime"},
    **dict.fromkeys(_PARTS, _GROUND),
    "simulation": _GROUND | {"registry"},  # of the ports: what they mean, and nothing that stands on them
    **dict.fromkeys(_ALIKE, _GROUND | _PARTS),
    **dict.fromkeys(_SHARED, _GROUND | _PARTS | _ALIKE),
    **dict.fromkeys(_SERVERS, _GROUND | _PARTS | _ALIKE | _SHARED),
    "client": _GROUND | _PARTS | _ALIKE,  # never a server, nor what only servers need
    "spark": _GROUND | _PARTS | _ALIKE | {"client", "sql"},  # an outbox is a side of the books
    "sql": _GROUND | _PARTS | _ALIKE | {"client", "career"},  # outbox, inbox, fences: what stands on a user's database
    "career": _GROUND | _PARTS | _ALIKE,  # elections; it sends nothing itself
    **dict.fromkeys(_SURFACE, _GROUND | _PARTS | _ALIKE | {"client", "career"}),
    "testing": _GROUND
    | _PARTS
    | _ALIKE
    | _SERVERS
    | _SHARED
    | _SURFACE
    | {"client", "spark", "sql", "career", "simulation"},
    "pytest_plugin": frozenset({"testing"}),
    "__main__": frozenset({"", "runtime", "cli", "demo"}),  # which verbs there are
    "demo": _GROUND | _PARTS | _SURFACE | {"client", "cli"},
    "cli": _GROUND | _PARTS | _ALIKE | _SERVERS | _SHARED | _SURFACE | {"client", "spark", "sql", "career"},
}

# Lazy where the core install (client and command line) reaches; the rest may take what its extra brings at the top.
# uvloop and prometheus_client are never required, so nobody imports them at the top.
OPTIONAL: dict[str, frozenset[str]] = {
    "numpy": _SERVERS | {"storage", "groups", "scheduling", "replication", "spark"},
    "pyarrow": frozenset({"spark"}),
    "pyspark": frozenset({"spark"}),
    "sqlalchemy": frozenset({"sql"}),
    "kazoo": frozenset(),
    "uvloop": frozenset(),
    "prometheus_client": frozenset(),
}

# Modules that exist for the sake of one such library take it at the top, and are themselves imported lazily.
ADAPTERS: dict[str, str] = {
    "fairway.batch.arrow": "pyarrow",
}


def arrows(sources: Iterable[Source]) -> Iterator[Finding]:
    """No part imports what the table does not allow it, and every part is in the table."""
    for source in sources:
        if not source.in_product:
            continue
        if source.package not in MAY_IMPORT:
            yield Finding(source.path, 1, f"`{source.package}` is not a part of the layout (tests/tidy/layers.py)")
            continue
        allowed = MAY_IMPORT[source.package] | {source.package}
        for found in source.imports():
            if found.top == "fairway" and (target := _part(found.target)) not in allowed:
                yield Finding(
                    source.path, found.line, f"`{source.package or 'fairway'}` must not import `{target or 'fairway'}`"
                )


def absolute(sources: Iterable[Source]) -> Iterator[Finding]:
    """Every import says the full name of what it imports."""
    for source in sources:
        for found in source.imports():
            if found.target.startswith("."):
                yield Finding(source.path, found.line, "relative import: write the full name")


def lazy(sources: Iterable[Source]) -> Iterator[Finding]:
    """What an extra brings is imported inside functions, except where that extra is required anyway."""
    for source in sources:
        if not source.in_product:
            continue
        for found in source.imports():
            library = _library(found.target)
            if not found.eager or library not in OPTIONAL or ADAPTERS.get(source.module) == library:
                continue
            if source.package not in OPTIONAL[library]:
                yield Finding(source.path, found.line, f"import `{found.target}` inside the function that needs it")


def _library(target: str) -> str:
    """The top-level library that an import brings in, if need be through an adapter."""
    adapters = (library for adapter, library in ADAPTERS.items() if f"{target}.".startswith(f"{adapter}."))
    return next(adapters, target.partition(".")[0])


def _part(target: str) -> str:
    """`fairway.storage.segment` → `storage`; a name that `fairway` itself exports → ""."""
    part = target.split(".")[1] if "." in target else ""
    return part if part in MAY_IMPORT else ""
