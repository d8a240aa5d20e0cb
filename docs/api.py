"""The pages of docs/reference/api: what the public packages export, with signatures and docstrings.

What a class says of a field is the string below it or the comment beside it. Objects that come from a call have no
signature here, but the call.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import msgspec

from docs.pages import NOTE, cell, escaped, joined, table
from fairway import errors

MAP = """Every public name, with its signature and its description in the code.
[The Python clients](../clients.md) explains how the names work together. Durations are seconds or a `timedelta`."""

PACKAGES = {
    "fairway": "The client for programs with threads, and what it shares with the one for asyncio.",
    "fairway.aio": "The client for asyncio. Names that are missing here are those of `fairway`.",
    "fairway.career": "Leader election. `fairway` and `fairway.aio` export what most programs need.",
    "fairway.sql": "Outbox, inbox and election in your own database. `pip install 'fairway[sql]'`.",
    "fairway.testing": "A broker in memory, for tests. `pip install 'fairway[server]'`.",
    "fairway.spark": "Sessions for Spark. [Read and write with Spark](../../how-to/spark.md) has the options.",
}
# Objects that come from a call or an attribute, and the call or attribute.
MADE_BY = {
    "Client": "connect(...)",
    "Consumer": "client.consumer(...)",
    "Delayed": "client.delayed",
    "AioDelayed": "client.delayed",
    "Leadership": "career.leadership",
    "LocalElection": "LocalBallot.election()",
    "Message": "a consumer, or a listener's argument",
    "Pending": "client.send(...)",
    "PendingBatch": "client.send_many(...)",
    "QueueEntry": "QueueCoordinator",
    "VirtualClock": "MemoryBroker.clock",
}
_FOREIGN = ("builtins", "typing", "enum", "abc", "msgspec", "collections.abc")


def package_page(name: str) -> str:
    package = importlib.import_module(name)
    names = [each for each in package.__all__ if each != "__version__"]
    values = {each: getattr(package, each) for each in names}
    if "Client" in values:
        beside = vars(sys.modules[values["Client"].__module__])  # the class of `client.delayed` has no name of its own
        values |= {each: beside[each] for each in beside if each.endswith("Delayed") and inspect.isclass(beside[each])}
    is_error = {each for each, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)}
    functions = [each for each in values if inspect.isroutine(values[each])]
    classes = [each for each in values if each not in functions and each not in is_error]
    raised = [each for each in values if each in is_error and values[each].__module__ == errors.__name__]
    parts = [NOTE, f"# {name}", PACKAGES[name]]
    for each in (*functions, *classes, *(each for each in values if each in is_error and each not in raised)):
        parts += documented_value(each, values[each])
    if raised:
        shown = ", ".join(f"`{each}`" for each in raised)
        parts += ["## Errors", f"[Errors and remedies](../errors.md) says what to do about each: {shown}."]
    exported = {value.__name__: each for each, value in values.items() if inspect.isclass(value)}
    return re.sub(r"\b[A-Z]\w+", lambda found: exported.get(found[0], found[0]), joined(parts))


def package_map() -> str:
    rows = []
    for name, about in PACKAGES.items():
        names = [each for each in importlib.import_module(name).__all__ if each != "__version__"]
        rows.append((f"[{name}]({name}.md)", about, str(len(names))))
    parts = [
        NOTE,
        "# Python API",
        MAP,
        table("package", "what it has", "names", rows=rows),
    ]
    return joined(parts)


def documented_value(name: str, value: Any) -> list[str]:
    if inspect.isroutine(value):
        return [f"## {name}", textwrap.indent(signature(name, value), "    "), prose(value)]
    parts = [f"## {name}"]
    if name in MADE_BY:
        parts.append(f"*From* `{MADE_BY[name]}`." if "," not in MADE_BY[name] else f"*From* {MADE_BY[name]}.")
    own_init = next((each.__init__ for each in value.__mro__ if "__init__" in vars(each)), object.__init__)
    is_made = has_values(value) or name in MADE_BY or inspect.isabstract(value) or own_init is object.__init__
    is_made = is_made or issubclass(value, enum.Enum) or getattr(own_init, "__module__", "builtins") in _FOREIGN
    if not is_made and not getattr(value, "_is_protocol", False):
        parts.append(textwrap.indent(signature(name, value), "    "))
    parts.append(prose(value))
    if rows := values_of(value):
        is_enum = issubclass(value, enum.Enum)
        head = ("value", "", "what it is") if is_enum else ("field", "default", "what it is")
        parts.append(table(*head, rows=rows))
    found = list(members(value))
    if attributes := [attribute(each, member) for each, member in found if isinstance(member, property)]:
        parts.append(table("attribute", "type", "what it is", rows=attributes))
    for each, member in found:
        if not isinstance(member, property):
            parts += method(name, each, member, value)
    return parts


def prose(value: Any) -> str:
    """The docstring; fenced blocks of the tests are Python, so its examples stay indented."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and text == (inspect.getdoc(value.__mro__[1]) or ""):
        return ""
    return escaped(text)


def signature(name: str, value: Any) -> str:
    """The signature, one parameter a line where it is long."""
    found = inspect.signature(value)
    kept = [each for each in found.parameters.values() if each.name not in ("self", "clock", "rng", "log")]
    returned = found.return_annotation if not inspect.isclass(value) else inspect.Signature.empty
    words = [re.sub(r"<(\w+)[^>]*>", r"\1", str(each)).replace("'", '"') for each in separated(kept)]
    ending = "" if returned is inspect.Signature.empty else f" -> {shown_type(returned)}"
    line = f"{name}({', '.join(words)}){ending}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in words) + f"){ending}"


def separated(parameters: list[inspect.Parameter]) -> list[object]:
    """The parameters, with a star before those that are given by name only."""
    shown: list[object] = []
    has_star = False
    for each in parameters:
        has_star = has_star or each.kind is inspect.Parameter.VAR_POSITIONAL
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            shown.append("*")
            has_star = True
        annotation = each.annotation
        if isinstance(annotation, str):  # str() would quote it
            text = f"{each.name}: {annotation}"
            text = f"*{text}" if each.kind is inspect.Parameter.VAR_POSITIONAL else text
            text = f"**{text}" if each.kind is inspect.Parameter.VAR_KEYWORD else text
            shown.append(text if each.default is inspect.Parameter.empty else f"{text} = {default_text(each.default)}")
        else:
            shown.append(each)
    return shown


def default_text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if has_values(type(value)) and value == type(value)():
        return f"{type(value).__name__}()"
    return repr(value)


def shown_type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def has_values(value: type) -> bool:
    return is_dataclass(value) or issubclass(value, msgspec.Struct)


def values_of(value: type) -> list[tuple[str, ...]]:
    """The fields of a class of values, or the members of an enumeration."""
    told = documented(value)
    if issubclass(value, enum.Enum):
        return [(f"`{each.name}`", f"`{each.value!r}`", cell(told.get(each.name, ""))) for each in value]
    found: list[tuple[str, object, Any]]
    if is_dataclass(value):
        found = [(each.name, each.default, each.default_factory) for each in fields(value) if each.init]
        nothing: object = MISSING
    elif issubclass(value, msgspec.Struct):
        found = [(each.name, each.default, each.default_factory) for each in msgspec.structs.fields(value)]
        nothing = msgspec.NODEFAULT
    else:
        return []
    rows: list[tuple[str, ...]] = []
    for name, default, factory in found:
        if name.startswith("_"):
            continue
        if default is not nothing:
            shown = f"`{default_text(default)}`"
        else:
            shown = "" if factory is nothing else f"`{default_text(factory())}`"
        rows.append((f"`{name}`", cell(shown), cell(told.get(name, ""))))
    return rows


def documented(value: type) -> dict[str, str]:
    """What the source says of each field: the string below it, or else the comment beside it."""
    told: dict[str, str] = {}
    for each in reversed(value.__mro__):
        if each.__module__.split(".")[0] != "fairway":
            continue
        lines = textwrap.dedent(inspect.getsource(each)).splitlines()
        body = next(node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)).body
        for node, below in zip(body, [*body[1:], None], strict=True):
            target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if not isinstance(target, ast.Name):
                continue
            comment = re.search(r"(?<=  )# (.+)$", lines[(node.end_lineno or 1) - 1])
            text = (
                comment[1].split("  #")[0] if comment and "type:" not in comment[1] and "noqa" not in comment[1] else ""
            )
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = str(below.value.value)
            told[target.id] = text
    return told


def members(value: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, those of the bases first."""
    found: dict[str, Any] = {}
    for each in reversed(value.__mro__):
        if each.__module__.split(".")[0] == "fairway" and not issubclass(each, enum.Enum):
            found |= {name: member for name, member in vars(each).items() if not name.startswith("_")}
    names = {name for name, _, _ in values_of(value)}
    for name, member in found.items():
        if f"`{name}`" not in names and isinstance(member, property | staticmethod | classmethod | Callable):
            yield name, member


def attribute(name: str, member: property) -> tuple[str, ...]:
    kind = shown_type(inspect.signature(member.fget).return_annotation) if member.fget else ""
    return f"`{name}`", cell(f"`{kind}`"), cell(inspect.getdoc(member) or "")


def method(owner: str, name: str, member: Any, of: type) -> list[str]:
    inner = getattr(member, "__func__", member)
    call = signature(name, inner)
    if inspect.iscoroutinefunction(inner):
        call = f"await {call}"
    about = inspect.getdoc(getattr(of, name, None)) or inspect.getdoc(inner) or ""
    return [f"### {owner}.{name}", textwrap.indent(call, "    "), escaped(about)]
