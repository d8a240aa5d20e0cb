"""Runs: messages that go out behind others of their keys, to a consumer that handles them one after another.

A run begins behind a head in the same response, or goes on behind messages that the consumer has from earlier ones. It
grows from the messages parked behind its head, in order, and at last from the fresh ones. Messages parked long ago go
first: their batches are sent whole, and a response with messages of few batches is small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from fairway.groups.keys import NO_KEY, Keys


class Runs:
    """The messages of one response that go out behind others of their keys."""

    __slots__ = ("_find_held", "_held", "_keys", "_parking", "_room", "_taken", "chosen", "most")

    def __init__(self, keys: Keys, most: int, find_held: Callable[[], set[int]] | None = None) -> None:
        """`most` messages may be out behind a head; 0: no runs. `find_held` finds what the consumer holds at the first
        attempt, if runs may get longer behind those; None: they may not."""
        self._keys = keys
        self._find_held = find_held
        self._held: set[int] | None = None
        self.most = most
        self.chosen: list[int] = []  # sequences
        self._room: dict[int, int] = {}  # by key: how many may go out in this response; 0 if none may
        self._taken: dict[int, int] = {}  # by key: how many of those that wait are chosen, the first ones
        self._parking: dict[int, list[int]] = {}  # by key: messages that this pull parks, without the chosen ones

    def lead(self, keys: Iterable[int]) -> None:
        """Heads of these keys go out at their first attempt."""
        if self.most:
            for key in keys:
                if key != NO_KEY and not self._keys.is_run(key):
                    self._room.setdefault(key, self.most)

    def room_of(self, key: int) -> int:
        """How many messages of a key that is out may go out behind it."""
        room = self._room.get(key)
        if room is None:
            if self._held is None and self._find_held is not None:
                self._held = self._find_held()
            keys = self._keys
            is_ours = self._held is not None and keys.is_all_in(key, self._held)
            room = self._room[key] = self.most - len(keys.following_of(key)) if is_ours else 0
        return room

    def next_room_of(self, key: int) -> int:
        """The same for the next fresh message of the key: 0 if others of it still wait."""
        return 0 if self._keys.parked_behind(key) else self.room_of(key)

    def park(self, parked: Iterable[tuple[int, int]]) -> None:
        """Note messages that this pull parks and does not hand out, as sequence and key, in order."""
        if self.most:
            for sequence, key in parked:
                self._parking.setdefault(key, []).append(sequence)

    def follow(self, sequences: Iterable[int], keys: Iterable[int]) -> None:
        """Hand out fresh messages behind others of their keys."""
        self.chosen += sequences
        for key, count in Counter(keys).items():
            self._room[key] -= count

    def grow(self, room: int) -> int:
        """Let `room` messages that wait go out, an equal share of each key; returns how many there are."""
        waiting = self._keys.waiting_keys | self._parking.keys()
        if self._find_held is None:
            waiting &= self._room.keys()
        growing = {key: count for key in waiting if (count := min(self.room_of(key), self._waiting(key)))}
        before = len(self.chosen)
        while growing and room > 0:
            share = room // len(growing)
            if not share:  # not one for each: the oldest go
                growing = dict.fromkeys(sorted(growing, key=self._next)[:room], 1)
                share = 1
            for key, count in growing.items():
                self._choose(key, min(share, count))
                room -= min(share, count)
            growing = {key: count - share for key, count in growing.items() if count > share}
        return len(self.chosen) - before

    def _waiting(self, key: int) -> int:
        return len(self._keys.parked_behind(key)) + len(self._parking.get(key, ())) - self._taken.get(key, 0)

    def _next(self, key: int) -> int:
        return next(self._queue(key))

    def _queue(self, key: int) -> Iterator[int]:
        behind = chain(self._keys.parked_behind(key), self._parking.get(key, ()))
        return islice(behind, self._taken.get(key, 0), None)

    def _choose(self, key: int, count: int) -> None:
        self.chosen += islice(self._queue(key), count)
        self._taken[key] = self._taken.get(key, 0) + count
        self._room[key] -= count
