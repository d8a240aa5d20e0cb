"""The pages /metrics, /livez and /readyz over HTTP/1.1, for probes and Prometheus.

`HttpListener` serves GET only, one request per connection, with bounds on size, time and number. It is no web server,
and must not be reachable by strangers.

A probe always gets in. At the bound, a new connection replaces the connection that has waited longest with its request.
If all have sent a request, it replaces the connection that has taken longest to read its answer. A probe sends its
request at once and gets its answer at once, so it is never the oldest. A client that holds connections open only evicts
its own.

`ProbePages` are the pages of one copy of several. A copy closes its directory and opens it again, as another server,
when another copy takes over or its disk is full. The port for probes belongs to the copy, not to that server. While the
directory is closed, /metrics shows the last known figures, with `fairway_store_is_open 0`. /livez then says that a
restart would not help, and /readyz that clients should go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from fairway.errors import FairwayError
from fairway.runtime.net import ListeningSocket, Net
from fairway.serving.metrics import CONTENT_TYPE, MetricsText

METRICS, LIVE, READY = "/metrics", "/livez", "/readyz"


def show_store(out: MetricsText, *, is_open: bool) -> None:
    out.one("store_is_open", "gauge", "0: the data directory is closed, figures are those known last.", int(is_open))


class ProbePages:
    """Answers from the server that has the directory open, or from its last figures. `why`: what the copy waits for."""

    def __init__(self, net: Net, why: Callable[[], str]) -> None:
        self._net = net
        self._why = why
        self._server: Pages | None = None
        self._last: str | None = None
        self.pages: Pages = {METRICS: self._metrics, LIVE: self._live, READY: self._ready}
        self._http_listener = HttpListener(self.pages)
        self._listener: ListeningSocket | None = None

    async def listen(self, host: str, port: int | None) -> int | None:
        """Listen, and return the port; None: the operator wants no probes."""
        if port is None:
            return None
        self._listener = await self._net.listen(self._http_listener.new_session, host, port)
        return self._listener.port

    def opened(self, pages: Pages) -> None:
        """Show the pages of the server that has opened the directory."""
        self._server, self._last = pages, None

    def closed(self) -> None:
        """Keep the last figures as text, after the server has let go of the directory. Nothing else of the server
        stays."""
        server, self._server = self._server, None
        if server is not None:
            self._last = _text(server)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._http_listener.close()

    def _metrics(self) -> HttpResponse:
        if self._server is not None:
            return self._server[METRICS]()
        return HttpResponse(200, self._last if self._last is not None else _nothing_known(), CONTENT_TYPE)

    def _live(self) -> HttpResponse:
        return HttpResponse(200, "alive\n") if self._server is None else self._server[LIVE]()

    def _ready(self) -> HttpResponse:
        if self._server is not None:
            return self._server[READY]()
        return HttpResponse(503, f"the data directory is closed: {self._why()}\n")


def _text(server: Pages) -> str:
    try:
        return server[METRICS]().text
    except FairwayError:  # a figure that only the open directory has
        return _nothing_known()


def _nothing_known() -> str:
    out = MetricsText()
    show_store(out, is_open=False)
    return out.text()


HEAD_BYTES_MAX = 8_192  # request line and headers; a scraper sends some hundred bytes
CONNECTIONS_MAX = 64  # a scraper and a few probes; the next connection replaces the oldest idle one
CONNECTION_S_MAX = 10.0  # from the connection to the last byte of the answer, however slow the client is

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpResponse(NamedTuple):
    """One answer."""

    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"


EXHAUSTED = HttpResponse(503, "too many requests wait: clients are refused as busy\n")

Pages: TypeAlias = Mapping[str, Callable[[], HttpResponse]]


class HttpListener:
    """Makes a session per connection, and bounds their number."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.evictions = 0
        self._idle: dict[HttpSession, None] = {}  # no whole request has come; the oldest comes first
        self._answered: dict[HttpSession, None] = {}  # the client has not read the answer to its end

    def __len__(self) -> int:
        return len(self._idle) + len(self._answered)

    def new_session(self) -> HttpSession:
        return HttpSession(self)

    def opened(self, session: HttpSession) -> None:
        if len(self) >= CONNECTIONS_MAX:
            oldest = next(iter(self._idle or self._answered))
            self.evictions += 1
            self.closed(oldest)
            oldest.abort()
        self._idle[session] = None

    def answered(self, session: HttpSession) -> None:
        if session in self._idle:
            del self._idle[session]
            self._answered[session] = None

    def closed(self, session: HttpSession) -> None:
        self._idle.pop(session, None)
        self._answered.pop(session, None)

    def close(self) -> None:
        for session in [*self._idle, *self._answered]:
            session.abort()


class HttpSession(asyncio.Protocol):
    """One connection: reads a request head, writes a page, closes."""

    def __init__(self, http_listener: HttpListener) -> None:
        self._http_listener = http_listener
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport; uvloop's has no common base
        self._http_listener.opened(self)
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_S_MAX, self.abort)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._head += data
        head, blank, _ = self._head.partition(b"\r\n\r\n")
        if blank:
            self._write(transport, self._answer(head))
        elif len(self._head) > HEAD_BYTES_MAX:
            self._write(transport, HttpResponse(400, f"a request has at most {HEAD_BYTES_MAX} bytes\n"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._http_listener.closed(self)
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, transport: asyncio.Transport, page: HttpResponse) -> None:
        self._http_listener.answered(self)
        transport.write(_encode(page))
        transport.close()

    def _answer(self, head: bytes) -> HttpResponse:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HttpResponse(400, "this is no request of HTTP/1.1\n")
        method, target, _ = words
        if method != b"GET":
            return HttpResponse(405, "only GET is answered here\n")
        page = self._http_listener.pages.get(target.partition(b"?")[0].decode("ascii", "replace"))
        if page is None:
            return HttpResponse(404, f"there are only {', '.join(self._http_listener.pages)}\n")
        try:
            return page()
        except FairwayError as error:  # the page itself must say what is wrong
            return HttpResponse(503, f"{error}\n")


def _encode(page: HttpResponse) -> bytes:
    body = page.text.encode("utf-8")
    allow = "Allow: GET\r\n" if page.status == 405 else ""
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{allow}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
