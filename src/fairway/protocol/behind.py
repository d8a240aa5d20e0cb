"""Messages that wait here, in their consumer, for those of the same key that come before them.

A group by key may hand a consumer a run of messages of one key in one response, so that the round trip and the sync are
paid once for all of them. They are handled one after another all the same: one goes to the user when the one before it
is acked, and when that ends otherwise all behind it go back to the broker, to come again after it.

To look is to look at one byte for each key that has a run here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from fairway.protocol.lots import LINKED, OPEN, RELEASE, WAITING, ConsumerLot
from fairway.protocol.page import LazyBatch
from fairway.protocol.unpacking import MessageRun

_NO_KEY = 0  # where a batch has none for a message
_UNSETTLED = frozenset({WAITING, OPEN, LINKED})
_QueuedMessage: TypeAlias = tuple[
    int, ConsumerLot, LazyBatch | None
]  # a message of a run; without a page: it waits for nobody


class KeyWaitList:
    """What a consumer has that is not to be begun yet."""

    def __init__(self) -> None:
        # One for each key that has a run, by sequence. The first is with the user, or on its way there.
        self._queues: list[deque[_QueuedMessage]] = []
        self.count = 0  # messages that wait

    def add(
        self,
        heads: Iterable[MessageRun],
        behind: Sequence[MessageRun],
        linked: Iterable[tuple[ConsumerLot, LazyBatch, int]],
    ) -> list[MessageRun]:
        """The messages of one response: those that wait for nobody, those of lots that are `is_behind`, and those that
        the user has from an earlier response. The ones that wait for nobody after all, since what came before them is
        settled, or have no key."""
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
        """What may go to the user now, if anything may. What is behind one that failed is released."""
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
        """All that waits is the caller's."""
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
        """It waits no longer, if it did."""
        sequence, lot, page = place
        if page is None:
            return None
        self.count -= 1
        return MessageRun(lot, page, sequence, sequence + 1)


def _keyed(run: MessageRun) -> Iterator[tuple[int, int]]:
    """Sequence and key of each."""
    _, page, first, end = run
    at = page.first_sequence
    return zip(range(first, end), page.key_hashes()[first - at : end - at], strict=True)


def _key(page: LazyBatch, sequence: int) -> int:
    return page.key_hashes()[sequence - page.first_sequence]
