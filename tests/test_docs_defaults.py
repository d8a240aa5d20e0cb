"""The tables of settings in docs/reference/clients.md name every setting there is, with the default that it has."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import msgspec
import pytest

import fairway
from fairway import limits
from fairway.groups import GroupConfig
from tests.tidy.source import ROOT

# Not in the table: what only a format or a tool cares about.
_ELSEWHERE = {"subject", "group", "version", "lot_messages_max", "lots_max", "is_broadcast", "broadcast_ms_max"}

_PRODUCER = {field.name: field.default for field in fields(fairway.ProducerOptions)}
_CONSUMER = {field.name: field.default for field in fields(fairway.ConsumerOptions)}
_GROUP = {field.name: field.default for field in msgspec.structs.fields(GroupConfig)}


def rows(heading: str) -> dict[str, str]:
    """Setting by setting, what the table under that heading says is the default."""
    text = (ROOT / "docs" / "reference" / "clients.md").read_text(encoding="utf-8")
    _, table = text.split(f"| {heading} |", 1)
    shown: dict[str, str] = {}
    for line in table.split("\n\n", 1)[0].split("\n")[2:]:
        names, defaults = line.split("|")[1:3]
        shown.update(zip(re.findall(r"`(\w+)`", names), defaults.strip().split(", "), strict=True))
    return shown


def value(shown: str) -> Any:
    """A number, or None where the default is said in words."""
    found = re.fullmatch(r"(?P<number>[\d,]+)(?P<unit> MiB)?", shown)
    return int(found["number"].replace(",", "")) * (limits.MIB if found["unit"] else 1) if found else None


@pytest.mark.parametrize(
    ("heading", "defaults"),
    [
        ("`ProducerOptions`", _PRODUCER),
        ("setting of `consumer(...)`", _CONSUMER),
        ("`GroupConfig`", _GROUP),
    ],
)
def test_every_setting_is_there_with_its_default(heading: str, defaults: dict[str, Any]) -> None:
    shown = rows(heading)
    told = shown.keys() | _ELSEWHERE
    assert defaults.keys() <= told, f"not in the table of {heading}: {defaults.keys() - told}"
    assert shown.keys() <= defaults.keys(), f"there is no such setting: {shown.keys() - defaults.keys()}"
    wrong = {name: text for name, text in shown.items() if value(text) not in (None, defaults[name])}
    assert not wrong


def test_a_default_is_read_as_people_write_it() -> None:
    assert [value(shown) for shown in ("16", "1,000,000", "64 MiB", "random")] == [16, 1_000_000, 64 * limits.MIB, None]
