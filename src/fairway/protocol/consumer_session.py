"""The consumer half of a client, without a socket: join, prefetch, deliver, settle, renew the lease, leave.

    session = ConsumerSession(ConsumerOptions("order.changed", "hotel"), clock, rng, on_change=wake_the_line)
    line.add(session, now, session.detach)
    for message in session.take_messages(100): ...                  or on_messages=..., which gets lists of them
    message.ack()     message.retry(after=30)     message.reject("why")     message.release()        from any thread
    session.ack(messages)                                                     the same for many at once
    session.when_settled(messages, call)                                      call(None) when the outcome is durable
    session.drain(now)                     returns WAITING messages at once; finish the rest; then `is_finished`

The session sends one PULL at a time. Settlements leave at once while none is in flight, otherwise together after a
linger. After every new connection the session joins again before it sends anything else. Each JOIN carries the secret
that the session drew at its start, so the session resumes on any connection and at any copy of the broker.

`Message`'s methods and `ack` may be called from any thread. The session calls `on_change` from any thread, to ask for a
call of `asks` soon. All other methods need the line's thread or its owner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fairway import limits
from fairway.batch.identity import new_secret
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.names import GroupName
from fairway.protocol import messages as group_terms
from fairway.protocol.consumer_lease import Attempts, Doing, RequestToken
from fairway.protocol.consumer_options import (
    ConsumerCounts,
    ConsumerOptions,
    ConsumingEvent,
    Ended,
    Gap,
    HasJoined,
    JoinDelayed,
    Paused,
)
from fairway.protocol.delivery import DecodedBatches, Message, Unpacker, ack_all
from fairway.protocol.line import NS_PER_MS, Answer, Ask, ConnectionLost, RequestOutcome
from fairway.protocol.lots import Hook, SettlementQueue, StaleSettlement
from fairway.protocol.messages import ControlMessage as Control
from fairway.protocol.messages import (
    Done,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Pull,
    Pulled,
    Renewed,
    SettleAll,
    Settled,
    Terms,
)
from fairway.protocol.prefetch_buffer import KeyWaitList, PrefetchBuffer, PrefetchTarget
from fairway.protocol.settlements import SettlementSender, Settling, dead_letters
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

_UNREADABLE_MAX = 3  # unreadable answers in a row: damage on the way does not repeat like this
_REJOIN_MS = 1_000  # a session that joined this recently and must join again waits a little first
_SOON_MS = 50  # an empty answer that comes sooner than this did not wait: do not ask again at once

# Refusals that pass: the broker may grant the same request later.
_PASSING = frozenset(
    {Code.BUSY, Code.EXPIRED, Code.DRAINING, Code.NOT_MASTER, Code.READ_ONLY, Code.DAMAGED}
    | {Code.TOO_MANY_CONNECTIONS, Code.NO_SUCH_SUBJECT}
)
_JOIN_AGAIN = frozenset({Code.NOT_A_MEMBER, Code.STALE_CONFIG, Code.NO_SUCH_GROUP})


def _nothing(*_: object) -> None: ...  # for callbacks that the owner does not need


class ConsumerSession:
    """A consumer's session. `drain` or an `error` ends the session; then `is_finished` is True."""

    def __init__(
        self,
        options: ConsumerOptions,
        clock: Clock,
        rng: Rng,
        *,
        on_messages: Callable[[list[Message]], None] | None = None,
        on_event: Callable[[ConsumingEvent], None] | None = None,
        on_change: Callable[[], None] = _nothing,
        call: Callable[[ConsumerSession], None] = _nothing,
        on_news: Callable[[], None] = _nothing,
        on_join_delayed: Callable[[JoinDelayed], None] | None = None,
        broker_group: str = "",
        decoded: DecodedBatches | None = None,
    ) -> None:
        """With `on_messages` the session pushes messages as they arrive; otherwise `take_messages` has them. All
        sessions of one consumer share `decoded`; None: this session has a budget of its own. `call` is `Line.call` of a
        session on call. `on_news` is called when there may be messages, or an outcome was confirmed."""
        self.options = options
        self.consumer = options.consumer or f"c-{rng.bits(64):016x}"
        self.group = str(GroupName.parse(f"{options.group}.{self.consumer}")) if options.is_broadcast else options.group
        self._place = options.subject, self.group, self.consumer
        self._secret = new_secret(rng)
        self.error: FairwayError | None = None  # why the session ended by itself
        self.is_finished = False
        self.is_paused = False  # by the program, through `pause`
        self.is_paused_by_broker = False
        self.counts = ConsumerCounts()
        self.lease_ms = 0  # set by every JOIN; 0 before the first
        self._on_messages = on_messages
        self._on_event = on_event
        self._on_join_delayed = on_join_delayed
        self._on_change = on_change
        self._on_news = on_news
        self._call = call
        self._settlements = SettlementQueue(options.subject, options.group, clock, self._wake, broker_group)
        self._settlements.is_watched = on_event is not None
        self._clock = clock
        self._lease = self._settlements.lease
        self._settler = SettlementSender(
            self._settlements, rng, linger_ms=options.linger_ms, enough=options.settle_messages
        )
        self._unacked = self._settler.unacked
        decoded = decoded or DecodedBatches(options.decoded_bytes_max)
        self._unpacker = Unpacker(self._settlements, self._unacked, decoded)
        self._terms = Terms()
        self._config_version = 0
        self._buffer = PrefetchBuffer(self.counts, options.decoded_bytes_max)
        self._behind = KeyWaitList()
        self._arrived = 0
        self._ahead = PrefetchTarget(options.prefetch_messages, is_bound=on_messages is None)
        self._pulling = 0  # messages that the last PULL asked for
        self._attempts = {doing: Attempts(rng) for doing in Doing}
        self._is_open = self._is_joined = False
        self._joined_ns = self._join_sent_ns = 0
        self._is_cramped = False
        self._unreadable = 0
        self._life = 0  # counts connections
        self._stumbles = 0  # failures in strict order that the session has acted on
        self._spoke_ns = 0  # when the last request that renews the lease was sent
        self._is_draining = False
        self._room_since_ns: int | None = None
        self._leave_at_ns: int | None = None

    # --- the user ----------------------------------------------------------------------------------------------------

    def take_messages(self, most: int | None = None) -> list[Message]:
        """Return at most `most` messages to handle now; none while the session is paused or draining. Settle each one.

        In a group ordered by key, only messages whose key has no earlier unsettled message are returned. Messages that
        other consumers may hold by now are left out: they go back, or wait here until the broker answers again.
        """
        if self.is_paused:
            return []
        now_ns = self._clock.monotonic_ns()
        if self._behind.count and (most is None or self._buffer.count < most):
            self._admit(now_ns)
        self._call(self)  # there may be room to pull
        try:
            return self._buffer.take(most, now_ns)
        except RemoteProtocolError as error:  # the checksum was right, so the same bytes would come again
            self._finish(error)
            return []

    def set_take_count(self, count: int) -> None:
        """Keep `count` messages ready: the program takes that many at once, however long it then works on them."""
        self._ahead.take_count = count

    @property
    def waiting_count(self) -> int:
        """Messages in the prefetch buffer."""
        return self._buffer.count

    @property
    def has_ready(self) -> bool:
        """Whether `take_messages` would return some. False while paused, and for messages whose handout the broker may
        have forgotten while there is no connection to ask."""
        return not self.is_paused and self._buffer.has_ready

    @property
    def may_have_some(self) -> bool:
        """Whether `take_messages` has messages, or may have some now that others have been settled."""
        return self._buffer.count > 0 or self._behind.count > 0

    def _wake(self) -> None:
        self._call(self)
        self._on_change()

    @property
    def held_count(self) -> int:
        """Messages here whose outcome has not been sent, as of the last look; messages with handlers included."""
        return self._unacked.held

    @property
    def unconfirmed_count(self) -> int:
        """Messages whose outcome the broker has not confirmed, `held_count` included."""
        return self._unacked.owed

    @property
    def is_quiet(self) -> bool:
        """Whether the broker has confirmed everything that was settled so far."""
        return self._settler.is_idle

    def ack(self, messages: Sequence[Message]) -> None:
        """Ack all. Misuse at the first that was settled before; the earlier ones hold."""
        ack_all(messages)

    def when_settled(self, messages: Sequence[Message], call: Hook) -> None:
        """`call(None)` once the broker has confirmed the outcome of all `messages`. If that cannot happen, the call
        gets `StaleSettlement` or the error that ended the session. Each message must have been settled before."""
        self._settler.when_settled(messages, call)

    def pause(self) -> None:
        """Stop pulling and delivering until `resume`. Messages that are held stay held."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._push()
        self._settlements.call()

    def hand_back(self) -> int:
        """Return WAITING messages to the broker, and count them. Pause first, or the session pulls as many again."""
        count = self._give_back()
        self._settlements.call()
        return count

    def drain(self, now_ns: int, until_ns: int | None = None) -> None:
        """Begin to end: stop pulling, and return WAITING messages at once. The session leaves the group when the user
        has settled the rest, or at `until_ns`; the broker then takes back what is left. Then `is_finished` is True.
        Another call may set an earlier end."""
        if until_ns is not None:
            self._leave_at_ns = until_ns if self._leave_at_ns is None else min(self._leave_at_ns, until_ns)
        self._is_draining = True
        self._give_back()
        if self.lease_ms == 0 and not self._attempts[Doing.JOIN].is_in_flight:
            self._finish(None)  # it never was a member
        self._settlements.call()

    def abandon(self) -> None:
        """End now, without another request to the broker. Other consumers get what is held when the lease runs out."""
        self._finish(None)

    def detach(self) -> None:
        """Note that the connection is lost: WAITING messages that are not durable wait for the next answer to JOIN."""
        self._is_open = self._is_joined = False
        self._lease.detach()

    # --- the line ----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self.detach()
        self._life += 1
        self._is_open = True
        self._settler.hurry()
        for attempts in self._attempts.values():
            attempts.abandon()

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        self._settlements.is_called = False
        asks: list[Ask] = []
        if self.is_finished:
            return asks
        while self._behind.count and self._admit(now_ns):
            self._push()
            self._on_news()
        if self._settlements.dirty:
            self._settler.gather(now_ns, is_urgent=self._is_draining)
            self._on_news()
        if self._stumbles != self._settlements.stumbles:
            self._stumbles = self._settlements.stumbles
            self._give_back()
        self._is_cramped = room < 1 or not self._is_open
        if self._is_cramped:
            return asks
        if not self._is_joined:
            self._join(asks, now_ns)
            return asks
        self._settle(asks, room, now_ns)
        for step in (self._leave, self._pull, self._beat):
            if len(asks) < room:
                step(asks, now_ns)
            else:
                self._is_cramped = True
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if self.is_finished:
            return
        if isinstance(token, Settling):
            self._on_settle_outcome(token, outcome, now_ns)
        elif isinstance(token, RequestToken) and token.life == self._life:
            if isinstance(outcome, ConnectionLost):
                self.detach()
                self._attempts[token.doing].abandon()
            elif isinstance(outcome, Refused):
                self._on_refused(token, outcome, now_ns)
            else:
                self._on_answer(token, outcome, now_ns)
        self._on_news()

    def next_deadline(self) -> int | None:
        if self.is_finished or self._is_cramped or not self._is_open:
            return None
        if not self._is_joined:
            return self._attempts[Doing.JOIN].due_ns(0)
        dues = (
            self._settler.next_deadline_ns(is_urgent=self._is_draining),
            self._attempts[Doing.HEARTBEAT].due_ns(self._beat_due_ns()),
            self._attempts[Doing.PULL].due_ns(self._pull_due_ns()),
            self._attempts[Doing.LEAVE].due_ns(self._leave_due_ns()),
        )
        return min((due for due in dues if due is not None), default=None)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, asks: list[Ask], doing: Doing, message: Control, now_ns: int) -> None:
        self._attempts[doing].is_in_flight = True
        self._spoke_ns = now_ns
        asks.append(Ask(message, (), RequestToken(doing, now_ns, self._life, self._settlements.stumbles)))

    def _join(self, asks: list[Ask], now_ns: int) -> None:
        if self._attempts[Doing.JOIN].may_ask(now_ns):
            options = self.options
            wanted = options.start, options.is_broadcast, options.policies.encoded
            join = Join(*self._place, options.config_version, self._arrived, *wanted, self._secret)
            self.counts.joins += 1
            self._ask(asks, Doing.JOIN, join, now_ns)

    def _settle(self, asks: list[Ask], room: int, now_ns: int) -> None:
        for outcomes, token in self._settler.take(room, now_ns, is_urgent=self._is_draining):
            self._spoke_ns = now_ns
            asks.append(Ask(SettleAll(*self._place, outcomes, self._arrived), (), token))

    def _pull(self, asks: list[Ask], now_ns: int) -> None:
        waiting = self._buffer.count + self._behind.count
        self._ahead.look(waiting, self.counts.handed_out + waiting - self._unacked.held, now_ns, is_idle=self.is_paused)
        messages, size = self._room()
        if messages < 1 or size < 1:
            self._room_since_ns = None
            return
        if self._attempts[Doing.PULL].is_in_flight:
            return  # what the answer leaves free counts from then
        self._room_since_ns = now_ns if self._room_since_ns is None else self._room_since_ns
        due_ns = self._pull_due_ns()
        if due_ns is None or now_ns < due_ns or not self._attempts[Doing.PULL].may_ask(now_ns):
            return
        self._room_since_ns = None
        most_ms = self.lease_ms // 2
        wait_ms = most_ms if self.options.wait_ms is None else min(self.options.wait_ms, most_ms)
        self._pulling = messages
        bounds = limits.RUN_MESSAGES_MAX, not self._behind.has_refused
        pull = Pull(*self._place, messages, size, wait_ms, self._arrived, *bounds)
        self._ask(asks, Doing.PULL, pull, now_ns)

    def _room(self) -> tuple[int, int]:
        """How many more messages and bytes the session may hold."""
        unacked, options = self._unacked, self.options
        if unacked.owed - unacked.held > 2 * options.prefetch_messages + limits.LOT_MESSAGES_MAX:
            return 0, 0  # the broker confirms more slowly than the user settles
        waiting = self._buffer.count + self._behind.count
        messages = min(options.prefetch_messages - unacked.held, self._ahead.limit - waiting)
        return messages, options.prefetch_bytes - unacked.held_bytes

    def _pull_due_ns(self) -> int | None:
        """None: no pull now. A little room waits for more while settlements linger: small pulls are expensive."""
        if self._is_draining or self.is_paused or self._room_since_ns is None:
            return None
        if self._settlements.is_strict and not self._settler.is_all_sent:
            return None  # otherwise a message behind a failed one would arrive before the failed one
        messages, size = self._room()
        is_much = 2 * messages >= self._ahead.limit and 2 * size >= self.options.prefetch_bytes
        is_wanted = self._on_messages is None and not self.may_have_some
        return 0 if is_much or is_wanted else self._room_since_ns + round(self.options.linger_ms * NS_PER_MS)

    def _beat(self, asks: list[Ask], now_ns: int) -> None:
        if now_ns >= self._beat_due_ns() and self._attempts[Doing.HEARTBEAT].may_ask(now_ns):
            self._ask(asks, Doing.HEARTBEAT, Heartbeat(*self._place, self._arrived), now_ns)

    def _beat_due_ns(self) -> int:
        """A third of a lease after the last request, and before another copy of the broker may become master. While a
        pull waits and nothing is unconfirmed, two thirds: the pull renews the lease."""
        third_ns = self.lease_ms * NS_PER_MS // 3
        if self._attempts[Doing.PULL].is_in_flight and not self._unacked.owed:
            return self._spoke_ns + 2 * third_ns
        return min(self._spoke_ns + third_ns, self._lease.confirm_due_ns())

    def _leave(self, asks: list[Ask], now_ns: int) -> None:
        due_ns = self._leave_due_ns()
        if due_ns is not None and now_ns >= due_ns and self._attempts[Doing.LEAVE].may_ask(now_ns):
            self._ask(asks, Doing.LEAVE, Leave(*self._place, self._arrived), now_ns)

    def _leave_due_ns(self) -> int | None:
        if not self._is_draining:
            return None
        return 0 if not self._unacked.held and self._settler.is_idle else self._leave_at_ns

    # --- answers -----------------------------------------------------------------------------------------------------

    def _on_answer(self, token: RequestToken, outcome: Answer, now_ns: int) -> None:
        message = outcome.message
        if token.doing is not Doing.JOIN:
            self._lease.renew(token.sent_ns, self.lease_ms)
        if isinstance(message, Pulled):
            self._on_pulled(token, message, outcome.attachments, now_ns)
            return
        self._attempts[token.doing].granted()
        if isinstance(message, Joined):
            self._on_joined(token, message, now_ns)
        elif isinstance(message, Renewed):
            self._on_renewed(token, message, now_ns)
        elif isinstance(message, Done):
            self._finish(None)

    def _on_joined(self, token: RequestToken, told: Joined, now_ns: int) -> None:
        try:
            self._terms = group_terms.read(told.config)
        except RemoteProtocolError as error:
            self._finish(error)
            return
        self._settlements.is_strict = self._terms.order == "strict"
        self._settler.is_by_key = self._behind.is_by_key = self._terms.order == "key"
        self._settlements.attempts_max = self._terms.attempts_max
        if objection := self.options.objection(self._terms):
            self._finish(Refused(Code.STALE_CONFIG, f"group {self.group} {objection}"))
            return
        is_first = not self.lease_ms
        self.lease_ms = told.lease_ms
        self._config_version = told.config_version
        self._is_joined = True
        self._joined_ns = now_ns
        self._join_sent_ns = token.sent_ns
        was_over = self._lease.is_over(now_ns)
        if not self._lease.join(token.sent_ns, told) or was_over:
            self._lapse(-1 if was_over else told.number)
        self._tell(HasJoined(told.config_version, told.lease_ms, is_first))
        self._push()
        if told.has_gap:
            self.counts.gaps += 1
            self._tell(Gap())

    def _on_pulled(self, token: RequestToken, told: Pulled, attachments: Sequence[Bytes], now_ns: int) -> None:
        attempts = self._attempts[Doing.PULL]
        if not told.lots:
            if now_ns - token.sent_ns < _SOON_MS * NS_PER_MS:
                attempts.put_off(now_ns)
            else:
                attempts.granted()
            return
        if told.number <= self._arrived:
            self.counts.repeated += sum(span.count for lot in told.lots for span in lot.spans)
            attempts.put_off(now_ns)
            return
        try:
            unpacked = self._unpacker.unpack(told, attachments, self._terms)
        except RemoteProtocolError as error:
            self._on_unreadable(error, now_ns)
            return
        self._unreadable = 0
        attempts.granted()
        self._lease.confirm(token.sent_ns, told.leads_ms)
        self._arrived = told.number
        self.counts.repeated += unpacked.repeated
        self.counts.filtered += unpacked.filtered
        self.counts.absent += unpacked.absent
        self._buffer.put(unpacked.runs)
        self._buffer.put(self._behind.add(unpacked.runs, unpacked.behind, unpacked.linked))
        fresh = sum(run.end - run.first for run in (*unpacked.runs, *unpacked.behind))
        self._ahead.arrived(self._pulling, fresh + unpacked.filtered)
        if self._is_draining or token.stumbles != self._settlements.stumbles or token.sent_ns < self._join_sent_ns:
            self._give_back()  # the last: the broker may have given up that member before the JOIN
        self._push()

    def _on_unreadable(self, error: RemoteProtocolError, now_ns: int) -> None:
        """Count the response as not arrived: the broker sends it again."""
        self._unreadable += 1
        if self._unreadable >= _UNREADABLE_MAX:
            self._finish(error)
        else:
            self._attempts[Doing.PULL].put_off(now_ns)

    def _on_renewed(self, token: RequestToken, told: Renewed, now_ns: int) -> None:
        self._lease.confirm(token.sent_ns, told.leads_ms)
        if told.config_version != self._config_version:
            self._rejoin(now_ns)
        if told.is_paused != self.is_paused_by_broker:
            self.is_paused_by_broker = told.is_paused
            self._tell(Paused(told.is_paused))

    def _on_settle_outcome(self, token: Settling, outcome: RequestOutcome, now_ns: int) -> None:
        if isinstance(outcome, Answer) and isinstance(outcome.message, Settled):
            self._lease.renew(token.sent_ns, self.lease_ms)
            self.counts.settled += outcome.message.settled
            self.counts.stale += outcome.message.stale
            self._settler.confirmed(token, outcome.message)
            if self._on_event is not None:
                for event in dead_letters(token, outcome.message):
                    self._tell(event)
            return
        self._settler.returned(token, now_ns)
        if isinstance(outcome, ConnectionLost):
            self.detach()
        elif isinstance(outcome, Refused):
            if outcome.code not in _JOIN_AGAIN:  # after a JOIN settlements go out before any pull
                self._settler.put_off(now_ns, outcome.retry_after_ms)
            self._heed(outcome, now_ns)

    def _on_refused(self, token: RequestToken, refused: Refused, now_ns: int) -> None:
        doing = token.doing
        if doing is Doing.JOIN and refused.code is Code.BUSY:
            self._delay_join(refused, now_ns)
        if refused.code not in _JOIN_AGAIN:
            self._attempts[doing].put_off(now_ns, refused.retry_after_ms)
            self._heed(refused, now_ns)
        elif doing is Doing.LEAVE:
            self._finish(None)
        elif doing is Doing.JOIN:
            self._finish(refused)  # the consumer was written for another configuration
        else:
            self._attempts[doing].abandon()
            self._heed(refused, now_ns)

    def _delay_join(self, refused: Refused, now_ns: int) -> None:
        """Report the delay, because a JOIN may wait for a lease to end. A draining session that was never a member just
        ends."""
        if self._on_join_delayed is not None:
            self._on_join_delayed(JoinDelayed(*self._place, refused.sentence, now_ns))
        if self._is_draining and not self.lease_ms:
            self._finish(None)

    def _heed(self, refused: Refused, now_ns: int) -> None:
        """Act on a refusal, beyond trying again later."""
        if refused.code in _JOIN_AGAIN:
            if refused.code is Code.NOT_A_MEMBER:
                self._lapse(-1)
            self._rejoin(now_ns)
        elif refused.code is Code.NOT_MASTER:
            self._lease.detach()
        elif refused.code is Code.FENCED:
            sentence = f"another process consumes as {self.consumer} in group {self.group}: {refused.sentence}"
            self._finish(Refused(Code.FENCED, sentence))
        elif refused.code not in _PASSING:
            self._finish(refused)

    # --- within ------------------------------------------------------------------------------------------------------

    def _rejoin(self, now_ns: int) -> None:
        """Join again at once, unless the last JOIN was less than `_REJOIN_MS` ago."""
        if self._is_joined:
            self._is_joined = False
            if now_ns - self._joined_ns < _REJOIN_MS * NS_PER_MS:
                self._attempts[Doing.JOIN].put_off(now_ns)

    def _admit(self, now_ns: int) -> bool:
        """Make the next run of each key ready once the run before it is acked; False: none became ready. Nothing begins
        after the lease, because other consumers may have the key by then."""
        ready = self._behind.look(may_begin=now_ns < self._lease.end_ns)
        self._buffer.put(ready)
        return bool(ready)

    def _push(self) -> None:
        left = self._buffer.count  # no more than are here now: the caller bounds further rounds
        while left > 0 and self._on_messages is not None and (taken := self.take_messages(left)):
            left -= len(taken)
            self._on_messages(taken)

    def _lapse(self, known: int) -> None:
        """Mark handouts as lapsed that other consumers may hold. `known` -1: the lease may have run out, so all but
        those settled by delivery. Otherwise the broker knows of no response after number `known`: later handouts that
        are not durable. Then release WAITING messages by name: one that is still ours would otherwise reach nobody,
        and the broker ignores the release of any other."""
        for lot in self._unacked:
            is_known = lot.is_final if known < 0 else lot.is_durable or lot.number <= known
            lot.is_lapsed = lot.is_lapsed or not is_known
        if any(lot.is_lapsed for lot in self._unacked):
            self.counts.lapsed += self._give_back()

    def _give_back(self) -> int:
        """Return WAITING messages to the broker, and count them. Draining drops those that cannot be returned."""
        return self._buffer.give_back(self._behind.give_up(), is_last=self._is_draining)

    def _tell(self, event: ConsumingEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _finish(self, error: FairwayError | None) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self.error = error
        self._buffer.clear()
        self._behind.give_up()
        self._lease.end()
        reason = "the consumer has ended, and what it held goes to others" if error is None else str(error)
        self._settlements.ended = reason
        self._settler.end(error or StaleSettlement(reason))
        self._tell(Ended(error))
        self._on_news()
        # Messages are not tracked by the garbage collector, so cycles through them must be cut here.
        self._on_messages = self._on_event = self._settlements.on_change = None
        self._on_news = _nothing
