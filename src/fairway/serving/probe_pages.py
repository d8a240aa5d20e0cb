"""The pages of one copy of several: they answer while its data directory is closed, too, which is when they are needed.

A copy closes its directory and opens it again, as another server, when it is deposed or its disk is full. The port for
probes belongs to the copy, not to that server. While the directory is closed, /metrics shows what was known last, with
`fairway_store_is_open 0`; /livez says that a restart would not help, /readyz that nobody should be sent here.
"""

from __future__ import annotations

from collections.abc import Callable

from fairway.errors import FairwayError
from fairway.serving.exposition import CONTENT_TYPE, MetricsText
from fairway.serving.http import HttpListener, HttpResponse, Pages
from fairway.world.net import ListeningSocket, Net

METRICS, LIVE, READY = "/metrics", "/livez", "/readyz"


def show_store(out: MetricsText, *, is_open: bool) -> None:
    out.one("store_is_open", "gauge", "0: the data directory is closed, figures are those known last.", int(is_open))


class ProbePages:
    """Answers from the server that has the directory open, or from what it said last. `why`: what it waits for."""

    def __init__(self, net: Net, why: Callable[[], str]) -> None:
        self._net = net
        self._why = why
        self._server: Pages | None = None
        self._last: str | None = None
        self.pages: Pages = {METRICS: self._metrics, LIVE: self._live, READY: self._ready}
        self._door = HttpListener(self.pages)
        self._listener: ListeningSocket | None = None

    async def listen(self, host: str, port: int | None) -> int | None:
        """Where it listens; None: nowhere, as was wanted."""
        if port is None:
            return None
        self._listener = await self._net.listen(self._door.new_session, host, port)
        return self._listener.port

    def opened(self, pages: Pages) -> None:
        """A server has opened the directory."""
        self._server, self._last = pages, None

    def closed(self) -> None:
        """It has let go of it. Its last figures are kept as text, so that nothing else of it has to be."""
        server, self._server = self._server, None
        if server is not None:
            self._last = _text(server)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._door.close()

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
