"""A client's line to one broker: one connection at a time, reconnected for ever, shared by sessions.

The owner of the socket (a thread, a loop, a simulation) drives the line:

    when `dial_due()` has come: connect           then `connected(now)`, or `unreachable(sentence, now)`
    line.feed(data, now)                          the bytes that arrived
    transport.writelines(line.take(now))          after every call, after giving a session work, and at `next_deadline`
    if line.is_over(): close the transport        then `lost(sentence, now)`; also when the transport ends by itself
    for call in line.callbacks(): call()          callbacks of users, outside any lock
    line.close(now)                               say goodbye; `is_closed` when the connection has ended

Sessions (a producer, a consumer, a query of the command line) share the line through the `ClientSession` protocol. The
line asks each session for its requests, writes them, and brings each outcome back. No session sees a socket, a byte of
framing or a clock. Every request gets exactly one outcome. `ConnectionLost` means that nobody knows whether the broker
carried the request out.

A client has two or three sessions that the line asks at every `take`, and perhaps hundreds of consumers. So a consumer
is *on call*: the line asks it only after `call`, after an outcome or a new connection, and when its deadline has come.
The cost of an event does not grow with the number of sessions on call (bench/client_consume).

`RetryDelays` computes the wait before the next attempt: twice as long each time, up to a bound, with random spread.

Where each copy of a broker has an address of its own, one copy is the master and the others refuse as NOT_MASTER. After
such a refusal the line waits a moment for the answers still on their way, ends the connection and dials again. The
owner then begins with the next address, because `moves_on()` returns True. Sessions repeat there what the last copy
refused.

The line has no lock of its own: its owner calls it under a lock, or from one loop. Time is an argument everywhere, on
one monotonic clock in ns.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol, TypeAlias

import msgspec

from fairway.errors import Code, Misuse, Refused
from fairway.protocol.connection import Connection
from fairway.protocol.connection_states import (
    Closed,
    ConnectionEvent,
    ConnectionOptions,
    HandshakeDone,
    PeerLeaving,
    RefusalReceived,
    ResponseReceived,
    Role,
    Why,
)
from fairway.protocol.frames import FrameTooLarge
from fairway.protocol.messages import ControlMessage
from fairway.runtime.buffers import Bytes
from fairway.runtime.rng import Rng


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A request that a session wants to make; `token` comes back with its outcome."""

    message: ControlMessage
    attachments: Sequence[Bytes] = ()
    token: object = None


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The broker's answer to a request."""

    message: ControlMessage
    attachments: Sequence[Bytes] = ()


@dataclass(slots=True, frozen=True)
class ConnectionLost:
    """The connection ended before an answer came: the broker may or may not have carried out the request."""

    sentence: str


RequestOutcome: TypeAlias = Answer | Refused | ConnectionLost


class ClientSession(Protocol):
    """A user of a line. Only the line calls these methods, in one thread at a time."""

    def opened(self, now_ns: int) -> None:
        """The connection is open, for the first time or again; the broker may have restarted meanwhile."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        """Requests to send now, at most `room`. The line calls this at every `take`, or if on call, when called."""

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """Take the outcome of a request."""

    def next_deadline(self) -> int | None:
        """When the line must call `asks` even if nothing happens, on the monotonic clock in ns; None: never."""


NS_PER_MS = 1_000_000
# The server has done nothing, and the line looks for another one: a session need not wait by itself.
ELSEWHERE: Final = frozenset({Code.NOT_MASTER, Code.DRAINING})


class RetryDelays:
    """The waits between attempts at one operation.

    Half of a wait is fixed and half is random, so that a thousand clients that lost the same broker come back spread
    out. A wait that the other side asked for is the minimum, and the random half comes on top.
    """

    __slots__ = ("_failures", "_first_ms", "_most_ms", "_rng")

    def __init__(self, rng: Rng, *, first_ms: int, most_ms: int) -> None:
        self._rng = rng
        self._first_ms = first_ms
        self._most_ms = most_ms
        self._failures = 0

    def next_ns(self, retry_after_ms: int | None = None) -> int:
        """Return the wait after one more failure."""
        wait_ms = min(self._first_ms << min(self._failures, 30), self._most_ms)
        self._failures += 1
        fixed_ms = wait_ms / 2 if retry_after_ms is None else retry_after_ms
        return round((fixed_ms + self._rng.uniform() * wait_ms / 2) * NS_PER_MS)

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


class CircuitBreaker:
    """One producer's view of one broker: when the broker fails again and again, `add` can raise at once.

        CLOSED      the broker works                   → OPEN after `failures_max` failures in a row
        OPEN        no message is admitted             → HALF OPEN when the time is up
        HALF OPEN   one probe is admitted              → CLOSED by a success, OPEN again by a failure

    The breaker guards the buffer, not the wire: the producer keeps resending buffered batches, and any success closes
    the circuit.
    """

    __slots__ = ("_failures", "_failures_max", "_open_ns", "_probe_at_ns", "is_open", "sentence")

    def __init__(self, *, failures_max: int, open_ms: int) -> None:
        self.is_open = False  # True also while half open
        self.sentence = ""  # the last failure, for people; empty when all is well
        self._failures = 0
        self._failures_max = failures_max
        self._open_ns = open_ms * NS_PER_MS
        self._probe_at_ns = 0

    def failed(self, sentence: str, now_ns: int) -> None:
        """Count a failure. A failing probe opens the circuit for a whole term again."""
        self.sentence = sentence
        self._failures += 1
        if self._failures >= self._failures_max:
            if not self.is_open or now_ns >= self._probe_at_ns:
                self._probe_at_ns = now_ns + self._open_ns
            self.is_open = True

    def succeeded(self) -> None:
        self._failures = 0
        self.is_open = False
        self.sentence = ""

    def admits(self, now_ns: int) -> bool:
        """Whether one more message may pass; while the circuit is open, one probe per term."""
        if not self.is_open:
            return True
        if now_ns < self._probe_at_ns:
            return False
        self._probe_at_ns = now_ns + self._open_ns
        return True


Callback = Callable[[], None]

NEVER_NS = 1 << 63
_OLD_ALARMS_MAX = 64  # of all sessions on call, and one for each
STRAY_MS = 500  # wait for answers of a copy that is not master: it refuses whatever it has read, which takes no time
STRAY_WAIT_MS_MAX = 500  # between attempts at copies that are not master: the next master is about to be elected


@dataclass(frozen=True, slots=True)
class ReconnectOptions:
    """How a line reconnects and closes."""

    hello: ConnectionOptions = field(default_factory=ConnectionOptions)
    backoff_first_ms: int = 50  # a broker that restarts is back within a second
    backoff_most_ms: int = 5_000  # a broker that was away for an hour is found within five seconds
    drain_ms: int = 10_000  # how long `close` waits for answers

    def __post_init__(self) -> None:
        if not 1 <= self.backoff_first_ms <= self.backoff_most_ms or self.drain_ms < 0:
            raise Misuse(
                "a line waits at least 1 ms between attempts, at most backoff_most_ms, and drains in 0 ms or more"
            )


class Line:
    """A client's line to one broker. Sessions may come and go at any time."""

    def __init__(
        self,
        rng: Rng,
        options: ReconnectOptions | None = None,
        *,
        now_ns: int = 0,
        on_trouble: Callable[[str, int], None] | None = None,
        on_open: Callable[[int], None] | None = None,
    ) -> None:
        """The line calls `on_trouble` each time a connection fails or is lost, and `on_open` after each handshake: for
        a circuit breaker, or a log."""
        self.options = options or ReconnectOptions()
        self.is_closed = False
        self.connections = 0  # opened so far, handshake included
        self.trouble: str | None = None  # why there is no open connection; None while there is one, or none was tried
        self.peer: HandshakeDone | None = None  # the handshake with the last broker
        self._on_trouble = on_trouble
        self._on_open = on_open
        self._backoff = RetryDelays(rng, first_ms=self.options.backoff_first_ms, most_ms=self.options.backoff_most_ms)
        self._dial_at_ns: int | None = now_ns
        self._connection: Connection | None = None
        self._opened_ns: int | None = None
        self._retry_after_ms: int | None = None  # as the broker asked when it left
        self._leave_at_ns: int | None = None  # closing: when the wait for answers ends
        self._astray: Refused | None = None  # the NOT_MASTER refusal of this connection
        self._stray_by_ns: int | None = None  # when the wait for the last answers of that copy ends
        self._straying = RetryDelays(
            rng,
            first_ms=self.options.backoff_first_ms,
            most_ms=max(self.options.backoff_first_ms, min(self.options.backoff_most_ms, STRAY_WAIT_MS_MAX)),
        )
        self._is_moved = False  # `move` was called: dial again without a wait
        self._moves_on = False
        self._sessions: list[ClientSession] = []  # asked at every `take`
        self._dues: dict[ClientSession, int | None] = {}  # sessions on call, with their deadlines
        self._alarms: list[tuple[int, int, ClientSession]] = []  # a heap of these; an alarm that is no deadline is old
        self._alarm_numbers = count()
        self._called: deque[ClientSession] = deque()  # on call, and to be asked; some twice
        self._called_first = False
        self._on_lost: dict[int, Callable[[], None]] = {}  # by the id of the session
        self._asked: dict[int, tuple[ClientSession, Ask]] = {}  # by correlation id
        self._callbacks: list[Callback] = []

    # --- sessions ----------------------------------------------------------------------------------------------------

    def add(
        self,
        session: ClientSession,
        now_ns: int,
        on_lost: Callable[[], None] | None = None,
        *,
        is_on_call: bool = False,
    ) -> None:
        """Add a session; if the line is open the session gets `opened` at once. The line calls `on_lost` when a
        connection ends, also if the session has no request in flight."""
        if is_on_call:
            self._dues[session] = None
            self.call(session)
        else:
            self._sessions.append(session)
        if on_lost is not None:
            self._on_lost[id(session)] = on_lost
        if self.is_open:
            session.opened(now_ns)

    def call(self, session: ClientSession) -> None:
        """Have a session on call asked at the next `take`. For any thread, without the owner's lock."""
        self._called.append(session)

    def remove(self, session: ClientSession) -> None:
        """Remove a session. The broker still answers its requests, and the line drops the answers."""
        self._sessions = [each for each in self._sessions if each is not session]
        self._dues.pop(session, None)
        self._on_lost.pop(id(session), None)
        self._asked = {number: pair for number, pair in self._asked.items() if pair[0] is not session}

    @property
    def sessions(self) -> int:
        """The number of sessions."""
        return len(self._sessions) + len(self._dues)

    def run_later(self, callback: Callback) -> None:
        """For sessions: have the owner call `callback` without its lock."""
        self._callbacks.append(callback)

    # --- what the owner asks -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether sessions can send requests now."""
        return self._connection is not None and self._connection.is_open

    @property
    def features(self) -> tuple[str, ...]:
        """The features that both sides have; empty while the line is not open."""
        return self._connection.features if self._connection is not None and self._connection.is_open else ()

    def dial_due(self) -> int | None:
        """When to connect; None: not now (connected), or never again (closed)."""
        return self._dial_at_ns

    def moves_on(self) -> bool:
        """Whether to dial the next address first, because the last copy is not master or did not speak. True once."""
        moves_on, self._moves_on = self._moves_on, False
        return moves_on

    def is_over(self) -> bool:
        """The connection has ended: write everything taken, close the transport, then call `lost`."""
        return self._connection is not None and self._connection.closed is not None

    def next_deadline(self) -> int | None:
        """When the owner must call `take` although nothing happens; None: never."""
        dues = [due for session in self._sessions if (due := session.next_deadline()) is not None]
        alarms = self._alarms
        while alarms and self._dues.get(alarms[0][2]) != alarms[0][0]:
            heapq.heappop(alarms)
        if alarms:
            dues.append(alarms[0][0])
        if self._connection is not None and (due := self._connection.next_deadline()) is not None:
            dues.append(due)
        if self._leave_at_ns is not None and self._connection is not None and not self.is_over():
            dues.append(self._leave_at_ns)
        if self._stray_by_ns is not None and not self.is_over():
            dues.append(self._stray_by_ns)
        return min(dues, default=None)

    def callbacks(self) -> list[Callback]:
        """Take the callbacks of users, in order. The owner calls them without its lock."""
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    # --- the transport -----------------------------------------------------------------------------------------------

    def connected(self, now_ns: int) -> None:
        """The transport is connected: begin the handshake. If the line was closed meanwhile, `is_over` is True at
        once."""
        if self._connection is not None:
            raise Misuse("a line has one connection at a time: report the end of the one before")
        self._dial_at_ns = None
        self._connection = Connection(Role.CLIENT, now_ns, self.options.hello)
        if self._leave_at_ns is not None:
            self._connection.drain("the client leaves")

    def unreachable(self, sentence: str, now_ns: int) -> None:
        """Nobody accepted the connection."""
        self._part(sentence, now_ns)

    def feed(self, data: Bytes, now_ns: int) -> None:
        """Take the bytes that arrived."""
        if self._connection is not None:
            for event in self._connection.feed(data, now_ns):
                self._on_event(event, now_ns)
            if self._astray is not None and self._stray_by_ns is None:
                self._stray_by_ns = now_ns + STRAY_MS * NS_PER_MS
                self._connection.drain("this copy does not lead")
            self._notice_end(now_ns)

    def take(self, now_ns: int) -> list[Bytes]:
        """Do what is due, ask the sessions, and return the bytes to write. Sessions are asked here and nowhere else."""
        connection = self._connection
        if connection is None:
            self._collect(None, now_ns)
            return []
        if now_ns >= min(self._leave_at_ns or NEVER_NS, self._stray_by_ns or NEVER_NS):
            connection.lost()
        connection.on_time(now_ns)
        self._notice_end(now_ns)
        self._collect(connection, now_ns)
        return connection.take()

    def lost(self, sentence: str, now_ns: int) -> None:
        """The transport is closed, by either side."""
        if self._connection is None:
            return
        self._connection.lost()
        self._notice_end(now_ns)
        closed = self._connection.closed
        self._connection = None
        said = closed.sentence if closed is not None and closed.why is not Why.LOST else sentence
        if self._opened_ns is None:  # accepted and silent: a proxy without a server behind it, or a stopped process
            self._moves_on = True
        self._part(said if self._astray is None else str(self._astray), now_ns)

    def move(self, now_ns: int) -> None:
        """End the connection, if there is one, and dial again without a wait: the caller knows a better address."""
        if self._leave_at_ns is not None:
            return
        self._is_moved = True
        if self._connection is not None:
            self._connection.lost()
            self._notice_end(now_ns)
        else:
            self._dial_at_ns = now_ns

    def close(self, now_ns: int, *, patience_ms: int | None = None) -> None:
        """Send no more requests, wait up to `patience_ms` (None: `drain_ms`) for answers in flight, and say goodbye."""
        if self._leave_at_ns is not None:
            return
        self._leave_at_ns = now_ns + (self.options.drain_ms if patience_ms is None else patience_ms) * NS_PER_MS
        self._dial_at_ns = None
        if self._connection is None:
            self.is_closed = True
        else:
            self._connection.drain("the client leaves")
            self._notice_end(now_ns)

    # --- within ------------------------------------------------------------------------------------------------------

    def _collect(self, connection: Connection | None, now_ns: int) -> None:
        """Ask the sessions. Each time another one is the first, so that no session takes all the room."""
        sessions = self._sessions
        self._called_first = not self._called_first
        if self._called_first:
            self._collect_called(connection, now_ns)
        for session in tuple(sessions):
            room = connection.room if connection is not None else 0
            for ask in session.asks(room, now_ns):
                self._ask(session, ask, now_ns)
        if len(sessions) > 1:
            sessions.append(sessions.pop(0))
        if not self._called_first:
            self._collect_called(connection, now_ns)

    def _collect_called(self, connection: Connection | None, now_ns: int) -> None:
        """Ask the sessions that were called or are due. Those for whom there is no room stay called, in order."""
        called, alarms, dues = self._called, self._alarms, self._dues
        while alarms and alarms[0][0] <= now_ns:
            due_ns, _, session = heapq.heappop(alarms)
            if dues.get(session) == due_ns:
                dues[session] = None
                called.append(session)
        for _ in range(len(called)):
            room = connection.room if connection is not None else 0
            if not room and connection is not None and connection.is_open:
                return
            session = called.popleft()
            if session not in dues:
                continue
            asks = list(session.asks(room, now_ns))
            for ask in asks:
                self._ask(session, ask, now_ns)
            if room and len(asks) >= room:
                called.append(session)  # it may want more
            self._set_alarm(session)

    def _set_alarm(self, session: ClientSession) -> None:
        """Set the alarm of a session on call, after it was asked."""
        due_ns = session.next_deadline()
        if due_ns == self._dues[session]:
            return
        self._dues[session] = due_ns
        if due_ns is None:
            return
        heapq.heappush(self._alarms, (due_ns, next(self._alarm_numbers), session))
        if len(self._alarms) > 2 * len(self._dues) + _OLD_ALARMS_MAX:
            self._alarms = [(due, next(self._alarm_numbers), of) for of, due in self._dues.items() if due is not None]
            heapq.heapify(self._alarms)

    def _ask(self, session: ClientSession, ask: Ask, now_ns: int) -> None:
        connection = self._connection
        if connection is None or not connection.room:
            session.answered(ask.token, Refused(Code.BUSY, "the connection has no room for one more request"), now_ns)
            return
        try:
            correlation = connection.request(ask.message, ask.attachments)
        except FrameTooLarge as error:
            session.answered(ask.token, Refused(Code.TOO_LARGE, str(error)), now_ns)
            return
        self._asked[correlation] = (session, ask)

    def _on_event(self, event: ConnectionEvent, now_ns: int) -> None:
        if isinstance(event, ResponseReceived):
            self._backoff.reset()  # not after a handshake alone: the first request may kill a sick broker
            self._straying.reset()
            self._answer(event.correlation, Answer(event.message, event.attachments), now_ns)
        elif isinstance(event, RefusalReceived):
            if event.refused.code is Code.NOT_MASTER:
                self._astray = event.refused
            self._answer(event.correlation, event.refused, now_ns)
        elif isinstance(event, HandshakeDone):
            self.peer = event
            self.connections += 1
            self._opened_ns = now_ns
            self.trouble = None
            if self._on_open is not None:
                self._on_open(now_ns)
            self._called.extend(self._dues)
            for session in (*self._sessions, *self._dues):
                session.opened(now_ns)
        elif isinstance(event, PeerLeaving):
            self._retry_after_ms = event.retry_after_ms

    def _answer(self, correlation: int, outcome: RequestOutcome, now_ns: int) -> None:
        asked = self._asked.pop(correlation, None)
        if asked is not None:  # otherwise its session has been removed
            session, ask = asked
            session.answered(ask.token, outcome, now_ns)
            if session in self._dues:
                self._called.append(session)

    def _notice_end(self, now_ns: int) -> None:
        """If the connection has ended, report every request in flight as lost."""
        closed = self._connection.closed if self._connection is not None else None
        if closed is None:
            return
        self._retry_after_ms = _longer(self._retry_after_ms, closed)
        asked, self._asked = self._asked, {}
        self._called.extend(self._dues)
        for session, ask in asked.values():
            session.answered(ask.token, ConnectionLost(closed.sentence), now_ns)
        for tell in tuple(self._on_lost.values()):
            tell()

    def _part(self, sentence: str, now_ns: int) -> None:
        """There is no connection: decide when to dial again."""
        if self._leave_at_ns is not None:
            self.is_closed = True
            return
        self.trouble = sentence
        if self._opened_ns is not None and now_ns - self._opened_ns > self.options.backoff_most_ms * NS_PER_MS:
            self._backoff.reset()  # the connection held for a while, even if no session sent a request
        self._opened_ns = None
        self._dial_at_ns = now_ns + self._wait_ns()
        self._retry_after_ms = self._astray = self._stray_by_ns = None
        self._is_moved = False
        if self._on_trouble is not None:
            self._on_trouble(sentence, now_ns)

    def _wait_ns(self) -> int:
        """The wait until the next attempt. A copy that is not master is no reason to wait long: another copy will
        be."""
        if self._is_moved:
            return 0
        if self._astray is None:
            return self._backoff.next_ns(self._retry_after_ms)
        self._moves_on = True
        return self._straying.next_ns(self._astray.retry_after_ms)


def _longer(so_far_ms: int | None, closed: Closed) -> int | None:
    waits_ms = [wait for wait in (so_far_ms, closed.retry_after_ms) if wait is not None]
    return max(waits_ms, default=None)
