"""The items of a process-forward producer: its options, its journal, and the buffer between `accept` and the workers.

The blocking and the asyncio forwarder share this module. `ItemJournal` is the directory and the thread behind a
forwarder's journals: the machinery of the spool, with items in the place of batches. `ForwarderBuffer` keeps items in
memory up to a bound, writes them to the journal by time and by count, and loads them back:

    accept → queue → a worker takes the item → process, send → finish
                 ↘ journal, when an item waits too long or too many wait      ↘ failed: again later; at last set aside

Items may be in the journal and not in memory: a dead process has left them, or they found memory full. New items then
go behind them, so that one worker forwards the items in the order of `accept`.

After a crash an item may be processed twice, if its messages were sent and the journal had not recorded that yet. The
messages have the same ids each time, so a consumer that remembers ids (an inbox) sees them once.

The caller holds the owner's lock, or calls on its loop.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from fairway import limits
from fairway.batch import MessageId
from fairway.client.core import Duration, seconds_of
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry
from fairway.client.spool.spool import SpoolOptions, SpoolThread, shared_directory_at
from fairway.errors import BufferFull, DiskFull, FairwayError, Misuse, StorageFault
from fairway.protocol.line import NS_PER_MS, RetryDelays
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import Clock
from fairway.runtime.rng import RealRng, Rng

ItemT = TypeVar("ItemT")
SentT = TypeVar("SentT")

MESSAGES_PER_ITEM_MAX = 1 << 16  # the ids of an item's messages derive from the item's number


class Outgoing(msgspec.Struct, frozen=True):
    """A message that `process` makes of an item; the fields are those of `Client.send`."""

    subject: str
    payload: bytes
    key: str | None = None
    tags: Collection[str] = ()
    headers: Mapping[str, str] | None = None
    after: Duration | None = None
    at: datetime | None = None


Made: TypeAlias = Outgoing | Iterable[Outgoing] | None


@dataclass(frozen=True, slots=True)
class ForwarderOptions(Generic[ItemT]):
    """The options of a forwarder."""

    workers: int = 4
    capacity: int = 10_000  # items in memory
    when_full: Literal["block", "raise", "spool"] = "block"  # "spool": write to the journal
    block: Duration = 60.0  # how long `accept` waits for room before it raises BufferFull
    journal: str | None = None  # the directory for items that wait
    persist_after: Duration = 1.0  # when an item has waited so long, all items in memory go to the journal
    persist_items: int = 1_000  # the same when more items than this wait
    journal_bytes_max: int = 1 * limits.GIB
    encode: Callable[[ItemT], bytes] | None = None  # for the journal; items that are bytes need none
    decode: Callable[[bytes], ItemT] | None = None
    attempts: int = 5  # to process an item and send its messages
    backoff_first_ms: int = 100
    backoff_most_ms: int = 5_000

    def __post_init__(self) -> None:
        for name in ("workers", "capacity", "attempts", "journal_bytes_max", "backoff_first_ms"):
            if getattr(self, name) < 1:
                raise Misuse(f"{name} of a forwarder is {getattr(self, name)}: it is 1 or more")
        if self.when_full not in ("block", "raise", "spool"):
            raise Misuse(f"when_full={self.when_full!r}: it is 'block', 'raise' or 'spool'")
        if self.when_full == "spool" and self.journal is None:
            raise Misuse("when_full='spool' needs a journal: journal='/var/lib/app/spool'")
        if (self.encode is None) != (self.decode is None):
            raise Misuse("encode= and decode= go together: what one writes the other reads")
        if self.persist_items < 0 or self.backoff_most_ms < self.backoff_first_ms:
            raise Misuse("persist_items is 0 or more, and backoff_most_ms at least backoff_first_ms")
        seconds_of(self.persist_after)
        seconds_of(self.block)

    def to_bytes(self, value: ItemT) -> bytes:
        data = value if self.encode is None else self.encode(value)
        if not isinstance(data, bytes):
            raise TypeError(
                f"an item for the journal is bytes, not {type(data).__name__}: give encode= and decode= (or no journal)"
            )
        return data

    def from_bytes(self, data: bytes) -> ItemT:
        return data if self.decode is None else self.decode(data)  # type: ignore[return-value]


class ForwarderCounts(msgspec.Struct, frozen=True):
    """The counts of a forwarder."""

    accepted: int = 0
    forwarded: int = 0  # items of which every message has a receipt
    messages: int = 0  # sent, of forwarded items
    waiting: int = 0  # items in memory, those that workers process included
    on_disk: int = 0  # items in the journal; some of them are in memory too
    retries: int = 0
    set_aside: int = 0  # items that failed for good


class FailedItem(msgspec.Struct, Generic[ItemT], frozen=True):
    """An item that failed every attempt."""

    item: ItemT
    error: Exception


class Item(Generic[ItemT]):
    """One accepted item."""

    __slots__ = ("attempts", "entry", "is_finished", "is_keeping", "number", "owner", "since_ns", "value")

    def __init__(self, value: ItemT, owner: int, number: int, since_ns: int) -> None:
        self.value = value
        self.owner = owner  # the id of the accepting forwarder; with `number`, the ids of the messages are lasting
        self.number = number
        self.since_ns = since_ns
        self.attempts = 0
        self.entry: tuple[Journal, int] | None = None  # the journal that holds the item, and its number there
        self.is_keeping = False  # on its way to the journal
        self.is_finished = False

    def send(self, send: Callable[..., SentT], made: Made) -> list[SentT]:
        """Send the messages that `process` made, with ids that are the same each time the item is processed."""
        sent: list[SentT] = []
        outgoing = [] if made is None else [made] if isinstance(made, Outgoing) else made
        for index, each in enumerate(outgoing):
            _check(each, index)
            name = MessageId(self.owner, self.number * MESSAGES_PER_ITEM_MAX + index)
            sent.append(send(each.subject, each.payload, each.key, each.tags, each.headers, name, each.after, each.at))
        return sent


def _check(made: object, index: int) -> None:
    if not isinstance(made, Outgoing) or index >= MESSAGES_PER_ITEM_MAX:
        raise Misuse(
            f"process() gives fairway.Outgoing, several of them (up to {MESSAGES_PER_ITEM_MAX}), or None; not "
            f"{type(made).__name__}"
        )


def lost_items(left: int, timeout: Duration) -> TimeoutError:
    """The error of `stop` for items that no journal keeps."""
    return TimeoutError(f"{left} items are not sent on after {timeout} s, and are lost: a journal would keep them")


FOLDER = "forwarder"  # below the directory of the options, which may also be a client's spool


class ItemJournal(SpoolThread):
    """The directory that the forwarders of one host share, and the thread that adopts journals of dead processes."""

    def __init__(self, options: ForwarderOptions[Any], clock: Clock, post: Callable[..., object]) -> None:
        options_there = SpoolOptions(f"{options.journal}/{FOLDER}")
        super().__init__(options_there, shared_directory_at(options_there.directory, post=post), clock, post)

    def make(self, rng: Rng) -> Journal:
        """Make this forwarder's own journal. Its items have no streams, and so no secrets."""
        number, disk = self._shared_directory.make(rng)
        return Journal(disk, number, self._clock)

    def close(self, journals: Callable[[], Sequence[Journal]]) -> None:
        """Close the directory. The caller holds no lock that completions need."""
        self.stop(journals)


FAILURES_KEPT: Final = 1_000  # in memory, for `set_aside`
_BORN = struct.Struct("<QQ")  # owner and number, in the journal before an item's own bytes
_FULL_NS = 1_000 * NS_PER_MS


class ForwarderBuffer(Generic[ItemT]):
    """The items that a forwarder has accepted and not yet sent on."""

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
        """`on_change`: a waiting caller or worker may go on. `on_finished`: a dead process's journal is empty."""
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
        self._retries: list[tuple[int, int, Item[ItemT]]] = []  # a heap, by due time
        self._backoffs: dict[Item[ItemT], RetryDelays] = {}
        self._items: dict[Item[ItemT], None] = {}  # in memory and not finished, oldest first
        self._unkept: dict[Item[ItemT], None] = {}  # of these, the items neither in the journal nor on their way there
        self._in_memory: set[tuple[Journal, int]] = set()  # journal entries whose item is in memory; never iterated
        self._orphans: list[Journal] = []  # journals of dead processes
        self._has_looked_round = journal is None  # the first look for such journals is done
        self._spilling = 0  # items on their way to the journal, without staying in memory
        self._asides = 0  # items that the journal is setting aside
        self._is_loading = False
        self._full_until_ns = 0
        self._accepted = self._forwarded = self._messages = self._retried = self._aside = 0

    # --- accepting ---------------------------------------------------------------------------------------------------

    def accept(self, value: ItemT) -> None:
        """Accept an item. Raises `BufferFull` if there is no room."""
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
        """Write the items to the journal if one has waited too long or too many wait; load items if there is room."""
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

    def check_durable(self) -> None:
        """Raise if this forwarder has no journal."""
        if self._own is None:
            raise Misuse("this forwarder has no journal: give it one, journal='/var/lib/app/spool'")

    def persist(self) -> None:
        """Write every item in memory to the journal that is not there yet."""
        own = self._own
        if own is None:
            return
        items, self._unkept = list(self._unkept), {}
        for item in items:
            item.is_keeping = True
        for item in items:
            self._keep(own, item)

    def _handed(self, item: Item[ItemT]) -> Handed:
        data = _BORN.pack(item.owner, item.number) + self._options.to_bytes(item.value)
        return Handed("", 1, False, data)

    def _keep(self, own: Journal, item: Item[ItemT]) -> None:
        def numbered(number: int) -> None:
            item.entry = (own, number)
            if item.is_finished:
                own.note_done(number)
            else:
                self._in_memory.add((own, number))

        def done(fault: StorageFault | None) -> None:
            item.is_keeping = False
            if fault is not None and not item.is_finished:
                self._unkept[item] = None
                self._full_until_ns = self._clock.monotonic_ns() + _FULL_NS
            self._on_change()

        own.keep_one(self._handed(item), numbered, done)

    def _spill(self, own: Journal, item: Item[ItemT]) -> None:
        """Write an item to the journal alone. The buffer loads it again when there is room in memory."""
        self._spilling += 1

        def done(fault: StorageFault | None) -> None:
            self._spilling -= 1
            if fault is not None:
                if isinstance(fault, DiskFull):
                    self._full_until_ns = self._clock.monotonic_ns() + _FULL_NS
                self._put(item)  # beyond the capacity, because the item was accepted
            self._load()
            self._on_change()

        own.keep([self._handed(item)], done)

    # --- from the journal --------------------------------------------------------------------------------------------

    def adopt(self, journals: Sequence[Journal]) -> None:
        """Take over the journals of dead processes."""
        self._has_looked_round = True
        self._orphans += journals
        self._load()
        self._on_change()

    @property
    def journals(self) -> list[Journal]:
        return [*self._orphans, *([] if self._own is None else [self._own])]

    @property
    def _backlog(self) -> int:
        """Items on disk that are not in memory."""
        return sum(journal.entries for journal in self.journals) - len(self._in_memory)

    def _load(self) -> None:
        if self._is_loading or self._own is None or not self._has_looked_round or not self._backlog or self.is_closed:
            return
        if len(self._items) >= max(self._options.capacity // 2, 1):
            return
        journal = next((each for each in self.journals if each.has_more and each.fault is None), None)
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
        """The next item to process; None: not now."""
        if self._retries and self._retries[0][0] <= now_ns:
            return heapq.heappop(self._retries)[2]
        return self._queue.popleft() if self._queue and self._has_looked_round else None

    def finish(self, item: Item[ItemT], messages: int) -> None:
        """End an item: every message that it made has a receipt."""
        self._forwarded += 1
        self._messages += messages
        self._end(item)

    def fail(self, item: Item[ItemT], error: Exception, now_ns: int) -> None:
        """Plan another attempt after an error, or set the item aside after the last attempt."""
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
        """Set the item aside in the journal that holds it, or in our own."""
        journal, number = item.entry or (own, (1 << 63) | item.number)
        entry = SpoolEntry(number, "", 1, False, self._options.to_bytes(item.value))
        reason = f"{type(error).__name__}: {error}"
        self._asides += 1

        def done(_: StorageFault | None) -> None:  # after a fault, an item of the journal stays there for another try
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
        """Let go of the journals of dead processes that are empty by now."""
        for journal in [each for each in self._orphans if each.is_empty and not each.is_busy]:
            self._orphans.remove(journal)
            self._on_finished(journal)

    # --- state -------------------------------------------------------------------------------------------------------

    def keep_time(self) -> float | None:
        """Do what is due by time alone: wake workers for retries, write items that have waited too long.

        Returns how long to wait until the next call, in s; None: until something changes.
        """
        now_ns = self._clock.monotonic_ns()
        self.look(now_ns)
        due_ns = self.next_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._on_change()  # a retry is due: wake a worker
            due_ns = now_ns + 10_000_000
        return None if due_ns is None else (due_ns - now_ns) / 1e9

    def next_ns(self) -> int | None:
        """When the next retry or write is due by time alone."""
        dues = [self._retries[0][0]] if self._retries else []
        oldest = next(iter(self._unkept), None)
        if oldest is not None:
            dues.append(max(oldest.since_ns + self._persist_ns, self._full_until_ns))
        return min(dues, default=None)

    @property
    def on_disk(self) -> int:
        return sum(journal.entries for journal in self.journals) + self._spilling

    @property
    def is_drained(self) -> bool:
        """Whether every item is sent on or set aside, those of dead processes included."""
        is_at_rest = not self._items and not self._spilling and not self._asides
        return self._has_looked_round and is_at_rest and not self._backlog

    @property
    def is_kept(self) -> bool:
        """Whether every item that is left is safe in the journal."""
        is_under_way = self._spilling or self._asides or any(item.is_keeping for item in self._items)
        return not self._unkept and not is_under_way

    @property
    def is_durable(self) -> bool:
        return self._own is not None

    def left(self) -> Iterator[ItemT]:
        """The items in memory that are not sent on."""
        return (item.value for item in self._items)

    def counts(self) -> ForwarderCounts:
        return ForwarderCounts(
            self._accepted, self._forwarded, self._messages, len(self._items), self.on_disk, self._retried, self._aside
        )


def open_buffer(
    options: ForwarderOptions[ItemT], clock: Clock, post: Callable[..., object], on_change: Callable[[], None]
) -> tuple[ItemJournal | None, ForwarderBuffer[ItemT]]:
    """The buffer of a new forwarder, and the directory of its journal, if it has one. `post` runs completions."""
    rng = RealRng()
    journal = None if options.journal is None else ItemJournal(options, clock, post)
    buffer = ForwarderBuffer(
        options,
        clock,
        rng,
        journal=None if journal is None else journal.make(rng),
        on_change=on_change,
        on_finished=(lambda _: None) if journal is None else journal.finished,
    )
    if journal is not None:
        journal.start(buffer.adopt)
    return journal, buffer
