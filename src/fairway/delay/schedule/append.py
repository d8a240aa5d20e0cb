"""Schedule appender: cuts durable batches of the message log by due time, and writes each part into its bucket.

A message has a row, and can be cancelled, as soon as its batch is durable. It is home when its bucket holds it, synced.
It is moved when the manifest names that bucket. `moved_end` is the position in the message log below which every
message is moved. A start need not move those messages again, and the message log may drop them.

A bucket record is a batch, and holds no more than a batch may; so the appender takes what arrives together in rounds of
bounded size. A large batch that belongs into one bucket goes there unopened. The appender gathers smaller parts by
bucket and subject, for a second at most, so that a million messages sent one by one do not make a million records. It
does not hold messages that are due within 3 seconds. The message log has everything meanwhile. If the disk is full,
parts without room wait in the appender, and it tries again every second.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import batch, limits
from fairway.delay.schedule import bucket_record
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer, split_by
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.bucket_record import BucketIndex, BucketRecord
from fairway.delay.schedule.log import ScheduleLog
from fairway.delay.schedule.manifest import Calendar, TimeRange
from fairway.delay.schedule.pending_rows import RowNumbers, Rows, joined
from fairway.errors import FairwayError
from fairway.names import Subject
from fairway.storage.flusher import Defer

PIECE_MESSAGES = 1_024  # a record of so many is written at once; opened, it takes about 150 KB
PIECE_BYTES = 256 * limits.KIB
JOINED_BYTES = 16 * limits.MIB  # of batches whose parts join in one record: a quarter of a batch's bound
_OWN_MESSAGES = 256  # a part of so many is a record by itself
_NEAR_MS = 3_000  # due so soon: not held
_UNHELD_BYTES = 16 * limits.MIB  # with so many bytes not home, nothing is held any longer
_PIECES_PER_STEP = 8  # written at a time: 5 ms
_RETRY_MS = 1_000  # after a full disk


@dataclass(slots=True)
class _Move:
    """A part of the message log that ends at `end`, and how many of its messages are not moved yet."""

    end: int
    left: int = 0


class _Arrival(NamedTuple):
    """A durable batch, and which of its messages to take."""

    subject_id: int
    first_sequence: int
    data: bytes
    end: int
    move: _Move
    messages: NDArray[np.int64]


class _Some(NamedTuple):
    """Rows of one round, span and subject."""

    rows: RowNumbers
    size: int  # approximate
    whole_bytes: int  # raw bytes of the whole round
    is_near: bool


@dataclass(slots=True, eq=False)
class _Young:
    """A batch whose messages are not all home."""

    data: bytes
    end: int
    move: _Move
    left: int
    _sheet: BatchArrays | None = None

    def sheet(self) -> BatchArrays:
        if self._sheet is None:
            self._sheet = BatchArrays(self.data)
        return self._sheet


@dataclass(slots=True)
class _BucketBatch:
    """The messages that are gathered for one record of one bucket."""

    span: TimeRange
    subject_id: int
    since_ms: int
    parts: list[RowNumbers] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    whole_bytes: int = 0  # raw bytes of the batches that its parts come from: at least its own
    is_near: bool = False

    @property
    def is_enough(self) -> bool:
        is_large = self.bytes >= PIECE_BYTES or self.whole_bytes >= JOINED_BYTES
        return self.is_near or self.messages >= PIECE_MESSAGES or is_large


class ScheduleAppender:
    """Writes messages into buckets, and knows how much of the message log is moved."""

    def __init__(
        self,
        rows: Rows,
        log: ScheduleLog,
        *,
        defer: Defer,
        now: Callable[[], int],
        name: Callable[[int], Subject],
        on_home: Callable[[RowNumbers], None],
        on_warm: Callable[[tuple[int, int], BucketRecord], None],
        on_hold: Callable[[], None],
        hold_ms: int,
    ) -> None:
        self.moved_end = 0
        self.taken_end = 0  # where the newest batch that was taken ends
        self.unmoved_bytes = 0
        self.is_full = False  # the disk had no room for what waits here
        self._rows = rows
        self._log = log
        self._defer = defer
        self._now = now
        self._name = name
        self._on_home = on_home
        self._on_warm = on_warm
        self._on_hold = on_hold
        self._hold_ms = hold_ms
        self._calendar = Calendar()
        self._arrived: list[_Arrival] = []
        self._young: dict[int, _Young] = {}  # by token; a row that is not home has the token as its position
        self._token = 0
        self._moves: deque[_Move] = deque()
        self._of_unlisted: dict[int, list[tuple[_Move, int]]] = {}
        self._tail: _Move | None = None
        self._gatherings: dict[tuple[TimeRange, int], _BucketBatch] = {}
        self._ripe: deque[_BucketBatch] = deque()  # held no longer
        self._refused: list[_BucketBatch] = []
        self._refused_ms = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._arrived or self._young)

    @property
    def has_more(self) -> bool:
        """Whether held parts could be written at once: the last step has done enough."""
        return bool(self._ripe)

    def begin(self, moved_end: int, messages_end: int) -> None:
        """Begin where the last run ended: what was moved, and where its message log ended."""
        self.moved_end = moved_end
        self.taken_end = messages_end

    def begin_tail(self, messages_end: int) -> None:
        """The message log up to there is the tail: still to be moved, and ahead of new messages."""
        self.taken_end = max(self.taken_end, messages_end)
        if messages_end > self.moved_end:
            self._tail = _Move(messages_end, 1)
            self._moves.append(self._tail)

    def end_tail(self) -> None:
        """The whole tail was taken."""
        if self._tail is not None:
            tail, self._tail = self._tail, None
            self._moved(tail, 1)

    # --- taking ------------------------------------------------------------------------------------------------------

    def take(
        self, subject_id: int, first_sequence: int, data: bytes, end: int, keep: NDArray[np.bool_] | None = None
    ) -> None:
        """Take a durable batch. With `keep`, the batch is of the tail, and only those messages are missing. Its rows
        come with the next `admit`, which runs before anybody is answered."""
        messages = np.arange(batch.peek(data).count) if keep is None else np.flatnonzero(keep)
        self.taken_end = max(self.taken_end, end)
        move = self._tail if keep is not None else None
        if move is None:
            move = _Move(end)
            self._moves.append(move)
        if len(messages):
            move.left += len(messages)
            self.unmoved_bytes += len(data)
            if not self._arrived:
                self._defer(self._admit)
            self._arrived.append(_Arrival(subject_id, first_sequence, data, end, move, messages))

    def pass_by(self, end: int) -> None:
        """Note that the message log before `end` was taken, or needs no moving."""
        if end > (self._moves[-1].end if self._moves else self.moved_end):
            self._moves.append(_Move(end))
        self._moved(_Move(end), 0)

    def _admit(self) -> None:
        self.admit()

    def admit(self) -> RowNumbers:
        """Make rows of everything that has arrived, and gather the messages for their buckets."""
        arrived, self._arrived = self._arrived, []
        added = [self._admit_some(some, whole_bytes) for some, whole_bytes in _rounds(arrived)]
        return joined(added)

    def _admit_some(self, arrived: list[_Arrival], whole_bytes: int) -> RowNumbers:
        """Admit as much as one record may hold."""
        counts = [len(each.messages) for each in arrived]
        messages = joined([each.messages for each in arrived])
        firsts = np.array([each.first_sequence for each in arrived], np.uint64)
        indices = [bucket_record.index_of(each.data).only(each.messages) for each in arrived]
        index = indices[0] if len(indices) == 1 else BucketIndex(*map(np.concatenate, zip(*indices, strict=True)))
        subject_ids = np.repeat(np.array([each.subject_id for each in arrived], np.uint32), counts)
        sequences = messages.astype(np.uint64) + np.repeat(firsts, counts)
        rows = self._rows.add(subject_ids, sequences, index)
        tokens = np.arange(self._token + 1, self._token + 1 + len(arrived))
        self._token += len(arrived)
        young = (_Young(each.data, each.end, each.move, len(each.messages)) for each in arrived)
        self._young.update(zip(tokens.tolist(), young, strict=True))
        self._rows.put_each(rows, 0, np.repeat(tokens, counts), messages)
        sizes = np.repeat([len(each.data) / max(count, 1) for each, count in zip(arrived, counts, strict=True)], counts)
        now_ms = self._now()
        for span, chosen in self._calendar.sort(index.due_ms, now_ms):
            for subject_id, part in split_by(chosen, subject_ids[chosen]):
                is_near = int(index.due_ms[part].min()) <= now_ms + _NEAR_MS
                some = _Some(rows[part], int(sizes[part].sum()), whole_bytes, is_near)
                self._gather(span, subject_id, some, now_ms)
        return rows

    def _gather(self, span: TimeRange, subject_id: int, some: _Some, now_ms: int) -> None:
        rows, size, whole_bytes, is_near = some
        is_large = len(rows) >= _OWN_MESSAGES or size >= PIECE_BYTES or whole_bytes >= JOINED_BYTES
        gathering = None if is_large else self._gatherings.get((span, subject_id))
        if gathering is None:
            gathering = _BucketBatch(span, subject_id, now_ms)
        gathering.parts.append(rows)
        gathering.messages += len(rows)
        gathering.bytes += size
        gathering.whole_bytes += whole_bytes
        gathering.is_near |= is_near
        is_ripe = is_large or gathering.is_enough
        if is_ripe and not is_large:
            self._gatherings.pop((span, subject_id), None)
        if is_near or self._hold_ms == 0:
            self._append(gathering, now_ms)
        elif is_ripe:
            self._ripe.append(gathering)
        else:
            self._gatherings[span, subject_id] = gathering
        if len(self._gatherings) + len(self._ripe) == 1:
            self._on_hold()

    def abandon(self) -> None:
        """Write nothing any more."""
        self._arrived, self._gatherings, self._refused = [], {}, []
        self._ripe.clear()

    def young_at(self, token: int) -> BatchArrays:
        """The batch of a row that is not home, by its token."""
        return self._young[token].sheet()

    # --- holding -----------------------------------------------------------------------------------------------------

    def flush(self, now_ms: int) -> None:
        """Write everything that is held."""
        self.admit()
        self._ripe += self._gatherings.values()
        self._gatherings = {}
        while self._ripe:
            self._append(self._ripe.popleft(), now_ms)

    def step(self, now_ms: int) -> None:
        """Write what was held long enough, and try again what found no room. The engine calls this in every turn."""
        self.admit()
        hold_ms = 0 if self.unmoved_bytes > _UNHELD_BYTES else self._hold_ms
        for key in [key for key, each in self._gatherings.items() if not 0 <= now_ms - each.since_ms < hold_ms]:
            self._ripe.append(self._gatherings.pop(key))
        for _ in range(min(_PIECES_PER_STEP, len(self._ripe))):
            self._append(self._ripe.popleft(), now_ms)
        if self._refused and not 0 <= now_ms - self._refused_ms < _RETRY_MS:
            refused, self._refused, self.is_full = self._refused, [], False
            for each in refused:
                self._append(each, now_ms)

    def wait_ms(self, now_ms: int) -> int | None:
        """Time until `step` has something to do; None: nothing."""
        times = [next(iter(self._gatherings.values())).since_ms + self._hold_ms] if self._gatherings else []
        times += [self._refused_ms + _RETRY_MS] if self._refused else []
        return max(0, min(times) - now_ms) if times else None

    # --- writing -----------------------------------------------------------------------------------------------------

    def _append(self, gathering: _BucketBatch, now_ms: int) -> None:
        rows = joined(gathering.parts)
        tokens, data, index = self._contents(rows)
        file = self._log.file_for(gathering.span)
        subject_id, sequences = gathering.subject_id, self._rows.sequence[rows]
        subject = self._name(subject_id)
        position = file.append(subject, subject_id, sequences, data, index, now_ms)
        file.source_end = max(file.source_end, *(self._young[token].end for token in tokens))

        def home(outcome: FairwayError | None) -> None:
            if outcome is not None:
                self._refuse(gathering, now_ms)
                return
            self._rows.put(rows, file.number, position)
            if gathering.is_near:
                self._on_warm((file.number, position), BucketRecord(subject, subject_id, sequences, data))
            self._is_home(tokens, file)
            self._on_home(rows)

        file.when_durable(file.end, home)

    def _contents(self, rows: RowNumbers) -> tuple[dict[int, int], bytes, BucketIndex]:
        """How many messages each token has in the record, the record's batch, and its index."""
        places = self._rows.position[rows]
        messages = self._rows.index[rows].astype(np.int64)
        ends = np.append(np.flatnonzero(np.diff(places)) + 1, len(rows)).tolist()
        first = self._young[int(places[0])]
        counts: dict[int, int] = {}
        if len(ends) == 1 and len(rows) == batch.peek(first.data).count:
            return {int(places[0]): len(rows)}, first.data, bucket_record.index_of(first.data)  # unopened
        composer, start = BatchComposer(), 0
        for token, end in zip(places[np.array(ends) - 1].tolist(), ends, strict=True):
            composer.take(self._young[token].sheet(), messages[start:end])
            counts[token] = counts.get(token, 0) + end - start
            start = end
        header = batch.peek(first.data)
        index = self._rows.index_columns.only(rows)
        return counts, composer.encode(header.producer_id, header.first_sequence, index.due_ms), index

    def _refuse(self, gathering: _BucketBatch, now_ms: int) -> None:
        """The disk is full, or the store is poisoned; in that case this method is never called again."""
        self.is_full = True
        self._refused.append(gathering)
        self._refused_ms = now_ms

    def _is_home(self, tokens: dict[int, int], file: BucketFile) -> None:
        for token, count in tokens.items():
            young = self._young[token]
            young.left -= count
            if not young.left:
                del self._young[token]
                self.unmoved_bytes -= len(young.data)
            if file.is_listed:
                self._moved(young.move, count)
            else:
                self._of_unlisted.setdefault(file.number, []).append((young.move, count))

    def listed(self, file: BucketFile) -> None:
        """The manifest on disk names the bucket now."""
        for move, count in self._of_unlisted.pop(file.number, []):
            self._moved(move, count)

    def end_with(self, buckets: Iterable[int]) -> int:
        """The value of `moved_end` once a manifest names these buckets, too. That manifest may state it already."""
        counts: Counter[int] = Counter()
        for number in buckets:
            for move, count in self._of_unlisted.get(number, ()):
                counts[id(move)] += count
        end = self.moved_end
        for each in self._moves:
            if each.left > counts[id(each)]:
                break
            end = each.end
        return end

    def _moved(self, move: _Move, count: int) -> None:
        move.left -= count
        while self._moves and self._moves[0].left == 0:
            self.moved_end = self._moves.popleft().end


def _rounds(arrived: list[_Arrival]) -> Iterator[tuple[list[_Arrival], int]]:
    """Divide the arrivals, in order, into rounds of at most one record each; with the raw bytes of each round."""
    some: list[_Arrival] = []
    messages = whole_bytes = 0
    for each in arrived:
        more_bytes = batch.peek(each.data).raw_length
        is_too_much = messages + len(each.messages) > limits.BATCH_MESSAGES_MAX
        if some and (is_too_much or whole_bytes + more_bytes > JOINED_BYTES):
            yield some, whole_bytes
            some, messages, whole_bytes = [], 0, 0
        some.append(each)
        messages += len(each.messages)
        whole_bytes += more_bytes
    if some:
        yield some, whole_bytes
