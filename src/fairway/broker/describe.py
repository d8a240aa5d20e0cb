"""What there is: subjects, groups, consumers, actors. For people and tools; paged, so that no answer grows without
limit, and gathered in steps, so that nobody waits for a page: a thousand groups take 70 ms.

A page is a generator. It yields whenever a slice's worth of work is done, and returns the answer. What changes between
two steps is in the page as it was when the page came to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeAlias, TypeVar

from fairway.broker.desk import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.redrive import redriven
from fairway.groups.config import encode
from fairway.names import ConsumerName, Subject
from fairway.protocol.admin import (
    ActorState,
    BrokerState,
    ConsumerState,
    Depth,
    Describe,
    Described,
    GroupDescription,
    SubjectDescription,
)
from fairway.serving.subject_order import SubjectIndex
from fairway.storage import subjects
from fairway.world.clock import Clock

ITEMS_MAX = 1_000
_SEPARATOR = "/"  # in no name
_STEP_NS = 200_000  # a slice of the actors
_STEP_ITEMS = 64  # in one step, where the clock stands still
_SORTED_AT_ONCE = 1_000  # names of groups

DescribeSteps: TypeAlias = Generator[None, None, Described]
PartT = TypeVar("PartT")
Steps: TypeAlias = Generator[None, None, PartT]


class _Pace:
    """When a step is long enough."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._began_ns = self._clock.monotonic_ns()
        self._items = 0

    def is_over(self) -> bool:
        """One more item is done."""
        self._items += 1
        return self._items >= _STEP_ITEMS or self._clock.monotonic_ns() - self._began_ns >= _STEP_NS

    def rest(self) -> Iterator[None]:
        """Yield once if it is over."""
        if self.is_over():
            yield
            self.begin()


def describe(
    desk: GroupCoordinator, order: SubjectIndex, asked: Describe, broker: Callable[[], BrokerState]
) -> DescribeSteps:
    """One page, by name of subject and then of group. Inboxes are left out, unless one is asked for by its name."""
    pace = _Pace(desk.clock)
    after, _, after_group = asked.after.partition(_SEPARATOR)
    page: list[SubjectDescription] = []
    room = max(min(asked.items_max, ITEMS_MAX), 1)
    while asked.subject is None and not order.refresh():
        yield
        pace.begin()
    name = _first(order, asked, after, is_included=bool(after_group))
    while name is not None:
        state = _find(desk, order, asked, name)
        if state is not None:
            if room <= 0:
                return Described(broker(), page, page[-1].name)
            since = after_group if name == after else ""
            described, last = yield from _subject(desk, state, asked, since, room, pace)
            page.append(described)
            room -= max(1, len(described.groups))
            if last:
                return Described(broker(), page, f"{name}{_SEPARATOR}{last}")
            yield from pace.rest()
        name = order.following(name) if asked.subject is None else None
    return Described(broker(), page)


def _find(desk: GroupCoordinator, order: SubjectIndex, asked: Describe, name: str) -> subjects.SubjectState | None:
    if asked.subject is None:
        return order.find(name)
    return desk.store.messages.views.subjects.find(Subject(name))


def _first(order: SubjectIndex, asked: Describe, after: str, *, is_included: bool) -> str | None:
    """The name that a page begins with."""
    if asked.subject is None:
        return order.following(after, is_included=is_included)
    is_due = asked.subject > after or (asked.subject == after and is_included)
    return asked.subject if is_due else None


def _subject(
    desk: GroupCoordinator, state: subjects.SubjectState, asked: Describe, after_group: str, room: int, pace: _Pace
) -> Steps[tuple[SubjectDescription, str]]:
    """The subject with as many of its groups as there is room for; and the last of them, unless those were all."""
    log = desk.store.messages
    names = yield from _groups(desk, state.id, asked, after_group, room + 1)
    groups = []
    for name in names[:room]:
        host = desk.groups.of_subject(state.id).get(name)
        if host is not None:
            groups.append(_group(desk, host, log.end_sequence(state.id), asked.depth))
            yield from pace.rest()
    number = len(desk.groups.of_subject(state.id))
    is_read_only = state.id in desk.groups.read_only
    first, end = log.first_sequence(state.id), log.end_sequence(state.id)
    described = SubjectDescription(str(state.name), first, end, is_read_only, number, groups)
    return described, names[room - 1] if len(names) > room else ""


def _groups(desk: GroupCoordinator, subject_id: int, asked: Describe, after: str, number: int) -> Steps[list[str]]:
    """The next so many of a subject's groups, by name: the least of some are kept while the others are looked at."""
    if asked.depth <= Depth.SUBJECTS:
        return []
    names = [*desk.groups.of_subject(subject_id)]
    if asked.group is not None:
        names = [asked.group] if asked.group in names else []
    least: list[str] = []
    for at in range(0, len(names), _SORTED_AT_ONCE):
        if at:
            yield
        least = sorted((*least, *(name for name in names[at : at + _SORTED_AT_ONCE] if name > after)))[:number]
    return least


def dead_letters_of(desk: GroupCoordinator, host: GroupHost) -> int:
    """Dead letters that are there and were not redriven."""
    log = desk.store.messages
    name = Subject.dead_letters(host.name, desk.name_of(host.subject_id))
    dead = log.views.subjects.find(name)
    if dead is None:
        return 0
    first, end = log.first_sequence(dead.id), log.end_sequence(dead.id)
    return end - first - (0 if host.inbox is None else redriven(desk, host, name).count(first, end))


def _waiting_in_inbox(desk: GroupCoordinator, host: GroupHost) -> int:
    if host.inbox is None:
        return 0
    end = desk.store.messages.end_sequence(host.inbox.subject_id)
    seen = host.inbox.describe(end, now_ns=desk.clock.monotonic_ns(), now_ms=desk.clock.wall_ms())
    return seen.lag + seen.returned + seen.retrying + seen.parked


def _group(desk: GroupCoordinator, host: GroupHost, end: int, depth: Depth) -> GroupDescription:
    seen = host.describe(end, now_ns=desk.clock.monotonic_ns(), now_ms=desk.clock.wall_ms())
    consumers = [
        ConsumerState(
            each.name,
            each.messages,
            each.lots,
            each.response,
            each.lease_left_ms,
            each.config_version,
            each.is_paused,
            host.sessions.address(ConsumerName(each.name)),
        )
        for each in seen.consumers
    ]
    is_deep = depth is Depth.CONSUMERS
    return GroupDescription(
        name=str(host.name),
        cursor=seen.cursor,
        oldest_unacked=seen.oldest_unacked,
        lag=seen.lag,
        in_flight=seen.in_flight,
        returned=seen.returned,
        retrying=seen.retrying,
        dying=seen.dying,
        dead=dead_letters_of(desk, host),
        lost=seen.lost,
        inbox=_waiting_in_inbox(desk, host),
        lots=seen.lots,
        weight=host.weight,
        is_paused=seen.is_paused or desk.is_switched_off(host),
        config_version=seen.config_version,
        consumers_count=len(consumers),
        consumers=consumers if is_deep else [],
        actor=_actor(desk, host) if is_deep else None,
        oldest_ms=_oldest_ms(desk, host, seen.oldest_unacked, end),
        order=seen.order,
        parked=seen.parked,
        is_full=seen.is_full,
        halted=seen.halted,
        declined=seen.declined,
        coalesce=seen.coalesce,
        rate_per_s=float(seen.rate_per_s),
        rate_per_key=float(seen.rate_per_key),
        active=seen.active,
        config=encode(host.law.config) if is_deep else None,
    )


def _oldest_ms(desk: GroupCoordinator, host: GroupHost, sequence: int, end: int) -> int | None:
    """When the message with this sequence was stored. Where the index would have to be read from disk, which the loop
    must not wait for, it is the newest time in that part of it: the message is at least so old."""
    if sequence >= end:
        return None
    log = desk.store.messages
    for absent in log.views.entries.absent(host.subject_id, sequence, 1):
        return absent.newest_ms
    entry = next(log.readable(host.subject_id, sequence), None)
    return None if entry is None else entry.appended_ms


def _actor(desk: GroupCoordinator, host: GroupHost) -> ActorState | None:
    actor = desk.scheduler.find(host.key)
    if actor is None:
        return None
    return ActorState(
        actor.run.value,
        len(actor.mailbox),
        actor.suspensions,
        actor.slices,
        actor.served_ns,
        actor.elsewhere_ns,
        max(0, round(actor.virtual_ns)),
    )
