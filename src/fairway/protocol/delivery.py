"""Pulled messages: batches that are decoded on first use, and `Message`, which a handler sees.

`LazyBatch` keeps the stored bytes of a batch and decodes them when somebody first reads one of its messages. A stored
batch of 2 KiB may hold 64 MiB of columns, and one answer may bring a hundred batches. The consumer's prefetch and the
frame length bound the stored bytes. `DecodedBatches` is a cache of decoded batches with a budget: the newest stay, and
the oldest are released. A read after that decodes the batch again.

The constructor of `LazyBatch` checks the length, the checksum and the section, so damage on the way is found at once.
The broker checked the columns when it stored them; decoding checks them again.

`Unpacker` turns the answer to a pull into runs of messages that can be delivered. Batches arrive whole, and the lots
say which messages belong to the answer. Three kinds of these messages are not delivered. The user already holds some of
them (see `lots`). Some lack the tags that the group wants, and some are in no attached batch, because the log has a
hole there. The last two kinds are acked. Runs in `behind` wait for earlier messages of their keys. Batches stay
compressed, except in a group that filters by tags: the consumer decodes those one after another within its budget.

`Message` looks key, tags, headers, id and times up in the batch when somebody asks. Only the payload is sliced in
advance. Settling a message sets one byte in its lot's state, from any thread, without a lock or a dictionary. The lot
then tells its consumer that an outcome is waiting, and the consumer sends it with all other outcomes known by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakValueDictionary, ref

import msgspec

from fairway import limits
from fairway.batch import Batch, BatchHeader, MessageId, decode_verified, key_hashes, layout, peek, verify
from fairway.errors import Misuse, RemoteProtocolError
from fairway.protocol.lots import (
    ACK,
    LINKED,
    OPEN,
    REJECT,
    RELEASE,
    RETRY,
    WAITING,
    ConsumerLot,
    SettlementNote,
    SettlementQueue,
    UnackedLots,
)
from fairway.protocol.messages import Pulled, Terms
from fairway.runtime.buffers import Bytes
from fairway.runtime.threads import Lock


class LazyBatch:
    """A batch of a pull answer, with its place in the subject. Its methods may be called from any thread."""

    __slots__ = (
        "__weakref__", "_batch", "_data", "_decoded", "_key_hashes", "_tag_lists", "appended_ms", "end_sequence",
        "first_sequence", "header", "raw_bytes",
    )  # fmt: skip

    def __init__(self, data: Bytes, first_sequence: int, appended_ms: int, decoded: DecodedBatches) -> None:
        """RemoteProtocolError if the bytes were damaged on their way."""
        self.header: BatchHeader = verify(data)
        self.first_sequence = first_sequence
        self.end_sequence = first_sequence + self.header.count
        self.appended_ms = appended_ms
        self.raw_bytes = max(self.header.raw_length, self.header.size)
        self._data = data
        self._decoded = decoded
        self._batch: Batch | None = None
        self._tag_lists: list[list[str]] | None = None
        self._key_hashes: list[int] | None = None

    def __len__(self) -> int:
        return self.header.count

    @property
    def batch(self) -> Batch:
        """The decoded batch. Raises RemoteProtocolError, at the first call only, if the columns are not sound."""
        batch = self._batch
        return self._decoded.decode(self) if batch is None else batch

    @property
    def is_decoded(self) -> bool:
        return self._batch is not None

    def decode(self) -> Batch:
        """Decode the batch and keep it until `release`. For `DecodedBatches`, which counts it."""
        if self._batch is None:
            self._batch = decode_verified(self._data, self.header)
        return self._batch

    def release(self) -> None:
        """Forget the decoded batch."""
        self._batch = self._tag_lists = None

    def tag_lists(self) -> list[list[str]]:
        """The tags of all messages, looked up once per decoding."""
        if not self.header.flags & layout.TAGS:
            return [[]] * self.header.count
        batch, tag_lists = self.batch, self._tag_lists
        if tag_lists is None:
            self._tag_lists = tag_lists = batch.tag_lists()
        return tag_lists

    def key_hashes(self) -> list[int]:
        """The key hashes of all messages, 0 without a key; looked up once. Stored uncompressed, so nothing is
        decoded."""
        if self._key_hashes is None:
            hashes = key_hashes(self._data, self.header)
            self._key_hashes = [0] * self.header.count if hashes is None else hashes.tolist()
        return self._key_hashes


class DecodedBatches:
    """A cache of decoded batches within a budget of raw bytes; one batch always fits, however large.

    A batch that nobody refers to any more frees its memory at once, but counts against the budget until it is the
    oldest. The lock is held while a batch is decoded, so threads that read large batches decode one at a time.
    """

    def __init__(self, bytes_max: int = limits.DECODED_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._lock = Lock()
        self._pages: deque[tuple[ref[LazyBatch], int]] = deque()  # the oldest first
        self._bytes = 0

    def decode(self, page: LazyBatch) -> Batch:
        """Decode a lazy batch, after releasing the oldest ones to make room."""
        with self._lock:
            if page.is_decoded:  # another thread decoded it meanwhile
                return page.decode()
            while self._pages and self._bytes + page.raw_bytes > self.bytes_max:
                oldest, size = self._pages.popleft()
                self._bytes -= size
                if (found := oldest()) is not None:
                    found.release()
            batch = page.decode()
            self._pages.append((ref(page), page.raw_bytes))
            self._bytes += page.raw_bytes
            return batch


class MessageRun(NamedTuple):
    """Messages next to one another, in one lot and one batch; `first` and `end` are sequences."""

    lot: ConsumerLot
    page: LazyBatch
    first: int
    end: int


class Unpacked(NamedTuple):
    runs: list[MessageRun]
    repeated: int = 0
    filtered: int = 0
    absent: int = 0
    behind: Sequence[MessageRun] = ()  # of lots whose messages wait for others of their keys
    linked: Sequence[tuple[ConsumerLot, LazyBatch, int]] = ()  # with `behind`: earlier messages, held or failed


class Unpacker:
    """Reads pull answers. Remembers the last batch: a batch larger than one lot comes with several answers. In a group
    by key remembers every batch that is in use: its messages come with many answers."""

    def __init__(self, settlements: SettlementQueue, unacked: UnackedLots, decoded: DecodedBatches) -> None:
        self._settlements = settlements
        self._unacked = unacked
        self._decoded = decoded
        self._last: tuple[bool, LazyBatch] | None = None
        self._in_use: WeakValueDictionary[tuple[bool, int], LazyBatch] = WeakValueDictionary()

    def unpack(self, pulled: Pulled, attachments: Sequence[Bytes], terms: Terms) -> Unpacked:
        """Turn an answer into runs. A RemoteProtocolError leaves everything as it was."""
        if len(pulled.batches) != len(attachments):
            raise RemoteProtocolError(f"{len(attachments)} batches attached, {len(pulled.batches)} announced")
        pages = [
            self._page(pulled.is_inbox, told.first_sequence, told.appended_ms, data, is_kept=terms.order == "key")
            for told, data in zip(pulled.batches, attachments, strict=True)
        ]
        pages.sort(key=lambda page: page.first_sequence)
        is_final = terms.is_at_most_once
        lots = [
            ConsumerLot(self._settlements, told, is_inbox=pulled.is_inbox, is_final=is_final, number=pulled.number)
            for told in pulled.lots
        ]
        overlaps = [self._shelve(lot, pages) for lot in lots]
        runs: list[MessageRun] = []
        behind: list[MessageRun] = []
        filtered = absent = 0
        for told, lot in zip(pulled.lots, lots, strict=True):
            of_lot, lot_absent = _runs(lot, pages)
            if terms.tags.tags and not pulled.is_inbox:  # messages in the retry inbox passed the filter before
                wanted = [part for run in of_lot for part in _wanted(run, terms)]
                filtered += _length(of_lot) - _length(wanted)
                of_lot = wanted
            absent += lot_absent
            if told.is_behind:
                behind += of_lot
            else:
                runs += of_lot
            if not lot.is_dirty and ACK in lot.state:
                lot.touch()
        if any(overlap is not None for overlap in overlaps):
            self._unacked.recount()
        linked = _linked(lots, pages) if behind or terms.order == "key" else ()
        return Unpacked(runs, sum(overlap or 0 for overlap in overlaps), filtered, absent, behind, linked)

    def _page(self, is_inbox: bool, first_sequence: int, appended_ms: int, data: Bytes, *, is_kept: bool) -> LazyBatch:
        if self._last is not None:
            was_inbox, page = self._last
            is_same = was_inbox == is_inbox and page.first_sequence == first_sequence
            if is_same and page.header == peek(data):
                return page
        if is_kept:
            known = self._in_use.get((is_inbox, first_sequence))
            if known is not None and known.header == peek(data):
                return known
        page = LazyBatch(data, first_sequence, appended_ms, self._decoded)
        self._last = is_inbox, page
        if is_kept:
            self._in_use[is_inbox, first_sequence] = page
        return page

    def _shelve(self, lot: ConsumerLot, pages: Sequence[LazyBatch]) -> int | None:
        """Add the lot, and count its messages that the user already has or has settled; None: no other lot overlaps."""
        older = self._unacked.overlapping(lot)
        for each in older:
            lot.inherit(each)
        lot.bytes_each = sum(page.raw_bytes for page in pages) // max(sum(map(len, pages)), 1)
        self._unacked.add(lot)
        return lot.state.count(LINKED) + lot.state.count(ACK) if older else None


def _runs(lot: ConsumerLot, pages: Sequence[LazyBatch]) -> tuple[list[MessageRun], int]:
    """Find the lot's WAITING messages in the batches. Messages that no batch has are acked and counted."""
    runs = []
    absent = 0
    firsts = [page.first_sequence for page in pages]
    for start, end in lot.runs(WAITING):
        at, stop = lot.first + start, lot.first + end
        for page in pages[max(bisect_right(firsts, at) - 1, 0) :]:
            if page.first_sequence >= stop:
                break
            if page.end_sequence <= at:
                continue
            if page.first_sequence > at:
                absent += _ack(lot, at, page.first_sequence)
                at = page.first_sequence
            upto = min(stop, page.end_sequence)
            runs.append(MessageRun(lot, page, at, upto))
            at = upto
        if at < stop:
            absent += _ack(lot, at, stop)
    return runs, absent


def _linked(lots: Sequence[ConsumerLot], pages: Sequence[LazyBatch]) -> list[tuple[ConsumerLot, LazyBatch, int]]:
    """Messages that later ones of their keys must not pass: the user holds them, or their failure has not been sent."""
    return [
        (lot, page, lot.first + index)
        for lot in lots
        for index in (*lot.failed, *(each for start, end in lot.runs(LINKED) for each in range(start, end)))
        for page in pages
        if page.first_sequence <= lot.first + index < page.end_sequence
    ]


def _wanted(run: MessageRun, terms: Terms) -> list[MessageRun]:
    """The parts with messages that the group wants. Acks the rest."""
    tag_lists = run.page.tag_lists()
    parts: list[MessageRun] = []
    at = run.first
    for sequence in range(run.first, run.end):
        if not terms.tags.accepts(tag_lists[sequence - run.page.first_sequence]):
            if sequence > at:
                parts.append(run._replace(first=at, end=sequence))
            _ack(run.lot, sequence, sequence + 1)
            at = sequence + 1
    if run.end > at:
        parts.append(run._replace(first=at))
    return parts


def _ack(lot: ConsumerLot, first: int, end: int) -> int:
    lot.fill(first - lot.first, end - lot.first, ACK)
    return end - first


def _length(runs: Sequence[MessageRun]) -> int:
    return sum(run.end - run.first for run in runs)


After: TypeAlias = float | timedelta  # seconds, or a timedelta
_LOT: Final[Callable[[Message], ConsumerLot]] = attrgetter("_lot")


def after_ms_of(after: After | None) -> int | None:
    """A wait in seconds or as a timedelta, in ms. None stays None and means the group's own backoff."""
    if after is None:
        return None
    if isinstance(after, bool) or not isinstance(after, int | float | timedelta):
        raise Misuse(f"after is seconds or a timedelta, not {type(after).__name__}")
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if not 0 <= seconds * 1_000 <= limits.RETRY_AFTER_MS_MAX:
        raise Misuse(f"after is {seconds} s: it is from 0 to {limits.RETRY_AFTER_MS_MAX // 1_000}, one day")
    return round(seconds * 1_000)


class Message(msgspec.Struct, gc=False, eq=False):
    """One message, delivered to you. Settle it once: `ack`, `retry` or `reject`. Until then the message stays yours
    while the consumer lives.

    Its methods may be called from any thread.
    """

    payload: bytes
    sequence: int
    _lot: ConsumerLot
    _page: LazyBatch

    # --- contents

    @property
    def subject(self) -> str:
        return self._lot.settlements.subject

    @property
    def group(self) -> str:
        return self._lot.settlements.group

    @property
    def broker_group(self) -> str:
        """The broker group that stores the message and numbers its sequence; empty outside a cluster."""
        return self._lot.settlements.broker_group

    @property
    def attempt(self) -> int:
        """1 at the first delivery."""
        return self._lot.attempt

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier attempt failed, or ended in an unknown way."""
        return self._lot.attempt > 1

    @property
    def key(self) -> str | None:
        return self._page.batch.key(self.sequence - self._page.first_sequence)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._page.batch.tags(self.sequence - self._page.first_sequence))

    @property
    def headers(self) -> dict[str, str]:
        return self._page.batch.headers(self.sequence - self._page.first_sequence)

    @property
    def id(self) -> MessageId:
        """The message id, the same for ever and on every copy; `str` gives 26 characters."""
        return self._page.batch.id(self.sequence - self._page.first_sequence)

    @property
    def created_at(self) -> datetime:
        """When its producer made it, UTC."""
        return _time(self._page.batch.created_ms(self.sequence - self._page.first_sequence))

    @property
    def appended_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return _time(self._page.appended_ms)

    @property
    def fence(self) -> int:
        """In an ordered group: a number that grows with every handout to any consumer; otherwise 0. Store the highest
        fence with the data that you change, and refuse a lower one. Then a consumer that was given up for dead changes
        nothing."""
        return self._lot.fence

    # --- state

    @property
    def is_settled(self) -> bool:
        """Whether the message has an outcome; the broker may not know it yet."""
        return self._lot.state[self.sequence - self._lot.first] != OPEN

    @property
    def is_lapsed(self) -> bool:
        """Whether the lease may have run out, so that another consumer may have the message: release it rather than
        begin. The value may become False again, when the broker confirms that the message is still yours."""
        return self._lot.has_lapsed(self.sequence)

    @property
    def is_final(self) -> bool:
        """Whether the group is at most once: delivery settled the message, and it cannot be retried."""
        return self._lot.is_final

    # --- outcome

    def ack(self) -> None:
        """Settle the message as done."""
        lot = self._lot
        index = self.sequence - lot.first
        if lot.state[index] != OPEN:
            raise lot.complaint(self.sequence)
        lot.state[index] = ACK
        if not lot.is_dirty:
            lot.touch()

    def retry(self, after: After | None = None, reason: str = "") -> None:
        """Give the message back after a failure, for another attempt `after` seconds (or a timedelta); None: the
        group's backoff."""
        self._fail(RETRY, SettlementNote(after_ms_of(after), reason))

    def reject(self, reason: str = "") -> None:
        """Make the message a dead letter at once."""
        self._fail(REJECT, SettlementNote(None, reason))

    def release(self) -> None:
        """Hand the message back untouched, to whoever pulls next; the attempt does not count."""
        self._lot.settle(self.sequence, RELEASE, None)

    def _fail(self, code: int, note: SettlementNote) -> None:
        lot = self._lot
        if lot.settlements.is_watched and lot.is_last(code):
            lot.last_ids[self.sequence - lot.first] = self.id
        lot.settle(self.sequence, code, note)

    def __repr__(self) -> str:
        return f"<Message {self.sequence} of {self.subject}, attempt {self.attempt}, {len(self.payload)} bytes>"


def may_begin(message: Message) -> bool:
    """Whether a message that was taken from its session may go to the program: certainly no other consumer has it."""
    return message._lot.may_begin(message.sequence)


def begin(messages: Sequence[Message]) -> list[Message]:
    """The messages that may go to the program now; the others are released."""
    begun: list[Message] = []
    for lot, group in groupby(messages, _LOT):
        if lot.may_all_begin():
            begun += group
            continue
        for message in group:
            if lot.may_begin(message.sequence):
                begun.append(message)
            else:
                message.release()
    return begun


def is_last_attempt(message: Message) -> bool:
    """Whether a failure of this attempt makes the message a dead letter, by the configuration that the consumer
    knows."""
    return message._lot.is_last(RETRY)


def ack_all(messages: Sequence[Message]) -> None:
    """`ack` each message. Misuse at the first that was settled before; the messages ahead of that one stay acked."""
    for lot, group in groupby(messages, _LOT):
        state, first = lot.state, lot.first
        try:
            for message in group:
                index = message.sequence - first
                if state[index] != OPEN:
                    raise lot.complaint(message.sequence)
                state[index] = ACK
        finally:
            if not lot.is_dirty:  # after the bytes, so that the line's thread sees all of them
                lot.touch()


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1_000, UTC) + timedelta(milliseconds=ms % 1_000)
