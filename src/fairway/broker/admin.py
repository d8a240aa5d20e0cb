"""Operator commands for groups and subjects: describe, seek, configure, pause, weigh, read-only, redrive, remove. The
broker answers a change once it is durable.

`SubjectRemoval` removes subjects and groups. A subject goes with its groups, with their inboxes and dead letters, and
with the groups on these dead letters. A group goes with its inbox. Its dead letters go if there are none, or if the
request asks for it. Unless forced, the broker refuses a removal that would lose messages or stop consumers.

The order of a removal, and what a crash between two steps leaves:

    1. REMOVED in the message log    undone or torn away: nothing has happened
    2. it is settled                 the subjects are gone; nobody finds their messages any more
    3. REMOVE of their groups        missing after a crash: `drop_orphans` writes it at the next start. Numbers of
                                     subjects are never used again, so no group comes to another subject
    4. the answer                    once the actions are durable

Between 1 and 2 the subjects are *leaving*: the broker asks producers and joining consumers to try again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fairway import limits
from fairway.batch.checksum import key_hash
from fairway.broker.dead_letters import RedriveProcessor
from fairway.broker.descriptions import DescribeSteps, SubjectIndex, dead_letters_of, describe
from fairway.broker.group_coordinator import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.scan import place
from fairway.errors import Code, FairwayError, Refused
from fairway.groups import GroupDecision
from fairway.groups.config import decode
from fairway.names import MOMENTS, ConsumerName, GroupName, Subject
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import (
    BrokerState,
    Configure,
    Configured,
    Describe,
    Lever,
    Redrive,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Seek,
    Sought,
    Switch,
    Switched,
    Weigh,
)
from fairway.protocol.messages import Done
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.subjects import SubjectState

_NAMED_MAX = 3  # groups that a sentence names


class _WaitingRemoval(NamedTuple):
    request: ServedRequest[ControlMessage]
    answer: Removed


class _Losses(NamedTuple):
    """What a removal would take from groups, consumers and operators."""

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
    """Removes subjects and groups of one broker. `removed_subjects` counts."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        # requests that wait for a removal, by the subject's number
        self._waiting: dict[int, list[_WaitingRemoval]] = {}
        self.removed_subjects = 0
        coordinator.store.messages.on_removed = self._gone

    # --- subjects ----------------------------------------------------------------------------------------------------

    def remove_subject(self, request: ServedRequest[ControlMessage], message: RemoveSubject) -> None:
        name = Subject.parse_joinable(message.subject)
        state = self._coordinator.store.messages.views.subjects.find(name)
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
        groups = sum(len(self._coordinator.groups.of_subject(each.id)) for each in states if not each.name.is_inbox)
        answer = Removed(True, groups, losses.messages, losses.dead)
        if message.is_dry:
            request.respond(answer)
            return
        self._remove(request, states, answer)

    def _with_owned(self, state: SubjectState) -> list[SubjectState]:
        """The subject, and the subjects that go with it."""
        subjects = self._coordinator.store.messages.views.subjects
        if not state.name.is_internal:
            return [state, *subjects.owned_by(state.name)][: limits.SUBJECTS_REMOVED_AT_ONCE]
        of_letters = [each for each in subjects.owned_by(Subject(state.name.owner)) if each.name.is_of(state.name)]
        return [state, *of_letters]

    def _remove(self, request: ServedRequest[ControlMessage], states: Sequence[SubjectState], answer: Removed) -> None:
        store, first = self._coordinator.store, states[0]
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
        """Remove the groups of these subjects, which are gone for good, and answer the requests."""
        coordinator = self._coordinator
        if coordinator.store.follows:
            return  # their groups go when this copy begins to lead
        self.removed_subjects += len(states)
        self._forget_groups(states)
        for state in states:
            coordinator.watches.release(state.id)
            for waiting in self._waiting.pop(state.id, ()):
                coordinator.when_durable(None, lambda outcome, of=waiting: of.request.settle(outcome, of.answer))  # type: ignore[misc]

    def _forget_groups(self, states: Iterable[SubjectState]) -> None:
        groups = self._coordinator.groups
        hosts = [host for each in states for host in groups.of_subject(each.id).values()]
        self._coordinator.remove_all(hosts)
        for each in states:
            groups.note_read_only(each.id, is_on=False)
        if any(each.name.is_internal for each in states):
            for host in groups:
                host.redriven = None  # its count may include removed dead letters; the next request makes a new one

    # --- groups ------------------------------------------------------------------------------------------------------

    def remove_group(self, request: ServedRequest[ControlMessage], message: RemoveGroup) -> None:
        coordinator, subjects = self._coordinator, self._coordinator.store.messages.views.subjects
        name, group = Subject.parse_joinable(message.subject), GroupName.parse(message.group)
        state = subjects.find(name)
        host = None if state is None else coordinator.groups.find(state.id, group)
        own = [subjects.find(each(group, name)) for each in (Subject.inbox, Subject.dead_letters)]
        inbox, letters = own
        unhandled = 0 if host is None else self._unhandled(host)
        consumers = 0 if host is None else len(host.state_machine.members())
        dead = 0 if host is None else dead_letters_of(coordinator, host)
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
            coordinator.remove(host)
        going = [each for each in (inbox, letters if takes_letters else None) if each is not None]
        if going:
            states = [own for each in going for own in self._with_owned(each)]
            self._remove(request, states, answer)
        else:
            coordinator.when_durable(None, lambda outcome: request.settle(outcome, answer))

    def drop_orphans(self) -> None:
        """At the start, remove groups and read-only switches of subjects that were removed just before a crash."""
        self._coordinator.store.messages.settle_removals()
        subjects, groups = self._coordinator.store.messages.views.subjects, self._coordinator.groups
        live = {each.id for each in subjects if each.removed_end is None}
        self._coordinator.remove_all([host for host in groups if host.subject_id not in live])
        for subject_id in [each for each in groups.read_only if each not in live]:
            groups.note_read_only(subject_id, is_on=False)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def _losses(self, states: Sequence[SubjectState]) -> _Losses:
        """The losses of a subject and of the subjects that go with it. Inboxes count with their groups."""
        coordinator, unhandled, consumers, dead = self._coordinator, dict[str, int](), 0, 0
        unread = 0
        for state in states:
            if state.name.is_inbox:
                continue
            hosts = coordinator.groups.of_subject(state.id)
            is_letters = state.name.is_internal
            if is_letters:
                dead += self._stored(state)
            elif not hosts:
                unread += self._stored(state)
            for name, host in hosts.items():
                if count := self._unhandled(host):
                    unhandled[name] = unhandled.get(name, 0) + count
                consumers += len(host.state_machine.members())
        return _Losses(unhandled, unread, consumers, dead)

    def _unhandled(self, host: GroupHost) -> int:
        """Messages that the group has not handled, in its inbox, too. A subject may have 20,000 groups, so this skips
        the close look at groups that have handled everything."""
        count = 0
        for each in host.with_inbox:
            end = self._coordinator.store.messages.end_sequence(each.subject_id)
            if each.state_machine.oldest_unacked < end:
                clock = self._coordinator.clock
                seen = each.describe(end, now_ns=clock.monotonic_ns(), now_ms=clock.wall_ms())
                count += seen.lag + seen.in_flight + seen.returned + seen.retrying + seen.dying + seen.parked
        return count

    def _stored(self, state: SubjectState) -> int:
        log = self._coordinator.store.messages
        return max(log.end_sequence(state.id) - log.first_sequence(state.id), 0)

    def _is_empty(self, state: SubjectState) -> bool:
        return not self._stored(state)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class AdminProcessor:
    """Handles operator commands."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        inboxes: Inboxes,
        subjects: SubjectIndex,
        broker_state: Callable[[], BrokerState],
    ) -> None:
        self._coordinator = coordinator
        self._subjects = subjects
        self._pages: dict[ServedRequest[ControlMessage], DescribeSteps] = {}  # DESCRIBE requests under way
        self._inboxes = inboxes
        self.redriver = RedriveProcessor(coordinator, inboxes)
        self._broker_state = broker_state
        self.removal = SubjectRemoval(coordinator)

    def process(self, request: ServedRequest[ControlMessage], actor: Actor) -> TurnResult:
        message = request.message
        if isinstance(message, Describe):
            return self._describe(request, message)
        if isinstance(message, Seek):
            self._seek(request, message)
        elif isinstance(message, Configure):
            self._configure(request, message)
        elif isinstance(message, Switch):
            self._switch(request, message)
        elif isinstance(message, Weigh):
            host = self._coordinator.host(message.subject, message.group)
            written = self._coordinator.set_weight(host, message.weight)
            self._coordinator.when_durable(written, lambda outcome: request.settle(outcome, Done()))
        elif isinstance(message, Redrive):
            self.redriver.begin(request, message)
        elif isinstance(message, RemoveSubject):
            self.removal.remove_subject(request, message)
        elif isinstance(message, RemoveGroup):
            self.removal.remove_group(request, message)
        else:
            raise Refused(Code.UNSUPPORTED, f"this broker does not answer {type(message).__name__} yet")
        return TurnResult.DONE

    def _describe(self, request: ServedRequest[ControlMessage], message: Describe) -> TurnResult:
        """Do one step of the request's page."""
        page = self._pages.pop(request, None) or describe(
            self._coordinator, self._subjects, message, self._broker_state
        )
        try:
            next(page)
        except StopIteration as end:
            request.respond(end.value)
            return TurnResult.DONE
        self._pages[request] = page
        return TurnResult.AGAIN

    def expire(self, request: ServedRequest[ControlMessage], expiry: Expiry) -> None:
        self._pages.pop(request, None)
        request.expire(expiry)

    def fail(self, request: ServedRequest[ControlMessage], error: Exception) -> None:
        request.fail(error)

    def _seek(self, request: ServedRequest[ControlMessage], message: Seek) -> None:
        host = self._coordinator.host(message.subject, message.group)
        was = host.state_machine.cursor
        to = place(self._coordinator, host.subject_id, message.whence, message.value)
        end = self._coordinator.store.messages.end_sequence(host.subject_id)
        # otherwise the group would silently pass over the messages that come until then
        if to > end and message.subject != MOMENTS:
            raise Refused(
                Code.BAD_REQUEST,
                f"there is no sequence {to} in {message.subject}, which ends at {end} here: seek to {end}, or to "
                "'latest', to begin with what comes next",
            )
        decision = host.state_machine.seek(to, now_ms=self._coordinator.clock.wall_ms())
        answer = Sought(to, was, decision.held, decision.waiting, decision.dying_count)
        self._carry_out(request, host, decision, answer)

    def _configure(self, request: ServedRequest[ControlMessage], message: Configure) -> None:
        config = decode(message.config)
        now_ms = self._coordinator.clock.wall_ms()
        if message.expected_version == 0:
            log = self._coordinator.store.messages
            subject = self._coordinator.store.ensure_subject(Subject.parse(message.subject))
            name = GroupName.parse(message.group)
            if self._coordinator.groups.find(subject.id, name) is None:
                first = log.first_sequence(subject.id)
                self._coordinator.ensure(subject.id, name, config, first, request.session)
                written = self._coordinator.store.actions.log.end
                self._coordinator.store.actions.log.flusher.when_durable(
                    written, lambda outcome: request.settle(outcome, Configured(config.version))
                )
                return
        host = self._coordinator.host(message.subject, message.group)
        decision = host.state_machine.configure(message.expected_version, config, now_ms=now_ms)
        beside = self._inboxes.reconfigured(host, config) if decision.events else []
        version = config.version if decision.events else host.state_machine.config.version
        self._carry_out(request, host, decision, Configured(version), beside)

    def _switch(self, request: ServedRequest[ControlMessage], message: Switch) -> None:
        if message.lever is Lever.READ_ONLY:
            subject = self._coordinator.store.ensure_subject(Subject.parse(message.subject))
            was_on = subject.id in self._coordinator.groups.read_only
            written = self._coordinator.set_read_only(subject.id, is_on=message.is_on)
            self._coordinator.when_durable(written, lambda outcome: request.settle(outcome, Switched(was_on)))
            return
        host = self._coordinator.host(message.subject, message.group)
        if message.lever is Lever.HALT_KEY:
            self._go_on(request, message, host)
            return
        consumer = ConsumerName.parse(message.consumer) if message.lever is Lever.PAUSE_CONSUMER else None
        was_on = host.state_machine.is_paused(consumer)
        if consumer is not None and message.is_on and not was_on:
            self._coordinator.admit_name(host, request.session)
        turn = host.state_machine.pause if message.is_on else host.state_machine.resume
        decision = turn(consumer, now_ms=self._coordinator.clock.wall_ms())
        self._carry_out(request, host, decision, Switched(was_on))

    def _go_on(self, request: ServedRequest[ControlMessage], message: Switch, host: GroupHost) -> None:
        """Resume halted keys, in the inbox, too."""
        if message.is_on:
            raise Refused(Code.BAD_REQUEST, "a key halts by itself, after a dead letter: it can only be let go on")
        key = 0 if message.key is None else key_hash(message.key)
        now_ms = self._coordinator.clock.wall_ms()
        beside = [] if host.inbox is None else [(host.inbox, host.inbox.state_machine.go_on(key, now_ms=now_ms))]
        decision = host.state_machine.go_on(key, now_ms=now_ms)
        was_on = bool(decision.events) or any(each.events for _, each in beside)
        self._carry_out(request, host, decision, Switched(was_on), beside)

    def _carry_out(
        self,
        request: ServedRequest[ControlMessage],
        host: GroupHost,
        decision: GroupDecision,
        answer: ControlMessage,
        beside: Sequence[tuple[GroupHost, GroupDecision]] = (),
    ) -> None:
        refused = refusal(decision)
        if refused is not None:
            request.refuse(refused)
            return
        written = self._coordinator.carry_out_all([(host, decision), *beside])
        self._coordinator.paused_pulls.release(host.key)
        self._coordinator.scheduler.wake(host.key)
        self._coordinator.when_durable(written, lambda outcome: request.settle(outcome, answer))
