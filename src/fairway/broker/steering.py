"""What operators do to groups and subjects: seek, configure, pause, weigh, read-only, remove. Durable before it is
answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fairway.batch.hashing import key_hash
from fairway.broker.describe import DescribeSteps, describe
from fairway.broker.desk import GroupCoordinator, refusal
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
from fairway.protocol.admin import (
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
from fairway.serving.subject_order import SubjectIndex


class AdminProcessor:
    """Handles what is not on the way of a message."""

    def __init__(
        self, desk: GroupCoordinator, inboxes: Inboxes, subjects: SubjectIndex, broker_state: Callable[[], BrokerState]
    ) -> None:
        self._desk = desk
        self._subjects = subjects
        self._pages: dict[ServedRequest[ControlMessage], DescribeSteps] = {}  # of DESCRIBE, under way
        self._inboxes = inboxes
        self.redriver = RedriveProcessor(desk, inboxes)
        self._broker_state = broker_state
        self.removal = SubjectRemoval(desk)

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
            host = self._desk.host(message.subject, message.group)
            written = self._desk.set_weight(host, message.weight)
            self._desk.when_durable(written, lambda outcome: request.settle(outcome, Done()))
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
        """A step of its page."""
        page = self._pages.pop(request, None) or describe(self._desk, self._subjects, message, self._broker_state)
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
        host = self._desk.host(message.subject, message.group)
        was = host.law.cursor
        to = place(self._desk, host.subject_id, message.whence, message.value)
        end = self._desk.store.messages.end_sequence(host.subject_id)
        if to > end and message.subject != MOMENTS:  # else what comes until then would be passed over in silence
            raise Refused(
                Code.BAD_REQUEST,
                f"there is no sequence {to} in {message.subject}, which ends at {end} here: seek to {end}, or to "
                "'latest', to begin with what comes next",
            )
        decision = host.law.seek(to, now_ms=self._desk.clock.wall_ms())
        answer = Sought(to, was, decision.held, decision.waiting, decision.dying_count)
        self._carry_out(request, host, decision, answer)

    def _configure(self, request: ServedRequest[ControlMessage], message: Configure) -> None:
        config = decode(message.config)
        now_ms = self._desk.clock.wall_ms()
        if message.expected_version == 0:
            log = self._desk.store.messages
            subject = self._desk.store.ensure_subject(Subject.parse(message.subject))
            name = GroupName.parse(message.group)
            if self._desk.groups.find(subject.id, name) is None:
                first = log.first_sequence(subject.id)
                self._desk.ensure(subject.id, name, config, first, request.session)
                written = self._desk.store.actions.log.end
                self._desk.store.actions.log.flusher.when_durable(
                    written, lambda outcome: request.settle(outcome, Configured(config.version))
                )
                return
        host = self._desk.host(message.subject, message.group)
        decision = host.law.configure(message.expected_version, config, now_ms=now_ms)
        beside = self._inboxes.reconfigured(host, config) if decision.events else []
        version = config.version if decision.events else host.law.config.version
        self._carry_out(request, host, decision, Configured(version), beside)

    def _switch(self, request: ServedRequest[ControlMessage], message: Switch) -> None:
        if message.lever is Lever.READ_ONLY:
            subject = self._desk.store.ensure_subject(Subject.parse(message.subject))
            was_on = subject.id in self._desk.groups.read_only
            written = self._desk.set_read_only(subject.id, is_on=message.is_on)
            self._desk.when_durable(written, lambda outcome: request.settle(outcome, Switched(was_on)))
            return
        host = self._desk.host(message.subject, message.group)
        if message.lever is Lever.HALT_KEY:
            self._go_on(request, message, host)
            return
        consumer = ConsumerName.parse(message.consumer) if message.lever is Lever.PAUSE_CONSUMER else None
        was_on = host.law.is_paused(consumer)
        if consumer is not None and message.is_on and not was_on:
            self._desk.admit_name(host, request.session)
        turn = host.law.pause if message.is_on else host.law.resume
        decision = turn(consumer, now_ms=self._desk.clock.wall_ms())
        self._carry_out(request, host, decision, Switched(was_on))

    def _go_on(self, request: ServedRequest[ControlMessage], message: Switch, host: GroupHost) -> None:
        """With keys that have halted, in the inbox, too."""
        if message.is_on:
            raise Refused(Code.BAD_REQUEST, "a key halts by itself, after a dead letter: it can only be let go on")
        key = 0 if message.key is None else key_hash(message.key)
        now_ms = self._desk.clock.wall_ms()
        beside = [] if host.inbox is None else [(host.inbox, host.inbox.law.go_on(key, now_ms=now_ms))]
        decision = host.law.go_on(key, now_ms=now_ms)
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
        written = self._desk.carry_out_all([(host, decision), *beside])
        self._desk.parking.release(host.key)
        self._desk.scheduler.wake(host.key)
        self._desk.when_durable(written, lambda outcome: request.settle(outcome, answer))
