"""Consuming: join, pull, settle, heartbeat, leave. All requests of a group go through its actor, in order."""

from __future__ import annotations

from functools import lru_cache

from fairway.batch.secret import checked, consumer_verifier_of
from fairway.broker.connection_leases import LEASE_MS, ConnectionLeases
from fairway.broker.consumer_sessions import FENCED
from fairway.broker.desk import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.keying import KeyFinder
from fairway.broker.naming import NameTable
from fairway.broker.pulling import EMPTY, PullProcessor
from fairway.broker.reading import MessageReader
from fairway.broker.settling import SettleProcessor
from fairway.errors import Code, Refused
from fairway.groups import GroupConfig, JoinClaim
from fairway.groups.config import encode, with_policies
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol import ControlMessage
from fairway.protocol.messages import Done, Heartbeat, Join, Joined, Leave, Pull, Renewed, SettleAll, Whence
from fairway.replication.standing import CopyStatus
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import Requester, ServedRequest
from fairway.world.rng import Rng

# The same names come with every request: to look one up costs a tenth of what it costs to parse.
_consumer = lru_cache(maxsize=8_192)(ConsumerName.parse)

_OF_MEMBERS = (Pull, SettleAll, Heartbeat)  # to write it as a union where it is asked costs 1 µs


class ConsumeProcessor:
    """Handles the requests of consumers, one table for all verbs."""

    def __init__(
        self,
        desk: GroupCoordinator,
        inboxes: Inboxes,
        reader: MessageReader,
        rng: Rng,
        names: NameTable,
        leases: ConnectionLeases | None = None,
        standing: CopyStatus | None = None,
    ) -> None:
        """With `leases`, members keep theirs for as long as they are connected. `standing`: of one copy of several."""
        self._desk = desk
        self._leases = leases
        self._standing = standing
        self._names = names
        self._inboxes = inboxes
        self._puller = PullProcessor(desk, inboxes, reader, standing)
        self._settler = SettleProcessor(desk, rng)

    @property
    def keys(self) -> KeyFinder:
        return self._puller.keys

    @property
    def pulled_messages(self) -> int:
        return self._puller.pulled_messages

    def process(self, request: ServedRequest[ControlMessage], actor: Actor) -> TurnResult:
        message = request.message
        if isinstance(message, Join):
            self._join(request, message, actor)
        elif isinstance(message, Leave):
            self._leave(request, message, actor)
        elif isinstance(message, _OF_MEMBERS):
            host = self._desk.host(message.subject, message.group)
            name = _consumer(message.consumer)
            host.sessions.check(name, request.session, host.law)
            if isinstance(message, Pull):
                return self._pull(request, message, host, name, actor)
            refused = self._renew(host, name, message.arrived)
            if refused is not None:
                self._desk.refuse(request, refused)
                return TurnResult.DONE
            if isinstance(message, SettleAll):
                self._settler.settle_all(request, message, host, name)
            else:
                config = host.law.config
                is_paused = host.law.is_paused() or host.law.is_paused(name) or self._desk.is_switched_off(host)
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
        """The group that a JOIN names; made where it is new, and so is its subject."""
        desk = self._desk
        log = desk.store.messages
        subject = desk.store.ensure_subject(Subject.parse_joinable(message.subject))
        if message.start not in (Whence.EARLIEST, Whence.LATEST):
            raise Refused(Code.BAD_REQUEST, "a new group begins at EARLIEST or LATEST; seek afterwards")
        name = GroupName.parse(message.group)
        start = log.end_sequence(subject.id) if message.start is Whence.LATEST else log.first_sequence(subject.id)
        config = GroupConfig(version=1, is_broadcast=message.is_broadcast)
        if message.policies is not None and desk.groups.find(subject.id, name) is None:
            config = with_policies(config, message.policies)
        host = desk.ensure(subject.id, name, config, start, session)
        if message.is_broadcast and not host.law.config.is_broadcast:
            raise Refused(Code.BAD_REQUEST, f"group {name} shares its messages among its members: broadcast in another")
        return host

    def lease_ms(self, host: GroupHost) -> int:
        """How long a member may be silent while it is connected."""
        return host.law.config.lease_ms if self._leases is None else LEASE_MS

    def _join(self, request: ServedRequest[ControlMessage], message: Join, actor: Actor) -> None:
        host = self._desk.host(message.subject, message.group)
        name = ConsumerName.parse(message.consumer)
        verifier = consumer_verifier_of(checked(message.secret, "session"), name)
        if not host.law.has_member(name):
            self._desk.admit_member(host, request.session)
        decision = host.law.join(
            name,
            version=message.config_version,
            arrived=message.arrived,
            resume_at=self._desk.store.messages.end_sequence(host.subject_id),
            now_ns=self._desk.clock.monotonic_ns(),
            now_ms=self._desk.clock.wall_ms(),
            aging_ms=self._desk.store.aging_ms(),
            claim=JoinClaim(verifier, is_taken=host.sessions.has_other(name, request.session)),
        )
        refused = refusal(decision)
        if refused is not None:
            request.refuse(refused)
            return
        decided = [(host, decision), *self._inboxes.join(host, name, message.arrived, verifier)]
        written = self._desk.carry_out_all(decided)
        self._names.note(decided)
        if host.sessions.bind(name, request.session):
            for other in self._waiting_pulls(host, name, actor):
                if other.session is request.session:
                    self._desk.scheduler.dispatch(host.key, other, self)
                else:
                    other.refuse(FENCED)
        if self._leases is not None:
            self._leases.joined(host, name, request.session)
        config = host.law.config
        told = encode(config), config.version, self.lease_ms(host), decision.is_gap, self._desk.store.messages.log.epoch
        number = max(each.law.last_number(name) for each in (host, host.inbox) if each is not None)
        self._desk.scheduler.wake(host.key)  # what the name held before may be anybody's now
        self._desk.when_durable(
            written, lambda outcome: request.settle(outcome, Joined(*told, self._leads_ms(request), number))
        )

    def _leave(self, request: ServedRequest[ControlMessage], message: Leave, actor: Actor) -> None:
        host = self._desk.host(message.subject, message.group)
        name = ConsumerName.parse(message.consumer)
        host.sessions.check(name, request.session, host.law)
        decision = host.law.leave(name, now_ms=self._desk.store.time.ages_from_ms())
        written = self._desk.carry_out_all([(host, decision), *self._inboxes.leave(host, name)])
        host.sessions.release(name)
        if self._leases is not None:
            self._leases.left(host, name, request.session)
        for waiting in self._waiting_pulls(host, name, actor):
            waiting.respond(EMPTY)
        self._desk.scheduler.wake(host.key)
        self._desk.when_durable(written, lambda outcome: request.settle(outcome, Done()))

    def _waiting_pulls(self, host: GroupHost, name: ConsumerName, actor: Actor) -> list[ServedRequest[ControlMessage]]:
        """Taken out of wherever they wait."""

        def is_meant(request: ServedRequest[ControlMessage]) -> bool:
            return isinstance(request.message, Pull) and request.message.consumer == name

        return [*actor.mailbox.withdraw(is_meant), *self._desk.parking.withdraw(host.key, is_meant)]

    def _leads_ms(self, request: ServedRequest[ControlMessage]) -> int | None:
        return None if self._standing is None else self._standing.leads_ms(request.received_ns)

    def _renew(self, host: GroupHost, name: ConsumerName, arrived: int) -> Refused | None:
        beat = host.law.heartbeat(name, arrived=arrived, now_ns=self._desk.clock.monotonic_ns())
        refused = refusal(beat)
        if refused is None:
            self._inboxes.renew(host, name, arrived)
        return refused

    # --- pulling -----------------------------------------------------------------------------------------------------

    def _pull(
        self, request: ServedRequest[ControlMessage], message: Pull, host: GroupHost, name: ConsumerName, actor: Actor
    ) -> TurnResult:
        verdict = self._puller.pull(request, message, host, name, actor)
        now_ns = self._desk.clock.monotonic_ns()
        is_idle = verdict is TurnResult.WAIT and request.wait_until_ns > now_ns
        if is_idle and (host.law.is_paused(name) or host.law.stands_by(name)):
            self._desk.parking.park(host.key, request, self, now_ns)
            return TurnResult.DONE
        return verdict
