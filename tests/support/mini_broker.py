"""A broker of one group that fits into a test: the real law and real batches; no clock, no socket, no disk.

    broker = MiniBroker(GroupConfig())
    broker.produce([b"a", b"b"])
    wire = Wire(session, broker)          a connection: requests go in, answers wait to be let through, in any order
    wire.settle_down()                    until nobody has anything to say

`crash` loses trailing events that no answer which has arrived had waited for, as a real broker may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairway import batch
from fairway.batch.identity import consumer_verifier_of
from fairway.errors import Code, Refused
from fairway.group_events import GroupEvent
from fairway.groups import GroupConfig, GroupDecision, GroupOutcome, GroupStateMachine, JoinClaim, SettleVerdict
from fairway.groups.config import encode
from fairway.names import ConsumerName
from fairway.protocol import messages as m
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.line import Answer, Ask, ClientSession, ConnectionLost
from fairway.protocol.line import RequestOutcome as Told

MS_NS = 1_000_000
WALL_MS = 1_700_000_000_000
CODES = {
    GroupOutcome.BUSY: Code.BUSY,
    GroupOutcome.NOT_A_MEMBER: Code.NOT_A_MEMBER,
    GroupOutcome.OTHER_VERSION: Code.STALE_CONFIG,
    GroupOutcome.BAD_REQUEST: Code.BAD_REQUEST,
}


class MiniBroker:
    """One subject, one group."""

    def __init__(self, config: GroupConfig | None = None) -> None:
        self.group = GroupStateMachine()
        self.events: list[GroupEvent] = []
        self.durable = 0  # events that no crash takes
        self.marks: list[int] = [0]  # where a decision ends
        self.batches: list[tuple[int, bytes]] = []
        self.keys: list[int] = []  # of all messages
        self.end = 0
        self.now_ns = 0
        self.epoch = 1
        self.leads_ms: int | None = None  # as it says of itself
        self.bound: dict[str, object] = {}  # which connection acts for a consumer
        self._do(self.group.configure(0, config or GroupConfig(), now_ms=self.now_ms))
        self._do(self.group.seek(0, now_ms=self.now_ms))
        self.sync(len(self.events))

    @property
    def now_ms(self) -> int:
        return WALL_MS + self.now_ns // MS_NS

    # --- the world

    def monotonic_ns(self) -> int:
        """It is the clock of its consumers, too."""
        return self.now_ns

    def wall_ms(self) -> int:
        return self.now_ms

    def produce(
        self,
        payloads: Sequence[bytes],
        tags: Sequence[Sequence[str]] | None = None,
        keys: Sequence[str | None] | None = None,
    ) -> None:
        data = batch.encode(
            list(payloads), producer_id=7, first_sequence=self.end, created_ms=WALL_MS, tags=tags, keys=keys
        )
        self.batches.append((self.end, data))
        self.keys += batch.decode(data).key_hashes()
        self.end += len(payloads)

    def configure(self, config: GroupConfig) -> None:
        self._do(self.group.configure(config.version - 1, config, now_ms=self.now_ms))
        self.sync(len(self.events))

    def seek(self, to: int) -> None:
        self._do(self.group.seek(to, now_ms=self.now_ms))

    def advance(self, ms: int) -> None:
        self.now_ns += ms * MS_NS
        expired = self.group.expire(now_ns=self.now_ns, now_ms=self.now_ms)
        self._do(expired)
        self._mark_dead(expired)

    def crash(self, lost_most: int) -> None:
        """A new life; at most so many trailing decisions that nobody knows of are gone."""
        while lost_most and len(self.marks) > 1 and self.marks[-2] >= self.durable:
            self.marks.pop()
            lost_most -= 1
        del self.events[self.marks[-1] :]
        self.group = GroupStateMachine()
        self.group.apply_all(self.events)
        self.group.begin_life(self.end, self.now_ns)
        self.epoch += 1
        self.bound.clear()
        self.sync(len(self.events))

    def held(self) -> int:
        """Messages that members hold."""
        return self.group.describe(self.end, now_ns=self.now_ns, now_ms=self.now_ms).in_flight

    def is_all_done(self) -> bool:
        """Whether the group is owed nothing."""
        return self.group.oldest_unacked >= self.end

    def has_something(self) -> bool:
        """Whether a pull would get messages."""
        return not self.group.is_paused() and (self.group.cursor < self.end or self.group.has_ready(self.now_ms))

    # --- requests

    def handle(self, message: m.ControlMessage, connection: object) -> Told:
        try:
            return self._handle(message, connection)
        except Refused as refused:
            return refused

    def _handle(self, message: m.ControlMessage, connection: object) -> Answer:
        assert isinstance(message, m.Join | m.Pull | m.SettleAll | m.Heartbeat | m.Leave)
        name = ConsumerName(message.consumer)
        if isinstance(message, m.Join):
            return self._join(message, name, connection)
        if self.bound.get(name, connection) is not connection:
            raise Refused(Code.FENCED, "another connection has joined as this consumer")
        if name not in self.bound and self.group.has_member(name):
            raise Refused(Code.NOT_A_MEMBER, "this connection has not joined as this consumer")
        if isinstance(message, m.Pull):
            return self._pull(message, name)
        if isinstance(message, m.Leave):
            self._do(self.group.leave(name, now_ms=self.now_ms))
            self.bound.pop(name, None)
            return Answer(m.Done())
        self._do(self.group.heartbeat(name, arrived=message.arrived, now_ns=self.now_ns))
        if isinstance(message, m.Heartbeat):
            config = self.group.config
            return Answer(m.Renewed(config.lease_ms, config.version, self.group.is_paused(), self.leads_ms))
        return self._settle(message, name)

    def _join(self, message: m.Join, name: ConsumerName, connection: object) -> Answer:
        is_taken = self.bound.get(name, connection) is not connection
        joined = self.group.join(
            name,
            version=message.config_version,
            arrived=message.arrived,
            resume_at=self.end,
            now_ns=self.now_ns,
            now_ms=self.now_ms,
            claim=JoinClaim(consumer_verifier_of(message.secret, name), is_taken=is_taken),
        )
        self._do(joined)
        self.bound[name] = connection
        config = self.group.config
        number = self.group.last_number(name)
        told = encode(config), config.version, config.lease_ms, joined.is_gap, self.epoch, self.leads_ms, number
        return Answer(m.Joined(*told))

    def _pull(self, message: m.Pull, name: ConsumerName) -> Answer:
        cursor = self.group.cursor
        pulled = self.group.pull(
            name,
            arrived=message.arrived,
            messages_max=message.messages_max,
            fresh=(cursor, self.end - cursor) if cursor < self.end else None,
            now_ns=self.now_ns,
            now_ms=self.now_ms,
            keys=self.keys[cursor:] if self.group.config.is_keyed else (),
            run_max=message.run_max,
            extends_runs=message.extends_runs,
        )
        self._do(pulled)
        if pulled.is_durable_first:
            self.sync(len(self.events))
        fence = pulled.number if self.group.is_ordered else 0
        lots = [
            m.WireLot(lot.first, lot.attempt, [m.SequenceRange(*each) for each in lot.ranges], fence, lot.is_behind)
            for lot in pulled.lots
        ]
        spans = [span for lot in lots for span in lot.spans]
        meant = [
            (first, data)
            for first, data in self.batches
            if any(span.first < first + batch.peek(data).count and span.first + span.count > first for span in spans)
        ]
        attached = [m.AttachedBatch(first, WALL_MS) for first, _ in meant]
        return Answer(m.Pulled(pulled.number, lots, attached), [data for _, data in meant])

    def _settle(self, message: m.SettleAll, name: ConsumerName) -> Answer:
        settled = stale = 0
        for each in message.outcomes:
            ranges = [(span.first, span.count) for span in each.spans]
            decision = self.group.settle(
                name,
                SettleVerdict(each.kind),
                each.first,
                each.attempt,
                ranges,
                now_ms=self.now_ms,
                arrived=message.arrived,
                after_ms=each.after_ms,
                reason=each.reason,
                fence=each.fence,
            )
            self._do(decision)
            self._mark_dead(decision)
            settled += decision.settled
            stale += decision.stale
        return Answer(m.Settled(settled, stale))

    def _mark_dead(self, decision: GroupDecision) -> None:
        for dying in decision.dying:
            self._do(self.group.mark_dead(dying, now_ms=self.now_ms))

    def _do(self, decision: GroupDecision) -> None:
        code = CODES.get(decision.outcome)
        if code is not None:
            raise Refused(code, decision.sentence, retry_after_ms=decision.retry_after_ms)
        for event in decision.events:
            self.group.apply(event, self.now_ns)
            self.events.append(event)
        if decision.events:
            self.marks.append(len(self.events))

    def sync(self, upto: int) -> None:
        """An answer that waited for so many events has gone out."""
        self.durable = max(self.durable, upto)


@dataclass(slots=True)
class Wire:
    """A session's connection to the broker, step by step."""

    session: ClientSession
    broker: MiniBroker
    room: int = 8
    is_open: bool = False
    connection: object = field(default_factory=object)
    asked: list[Ask] = field(default_factory=list)  # written, not yet handled
    told: list[tuple[Ask, Told]] = field(default_factory=list)  # answered, not yet arrived
    marks: dict[int, int] = field(default_factory=dict)  # ask → the events that must be durable before it is answered
    parked: tuple[Ask, int] | None = None  # a pull that waits, and until when
    said: list[m.ControlMessage] = field(default_factory=list)  # all requests so far

    def open(self) -> None:
        self.connection = object()
        self.is_open = True
        self.session.opened(self.broker.now_ns)

    def cut(self) -> None:
        """The connection ends: nobody hears of what is on its way."""
        lost = [*self.asked, *(ask for ask, _ in self.told)]
        if self.parked is not None:
            lost.append(self.parked[0])
            self.parked = None
        self.asked.clear()
        self.told.clear()
        self.marks.clear()
        self.is_open = False
        for ask in lost:
            self.session.answered(ask.token, ConnectionLost("cut"), self.broker.now_ns)
        if isinstance(self.session, ConsumerSession):
            self.session.detach()

    def ask(self) -> int:
        """Let the session say what it wants to; how many requests that was."""
        in_flight = len(self.asked) + len(self.told) + (self.parked is not None)
        room = self.room - in_flight if self.is_open else 0
        asks = list(self.session.asks(max(room, 0), self.broker.now_ns))
        assert len(asks) <= max(room, 0)
        self.asked += asks
        self.said += [ask.message for ask in asks]
        return len(asks)

    def handle(self) -> bool:
        """The broker handles the next request."""
        if self.parked is not None:
            ask, until_ns = self.parked
            if self.broker.has_something() or self.broker.now_ns >= until_ns:
                self.parked = None
                self.told.append((ask, self.broker.handle(ask.message, self.connection)))
                return True
        if not self.asked:
            return False
        ask = self.asked.pop(0)
        told = self.broker.handle(ask.message, self.connection)
        message = ask.message
        if not isinstance(message, m.Pull | m.Heartbeat):
            self.marks[id(ask)] = len(self.broker.events)
        if isinstance(message, m.Leave) and self.parked is not None:
            self.told.append((self.parked[0], Answer(m.Pulled(0, [], []))))
            self.parked = None
        is_empty = isinstance(told, Answer) and isinstance(told.message, m.Pulled) and not told.message.lots
        if is_empty and isinstance(message, m.Pull) and message.wait_ms:
            self.parked = ask, self.broker.now_ns + message.wait_ms * MS_NS
        else:
            self.told.append((ask, told))
        return True

    def hear(self, at: int = 0) -> bool:
        """One of the answers arrives."""
        if not self.told:
            return False
        ask, told = self.told.pop(at % len(self.told))
        self.broker.sync(self.marks.pop(id(ask), 0))
        self.session.answered(ask.token, told, self.broker.now_ns)
        return True

    def settle_down(self, rounds: int = 200) -> None:
        """Until nobody has anything to say at this moment."""
        for _ in range(rounds):
            self.ask()
            if not (self.handle() | self.hear()):
                return
        raise AssertionError(f"no rest after {rounds} rounds: {self.said[-10:]}")

    def pass_time(self, ms: int) -> None:
        """Whatever the session wants to do meanwhile, it does in time."""
        until_ns = self.broker.now_ns + ms * MS_NS
        for _ in range(10_000):
            self.settle_down()
            due_ns = self.session.next_deadline()
            if self.parked is not None:
                due_ns = min(self.parked[1], due_ns or self.parked[1])
            if due_ns is None or due_ns > until_ns:
                self.broker.advance((until_ns - self.broker.now_ns) // MS_NS)
                self.settle_down()
                return
            step_ms = -(-(due_ns - self.broker.now_ns) // MS_NS)
            assert step_ms > 0, "a deadline that has come and brings nothing"
            self.broker.advance(step_ms)
        raise AssertionError("time does not pass")
