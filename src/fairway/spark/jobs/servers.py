"""What the servers themselves count, for books that are made from the log alone: messages that a group owes, by the
broker; messages that wait for their time, by the delay server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairway.client import url as urls
from fairway.errors import Code, Refused
from fairway.protocol.admin import Depth, Describe, Described
from fairway.protocol.delaying import Tallied, Tally, Which
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Retrace, Retraced
from fairway.spark.calling import Caller, caller_of_delay
from fairway.spark.looking import Extent


@dataclass(frozen=True)
class Scheduled:
    """What a delay server holds."""

    is_there: bool  # False: there is none
    messages: Mapping[str, int] = field(default_factory=dict)  # by subject
    # By subject and the start of a window, in ms; none of a subject that has more windows than a delay server counts.
    windows: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """What a broker counts."""

    now_ms: int  # by its clock
    position: int  # where the action log ends: as long as that is the same, no group has moved
    extents: Mapping[str, Extent]
    owed: Mapping[tuple[str, str], int]  # by subject and group: handed out, and neither acked nor dead


def counts(url: str, patience_s: int, subjects: Iterable[str]) -> Counts:
    """Of every group on these subjects. `position` is no later than the rest."""
    wanted = set(subjects)
    extents: dict[str, Extent] = {}
    owed: dict[tuple[str, str], int] = {}
    after = ""
    with Caller(urls.parse(url).brokers, patience_s) as caller:
        position = caller.ask(Retrace(Whence.LATEST, 0, 0, None), Retraced).committed_end
        while True:
            page = caller.ask(Describe(Depth.GROUPS, None, None, after), Described)
            for each in page.subjects:
                if each.name in wanted:
                    extents[each.name] = Extent(each.first_sequence, each.committed_end)
                    for group in each.groups:
                        held = group.in_flight + group.returned + group.retrying + group.dying
                        owed[each.name, group.name] = held
            after = page.next
            if not after:
                return Counts(page.broker.now_ms, position, extents, owed)


def scheduled(url: str, patience_s: int, subjects: Iterable[str], window_ms: int) -> Scheduled:
    """How many messages wait for their time, and in which windows that is."""
    messages: dict[str, int] = {}
    windows: dict[tuple[str, int], int] = {}
    with caller_of_delay(url, patience_s) as caller:
        try:
            total = caller.ask(Tally(Which()), Tallied).count
        except Refused as refused:
            if refused.code is Code.UNSUPPORTED:  # a broker by itself
                return Scheduled(False)
            raise
        for name in subjects if total else ():
            counted = _tallied(caller, name, window_ms)
            messages[name] = counted.count
            windows.update({(name, each.start_ms): each.count for each in counted.stretches})
    return Scheduled(True, messages, windows)


def _tallied(caller: Caller, subject: str, window_ms: int) -> Tallied:
    try:
        return caller.ask(Tally(Which(subject), window_ms), Tallied)
    except Refused as refused:
        if refused.code is not Code.TOO_LARGE:
            raise
        return caller.ask(Tally(Which(subject)), Tallied)
