"""The options of `fairway.events`: those of `fairway` that make sense for events."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fairway.errors import BadName, Misuse
from fairway.names import MOMENTS, GroupName
from fairway.protocol.messages import Whence
from fairway.spark.options import ReadOptions, Where, count_of, flag_of, is_pattern, known, read_options

HELD: Final = MOMENTS
EVERYTHING: Final = "*,*:*"  # the broker's internal subjects too: dead letters, inboxes
OPTIONS: Final = {
    each.lower(): each
    for each in (
        "url", "subject", "path", "group", "query", "starting", "ending", "minPartitions", "maxBytesPerTrigger",
        "maxEventsPerTrigger", "failOnDataLoss", "patienceSeconds", "pollMs", "delayed",
    )
}  # fmt: skip


@dataclass(frozen=True)
class EventOptions:
    """The options of a reader of events, parsed."""

    read: ReadOptions
    groups: frozenset[str] | None  # None: any, and `produced`
    events_per_trigger: int | None
    query: str | None  # the name under which the broker keeps where a stream begins
    has_delayed: bool  # with the events of delay servers

    @property
    def starting(self) -> Where:
        return self.read.starting.common

    @property
    def ending(self) -> Where:
        return self.read.ending.common


def event_options(raw: Mapping[str, str]) -> EventOptions:
    options = known(raw, OPTIONS, "fairway.events")
    groups = _groups(options.pop("group", None))
    query = options.pop("query", None)
    most = count_of(options, "maxEventsPerTrigger")
    has_delayed = flag_of(options, "delayed", False)
    for name in ("maxeventspertrigger", "delayed"):
        options.pop(name, None)
    if not (options.get("subject") or options.get("path")):
        options["subject"] = EVERYTHING
    read = read_options(options)
    for name, places in (("starting", read.starting), ("ending", read.ending)):
        if places.of or places.common.whence is Whence.SEQUENCE:
            raise Misuse(
                f"option {name}: events of all subjects are read together, so it is earliest, latest or a time"
            )
    if has_delayed and groups is not None:
        raise Misuse("option delayed: what is delayed is no group's yet; leave it out, or the option group")
    return EventOptions(read, groups, most, None if query is None else _checked_group("query", query), has_delayed)


def _checked_group(option: str, raw: str) -> str:
    try:
        return str(GroupName.parse(raw))
    except BadName as error:
        raise Misuse(f"option {option}: {error}") from None


def _groups(raw: str | None) -> frozenset[str] | None:
    if raw is None:
        return None
    return frozenset(_checked_group("group", each.strip()) for each in raw.split(",") if each.strip())


def is_meant(name: str, subjects: tuple[str, ...]) -> bool:
    """Whether the option `subject` means this subject, by its name or by a pattern. Internal subjects match only
    patterns with a colon. `HELD`, where queries keep their beginnings, must be named in full."""
    return any(
        fnmatch.fnmatchcase(name, each) and (":" not in name or ":" in each) and name != HELD
        if is_pattern(each)
        else name == each
        for each in subjects
    )
