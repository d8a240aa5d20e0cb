"""Answers to DESCRIBE: subjects, groups, consumers and actors, for people and tools.

Answers come in pages, so that none grows without limit. The broker gathers a page in steps, so that nobody waits for
it: 1,000 groups take 70 ms. A page is a generator. It yields whenever a slice's worth of work is done, and returns the
answer. A page shows each item as it was when the page came to it.

`SubjectIndex` has the names of all subjects in order, for answers that list them page by page. A sort of 100,000 names
takes tens of milliseconds, in which the loop serves no client. So the index keeps the order. `refresh` takes in a
bounded number of new names, and a page begins with a binary search. The broker builds the index before it listens, so
that a refresh finds few new names.

Subjects go where they are removed, or where a log is cut back. The subject table remembers the last deletions. Where
more subjects have gone since the last refresh, or where a repair has inserted a subject, the index starts over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar

from fairway.broker.dead_letters import redriven
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.groups.config import encode
from fairway.names import ConsumerName, Subject
from fairway.protocol.admin_messages import (
    ActorState,
    BrokerState,
    ConsumerState,
    Depth,
    Describe,
    Described,
    GroupDescription,
    SubjectDescription,
)
from fairway.runtime.clock import Clock
from fairway.storage.subjects import SubjectState, SubjectTable

ITEMS_MAX = 1_000
_SEPARATOR = "/"  # in no name
_STEP_NS = 200_000  # a slice of the actors
_STEP_ITEMS = 64  # in one step, where the clock stands still
_SORTED_AT_ONCE = 1_000  # names of groups

_NAMES_PER_STEP = 2_000  # names taken in at a time: a fifth of a millisecond, and the merge of both runs
_FEW = 50  # so few names are inserted one by one, 20 µs each among 100,000
_DEAD, _PAST_DEAD = "dead:", "dead;"  # the prefix of dead-letter subjects, and a string behind all of them

DescribeSteps: TypeAlias = Generator[None, None, Described]
PartT = TypeVar("PartT")
Steps: TypeAlias = Generator[None, None, PartT]


class SubjectIndex:
    """All subjects of one log, without inboxes, by name."""

    def __init__(self, subjects: SubjectTable) -> None:
        self._subjects = subjects
        self._names: list[str] = []
        self._pending: dict[int, SubjectState] = {}  # subjects from the last start, still to be taken in
        self._next_id = 0  # subjects from this number on are newer than that start
        self._seen = (0, 0)  # counts of the table: insertions and deletions
        self._begin_again()
        while not self.refresh():
            pass

    def refresh(self) -> bool:
        """Take in some of the new names. Returns whether those were all."""
        self._take_deletions()
        new = self._next()
        names = [str(state.name) for state in new if not state.name.is_inbox]
        if len(names) <= _FEW:
            for name in names:
                insort(self._names, name)
        else:
            self._names += sorted(names)
            self._names.sort()  # two runs, which are merged
        return not self._pending and self._next_id >= self._subjects.next_id

    def _next(self) -> list[SubjectState]:
        """The next subjects to take in, a bounded number of them."""
        if self._pending:
            new = [*islice(self._pending.values(), _NAMES_PER_STEP)]
            for state in new:
                del self._pending[state.id]
            return new
        first, end = self._next_id, min(self._next_id + _NAMES_PER_STEP, self._subjects.next_id)
        self._next_id = max(first, end)
        return [self._subjects.by_id(each) for each in range(first, end) if each in self._subjects]

    def _take_deletions(self) -> None:
        inserted, deleted = self._subjects.inserted, self._subjects.deletions
        gone = self._subjects.last_deleted(deleted - self._seen[1])
        if inserted != self._seen[0] or gone is None:
            self._begin_again()
            return
        self._seen = inserted, deleted
        for state in gone:
            if self._pending.pop(state.id, None) is None and state.id < self._next_id and not state.name.is_inbox:
                at = bisect_left(self._names, state.name)
                if at < len(self._names) and self._names[at] == state.name:
                    del self._names[at]

    def _begin_again(self) -> None:
        self._names = []
        self._pending = {state.id: state for state in self._subjects}
        self._next_id = self._subjects.next_id
        self._seen = self._subjects.inserted, self._subjects.deletions

    def find(self, name: str) -> SubjectState | None:
        """The subject; None: it is gone."""
        found = self._subjects.find(Subject(name))
        if found is None:
            self._begin_again()
        return found

    def following(self, name: str, *, is_included: bool = False) -> str | None:
        """The next name, or `name` itself if it is included."""
        at = (bisect_left if is_included else bisect_right)(self._names, name)
        return self._names[at] if at < len(self._names) else None

    def plain_after(self, name: str, number: int) -> Sequence[str]:
        """The next names of subjects that clients have created, at most `number`: dead letters are left out."""
        names = self._names
        first = bisect_right(names, name)
        dead, past = bisect_left(names, _DEAD), bisect_left(names, _PAST_DEAD)
        found = names[first : min(first + number, dead)] if first < dead else []
        behind = max(first, past)
        return [*found, *names[behind : behind + number - len(found)]]


class _Pace:
    """Decides when a step is long enough."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._began_ns = self._clock.monotonic_ns()
        self._items = 0

    def is_over(self) -> bool:
        """Count one more item. Returns whether the step is over."""
        self._items += 1
        return self._items >= _STEP_ITEMS or self._clock.monotonic_ns() - self._began_ns >= _STEP_NS

    def rest(self) -> Iterator[None]:
        """Count one more item, and yield once if the step is over."""
        if self.is_over():
            yield
            self.begin()


def describe(
    coordinator: GroupCoordinator, order: SubjectIndex, asked: Describe, broker: Callable[[], BrokerState]
) -> DescribeSteps:
    """One page, sorted by subject and then by group. Leaves inboxes out, unless the request names one."""
    pace = _Pace(coordinator.clock)
    after, _, after_group = asked.after.partition(_SEPARATOR)
    page: list[SubjectDescription] = []
    room = max(min(asked.items_max, ITEMS_MAX), 1)
    while asked.subject is None and not order.refresh():
        yield
        pace.begin()
    name = _first(order, asked, after, is_included=bool(after_group))
    while name is not None:
        state = _find(coordinator, order, asked, name)
        if state is not None:
            if room <= 0:
                return Described(broker(), page, page[-1].name)
            since = after_group if name == after else ""
            described, last = yield from _subject(coordinator, state, asked, since, room, pace)
            page.append(described)
            room -= max(1, len(described.groups))
            if last:
                return Described(broker(), page, f"{name}{_SEPARATOR}{last}")
            yield from pace.rest()
        name = order.following(name) if asked.subject is None else None
    return Described(broker(), page)


def _find(coordinator: GroupCoordinator, order: SubjectIndex, asked: Describe, name: str) -> SubjectState | None:
    if asked.subject is None:
        return order.find(name)
    return coordinator.store.messages.views.subjects.find(Subject(name))


def _first(order: SubjectIndex, asked: Describe, after: str, *, is_included: bool) -> str | None:
    """The name that a page begins with."""
    if asked.subject is None:
        return order.following(after, is_included=is_included)
    is_due = asked.subject > after or (asked.subject == after and is_included)
    return asked.subject if is_due else None


def _subject(
    coordinator: GroupCoordinator, state: SubjectState, asked: Describe, after_group: str, room: int, pace: _Pace
) -> Steps[tuple[SubjectDescription, str]]:
    """The subject with as many of its groups as there is room for, and the last of their names unless those are all."""
    log = coordinator.store.messages
    names = yield from _groups(coordinator, state.id, asked, after_group, room + 1)
    groups = []
    for name in names[:room]:
        host = coordinator.groups.of_subject(state.id).get(name)
        if host is not None:
            groups.append(_group(coordinator, host, log.end_sequence(state.id), asked.depth))
            yield from pace.rest()
    number = len(coordinator.groups.of_subject(state.id))
    is_read_only = state.id in coordinator.groups.read_only
    first, end = log.first_sequence(state.id), log.end_sequence(state.id)
    described = SubjectDescription(str(state.name), first, end, is_read_only, number, groups)
    return described, names[room - 1] if len(names) > room else ""


def _groups(
    coordinator: GroupCoordinator, subject_id: int, asked: Describe, after: str, number: int
) -> Steps[list[str]]:
    """The next `number` of a subject's groups, by name: keeps the least of those seen so far, and yields in between."""
    if asked.depth <= Depth.SUBJECTS:
        return []
    names = [*coordinator.groups.of_subject(subject_id)]
    if asked.group is not None:
        names = [asked.group] if asked.group in names else []
    least: list[str] = []
    for at in range(0, len(names), _SORTED_AT_ONCE):
        if at:
            yield
        least = sorted((*least, *(name for name in names[at : at + _SORTED_AT_ONCE] if name > after)))[:number]
    return least


def dead_letters_of(coordinator: GroupCoordinator, host: GroupHost) -> int:
    """How many dead letters exist that were not redriven."""
    log = coordinator.store.messages
    name = Subject.dead_letters(host.name, coordinator.name_of(host.subject_id))
    dead = log.views.subjects.find(name)
    if dead is None:
        return 0
    first, end = log.first_sequence(dead.id), log.end_sequence(dead.id)
    return end - first - (0 if host.inbox is None else redriven(coordinator, host, name).count(first, end))


def _waiting_in_inbox(coordinator: GroupCoordinator, host: GroupHost) -> int:
    if host.inbox is None:
        return 0
    end = coordinator.store.messages.end_sequence(host.inbox.subject_id)
    seen = host.inbox.describe(end, now_ns=coordinator.clock.monotonic_ns(), now_ms=coordinator.clock.wall_ms())
    return seen.lag + seen.returned + seen.retrying + seen.parked


def _group(coordinator: GroupCoordinator, host: GroupHost, end: int, depth: Depth) -> GroupDescription:
    seen = host.describe(end, now_ns=coordinator.clock.monotonic_ns(), now_ms=coordinator.clock.wall_ms())
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
        dead=dead_letters_of(coordinator, host),
        lost=seen.lost,
        inbox=_waiting_in_inbox(coordinator, host),
        lots=seen.lots,
        weight=host.weight,
        is_paused=seen.is_paused or coordinator.is_switched_off(host),
        config_version=seen.config_version,
        consumers_count=len(consumers),
        consumers=consumers if is_deep else [],
        actor=_actor(coordinator, host) if is_deep else None,
        oldest_ms=_oldest_ms(coordinator, host, seen.oldest_unacked, end),
        order=seen.order,
        parked=seen.parked,
        is_full=seen.is_full,
        halted=seen.halted,
        declined=seen.declined,
        coalesce=seen.coalesce,
        rate_per_s=float(seen.rate_per_s),
        rate_per_key=float(seen.rate_per_key),
        active=seen.active,
        config=encode(host.state_machine.config) if is_deep else None,
    )


def _oldest_ms(coordinator: GroupCoordinator, host: GroupHost, sequence: int, end: int) -> int | None:
    """When the message with this sequence was stored. The loop must not wait for an index on disk: in that case, the
    newest time in that part of the index. The message is at least so old."""
    if sequence >= end:
        return None
    log = coordinator.store.messages
    for absent in log.views.entries.absent(host.subject_id, sequence, 1):
        return absent.newest_ms
    entry = next(log.readable(host.subject_id, sequence), None)
    return None if entry is None else entry.appended_ms


def _actor(coordinator: GroupCoordinator, host: GroupHost) -> ActorState | None:
    actor = coordinator.scheduler.find(host.key)
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
