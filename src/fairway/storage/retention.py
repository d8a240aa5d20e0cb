"""Retention: which segments may go. A pure plan; the store carries it out.

A segment goes when it is too old, or when the log is too large without it; but not while a group still owes something
in it, up to a ceiling: a group that never comes back must not fill the disk. What goes over the ceiling is named
apart, because it is lost to a group and somebody has to be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairway.storage.segment import Segment


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and how much to keep. None: without limit."""

    age_ms_max: int | None = None
    bytes_max: int | None = None
    owed_bytes_max: int | None = None  # the ceiling: a log larger than this lets go even of what is owed


@dataclass(frozen=True, slots=True)
class Plan:
    """The bases of the segments to delete, oldest first."""

    doomed: tuple[int, ...] = ()
    lost_to_groups: tuple[int, ...] = ()  # those of them that a group still owed


def plan(
    segments: Sequence[Segment],
    now_ms: int,
    policy: Policy,
    owed_from: int | None = None,
    *,
    below: int | None = None,
) -> Plan:
    """Decide. `owed_from` is the lowest position that any group still owes; the newest segment always stays, and so
    does what is not wholly `below` a position."""
    doomed: list[int] = []
    lost: list[int] = []
    for segment in segments[:-1]:
        if below is not None and segment.end > below:
            break
        bytes_left = segments[-1].end - segment.base
        is_old = policy.age_ms_max is not None and now_ms - segment.newest_ms > policy.age_ms_max
        is_surplus = policy.bytes_max is not None and bytes_left > policy.bytes_max
        is_owed = owed_from is not None and segment.end > owed_from
        is_over_ceiling = policy.owed_bytes_max is not None and bytes_left > policy.owed_bytes_max
        if not (is_over_ceiling or ((is_old or is_surplus) and not is_owed)):
            break  # only a prefix can go: the log has no holes
        doomed.append(segment.base)
        if is_owed:
            lost.append(segment.base)
    return Plan(tuple(doomed), tuple(lost))
