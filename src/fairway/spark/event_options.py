"""The options of `fairway.events`: those of `fairway` that make sense for events."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fairway.errors import BadName, Misuse
from fairway.names import Group
from fairway.protocol.messages import Whence
from fairway.spark.options import ReadOptions, Where, is_pattern, read_options

EVERYTHING: Final = "*,*:*"  # the broker's own subjects too: dead letters, inboxes
OPTIONS: Final = {
    each.lower(): each
    for each in (
        "url", "subject", "path", "group", "starting", "ending", "minPartitions", "maxBytesPerTrigger",
        "failOnDataLoss", "patienceSeconds", "pollMs",
    )
}  # fmt: skip


@dataclass(frozen=True)
class EventOptions:
    """What a reader of events was told."""

    read: ReadOptions
    groups: frozenset[str] | None  # None: any, and `produced`

    @property
    def starting(self) -> Where:
        return self.read.starting.common

    @property
    def ending(self) -> Where:
        return self.read.ending.common


def event_options(raw: Mapping[str, str]) -> EventOptions:
    options = {name.lower(): value for name, value in raw.items()}
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f"did you mean {OPTIONS[near[0]]}?" if near else f"there are {', '.join(sorted(OPTIONS.values()))}"
            raise Misuse(f"format fairway.events has no option {name!r}: {hint}")
    groups = _groups(options.pop("group", None))
    if not (options.get("subject") or options.get("path")):
        options["subject"] = EVERYTHING
    read = read_options(options)
    for name, places in (("starting", read.starting), ("ending", read.ending)):
        if places.of or places.common.whence is Whence.SEQUENCE:
            raise Misuse(
                f"option {name}: events of all subjects are read together, so it is earliest, latest or a time"
            )
    return EventOptions(read, groups)


def _groups(raw: str | None) -> frozenset[str] | None:
    if raw is None:
        return None
    try:
        return frozenset(str(Group.parse(each.strip())) for each in raw.split(",") if each.strip())
    except BadName as error:
        raise Misuse(f"option group: {error}") from None


def is_meant(name: str, subjects: tuple[str, ...]) -> bool:
    """Whether the option `subject` means this one: by name, or by a pattern that says so of the broker's own."""
    return any(
        fnmatch.fnmatchcase(name, each) and (":" not in name or ":" in each) if is_pattern(each) else name == each
        for each in subjects
    )
