"""A sealed event loop: it refuses every call that would reach a thread, a socket or a signal.

Product code goes through `fairway.runtime`. A call that goes around it would escape the seed, so it fails at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from fairway.errors import Misuse


class NotSimulated(Misuse):
    """A call that would reach outside the simulation."""


def _refused(name: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotSimulated(f"{name}() reaches outside the simulation: go through fairway.runtime instead")

    call: Callable[..., NoReturn] = refuse
    return call


class SealedLoop(asyncio.AbstractEventLoop):
    """The calls that a simulated loop refuses. Typed as Any, because nobody needs the signatures of refusals."""

    run_in_executor: Any = _refused("run_in_executor")
    set_default_executor: Any = _refused("set_default_executor")
    set_task_factory: Any = _refused("set_task_factory")

    add_signal_handler: Any = _refused("add_signal_handler")
    remove_signal_handler: Any = _refused("remove_signal_handler")
    subprocess_exec: Any = _refused("subprocess_exec")
    subprocess_shell: Any = _refused("subprocess_shell")
    connect_read_pipe: Any = _refused("connect_read_pipe")
    connect_write_pipe: Any = _refused("connect_write_pipe")

    getaddrinfo: Any = _refused("getaddrinfo")
    getnameinfo: Any = _refused("getnameinfo")
    create_connection: Any = _refused("create_connection")
    create_server: Any = _refused("create_server")
    create_datagram_endpoint: Any = _refused("create_datagram_endpoint")
    create_unix_connection: Any = _refused("create_unix_connection")
    create_unix_server: Any = _refused("create_unix_server")
    connect_accepted_socket: Any = _refused("connect_accepted_socket")
    start_tls: Any = _refused("start_tls")
    sendfile: Any = _refused("sendfile")

    add_reader: Any = _refused("add_reader")
    remove_reader: Any = _refused("remove_reader")
    add_writer: Any = _refused("add_writer")
    remove_writer: Any = _refused("remove_writer")
    sock_accept: Any = _refused("sock_accept")
    sock_connect: Any = _refused("sock_connect")
    sock_recv: Any = _refused("sock_recv")
    sock_recv_into: Any = _refused("sock_recv_into")
    sock_recvfrom: Any = _refused("sock_recvfrom")
    sock_recvfrom_into: Any = _refused("sock_recvfrom_into")
    sock_sendall: Any = _refused("sock_sendall")
    sock_sendfile: Any = _refused("sock_sendfile")
    sock_sendto: Any = _refused("sock_sendto")
