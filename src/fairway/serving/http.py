"""A few pages over HTTP/1.1, for probes and Prometheus: GET only, one request per connection, bounded in size, time
and number. Not a web server, and not to be put where strangers reach it.

A probe always gets in. When all places are taken, the newcomer gets the place of the connection that has waited longest
with its request, or, where all have asked, of the one that has taken longest to read its answer. A probe sends its
request at once and is answered at once, so it is never the oldest; whoever holds connections open only evicts its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from fairway.errors import FairwayError

HEAD_BYTES_MAX = 8_192  # request line and headers; a scraper sends some hundred
CONNECTIONS_MAX = 64  # a scraper and a few probes; the next one takes the place of the oldest idle one
CONNECTION_S_MAX = 10.0  # from the connection to the last byte of the answer, however slow the other side is

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpResponse(NamedTuple):
    """What is answered."""

    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"


EXHAUSTED = HttpResponse(503, "too many requests wait: clients are refused as busy\n")

Pages: TypeAlias = Mapping[str, Callable[[], HttpResponse]]


class HttpListener:
    """Makes a protocol per connection, and sees to it that there are not too many."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.evictions = 0
        self._idle: dict[HttpSession, None] = {}  # no whole request has come; the oldest comes first
        self._answered: dict[HttpSession, None] = {}  # the answer has not been read to its end

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
    """One connection: a head comes in, a page goes out, the end."""

    def __init__(self, door: HttpListener) -> None:
        self._door = door
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport; uvloop's has no common base
        self._door.opened(self)
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
        self._door.closed(self)
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, transport: asyncio.Transport, page: HttpResponse) -> None:
        self._door.answered(self)
        transport.write(_encode(page))
        transport.close()

    def _answer(self, head: bytes) -> HttpResponse:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HttpResponse(400, "this is no request of HTTP/1.1\n")
        method, target, _ = words
        if method != b"GET":
            return HttpResponse(405, "only GET is answered here\n")
        page = self._door.pages.get(target.partition(b"?")[0].decode("ascii", "replace"))
        if page is None:
            return HttpResponse(404, f"there are only {', '.join(self._door.pages)}\n")
        try:
            return page()
        except FairwayError as error:  # whoever looks must be told what is wrong
            return HttpResponse(503, f"{error}\n")


def _encode(page: HttpResponse) -> bytes:
    body = page.text.encode("utf-8")
    allow = "Allow: GET\r\n" if page.status == 405 else ""
    head = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{allow}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
