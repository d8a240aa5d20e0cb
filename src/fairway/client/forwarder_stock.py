"""The items of a forwarder: in memory up to a bound, in a journal by time and by count, and back from there.

    accept → queue → a worker takes it → process, send → finish
                 ↘ journal, when it has waited too long, or too many wait     ↘ failed: again later; at last set aside

While items are in the journal that are not in memory (what a dead process left, or what found memory full), new ones go
behind them, so that with one worker they are forwarded in the order in which they were accepted.

Across a crash an item may be processed twice: its messages were sent, and that was not noted yet. They have the same
ids each time, so a consumer that remembers ids (an inbox) sees them once.

Called under the owner's lock, or on its loop.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final, Generic

from fairway.client.core import seconds_of
from fairway.client.forwarder_items import FailedItem, ForwarderCounts, ForwarderOptions, Item, ItemT
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import SpoolEntry
from fairway.errors import BufferFull, DiskFull, FairwayError, StorageFault
from fairway.protocol.backoff import NS_PER_MS, RetryDelays
from fairway.protocol.diversion import Handed
from fairway.world.clock import Clock
from fairway.world.rng import Rng

FAILURES_KEPT: Final = 1_000  # in memory, for whoever asks
LOAD_MAX: Final = 256  # items fetched at a time are about so many: a chunk of the journal
_BORN = struct.Struct("<QQ")  # in the journal, before an item's own bytes
_FULL_NS = 1_000 * NS_PER_MS


class ForwarderBuffer(Generic[ItemT]):
    """All that a forwarder has taken in and not yet sent on."""

    def __init__(
        self,
        options: ForwarderOptions[ItemT],
        clock: Clock,
        rng: Rng,
        *,
        journal: Journal | None,
        on_change: Callable[[], None],
        on_finished: Callable[[Journal], None],
    ) -> None:
        """`on_change`: somebody who waits may go on. `on_finished`: a journal of a dead process is empty."""
        self.is_closed = False
        self.fault: FairwayError | None = None
        self.failures: deque[FailedItem[ItemT]] = deque(maxlen=FAILURES_KEPT)
        self._options = options
        self._clock = clock
        self._rng = rng
        self._own = journal
        self._on_change = on_change
        self._on_finished = on_finished
        self._id = rng.bits(64) or 1
        self._numbers = count()
        self._persist_ns = round(seconds_of(options.persist_after) * 1e9)
        self._queue: deque[Item[ItemT]] = deque()
        self._retries: list[tuple[int, int, Item[ItemT]]] = []  # a heap, by when
        self._backoffs: dict[Item[ItemT], RetryDelays] = {}
        self._items: dict[Item[ItemT], None] = {}  # in memory and not finished, oldest first
        self._unkept: dict[Item[ItemT], None] = {}  # of them, those that are not in the journal nor on their way
        self._in_memory: set[tuple[Journal, int]] = set()  # entries; never iterated
        self._orphans: list[Journal] = []
        self._has_looked_round = journal is None
        self._spilling = 0  # items on their way to the journal alone
        self._asides = 0  # items on their way to where people find them
        self._is_loading = False
        self._full_until_ns = 0
        self._accepted = self._forwarded = self._messages = self._retried = self._aside = 0

    # --- in ----------------------------------------------------------------------------------------------------------

    def accept(self, value: ItemT) -> None:
        """Take it in; `BufferFull` where there is no room."""
        if self.fault is not None:
            raise self.fault
        now_ns = self._clock.monotonic_ns()
        item = Item(value, self._id, next(self._numbers), now_ns)
        is_waiting_on_disk = bool(self._spilling or self._backlog) or not self._has_looked_round
        if not is_waiting_on_disk and len(self._items) < self._options.capacity:
            self._put(item)
            self._accepted += 1
            self.look(now_ns)
        elif self._own is not None and self._can_spill(now_ns):
            self._spill(self._own, item)
            self._accepted += 1
        else:
            raise self._full()
        self._on_change()

    def _put(self, item: Item[ItemT]) -> None:
        self._queue.append(item)
        self._items[item] = None
        if self._own is not None and item.entry is None:
            self._unkept[item] = None

    def _can_spill(self, now_ns: int) -> bool:
        own, options = self._own, self._options
        is_wanted = options.when_full == "spool" or len(self._items) < options.capacity
        has_room = own is not None and own.size_bytes < options.journal_bytes_max and now_ns >= self._full_until_ns
        return is_wanted and has_room and self._spilling < options.capacity

    def _full(self) -> BufferFull:
        on_disk = f", and {self.on_disk} on disk" if self._own is not None else ""
        return BufferFull(
            f"{len(self._items)} items wait to be forwarded{on_disk}: no room for one more (capacity="
            f"{self._options.capacity}); wait, use more workers, or choose when_full='spool' with a journal",
            1,
            0,
        )

    # --- to the journal ----------------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> None:
        """Write down what has waited too long, or all if too many wait; load where there is room."""
        if self._own is not None and self._own.fault is not None and self.fault is None:
            self.fault = StorageFault(f"the journal of the forwarder has failed: {self._own.fault}")
        if self._must_persist(now_ns):
            self.persist()
        self._let_go()
        self._load()

    def _must_persist(self, now_ns: int) -> bool:
        oldest = next(iter(self._unkept), None)
        if oldest is None or now_ns < self._full_until_ns:
            return False
        return len(self._unkept) > self._options.persist_items or now_ns - oldest.since_ns >= self._persist_ns

    def persist(self) -> None:
        """All that is in memory and not yet written down."""
        own = self._own
        if own is None:
            return
        items, self._unkept = list(self._unkept), {}
        for item in items:
            item.is_keeping = True
        for item in items:
            own.keep_one(self._handed(item), self._noting(own, item), self._keeping(item))

    def _handed(self, item: Item[ItemT]) -> Handed:
        data = _BORN.pack(item.owner, item.number) + self._options.to_bytes(item.value)
        return Handed("", 1, False, data)

    def _noting(self, journal: Journal, item: Item[ItemT]) -> Callable[[int], None]:
        def numbered(number: int) -> None:
            item.entry = (journal, number)
            if item.is_finished:
                journal.note_done(number)
            else:
                self._in_memory.add((journal, number))

        return numbered

    def _keeping(self, item: Item[ItemT]) -> Callable[[StorageFault | None], None]:
        def done(fault: StorageFault | None) -> None:
            item.is_keeping = False
            if fault is not None and not item.is_finished:
                self._unkept[item] = None
                self._full_until_ns = self._clock.monotonic_ns() + _FULL_NS
            self._on_change()

        return done

    def _spill(self, own: Journal, item: Item[ItemT]) -> None:
        """To the journal alone: it comes back when those before it are done."""
        self._spilling += 1

        def done(fault: StorageFault | None) -> None:
            self._spilling -= 1
            if fault is not None:
                if isinstance(fault, DiskFull):
                    self._full_until_ns = self._clock.monotonic_ns() + _FULL_NS
                self._put(item)  # more than there is room for, but it was accepted
            self._load()
            self._on_change()

        own.keep([self._handed(item)], done)

    # --- from the journal --------------------------------------------------------------------------------------------

    def adopt(self, journals: Sequence[Journal]) -> None:
        """What dead processes left behind."""
        self._has_looked_round = True
        self._orphans += journals
        self._load()
        self._on_change()

    @property
    def _journals(self) -> list[Journal]:
        return [*self._orphans, *([] if self._own is None else [self._own])]

    @property
    def _backlog(self) -> int:
        """Items on disk that are not in memory."""
        return sum(journal.entries for journal in self._journals) - len(self._in_memory)

    def _load(self) -> None:
        if self._is_loading or self._own is None or not self._has_looked_round or not self._backlog or self.is_closed:
            return
        if len(self._items) >= max(self._options.capacity // 2, 1):
            return
        journal = next((each for each in self._journals if each.has_more and each.fault is None), None)
        if journal is not None:
            self._is_loading = True
            journal.load(lambda entries: self._on_loaded(journal, entries))

    def _on_loaded(self, journal: Journal, entries: Sequence[SpoolEntry]) -> None:
        self._is_loading = False
        for entry in entries:
            if (journal, entry.number) not in self._in_memory:
                owner, number = _BORN.unpack_from(entry.data)
                value = self._options.from_bytes(entry.data[_BORN.size :])
                item = Item(value, owner, number, self._clock.monotonic_ns())
                item.entry = (journal, entry.number)
                self._in_memory.add((journal, entry.number))
                self._put(item)
        self._load()
        self._on_change()

    # --- work --------------------------------------------------------------------------------------------------------

    def take(self, now_ns: int) -> Item[ItemT] | None:
        """The next one to work on; None: not now."""
        if self._retries and self._retries[0][0] <= now_ns:
            return heapq.heappop(self._retries)[2]
        return self._queue.popleft() if self._queue and self._has_looked_round else None

    def finish(self, item: Item[ItemT], messages: int) -> None:
        """All that was made of it has a receipt."""
        self._forwarded += 1
        self._messages += messages
        self._end(item)

    def fail(self, item: Item[ItemT], error: Exception, now_ns: int) -> None:
        """It did not work: later again, or never."""
        item.attempts += 1
        if item.attempts < self._options.attempts:
            self._retried += 1
            backoff = self._backoffs.get(item)
            if backoff is None:
                first_ms, most_ms = self._options.backoff_first_ms, self._options.backoff_most_ms
                backoff = self._backoffs[item] = RetryDelays(self._rng, first_ms=first_ms, most_ms=most_ms)
            heapq.heappush(self._retries, (now_ns + backoff.next_ns(), next(self._numbers), item))
            self._on_change()
            return
        self._aside += 1
        self.failures.append(FailedItem(item.value, error))
        if self._own is not None:
            self._set_aside(self._own, item, error)
        self._end(item, is_noted=self._own is not None)

    def _set_aside(self, own: Journal, item: Item[ItemT], error: Exception) -> None:
        """Where people find it: in the journal that it came from."""
        journal, number = item.entry or (own, (1 << 63) | item.number)
        entry = SpoolEntry(number, "", 1, False, self._options.to_bytes(item.value))
        reason = f"{type(error).__name__}: {error}"
        self._asides += 1

        def done(_: StorageFault | None) -> None:  # one that found no room stays in the journal, and is tried again
            self._asides -= 1
            self._in_memory.discard((journal, number))
            self._let_go()
            self._on_change()

        journal.set_aside(entry, reason, item.owner, False, done)

    def _end(self, item: Item[ItemT], *, is_noted: bool = False) -> None:
        item.is_finished = True
        self._items.pop(item, None)
        self._unkept.pop(item, None)
        self._backoffs.pop(item, None)
        if item.entry is not None and not is_noted:
            journal, number = item.entry
            self._in_memory.discard((journal, number))
            journal.note_done(number)
            self._let_go()
        self._load()
        self._on_change()

    def _let_go(self) -> None:
        """Journals of the dead that are empty by now."""
        for journal in [each for each in self._orphans if each.is_empty and not each.is_busy]:
            self._orphans.remove(journal)
            self._on_finished(journal)

    # --- figures -----------------------------------------------------------------------------------------------------

    def next_ns(self) -> int | None:
        """When something is to be done although nothing happens."""
        dues = [self._retries[0][0]] if self._retries else []
        oldest = next(iter(self._unkept), None)
        if oldest is not None:
            dues.append(max(oldest.since_ns + self._persist_ns, self._full_until_ns))
        return min(dues, default=None)

    @property
    def on_disk(self) -> int:
        return sum(journal.entries for journal in self._journals) + self._spilling

    @property
    def is_drained(self) -> bool:
        """Whether all that was accepted is sent on, and all that earlier lives left."""
        is_at_rest = not self._items and not self._spilling and not self._asides
        return self._has_looked_round and is_at_rest and not self._backlog

    @property
    def is_kept(self) -> bool:
        """Whether all that is left is safe in the journal."""
        is_under_way = self._spilling or self._asides or any(item.is_keeping for item in self._items)
        return not self._unkept and not is_under_way

    @property
    def is_durable(self) -> bool:
        return self._own is not None

    @property
    def journals(self) -> list[Journal]:
        return self._journals

    def left(self) -> Iterator[ItemT]:
        """What is in memory and not sent on."""
        return (item.value for item in self._items)

    def counts(self) -> ForwarderCounts:
        return ForwarderCounts(
            self._accepted, self._forwarded, self._messages, len(self._items), self.on_disk, self._retried, self._aside
        )
