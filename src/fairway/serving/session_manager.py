"""The listeners and the sessions of a server: which clients get in, what they hold together, and how they leave.

`Listeners` opens the port for clients, and the port for probes if the server has one. `SessionManager` is the host of
all sessions: it bounds their number, their partial frames and their unsent answers, and closes them. `SocketServer` is
the base of every server with a port.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fairway import limits
from fairway.errors import Code, Misuse, Refused, StorageFault
from fairway.protocol import BatchesReceived, Bytes, ConnectionOptions, RequestReceived
from fairway.runtime.buffers import LazyBuffer
from fairway.runtime.clock import Clock
from fairway.runtime.net import ListeningSocket, Net
from fairway.scheduling import Scheduler
from fairway.serving.http import EXHAUSTED, LIVE, METRICS, READY, HttpListener, HttpResponse, Pages
from fairway.serving.memory_budget import Allowance, Budget
from fairway.serving.metrics import MetricsText, ServerCounters
from fairway.serving.read_limits import FrameAdmission, ReadThrottle
from fairway.serving.requests import Requester, ServedRequest
from fairway.serving.session import ServerSession

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_host(host: str, *, allow_remote: bool) -> None:
    """Raise unless the address is loopback or the operator allows remote clients: there is no authentication yet."""
    if host not in LOOPBACK and not allow_remote:
        raise Misuse(
            f"{host} can be reached by others, and nobody is asked who they are: use 127.0.0.1, "
            "or allow it (--allow-remote)"
        )


class Listeners:
    """The ports of a server, closed until `open`. The port for probes closes last: probes learn that the server
    stops."""

    def __init__(self, net: Net, session_manager: SessionManager, http: HttpListener) -> None:
        self._net = net
        self._session_manager = session_manager
        self._http = http
        self._listener: ListeningSocket | None = None
        self._http_listener: ListeningSocket | None = None

    async def open(self, host: str, port: int, http_port: int | None) -> None:
        if http_port is not None:
            self._http_listener = await self._net.listen(self._http.new_session, host, http_port)
        self._listener = await self._net.listen(self._session_manager.new_session, host, port)

    @property
    def are_open(self) -> bool:
        return self._listener is not None

    @property
    def port(self) -> int:
        return self._listener.port if self._listener is not None else 0

    @property
    def http_port(self) -> int | None:
        return self._http_listener.port if self._http_listener is not None else None

    def close(self) -> None:
        """Close the port for clients."""
        if self._listener is not None:
            self._listener.close()

    def close_http(self) -> None:
        if self._http_listener is not None:
            self._http_listener.close()
        self._http.close()


_DOORWAY = 128  # connections beyond the bound that get a refusal; further connections are cut off without an answer
_RETRY_AFTER_MS = 1_000
_DISCARDED_PER_TURN = 2  # pieces of up to 256 KB: to free half of a large frame at once took 10 ms (bench/hostile)
_DISCARDED_SHARE = 32  # or this part of all, if that is more: pieces must not pile up
_BUFFERS_PER_STEP = 4  # a step of `free_some` in each turn, and one more for every four unused buffers
_WITHDRAWN_PER_TURN = 16  # requests whose client is gone: 0.1 ms; a thousand at once took 6 ms (bench/hostile)
_WITHDRAWN_SHARE = 1_024  # or this part of all, if that is more: requests must not pile up


@dataclass(frozen=True, slots=True)
class SessionManagerOptions:
    """The options for connections that an operator may set."""

    connections_max: int = limits.CONNECTIONS_MAX
    partial_bytes_max: int = 128 * limits.MIB  # of frames that have arrived in part, on all connections
    unsent_bytes_max: int = 128 * limits.MIB  # of answers to clients that read slower than they ask
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)

    def __post_init__(self) -> None:
        if min(self.partial_bytes_max, self.unsent_bytes_max) < self.connection.frame_bytes_max:
            raise Misuse(
                f"room for one frame of {self.connection.frame_bytes_max} bytes is the least that connections need"
            )


class SessionManager:
    """All sessions of one server. `handle` takes their requests, and `on_closed` each session that has ended."""

    def __init__(
        self,
        clock: Clock,
        options: SessionManagerOptions,
        meters: ServerCounters,
        scheduler: Scheduler,
        waiting: Allowance[Requester],
        handle: Callable[[ServerSession, RequestReceived], None],
        handle_together: Callable[[ServerSession, BatchesReceived], bool],
        on_closed: Callable[[ServerSession], None],
    ) -> None:
        self.clock = clock
        self.handle = handle
        self.handle_together = handle_together
        self._on_closed = on_closed
        loop = asyncio.get_running_loop()
        self.incoming: FrameAdmission[ServerSession] = FrameAdmission(
            options.partial_bytes_max,
            clock,
            loop.call_later,
            weigh=lambda session: session.partial_bytes,
            listens=lambda session: session.is_listening,
            go_on=ServerSession.frame_granted,
            dismiss=ServerSession.dismiss,
        )
        self.outgoing: Budget[ServerSession] = Budget(
            options.unsent_bytes_max, lambda session: session.unsent_bytes, ServerSession.abort
        )
        self.read_throttle: ReadThrottle[ServerSession] = ReadThrottle(
            clock, loop.call_soon, ServerSession.go_on, lambda session: session.account.end_ns
        )
        self.scheduler = scheduler
        self._waiting = waiting
        self._refusals_end_ns = 0
        self._options = options
        self.meters = meters
        self._call_later = loop.call_later
        self._call_soon = loop.call_soon
        self._call_from_any_thread = loop.call_soon_threadsafe
        self._unflushed: list[ServerSession] = []
        self._debris: list[Bytes] = []
        self._unused: list[LazyBuffer] = []
        self._is_sweeping = False
        self._orphans: deque[ServedRequest[Any]] = deque()
        self._sessions: dict[ServerSession, None] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def connections_max(self) -> int:
        return self._options.connections_max

    # --- host of the sessions ----------------------------------------------------------------------------------------

    def new_session(self) -> ServerSession:
        return ServerSession(self, self._options.connection, self._call_later)

    def session_opened(self, session: ServerSession) -> Refused | None:
        """A reason to turn the session away, or None. May cut the session off."""
        self._sessions[session] = None
        self._deserted.clear()
        self.meters.connections += 1
        if len(self._sessions) > self._options.connections_max + _DOORWAY:
            self.meters.refused(Code.TOO_MANY_CONNECTIONS)
            session.abort()
        if self._is_closing:
            return Refused(Code.DRAINING, "this broker is about to stop")
        if len(self._sessions) > self._options.connections_max:
            sentence = f"this broker has {self._options.connections_max} connections and takes no more"
            return Refused(Code.TOO_MANY_CONNECTIONS, sentence, retry_after_ms=_RETRY_AFTER_MS)
        return None

    def session_closed(self, session: ServerSession) -> None:
        self._sessions.pop(session, None)
        self.incoming.forget(session)
        self.outgoing.forget(session)
        self._waiting.forget(session)
        self._orphan(session)
        self._on_closed(session)
        if not self._sessions:
            self._deserted.set()

    def _orphan(self, session: ServerSession) -> None:
        """Withdraw the waiting requests of a client that is gone, a few in each turn of the loop. The scheduler knows
        that they are cancelled; this only frees memory."""
        if session.waiting and not self._orphans:
            self._call_soon(self._withdraw_some)
        self._orphans.extend(session.waiting)
        session.waiting.clear()

    def _withdraw_some(self) -> None:
        count = max(_WITHDRAWN_PER_TURN, len(self._orphans) // _WITHDRAWN_SHARE)
        for _ in range(min(count, len(self._orphans))):
            self._orphans.popleft().asker_is_gone()
        if self._orphans:
            self._call_soon(self._withdraw_some)

    def rest_ms(self, elapsed_ns: int) -> int:
        """How long a connection rests whose outright refusals took `elapsed_ns`. All outright refusals share one
        account."""
        now_ns = self.clock.monotonic_ns()
        self._refusals_end_ns = max(self._refusals_end_ns, now_ns) + elapsed_ns * limits.REFUSALS_SHARE
        return (self._refusals_end_ns - now_ns) // 1_000_000

    def discard(self, debris: list[Bytes]) -> None:
        """Free the pieces of incomplete frames, a few in each turn of the loop, so that no client waits."""
        self._debris += debris
        self._sweep_soon()

    def discard_buffer(self, buffer: LazyBuffer) -> None:
        """Free the buffer of a large frame that is no longer used. Its last user may be the thread of a disk,
        so this is called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the buffer is freed at once
            self._call_from_any_thread(self._free_soon, buffer)

    def _free_soon(self, buffer: LazyBuffer) -> None:
        self._unused.append(buffer)
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if not self._is_sweeping and (self._debris or self._unused):
            self._is_sweeping = True
            self._call_soon(self._sweep)

    def _sweep(self) -> None:
        pieces = max(_DISCARDED_PER_TURN, len(self._debris) // _DISCARDED_SHARE)
        del self._debris[-pieces:]
        for _ in range(1 + len(self._unused) // _BUFFERS_PER_STEP):
            if self._unused and not self._unused[-1].free_some():
                self._unused.pop()
        self._is_sweeping = False
        self._sweep_soon()

    def flush_soon(self, session: ServerSession) -> None:
        """Call the session's `flush` at the end of this turn, or early in the next."""
        if not self._unflushed:
            self.scheduler.call_first(self._flush)
        self._unflushed.append(session)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for session in unflushed:
            session.flush()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drain all sessions: they answer what is in flight, and take nothing new."""
        self._is_closing = True
        for session in list(self._sessions):
            session.drain(reason)

    def cut_off(self) -> None:
        """Abort all sessions without another answer."""
        self._is_closing = True
        for session in list(self._sessions):
            session.abort()

    async def deserted(self, within_ms: int) -> None:
        """Wait a while for clients to take their last answers, then abort all sessions."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_ms / 1_000):
                await self._deserted.wait()
        self.cut_off()


class SocketServer(ABC):
    """What brokers, delay servers and meta servers have in common: ports, sessions, a bound on waiting requests, and
    the pages for probes. `name`: how the server calls itself."""

    def __init__(
        self,
        clock: Clock,
        net: Net,
        scheduler: Scheduler,
        options: SessionManagerOptions,
        waiting_bytes_max: int,
        name: str,
    ) -> None:
        self.clock = clock
        self.scheduler = scheduler
        self.meters = ServerCounters()
        self.waiting: Allowance[Requester] = Allowance(waiting_bytes_max, f"wait in this {name}'s requests")
        self.session_manager = SessionManager(
            clock, options, self.meters, scheduler, self.waiting, self.handle, self._handle_together, self._on_closed
        )
        self.pages: Pages = {METRICS: self._metrics_page, LIVE: self._live_page, READY: self._ready_page}
        self._listeners = Listeners(net, self.session_manager, HttpListener(self.pages))
        self._started_ms = clock.wall_ms()
        self._is_stopping = False

    @abstractmethod
    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Take a request. The session answers the `Refused` and `Misuse` that this raises."""

    def _handle_together(self, session: ServerSession, received: BatchesReceived) -> bool:
        """Take all of these requests as one, if the server can. False: `handle` takes them one by one. The session
        answers each of them with the `Refused` that this raises."""
        del session, received
        return False

    def _on_closed(self, session: ServerSession) -> None:
        """A session has ended."""
        del session

    @property
    def port(self) -> int:
        return self._listeners.port

    @property
    def http_port(self) -> int | None:
        return self._listeners.http_port

    # --- pages for probes --------------------------------------------------------------------------------------------

    @abstractmethod
    def _metrics_page(self) -> HttpResponse: ...

    def _fault(self) -> StorageFault | None:
        """Why a restart would help; None: it would not."""
        return None

    def _readiness(self) -> str:
        """What a server says to which clients may be sent."""
        return "ready"

    def _live_page(self) -> HttpResponse:
        fault = self._fault()
        return HttpResponse(200, "alive\n") if fault is None else HttpResponse(503, f"{fault}\n")

    def _ready_page(self) -> HttpResponse:
        fault = self._fault()
        if fault is not None or self._is_stopping or not self._listeners.are_open:
            return HttpResponse(503, f"{fault or ('stopping' if self._is_stopping else 'starting')}\n")
        return EXHAUSTED if self.waiting.is_exhausted else HttpResponse(200, f"{self._readiness()}\n")

    def show_connections(self, out: MetricsText) -> None:
        out.one("connections", "gauge", "Connections open.", len(self.session_manager))
        out.one("connections_total", "counter", "Connections accepted.", self.meters.connections)
