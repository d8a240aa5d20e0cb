"""Order by key: which key an open message has, which keys have one out, and who is parked behind it.

    out        one message of the key is in somebody's hands, waits for its next attempt, or dies: the *head*
    parked     later messages of that key, below the cursor and never handed out, in order
    halted     the head went to dead letter and the group halts then: nothing of the key goes out
    resting    one went out just now, and the rate of keys does not allow the next before a certain time

Only the head of a key can be handed out, so two messages of one key are never out at once, whoever pulls. When the head
is done the next one that is parked becomes the head: that follows from the event, and is no event of its own.

Keys are hashes as they stand in a batch (0: no key). Two keys with the same hash wait for each other, which harms
nobody. A lot's worth of messages is taken in and struck off by a few calls of `dict` and `set`, which loop in C: there
is no Python for each message until one is parked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

from fairway import limits
from fairway.errors import invariant
from fairway.groups.lot import Range

NO_KEY = 0


class Keys:
    """What a group that is ordered by key knows of its open messages."""

    __slots__ = ("_of", "_parked", "halted", "out", "parked_count", "resting")

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # sequence → key, of every open message that was handed out or parked here
        self._parked: dict[int, deque[int]] = {}
        self.parked_count = 0
        self.out: set[int] = set()  # asked, never iterated in order; those that are halted, too
        self.halted: set[int] = set()
        self.resting: dict[int, int] = {}  # until when, wall clock; the first to end comes first, as a rule

    def __len__(self) -> int:
        """Open messages, as far as they are known here."""
        return len(self._of)

    def key_of(self, sequence: int) -> int:
        return self._of.get(sequence, NO_KEY)

    def keys_of(self, ranges: Iterable[Range]) -> set[int]:
        found = set(map(self._of.get, _sequences(ranges), repeat(NO_KEY)))
        found.discard(NO_KEY)
        return found

    @property
    def first_parked(self) -> int | None:
        return min((queue[0] for queue in self._parked.values()), default=None)

    def parked(self) -> list[int]:
        """All of them, by sequence."""
        return sorted(chain.from_iterable(self._parked.values()))

    def parked_behind(self, key: int) -> Sequence[int]:
        return self._parked.get(key, ())

    def is_free(self, keys: Sequence[int]) -> bool:
        """Whether messages with these keys, one after another, can all be handed out at once."""
        distinct = set(keys)
        unkeyed = keys.count(NO_KEY) if NO_KEY in distinct else 0
        is_each_once = len(distinct) - bool(unkeyed) == len(keys) - unkeyed
        return is_each_once and distinct.isdisjoint(self.out) and distinct.isdisjoint(self.resting)

    def rests_until(self, key: int, now_ms: int) -> int:
        """When it may go out; 0: at once."""
        until_ms = self.resting.get(key, 0)
        return until_ms if until_ms > now_ms else 0

    # --- what happens

    def hand_out(self, ranges: Iterable[Range], keys: Sequence[int]) -> None:
        """Fresh messages: each is the head of its key."""
        self._of.update(zip(_sequences(ranges), keys, strict=True))
        self.out.update(keys)
        self.out.discard(NO_KEY)

    def park(self, ranges: Iterable[Range], keys: Sequence[int]) -> list[int]:
        """Behind others of their keys. Those that have nobody before them, because their keys rest, by sequence: each
        is the head of its key."""
        resting = []
        for sequence, key in zip(_sequences(ranges), keys, strict=True):
            self._of[sequence] = key
            if key in self.out:
                self._parked.setdefault(key, deque()).append(sequence)
                self.parked_count += 1
            else:
                invariant(key in self.resting, "a message is parked behind another, or its key rests")
                self.out.add(key)
                resting.append(sequence)
        return resting

    def rest(self, keys: Iterable[int], until_ms: int, now_ms: int) -> None:
        """These went out: the next of each may not before that time."""
        for key in keys:
            if key:
                self.resting.pop(key, None)
                self.resting[key] = until_ms
        while self.resting and len(self.resting) > limits.GROUP_KEYS_RESTING_MAX:
            del self.resting[next(iter(self.resting))]
        while self.resting and self.resting[key := next(iter(self.resting))] <= now_ms:
            del self.resting[key]

    def unpark(self, ranges: Iterable[Range]) -> None:
        """These will never be handed out; whoever is not parked is left alone."""
        gone = set(_sequences(ranges))
        for key in {self._of[each] for each in gone if each in self._of}:
            before = self._parked.get(key, ())
            left = deque(each for each in before if each not in gone)
            for each in before:
                if each in gone:
                    del self._of[each]
            self.parked_count -= len(before) - len(left)
            if left:
                self._parked[key] = left
            else:
                self._parked.pop(key, None)

    def done(self, ranges: Iterable[Range], *, halts: bool = False) -> list[int]:
        """These are done with. The messages that take their places, by sequence; none where the keys halt."""
        keys = set(map(self._of.pop, _sequences(ranges), repeat(NO_KEY)))
        keys.discard(NO_KEY)
        if halts:
            self.halted |= keys
            return []
        return self._advance(keys)

    def go_on(self, key: int) -> list[int]:
        """A key that has halted goes on (0: all that have): the messages that are first."""
        going = set(self.halted) if key == NO_KEY else self.halted & {key}
        self.halted -= going
        return self._advance(going)

    def _advance(self, keys: set[int]) -> list[int]:
        followed = self._parked.keys() & keys
        self.out -= keys - followed if followed else keys
        return sorted(self._next(key) for key in followed)

    def _next(self, key: int) -> int:
        queue = self._parked[key]
        sequence = queue.popleft()
        self.parked_count -= 1
        if not queue:
            del self._parked[key]
        return sequence

    def clear(self) -> None:
        for part in (self._of, self._parked, self.out, self.halted, self.resting):
            part.clear()
        self.parked_count = 0

    # --- as a snapshot has it

    def pairs(self) -> list[tuple[int, int]]:
        """Sequence and key of every open message that has one."""
        return sorted((sequence, key) for sequence, key in self._of.items() if key)

    def restore(self, pairs: Iterable[tuple[int, int]], parked: Iterable[int], halted: Iterable[int]) -> None:
        waiting = set(parked)
        self.halted.update(halted)
        self.out.update(self.halted)
        for sequence, key in sorted(pairs):
            self._of[sequence] = key
            if sequence in waiting:
                self._parked.setdefault(key, deque()).append(sequence)
            else:
                self.out.add(key)
        self.parked_count = sum(map(len, self._parked.values()))


def _sequences(ranges: Iterable[Range]) -> Iterator[int]:
    return chain.from_iterable(range(first, first + count) for first, count in ranges)
