"""What product code must not reach for, and what nobody here may.

Outside `runtime`, time, files, sockets, threads, processes and entropy come in as parameters (the design's "Layout" and
"Simulation"). The cli, its demos and the Spark jobs may touch the user's own files, since a user names them: `open`,
`pathlib`, `shutil`, `tempfile`, `glob`. For anything else they go through `runtime` like everybody.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Finding, Source

_FILES = frozenset({"fileinput", "glob", "pathlib", "shutil", "tempfile"})
_MACHINE = frozenset(
    {
        *("time", "sched", "timeit"),
        *("os", "posix", "fcntl", "mmap", "ctypes", "resource"),
        *("socket", "socketserver", "select", "selectors", "ssl"),
        *("random", "secrets", "uuid"),
        *("threading", "_thread", "concurrent", "multiprocessing", "subprocess", "signal"),
        "sqlite3",
    }
)
_MACHINE_NAMES = frozenset(
    {
        *("io.open", "io.FileIO"),
        *("asyncio.subprocess", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
        "numpy.random",
    }
)
_PURE_PATHS = frozenset({"pathlib.PurePath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath"})
_NOW = frozenset({"now", "utcnow", "today"})
# Nothing waits on a pool or a raw socket behind the loop's back: the simulated loop could not order it.
_LOOP_BYPASS = frozenset({"run_in_executor", "to_thread", "sendfile"})

# What writes to a terminal unescaped. A console may still be named as a type.
_OUTPUTS = frozenset({"print", "typer.echo", "typer.secho", "click.echo", "click.secho", "rich.print"})
_OUTPUTS |= {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
_PRINTERS = frozenset({"rich.console.Console", "rich.get_console"})

_CODE_FROM_DATA = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
_CODE_FROM_TEXT = frozenset({"eval", "exec", "compile", "__import__"})


def touches_users_files(source: Source) -> bool:
    return source.package in {"cli", "demo"} or source.module.startswith("fairway.spark.jobs")


def machine(sources: Iterable[Source]) -> Iterator[Finding]:
    """Outside `runtime`, nothing asks the machine for time, files, sockets, threads, processes or entropy."""
    for source in sources:
        if source.in_product and source.package != "runtime":
            yield from _machine_imports(source)
            yield from _machine_uses(source)


def loop_bypass(sources: Iterable[Source]) -> Iterator[Finding]:
    """Product code, `runtime` included, uses no executor and no raw socket call of the loop."""
    for source in sources:
        if not source.in_product:
            continue
        for node, name in _names(source.tree):
            last = name.rpartition(".")[2]
            if last in _LOOP_BYPASS or ("." in name and last.startswith("sock_")):
                yield source.at(node, f"`{last}` goes round the simulated loop")


def code_from_data(sources: Iterable[Source]) -> Iterator[Finding]:
    """Nowhere does data become code."""
    for source in sources:
        for found in source.imports():
            if found.top in _CODE_FROM_DATA:
                yield Finding(source.path, found.line, f"`{found.top}` turns data into code")
        for node, name in _names(source.tree):
            if name in _CODE_FROM_TEXT:
                yield source.at(node, f"`{name}` turns data into code")
        for part in ast.walk(source.tree):
            match part:
                case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True), lineno=line):
                    yield Finding(source.path, line, "`allow_pickle` turns data into code")


def asserts(sources: Iterable[Source]) -> Iterator[Finding]:
    """Invariants survive `python -O`."""
    for source in sources:
        if source.in_product:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Assert):
                    yield source.at(node, "`assert` is gone under -O: use invariant()")


def prints(sources: Iterable[Source]) -> Iterator[Finding]:
    """Only `runtime.terminal` writes to stdout and stderr: it escapes what a terminal would obey."""
    for source in sources:
        if source.in_product and source.module != "fairway.runtime.terminal":
            called = {part.func for part in ast.walk(source.tree) if isinstance(part, ast.Call)}
            for node, name in _names(source.tree):
                if name in _OUTPUTS or (name in _PRINTERS and node in called):
                    yield source.at(node, f"`{name}` outside `runtime.terminal`, which escapes what a terminal obeys")


def _machine_imports(source: Source) -> Iterator[Finding]:
    banned = _MACHINE if touches_users_files(source) else _MACHINE | _FILES
    for found in source.imports():
        if found.target in _PURE_PATHS:
            continue
        if found.top in banned or found.target in _MACHINE_NAMES:
            yield Finding(source.path, found.line, f"`{found.target}` outside `runtime`: take it as a parameter")


def _machine_uses(source: Source) -> Iterator[Finding]:
    for node, name in _names(source.tree):
        owner, _, last = name.rpartition(".")
        if name == "open" and not touches_users_files(source):
            yield source.at(node, "`open` outside `runtime`: take a Disk")
        elif name in _MACHINE_NAMES:
            yield source.at(node, f"`{name}` outside `runtime`: take it as a parameter")
        elif last in _NOW and owner.rpartition(".")[2] in {"datetime", "date"}:
            yield source.at(node, f"`{name}` outside `runtime`: take a Clock")


def _names(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every name that is read, dotted and in full: `open`, `asyncio.to_thread`, `numpy.random`, `?.sendfile`."""
    full = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                full.update({alias.asname: alias.name for alias in names if alias.asname})
            case ast.ImportFrom(module=str(module), names=names):
                full.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            yield node, _dotted(node, full).removeprefix("builtins.")


def _dotted(node: ast.expr, full: dict[str, str]) -> str:
    match node:
        case ast.Name():
            return full.get(node.id, node.id)
        case ast.Attribute():
            return f"{_dotted(node.value, full)}.{node.attr}"
        case _:
            return "?"
