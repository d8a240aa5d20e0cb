"""One connection to the broker: bytes in, requests out to the actors, answers back.

Bounded both ways. A client that does not read its answers is paused: its requests are no longer read until it has
caught up, so it slows nobody but itself. One that sends more than a helping at a time, or has used more of the loop
than others, queues with others like it (`turnstile`). Reading it counts against its account, as its requests do. One
whose requests are refused outright rests before it is read again. A large frame is read on only when there is room for
all of it (`frame_admission`). What all sessions hold together (frames of which only a part has come, answers that have
not left) has a bound; past it, those that have held on longest are let go.

A session ends in one of three ways: both sides part, the client is told why and has a while to read it, or it is cut
off. One that is cut off hears and says nothing any more, at once. One that broke the rules is told so at once, and the
connection ends a little later: a client that comes back as soon as it is sent away does not come often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fairway.errors import BadName, Code, Misuse, Refused, RemoteProtocolError
from fairway.limits import KIB, LARGE_FRAME_BYTES, MIB
from fairway.protocol import (
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
from fairway.serving.budget import Budget
from fairway.serving.frame_admission import FrameAdmission
from fairway.serving.turnstile import ReadThrottle
from fairway.world.buffers import LazyBuffer
from fairway.world.clock import Clock

if TYPE_CHECKING:
    from fairway.serving.requests import ServedRequest

_NS = 1_000_000_000
_TIMER_SLACK_S = 0.001  # uvloop rounds to milliseconds: without it a timer would ring early, and again at once
_LAST_WORDS_S = 5.0  # for a client to read why it is sent away; one that never reads would hold its place for ever
_PENANCE_S = 1.0  # before one that broke the rules is let go: without it, 20 such took a third of the loop's time
_UNREAD_BYTES_MAX = 4 * MIB  # of answers to one client: then it gets no further large ones, whatever it has asked for
_UNREAD_BY_BULK_BYTES_MAX = 256 * KIB  # the same for one that has asked for many at once
_HELPING_FRAMES = 16  # read at once from one connection: about 0.1 ms of small requests,
_HELPING_NS = 100_000  # and fewer, where its last ones took longer than this: half a slice of the actors
_FRAME_NS = 25_000.0  # a frame of a connection that nobody knows yet
_FRAME_SHARE = 0.25  # of the newest helping in how long a frame of its connection takes
_HELPING_BYTES = 64 * KIB  # and so much: a loop would read 8 MB of a connection that has it before it reads another
_RETRY_AFTER_MS = 1_000  # for one that was evicted: it comes back when others have had their turn


class Host(Protocol):
    """What a session needs of its broker."""

    clock: Clock
    incoming: FrameAdmission[ServerSession]  # parts of frames
    outgoing: Budget[ServerSession]  # answers that have not left
    turnstile: ReadThrottle[ServerSession]  # those who send more than a helping

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Take a request in; raises `Refused` or `Misuse` where it cannot."""

    @property
    def ready_weight(self) -> float:
        """Of the actors that are ready."""

    def charge(self, account: Account, elapsed_ns: int, ready_weight: float) -> bool:
        """A connection was read for so long; whether it has used more than its share by that. `ready_weight`: when that
        began."""

    def rest_ms(self, elapsed_ns: int) -> int:
        """How long one rests whose requests were refused outright, if that took so long."""

    def session_opened(self, session: ServerSession) -> Refused | None:
        """A reason to turn it away, or None. May cut it off."""

    def session_closed(self, session: ServerSession) -> None: ...

    def answered(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        """For the figures."""

    def refused(self, code: Code) -> None: ...

    def discard(self, debris: list[Bytes]) -> None:
        """Drop it, a little at a time."""

    def discard_buffer(self, buffer: LazyBuffer) -> None:
        """The same for the buffer of a large frame that nobody uses any more; called on any thread."""

    def flush_soon(self, session: ServerSession) -> None:
        """Have its `flush` called in the loop's next turn."""


class ServerSession(asyncio.Protocol):
    """The broker's end of one connection."""

    def __init__(self, host: Host, options: ConnectionOptions, call_later: Callable[..., asyncio.TimerHandle]) -> None:
        self._host = host
        self._call_later = call_later
        self._read_ns = host.clock.monotonic_ns()  # when it was last read
        self._connection = Connection(Role.SERVER, self._read_ns, options, on_unused=host.discard_buffer)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._is_clogged = False  # the client reads slower than it asks
        self._is_full = False  # it has as many requests in flight as it may
        self._is_queued = False  # it has sent more than a helping
        self._is_in_line = False  # there is no room for the frame that it has begun
        self._is_reading = True
        self._is_ahead = False  # it has used more than its share
        self._frame_ns = _FRAME_NS  # what one of its frames takes to be read
        self._refused_ms = -1  # in the last helping something was refused that has time for so long; -1: nothing was
        self._is_ending = False
        self._is_flush_due = False
        self._written_bytes = 0
        self._left_bytes = 0  # of those, what had left the transport when it was last looked at
        self.account = Account()  # what it has used of the loop
        self.waiting: dict[ServedRequest[Any], None] = {}  # requests that wait for something to come
        self.address = ""
        self.here = ""  # where it has found us
        self.is_gone = False

    # --- the transport's side ----------------------------------------------------------------------------------------

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
        """The client reads slower than it asks: take no more requests until it has caught up."""
        self._is_clogged = True
        if not self.is_gone:
            self._heed_bounds()
            self._host.outgoing.note(self, anew=True)

    def resume_writing(self) -> None:
        self._is_clogged = False
        if not self.is_gone:
            self._host.outgoing.note(self)
            self._heed_bounds()

    # --- the broker's side -------------------------------------------------------------------------------------------

    @property
    def partial_bytes(self) -> int:
        """What has arrived of a frame that is not yet complete."""
        return self._connection.buffered_bytes

    @property
    def unsent_bytes(self) -> int:
        """Answers that have piled up; a buffer that the client keeps up with is none."""
        if not self._is_clogged or self._transport is None or self.is_gone:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def is_swamped(self) -> bool:
        is_bulk = self._is_queued or self._connection.has_unread
        unread_max = _UNREAD_BY_BULK_BYTES_MAX if is_bulk else _UNREAD_BYTES_MAX
        return self._is_clogged and self.unsent_bytes > unread_max

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that the client takes."""
        return self._connection.peer_frame_bytes_max

    @property
    def features(self) -> tuple[str, ...]:
        """Those that the client has asked for and the server has."""
        return self._connection.features

    @property
    def is_listening(self) -> bool:
        """Whether it is read: else its silence is not its own."""
        return self._is_reading

    def frame_granted(self) -> None:
        """There is room for the frame that it has begun."""
        self._is_in_line = False
        if not self.is_gone:
            self._heed_bounds()

    def go_on(self) -> bool:
        """Its turn at the turnstile: the next helping of what has come; True where there is none, and more may come."""
        self._is_queued = False
        if self.is_gone:
            return False
        self._is_ahead, self._refused_ms = False, -1
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
            self._host.answered(message, attachments)
        if attachments:
            self._flush()  # large: what piles up must show in the transport's buffer
        else:
            self._flush_soon()

    def refuse(self, correlation: int, refused: Refused) -> None:
        if not self.is_gone:
            self._refuse(correlation, refused)
            self._flush_soon()

    def fail(self, error: RemoteProtocolError) -> None:
        """The client broke the rules in a way that only the broker could see, such as a bad batch."""
        if not self.is_gone:
            self._connection.fail(error.with_traceback(None))  # whose frames know this session: it would not be freed
            self._flush()

    def dismiss(self, sentence: str) -> None:
        """Let go of the part of a frame that has come: others need the memory."""
        if not self.is_gone:
            self._connection.dismiss(Refused(Code.BUSY, sentence, retry_after_ms=_RETRY_AFTER_MS))
            self._flush()

    def drain(self, reason: str) -> None:
        """Answer what is in flight, take no more, part."""
        if self._is_ending:
            self._hang_up()
        elif not self.is_gone:
            self._connection.drain(reason)
            self._flush()

    def abort(self) -> None:
        """Cut it off: nothing more is heard or said."""
        self.is_gone = True
        if self._transport is not None:
            self._transport.abort()

    # --- within ------------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """A helping of what has come, `data` included."""
        connection = self._connection
        self._refused_ms = -1
        arrived, ready_weight = connection.buffered_bytes + len(data), self._host.ready_weight
        events = connection.feed(data, self._read_ns, frames_max=self._helping())
        for event in events:
            if isinstance(event, RequestReceived):
                self._hand_over(event)
            elif isinstance(event, RefusalSent):
                self._host.refused(event.code)
        elapsed_ns = self._host.clock.monotonic_ns() - self._read_ns
        if events:
            self._frame_ns += (elapsed_ns / len(events) - self._frame_ns) * _FRAME_SHARE
        self._account_for(elapsed_ns, ready_weight)
        partial = connection.buffered_bytes
        if partial or arrived > len(data):
            frame_bytes = connection.partial_frame_bytes
            self._is_in_line = not self._host.incoming.note(self, frame_bytes, anew=partial != arrived)
            if frame_bytes > LARGE_FRAME_BYTES and len(data) >= _HELPING_BYTES:
                self._host.turnstile.rest()
        self._heed_bounds()
        self._flush()

    def _account_for(self, elapsed_ns: int, ready_weight: float) -> None:
        """It was read for so long. Whoever sends what is refused rests: to refuse is work, too."""
        self._is_ahead = self._host.charge(self.account, elapsed_ns, ready_weight)
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
        """Whoever floods us with what we cannot take is listened to when we said that it may come back, and not
        before."""
        if self._is_queued:
            return
        self._is_queued = True
        if self._refused_ms > 0:
            self._call_later(self._refused_ms / 1_000, self._host.turnstile.join, self)
        else:
            self._host.turnstile.join(self)

    def _heed_bounds(self) -> None:
        """Read no further while the client does not read either, while it has as many requests in flight as may be
        (refusing them one by one would cost others their time), while there is no room for the frame that it has begun,
        and until its turn at the turnstile comes."""
        transport, connection = self._transport, self._connection
        if transport is None or self._is_ending or transport.is_closing():
            return
        self._is_full = connection.is_open and connection.in_flight >= connection.requests_max
        is_held = self._is_clogged or self._is_full or self._is_in_line
        if (connection.has_unread or self._is_ahead or self._refused_ms > 0) and not is_held:
            self._queue_up()
        is_reading = not (is_held or self._is_queued)
        if is_reading != self._is_reading:
            self._is_reading = is_reading
            (transport.resume_reading if is_reading else transport.pause_reading)()

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
        """Refuse it outright: it never becomes an actor's."""
        self._refused_ms = max(self._refused_ms, refused.retry_after_ms or 0)
        self._refuse(correlation, refused)

    def _refuse(self, correlation: int, refused: Refused) -> None:
        if self._connection.refuse(correlation, refused):
            self._host.refused(refused.code)

    def _flush_soon(self) -> None:
        """Together with what else is said in this turn: a write costs 30 µs, whatever it carries."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._host.flush_soon(self)

    def flush(self) -> None:
        """Write what has been said."""
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
        self._rearm()

    def _end(self, transport: asyncio.Transport, why: Why) -> None:
        """Let the last words leave; nobody listens to them where all was silent."""
        if why is Why.SILENT:
            transport.abort()
        elif why is Why.BROKEN and not transport.is_closing():
            transport.pause_reading()
            self._set_timer(_PENANCE_S, self._hang_up)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        """When the last words have left, but not in eternity."""
        if self._transport is not None and not self.is_gone:
            self._transport.close()
            self._set_timer(_LAST_WORDS_S, self.abort)

    def _rearm(self) -> None:
        """One timer for handshake and heartbeats; a later deadline moves it only when it has rung, so that a busy
        session costs nothing."""
        deadline_ns = self._connection.next_deadline()
        if self.is_gone or deadline_ns is None or (self._timer is not None and self._timer_ns <= deadline_ns):
            return
        delay_ns = max(deadline_ns - self._host.clock.monotonic_ns(), 0)
        self._timer_ns = deadline_ns
        self._set_timer(delay_ns / _NS + _TIMER_SLACK_S, self._on_time)

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        """In place of the one that is set."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._call_later(delay_s, callback)

    def _on_time(self) -> None:
        self._timer = None
        now_ns = self._host.clock.monotonic_ns()
        if (self._is_clogged and self._has_moved()) or self._is_full or self._is_in_line:
            self._connection.heard(now_ns)  # we do not listen: that it takes bytes, or waits for us, is its pulse
        self._connection.on_time(now_ns)
        self._flush()

    def _has_moved(self) -> bool:
        """Whether any answer has left since the last look."""
        left_bytes = self._written_bytes - self.unsent_bytes
        has_moved, self._left_bytes = left_bytes > self._left_bytes, left_bytes
        return has_moved


def _address(peer: object) -> str:
    """`127.0.0.1:4242`; whatever the transport calls the other side, where it is no such pair."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
    return str(peer) if peer else ""
