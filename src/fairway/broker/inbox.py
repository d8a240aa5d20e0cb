"""A group's inbox: messages that only this group gets, redriven or sent to the group alone.

An inbox is an internal subject with a state machine of its own. It has the group's members and configuration, except
for tags: the group wanted the redriven messages before, and messages sent to one group are meant for it. The group's
actor pulls from the subject and from the inbox in turns, a response from each. One row of numbers covers the responses
of both, so that a consumer confirms both with one number.

`Inboxes` opens inboxes, keeps their members in step with the group, and decides where a pull looks.

`InboxProduceProcessor` handles PRODUCE to `inbox:<group>:<subject>`, for clients that have negotiated the feature. The
group must exist. The first batch creates the inbox. From then on the inbox is a subject like any other: batches keep
their contents, producer streams have their dedupe window, an answer means durable. Only the group itself pulls from its
inbox.
"""

from __future__ import annotations

import msgspec

from fairway import batch
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.message_copies import stream_of
from fairway.broker.produce import ProduceProcessor
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.groups import GroupConfig, GroupDecision, GroupOutcome, JoinClaim, Order, TagFilter
from fairway.names import ConsumerName, Subject
from fairway.protocol import Bytes
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ProduceRequest
from fairway.storage.flusher import OnDurable as Told

_NS = 1_000_000_000


class Inboxes:
    """The inboxes of all groups of a broker."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self._opening: dict[int, list[Told]] = {}  # by the group's number: callbacks that wait, in order

    def subject_of(self, host: GroupHost) -> Subject:
        return Subject.inbox(host.name, self._coordinator.name_of(host.subject_id))

    def when_open(self, host: GroupHost, told: Told) -> None:
        """Call `told(None)` once the group has a durable inbox; at once if it already has one. Creates the inbox if
        needed. Calls waiting callbacks in the order in which they came.

        The new subject is committed before a group's action names its number. The new inbox is durable before it takes
        a message: an inbox created again after a crash would begin behind that message.
        """
        if host.is_inbox_open:
            told(None)
            return
        waiting = self._opening.setdefault(host.id, [])
        waiting.append(told)
        if len(waiting) > 1:
            return

        def opened(outcome: FairwayError | None) -> None:
            host.is_inbox_open = outcome is None
            for each in self._opening.pop(host.id):
                each(outcome)

        def named(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                self._open(host, subject.id)
            except FairwayError as error:
                opened(error)
            else:
                self._coordinator.when_durable(None, opened)

        try:
            subject = self._coordinator.store.ensure_subject(self.subject_of(host))
        except FairwayError as error:
            opened(error)
            return
        log = self._coordinator.store.messages.log
        log.flusher.when_durable(log.end if subject.born_at >= log.committed_end else 0, named)

    def _open(self, host: GroupHost, subject_id: int) -> None:
        """Open the group's inbox, on a subject that is committed."""
        if host.inbox is not None:
            return
        if not self._coordinator.groups.has(host):
            raise Refused(Code.NO_SUCH_GROUP, f"group {host.name} is gone: nobody had used it for too long")
        config = _config_for(host.state_machine.config, version=1)
        start = self._coordinator.store.messages.end_sequence(
            subject_id
        )  # messages below belonged to an earlier group of this name
        host.take_inbox(self._coordinator.ensure(subject_id, host.name, config, start))

    def reconfigured(self, host: GroupHost, config: GroupConfig) -> list[tuple[GroupHost, GroupDecision]]:
        """The inbox's own decision that follows a new configuration of the group."""
        if host.inbox is None:
            return []
        version = host.inbox.state_machine.config.version
        adapted = _config_for(config, version + 1)
        return [
            (host.inbox, host.inbox.state_machine.configure(version, adapted, now_ms=self._coordinator.clock.wall_ms()))
        ]

    # --- members -----------------------------------------------------------------------------------------------------

    def join(
        self, host: GroupHost, name: ConsumerName, arrived: int, verifier: bytes
    ) -> list[tuple[GroupHost, GroupDecision]]:
        """Join the inbox with a consumer that has joined the group. Expires a member of the inbox that has the same id
        and another secret."""
        if host.inbox is None:
            return []
        clock = self._coordinator.clock
        joined = host.inbox.state_machine.join(
            name,
            version=0,
            arrived=arrived,
            resume_at=0,
            now_ns=clock.monotonic_ns(),
            now_ms=clock.wall_ms(),
            claim=JoinClaim(verifier, is_granted=True),
        )
        return [(host.inbox, joined)]

    def renew(self, host: GroupHost, name: ConsumerName, arrived: int) -> None:
        """Renew the lease in the inbox, too. Joins a member that is missing there: the inbox may be younger than its
        JOIN."""
        if host.inbox is None:
            return
        beat = host.inbox.state_machine.heartbeat(name, arrived=arrived, now_ns=self._coordinator.clock.monotonic_ns())
        if beat.outcome is GroupOutcome.NOT_A_MEMBER:
            self._coordinator.carry_out_all(self.join(host, name, arrived, host.state_machine.verifier_of(name)))
            if host.state_machine.has_lasting_lease(name):
                host.inbox.state_machine.stop_lease(name)

    def leave(self, host: GroupHost, name: ConsumerName) -> list[tuple[GroupHost, GroupDecision]]:
        if host.inbox is None:
            return []
        return [(host.inbox, host.inbox.state_machine.leave(name, now_ms=self._coordinator.store.time.ages_from_ms()))]

    # --- pulling -----------------------------------------------------------------------------------------------------

    def sources(self, host: GroupHost, name: ConsumerName, arrived: int) -> tuple[GroupHost, ...]:
        """Where a pull looks, in this order. A source whose response did not arrive comes first, and alone."""
        inbox = host.inbox
        if inbox is None:
            return (host,)
        beat = host.state_machine.heartbeat(name, arrived=arrived, now_ns=self._coordinator.clock.monotonic_ns())
        if beat.outcome is not GroupOutcome.DONE:
            return (host,)  # which states the reason
        self.renew(host, name, arrived)
        unarrived = [
            (number, source)
            for source in (host, inbox)
            if (number := source.state_machine.first_unarrived(name)) is not None
        ]
        if unarrived:  # the oldest first: a consumer that has the later response confirms the earlier one
            return (min(unarrived, key=lambda pair: pair[0])[1],)
        is_out = (
            host.state_machine.is_paused() or host.state_machine.is_paused(name) or host.state_machine.stands_by(name)
        )
        if is_out or not self._may_hand_out(inbox):
            return (host,)
        return (inbox, host) if host.is_inbox_next else (host, inbox)

    def note_handed_out(self, source: GroupHost, count: int) -> None:
        main = source.main or source
        main.is_inbox_next = source is main
        if source.rate_per_s:
            now_ns = self._coordinator.clock.monotonic_ns()
            source.next_handout_ns = max(source.next_handout_ns, now_ns) + count * _NS // source.rate_per_s
            wait_s = (source.next_handout_ns - now_ns) / _NS + 0.001
            self._coordinator.call_later(wait_s, self._coordinator.scheduler.wake, source.key)

    def _may_hand_out(self, inbox: GroupHost) -> bool:
        return not inbox.rate_per_s or self._coordinator.clock.monotonic_ns() >= inbox.next_handout_ns


def _config_for(config: GroupConfig, version: int) -> GroupConfig:
    # In strict order the group's active member is the only consumer that pulls here.
    order = Order.NONE if config.order is Order.STRICT else config.order
    return msgspec.structs.replace(config, version=version, tags=TagFilter(), order=order)


_RETRY_MS = 50


class InboxProduceProcessor:
    """Handles PRODUCE to an inbox. `ProduceProcessor` handles the batch itself."""

    def __init__(self, coordinator: GroupCoordinator, inboxes: Inboxes, produce: ProduceProcessor) -> None:
        self._coordinator = coordinator
        self._inboxes = inboxes
        self._produce = produce

    def host_of(self, message: Produce) -> GroupHost:
        """The group of the request; `Refused` or `BadName` where there is none."""
        group, subject = Subject.parse_inbox(message.subject)
        return self._coordinator.host(subject, group)

    def begin(self, request: ProduceRequest, host: GroupHost) -> None:
        """Pass the request to the inbox's own actor, once the inbox is open."""

        def opened(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                key = ("produce", self._inboxes.subject_of(host))
                self._coordinator.scheduler.dispatch(key, request, self)
            except FairwayError as error:
                request.fail(error)

        self._inboxes.when_open(host, opened)

    def process(self, request: ProduceRequest, actor: Actor) -> TurnResult:
        host = self.host_of(request.message)  # the group may have gone since
        if not host.is_inbox_open:
            raise Refused(Code.BUSY, f"group {host.name} is being made anew", retry_after_ms=_RETRY_MS)
        subject = self._coordinator.name_of(host.subject_id)
        if host.subject_id in self._coordinator.groups.read_only:
            raise Refused(Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it first")
        own = stream_of(Subject.dead_letters(host.name, subject), host.name)
        if _stream(request.attachments[0]) == own:
            # The broker finds redriven dead letters by this producer id: a foreign batch would pass for one of them.
            raise Refused(Code.SEQUENCE_CONFLICT, f"stream {own:016x} is the broker's own: choose another producer id")
        return self._produce.process(request, actor)

    def expire(self, request: ProduceRequest, expiry: Expiry) -> None:
        self._produce.expire(request, expiry)

    def fail(self, request: ProduceRequest, error: Exception) -> None:
        self._produce.fail(request, error)


def _stream(data: Bytes) -> int:
    """The producer id of a batch. Returns 0, which no producer has, for a broken batch; the next check finds the
    fault."""
    try:
        return batch.peek(data).producer_id
    except RemoteProtocolError:
        return 0
