"""A client's line to one broker: one connection at a time, lost and found again for ever.

Whoever owns the socket (a thread, a loop, a simulation) drives the line and does what it says:

    when `dial_due()` has come: connect           then `connected(now)`, or `unreachable(sentence, now)`
    line.feed(data, now)                          what arrived
    transport.writelines(line.take(now))          after every call, after giving a session work, and at `next_deadline`
    if line.is_over(): close the transport        then `lost(sentence, now)`; also when the transport ends by itself
    for call in line.errands(): call()            callbacks of users, outside any lock
    line.close(now)                               say goodbye; `is_closed` when all is said

Where several copies of a broker have an address each, one of them leads and the others refuse as NOT_MASTER. After such
a refusal the line waits a moment for the answers that are still on their way, ends the connection and dials again; the
owner then begins with the next address, because `moves_on()`. Sessions ask the next one what the last one refused.

`session` says what lives on a line. The line has no lock of its own: it is called under its owner's, or from one loop.
Time is an argument everywhere, on one monotonic clock in ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fairway.errors import Code, Misuse, Refused
from fairway.protocol.backoff import NS_PER_MS, RetryDelays
from fairway.protocol.connection import Connection
from fairway.protocol.events import (
    Closed,
    ConnectionEvent,
    HandshakeDone,
    PeerLeaving,
    RefusalReceived,
    ResponseReceived,
    Why,
)
from fairway.protocol.frames import FrameTooLarge
from fairway.protocol.handshake import ConnectionOptions
from fairway.protocol.session import Answer, Ask, ClientSession, ConnectionLost, RequestOutcome
from fairway.protocol.states import Role
from fairway.world.buffers import Bytes
from fairway.world.rng import Rng

Errand = Callable[[], None]

NEVER_NS = 1 << 63
STRAY_MS = 500  # for answers of one who does not lead: it refuses what it has read, which takes no time
STRAY_WAIT_MS_MAX = 500  # between two who do not lead: somebody is about to


@dataclass(frozen=True, slots=True)
class ReconnectOptions:
    """How a line behaves."""

    hello: ConnectionOptions = field(default_factory=ConnectionOptions)
    backoff_first_ms: int = 50  # a broker that restarts is back within a second: be there soon
    backoff_most_ms: int = 5_000  # one that was away for an hour is found within five seconds
    drain_ms: int = 10_000  # how long `close` waits for answers

    def __post_init__(self) -> None:
        if not 1 <= self.backoff_first_ms <= self.backoff_most_ms or self.drain_ms < 0:
            raise Misuse(
                "a line waits at least 1 ms between attempts, at most backoff_most_ms, and drains in 0 ms or more"
            )


class Line:
    """One client's line to one broker. Sessions may come and go at any time."""

    def __init__(
        self,
        rng: Rng,
        options: ReconnectOptions | None = None,
        *,
        now_ns: int = 0,
        on_trouble: Callable[[str, int], None] | None = None,
        on_open: Callable[[int], None] | None = None,
    ) -> None:
        """`on_trouble` is told each time a connection cannot be had or is lost, `on_open` each time one is made,
        handshake included: for a circuit breaker, or a log."""
        self.options = options or ReconnectOptions()
        self.is_closed = False
        self.connections = 0  # opened so far, handshake included
        self.trouble: str | None = None  # why there is no open connection; None while there is one, or none was tried
        self.peer: HandshakeDone | None = None  # what was agreed on with the broker that was last talked to
        self._on_trouble = on_trouble
        self._on_open = on_open
        self._backoff = RetryDelays(rng, first_ms=self.options.backoff_first_ms, most_ms=self.options.backoff_most_ms)
        self._dial_at_ns: int | None = now_ns
        self._connection: Connection | None = None
        self._opened_ns: int | None = None
        self._retry_after_ms: int | None = None  # as the broker said when it left
        self._leave_at_ns: int | None = None  # closing: when patience ends
        self._astray: Refused | None = None  # what was said by one who does not lead
        self._stray_by_ns: int | None = None  # when the last of its answers is there, or no longer waited for
        self._straying = RetryDelays(
            rng,
            first_ms=self.options.backoff_first_ms,
            most_ms=max(self.options.backoff_first_ms, min(self.options.backoff_most_ms, STRAY_WAIT_MS_MAX)),
        )
        self._is_moved = False  # somebody knows better where to dial
        self._moves_on = False
        self._sessions: list[ClientSession] = []
        self._on_lost: dict[int, Callable[[], None]] = {}  # by the id of the session
        self._asked: dict[int, tuple[ClientSession, Ask]] = {}  # by correlation id
        self._errands: list[Errand] = []

    # --- sessions ----------------------------------------------------------------------------------------------------

    def add(self, session: ClientSession, now_ns: int, on_lost: Callable[[], None] | None = None) -> None:
        """A session begins; if the line is open it is told so at once. `on_lost` is called when a connection ends, also
        where the session has asked nothing that could be lost with it."""
        self._sessions.append(session)
        if on_lost is not None:
            self._on_lost[id(session)] = on_lost
        if self.is_open:
            session.opened(now_ns)

    def remove(self, session: ClientSession) -> None:
        """A session ends. What it has asked is still answered by the broker, and nobody is told."""
        self._sessions = [each for each in self._sessions if each is not session]
        self._on_lost.pop(id(session), None)
        self._asked = {number: pair for number, pair in self._asked.items() if pair[0] is not session}

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self._sessions)

    def run_later(self, errand: Errand) -> None:
        """Sessions: have this called by the owner, without its lock."""
        self._errands.append(errand)

    # --- what the owner asks -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be made now."""
        return self._connection is not None and self._connection.is_open

    @property
    def features(self) -> tuple[str, ...]:
        """Those that both sides have; none while it is not open."""
        return self._connection.features if self._connection is not None and self._connection.is_open else ()

    def dial_due(self) -> int | None:
        """When to connect; None: not now (it is connected), or never again (it is closed)."""
        return self._dial_at_ns

    def moves_on(self) -> bool:
        """Whether to dial the next address first, because the last one does not lead. Said once."""
        moves_on, self._moves_on = self._moves_on, False
        return moves_on

    def is_over(self) -> bool:
        """The connection has ended: close the transport once everything taken is written, then call `lost`."""
        return self._connection is not None and self._connection.closed is not None

    def next_deadline(self) -> int | None:
        """When `take` is to be called although nothing happens; None: never."""
        dues = [due for session in self._sessions if (due := session.next_deadline()) is not None]
        if self._connection is not None and (due := self._connection.next_deadline()) is not None:
            dues.append(due)
        if self._leave_at_ns is not None and self._connection is not None and not self.is_over():
            dues.append(self._leave_at_ns)
        if self._stray_by_ns is not None and not self.is_over():
            dues.append(self._stray_by_ns)
        return min(dues, default=None)

    def errands(self) -> list[Errand]:
        """What is to be called without the owner's lock, in order: callbacks of users."""
        errands, self._errands = self._errands, []
        return errands

    # --- the transport -----------------------------------------------------------------------------------------------

    def connected(self, now_ns: int) -> None:
        """The transport is there: the handshake begins. If the line was closed meanwhile, it `is_over` at once."""
        if self._connection is not None:
            raise Misuse("a line has one connection at a time: report the end of the one before")
        self._dial_at_ns = None
        self._connection = Connection(Role.CLIENT, now_ns, self.options.hello)
        if self._leave_at_ns is not None:
            self._connection.drain("the client leaves")

    def unreachable(self, sentence: str, now_ns: int) -> None:
        """Nobody accepted."""
        self._part(sentence, now_ns)

    def feed(self, data: Bytes, now_ns: int) -> None:
        """What arrived."""
        if self._connection is not None:
            for event in self._connection.feed(data, now_ns):
                self._on_event(event, now_ns)
            if self._astray is not None and self._stray_by_ns is None:
                self._stray_by_ns = now_ns + STRAY_MS * NS_PER_MS
                self._connection.drain("this copy does not lead")
            self._notice_end(now_ns)

    def take(self, now_ns: int) -> list[Bytes]:
        """What is to be written now; does what is due first. Sessions are asked here and nowhere else."""
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
        """The transport is closed, by whomever."""
        if self._connection is None:
            return
        self._connection.lost()
        self._notice_end(now_ns)
        closed = self._connection.closed
        self._connection = None
        said = closed.sentence if closed is not None and closed.why is not Why.LOST else sentence
        if self._opened_ns is None:  # it accepted and never spoke: a proxy before nobody, a process that stands still
            self._moves_on = True
        self._part(said if self._astray is None else str(self._astray), now_ns)

    def move(self, now_ns: int) -> None:
        """Somebody knows better where to dial: end the connection, if there is one, and dial again without a wait."""
        if self._leave_at_ns is not None:
            return
        self._is_moved = True
        if self._connection is not None:
            self._connection.lost()
            self._notice_end(now_ns)
        else:
            self._dial_at_ns = now_ns

    def close(self, now_ns: int, *, patience_ms: int | None = None) -> None:
        """Ask for nothing more, wait for the answers on the way (for `drain_ms`, unless told), say goodbye."""
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
        """Ask every session; who was first goes to the back, so that none eats all the room."""
        sessions = self._sessions
        for session in tuple(sessions):
            room = connection.room if connection is not None else 0
            for ask in session.asks(room, now_ns):
                self._ask(session, ask, now_ns)
        if len(sessions) > 1:
            sessions.append(sessions.pop(0))

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
            self._backoff.reset()  # not by a handshake alone: a broker that dies of our first request is not yet well
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
            for session in tuple(self._sessions):
                session.opened(now_ns)
        elif isinstance(event, PeerLeaving):
            self._retry_after_ms = event.retry_after_ms

    def _answer(self, correlation: int, outcome: RequestOutcome, now_ns: int) -> None:
        asked = self._asked.pop(correlation, None)
        if asked is not None:  # else its session has gone
            session, ask = asked
            session.answered(ask.token, outcome, now_ns)

    def _notice_end(self, now_ns: int) -> None:
        """If the connection has ended: what was in flight will never be answered."""
        closed = self._connection.closed if self._connection is not None else None
        if closed is None:
            return
        self._retry_after_ms = _longer(self._retry_after_ms, closed)
        asked, self._asked = self._asked, {}
        for session, ask in asked.values():
            session.answered(ask.token, ConnectionLost(closed.sentence), now_ns)
        for tell in tuple(self._on_lost.values()):
            tell()

    def _part(self, sentence: str, now_ns: int) -> None:
        """There is no connection: when to try again."""
        if self._leave_at_ns is not None:
            self.is_closed = True
            return
        self.trouble = sentence
        if self._opened_ns is not None and now_ns - self._opened_ns > self.options.backoff_most_ms * NS_PER_MS:
            self._backoff.reset()  # it held for a while, even if nothing was asked
        self._opened_ns = None
        self._dial_at_ns = now_ns + self._wait_ns()
        self._retry_after_ms = self._astray = self._stray_by_ns = None
        self._is_moved = False
        if self._on_trouble is not None:
            self._on_trouble(sentence, now_ns)

    def _wait_ns(self) -> int:
        """Until the next attempt. Who does not lead is no reason to wait long: another one will."""
        if self._is_moved:
            return 0
        if self._astray is None:
            return self._backoff.next_ns(self._retry_after_ms)
        self._moves_on = True
        return self._straying.next_ns(self._astray.retry_after_ms)


def _longer(so_far_ms: int | None, closed: Closed) -> int | None:
    waits_ms = [wait for wait in (so_far_ms, closed.retry_after_ms) if wait is not None]
    return max(waits_ms, default=None)
