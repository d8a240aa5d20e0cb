"""Operator commands for groups and subjects: describe, seek, configure, pause, weigh, read-only, redrive, remove. The
broker answers a change once it is durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fairway.batch.hashes import key_hash
from fairway.broker.descriptions import DescribeSteps, describe
from fairway.broker.group_coordinator import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.redrive import RedriveProcessor
from fairway.broker.scan import place
from fairway.broker.subject_removal import SubjectRemoval
from fairway.errors import Code, Refused
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
from fairway.serving.subject_index import SubjectIndex


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
