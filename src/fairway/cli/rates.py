"""What `top` makes of two looks at a broker: rates and shares. Pure; the clock's readings are arguments.

The broker's actors count the time they used. An actor that was idle for long is removed and begins again at 0, so a
count that has fallen is taken as having begun anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fairway.protocol.admin import GroupDescription, SubjectDescription


class GroupRow(msgspec.Struct, frozen=True):
    """One group between two looks. Rates are messages a second."""

    subject: str
    group: str
    consumers: int
    rate_in: float  # stored in the subject
    rate: float  # settled for good by the group
    lag: int  # not handed out yet
    in_flight: int
    waiting: int  # handed back, or for their next attempt
    dead: int
    oldest_s: float | None  # age of the oldest message that the group is not done with; None: done with all
    share: float  # of the time of the broker's loop
    cold_share: float  # of the group's own time: reads that missed the page cache
    weight: float
    is_paused: bool


class _SeenGroup(msgspec.Struct, frozen=True):
    end: int
    done: int
    served_ns: int
    cold_ns: int


class RateMeter:
    """Remembers the last look."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _SeenGroup] = {}
        self._at_ns: int | None = None

    def look(self, subjects: Iterable[SubjectDescription], *, now_ns: int, now_ms: int) -> list[GroupRow]:
        """The groups since the look before; on the first one all rates are 0."""
        elapsed_s = 0.0 if self._at_ns is None else (now_ns - self._at_ns) / 1e9
        seen: dict[tuple[str, str], _SeenGroup] = {}
        rows = []
        for subject in subjects:
            for group in subject.groups:
                key = (subject.name, group.name)
                seen[key] = _seen(subject, group)
                rows.append(_row(subject, group, self._seen.get(key), seen[key], elapsed_s, now_ms))
        self._seen, self._at_ns = seen, now_ns
        return rows


def _seen(subject: SubjectDescription, group: GroupDescription) -> _SeenGroup:
    begun = group.in_flight + group.returned + group.retrying + group.dying
    actor = group.actor
    served_ns, cold_ns = (0, 0) if actor is None else (actor.served_ns, actor.cold_ns)
    return _SeenGroup(subject.committed_end, group.cursor - begun, served_ns, cold_ns)


def _row(
    subject: SubjectDescription,
    group: GroupDescription,
    before: _SeenGroup | None,
    now: _SeenGroup,
    elapsed_s: float,
    now_ms: int,
) -> GroupRow:
    served_ns = cold_ns = 0
    rate_in = rate = share = 0.0
    if before is not None and elapsed_s > 0:
        served_ns = _grown(before.served_ns, now.served_ns)
        cold_ns = _grown(before.cold_ns, now.cold_ns)
        rate_in = max(now.end - before.end, 0) / elapsed_s
        rate = max(now.done - before.done, 0) / elapsed_s  # a group that was moved back has settled nothing
        share = served_ns / 1e9 / elapsed_s
    return GroupRow(
        subject=subject.name,
        group=group.name,
        consumers=group.consumers_count,
        rate_in=rate_in,
        rate=rate,
        lag=group.lag,
        in_flight=group.in_flight,
        waiting=group.returned + group.retrying + group.dying + group.inbox,
        dead=group.dead,
        oldest_s=None if group.oldest_ms is None else max(now_ms - group.oldest_ms, 0) / 1_000,
        share=share,
        cold_share=cold_ns / (served_ns + cold_ns) if cold_ns else 0.0,
        weight=group.weight,
        is_paused=group.is_paused,
    )


def _grown(before: int, now: int) -> int:
    return now - before if now >= before else now
