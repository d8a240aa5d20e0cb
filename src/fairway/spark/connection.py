"""A blocking conversation with a server, used by the driver and by tasks from one thread.

The caller puts requests and takes their answers, so several requests can be under way. After a lost connection the
client dials again, and resends every unanswered request in order. Each request used here may be repeated without harm:
a scan changes nothing, and a batch that is already stored is answered with its receipt.

A `Finder` names the addresses for each dial. A copy that answers that it is not the master is left, as if it had closed
the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from fairway.client.url import BrokerAddress
from fairway.errors import Code, FairwayError, InvariantViolated, Refused, Unreachable
from fairway.protocol import (
    Bytes,
    Connection,
    ConnectionOptions,
    ControlMessage,
    RefusalReceived,
    ResponseReceived,
    Role,
    Why,
)
from fairway.protocol.connection_states import INBOX
from fairway.protocol.line import RetryDelays
from fairway.runtime import host
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.net import BlockingConnection, WireCut
from fairway.runtime.rng import RealRng

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

NS = 1_000_000_000
LATER = frozenset({Code.BUSY, Code.EXPIRED, Code.DRAINING, Code.TOO_MANY_CONNECTIONS})  # a later attempt may succeed
_OPTIONS = ConnectionOptions(name="fairway-spark", features=(INBOX,))
_FIRST_MS, _MOST_MS = 50, 2_000  # between attempts
_BLINK_S = 0.001  # for a look at a connection that may have nothing to read


class Finder:
    """Knows the addresses of servers that can answer."""

    who = "broker"  # what kind of server it is
    where = ""  # the place, for messages to people
    remedy = ""  # what people can do if no server answers there

    def addresses(self) -> Sequence[BrokerAddress]:
        """The addresses to try now, in this order; `Unreachable` says why there are none."""
        raise NotImplementedError


class Fixed(Finder):
    """Fixed addresses: one broker, or several servers that all know the same."""

    def __init__(
        self, addresses: Sequence[BrokerAddress], scheme: str = "fairway://", who: str = "broker", remedy: str = ""
    ) -> None:
        self._addresses = tuple(addresses)
        self.who = who
        self.where = scheme + ",".join(map(str, self._addresses))
        self.remedy = remedy or f"Is it running there (`fairway up --data data --port {self._addresses[0].port}`)?"

    def addresses(self) -> Sequence[BrokerAddress]:
        return self._addresses


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, and its outcome."""

    message: ControlMessage
    attachments: Sequence[Bytes]
    correlation: int = 0
    outcome: ResponseReceived | Refused | None = None

    def is_answered(self) -> bool:
        return self.outcome is not None


class BlockingClient:
    """Talks to the server that the finder names; gives up after `patience_s` without a sign of life."""

    def __init__(self, finder: Finder, patience_s: float, clock: Clock | None = None) -> None:
        self._finder = finder
        self._patience_ns = int(patience_s * NS)
        self._clock = clock or RealClock()
        self._backoff = RetryDelays(RealRng(), first_ms=_FIRST_MS, most_ms=_MOST_MS)
        self._wire: BlockingConnection | None = None
        self._connection: Connection | None = None
        self._open: dict[int, Ticket] = {}  # by correlation id
        self._unsent: list[Ticket] = []
        self._heard_ns = self._clock.monotonic_ns()
        self._trouble = "no answer"
        self._is_astray = False  # the last server was not the master: its bytes are no sign of life of the master

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, message: ControlMessage, answer_type: type[AnswerT]) -> AnswerT:
        """Send a request and wait for the answer; retry while the broker is busy. Raises `Refused` or `Unreachable`."""
        return self.ask_for_batches(message, answer_type)[0]

    def ask_for_batches(self, message: ControlMessage, answer_type: type[AnswerT]) -> tuple[AnswerT, Sequence[Bytes]]:
        """`ask` for an answer with batches attached."""
        return self.take(self.put(message), answer_type)

    def put(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> Ticket:
        """Send a request as soon as the connection has room."""
        ticket = Ticket(message, attachments)
        if not self._open and not self._unsent:
            self._heard_ns = self._clock.monotonic_ns()  # patience begins now: no answer was due before
        self._unsent.append(ticket)
        self._send()
        return ticket

    def take(self, ticket: Ticket, answer_type: type[AnswerT]) -> tuple[AnswerT, Sequence[Bytes]]:
        """Wait for the answer to a request; retry while the broker is busy."""
        since_ns = self._clock.monotonic_ns()
        while True:
            outcome = self.outcome(ticket)
            if isinstance(outcome, ResponseReceived) and isinstance(outcome.message, answer_type):
                return outcome.message, outcome.attachments
            if not isinstance(outcome, Refused):
                raise InvariantViolated(f"{type(ticket.message).__name__} was answered with {outcome!r}")
            if outcome.code not in LATER:
                raise outcome
            self.pause(outcome, since_ns)
            self.resend([ticket])

    def outcome(self, ticket: Ticket) -> ResponseReceived | Refused:
        """Wait for the answer or the refusal."""
        self._run(ticket.is_answered, None)
        if ticket.outcome is None:
            raise InvariantViolated("a wait without end has ended")
        return ticket.outcome

    def wait_any(self, tickets: Sequence[Ticket], timeout_s: float) -> bool:
        """Wait until one of them is answered; False: none was in time."""
        return self._run(lambda: any(ticket.is_answered() for ticket in tickets), timeout_s)

    def pause(self, refused: Refused, since_ns: int) -> None:
        """Wait as long as a refusal asks for; raise the refusal if patience, since `since_ns`, has run out."""
        if self._clock.monotonic_ns() - since_ns > self._patience_ns:
            raise refused
        host.sleep(self._backoff.next_ns(refused.retry_after_ms) / NS)

    def resend(self, tickets: Sequence[Ticket]) -> None:
        """Send these requests again, in this order; all of them were refused."""
        for ticket in tickets:
            ticket.outcome = None
        self._unsent.extend(tickets)
        self._send()

    # --- the conversation --------------------------------------------------------------------------------------------

    def _run(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * NS)
        while not is_done():
            now_ns = self._clock.monotonic_ns()
            if end_ns is not None and now_ns >= end_ns:
                return False
            try:
                self._step(end_ns, now_ns)
            except (WireCut, Unreachable) as problem:
                self._lose(str(problem))
        self._backoff.reset()
        return True

    def _step(self, end_ns: int | None, now_ns: int) -> None:
        """Wait once for bytes, and act on them."""
        wire, connection = self._connected()
        self._send()
        due_ns = connection.next_deadline()
        wake_ns = min(each for each in (end_ns, due_ns, now_ns + NS) if each is not None)
        data = wire.read((wake_ns - now_ns) / NS)
        now_ns = self._clock.monotonic_ns()
        if data is None:
            connection.on_time(now_ns)
            if self._open or self._unsent:
                self._check_patience(self._trouble)
        else:
            self._hear(connection, data, now_ns)
        if connection.closed is not None:
            self._on_closed(connection)
        self._send()

    def _hear(self, connection: Connection, data: bytes, now_ns: int) -> None:
        """Act on bytes from the server; raises `WireCut` if the server is not the master."""
        stray: Refused | None = None
        for event in connection.feed(data, now_ns):
            if isinstance(event, RefusalReceived) and event.refused.code is Code.NOT_MASTER:
                stray = event.refused  # the request stays open, for the master
            elif isinstance(event, ResponseReceived | RefusalReceived):
                answer = event if isinstance(event, ResponseReceived) else event.refused
                self._open.pop(event.correlation).outcome = answer
                self._is_astray = False
        self._is_astray = self._is_astray or stray is not None
        if not self._is_astray:
            self._heard_ns = now_ns
        if stray is not None:
            raise WireCut(stray.sentence)

    def _on_closed(self, connection: Connection) -> None:
        closed = connection.closed
        if closed is None:
            return
        if closed.why is Why.BROKEN and closed.error is not None:
            raise closed.error
        if closed.why is Why.ACCUSED or (closed.why is Why.TURNED_AWAY and closed.code not in LATER):
            raise FairwayError(f"the broker at {self.where} ended the connection: {closed.sentence}")
        raise WireCut(closed.sentence)

    def _connected(self) -> tuple[BlockingConnection, Connection]:
        if self._wire is None or self._connection is None:
            self._wire = BlockingConnection.dial(self._finder.addresses())
            self._connection = Connection(Role.CLIENT, self._clock.monotonic_ns(), _OPTIONS)
        return self._wire, self._connection

    def _send(self) -> None:
        """Write what may be written now. A lost connection is noticed by the next wait."""
        wire, connection = self._wire, self._connection
        if wire is None or connection is None:
            return
        while self._unsent and connection.room:
            ticket = self._unsent.pop(0)
            ticket.correlation = connection.request(ticket.message, ticket.attachments)
            self._open[ticket.correlation] = ticket
        parts = connection.take()
        if parts:
            try:
                wire.write(parts)
            except WireCut as problem:
                self._lose(str(problem))

    def _lose(self, sentence: str) -> None:
        """The connection is lost, or was never made: dial again after a pause, and resend unanswered requests."""
        self._trouble = sentence
        self._hang_up()
        in_order = sorted(self._open.values(), key=lambda ticket: ticket.correlation)  # as they were sent
        self._unsent = [*in_order, *self._unsent]
        self._open.clear()
        self._check_patience(sentence)
        host.sleep(self._backoff.next_ns() / NS)

    def _check_patience(self, sentence: str) -> None:
        if self._clock.monotonic_ns() - self._heard_ns > self._patience_ns:
            is_replica = self._is_astray and isinstance(self._finder, Fixed)
            remedy = "Name all copies of the group, or a meta server." if is_replica else self._finder.remedy
            raise Unreachable(
                f"no {self._finder.who} at {self.where}: {sentence}. {remedy} Spark waits for it as long as the "
                f"option patienceSeconds says, {self._patience_ns // NS} s"
            )

    @property
    def now_ns(self) -> int:
        return self._clock.monotonic_ns()

    @property
    def where(self) -> str:
        return self._finder.where

    @property
    def wire(self) -> BlockingConnection | None:
        """The connection; None: not connected."""
        return self._wire

    # --- ending ------------------------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = self._connection = None

    def close(self) -> None:
        """Say goodbye without waiting for an answer: no caller needs the outcome of any open request."""
        wire, connection = self._wire, self._connection
        if wire is not None and connection is not None and connection.is_open:
            connection.drain("done")
            parts = connection.take()
            try:
                wire.write(parts)
            except WireCut:
                self._trouble = "the connection was cut at its end"
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_any_of(waits: Sequence[tuple[BlockingClient, Sequence[Ticket]]], timeout_s: float) -> bool:
    """Wait until a ticket of any of the conversations is answered; False: none was in time."""
    if len(waits) == 1:
        return waits[0][0].wait_any(waits[0][1], timeout_s)
    clock = RealClock()
    end_ns = clock.monotonic_ns() + int(timeout_s * NS)
    while True:
        if any([caller.wait_any(tickets, _BLINK_S) for caller, tickets in waits]):  # noqa: C419  (each has its look)
            return True
        left_ns = end_ns - clock.monotonic_ns()
        if left_ns <= 0:
            return False
        wires = [caller.wire for caller, _ in waits if caller.wire is not None]
        BlockingConnection.wait_any(wires, min(left_ns, NS) / NS)
