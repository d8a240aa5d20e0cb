"""A port for a server that must have the same one after a restart, or whose address others are told beforehand."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from typing import Final

from fairway.errors import FairwayError

# Below what kernels give to those who dial: a port from there may be taken by anybody's next connection.
_FIRST, _LAST = 10_000, 30_000
_ATTEMPTS_MAX = 1_000
_RESERVED_MAX = 64  # ports a process keeps reserved; a server listens long before so many others were asked for

_reserved: Final[deque[int]] = deque()  # file descriptors of bound sockets


def free_port() -> int:
    """Return a port where nobody listens, and that no other call returns, in this process or another.

    The port stays bound by a socket that permits the address to be reused: a server that permits it too can listen
    there, while another `free_port`, which does not permit it until it has the port, cannot take it.
    """
    for _ in range(_ATTEMPTS_MAX):
        with socket.socket() as probe:
            port = random.randint(_FIRST, _LAST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(probe.detach())
            if len(_reserved) > _RESERVED_MAX:
                os.close(_reserved.popleft())
            return port
    raise FairwayError(f"no free port was found between {_FIRST} and {_LAST}")
