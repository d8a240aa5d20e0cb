"""Is the other side still there? Whoever has heard nothing for an interval asks; after three intervals it is dead.

Any byte that arrives counts as a sign of life, so a busy connection never pings. A side that was itself stopped for a
while (a suspended machine, a debugger) finds all its deadlines passed at once: it still asks twice and waits after each
question, because what it did not hear may lie unread in its own socket.

A transport in memory reports the end of the other side at once. A pulse that is off never asks and never gives up.
"""

from __future__ import annotations

import enum

_NS_PER_MS = 1_000_000
INTERVALS_MAX = 3  # missed in a row
NEVER_NS = 1 << 63


class Beat(enum.Enum):
    """What is to be done now."""

    NOTHING = "wait"
    PING = "ask"
    DEAD = "give up"


class HeartbeatTimer:
    """The heartbeat of one connection, from one side's view."""

    __slots__ = ("_asked", "_due_ns", "_is_on", "interval_ns")

    def __init__(self, interval_ms: int, now_ns: int, *, is_on: bool = True) -> None:
        self.interval_ns = interval_ms * _NS_PER_MS
        self._is_on = is_on
        self.heard(now_ns)

    def heard(self, now_ns: int) -> None:
        """A sign of life."""
        self._asked = 0
        self._due_ns = now_ns + self.interval_ns if self._is_on else NEVER_NS

    @property
    def due_ns(self) -> int:
        """When `on_time` has something to do; `NEVER_NS` for a pulse that is off."""
        return self._due_ns

    def on_time(self, now_ns: int) -> Beat:
        if now_ns < self._due_ns:
            return Beat.NOTHING
        if self._asked == INTERVALS_MAX - 1:
            return Beat.DEAD
        self._asked += 1
        self._due_ns = now_ns + self.interval_ns
        return Beat.PING
