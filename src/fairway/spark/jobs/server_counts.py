"""What servers count themselves, to check balances that are made from the log alone.

Brokers count the messages that a group holds and has not settled. Delay servers count the messages that are scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Depth, Describe, Described, Retrace, Retraced
from fairway.protocol.delay_messages import DelayTally, Tallied, Which
from fairway.protocol.messages import Whence
from fairway.spark.connection import BlockingClient
from fairway.spark.plan import SubjectExtent
from fairway.spark.server_groups import ServerGroupAddress, SubjectPart, broker_places, caller_to, delay_places


@dataclass(frozen=True)
class Scheduled:
    """The messages that delay servers hold."""

    is_there: bool  # whether there is a delay server
    messages: Mapping[str, int] = field(default_factory=dict)  # by subject
    # By subject and the start of a window, in ms. Subjects with more windows than a delay server counts are missing.
    windows: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """The counts of brokers."""

    now_ms: int  # by the broker's clock
    positions: Mapping[str, int]  # the ends of action logs: while they stay the same, no group has acted
    extents: Mapping[SubjectPart, SubjectExtent]
    log_ids: Mapping[str, str]  # of message logs, in the form that an archive records
    owed: Mapping[tuple[str, str], int]  # by subject and group: handed out, and neither acked nor dead
    spread: Mapping[tuple[str, str], int]  # by subject and group: the number of broker groups that have the group


def log_ids(url: str, patience_s: int) -> dict[str, str]:
    """The id of the message log of each broker group, in the form that an archive records."""
    found = {}
    for place in broker_places(url, patience_s):
        with caller_to(place) as caller:
            page = caller.ask(Describe(Depth.SUBJECTS, items_max=1), Described)
            found[place.broker_group] = f"{page.broker.log_id:016x}"
    return found


def counts(url: str, patience_s: int, subjects: Iterable[str]) -> Counts:
    """The counts of every group on these subjects. `positions` are no later than the rest."""
    counted = Counts(0, {}, {}, {}, {}, {})
    for place in broker_places(url, patience_s):
        with caller_to(place) as caller:
            counted = _counted(caller, place.broker_group, set(subjects), counted)
    return counted


def _counted(caller: BlockingClient, broker_group: str, wanted: Set[str], before: Counts) -> Counts:
    """The counts of others, plus those of this broker group."""
    position = caller.ask(Retrace(Whence.LATEST, 0, 0, None), Retraced).committed_end
    extents, owed, spread, after = dict(before.extents), Counter(before.owed), Counter(before.spread), ""
    while True:
        page = caller.ask(Describe(Depth.GROUPS, None, None, after), Described)
        for each in page.subjects:
            if each.name in wanted:
                extents[SubjectPart(each.name, broker_group)] = SubjectExtent(each.first_sequence, each.committed_end)
                for group in each.groups:
                    held = group.in_flight + group.returned + group.retrying + group.dying
                    owed[each.name, group.name] += held
                    spread[each.name, group.name] += 1
        after = page.next
        if not after:
            return Counts(
                max(page.broker.now_ms, before.now_ms),
                {**before.positions, broker_group: position},
                extents,
                {**before.log_ids, broker_group: f"{page.broker.log_id:016x}"},
                owed,
                spread,
            )


def scheduled(url: str, patience_s: int, subjects: Iterable[str], window_ms: int) -> Scheduled:
    """How many messages are scheduled, and in which windows they are due."""
    found = [_scheduled(place, list(subjects), window_ms) for place in delay_places(url, patience_s)]
    there = [each for each in found if each.is_there]
    messages, windows = Counter[str](), Counter[tuple[str, int]]()
    for each in there:
        messages.update(each.messages)
        windows.update(each.windows)
    return Scheduled(bool(there), messages, windows)


# The refusals of a broker that keeps no delayed messages, or does not know the request.
_NO_DELAY: Final = frozenset({Code.BAD_REQUEST, Code.UNSUPPORTED})


def _scheduled(place: ServerGroupAddress, subjects: Sequence[str], window_ms: int) -> Scheduled:
    messages: dict[str, int] = {}
    windows: dict[tuple[str, int], int] = {}
    with caller_to(place) as caller:
        try:
            total = caller.ask(DelayTally(Which()), Tallied).count
        except Refused as refused:
            if refused.code in _NO_DELAY:
                return Scheduled(False)
            raise
        for name in subjects if total else ():
            counted = _tallied(caller, name, window_ms)
            messages[name] = counted.count
            windows.update({(name, each.start_ms): each.count for each in counted.stretches})
    return Scheduled(True, messages, windows)


def _tallied(caller: BlockingClient, subject: str, window_ms: int) -> Tallied:
    try:
        return caller.ask(DelayTally(Which(subject), window_ms), Tallied)
    except Refused as refused:
        if refused.code is not Code.TOO_LARGE:
            raise
        return caller.ask(DelayTally(Which(subject)), Tallied)
