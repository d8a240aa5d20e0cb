"""Order by key: the key of each open message, the keys that have a message out, and the messages parked behind it.

    out        one message of the key is held, waits for its next attempt, or dies: the *head*
    following  later messages of that key that went out behind the head, to the same consumer: a *run*; in the head's
               response, or in a later one
    parked     later messages of that key, below the cursor and held by nobody, in order
    halted     the head became a dead letter and the group halts then: no message of the key goes out
    resting    a message went out, and the rate per key does not allow the next before a certain time

Only the head of a key can be handed out. A run of messages parked behind it can go with it, to a consumer that says
that it handles them one after another. A consumer that has everything of a key that is out can also get more messages
behind those (`is_all_in`). So two consumers never have messages of one key to begin.
When the head is done, the next message becomes the head: the first that follows, which the right consumer already has,
or the first that is parked. This step follows from the event, and is no event of its own.

A consumer does not begin a following message while the head is open. So following messages that come back (their
consumer failed at the head, left, or was given up for dead) count no attempt and are parked again. A consumer may
settle a following message out of turn, because its outcome for the earlier one was lost on the way. If the following
message failed, it waits as *early* among the unheld lots until it is the head.

Keys are hashes as in a batch (0: no key). Two keys with the same hash wait for each other, which is harmless. A few
calls of `dict` and `set`, which loop in C, add or remove all messages of a lot. Python runs per message only when a
message is parked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Sequence
from itertools import chain, repeat

from fairway import limits
from fairway.errors import InvariantViolated, invariant
from fairway.group_events import Range

NO_KEY = 0
_NOBODY = -1  # in place of a head: the key has halted, and no message of it is out


class Keys:
    """The open messages of a group that is ordered by key."""

    __slots__ = (
        "_following",
        "_following_count",
        "_of",
        "_parked",
        "early",
        "halted",
        "out",
        "parked_count",
        "resting",
    )

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # sequence → key, of every open message that was handed out or parked here
        self._parked: dict[int, list[int]] = {}  # a list of one takes 88 bytes, a deque 700
        self._following: dict[int, list[int]] = {}  # ascending, in any state: held, early, dying
        self._following_count = 0
        self.parked_count = 0
        self.out: dict[int, int] = {}  # key → head; also of halted keys; never iterated in order
        self.early: set[int] = set()  # must not go out while unheld
        self.halted: set[int] = set()
        self.resting: dict[int, int] = {}  # until when, wall clock; usually the first entry ends first

    def __len__(self) -> int:
        """The number of open messages known here."""
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

    @property
    def behind_count(self) -> int:
        """Messages behind others of their keys, parked or following: the most that could be parked."""
        return self.parked_count + self._following_count

    def parked(self) -> list[int]:
        """All parked messages, by sequence."""
        return sorted(chain.from_iterable(self._parked.values()))

    def parked_behind(self, key: int) -> Sequence[int]:
        return self._parked.get(key, ())

    @property
    def waiting_keys(self) -> KeysView[int]:
        """The keys that have parked messages."""
        return self._parked.keys()

    def is_run(self, key: int) -> bool:
        """Whether several messages of the key are out."""
        return key in self._following

    def following_of(self, key: int) -> Sequence[int]:
        """The messages that are out behind the head of the key."""
        return self._following.get(key, ())

    def is_all_in(self, key: int, held: set[int]) -> bool:
        """Whether all messages of the key that are out are among these, and the next one may follow them."""
        if self.out.get(key, _NOBODY) not in held or key in self.halted:
            return False
        following = self._following.get(key)
        if following is None:
            return True
        parked = self._parked.get(key)
        is_next = parked is None or parked[0] > following[-1]  # otherwise one in between came back
        return is_next and held.issuperset(following)

    def has_run(self, ranges: Iterable[Range]) -> bool:
        """Whether any of these messages has others of its key out in a run."""
        return bool(self._following) and not self._following.keys().isdisjoint(self.keys_of(ranges))

    def loose(self, held: set[int]) -> set[int]:
        """Those of these messages that follow others of their keys which are not among them."""
        found: set[int] = set()
        for key, following in self._following.items():
            out = (self.out[key], *following)
            first = next((at for at, each in enumerate(out) if each not in held), len(out))
            found.update(out[first:])
        return found & held

    def followers(self, ranges: Iterable[Range]) -> list[int]:
        """Those of these messages that are out behind others of their keys, in order."""
        if not self._following:
            return []
        return [each for each in _sequences(ranges) if each in self._following.get(self.key_of(each), ())]

    def is_free(self, keys: Sequence[int]) -> bool:
        """Whether messages with these keys, in order, can all be handed out at once."""
        distinct = set(keys)
        unkeyed = keys.count(NO_KEY) if NO_KEY in distinct else 0
        is_each_once = len(distinct) - bool(unkeyed) == len(keys) - unkeyed
        return is_each_once and self.out.keys().isdisjoint(distinct) and self.resting.keys().isdisjoint(distinct)

    def rests_until(self, key: int, now_ms: int) -> int:
        """When a message of the key may go out; 0: at once."""
        until_ms = self.resting.get(key, 0)
        return until_ms if until_ms > now_ms else 0

    # --- what happens

    def hand_out(self, ranges: Sequence[Range], keys: Sequence[int]) -> None:
        """Hand out fresh messages: each becomes the head of its key."""
        sequences = list(_sequences(ranges))  # both tables share the int objects: 32 bytes less per message
        self._of.update(zip(sequences, keys, strict=True))
        self.out.update(zip(keys, sequences, strict=True))
        self.out.pop(NO_KEY, None)

    def park(self, ranges: Iterable[Range], keys: Sequence[int]) -> list[int]:
        """Park messages behind others of their keys. Returns the ones without a head before them, because their keys
        rest, by sequence: each becomes the head of its key."""
        resting = []
        out, parked = self.out, self._parked
        sequences = list(_sequences(ranges))
        self._of.update(zip(sequences, keys, strict=True))
        for sequence, key in zip(sequences, keys, strict=True):
            if key not in out:
                invariant(key in self.resting, "a message is parked behind another, or its key rests")
                out[key] = sequence
                resting.append(sequence)
            elif key in parked:
                parked[key].append(sequence)
            else:
                parked[key] = [sequence]
        self.parked_count += len(sequences) - len(resting)
        return resting

    def follow(self, ranges: Iterable[Range]) -> None:
        """Parked messages went out behind the heads of their keys."""
        of, parked, following = self._of, self._parked, self._following
        count = 0
        for sequence in _sequences(ranges):
            key = of[sequence]
            queue = parked[key]
            if queue[0] != sequence:
                raise InvariantViolated("what is parked goes out in order")
            if len(queue) == 1:
                del parked[key]
            else:
                del queue[0]
            if key in following:
                following[key].append(sequence)
            else:
                following[key] = [sequence]
            count += 1
        self.parked_count -= count
        self._following_count += count

    def rest(self, keys: Iterable[int], until_ms: int, now_ms: int) -> None:
        """Messages of these keys went out: the next of each key must wait until then."""
        for key in keys:
            if key:
                self.resting.pop(key, None)
                self.resting[key] = until_ms
        while self.resting and len(self.resting) > limits.GROUP_KEYS_RESTING_MAX:
            del self.resting[next(iter(self.resting))]
        while self.resting and self.resting[key := next(iter(self.resting))] <= now_ms:
            del self.resting[key]

    def park_again(self, sequences: Iterable[int]) -> None:
        """Park following messages that came back unbegun."""
        by_key: dict[int, list[int]] = {}
        for sequence in sequences:
            by_key.setdefault(self._of[sequence], []).append(sequence)
        for key, back in by_key.items():
            self._follow_on(key, [each for each in self._following[key] if each not in back])
            queue = self._parked.setdefault(key, [])
            if not queue or back[-1] < queue[0]:
                queue[:0] = back
            else:  # some came back before
                self._parked[key] = sorted((*queue, *back))
            self.parked_count += len(back)

    def hold_back(self, ranges: Iterable[Range]) -> None:
        """Of messages that nobody holds, bar those that are not the heads of their keys, or whose key has halted."""
        if self._following or self.halted:
            for sequence in _sequences(ranges):
                key = self.key_of(sequence)
                if key != NO_KEY and (key in self.halted or self.out.get(key) != sequence):
                    self.early.add(sequence)

    def unpark(self, ranges: Iterable[Range]) -> None:
        """Remove parked messages that will never be handed out; others are left alone."""
        gone = set(_sequences(ranges))
        for key in {self._of[each] for each in gone if each in self._of}:
            before = self._parked.get(key, ())
            left = [each for each in before if each not in gone]
            for each in before:
                if each in gone:
                    del self._of[each]
            self.parked_count -= len(before) - len(left)
            if left:
                self._parked[key] = left
            else:
                self._parked.pop(key, None)

    def done(self, ranges: Sequence[Range], *, halts: bool = False) -> list[int]:
        """Remove finished messages. Returns the parked messages that take their places, by sequence; none if the keys
        halt."""
        keys = set(map(self._of.pop, _sequences(ranges), repeat(NO_KEY)))
        keys.discard(NO_KEY)
        if self.early:
            self.early.difference_update(_sequences(ranges))
        if halts:
            self.halted |= keys
        return self._advance(keys)

    def go_on(self, key: int) -> list[int]:
        """Let a halted key go on (0: all halted keys). Returns the parked messages that become heads."""
        going = set(self.halted) if key == NO_KEY else self.halted & {key}
        self.halted -= going
        return sorted(chain.from_iterable(map(self._go_through, going)))

    def _advance(self, keys: set[int]) -> list[int]:
        """Find the new heads of keys after messages were finished."""
        freed: list[int] = []
        special = (self._following.keys() & keys) | (self.halted & keys)
        if special:
            keys = keys - special
            is_plain = not self.early and not self.halted
            freed += chain.from_iterable(map(self._go_through, self._pass_on(special) if is_plain else special))
        followed = self._parked.keys() & keys
        for key in keys - followed if followed else keys:
            self.out.pop(key, None)
        for key in followed:
            self.out[key] = self._next(key)
            freed.append(self.out[key])
        return sorted(freed)

    def _pass_on(self, keys: Iterable[int]) -> list[int]:
        """Make the first that follows the head of each key, if that is all there is to do. Returns the other keys."""
        of, out, following, parked = self._of, self.out, self._following, self._parked
        others = []
        for key in keys:
            before = following[key]
            left = [each for each in before if each in of]
            if not left or out[key] in of or (key in parked and parked[key][0] < left[0]):
                others.append(key)
                continue
            out[key] = left[0]
            self._following_count += len(left) - len(before) - 1
            if len(left) == 1:
                del following[key]
            else:
                following[key] = left[1:]
        return others

    def _go_through(self, key: int) -> list[int]:
        """Find the head of a key with several messages out, or that had halted. Returns the head if it was parked."""
        left = [each for each in (self.out.get(key, _NOBODY), *self._following.get(key, ())) if each in self._of]
        queue = self._parked.get(key)
        freed: list[int] = []
        if queue and key not in self.halted and (not left or queue[0] < left[0]):
            freed = [self._next(key)]
            left = [*freed, *left]
        self._follow_on(key, left[1:])
        if left:
            self.out[key] = left[0]
        elif key in self.halted:
            self.out[key] = _NOBODY
        else:
            self.out.pop(key, None)
        if left:
            (self.early.add if key in self.halted else self.early.discard)(left[0])
        return freed

    def _follow_on(self, key: int, left: list[int]) -> None:
        self._following_count += len(left) - len(self._following.get(key, ()))
        if left:
            self._following[key] = left
        else:
            self._following.pop(key, None)

    def _next(self, key: int) -> int:
        queue = self._parked[key]
        sequence = queue.pop(0)  # of 10,000 at most
        self.parked_count -= 1
        if not queue:
            del self._parked[key]
        return sequence

    def clear(self) -> None:
        for part in (self._of, self._parked, self._following, self.out, self.early, self.halted, self.resting):
            part.clear()
        self.parked_count = self._following_count = 0

    # --- snapshot

    def pairs(self) -> list[tuple[int, int]]:
        """Sequence and key of every open message with a key."""
        return sorted((sequence, key) for sequence, key in self._of.items() if key)

    def restore(self, pairs: Iterable[tuple[int, int]], parked: Iterable[int], halted: Iterable[int]) -> None:
        """Restore from a snapshot. The caller then calls `hold_back` for the unheld lots."""
        waiting = set(parked)
        for sequence, key in sorted(pairs):
            self._of[sequence] = key
            if sequence in waiting:
                self._parked.setdefault(key, []).append(sequence)
            elif key in self.out:
                self._following.setdefault(key, []).append(sequence)
            else:
                self.out[key] = sequence
        self.halted.update(halted)
        for key in self.halted - self.out.keys():
            self.out[key] = _NOBODY
        self.parked_count = sum(map(len, self._parked.values()))
        self._following_count = sum(map(len, self._following.values()))


def _sequences(ranges: Iterable[Range]) -> Iterator[int]:
    return chain.from_iterable(range(first, first + count) for first, count in ranges)
