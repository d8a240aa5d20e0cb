"""A connection for one thread that has nothing else to do: it writes, then waits for what comes. No loop, and no reader
beside it; a Spark task is such a thread."""

from __future__ import annotations

import contextlib
import functools
import gc
import selectors
import socket
from collections import deque
from collections.abc import Sequence

from fairway.errors import FairwayError, Unreachable
from fairway.world.dialing import DIAL_S, Address

READ_BYTES = 1 << 20  # an answer of a scan comes in one or two reads
PARTS_MAX = 512  # of one gathering write: systems refuse more than 1,024
STALL_S = 60.0  # for a write: a broker that takes nothing for so long is gone


class WireCut(FairwayError):
    """The connection is gone; the sentence says how."""


class BlockingConnection:
    """One TCP connection. Every call may wait; an OSError comes out as `WireCut`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def dial(cls, addresses: Sequence[Address]) -> BlockingConnection:
        """To the first address that accepts; `Unreachable` says why none did."""
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
        """What has come; None: nothing did in time."""
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
        """Until something has come over one of them, or one was cut, or so long."""
        with selectors.DefaultSelector() as selector:
            for each in wires:
                selector.register(each._socket, selectors.EVENT_READ)
            selector.select(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


@functools.cache
def spare_the_collector() -> None:
    """Take all that a process has loaded so far out of what the garbage collector looks at; once.

    A Python worker of Spark forks for every task slot and collects at the end of each: with what it has imported that
    costs 30 ms of a task.
    """
    gc.freeze()
