"""A real ZooKeeper to throw away (`fairway.runtime.process`), and one that all tests of a process share."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack

from fairway.runtime.process import READY_S, TICK_MS, Ensemble, ZooKeeperServer, ensemble

__all__ = ["READY_S", "TICK_MS", "Ensemble", "ZooKeeperServer", "ensemble", "shared"]


@functools.cache
def shared() -> Ensemble:
    """One server for all tests of this process, which have paths of their own in it and leave it alone."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(ensemble())
