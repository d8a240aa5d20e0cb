"""One connection, from one side: bytes and time in, events and bytes out. `connection_states` holds the state table.

    for event in connection.feed(data, now_ns):     the bytes that arrived
        ...
    connection.request(...), respond(...), refuse(...), drain(...)
    transport.writelines(connection.take())         after every call that may have written something
    if connection.closed is not None: transport.close()

A mistake of the peer never raises here. The connection writes a last GOODBYE that names the mistake and sets `closed`.
A mistake of the caller raises `Misuse`. A refusal is an ordinary answer: the connection stays open.

The client counts correlation ids up from 1, and answers carry the id of their request. Id 0 marks frames that concern
the connection itself. A server refuses requests beyond `requests_max` as BUSY, and requests that arrive while the
server drains as DRAINING. `Connection` refuses both itself.

`HeartbeatTimer` decides whether the peer is alive. A side that receives nothing for an interval sends a PING. After
three silent intervals the side closes the connection. Any byte that arrives counts as a sign of life, so a busy
connection never pings. After a pause of the whole process (a suspended machine, a debugger) all deadlines have passed
at once. The side still sends two PINGs and waits an interval after each, because bytes of the peer may lie unread in
its own socket.

A transport in memory reports the end of the other side at once, so its timer is off: the timer never asks and never
gives up.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence

from fairway import limits
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError
from fairway.protocol import codec, connection_states, frames
from fairway.protocol.connection_states import (
    GREETING_VERSION,
    BatchesReceived,
    Closed,
    ConnectionEvent,
    ConnectionOptions,
    ConnectionState,
    HandshakeDone,
    Move,
    PeerLeaving,
    ReceivedKind,
    RefusalReceived,
    RefusalSent,
    RequestReceived,
    ResponseReceived,
    Role,
    Why,
)
from fairway.protocol.frames import REFUSED, RESPONSE, Frame, FrameReader
from fairway.protocol.messages import FIRST_REQUEST_VERB, ControlMessage, Goodbye, Hello, Ping, Pong, Produce, Verb
from fairway.runtime.buffers import Bytes, OnUnused

_NS_PER_MS = 1_000_000
INTERVALS_MAX = 3  # missed in a row
NEVER_NS = 1 << 63


class Beat(enum.Enum):
    """What the connection does now about a silent peer."""

    NOTHING = "wait"
    PING = "ask"
    DEAD = "give up"


class HeartbeatTimer:
    """The heartbeat timer of one side of a connection."""

    __slots__ = ("_asked", "_is_on", "due_ns", "interval_ns")

    def __init__(self, interval_ms: int, now_ns: int, *, is_on: bool = True) -> None:
        self.interval_ns = interval_ms * _NS_PER_MS
        self._is_on = is_on
        self.heard(now_ns)

    def heard(self, now_ns: int) -> None:
        """Note a sign of life from the peer."""
        self._asked = 0
        self.due_ns = now_ns + self.interval_ns if self._is_on else NEVER_NS  # when `on_time` has something to do

    def on_time(self, now_ns: int) -> Beat:
        if now_ns < self.due_ns:
            return Beat.NOTHING
        if self._asked == INTERVALS_MAX - 1:
            return Beat.DEAD
        self._asked += 1
        self.due_ns = now_ns + self.interval_ns
        return Beat.PING


_PRODUCE = int(Verb.PRODUCE)
_VERBS = {int(verb): verb for verb in Verb}
_KEPT_CONTROL_BYTES = 1_024  # of the last PRODUCE: a name and a secret; what later versions add may be longer
_BUSY_RETRY_AFTER_MS = 50  # a few group commits: by then the server has answered some of the requests in flight


class Connection:
    """One side of a connection, for one thread or loop. The constructor of a client's side writes the HELLO."""

    def __init__(
        self,
        role: Role,
        now_ns: int,
        options: ConnectionOptions | None = None,
        *,
        on_unused: OnUnused | None = None,
        gathers: bool = False,
    ) -> None:
        """`on_unused` frees the buffer of a large frame as soon as nobody uses its attachments any more. `gathers`:
        `feed` reports PRODUCE requests in a row as one `BatchesReceived`."""
        self.role = role
        self.options = options or ConnectionOptions()
        self.state = ConnectionState.GREETING
        self._may_hear = connection_states.MAY_HEAR[role, self.state]
        self.closed: Closed | None = None
        self.peer_frame_bytes_max = limits.HELLO_FRAME_BYTES_MAX
        self.requests_max = 0
        self.features: tuple[str, ...] = ()  # that both sides have
        self._reader = FrameReader(version=GREETING_VERSION, on_unused=on_unused)
        self._pulse = HeartbeatTimer(self.options.handshake_ms, now_ns)
        self.out: list[Bytes] = []  # frames that `take` will return
        self.buffered_bytes = 0  # of an incomplete frame, and not yet read: the owner counts them in its memory budget
        self.has_unread = False  # `feed` stopped at `frames_max`: another call, with empty data, goes on
        self._version = GREETING_VERSION
        self._in_flight: dict[int, int] = {}  # correlation id: verb
        self._correlation = 0  # the client's last
        self._pings = 0  # PINGs sent and not yet answered
        self._pings_heard = 0  # PINGs received since `_pings_since_ns`
        self._pings_since_ns = now_ns
        self._turned_away: Refused | None = None
        self._debris: list[Bytes] = []
        self._gathers = gathers
        self._produce_control = b""  # of the last PRODUCE: those of one stream have the same control message
        self._produce = Produce("")
        if role is Role.CLIENT:
            self._write(Verb.HELLO, 0, 0, connection_states.hello(self.options))

    # --- what the owner may ask --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether new requests may be made (client) or are taken (server)."""
        return self.state is ConnectionState.OPEN

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._in_flight)

    @property
    def room(self) -> int:
        """How many more requests the client may make now."""
        return self.requests_max - len(self._in_flight) if self.state is ConnectionState.OPEN else 0

    @property
    def partial_frame_bytes(self) -> int:
        """The whole length of the incomplete frame, by its header; 0 if no frame is incomplete."""
        return self._reader.partial_frame_bytes

    # --- in ----------------------------------------------------------------------------------------------------------

    def feed(self, data: Bytes, now_ns: int, *, frames_max: int = sys.maxsize) -> list[ConnectionEvent]:
        """Take the bytes that arrived and return their events; nothing after the end. Reads at most `frames_max`
        frames."""
        events: list[ConnectionEvent] = []
        if self.closed is not None:
            return events
        self.heard(now_ns)
        reader = self._reader
        reader.feed(data)
        try:
            while (
                frames_max > 0
                and self.state is not ConnectionState.CLOSED
                and (frame := reader.next_frame()) is not None
            ):
                frames_max -= 1
                if frame.verb == _PRODUCE and self._gathers and not frame.flags & RESPONSE:
                    self._on_batch(frame, events)
                    continue
                event = self._on_frame(frame, now_ns)
                if event is not None:
                    events.append(event)
        except RemoteProtocolError as error:
            self.fail(error.with_traceback(None))  # the frames of the traceback would keep the peer's bytes alive
        if self.closed is None:
            self.has_unread, self.buffered_bytes = reader.has_unread, reader.buffered_bytes
        return events

    def heard(self, now_ns: int) -> None:
        """Note that the peer is alive. `feed` calls this, and so does an owner who knows without reading."""
        if self.state is not ConnectionState.GREETING:  # the handshake has one deadline, even if its bytes trickle
            self._pulse.heard(now_ns)

    def take_debris(self) -> list[Bytes]:
        """Return, after the end, the pieces of an incomplete frame. The caller drops them when there is time."""
        debris, self._debris = self._debris, []
        return debris

    def next_deadline(self) -> int | None:
        """When the owner must call `on_time`, on the clock of `now_ns`; None: never again."""
        if self.closed is not None or self._pulse.due_ns == NEVER_NS:
            return None
        return self._pulse.due_ns

    def on_time(self, now_ns: int) -> None:
        """Write the PING that is due, or close the connection to a silent peer."""
        if self.closed is not None:
            return
        beat = self._pulse.on_time(now_ns)
        if beat is Beat.NOTHING:
            return
        if self.state is ConnectionState.GREETING:
            self._end(Closed(Why.SILENT, "the handshake was not finished in time"))
        elif beat is Beat.DEAD:
            self._end(Closed(Why.SILENT, "nothing was heard for three heartbeats", self._unanswered()))
        else:
            self._pings += 1
            self._write(Verb.PING, 0, 0, Ping())

    def lost(self) -> None:
        """The transport is gone."""
        if self.closed is None:
            cut = " in the middle of a frame" if self.buffered_bytes else ""
            self._end(Closed(Why.LOST, f"the connection was cut{cut}", self._unanswered()))

    # --- out ---------------------------------------------------------------------------------------------------------

    def take(self) -> list[Bytes]:
        """Return the bytes to write, in order. After the end, `take` still returns the last frames."""
        out, self.out = self.out, []
        return out

    def request(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> int:
        """Send a request and return its correlation id, which the answer will carry. Look at `room` first."""
        verb = codec.REQUESTS.get(type(message), Verb.GOODBYE)
        if self.role is not Role.CLIENT or verb < FIRST_REQUEST_VERB:
            raise Misuse(f"a {self.role.value} does not ask with a {type(message).__name__}")
        if self.state is not ConnectionState.OPEN:
            raise Misuse(f"a connection that is {self.state.value} takes no requests")
        if len(self._in_flight) >= self.requests_max:
            raise Misuse(f"{self.requests_max} requests are in flight: wait for an answer")
        correlation = self._correlation + 1
        self._write(verb, 0, correlation, message, attachments)
        self._correlation = correlation
        self._in_flight[correlation] = verb
        return correlation

    def respond(self, correlation: int, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> bool:
        """Answer a request; False if the connection has ended meanwhile."""
        if self.closed is not None:
            return False
        verb = self._asked(correlation)
        if type(message) is not codec.ANSWERS[verb]:
            raise Misuse(f"a {type(message).__name__} does not answer {Verb(verb).name}")
        self._write(verb, RESPONSE, correlation, message, attachments)
        self._settle(correlation)
        return True

    def respond_all(self, answers: Iterable[tuple[int, ControlMessage]]) -> None:
        """Answer several requests of one kind, whose answers have no attachments."""
        if self.closed is not None:
            return
        out, version, in_flight = self.out, self._version, self._in_flight
        for correlation, message in answers:
            verb = self._asked(correlation)
            out += frames.write(verb, RESPONSE, version, correlation, codec.encode(message))
            del in_flight[correlation]
        if self.state is not ConnectionState.OPEN:
            self._part_if_settled()

    def refuse(self, correlation: int, refused: Refused) -> bool:
        """Refuse a request and keep the connection; False as for `respond`."""
        if self.closed is not None:
            return False
        self._refuse(self._asked(correlation), correlation, refused)
        self._settle(correlation)
        return True

    def turn_away(self, refused: Refused) -> None:
        """Server: answer the HELLO, when it arrives, with this refusal."""
        if self.role is not Role.SERVER or self.state is not ConnectionState.GREETING:
            raise Misuse("only a server can turn somebody away, and only before the handshake")
        self._turned_away = refused

    def drain(self, reason: str, *, retry_after_ms: int | None = None) -> None:
        """Send GOODBYE. Requests in flight are still answered, new ones are refused, then the connection closes
        itself."""
        if self.state is ConnectionState.GREETING:
            self._end(Closed(Why.PARTED, codec.shortened(reason)))
        elif self.state is ConnectionState.OPEN:
            self._say_goodbye(reason, retry_after_ms)

    def fail(self, error: RemoteProtocolError) -> None:
        """Close because the peer broke the protocol, and say so. For faults that only the owner sees, such as a bad
        batch."""
        if self.closed is not None:
            return
        sentence = codec.shortened(str(error))
        self._write(Verb.GOODBYE, 0, 0, Goodbye(sentence, Code.PROTOCOL_ERROR.value))
        self._end(Closed(Why.BROKEN, sentence, self._unanswered(), Code.PROTOCOL_ERROR, error=error))

    def dismiss(self, refused: Refused) -> None:
        """Close for a reason of this side, such as a bound on memory; tell the peer why, and when to come back."""
        if self.closed is not None:
            return
        sentence = codec.shortened(refused.sentence)
        self._write(Verb.GOODBYE, 0, 0, Goodbye(sentence, refused.code.value, refused.retry_after_ms))
        self._end(Closed(Why.DISMISSED, sentence, self._unanswered(), refused.code, refused.retry_after_ms))

    # --- what arrives ------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame, now_ns: int) -> ConnectionEvent | None:
        is_answer = bool(frame.flags & RESPONSE)
        if frame.verb >= FIRST_REQUEST_VERB:
            self._expect(ReceivedKind.ANSWER if is_answer else ReceivedKind.REQUEST)
            return self._on_answer(frame) if is_answer else self._on_request(frame)
        heard = connection_states.OWN.get((frame.verb, is_answer))
        if heard is None or frame.correlation or frame.attachments:
            raise RemoteProtocolError(
                f"a frame of verb {frame.verb}, correlation id {frame.correlation} "
                f"and {len(frame.attachments)} attachments means nothing"
            )
        return self._on_own(heard, frame, now_ns)

    def _expect(self, heard: ReceivedKind) -> None:
        if heard not in self._may_hear:
            raise RemoteProtocolError(f"{heard.name} came to a {self.role.value} that is {self.state.value}")

    def _on_request(self, frame: Frame) -> ConnectionEvent:
        correlation, verb = frame.correlation, frame.verb
        if correlation == 0 or correlation in self._in_flight:
            raise RemoteProtocolError(f"a request with correlation id {correlation}, which is not free")
        if not codec.knows(verb):
            unknown = Refused(Code.UNSUPPORTED, f"this server does not know verb {verb}")
            return self._refuse(verb, correlation, unknown)
        message = codec.decode_request(verb, frame.control)
        if len(frame.attachments) != codec.attachments_of(message):
            raise RemoteProtocolError(_miscounted(message, len(frame.attachments)))
        if self.state is not ConnectionState.OPEN or len(self._in_flight) >= self.requests_max:
            return self._refuse(verb, correlation, self._not_now())
        self._in_flight[correlation] = verb
        return RequestReceived(correlation, _VERBS[verb], message, frame.attachments, len(frame.control))

    def _on_batch(self, frame: Frame, events: list[ConnectionEvent]) -> None:
        """A PRODUCE request, behind those before it."""
        self._expect(ReceivedKind.REQUEST)
        control, correlation, in_flight = frame.control, frame.correlation, self._in_flight
        if (
            control == self._produce_control
            and len(frame.attachments) == 1
            and correlation
            and correlation not in in_flight
            and self.state is ConnectionState.OPEN
            and len(in_flight) < self.requests_max
        ):
            in_flight[correlation] = _PRODUCE
            last = events[-1] if events else None
            if isinstance(last, BatchesReceived) and last.message is self._produce:
                last.correlations.append(correlation)
                last.batches.append(frame.attachments[0])
                return
            message = self._produce
        else:
            event = self._on_request(frame)
            if not isinstance(event, RequestReceived) or not isinstance(event.message, Produce):
                events.append(event)
                return
            message = event.message
            if len(control) <= _KEPT_CONTROL_BYTES:
                self._produce_control, self._produce = control, message
        events.append(BatchesReceived(message, [correlation], [frame.attachments[0]], len(control)))

    def _not_now(self) -> Refused:
        """Why this side cannot take a valid request now."""
        if self.state is not ConnectionState.OPEN:
            return Refused(Code.DRAINING, "this server is about to close")
        sentence = f"{self.requests_max} requests are in flight on this connection"
        return Refused(Code.BUSY, sentence, retry_after_ms=_BUSY_RETRY_AFTER_MS)

    def _on_answer(self, frame: Frame) -> ConnectionEvent:
        correlation, verb = frame.correlation, frame.verb
        if self._in_flight.get(correlation) != verb:
            raise RemoteProtocolError(f"an answer of verb {verb} with correlation id {correlation}: nobody asked")
        event: ConnectionEvent
        if frame.flags & REFUSED:
            if frame.attachments:
                raise RemoteProtocolError("a refusal with attachments")
            event = RefusalReceived(correlation, codec.decode_refusal(verb, frame.control))
        else:
            message = codec.decode_answer(verb, frame.control)
            if len(frame.attachments) != codec.attachments_of(message):
                raise RemoteProtocolError(_miscounted(message, len(frame.attachments)))
            event = ResponseReceived(correlation, message, frame.attachments)
        self._settle(correlation)
        return event

    def _on_own(self, heard: ReceivedKind, frame: Frame, now_ns: int) -> ConnectionEvent | None:
        """HELLO, PING, GOODBYE and their answers."""
        if frame.flags & REFUSED and heard is not ReceivedKind.WELCOME:
            raise RemoteProtocolError(f"{heard.name} cannot be refused")
        if heard is ReceivedKind.GOODBYE:
            return self._on_goodbye(codec.decode_goodbye(frame.control))
        self._expect(heard)
        if heard is ReceivedKind.HELLO:
            return self._on_hello(codec.decode_hello(frame.control), now_ns)
        if heard is ReceivedKind.WELCOME:
            return self._on_welcome(frame, now_ns)
        if heard is ReceivedKind.PING:
            codec.decode_request(frame.verb, frame.control)
            self._count_ping(now_ns)
            self._write(Verb.PING, RESPONSE, 0, Pong())
        else:
            codec.decode_answer(frame.verb, frame.control)
            if not self._pings:
                raise RemoteProtocolError("an answer to a PING that nobody sent")
            self._pings -= 1
        return None

    def _count_ping(self, now_ns: int) -> None:
        """Bound the PINGs: a peer that pings without pause takes time from every other connection."""
        if now_ns - self._pings_since_ns > self._pulse.interval_ns:
            self._pings_since_ns, self._pings_heard = now_ns, 0
        self._pings_heard += 1
        if self._pings_heard > limits.PINGS_MAX:
            raise RemoteProtocolError(f"more than {limits.PINGS_MAX} PINGs in one heartbeat interval")

    def _on_goodbye(self, goodbye: Goodbye) -> ConnectionEvent | None:
        if goodbye.code is not None:
            self._expect(ReceivedKind.ACCUSATION)
            code, reason = codec.code_of(goodbye.code), codec.shortened(goodbye.reason)
            self._end(Closed(Why.ACCUSED, reason, self._unanswered(), code, goodbye.retry_after_ms))
            return None
        self._expect(ReceivedKind.GOODBYE)
        self._go(Move.HEARD_GOODBYE)
        self._part_if_settled()
        return PeerLeaving(goodbye.reason, goodbye.retry_after_ms)

    # --- the handshake -----------------------------------------------------------------------------------------------

    def _on_hello(self, said: Hello, now_ns: int) -> ConnectionEvent | None:
        answer = self._turned_away or connection_states.answer(said, self.options)
        if isinstance(answer, Refused):
            refusal = self._refuse(Verb.HELLO, 0, answer)
            self._end_turned_away(answer)
            return refusal
        self._write(Verb.HELLO, RESPONSE, 0, answer)
        return self._begin(connection_states.agreed_by_server(said, answer), now_ns)

    def _on_welcome(self, frame: Frame, now_ns: int) -> ConnectionEvent | None:
        if frame.flags & REFUSED:
            self._end_turned_away(codec.decode_refusal(frame.verb, frame.control))
            return None
        return self._begin(
            connection_states.agreed_by_client(codec.decode_welcome(frame.control), self.options), now_ns
        )

    def _begin(self, agreed: HandshakeDone, now_ns: int) -> ConnectionEvent:
        self._go(Move.GREETED)
        self._version = self._reader.version = agreed.version
        self._reader.frame_bytes_max = self.options.frame_bytes_max
        self.peer_frame_bytes_max = agreed.frame_bytes_max
        self.requests_max = agreed.requests_max
        self.features = agreed.features
        self._pulse = HeartbeatTimer(agreed.heartbeat_ms, now_ns, is_on=self.options.has_heartbeat)
        return agreed

    # --- the end -----------------------------------------------------------------------------------------------------

    def _settle(self, correlation: int) -> None:
        del self._in_flight[correlation]
        if self.state is not ConnectionState.OPEN:
            self._part_if_settled()

    def _part_if_settled(self) -> None:
        """After the last answer, say goodbye if the peer waits for that, and close if both sides have said goodbye."""
        if self._in_flight:
            return
        if self.state is ConnectionState.ASKED:
            self._say_goodbye("nothing is in flight", None)
        if self.state is ConnectionState.PARTING:
            self._go(Move.SETTLED)
            self.closed = Closed(Why.PARTED, Why.PARTED.value)

    def _say_goodbye(self, reason: str, retry_after_ms: int | None) -> None:
        self._write(Verb.GOODBYE, 0, 0, Goodbye(codec.shortened(reason), None, retry_after_ms))
        self._go(Move.SAID_GOODBYE)

    def _end(self, closed: Closed) -> None:
        self._go(Move.ENDED)
        self._in_flight.clear()
        self.closed = closed

    def _end_turned_away(self, refused: Refused) -> None:
        sentence = codec.shortened(refused.sentence)
        self._end(Closed(Why.TURNED_AWAY, sentence, code=refused.code, retry_after_ms=refused.retry_after_ms))

    def _unanswered(self) -> tuple[int, ...]:
        return tuple(self._in_flight)

    def _go(self, move: Move) -> None:
        self.state = connection_states.after(self.state, move)
        self._may_hear = connection_states.MAY_HEAR[self.role, self.state]
        if self.state is ConnectionState.CLOSED:
            self._debris = self._reader.let_go()
            self._reader = FrameReader()  # drops whatever had arrived
            self.has_unread, self.buffered_bytes = False, 0

    # --- writing -----------------------------------------------------------------------------------------------------

    def _asked(self, correlation: int) -> int:
        verb = self._in_flight.get(correlation)
        if verb is None or self.role is not Role.SERVER:
            raise Misuse(f"no request with correlation id {correlation} waits for an answer of this {self.role.value}")
        return verb

    def _refuse(self, verb: int, correlation: int, refused: Refused) -> RefusalSent:
        self._write(verb, RESPONSE | REFUSED, correlation, codec.refusal_of(refused))
        return RefusalSent(correlation, refused.code)

    def _write(
        self, verb: int, flags: int, correlation: int, message: ControlMessage, batches: Sequence[Bytes] = ()
    ) -> None:
        if len(batches) != codec.attachments_of(message):
            raise Misuse(_miscounted(message, len(batches)))
        control = codec.encode(message)
        self.out += frames.write(
            verb, flags, self._version, correlation, control, batches, bytes_max=self.peer_frame_bytes_max
        )


def _miscounted(message: ControlMessage, batches: int) -> str:
    return f"a {type(message).__name__} with {batches} batches: {codec.attachments_of(message)} belong"
