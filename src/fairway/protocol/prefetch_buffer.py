"""Prefetch: how far a consumer pulls ahead, and the messages that wait in it until the program takes them.

`PrefetchTarget` finds how many messages to keep ready: as many as the program handles in a quarter of a second. No
other consumer can handle a message that waits here. With thousands of messages in a slow consumer, new consumers would
find nothing to do (bench/elasticity). With few messages in a fast consumer, the program would wait for the broker. So
the target adapts:

    the buffer ran dry, and the broker had more     twice as much
    messages waited here all the time               what the program settled meanwhile, scaled to `_HORIZON_NS`
    the program takes many at once                  at least so many

An idle program is not slow: time counts only while messages wait.

`KeyWaitList` holds messages that wait for earlier ones of the same key. In a group ordered by key the broker may hand
out a run of messages of one key, in one response or in several, so that one round trip and one sync pay for all. The
program still handles them one after another. When a message is acked, the next goes to the user. When it ends
otherwise, all behind it go back to the broker, to come again after it. A look reads one byte for each key that has a
run here.

The list knows the last message of each key, its *tail*, whether or not a message waits behind it. The broker extends a
run without knowing what has failed here meanwhile. So a message whose tail has failed goes back, too. A tail is
forgotten when a response arrives and the broker has confirmed its outcome: later responses know of it.

`PrefetchBuffer` holds messages that the program may take, in the order of arrival. A message leaves only while
certainly no other consumer has it (`consumer_lease`). A message whose lease may have run out is released. A message
waits while the broker may have forgotten the handout and there is no connection to ask.

Taking the first message of a batch decodes the batch. One `take` returns no more raw bytes than the consumer's budget
for decoded batches, however many messages the caller wants: a few batches of 2 KiB may hold gigabytes. One batch always
fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Final, TypeAlias

from fairway import limits
from fairway.protocol.consumer_options import ConsumerCounts
from fairway.protocol.delivery import LazyBatch, Message, MessageRun
from fairway.protocol.lots import ACK, DONE, LINKED, OPEN, RELEASE, SENT_ACK, WAITING, ConsumerLot

_FIRST: Final = 32  # messages; a fast program is at 2,000 after six pulls, some ten milliseconds
_HORIZON_NS: Final = 250_000_000
_WINDOW_NS: Final = 100_000_000  # what is settled in less time says little


class PrefetchTarget:
    """The bound on messages that wait for the program."""

    def __init__(self, most: int, *, is_bound: bool = True) -> None:
        """`is_bound` is False where messages are pushed: they do not wait, so only `most` bounds them."""
        self.take_count = 1  # how many the program takes at once
        self._most = most
        self._found = min(_FIRST, most) if is_bound else most
        self._has_more = False  # the broker sent about as many as the pull asked for
        self._since_ns: int | None = None  # since when messages have waited here all the time
        self._settled = 0  # the number settled at that time

    @property
    def limit(self) -> int:
        return min(max(self._found, self.take_count), self._most)

    def arrived(self, asked: int, count: int) -> None:
        """Note the answer to a pull."""
        self._has_more = 2 * count >= asked

    def look(self, waiting: int, settled: int, now_ns: int, *, is_idle: bool = False) -> None:
        """Adapt the target to the messages that wait now, and to the count settled so far. Ignore a pause."""
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


_NO_KEY = 0  # the hash of a message without a key
_UNSETTLED = frozenset({WAITING, OPEN, LINKED})
_Queue: TypeAlias = tuple[ConsumerLot, int, list[tuple[int, ConsumerLot, LazyBatch]]]
_TAILS_MIN: Final = 8_192  # beyond this many, and twice those needed, the list forgets tails


class KeyWaitList:
    """Messages that must not begin yet, because earlier ones of their keys are not settled."""

    def __init__(self) -> None:
        # By key: the lot and index of a message that is with the user, or on its way there, and those that wait for it.
        self._queues: dict[int, _Queue] = {}
        self._tail_lots: dict[int, ConsumerLot] = {}  # by key, as are the sequences
        self._tail_sequences: dict[int, int] = {}
        self._tails_max = _TAILS_MIN
        self.is_by_key = False  # of the group's configuration
        self.count = 0  # messages that wait
        # The last response had messages behind one that has failed here. A broker that does not know of that yet, or
        # lost it in a crash, would send them again and again.
        self.has_refused = False

    def add(
        self,
        heads: Iterable[MessageRun],
        behind: Sequence[MessageRun],
        linked: Sequence[tuple[ConsumerLot, LazyBatch, int]],
    ) -> list[MessageRun]:
        """Add the messages of one response: `heads` wait for nobody, `behind` are of lots that are `is_behind`, and
        `linked` are with the user from an earlier response. Returns the runs that need not wait after all: they have no
        key, or the messages before them are settled. Messages behind a failed one are released."""
        self.has_refused = False
        if not (self.is_by_key or behind):
            return []
        for lot, page, first, end in heads:
            keys = _keys(page, first, end)
            self._tail_lots.update(zip(keys, repeat(lot), strict=False))
            self._tail_sequences.update(zip(keys, range(first, end), strict=True))
        free = self._add_behind(behind, linked) if behind or linked else []
        if len(self._tail_lots) > self._tails_max:
            self._forget_tails()
        return free

    def _add_behind(
        self, behind: Sequence[MessageRun], linked: Iterable[tuple[ConsumerLot, LazyBatch, int]]
    ) -> list[MessageRun]:
        found: list[tuple[int, int, ConsumerLot, LazyBatch, bool]] = [
            (run.first, run.end, run.lot, run.page, True) for run in behind
        ]
        found += [(at, at + 1, lot, page, False) for lot, page, at in linked]
        found.sort(key=itemgetter(0))  # no two share a message
        free: list[MessageRun] = []
        lots, sequences, queues = self._tail_lots, self._tail_sequences, self._queues
        for first, end, lot, page, is_new in found:
            begin = first  # of those that need not wait, up to here
            for sequence, key in zip(range(first, end), _keys(page, first, end), strict=True):
                if key == _NO_KEY and is_new:
                    continue
                before = lots.get(key)
                at = sequences[key] if before is not None else 0
                lots[key] = lot
                sequences[key] = sequence
                if is_new:
                    if key in queues:
                        queues[key][2].append((sequence, lot, page))
                    elif before is None or (code := before.state[at - before.first]) == ACK or code == SENT_ACK:
                        continue
                    elif code in _UNSETTLED:
                        queues[key] = (before, at - before.first, [(sequence, lot, page)])
                    elif at - before.first in before.failed:
                        lot.say(sequence, sequence + 1, RELEASE)
                        self.has_refused = True
                        self.count -= 1
                    else:
                        continue
                    self.count += 1
                if begin < sequence:
                    free.append(MessageRun(lot, page, begin, sequence))
                begin = sequence + 1
            if begin < end:
                free.append(MessageRun(lot, page, begin, end))
        return free

    def look(self, *, may_begin: bool) -> list[MessageRun]:
        """Return what may go to the user now, if `may_begin`. Release everything behind a failed message."""
        ready: list[MessageRun] = []
        over: list[int] = []
        queues = self._queues
        for key, (before, index, waiting) in queues.items():
            if before.state[index] in _UNSETTLED:
                continue
            if index in before.failed:
                self._release(waiting)
                over.append(key)
            elif may_begin:
                sequence, lot, page = waiting.pop(0)
                ready.append(MessageRun(lot, page, sequence, sequence + 1))
                if waiting:
                    queues[key] = (lot, sequence - lot.first, waiting)
                else:
                    over.append(key)
        for key in over:
            del queues[key]
        self.count -= len(ready)
        return ready

    def give_up(self) -> list[MessageRun]:
        """Empty the list; returns the messages that waited."""
        runs = [
            MessageRun(lot, page, sequence, sequence + 1)
            for _, _, waiting in self._queues.values()
            for sequence, lot, page in waiting
        ]
        self._queues.clear()
        self.count = 0
        return runs

    def _release(self, waiting: Iterable[tuple[int, ConsumerLot, LazyBatch]]) -> None:
        for sequence, lot, _ in waiting:
            self.count -= 1
            lot.say(sequence, sequence + 1, RELEASE)

    def _forget_tails(self) -> None:
        sequences = self._tail_sequences
        lots = {key: lot for key, lot in self._tail_lots.items() if lot.state[sequences[key] - lot.first] != DONE}
        self._tail_lots = lots
        self._tail_sequences = {key: sequences[key] for key in lots}
        self._tails_max = max(2 * len(lots), _TAILS_MIN)


def _keys(page: LazyBatch, first: int, end: int) -> list[int]:
    """The key hashes of these messages, by sequence."""
    at = page.first_sequence
    return page.key_hashes()[first - at : end - at]


class PrefetchBuffer:
    """Runs of messages, the oldest first. Called under the lock of the line's owner, except `has_ready`."""

    def __init__(self, counts: ConsumerCounts, taken_bytes_max: int = limits.DECODED_BYTES_MAX) -> None:
        self._runs: deque[MessageRun] = deque()
        self._counts = counts
        self._taken_bytes_max = taken_bytes_max
        self.count = 0  # messages

    def put(self, runs: Sequence[MessageRun]) -> None:
        self._runs.extend(runs)
        self.count += sum(run.end - run.first for run in runs)

    @property
    def has_ready(self) -> bool:
        """Whether `take` would return messages. From any thread, without a lock."""
        try:
            return not self._runs[0].lot.is_detached
        except IndexError:
            return False

    def take(self, most: int | None, now_ns: int) -> list[Message]:
        """Take at most `most` messages for the program, fewer from large batches. Messages that other consumers may
        have by now are released instead. RemoteProtocolError if the columns of a batch are not sound."""
        taken: list[Message] = []
        left = self.count if most is None else most
        taken_bytes = 0
        runs = self._runs
        last_lot: ConsumerLot | None = None
        last_page: LazyBatch | None = None
        payloads: Sequence[bytes] = ()
        is_over = False
        while left > 0 and runs:
            lot, page, first, end = runs[0]
            if lot is not last_lot:
                if lot.is_detached:
                    break
                last_lot, is_over = lot, lot.is_over(now_ns)
            if is_over:
                runs.popleft()
                lot.say(first, end, RELEASE)
                self.count -= end - first
                self._counts.lapsed += end - first
                continue
            if page is not last_page:
                taken_bytes += page.raw_bytes
                if taken and taken_bytes > self._taken_bytes_max:
                    break
                last_page, payloads = page, page.batch.payloads
            if end - first > left:
                runs[0] = MessageRun(lot, page, first + left, end)
                end = first + left
            else:
                runs.popleft()
            at = page.first_sequence
            if end - first == 1:
                lot.state[first - lot.first] = OPEN
                taken.append(Message(payloads[first - at], first, lot, page))
            else:
                lot.fill(first - lot.first, end - lot.first, OPEN)
                taken += map(Message, payloads[first - at : end - at], range(first, end), repeat(lot), repeat(page))
            left -= end - first
        self.count -= len(taken)
        self._counts.handed_out += len(taken)
        return taken

    def give_back(self, behind: Iterable[MessageRun], *, is_last: bool) -> int:
        """Release all messages here and in `behind`, and count them. Messages of an at-most-once group cannot be
        released: they are kept, or given up if `is_last`."""
        released = 0
        kept: deque[MessageRun] = deque()
        for run in (*self._runs, *behind):
            length = run.end - run.first
            if not run.lot.is_final:
                run.lot.say(run.first, run.end, RELEASE)
                released += length
            elif is_last:
                run.lot.say(run.first, run.end, ACK)
                self._counts.forgone += length
            else:
                kept.append(run)
        self._runs = kept
        self.count = sum(run.end - run.first for run in kept)
        return released

    def clear(self) -> None:
        self._runs.clear()
        self.count = 0
