"""Where a server can be reached: its port for clients, and one for probes if there is to be one."""

from __future__ import annotations

from fairway.errors import Misuse
from fairway.serving.hall import SessionManager
from fairway.serving.http import HttpListener
from fairway.world.net import ListeningSocket, Net

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_host(host: str, *, allow_remote: bool) -> None:
    """There is no authentication yet: an address that others can reach must be meant."""
    if host not in LOOPBACK and not allow_remote:
        raise Misuse(
            f"{host} can be reached by others, and nobody is asked who they are: use 127.0.0.1, "
            "or allow it (--allow-remote)"
        )


class Listeners:
    """Closed until `open`. The one for probes outlives the other: they are told that it is stopping."""

    def __init__(self, net: Net, hall: SessionManager, http: HttpListener) -> None:
        self._net = net
        self._hall = hall
        self._http = http
        self._listener: ListeningSocket | None = None
        self._http_listener: ListeningSocket | None = None

    async def open(self, host: str, port: int, http_port: int | None) -> None:
        if http_port is not None:
            self._http_listener = await self._net.listen(self._http.new_session, host, http_port)
        self._listener = await self._net.listen(self._hall.new_session, host, port)

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
        """To new clients."""
        if self._listener is not None:
            self._listener.close()

    def close_http(self) -> None:
        if self._http_listener is not None:
            self._http_listener.close()
        self._http.close()
