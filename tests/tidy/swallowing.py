"""Errors have fates (`fairway.errors`); logging one and going on is not a fate.

A handler for everything must raise, or hand the error on: to a caller, a future, a list. Passing it to a logger or to
`print` alone does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Finding, Source

_BROAD = frozenset({"Exception", "BaseException"})
_LOGGERS = frozenset({"log", "logger", "logging", "_log", "_logger", "print", "warnings"})


def swallowed(sources: Iterable[Source]) -> Iterator[Finding]:
    """No handler takes every error and lets none of them be seen."""
    for source in sources:
        for node in ast.walk(source.tree):
            match node:
                case ast.ExceptHandler() if _broad(node.type) and not _handed_on(node):
                    yield source.at(node, "every error is swallowed here: raise, hand it on, or name the one you mean")
                case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")) if any(
                    map(_broad, node.args)
                ):
                    yield source.at(node, "every error is suppressed here: name the one you mean")


def _broad(kind: ast.expr | None) -> bool:
    match kind:
        case None:
            return True
        case ast.Tuple():
            return any(map(_broad, kind.elts))
        case ast.Name():
            return kind.id in _BROAD
        case _:
            return False


def _handed_on(handler: ast.ExceptHandler) -> bool:
    return any(_keeps(statement, handler.name) for statement in handler.body)


def _keeps(node: ast.AST, name: str | None) -> bool:
    """Whether a raise, or a use of the error other than by a logger, lies in here."""
    match node:
        case ast.Raise():
            return True
        case ast.Name(id=used):
            return used == name
        case ast.Call(func=func) if _root(func) in _LOGGERS:
            return False
        case _:
            return any(_keeps(child, name) for child in ast.iter_child_nodes(node))


def _root(func: ast.expr) -> str:
    while isinstance(func, ast.Attribute):
        if func.attr in _LOGGERS:
            return func.attr
        func = func.value
    return func.id if isinstance(func, ast.Name) else ""
