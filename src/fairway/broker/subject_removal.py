"""Removal of subjects and of groups: what it needs, what goes with them, and in which order.

A subject goes with its groups, with their inboxes and dead letters, and with the groups on these dead letters. A group
goes with its inbox, and with its dead letters where there are none or where its remover asks for it. Unless forced, a
removal is refused where messages would be lost or somebody is at work.

The order of a removal, and what a crash between two steps leaves:

    1. REMOVED in the message log    undone or torn away: nothing has happened
    2. it is settled                 the subjects are gone; nobody finds their messages any more
    3. REMOVE of their groups        missing after a crash: `drop_orphans` writes it at the next start. Numbers of
                                     subjects are never used again, so no group comes to another subject
    4. the answer                    once the actions are durable

Between 1 and 2 the subjects are *leaving*: whoever sends to them or joins them is told to ask again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fairway import limits
from fairway.broker.describe import dead_letters_of
from fairway.broker.desk import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.errors import Code, FairwayError, Refused
from fairway.names import GroupName, Subject
from fairway.protocol import ControlMessage
from fairway.protocol.admin import Removed, RemoveGroup, RemoveSubject
from fairway.serving.requests import ServedRequest
from fairway.storage.subjects import SubjectState

_NAMED_MAX = 3  # groups in a sentence


class _WaitingRemoval(NamedTuple):
    request: ServedRequest[ControlMessage]
    answer: Removed


class _Losses(NamedTuple):
    """What a removal would take from somebody."""

    unhandled: dict[str, int]  # messages by group
    unread: int  # messages of a subject that no group consumes
    consumers: int
    dead: int

    @property
    def messages(self) -> int:
        return sum(self.unhandled.values()) + self.unread

    def __str__(self) -> str:
        parts = []
        if self.unhandled:
            named = ", ".join(f"{group} {count:,}" for group, count in [*self.unhandled.items()][:_NAMED_MAX])
            more = ", ..." if len(self.unhandled) > _NAMED_MAX else ""
            parts.append(f"{_count(sum(self.unhandled.values()), 'message')} not handled ({named}{more})")
        if self.unread:
            parts.append(f"{_count(self.unread, 'message')} that no group consumes")
        if self.consumers:
            parts.append(_count(self.consumers, "consumer"))
        if self.dead:
            parts.append(_count(self.dead, "dead letter"))
        return " and ".join((", ".join(parts[:-1]), parts[-1]) if len(parts) > 1 else parts)


class SubjectRemoval:
    """Removes for one broker. `removed_subjects` and `removed_groups` count."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._waiting: dict[int, list[_WaitingRemoval]] = {}  # by the subject's number: who waits until it is gone
        self.removed_subjects = 0
        self.removed_groups = 0
        desk.store.messages.on_removed = self._gone

    # --- subjects ----------------------------------------------------------------------------------------------------

    def remove_subject(self, request: ServedRequest[ControlMessage], message: RemoveSubject) -> None:
        name = Subject.parse_joinable(message.subject)
        state = self._desk.store.messages.views.subjects.find(name)
        if state is None:
            request.respond(Removed(existed=False))
            return
        states = self._with_owned(state)
        losses = self._losses(states)
        if not message.is_forced and (losses.messages or losses.consumers or losses.dead):
            raise Refused(
                Code.BAD_REQUEST,
                f"subject {name} has {losses}: stop its consumers and let its groups handle its messages, or remove it "
                "with --force (is_forced) and lose them",
            )
        groups = sum(len(self._desk.groups.of_subject(each.id)) for each in states if not each.name.is_inbox)
        answer = Removed(True, groups, losses.messages, losses.dead)
        if message.is_dry:
            request.respond(answer)
            return
        self._remove(request, states, answer)

    def _with_owned(self, state: SubjectState) -> list[SubjectState]:
        """The subject, and what goes with it."""
        subjects = self._desk.store.messages.views.subjects
        if not state.name.is_internal:
            return [state, *subjects.owned_by(state.name)][: limits.SUBJECTS_REMOVED_AT_ONCE]
        of_letters = [each for each in subjects.owned_by(Subject(state.name.owner)) if each.name.is_of(state.name)]
        return [state, *of_letters]

    def _remove(self, request: ServedRequest[ControlMessage], states: Sequence[SubjectState], answer: Removed) -> None:
        store, first = self._desk.store, states[0]
        waiting = _WaitingRemoval(request, answer)
        staying = [each for each in states if each.removed_end is None]
        if staying:
            store.remove_subjects(staying)
        self._waiting.setdefault(first.id, []).append(waiting)

        def told(outcome: FairwayError | None) -> None:
            if outcome is None:
                store.messages.settle_removals()
                return
            others = self._waiting.get(first.id, [])
            if waiting in others:
                others.remove(waiting)
                request.settle(outcome, answer)

        store.messages.log.flusher.when_durable(store.messages.log.end, told)

    def _gone(self, states: list[SubjectState]) -> None:
        """These subjects are gone for good."""
        desk = self._desk
        if desk.store.follows:
            return  # their groups go when this copy begins to lead
        self.removed_subjects += len(states)
        self._forget_groups(states)
        for state in states:
            desk.watches.release(state.id)
            for waiting in self._waiting.pop(state.id, ()):
                desk.when_durable(None, lambda outcome, of=waiting: of.request.settle(outcome, of.answer))  # type: ignore[misc]

    def _forget_groups(self, states: Iterable[SubjectState]) -> None:
        groups = self._desk.groups
        hosts = [host for each in states for host in groups.of_subject(each.id).values()]
        self.removed_groups += sum(host.main is None for host in hosts)
        self._desk.remove_all(hosts)
        for each in states:
            groups.note_read_only(each.id, is_on=False)
        if any(each.name.is_internal for each in states):
            for host in groups:
                host.redriven = None  # it counts letters that may be gone, and is made again when somebody asks

    # --- groups ------------------------------------------------------------------------------------------------------

    def remove_group(self, request: ServedRequest[ControlMessage], message: RemoveGroup) -> None:
        desk, subjects = self._desk, self._desk.store.messages.views.subjects
        name, group = Subject.parse_joinable(message.subject), GroupName.parse(message.group)
        state = subjects.find(name)
        host = None if state is None else desk.groups.find(state.id, group)
        own = [subjects.find(each(group, name)) for each in (Subject.inbox, Subject.dead_letters)]
        inbox, letters = own
        unhandled = 0 if host is None else self._unhandled(host)
        consumers = 0 if host is None else len(host.law.members())
        dead = 0 if host is None else dead_letters_of(desk, host)
        losses = _Losses({str(group): unhandled} if unhandled else {}, 0, consumers, dead if message.takes_dead else 0)
        if not message.is_forced and (losses.messages or losses.consumers or losses.dead):
            raise Refused(
                Code.BAD_REQUEST,
                f"group {group} on {name} has {losses}: stop its consumers and let them handle its messages, or remove "
                "it with --force (is_forced)",
            )
        takes_letters = letters is not None and (message.takes_dead or self._is_empty(letters))
        answer = Removed(host is not None, int(host is not None), losses.messages, dead if takes_letters else 0)
        if message.is_dry:
            request.respond(answer)
            return
        if host is not None:
            desk.remove(host)
            self.removed_groups += 1
        going = [each for each in (inbox, letters if takes_letters else None) if each is not None]
        if going:
            states = [own for each in going for own in self._with_owned(each)]
            self._remove(request, states, answer)
        else:
            desk.when_durable(None, lambda outcome: request.settle(outcome, answer))

    def drop_orphans(self) -> None:
        """At the start: groups whose subject went just before a crash go, too, and so do switches of such subjects."""
        self._desk.store.messages.settle_removals()
        subjects, groups = self._desk.store.messages.views.subjects, self._desk.groups
        live = {each.id for each in subjects if each.removed_end is None}
        self._desk.remove_all([host for host in groups if host.subject_id not in live])
        for subject_id in [each for each in groups.read_only if each not in live]:
            groups.note_read_only(subject_id, is_on=False)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _losses(self, states: Sequence[SubjectState]) -> _Losses:
        """Of a subject and of what goes with it; the inboxes count with their groups."""
        desk, unhandled, consumers, dead = self._desk, dict[str, int](), 0, 0
        unread = 0
        for state in states:
            if state.name.is_inbox:
                continue
            hosts = desk.groups.of_subject(state.id)
            is_letters = state.name.is_internal
            if is_letters:
                dead += self._stored(state)
            elif not hosts:
                unread += self._stored(state)
            for name, host in hosts.items():
                if count := self._unhandled(host):
                    unhandled[name] = unhandled.get(name, 0) + count
                consumers += len(host.law.members())
        return _Losses(unhandled, unread, consumers, dead)

    def _unhandled(self, host: GroupHost) -> int:
        """Messages that the group has not had, or is not done with; those in its inbox, too. A subject may have 20,000
        groups, so those that are done with all are not looked at closely."""
        count = 0
        for each in (host, host.inbox):
            if each is not None:
                end = self._desk.store.messages.end_sequence(each.subject_id)
                if each.law.oldest_unacked >= end:
                    continue
                clock = self._desk.clock
                seen = each.describe(end, now_ns=clock.monotonic_ns(), now_ms=clock.wall_ms())
                count += seen.lag + seen.in_flight + seen.returned + seen.retrying + seen.dying + seen.parked
        return count

    def _stored(self, state: SubjectState) -> int:
        log = self._desk.store.messages
        return max(log.end_sequence(state.id) - log.first_sequence(state.id), 0)

    def _is_empty(self, state: SubjectState) -> bool:
        return not self._stored(state)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
