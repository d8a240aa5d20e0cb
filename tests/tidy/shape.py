"""Ceilings: what does not fit on a few screens is two things. Every folder of modules is a package, every class of the
product has a name of its own, and no module is named by a gerund."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Finding, Source

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# Modules that end in -ing all the same, with the reason.
NOUNS_IN_ING: dict[str, str] = {
    "coalescing": "the pattern's own name",
    "outbox_encoding": "an encoding is a thing: the bytes of a row",
}


def ceilings(sources: Iterable[Source]) -> Iterator[Finding]:
    """No file and no function is longer than its ceiling; decorators are not counted, docstrings are."""
    for source in sources:
        lines = source.text.count("\n")
        if lines > FILE_LINES_MAX:
            yield Finding(source.path, 1, f"{lines} lines in one file: at most {FILE_LINES_MAX}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield source.at(node, f"`{node.name}` has {lines} lines: at most {FUNCTION_LINES_MAX}")


def packages(sources: Iterable[Source]) -> Iterator[Finding]:
    """Every folder with a module in it has an `__init__.py`, so that one file has one name for everybody."""
    found = list(sources)
    paths = {source.path for source in found}
    for folder in sorted({source.path.rpartition("/")[0] for source in found}):
        if folder != "src" and f"{folder}/__init__.py" not in paths:
            yield Finding(folder, 1, "no __init__.py")


def unique_names(sources: Iterable[Source]) -> Iterator[Finding]:
    """No class and no type alias of the product has the name of another one: a name means one thing everywhere."""
    first: dict[str, str] = {}
    for source in sources:
        if not source.in_product:
            continue
        for node in source.tree.body:
            name = _type_name(node)
            if name and first.setdefault(name, source.path) != source.path:
                yield source.at(node, f"`{name}` is also the name of a type in {first[name]}: give one of them its own")


def nouns(sources: Iterable[Source]) -> Iterator[Finding]:
    """A module of the product is named for what it holds, not for what is done there."""
    for source in sources:
        name = source.module.rpartition(".")[2]
        is_module = source.area == "src" and not source.path.endswith("/__init__.py")
        if is_module and name.endswith("ing") and name not in NOUNS_IN_ING:
            yield Finding(source.path, 1, f"`{name}` is a gerund: name the module for what it holds")


def _type_name(node: ast.stmt) -> str:
    """Of a class or a type alias; empty for anything else."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        return ast.unparse(node.target)
    return ""
