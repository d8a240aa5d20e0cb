"""Runs that one response has: which messages go out behind others of their keys.

A run grows from what is parked behind its head, in order. What was parked long ago comes first: its batches are sent
whole, and a response that has the messages of few batches is a small one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from fairway.groups.keys import NO_KEY, Keys


class Runs:
    """Behind each head at most `most` messages; 0: there are no runs."""

    __slots__ = ("_keys", "_length", "_parking", "chosen", "most")

    def __init__(self, keys: Keys, most: int) -> None:
        self._keys = keys
        self.most = most
        self.chosen: list[int] = []  # sequences
        self._length: dict[int, int] = {}  # by key, of those that have a head in this response
        self._parking: dict[int, list[int]] = {}  # by key: what is parked by this very pull

    def lead(self, keys: Iterable[int]) -> None:
        """Heads of these keys go out, and have not failed before."""
        if self.most:
            for key in keys:
                if key != NO_KEY and not self._keys.is_run(key):
                    self._length.setdefault(key, 0)

    def park(self, parked: Iterable[tuple[int, int]]) -> None:
        """Sequences and keys, in order."""
        if self.most:
            for sequence, key in parked:
                self._parking.setdefault(key, []).append(sequence)

    def follow(self, behind: Iterable[tuple[int, int]]) -> None:
        """Some of those go out: the first of their keys."""
        for sequence, key in behind:
            self._length[key] += 1
            self.chosen.append(sequence)

    def grow(self, room: int) -> int:
        """All runs, by equal shares of so many messages; how many it was."""
        if not room or not self._length or not (self._parking or self._keys.parked_count):
            return 0
        before = len(self.chosen)
        ends = [(key, min(self.most, self._waiting(key))) for key in self._length]
        growing = [(key, end) for key, end in ends if end > self._length[key]]
        share = room // max(len(growing), 1)
        for key, end in growing:
            begin = self._length[key]
            self._length[key] = min(begin + share, end)
            behind = chain(self._keys.parked_behind(key), self._parking.get(key, ()))
            self.chosen += islice(behind, begin, self._length[key])
        return len(self.chosen) - before

    def _waiting(self, key: int) -> int:
        return len(self._keys.parked_behind(key)) + len(self._parking.get(key, ()))
