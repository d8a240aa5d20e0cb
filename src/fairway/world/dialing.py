"""Making a connection from a thread that can be called off at any moment."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

from fairway.world.clock import Clock

Address: TypeAlias = tuple[str, int]  # host and port

DIAL_S = 5.0  # for one address: a host that is up answers in well under a second


class Dialer:
    """Dials until somebody accepts, `DIAL_S` have passed, or the bell rings and it is called off."""

    def __init__(self, clock: Clock, bell: socket.socket, is_called_off: Callable[[], bool]) -> None:
        self._clock = clock
        self._bell = bell
        self._is_called_off = is_called_off

    def connect(self, address: Address) -> socket.socket | None:
        """A connection to whichever of the host's addresses accepts first, in their order; None: called off."""
        problem = OSError("no such host")
        for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            try:
                if self._connect_one(connection, where):
                    return connection
            except OSError as error:
                problem = error
            else:
                connection.close()
                return None
            connection.close()
        raise problem

    def _connect_one(self, connection: socket.socket, where: tuple[Any, ...]) -> bool:
        """False: called off."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # batches are the client's own doing
        with contextlib.suppress(BlockingIOError):
            connection.connect(where)
            return True
        end_ns = self._clock.monotonic_ns() + int(DIAL_S * 1e9)
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            selector.register(self._bell, selectors.EVENT_READ)
            while not self._is_called_off():
                left_s = (end_ns - self._clock.monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise TimeoutError(f"no answer within {DIAL_S:g} s")
                ready = [key.fileobj for key, _ in selector.select(left_s)]
                if connection in ready:
                    _raise_if_failed(connection)
                    return True
                silence(self._bell)
        return False


def silence(bell: socket.socket) -> None:
    """It has been heard."""
    with contextlib.suppress(BlockingIOError):
        bell.recv(4096)


def _raise_if_failed(connection: socket.socket) -> None:
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
