"""What the rules look at: parsed source files, the imports in them, and the findings that rules return."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("src", "tests", "bench")


@dataclass(frozen=True)
class Finding:
    """A violation, in the form that editors and people can follow."""

    path: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.sentence}"


@dataclass(frozen=True)
class Import:
    """One imported name. `target` is dotted and complete: `from a import b` has the target `a.b`."""

    line: int
    target: str
    eager: bool  # carried out when the module is imported, not inside a function or for the type checker alone

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the repository and uses `/`."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text, filename=path))

    @property
    def area(self) -> str:
        return self.path.partition("/")[0]

    @property
    def module(self) -> str:
        """The dotted name, as importers know it."""
        return self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """The part of the design's layout that the file belongs to: `storage`, `names`; "" is the public surface."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def in_product(self) -> bool:
        return self.module.partition(".")[0] == "fairway" and self.area == "src"

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler, sentence: str) -> Finding:
        return Finding(self.path, node.lineno, sentence)

    def imports(self) -> Iterator[Import]:
        return _imports(self.tree, eager=True)


def load(root: Path = ROOT, areas: tuple[str, ...] = AREAS) -> list[Source]:
    """Every Python file of the repository, in a stable order."""
    return [
        Source.parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for area in areas
        for path in sorted((root / area).rglob("*.py"))
    ]


def _imports(node: ast.AST, *, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names, lineno=line):
                yield from (Import(line, alias.name, eager) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level, lineno=line):
                start = "." * level + (module or "")
                yield from (Import(line, f"{start}.{alias.name}", eager) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(target))], lineno=line
            ):
                yield Import(line, target, eager)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, eager=False)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(ast.Module(child.body, []), eager=False)
                yield from _imports(ast.Module(child.orelse, []), eager=eager)
            case _:
                yield from _imports(child, eager=eager)
