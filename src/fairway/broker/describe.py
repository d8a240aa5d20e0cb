"""What there is: subjects, groups, consumers, actors. For people and tools; paged, so that no answer grows without
limit."""

from __future__ import annotations

from fairway.broker.desk import Desk
from fairway.broker.groups import GroupHost
from fairway.broker.redrive import redriven
from fairway.groups.config import encode
from fairway.names import Consumer, Subject
from fairway.protocol.admin import (
    ActorState,
    BrokerState,
    ConsumerState,
    Depth,
    Describe,
    Described,
    GroupState,
    SubjectState,
)
from fairway.storage import subjects

ITEMS_MAX = 1_000
_SEPARATOR = "/"  # in no name


def describe(desk: Desk, asked: Describe, broker: BrokerState) -> Described:
    """One page, by name of subject and then of group. Inboxes are left out, unless one is asked for by its name."""
    after, _, after_group = asked.after.partition(_SEPARATOR)
    known = sorted(desk.store.messages.views.subjects, key=lambda each: each.name)
    page: list[SubjectState] = []
    room = max(min(asked.items_max, ITEMS_MAX), 1)
    for state in known:
        name = str(state.name)
        if name < after or (name == after and not after_group):
            continue
        if asked.subject != name and (asked.subject is not None or state.name.is_inbox):
            continue
        if room <= 0:
            return Described(broker, page, page[-1].name)
        described, is_whole = _subject(desk, state, asked, after_group if name == after else "", room)
        page.append(described)
        room -= max(1, len(described.groups))
        if not is_whole:
            return Described(broker, page, f"{name}{_SEPARATOR}{described.groups[-1].name}")
    return Described(broker, page)


def _subject(
    desk: Desk, state: subjects.SubjectState, asked: Describe, after_group: str, room: int
) -> tuple[SubjectState, bool]:
    """The subject with as many of its groups as there is room for; whether those were all."""
    log = desk.store.messages
    hosts = desk.groups.of_subject(state.id)
    end = log.end_sequence(state.id)
    wanted = [
        host
        for name, host in sorted(hosts.items())
        if asked.depth > Depth.SUBJECTS and asked.group in (None, name) and name > after_group
    ]
    groups = [_group(desk, host, end, asked.depth) for host in wanted[:room]]
    is_read_only = state.id in desk.groups.read_only
    described = SubjectState(str(state.name), log.first_sequence(state.id), end, is_read_only, len(hosts), groups)
    return described, len(groups) == len(wanted)


def dead_letters_of(desk: Desk, host: GroupHost) -> int:
    """Dead letters that are there and were not redriven."""
    log = desk.store.messages
    name = Subject.dead_letters(host.name, desk.name_of(host.subject_id))
    dead = log.views.subjects.find(name)
    if dead is None:
        return 0
    first, end = log.first_sequence(dead.id), log.end_sequence(dead.id)
    return end - first - (0 if host.inbox is None else redriven(desk, host, name).count(first, end))


def _waiting_in_inbox(desk: Desk, host: GroupHost) -> int:
    if host.inbox is None:
        return 0
    end = desk.store.messages.end_sequence(host.inbox.subject_id)
    seen = host.inbox.describe(end, now_ns=desk.clock.monotonic_ns(), now_ms=desk.clock.wall_ms())
    return seen.lag + seen.returned + seen.retrying + seen.parked


def _group(desk: Desk, host: GroupHost, end: int, depth: Depth) -> GroupState:
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
            host.voices.address(Consumer(each.name)),
        )
        for each in seen.consumers
    ]
    is_deep = depth is Depth.CONSUMERS
    return GroupState(
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


def _oldest_ms(desk: Desk, host: GroupHost, sequence: int, end: int) -> int | None:
    """When the message with this sequence was stored. Where the index would have to be read from disk, which the loop
    must not wait for, it is the newest time in that part of it: the message is at least so old."""
    if sequence >= end:
        return None
    log = desk.store.messages
    for absent in log.views.entries.absent(host.subject_id, sequence, 1):
        return absent.newest_ms
    entry = next(log.readable(host.subject_id, sequence), None)
    return None if entry is None else entry.appended_ms


def _actor(desk: Desk, host: GroupHost) -> ActorState | None:
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
