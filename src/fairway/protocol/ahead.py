"""How far a consumer pulls ahead: as much as its program gets done in a quarter of a second.

What waits here is work that nobody else can do: a program with a slow handler that held thousands of messages would
leave nothing to those who come to help (bench/elasticity). And a fast one that held few would wait for the broker. So
the bound is found out:

    it ran dry, and the broker had more      twice as much
    messages waited here all the time        what it settled meanwhile, for as long as `_HORIZON_NS`
    it takes many at once, by its own wish   at least so many

A program that is idle is not slow: time counts only while messages wait.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = 32  # messages; a fast program is at 2,000 after six pulls, some ten milliseconds
_HORIZON_NS: Final = 250_000_000
_WINDOW_NS: Final = 100_000_000  # what is settled in less says little


class PrefetchTarget:
    """The bound on messages that wait, unbegun."""

    def __init__(self, most: int, *, is_bound: bool = True) -> None:
        """Without a bound of its own where messages are pushed: there they do not wait."""
        self.wish = 1  # how many the program takes at once
        self._most = most
        self._found = min(_FIRST, most) if is_bound else most
        self._has_more = False  # the broker gave about as many as it was asked for
        self._since_ns: int | None = None  # messages have waited here all the time
        self._settled = 0  # then

    @property
    def limit(self) -> int:
        return min(max(self._found, self.wish), self._most)

    def arrived(self, asked: int, count: int) -> None:
        """A pull was answered."""
        self._has_more = 2 * count >= asked

    def look(self, waiting: int, settled: int, now_ns: int, *, is_idle: bool = False) -> None:
        """How things stand: messages that wait, and that were settled so far. A pause says nothing."""
        if is_idle:
            self._since_ns = None
        elif not waiting:
            self._since_ns = None
            if self._has_more:
                self._has_more = False
                self._found = min(2 * self._found, self._most)
        elif self._since_ns is None:
            self._since_ns, self._settled = now_ns, settled
        elif now_ns - self._since_ns >= _WINDOW_NS:
            done = (settled - self._settled) * _HORIZON_NS // (now_ns - self._since_ns)
            self._found = max(1, min(done, 2 * self._found, self._most))
            self._since_ns, self._settled = now_ns, settled
