"""docs/internals/protocol.md says what the code does: its hex dumps, tables of fields, choices, codes and limits."""

from __future__ import annotations

import enum
import re
import types
import typing

import msgspec
import pytest

from fairway import errors, limits
from fairway.protocol import admin_messages, codec, delay_messages, messages, replication_messages, route_messages
from fairway.protocol.messages import ControlMessage, Verb
from tests.golden.frames import CASES, encoded
from tests.tidy.source import ROOT

TEXT = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
DUMPS = re.findall(r"<!-- frame: ([\w-]+) -->\n```text\n(.*?)```", TEXT, re.DOTALL)
SECTIONS = dict(re.findall(r"^\*\*(\w+)\*\*(.*?)(?=^\*\*\w+\*\*|^#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
MODULES = (messages, admin_messages, delay_messages, admin_messages, route_messages, replication_messages)
CLASSES = [each for module in MODULES for each in vars(module).values() if isinstance(each, type)]
MESSAGES = [each for each in CLASSES if issubclass(each, ControlMessage) and each is not ControlMessage]
CHOICES = [each for each in CLASSES if issubclass(each, enum.IntEnum) and each is not Verb]
PLAIN = {int: "number", str: "text", bool: "bool", bytes: "bytes", float: "float", type(None): "nil"}


def dump(data: bytes) -> str:
    """16 bytes to a line: where, what, and as text."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:04x}  {row[:8].hex(' '):23}  {row[8:].hex(' '):23}  {shown}")
    return "\n".join(lines) + "\n"


def rows(section: str) -> list[list[str]]:
    """The cells of the first table."""
    table = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    lines = table[0].split("\n")[2:] if table else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def shown_type(hint: object) -> str:
    """A field's type in the words of the document."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return shown_type(arguments[0])
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(map(shown_type, arguments))
    if origin is list:
        return f"list of {shown_type(arguments[0])}"
    if origin is dict:
        return f"map of {shown_type(arguments[0])} to {shown_type(arguments[1])}"
    assert isinstance(hint, type)
    return PLAIN.get(hint) or hint.__name__


def shown_default(value: object) -> str:
    match value:
        case None:
            return "nil"
        case bool():
            return str(value).lower()
        case enum.IntEnum():
            return value.name
        case "":
            return '""'
        case _:
            return str(value)


def shown_field(field: msgspec.structs.FieldInfo, hint: object) -> list[str]:
    default = ""
    if not field.required:
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = f" = {shown_default(value)}"
    return [field.encode_name, shown_type(hint) + default]


@pytest.mark.parametrize(("name", "shown"), DUMPS)
def test_hex_dumps_are_what_is_written(name: str, shown: str) -> None:
    assert shown == dump(encoded(name))


def test_there_are_hex_dumps() -> None:
    assert len(DUMPS) >= 10
    assert {name for name, _ in DUMPS} <= set(CASES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.__name__)
def test_every_field_of_every_message_is_specified(message: type[ControlMessage]) -> None:
    hints = typing.get_type_hints(message, include_extras=True)
    fields = [shown_field(field, hints[field.name]) for field in msgspec.structs.fields(message)]
    section = SECTIONS[message.__name__]
    assert [row[:2] for row in rows(section)] == fields if fields else "no fields" in section


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.__name__)
def test_every_choice_is_specified(choice: type[enum.IntEnum]) -> None:
    assert [row[:2] for row in rows(SECTIONS[choice.__name__])] == [[str(each.value), each.name] for each in choice]


@pytest.mark.parametrize("verb", codec.TABLE)
def test_every_verb_is_specified(verb: Verb) -> None:
    heading = rf"{verb.name} is verb {verb}\b" if verb < messages.FIRST_REQUEST_VERB else rf"^## {verb.name}, {verb}$"
    assert re.search(heading, TEXT, re.MULTILINE)


def test_every_code_is_specified() -> None:
    section = TEXT.split("# Codes\n")[1].split("# Limits\n")[0]
    assert [row[0].strip("`") for row in rows(section)] == [code.value for code in errors.Code]
    assert all(all(row) for row in rows(section)), "each with what happened and what to do"


def test_limits_are_those_of_the_code() -> None:
    for _, limit, remark in rows(TEXT.split("# Limits\n")[1]):
        name = re.match(r"[A-Z_]+", remark)
        assert name, remark
        assert int(limit.split()[0].replace(",", "")) == getattr(limits, name[0])
