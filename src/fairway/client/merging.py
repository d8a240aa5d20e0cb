"""One answer from many: what each broker group of a cluster has said to the same question.

A number is the sum over the broker groups, positions included: each group numbers its messages by itself, and the sum
of the ends less the sum of the cursors is the lag. A group of consumers that some broker group does not know, because
nobody has joined it there yet, is no reason to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from fairway.errors import Code, Misuse, Refused
from fairway.names import Subject
from fairway.protocol.admin import (
    BrokerState,
    Configure,
    Configured,
    Describe,
    Described,
    GroupDescription,
    Redrive,
    Redriven,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Seek,
    Sought,
    SubjectDescription,
    Switch,
    Switched,
    Weigh,
)
from fairway.protocol.delaying import (
    Cancel,
    Decided,
    DelayTally,
    Fate,
    Reschedule,
    Resend,
    Resent,
    Stretch,
    Tallied,
    TransitReport,
)
from fairway.protocol.messages import ControlMessage, Done, Whence

T = TypeVar("T", bound=ControlMessage)

_NOT_HERE = frozenset({Code.NO_SUCH_GROUP, Code.NO_SUCH_SUBJECT})
_FATES = (
    Fate.CANCELLED,
    Fate.RESCHEDULED,
    Fate.ALREADY_DISPATCHED,
    Fate.UNKNOWN,
)  # what one says outweighs what another does


def check_mergeable(message: ControlMessage, groups: Sequence[str]) -> None:
    """`Misuse` where the answers of several broker groups would not add up to anything."""
    if len(groups) < 2:
        return
    is_place = isinstance(message, Seek) and message.whence is Whence.SEQUENCE
    if type(message) not in _MERGERS or is_place:
        what = (
            "a sequence is a place in one broker group" if is_place else f"{type(message).__name__} is for one of them"
        )
        raise one_group(what, groups)


def check_scannable(subject: str, start: object, end: int | None, groups: Sequence[str]) -> None:
    """The same for reading: several groups are read one after the other, and a sequence is of one of them. What is in
    an inbox is named by the sequence that it has elsewhere."""
    if len(groups) > 1 and (isinstance(start, int) or end is not None or Subject.parse_any(subject).is_inbox):
        raise one_group("a sequence is a place in one broker group", groups)


def is_elsewhere(refused: Refused, ways: Sequence[object]) -> bool:
    """Whether one of several has nothing of a subject, which the others may have."""
    return len(ways) > 1 and refused.code is Code.NO_SUCH_SUBJECT


def one_group(what: str, groups: Sequence[str]) -> Misuse:
    return Misuse(
        f"{what}, and there are {len(groups)} ({', '.join(groups)}): connect to one of them, fairway://HOST:PORT "
        "(--url; `fairway cluster` shows the addresses)"
    )


def merge(message: ControlMessage, outcomes: Sequence[ControlMessage | Refused]) -> ControlMessage:
    """What the cluster answers; raises `Refused` where it refuses."""
    answers = [each for each in outcomes if not isinstance(each, Refused)]
    for each in outcomes:
        if isinstance(each, Refused) and (not answers or each.code not in _NOT_HERE):
            raise each
    return answers[0] if len(answers) == 1 else _MERGERS[type(message)](answers)


# --- looking ----------------------------------------------------------------------------------------------------------


def joined(pages: Sequence[Described]) -> Described:
    """All pages of one broker group, as one."""
    return Described(pages[0].broker, _by_name([each for page in pages for each in page.subjects], _same_subject))


def _described(answers: Sequence[Described]) -> Described:
    subjects = _by_name([each for answer in answers for each in answer.subjects], _subject)
    return Described(_broker([answer.broker for answer in answers]), subjects)


def _by_name(items: Iterable[T], merge_two: Callable[[Sequence[T]], T]) -> list[T]:
    found: dict[str, list[T]] = {}
    for each in items:
        found.setdefault(each.name, []).append(each)  # type: ignore[attr-defined]  # all that are described have one
    return [merge_two(found[name]) for name in sorted(found)]


def _same_subject(parts: Sequence[SubjectDescription]) -> SubjectDescription:
    return msgspec.structs.replace(parts[-1], groups=[group for part in parts for group in part.groups])


def _subject(states: Sequence[SubjectDescription]) -> SubjectDescription:
    groups = _by_name([group for state in states for group in state.groups], _group)
    return SubjectDescription(
        states[0].name,
        sum(state.first_sequence for state in states),
        sum(state.committed_end for state in states),
        all(state.is_read_only for state in states),
        max(len(groups), *(state.groups_count for state in states)),
        groups,
    )


def _group(states: Sequence[GroupDescription]) -> GroupDescription:
    """Numbers are added, switches are on where they are on anywhere, and what all have in common is the first one's."""
    first = states[0]
    told: dict[str, Any] = {name: sum(getattr(each, name) for each in states) for name in _ADDED}
    told |= {name: any(getattr(each, name) for each in states) for name in ("is_paused", "is_full")}
    oldest = [each.oldest_ms for each in states if each.oldest_ms is not None]
    return msgspec.structs.replace(
        first,
        **told,
        consumers_count=max(each.consumers_count for each in states),  # each consumer is on all of them
        consumers=[consumer for each in states for consumer in each.consumers],
        actor=None,
        oldest_ms=min(oldest, default=None),
    )


_ADDED = (
    "cursor", "oldest_unacked", "lag", "in_flight", "returned", "retrying", "dying", "dead", "lost", "inbox", "lots",
    "parked", "halted", "declined",
)  # fmt: skip


def _broker(states: Sequence[BrokerState]) -> BrokerState:
    """The cluster, as if it were one broker."""
    kinds = {state.durability for state in states}
    return BrokerState(
        server=f"{len(states)} broker groups",
        log_id=0,
        epoch=max(state.epoch for state in states),
        is_master=all(state.is_master for state in states),
        is_read_only=all(state.is_read_only for state in states),
        started_ms=min(state.started_ms for state in states),
        connections=sum(state.connections for state in states),
        now_ms=max(state.now_ms for state in states),
        durability=kinds.pop() if len(kinds) == 1 else "mixed",
        free_bytes=min(state.free_bytes for state in states),
        connections_max=sum(state.connections_max for state in states),
        rotten_spans=sum(state.rotten_spans for state in states),
    )


# --- changing ---------------------------------------------------------------------------------------------------------


def _sought(answers: Sequence[Sought]) -> Sought:
    return Sought(*(sum(getattr(each, name) for each in answers) for name in Sought.__struct_fields__))


def _redriven(answers: Sequence[Redriven]) -> Redriven:
    unknown = [each for each in answers[0].unknown if all(each in answer.unknown for answer in answers)]
    return Redriven(sum(answer.count for answer in answers), unknown)


def _removed(answers: Sequence[Removed]) -> Removed:
    counts = (sum(getattr(each, name) for each in answers) for name in ("groups", "messages", "dead"))
    return Removed(any(each.existed for each in answers), *counts)


def _decided(answers: Sequence[Decided]) -> Decided:
    fates = {answer.fate for answer in answers}
    return Decided(next(fate for fate in _FATES if fate in fates), sum(answer.messages for answer in answers))


def _tallied(answers: Sequence[Tallied]) -> Tallied:
    found: dict[int, int] = {}
    for each in (stretch for answer in answers for stretch in answer.stretches):
        found[each.start_ms] = found.get(each.start_ms, 0) + each.count
    stretches = [Stretch(start, found[start]) for start in sorted(found)]
    return Tallied(sum(answer.count for answer in answers), stretches, _in_transit(answers))


def _in_transit(answers: Sequence[Tallied]) -> list[TransitReport]:
    """A broker group is reachable if all that have something for it reach it."""
    found: dict[str, list[TransitReport]] = {}
    for each in (each for answer in answers for each in answer.in_transit or ()):
        found.setdefault(each.group, []).append(each)
    return [
        TransitReport(group, sum(each.messages for each in parts), all(each.is_reachable for each in parts))
        for group, parts in sorted(found.items())
    ]


_MERGERS: dict[type[ControlMessage], Callable[[Sequence[Any]], ControlMessage]] = {
    Describe: _described,
    Seek: _sought,
    Switch: lambda answers: Switched(any(answer.was_on for answer in answers)),
    Weigh: lambda _: Done(),
    Redrive: _redriven,
    RemoveSubject: _removed,
    RemoveGroup: _removed,
    Configure: lambda answers: Configured(max(answer.version for answer in answers)),
    Cancel: _decided,
    Reschedule: _decided,
    DelayTally: _tallied,
    Resend: lambda answers: Resent(sum(each.messages for each in answers), sum(each.left for each in answers)),
}
