"""A port for a server that must have the same one after a restart, or whose address others are told beforehand."""

from __future__ import annotations

import random
import socket

from fairway.errors import FairwayError

# Below what kernels give to those who dial: a port from there may be taken by anybody's next connection.
_FIRST, _LAST = 10_000, 30_000
_ATTEMPTS_MAX = 1_000


def free_port() -> int:
    """One that nobody listens at now, and that nobody is given by chance."""
    for _ in range(_ATTEMPTS_MAX):
        with socket.socket() as probe:
            port = random.randint(_FIRST, _LAST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise FairwayError(f"no free port was found between {_FIRST} and {_LAST}")
