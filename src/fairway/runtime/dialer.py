"""The dialer: connects a socket that does not block, for a thread that must stop waiting when somebody wakes it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from fairway.runtime.clock import Clock
from fairway.runtime.net import DIAL_S, Address


class Dialer:
    """Dials until an address accepts, `DIAL_S` have passed for each, or a wake-up calls the dial off."""

    def __init__(self, clock: Clock, wakeup: socket.socket, is_called_off: Callable[[], bool]) -> None:
        self._clock = clock
        self._wakeup = wakeup
        self._is_called_off = is_called_off

    def connect(self, address: Address) -> socket.socket | None:
        """A connection to the first of the host's addresses that accepts; None: called off."""
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
        """Connect to one address. False: called off."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the client makes batches itself
        with contextlib.suppress(BlockingIOError):
            connection.connect(where)
            return True
        end_ns = self._clock.monotonic_ns() + int(DIAL_S * 1e9)
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._is_called_off():
                left_s = (end_ns - self._clock.monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise TimeoutError(f"no answer within {DIAL_S:g} s")
                ready = [key.fileobj for key, _ in selector.select(left_s)]
                if connection in ready:
                    if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(number, os.strerror(number))
                    return True
                silence(self._wakeup)
        return False


def silence(wakeup: socket.socket) -> None:
    """Drain the socket of wake-ups."""
    with contextlib.suppress(BlockingIOError):
        wakeup.recv(4096)
