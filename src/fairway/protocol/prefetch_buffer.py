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
out a run of messages of one key in one response, so that one round trip and one sync pay for all. The program still
handles them one after another. When a message is acked, the next goes to the user. When it ends otherwise, all behind
it go back to the broker, to come again after it. A look reads one byte for each key that has a run here.

`PrefetchBuffer` holds messages that the program may take, in the order of arrival. A message leaves only while
certainly no other consumer has it (`consumer_lease`). A message whose lease may have run out is released. A message
waits while the broker may have forgotten the handout and there is no connection to ask.

Taking the first message of a batch decodes the batch. One `take` returns no more raw bytes than the consumer's budget
for decoded batches, however many messages the caller wants: a few batches of 2 KiB may hold gigabytes. One batch always
fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Final, TypeAlias

from fairway import limits
from fairway.protocol.consumer_options import ConsumerCounts
from fairway.protocol.delivery import LazyBatch, Message, MessageRun
from fairway.protocol.lots import ACK, LINKED, OPEN, RELEASE, WAITING, ConsumerLot

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
_QueuedMessage: TypeAlias = tuple[int, ConsumerLot, LazyBatch | None]  # of a run; None: the message does not wait


class KeyWaitList:
    """Messages that must not begin yet, because earlier ones of their keys are not settled."""

    def __init__(self) -> None:
        # One queue for each key that has a run, by sequence. The first message is with the user, or on its way there.
        self._queues: list[deque[_QueuedMessage]] = []
        self.count = 0  # messages that wait

    def add(
        self,
        heads: Iterable[MessageRun],
        behind: Sequence[MessageRun],
        linked: Iterable[tuple[ConsumerLot, LazyBatch, int]],
    ) -> list[MessageRun]:
        """Add the messages of one response: `heads` wait for nobody, `behind` are of lots that are `is_behind`, and
        `linked` are with the user from an earlier response. Returns the runs that need not wait after all: they have no
        key, or the messages before them are settled."""
        found = [(sequence, key, run.lot, run.page) for run in behind for sequence, key in _keyed(run)]
        free = [MessageRun(lot, page, at, at + 1) for at, key, lot, page in found if key == _NO_KEY]
        found = [each for each in found if each[1] != _NO_KEY]
        self.count += len(found)
        keys = {each[1] for each in found}
        others = [(sequence, key, run.lot, None) for run in heads for sequence, key in _keyed(run) if key in keys]
        others += [(at, key, lot, None) for lot, page, at in linked if (key := _key(page, at)) in keys]
        queues: dict[int, deque[_QueuedMessage]] = {key: deque() for key in keys}
        for sequence, key, lot, page in sorted([*found, *others], key=itemgetter(0)):
            queues[key].append((sequence, lot, page))
        self._queues += queues.values()
        return free + [run for queue in queues.values() if (run := self._let_go(queue[0])) is not None]

    def look(self, *, may_begin: bool) -> list[MessageRun]:
        """Return what may go to the user now, if `may_begin`. Release everything behind a failed message."""
        ready: list[MessageRun] = []
        left = []
        for queue in self._queues:
            while len(queue) > 1:
                sequence, lot, _ = queue[0]
                if lot.state[sequence - lot.first] in _UNSETTLED:
                    break
                if sequence - lot.first in lot.failed:
                    self._release(queue)
                    break
                if not may_begin:
                    break
                queue.popleft()
                run = self._let_go(queue[0])
                if run is not None:
                    ready.append(run)
            if len(queue) > 1:
                left.append(queue)
        self._queues = left
        return ready

    def give_up(self) -> list[MessageRun]:
        """Empty the list; returns the messages that waited."""
        runs = [run for queue in self._queues for place in list(queue)[1:] if (run := self._let_go(place)) is not None]
        self._queues.clear()
        return runs

    def _release(self, queue: deque[_QueuedMessage]) -> None:
        queue.popleft()
        for place in queue:
            run = self._let_go(place)
            if run is not None:
                run.lot.say(run.first, run.end, RELEASE)
        queue.clear()

    def _let_go(self, place: _QueuedMessage) -> MessageRun | None:
        """Stop counting the message as waiting, if it was."""
        sequence, lot, page = place
        if page is None:
            return None
        self.count -= 1
        return MessageRun(lot, page, sequence, sequence + 1)


def _keyed(run: MessageRun) -> Iterator[tuple[int, int]]:
    """Sequence and key hash of each message."""
    _, page, first, end = run
    at = page.first_sequence
    return zip(range(first, end), page.key_hashes()[first - at : end - at], strict=True)


def _key(page: LazyBatch, sequence: int) -> int:
    return page.key_hashes()[sequence - page.first_sequence]


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
        last_page: LazyBatch | None = None
        while left > 0 and self.has_ready:
            lot, page, first, end = self._runs.popleft()
            if lot.is_over(now_ns):
                lot.say(first, end, RELEASE)
                self.count -= end - first
                self._counts.lapsed += end - first
                continue
            if page is not last_page:
                taken_bytes += page.raw_bytes
                if taken and taken_bytes > self._taken_bytes_max:
                    self._runs.appendleft(MessageRun(lot, page, first, end))
                    break
                last_page = page
            if end - first > left:
                self._runs.appendleft(MessageRun(lot, page, first + left, end))
                end = first + left
            lot.fill(first - lot.first, end - lot.first, OPEN)
            at = page.first_sequence
            payloads = page.batch.payloads[first - at : end - at]
            taken += map(Message, payloads, range(first, end), repeat(lot), repeat(page))
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
