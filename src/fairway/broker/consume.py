"""Requests of consumers: JOIN, LEAVE, heartbeats, SETTLE, and the dispatch of PULL.

All requests of a group go through its actor, in order. `ConsumeProcessor` checks that the connection speaks for the
consumer, renews the lease and handles the request. `SettleProcessor` settles any number of lots in one request and, as
a rule, in one action record. `PullProcessor` (in `pull`) handles a PULL.

`ConnectionLeases` ties leases to connections, for a net in memory that reports the end of a connection at once. On a
real network a consumer renews its lease, because nothing else shows that it is alive. In memory the broker sees the
connection end, so a renewal would add nothing. A member's lease stands still while the connection that joined is open,
and runs from the end of that connection. The broker tells the consumer a lease that it never has to renew.
"""

from __future__ import annotations

from functools import lru_cache

from fairway import limits
from fairway.batch.identity import checked, consumer_verifier_of
from fairway.broker.group_coordinator import GroupCoordinator, refusal
from fairway.broker.groups import FENCED, GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.message_reader import MessageReader
from fairway.broker.pull import EMPTY, PullProcessor
from fairway.broker.scan import NameTable
from fairway.errors import Code, Refused
from fairway.groups import GroupConfig, GroupOutcome, JoinClaim, SettleDecision
from fairway.groups import SettleVerdict as Settlement
from fairway.groups.config import encode, with_policies
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol import ControlMessage, messages
from fairway.protocol.messages import Done, Heartbeat, Join, Joined, Leave, Pull, Renewed, Settle, SettleAll, Whence
from fairway.replication.copies import CopyStatus
from fairway.runtime.rng import Rng
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import Requester, ServedRequest
from fairway.storage.record import RecordHeader

LEASE_MS = 10 * 365 * 24 * 3_600_000  # ten years: longer than any test runs, and a timer that every loop accepts


class ConnectionLeases:
    """The members of all groups, by the connection that their leases depend on."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self._members: dict[Requester, dict[tuple[GroupHost, ConsumerName], None]] = {}

    def joined(self, host: GroupHost, name: ConsumerName, session: Requester) -> None:
        """Stop the member's lease: it depends on this connection from now on."""
        self._members.setdefault(session, {})[host, name] = None
        for each in host.with_inbox:
            each.state_machine.stop_lease(name)

    def left(self, host: GroupHost, name: ConsumerName, session: Requester) -> None:
        self._members.get(session, {}).pop((host, name), None)

    def lost(self, session: Requester) -> None:
        """Start the leases of the members that the ended connection spoke for."""
        now_ns = self._coordinator.clock.monotonic_ns()
        for host, name in self._members.pop(session, {}):
            if not self._coordinator.groups.has(host) or host.sessions.has_other(name, session):
                continue
            for each in host.with_inbox:
                each.state_machine.start_lease(name, now_ns=now_ns)
                self._coordinator.rearm(each)


_Lot = tuple[bool, int, int]  # whether the lot is the inbox's, its first sequence, and its attempt


class _Gathered:
    """Decisions on different lots. They do not depend on one another, so one record may hold them all."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self._decisions: dict[_Lot, tuple[GroupHost, SettleDecision]] = {}
        self.written: RecordHeader | None = None
        self.settled = 0
        self.stale = 0

    def make_way_for(self, lot: _Lot) -> None:
        if lot in self._decisions:
            self.carry_out()

    def add(self, lot: _Lot, host: GroupHost, decision: SettleDecision) -> None:
        self._decisions[lot] = (host, decision)

    def carry_out(self) -> None:
        decisions = list(self._decisions.values())
        self._decisions.clear()
        self.written = self._coordinator.carry_out_all(decisions) or self.written
        self.settled += sum(decision.settled for _, decision in decisions)
        self.stale += sum(decision.stale for _, decision in decisions)


class SettleProcessor:
    """Handles SETTLE for the consumers of all groups."""

    def __init__(self, coordinator: GroupCoordinator, rng: Rng) -> None:
        self._coordinator = coordinator
        self._rng = rng

    def settle_all(
        self, request: ServedRequest[ControlMessage], message: SettleAll, host: GroupHost, name: ConsumerName
    ) -> None:
        """Settle all outcomes of the request. If one outcome is refused, those before it hold: settling twice is
        harmless."""
        gathered = _Gathered(self._coordinator)
        refused = None
        for outcome in message.outcomes:
            lot = (outcome.is_inbox, outcome.first, outcome.attempt)
            gathered.make_way_for(lot)
            of = host.inbox if outcome.is_inbox else host
            decision = _unknown(outcome) if of is None else self._settle(request, of, name, outcome, message.arrived)
            refused = refusal(decision)
            if refused is not None:
                break
            gathered.add(lot, of or host, decision)
            if decision.is_believed:
                gathered.carry_out()
        gathered.carry_out()
        if any(outcome.kind is not messages.Settlement.ACK for outcome in message.outcomes):
            self._coordinator.scheduler.wake(host.key)
        if refused is not None:
            request.refuse(refused)
            return
        answer = messages.Settled(gathered.settled, gathered.stale)
        self._coordinator.when_durable(gathered.written, lambda told: request.settle(told, answer))

    def _settle(
        self, request: ServedRequest[ControlMessage], host: GroupHost, name: ConsumerName, outcome: Settle, arrived: int
    ) -> SettleDecision:
        is_ack = outcome.kind is messages.Settlement.ACK and not host.is_revived
        return host.state_machine.settle(
            name,
            Settlement(outcome.kind),
            outcome.first,
            outcome.attempt,
            [(span.first, span.count) for span in outcome.spans],
            now_ms=self._coordinator.clock.wall_ms(),
            arrived=arrived,
            after_ms=outcome.after_ms,
            draw=0.0 if outcome.kind is messages.Settlement.ACK else self._rng.uniform(),
            may_grow=is_ack or self._coordinator.memory.room(host, request.session) >= limits.LOT_BYTES,
            reason=outcome.reason,
            fence=outcome.fence if host.state_machine.is_ordered else 0,
        )


def _unknown(outcome: Settle) -> SettleDecision:
    """The decision for an inbox that does not exist, or no longer."""
    return SettleDecision(GroupOutcome.DONE, stale=sum(span.count for span in outcome.spans))


# The same names come with every request: a lookup costs a tenth of a parse.
_consumer = lru_cache(maxsize=8_192)(ConsumerName.parse)

_OF_MEMBERS = (Pull, SettleAll, Heartbeat)  # a union written where it is needed costs 1 µs


class ConsumeProcessor:
    """Handles the requests of consumers, for all groups."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        inboxes: Inboxes,
        reader: MessageReader,
        rng: Rng,
        names: NameTable,
        leases: ConnectionLeases | None = None,
        copy_status: CopyStatus | None = None,
    ) -> None:
        """`leases`: members keep their leases for as long as they are connected. `copy_status`: of one copy of
        several."""
        self._coordinator = coordinator
        self._leases = leases
        self._copy_status = copy_status
        self._names = names
        self._inboxes = inboxes
        self.puller = PullProcessor(coordinator, inboxes, reader, copy_status)
        self._settler = SettleProcessor(coordinator, rng)

    def process(self, request: ServedRequest[ControlMessage], actor: Actor) -> TurnResult:
        message = request.message
        if isinstance(message, Join):
            self._join(request, message, actor)
        elif isinstance(message, Leave):
            self._leave(request, message, actor)
        elif isinstance(message, _OF_MEMBERS):
            host = self._coordinator.host(message.subject, message.group)
            name = _consumer(message.consumer)
            host.sessions.check(name, request.session, host.state_machine)
            if isinstance(message, Pull):
                verdict = self.puller.pull(request, message, host, name, actor)
                return self._wait(request, host, name) if verdict is TurnResult.WAIT else verdict
            refused = self._renew(host, name, message.arrived)
            if refused is not None:
                self._coordinator.refuse(request, refused)
                return TurnResult.DONE
            if isinstance(message, SettleAll):
                self._settler.settle_all(request, message, host, name)
            else:
                config = host.state_machine.config
                is_paused = (
                    host.state_machine.is_paused()
                    or host.state_machine.is_paused(name)
                    or self._coordinator.is_switched_off(host)
                )
                leads_ms = self._leads_ms(request)
                request.respond(Renewed(self.lease_ms(host), config.version, is_paused, leads_ms))
        return TurnResult.DONE

    def expire(self, request: ServedRequest[ControlMessage], expiry: Expiry) -> None:
        if expiry is Expiry.WAITED:
            request.respond(EMPTY)
        else:
            request.expire(expiry)

    def fail(self, request: ServedRequest[ControlMessage], error: Exception) -> None:
        request.fail(error)

    # --- membership --------------------------------------------------------------------------------------------------

    def open_group(self, message: Join, session: Requester) -> GroupHost:
        """The group that a JOIN names. Creates the group and its subject if they are new."""
        coordinator = self._coordinator
        log = coordinator.store.messages
        subject = coordinator.store.ensure_subject(Subject.parse_joinable(message.subject))
        if message.start not in (Whence.EARLIEST, Whence.LATEST):
            raise Refused(Code.BAD_REQUEST, "a new group begins at EARLIEST or LATEST; seek afterwards")
        name = GroupName.parse(message.group)
        start = log.end_sequence(subject.id) if message.start is Whence.LATEST else log.first_sequence(subject.id)
        config = GroupConfig(version=1, is_broadcast=message.is_broadcast)
        if message.policies is not None and coordinator.groups.find(subject.id, name) is None:
            config = with_policies(config, message.policies)
        host = coordinator.ensure(subject.id, name, config, start, session)
        if message.is_broadcast and not host.state_machine.config.is_broadcast:
            raise Refused(Code.BAD_REQUEST, f"group {name} shares its messages among its members: broadcast in another")
        return host

    def lease_ms(self, host: GroupHost) -> int:
        """How long a member may be silent while it is connected."""
        return host.state_machine.config.lease_ms if self._leases is None else LEASE_MS

    def _join(self, request: ServedRequest[ControlMessage], message: Join, actor: Actor) -> None:
        host = self._coordinator.host(message.subject, message.group)
        name = ConsumerName.parse(message.consumer)
        verifier = consumer_verifier_of(checked(message.secret, "session"), name)
        if not host.state_machine.has_member(name):
            self._coordinator.admit_member(host, request.session)
        decision = host.state_machine.join(
            name,
            version=message.config_version,
            arrived=message.arrived,
            resume_at=self._coordinator.store.messages.end_sequence(host.subject_id),
            now_ns=self._coordinator.clock.monotonic_ns(),
            now_ms=self._coordinator.clock.wall_ms(),
            aging_ms=self._coordinator.store.aging_ms(),
            claim=JoinClaim(verifier, is_taken=host.sessions.has_other(name, request.session)),
        )
        refused = refusal(decision)
        if refused is not None:
            request.refuse(refused)
            return
        decided = [(host, decision), *self._inboxes.join(host, name, message.arrived, verifier)]
        written = self._coordinator.carry_out_all(decided)
        self._names.note(decided)
        if host.sessions.bind(name, request.session):
            for other in self._waiting_pulls(host, name, actor):
                if other.session is request.session:
                    self._coordinator.scheduler.dispatch(host.key, other, self)
                else:
                    other.refuse(FENCED)
        if self._leases is not None:
            self._leases.joined(host, name, request.session)
        config = host.state_machine.config
        told = (
            encode(config),
            config.version,
            self.lease_ms(host),
            decision.is_gap,
            self._coordinator.store.messages.log.epoch,
        )
        number = max(each.state_machine.last_number(name) for each in host.with_inbox)
        self._coordinator.scheduler.wake(host.key)  # messages that the name held before may now go to anybody
        self._coordinator.when_durable(
            written, lambda outcome: request.settle(outcome, Joined(*told, self._leads_ms(request), number))
        )

    def _leave(self, request: ServedRequest[ControlMessage], message: Leave, actor: Actor) -> None:
        host = self._coordinator.host(message.subject, message.group)
        name = ConsumerName.parse(message.consumer)
        host.sessions.check(name, request.session, host.state_machine)
        decision = host.state_machine.leave(name, now_ms=self._coordinator.store.time.ages_from_ms())
        written = self._coordinator.carry_out_all([(host, decision), *self._inboxes.leave(host, name)])
        host.sessions.release(name)
        if self._leases is not None:
            self._leases.left(host, name, request.session)
        for waiting in self._waiting_pulls(host, name, actor):
            waiting.respond(EMPTY)
        self._coordinator.scheduler.wake(host.key)
        self._coordinator.when_durable(written, lambda outcome: request.settle(outcome, Done()))

    def _waiting_pulls(self, host: GroupHost, name: ConsumerName, actor: Actor) -> list[ServedRequest[ControlMessage]]:
        """Withdraw the consumer's pulls from the mailbox and from the list of paused pulls."""

        def is_meant(request: ServedRequest[ControlMessage]) -> bool:
            return isinstance(request.message, Pull) and request.message.consumer == name

        return [*actor.mailbox.withdraw(is_meant), *self._coordinator.paused_pulls.withdraw(host.key, is_meant)]

    def _leads_ms(self, request: ServedRequest[ControlMessage]) -> int | None:
        return None if self._copy_status is None else self._copy_status.leads_ms(request.received_ns)

    def _renew(self, host: GroupHost, name: ConsumerName, arrived: int) -> Refused | None:
        beat = host.state_machine.heartbeat(name, arrived=arrived, now_ns=self._coordinator.clock.monotonic_ns())
        refused = refusal(beat)
        if refused is None:
            self._inboxes.renew(host, name, arrived)
        return refused

    def _wait(self, request: ServedRequest[ControlMessage], host: GroupHost, name: ConsumerName) -> TurnResult:
        """Let a pull wait in its actor. The pull of a consumer that may take nothing waits beside it."""
        now_ns = self._coordinator.clock.monotonic_ns()
        is_out = host.state_machine.is_paused(name) or host.state_machine.stands_by(name)
        if not is_out or request.wait_until_ns <= now_ns:
            return TurnResult.WAIT
        self._coordinator.paused_pulls.add(host.key, host.key, request, self, now_ns)
        return TurnResult.DONE
