"""Retention: which segments may go. A pure plan; the store carries it out.

A segment goes when it is too old, or when the log is too large without it; but not while a group still owes something
in it, up to a ceiling: a group that never comes back must not fill the disk. What goes over the ceiling is named
apart, because it is lost to a group and somebody has to be told.

Ages count from the effective time of a segment's last record (`log_time`): a clock that was ahead keeps nothing longer
than until that age after it was put right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fairway.errors import Code, Refused
from fairway.storage import log_time
from fairway.storage.segment import Segment

_log = logging.getLogger("fairway.store")
_ACTION_SEGMENTS = 3  # fewer are not worth a segment of messages
_SEGMENTS_OF_AGE = 7  # with 168 hours, a segment of messages is complete after a day at the latest


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and how much to keep. None: without limit."""

    age_ms_max: int | None = None
    bytes_max: int | None = None
    owed_bytes_max: int | None = None  # the ceiling: a log larger than this lets go even of what is owed

    @property
    def is_limited(self) -> bool:
        """Whether anything ever goes."""
        return any(each is not None for each in (self.age_ms_max, self.bytes_max, self.owed_bytes_max))


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The bases of the segments to delete, oldest first."""

    doomed: tuple[int, ...] = ()
    lost_to_groups: tuple[int, ...] = ()  # those of them that a group still owed


def early_completion_ms(policy: Policy, action_segments: int) -> int | None:
    """After which time a segment of messages is completed although it has room left; None: it never is."""
    if policy.age_ms_max is None or action_segments < _ACTION_SEGMENTS:
        return None
    return policy.age_ms_max // _SEGMENTS_OF_AGE


def plan(
    segments: Sequence[Segment],
    now_ms: int,
    policy: Policy,
    owed_from: int | None = None,
    *,
    below: int | None = None,
) -> RetentionPlan:
    """Decide. `owed_from` is the lowest position that any group still owes; the newest segment always stays, and so
    does what is not wholly `below` a position."""
    doomed: list[int] = []
    lost: list[int] = []
    for segment, newest_ms in zip(segments[:-1], log_time.effective_ms(segments), strict=False):
        if below is not None and segment.end > below:
            break
        bytes_left = segments[-1].end - segment.base
        is_old = policy.age_ms_max is not None and now_ms - newest_ms > policy.age_ms_max
        is_surplus = policy.bytes_max is not None and bytes_left > policy.bytes_max
        is_owed = owed_from is not None and segment.end > owed_from
        is_over_ceiling = policy.owed_bytes_max is not None and bytes_left > policy.owed_bytes_max
        if not (is_over_ceiling or ((is_old or is_surplus) and not is_owed)):
            break  # only a prefix can go: the log has no holes
        doomed.append(segment.base)
        if is_owed:
            lost.append(segment.base)
    return RetentionPlan(tuple(doomed), tuple(lost))


def nearly_full() -> Refused:
    """What a producer is told while there is no room."""
    return Refused(Code.READ_ONLY, "the disk is nearly full: make room, or shorten retention", retry_after_ms=1_000)


def note_room(*, before: bool, now: bool) -> bool:
    """Tell the operator that the disk is nearly full, or has room again; returns `now`."""
    if now and not before:
        _log.warning("the disk has room again: messages are taken")
    elif before and not now:
        _log.warning(
            "the disk is nearly full: messages are refused, acknowledgements are taken; make room, or keep less"
        )
    return now
