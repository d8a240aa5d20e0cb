"""The network port: connections as asyncio transports and protocols; and TCP behind the port.

A caller may rely on this:

- Bytes arrive in the order written, in chunks of any size. `pause_writing` says stop, `resume_writing` continue. A
  caller that obeys them uses a bounded amount of memory, however slowly the other side reads.
- `connection_made` comes first. `connection_lost` comes exactly once and last, never from within the protocol's own
  call.
- A closed listener accepts nobody; its connections live on.
- No OSError is raised: a failed connection is `Unreachable`, an address that cannot be taken is `CannotListen`. Only
  `connection_lost` gets an OSError, as its argument.

`BlockingConnection` is TCP for one thread that writes, then waits for the answer, such as a Spark task. No event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from fairway.errors import CannotListen, FairwayError, Misuse, Unreachable

P = TypeVar("P", bound=asyncio.Protocol)
Address: TypeAlias = tuple[str, int]  # host and port

DIAL_S = 5.0  # for one address: a host that is up answers in well under a second

PORT_MAX = 65_535
_REASONS = {
    errno.EADDRINUSE: "another program listens there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EACCES: "the system keeps that port for its administrator",
}
_BACKLOG = 100  # connections that wait to be accepted; the same as in asyncio's own servers
_UNSENT_BYTES_MAX = 256 * 1024  # in the kernel, beyond the bytes on their way: one answer to a pull


class ListeningSocket(Protocol):
    """An address that accepts connections."""

    @property
    def port(self) -> int:
        """The port, even if 0 was asked for and the system chose."""

    def close(self) -> None:
        """Accept nobody any more. Existing connections stay."""

    async def wait_closed(self) -> None:
        """Return when the address is free again; does not wait for connections."""


class Net(Protocol):
    """The network port."""

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> ListeningSocket:
        """Accept connections at that address, each with a protocol from the factory. Port 0: any free one."""

    async def connect(self, factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
        """Make a connection; returns after `connection_made`. Bound the wait with `asyncio.timeout`.

        The factory is called before the dial, so that a failing factory leaves no connection behind.
        """


def check_port(port: int, *, least: int) -> None:
    if not least <= port <= PORT_MAX:
        raise Misuse(f"no such port: {port}; use {least} to {PORT_MAX}")


class RealNet:
    """TCP on the running loop."""

    def __init__(self) -> None:
        self._reserved: dict[tuple[str, int], list[socket.socket]] = {}

    async def reserve(self, host: str, port: int) -> None:
        """Take the address now, for a later `listen`; until then nobody is accepted there. For a server that must know
        that it can listen before it makes anything on disk."""
        check_port(port, least=0)
        if port == 0 or (host, port) in self._reserved:
            return  # `listen` finds a free one
        self._reserved[host, port] = await _bound(host, port)

    def release(self) -> None:
        """Release the reserved addresses that nobody has listened on."""
        reserved, self._reserved = self._reserved, {}
        for taken in reserved.values():
            _close(taken)

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> ListeningSocket:
        check_port(port, least=0)
        taken = self._reserved.pop((host, port), None) or await _bound(host, port)
        ports = {each.getsockname()[1] for each in taken}
        if len(ports) > 1:
            _close(taken)
            raise Misuse(
                f"{host!r} is several addresses, each with a free port of its own: name one of them, or a port"
            )
        loop = asyncio.get_running_loop()
        try:
            for each in taken:
                each.listen(_BACKLOG)  # a uvloop server that cannot listen reports nothing, and serves nobody
            servers = [await loop.create_server(factory, sock=each, backlog=_BACKLOG) for each in taken]
        except OSError as problem:
            _close(taken)
            raise _cannot_listen(host, port, problem) from problem
        for server in servers:
            _keep_unsent_at_hand(server.sockets)
        return _RealListener(servers, ports.pop())

    async def connect(self, factory: Callable[[], P], host: str, port: int) -> tuple[asyncio.Transport, P]:
        check_port(port, least=1)
        protocol = factory()
        try:
            return await asyncio.get_running_loop().create_connection(lambda: protocol, host, port)
        except (OSError, UnicodeError) as problem:
            raise Unreachable(f"cannot connect to {host}:{port}: {_reason(problem)}") from problem


async def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at every address of that name, made as asyncio's own servers make them, and not yet listening."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as problem:
        raise _cannot_listen(host, port, problem) from problem
    taken: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as problem:  # a machine without that address family: other addresses of the name will do
            missing = problem
            continue
        taken.append(made)
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a crash blocks the port for minutes
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(address)
        except OSError as problem:
            if problem.errno != errno.EADDRNOTAVAIL:
                _close(taken)
                raise _cannot_listen(host, port, problem) from problem
            taken.pop().close()
            missing = problem
    if not taken:
        why = missing or OSError(errno.EADDRNOTAVAIL, "no address")
        raise _cannot_listen(host, port, why) from why
    return taken


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _cannot_listen(host: str, port: int, problem: Exception) -> CannotListen:
    number = problem.errno if isinstance(problem, OSError) else None
    why = _REASONS.get(number or 0) or _reason(problem)
    return CannotListen(f"cannot listen on {host}:{port}: {why}", is_taken=number == errno.EADDRINUSE)


def _reason(problem: Exception) -> str:
    """The reason in words: asyncio puts the error's number and a tuple into its own text."""
    if not isinstance(problem, OSError) or problem.errno is None:
        return str(problem)
    return os.strerror(problem.errno) if problem.errno > 0 else str(problem.strerror)


def _keep_unsent_at_hand(listening: Iterable[socket.socket]) -> None:
    """Keep unsent bytes in transports, where bounds and budgets see them. Otherwise Linux would take megabytes for a
    client that does not read, and copy them. Connections inherit the option from their listener."""
    option: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    for each in listening:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES_MAX)


class _RealListener:
    def __init__(self, servers: Sequence[asyncio.Server], port: int) -> None:
        self._servers = servers
        self._port = port

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def wait_closed(self) -> None:
        # The server's own wait_closed waits, from Python 3.12 on, for every connection as well. `close` has closed the
        # sockets; one turn of the loop lets uvloop finish with its handles too.
        await asyncio.sleep(0)


_READ_BYTES = 1 << 20  # an answer of a scan comes in one or two reads
_PARTS_MAX = 512  # of one gathering write: systems refuse more than 1,024
_STALL_S = 60.0  # for a write: a broker that takes nothing for so long is gone


class WireCut(FairwayError):
    """The connection is gone; the message says how."""


def http_get(host: str, port: int, path: str, timeout_s: float, bytes_max: int) -> tuple[int, bytes]:
    """The status and the body of a page; `WireCut` if there is no answer, or too large a one."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(bytes_max + 1)
    except (OSError, http.client.HTTPException) as problem:
        raise WireCut(str(problem) or type(problem).__name__) from problem
    finally:
        connection.close()
    if len(body) > bytes_max:
        raise WireCut(f"a page of more than {bytes_max:,} bytes")
    return answer.status, body


class BlockingConnection:
    """One TCP connection. Every call may wait; an OSError becomes a `WireCut`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def dial(cls, addresses: Sequence[Address]) -> BlockingConnection:
        """Connect to the first address that accepts; `Unreachable` says why none did."""
        problems = []
        for address in addresses:
            try:
                connection = socket.create_connection(address, timeout=DIAL_S)
            except OSError as problem:
                problems.append(f"{address[0]}:{address[1]}: {problem.strerror or problem}")
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(connection)
        raise Unreachable("; ".join(problems))

    def write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        unsent = deque([memoryview(part) for part in parts])
        try:
            self._socket.settimeout(_STALL_S)
            while unsent:
                sent = self._socket.sendmsg([unsent[at] for at in range(min(len(unsent), _PARTS_MAX))])
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except OSError as problem:
            raise WireCut(f"the connection was cut: {problem.strerror or problem}") from None

    def read(self, timeout_s: float) -> bytes | None:
        """The bytes that have arrived; None: none did in time."""
        try:
            self._socket.settimeout(max(timeout_s, 0.001))
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return None
        except OSError as problem:
            raise WireCut(f"the connection was cut: {problem.strerror or problem}") from None
        if not data:
            raise WireCut("the other side closed the connection")
        return data

    @staticmethod
    def wait_any(wires: Sequence[BlockingConnection], timeout_s: float) -> None:
        """Wait until bytes arrive on a connection, one is cut, or the timeout passes."""
        with selectors.DefaultSelector() as selector:
            for each in wires:
                selector.register(each._socket, selectors.EVENT_READ)
            selector.select(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
