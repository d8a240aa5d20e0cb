"""The port between the product and a network: connections as asyncio transports and protocols.

What a caller may rely on:

- Bytes arrive in the order written, in chunks of any size. `pause_writing` says stop, `resume_writing` go on; whoever
  heeds them holds a bounded amount of memory, however slow the other side reads.
- `connection_made` comes first, `connection_lost` exactly once and last, never from within a call of one's own.
- A listener that is closed accepts nobody; the connections it made live on.
- No OSError is raised: a connection that cannot be made is `Unreachable`, an address that cannot be taken is
  `CannotListen`. An OSError is only ever handed over, to `connection_lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from fairway.errors import CannotListen, Misuse, Unreachable

P = TypeVar("P", bound=asyncio.Protocol)

PORT_MAX = 65_535
_UNSENT_BYTES_MAX = 256 * 1024  # in the kernel, beyond what is on its way: one answer to a pull


class Listener(Protocol):
    """An address that accepts connections."""

    @property
    def port(self) -> int:
        """The port, also where 0 was asked for and the system chose."""

    def close(self) -> None:
        """Accept nobody any more. Connections that were made stay."""

    async def wait_closed(self) -> None:
        """Return when the address is free again; does not wait for connections."""


class Net(Protocol):
    """What the product asks of a network."""

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
        """Accept connections at that address, each with a protocol from the factory. Port 0: any that is free."""

    async def connect(self, factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
        """Make a connection; returns after `connection_made`. Bound the wait with `asyncio.timeout`.

        The factory is called before dialing, so that one that raises leaves no connection behind.
        """


def check_port(port: int, *, least: int) -> None:
    if not least <= port <= PORT_MAX:
        raise Misuse(f"no such port: {port}; use {least} to {PORT_MAX}")


class RealNet:
    """TCP on the running loop."""

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
        check_port(port, least=0)
        try:
            server = await asyncio.get_running_loop().create_server(factory, host, port)
        except (OSError, UnicodeError) as problem:
            raise CannotListen(f"cannot listen on {host}:{port}: {problem}") from problem
        _keep_unsent_at_hand(server.sockets)
        ports = {each.getsockname()[1] for each in server.sockets}
        if len(ports) > 1:
            server.close()
            raise Misuse(
                f"{host!r} is several addresses, each with a free port of its own: name one of them, or a port"
            )
        return _RealListener(server, ports.pop())

    async def connect(self, factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
        check_port(port, least=1)
        protocol = factory()
        try:
            return await asyncio.get_running_loop().create_connection(lambda: protocol, host, port)
        except (OSError, UnicodeError) as problem:
            raise Unreachable(f"cannot connect to {host}:{port}: {problem}") from problem


def _keep_unsent_at_hand(listening: Iterable[socket.socket]) -> None:
    """Linux would take megabytes for a client that does not read, and copy them; what it has no use for yet is better
    kept in transports, where bounds and budgets see it. The connections have it from their listener."""
    option: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    for each in listening:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES_MAX)


class _RealListener:
    def __init__(self, server: asyncio.Server, port: int) -> None:
        self._server = server
        self._port = port

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        self._server.close()

    async def wait_closed(self) -> None:
        # The server's own wait_closed waits, from Python 3.12 on, for every connection as well. `close` has closed the
        # sockets; one turn of the loop lets uvloop finish with its handles too.
        await asyncio.sleep(0)
