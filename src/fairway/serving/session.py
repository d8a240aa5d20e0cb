"""A session: one client connection to a server. It reads frames, passes requests on, and writes answers.

A session is bounded both ways. It stops reading a client that does not read its answers, until the client has caught
up. So such a client slows only itself. A client that sends more than a helping at a time, or has used more of the loop
than others, waits in the `ReadThrottle`. The time to read it counts against its account, as its requests do. A client
whose requests are refused outright, or that acts for the consumer of another client, rests before the session reads it
again. The session reads on in a large frame only when there is room for all of it (`read_limits`). All sessions
together have a bound on partial frames and on unsent answers; past it, the server ends the connections that have held
on longest.

A session ends in one of three ways. Both sides close it. Or the server refuses the client, and leaves it time to read
the reason. Or the server cuts the client off, and reads and writes nothing more. A client that broke the rules gets the
error at once, and the connection ends 1 s later: otherwise a client that reconnects at once would come back often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fairway.errors import BadName, Code, Misuse, Refused, RemoteProtocolError
from fairway.limits import KIB, LARGE_FRAME_BYTES, MIB, UNSTORED_BYTES_MAX
from fairway.protocol import (
    BatchesReceived,
    Bytes,
    Connection,
    ConnectionOptions,
    ControlMessage,
    FrameTooLarge,
    RefusalSent,
    RequestReceived,
    Role,
    Why,
)
from fairway.scheduling import Account

if TYPE_CHECKING:
    from fairway.serving.requests import ServedRequest
    from fairway.serving.session_manager import SessionManager

_NS = 1_000_000_000
_TIMER_SLACK_S = 0.001  # uvloop rounds to milliseconds: without the slack a timer would fire early, and again at once
_LAST_WORDS_S = 5.0  # for a client to read the reason; a client that never reads would hold its place for ever
# before a client that broke the rules goes: without it, 20 such clients took a third of the loop's time
_PENANCE_S = 1.0
# of answers to one client: then it gets no further large answers, whatever it has asked for
_UNREAD_BYTES_MAX = 4 * MIB
_UNREAD_BY_BULK_BYTES_MAX = 256 * KIB  # the same for a client that has asked for many at once
_HELPING_FRAMES = 16  # read at once from one connection: about 0.1 ms of small requests,
_HELPING_NS = 100_000  # and fewer, where its last frames took longer than this: half a slice of the actors
_FRAME_NS = 25_000.0  # a frame of a new connection
_FRAME_SHARE = 0.25  # of the newest helping in the expected time of a frame
# a helping in bytes: otherwise a loop would read 8 MB of one connection before it reads another
_HELPING_BYTES = 64 * KIB
_RETRY_AFTER_MS = 1_000  # for an evicted client: it comes back when others have had their turn


class ServerSession(asyncio.Protocol):
    """The server's end of one connection."""

    def __init__(
        self, host: SessionManager, options: ConnectionOptions, call_later: Callable[..., asyncio.TimerHandle]
    ) -> None:
        self._host = host
        self._call_later = call_later
        self._read_ns = host.clock.monotonic_ns()  # when it was last read
        self._connection = Connection(Role.SERVER, self._read_ns, options, on_unused=host.discard_buffer, gathers=True)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._is_clogged = False  # the client reads slower than it asks
        self._is_full = False  # it has as many requests in flight as it may, or as many bytes that are not stored
        self._is_queued = False  # it has sent more than a helping
        self._is_in_line = False  # there is no room for the frame that it has begun
        self._is_reading = True
        self._is_ahead = False  # it has used more than its share
        self._frame_ns = _FRAME_NS  # the time to read one of its frames
        self._refused_ms = -1  # the longest retry-after of an outright refusal in the last helping; -1: there was none
        self._due_rest_ms = 0  # a rest for what actors have refused, which has not begun
        self._is_ending = False
        self._is_flush_due = False
        self._written_bytes = 0
        self._left_bytes = 0  # of those, what had left the transport at the last look
        self.account = Account()  # what it has used of the loop
        self.unstored_bytes = 0  # of batches that it has sent and that have no answer yet
        self.waiting: dict[ServedRequest[Any], None] = {}  # requests that wait
        self.address = ""
        self.here = ""  # the address where the client reached this server
        self.is_gone = False

    # --- calls from the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport; uvloop's has no common base
        self.address = _address(transport.get_extra_info("peername"))
        self.here = _address(transport.get_extra_info("sockname"))
        refused = self._host.session_opened(self)
        if refused is not None and not self.is_gone:
            self._connection.turn_away(refused)
        self._rearm()

    def data_received(self, data: bytes) -> None:
        if self.is_gone:
            return
        self._read_ns = self._host.clock.monotonic_ns()
        if len(data) >= _HELPING_BYTES:
            self._queue_up()
        self._read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self._connection.lost()
        self._host.discard(self._connection.take_debris())
        if self._timer is not None:
            self._timer.cancel()
        self._host.session_closed(self)

    def pause_writing(self) -> None:
        """Stop reading the client until it has caught up: it reads slower than it asks."""
        self._is_clogged = True
        if not self.is_gone:
            self._heed_bounds()
            self._host.outgoing.note(self, anew=True)

    def resume_writing(self) -> None:
        self._is_clogged = False
        if not self.is_gone:
            self._host.outgoing.note(self)
            self._heed_bounds()

    # --- calls from the server ---------------------------------------------------------------------------------------

    @property
    def partial_bytes(self) -> int:
        """The bytes that have arrived of an incomplete frame."""
        return self._connection.buffered_bytes

    @property
    def unsent_bytes(self) -> int:
        """The bytes of answers that have piled up; 0 while the client keeps up."""
        if not self._is_clogged or self._transport is None or self.is_gone:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def is_swamped(self) -> bool:
        if not self._is_clogged:
            return False
        is_bulk = self._is_queued or self._connection.has_unread
        return self.unsent_bytes > (_UNREAD_BY_BULK_BYTES_MAX if is_bulk else _UNREAD_BYTES_MAX)

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that the client takes."""
        return self._connection.peer_frame_bytes_max

    @property
    def features(self) -> tuple[str, ...]:
        """The features that both the client and the server have."""
        return self._connection.features

    @property
    def is_listening(self) -> bool:
        """Whether the session reads the client. If not, the client's silence is not its fault."""
        return self._is_reading

    def frame_granted(self) -> None:
        """Go on: there is room for the frame that the client has begun."""
        self._is_in_line = False
        if not self.is_gone:
            self._heed_bounds()

    def go_on(self) -> bool:
        """Read the next helping: the read throttle calls this in the session's turn. Returns True where nothing is left
        to read, and the client may send more."""
        self._is_queued = False
        if self.is_gone:
            return False
        self._is_ahead, self._refused_ms = False, -1
        if self._due_rest_ms > 0:
            self._queue_up()
            return False
        self._read_ns = self._host.clock.monotonic_ns()
        if self._connection.has_unread:
            self._read(b"")
            return False
        self._heed_bounds()
        return self._is_reading

    def respond(self, correlation: int, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None:
        if self.is_gone:
            return
        try:
            is_said = self._connection.respond(correlation, message, attachments)
        except FrameTooLarge as error:
            self.refuse(correlation, Refused(Code.TOO_LARGE, f"the answer does not fit: {error}"))
            return
        if is_said:
            self._host.meters.answered(message, attachments)
        if attachments:
            self._flush()  # large: what piles up must show in the transport's buffer
        else:
            self._flush_soon()

    def respond_all(self, answers: Sequence[tuple[int, ControlMessage]]) -> None:
        """Answer several requests of one kind, whose answers have no attachments."""
        if self.is_gone:
            return
        self._connection.respond_all(answers)
        for _, message in answers:
            self._host.meters.answered(message, ())
        self._flush_soon()

    def refuse(self, correlation: int, refused: Refused) -> None:
        if not self.is_gone:
            self._refuse(correlation, refused)
            if refused.code is Code.FENCED:
                self._rest()
            self._flush_soon()

    def fail(self, error: RemoteProtocolError) -> None:
        """Close the connection: the client broke a rule that only the server can check, such as a bad batch."""
        if not self.is_gone:
            # the traceback's frames refer to this session, which would not be freed
            self._connection.fail(error.with_traceback(None))
            self._flush()

    def dismiss(self, sentence: str) -> None:
        """Drop the partial frame and close the connection: others need the memory."""
        if not self.is_gone:
            self._connection.dismiss(Refused(Code.BUSY, sentence, retry_after_ms=_RETRY_AFTER_MS))
            self._flush()

    def drain(self, reason: str) -> None:
        """Answer what is in flight, take no more, close."""
        if self._is_ending:
            self._hang_up()
        elif not self.is_gone:
            self._connection.drain(reason)
            self._flush()

    def abort(self) -> None:
        """Cut the connection off: the session reads and writes nothing more."""
        self.is_gone = True
        if self._transport is not None:
            self._transport.abort()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Read a helping of what has come, `data` included."""
        connection = self._connection
        self._refused_ms = -1
        arrived, ready_weight = connection.buffered_bytes + len(data), self._host.scheduler.ready_weight
        events = connection.feed(data, self._read_ns, frames_max=self._helping())
        frames = len(events)
        for event in events:
            if isinstance(event, BatchesReceived):
                frames += len(event.batches) - 1
                self._hand_over_batches(event)
            elif isinstance(event, RequestReceived):
                self._hand_over(event)
            elif isinstance(event, RefusalSent):
                self._host.meters.refused(event.code)
            else:
                self._rearm()  # after the handshake, another deadline counts
        elapsed_ns = self._host.clock.monotonic_ns() - self._read_ns
        if frames:
            self._frame_ns += (elapsed_ns / frames - self._frame_ns) * _FRAME_SHARE
        self._account_for(elapsed_ns, ready_weight)
        partial = connection.buffered_bytes
        if partial or arrived > len(data):
            frame_bytes = connection.partial_frame_bytes
            self._is_in_line = not self._host.incoming.note(self, frame_bytes, anew=partial != arrived)
            if frame_bytes > LARGE_FRAME_BYTES and len(data) >= _HELPING_BYTES:
                self._host.read_throttle.rest()
        self._heed_bounds()
        if connection.out or connection.closed is not None or self._timer is None:
            self._flush()

    def _account_for(self, elapsed_ns: int, ready_weight: float) -> None:
        """Charge the time of a helping. A client whose requests are refused rests: a refusal is work, too."""
        self._is_ahead = self._host.scheduler.charge(self.account, elapsed_ns, ready_weight)
        if self._refused_ms >= 0:
            self._refused_ms = max(self._refused_ms, self._host.rest_ms(elapsed_ns))

    def _helping(self) -> int:
        """How many frames may be read now."""
        if self._is_clogged:
            return 0
        connection = self._connection
        if not connection.is_open:
            return _HELPING_FRAMES
        frames = _HELPING_FRAMES
        if self._frame_ns * frames > _HELPING_NS:
            frames = max(int(_HELPING_NS / self._frame_ns), 1)
        return min(connection.requests_max - connection.in_flight, frames)

    def _queue_up(self) -> None:
        """Join the read throttle. A client that sends more than the server can take is read only after the
        retry-after."""
        if self._is_queued:
            return
        self._is_queued = True
        rest_ms, self._due_rest_ms = max(self._refused_ms, self._due_rest_ms), 0
        if rest_ms > 0:
            self._call_later(rest_ms / 1_000, self._host.read_throttle.join, self)
        else:
            self._host.read_throttle.join(self)

    def _heed_bounds(self) -> None:
        """Start or stop reading the client.

        The session does not read a client that does not read its answers, or that waits for room for its frame or for
        its turn in the read throttle. Nor does it read a client with as many requests in flight as allowed: refusing
        more of them one by one would cost others their time. Nor one with as many bytes on their way into the log.
        """
        transport, connection = self._transport, self._connection
        if transport is None or self._is_ending or transport.is_closing():
            return
        is_bulk = self.unstored_bytes >= UNSTORED_BYTES_MAX
        self._is_full = is_bulk or (connection.is_open and connection.in_flight >= connection.requests_max)
        is_held = self._is_clogged or self._is_full or self._is_in_line
        is_resting = self._refused_ms > 0 or self._due_rest_ms > 0
        if (connection.has_unread or self._is_ahead or is_resting) and not is_held:
            self._queue_up()
        is_reading = not (is_held or self._is_queued)
        if is_reading != self._is_reading:
            self._is_reading = is_reading
            (transport.resume_reading if is_reading else transport.pause_reading)()

    def _hand_over_batches(self, received: BatchesReceived) -> None:
        """Hand over PRODUCE requests: together where the server takes them so, else one by one."""
        try:
            if self._host.handle_together(self, received):
                return
        except Refused as refused:
            for correlation in received.correlations:
                self._turn_down(correlation, refused)
            return
        for request in received.requests():
            self._hand_over(request)

    def _hand_over(self, received: RequestReceived) -> None:
        try:
            self._host.handle(self, received)
        except Refused as refused:
            self._turn_down(received.correlation, refused)
        except BadName as error:
            self._turn_down(received.correlation, Refused(Code.BAD_NAME, str(error)))
        except Misuse as error:
            self._turn_down(received.correlation, Refused(Code.BAD_REQUEST, str(error)))

    def _turn_down(self, correlation: int, refused: Refused) -> None:
        """Refuse a request outright: it never reaches an actor."""
        self._refused_ms = max(self._refused_ms, refused.retry_after_ms or 0)
        self._refuse(correlation, refused)

    def _refuse(self, correlation: int, refused: Refused) -> None:
        if self._connection.refuse(correlation, refused):
            self._host.meters.refused(refused.code)

    def _rest(self) -> None:
        """Let the client rest: it acted for the consumer of another client. That counts as refused outright, although
        an actor found it. Ten connections that did so had ten times the time of the consumer (bench/hostile); now they
        share a tenth of the loop's. The rest is as long as if the refusal had taken the usual cost of a request of this
        connection."""
        self._due_rest_ms = max(self._due_rest_ms, self._host.rest_ms(int(self.account.cost_ns)))
        self._heed_bounds()

    def _flush_soon(self) -> None:
        """Flush together with the other answers of this turn: a write costs 30 µs, whatever it carries."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._host.flush_soon(self)

    def flush(self) -> None:
        """Write the pending answers."""
        if self._is_flush_due:
            self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        transport = self._transport
        if transport is None or self.is_gone:
            return
        if self._is_full:
            self._heed_bounds()
        out = self._connection.take()
        if out:
            self._written_bytes += sum(map(len, out))
            transport.writelines(out)
            if self._is_clogged:
                self._host.outgoing.note(self)
        if self._connection.closed is not None and not self._is_ending:
            self._is_ending = True
            self._host.discard(self._connection.take_debris())
            self._end(transport, self._connection.closed.why)
        if self._timer is None:
            self._rearm()

    def _end(self, transport: asyncio.Transport, why: Why) -> None:
        """Close after the last answers have left. A silent client does not read them: abort at once."""
        if why is Why.SILENT:
            transport.abort()
        elif why is Why.BROKEN and not transport.is_closing():
            transport.pause_reading()
            self._set_timer(_PENANCE_S, self._hang_up)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close when the last answers have left, or after 5 s."""
        if self._transport is not None and not self.is_gone:
            self._transport.close()
            self._set_timer(_LAST_WORDS_S, self.abort)

    def _rearm(self) -> None:
        """Set one timer for handshake and heartbeats. A later deadline moves it only after it has fired, so that a busy
        session costs nothing."""
        deadline_ns = self._connection.next_deadline()
        if self.is_gone or deadline_ns is None or (self._timer is not None and self._timer_ns <= deadline_ns):
            return
        delay_ns = max(deadline_ns - self._host.clock.monotonic_ns(), 0)
        self._timer_ns = deadline_ns
        self._set_timer(delay_ns / _NS + _TIMER_SLACK_S, self._on_time)

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Set the timer in place of the current one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._call_later(delay_s, callback)

    def _on_time(self) -> None:
        self._timer = None
        now_ns = self._host.clock.monotonic_ns()
        if (self._is_clogged and self._has_moved()) or self._is_full or self._is_in_line:
            # the session does not read it: taking bytes, or waiting for us, counts as a sign of life
            self._connection.heard(now_ns)
        self._connection.on_time(now_ns)
        self._flush()

    def _has_moved(self) -> bool:
        """Whether any answer has left since the last look."""
        left_bytes = self._written_bytes - self.unsent_bytes
        has_moved, self._left_bytes = left_bytes > self._left_bytes, left_bytes
        return has_moved


def _address(peer: object) -> str:
    """`127.0.0.1:4242`; the transport's own name where the peer is no such pair."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
    return str(peer) if peer else ""
