"""A blocking connection: for one thread that writes, then waits for the answer, such as a Spark task. No event loop.

`Dialer` makes the connections of `threaded_link`: another thread can call off a dial at any moment.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fairway.errors import FairwayError, Unreachable
from fairway.runtime.clock import Clock

Address: TypeAlias = tuple[str, int]  # host and port

DIAL_S = 5.0  # for one address: a host that is up answers in well under a second


class Dialer:
    """Dials until an address accepts, `DIAL_S` have passed for each, or a ring of the bell calls the dial off."""

    def __init__(self, clock: Clock, bell: socket.socket, is_called_off: Callable[[], bool]) -> None:
        self._clock = clock
        self._bell = bell
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
    """Drain the bell's socket."""
    with contextlib.suppress(BlockingIOError):
        bell.recv(4096)


def _raise_if_failed(connection: socket.socket) -> None:
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))


READ_BYTES = 1 << 20  # an answer of a scan comes in one or two reads
PARTS_MAX = 512  # of one gathering write: systems refuse more than 1,024
STALL_S = 60.0  # for a write: a broker that takes nothing for so long is gone


class WireCut(FairwayError):
    """The connection is gone; the message says how."""


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
            self._socket.settimeout(STALL_S)
            while unsent:
                sent = self._socket.sendmsg([unsent[at] for at in range(min(len(unsent), PARTS_MAX))])
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
            data = self._socket.recv(READ_BYTES)
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


@functools.cache
def spare_the_collector() -> None:
    """Take all objects that exist so far out of the garbage collector's work; once.

    A Python worker of Spark forks for every task slot and collects at the end of each. With its imported modules, that
    costs 30 ms of a task.
    """
    gc.freeze()
