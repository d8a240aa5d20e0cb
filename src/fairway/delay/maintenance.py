"""Maintenance of the delay server: frees the rows of finished messages, and tends the buckets once a minute.

`Memory` keeps the row of a sent or cancelled message for an hour, so that `cancel` can tell what became of the message.
It keeps at most about a million such rows: at 20,000 messages a second, the last minute. Then it frees the row and sets
one bit for the message's place in its bucket (`DispatchLog.gone`). The checkpoint holds these bits, because a start
must not send the message again. The bits go when the bucket goes.

A row is freed only once a manifest on disk covers its message. Otherwise a start would move the message into a bucket
again and find no row with its state. Nor is a row freed while its bucket is being split, because its place is about to
change.

`DelayMaintenance` splits buckets whose time comes near, deletes buckets that nobody needs, writes catalogues, and lets
the store drop old parts of the logs.

`BucketSplit` moves the live messages of one bucket into other buckets. A month is split into days and a day into hours
when they come near. A past bucket is split if it still holds messages that were rescheduled by more than a day. A
bucket with salvaged messages is split, too, so that they leave the damaged record.

The old bucket takes no more messages from the start of the split. The split writes the live messages into private
buckets, some records per step so that nothing else waits, gathered into records of good size. Then one manifest
switches. A message that is cancelled, sent or rescheduled meanwhile changes only its row, which stays the same row.
After a crash before the switch, the old bucket is as it was, and a start deletes the private ones. If the disk has no
room, the split waits. The split also waits before the switch until the decisions of its messages are final. The old
bucket takes the data of cancelled and sent messages with it, and a decision that the replicas do not have yet may be
undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.delay.engine_part import EngineData, EnginePart
from fairway.delay.schedule.append import JOINED_BYTES, PIECE_BYTES, PIECE_MESSAGES
from fairway.delay.schedule.batch_arrays import BatchComposer
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.log import OpenBucketRecord
from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS, Calendar, TimeRange, is_to_split
from fairway.delay.schedule.pending_rows import RowNumbers, Rows, RowState, record_key_of
from fairway.errors import FairwayError
from fairway.names import Subject

KEEP_MS = HOUR_MS
_LOT_ROWS = 8_192  # freed at a time
_SEQUENCE_BITS = 40  # of a message's number; subjects have the rest


class _ForgottenLot(NamedTuple):
    done_ms: int
    messages_end: int  # of what was appended to buckets by then
    rows: RowNumbers
    names: NDArray[np.uint64]  # of their messages: a row that goes with its bucket is used again


class Memory(EnginePart):
    """Rows of finished messages, the oldest first."""

    def __init__(self, data: EngineData, rows_max: int) -> None:
        super().__init__(data)
        self._rows_max = rows_max
        self._lots: deque[_ForgottenLot] = deque()
        self.count = 0

    def begin(self, now_ms: int) -> None:
        """Every row is loaded: count all finished rows as finished now, for their real times are unknown."""
        self._lots.clear()
        self.count = 0
        for state in (RowState.DISPATCHED, RowState.CANCELLED):
            self.note(self._rows.in_state(state), now_ms)

    def note(self, rows: RowNumbers, now_ms: int) -> None:
        """These rows were sent or cancelled."""
        if len(rows):
            self._lots.append(_ForgottenLot(now_ms, self._appender.taken_end, rows, self._names_of(rows)))
            self.count += len(rows)

    def _names_of(self, rows: RowNumbers) -> NDArray[np.uint64]:
        """A number for each message, from its subject and sequence: no two messages that use one row share it."""
        table = self._rows
        return table.sequence[rows] + (table.subject_id[rows].astype(np.uint64) << np.uint64(_SEQUENCE_BITS))

    def step(self, now_ms: int) -> None:
        """Free some rows that are too many or too old. The engine calls this in every turn."""
        taken: list[RowNumbers] = []
        count = 0
        while self._lots and count < _LOT_ROWS and self._is_surplus(self._lots[0], now_ms):
            if self._lots[0].messages_end > self._log.stated_end:
                self._log.state(self._lots[0].messages_end)
                break
            lot = self._lots.popleft()
            taken.append(lot.rows[self._names_of(lot.rows) == lot.names])
            count += len(lot.rows)
            self.count -= len(lot.rows)
        if taken:
            self._forget(np.concatenate(taken), now_ms)

    def _is_surplus(self, oldest: _ForgottenLot, now_ms: int) -> bool:
        return self.count > self._rows_max + min(_LOT_ROWS, self._rows_max) or now_ms - oldest.done_ms > KEEP_MS

    def _forget(self, rows: RowNumbers, now_ms: int) -> None:
        table = self._rows
        rows = np.unique(rows)
        rows = rows[np.isin(table.state[rows], (RowState.DISPATCHED, RowState.CANCELLED))]
        files = np.array([each.number for each in self._log if each.is_listed and not each.is_retired], np.uint32)
        is_settled = np.isin(table.file[rows], files)
        self.note(rows[~is_settled], now_ms)
        rows = rows[is_settled]
        spots = table.spots(rows)
        order = np.argsort(spots, kind="stable")
        rows, spots = rows[order], spots[order]
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(spots)) + 1) if len(rows) else ():
            file, position = record_key_of(int(spots[part[0]]))
            bits = np.zeros(limits.BATCH_MESSAGES_MAX, np.bool_)
            bits[table.index[rows[part]]] = True
            pieces = self._journal.gone.setdefault(file, {})
            mask = int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
            pieces[position] = pieces.get(position, 0) | mask
        table.free(rows)


_AHEAD_RECORDS = 32  # fetched before they are needed
_GATHERED_BYTES_MAX = 16 * limits.MIB
_RETRY_MS = 1_000  # after a full disk
_NOBODY = 1  # producer id for batches in which every message has its own explicit id


@dataclass(slots=True)
class _SplitBatch:
    """The messages that are gathered for one record of one private bucket."""

    span: TimeRange
    subject: Subject
    composer: BatchComposer = field(default_factory=lambda: BatchComposer(is_copying=True))
    parts: list[RowNumbers] = field(default_factory=list)
    whole_bytes: int = 0  # raw bytes of the records that its parts come from: at least its own

    def has_room(self, messages: int, whole_bytes: int) -> bool:
        """Whether the parts still fit one record, which is one batch."""
        is_within = len(self.composer) + messages <= limits.BATCH_MESSAGES_MAX
        return is_within and self.whole_bytes + whole_bytes <= JOINED_BYTES


class BucketSplit(EnginePart):
    """The split of one bucket."""

    def __init__(self, data: EngineData, file: BucketFile, on_split: Callable[[int], None]) -> None:
        super().__init__(data)
        self.file = file
        self.is_done = False
        self._on_split = on_split
        self._judged_end: int | None = None  # the rows reflect every decision before it
        self._children: dict[TimeRange, BucketFile] = {}
        self._gatherings: dict[tuple[TimeRange, int], _SplitBatch] = {}
        self._gathered_bytes = 0
        self._calendar = Calendar()
        self._todo: RowNumbers | None = None
        self._left = 0  # records that are not yet synced
        self._refused: list[RowNumbers] = []
        self._refused_ms = 0
        self._log.retire(file)

    def step(self, now_ms: int, settled_end: int) -> None:
        """Go on a little. Call again until `is_done`. `settled_end`: where the final decisions end in the dispatch
        log."""
        if self._todo is None:
            if self.file.synced_end == self.file.end:  # every message that was on its way into it has a place
                self._todo = live_rows(self._rows, self.file)
        elif len(self._todo):
            self._copy(now_ms)
        elif self._gatherings:
            self._flush(now_ms)
        elif self._refused:
            if not 0 <= now_ms - self._refused_ms < _RETRY_MS:
                self._todo, self._refused = in_order(self._rows, np.concatenate(self._refused)), []
        elif self._left == 0 and not self.is_done:
            self._switch(settled_end)

    def _switch(self, settled_end: int) -> None:
        """Switch once no message of the old bucket can be moved a second time, and no decision about one can be
        undone."""
        if self._judged_end is None:
            self._judged_end = self._journal.end
        children = list(self._children.values())
        if self._judged_end <= settled_end and self.file.source_end <= self._log.end_with(children):
            self.is_done = True
            self._log.switch([self.file], children, self._forget)

    def _copy(self, now_ms: int) -> None:
        if self._todo is None:
            return
        copied = 0
        positions = self._rows.position[self._todo]
        while len(self._todo) and copied < self._messages_per_step:
            position = int(positions[0])
            record_key = self.file.number, position
            opened = self._record_cache.get(record_key)
            if opened is None and not self._record_cache.is_damaged(record_key):
                ahead = np.unique(positions[: self._messages_per_step])[:_AHEAD_RECORDS]
                self._record_cache.want((self.file.number, each) for each in ahead.tolist())
                return
            end = int(np.searchsorted(positions, position, side="right"))
            chosen, self._todo, positions = self._todo[:end], self._todo[end:], positions[end:]
            copied += len(chosen)
            chosen = chosen[is_live(self._rows, chosen)]
            is_lost = None if opened is None else opened.lacks(self._rows.index[chosen].astype(np.int64))
            self._rows.become(chosen if is_lost is None else chosen[is_lost], RowState.LOST)
            chosen = chosen[:0] if is_lost is None else chosen[~is_lost]
            if opened is not None and len(chosen):
                self._gather(opened, chosen, now_ms)

    def _gather(self, opened: OpenBucketRecord, chosen: RowNumbers, now_ms: int) -> None:
        """Gather messages of one record for the spans that they belong to now."""
        rows = self._rows
        subject_id = int(rows.subject_id[chosen[0]])
        whole_bytes = opened.sheet.header.raw_length
        for span, which in self._calendar.sort(rows.due_ms[chosen], now_ms):
            part = chosen[which]
            gathering = self._gatherings.get((span, subject_id))
            if gathering is not None and not gathering.has_room(len(part), whole_bytes):
                self._write(gathering, subject_id, now_ms)
                gathering = None
            if gathering is None:
                gathering = self._gatherings[span, subject_id] = _SplitBatch(span, opened.subject)
            gathering.whole_bytes += whole_bytes
            before = gathering.composer.bytes
            gathering.composer.take(opened.sheet, rows.index[part].astype(np.int64))
            gathering.parts.append(part)
            self._gathered_bytes += gathering.composer.bytes - before
            if len(gathering.composer) >= PIECE_MESSAGES or gathering.composer.bytes >= PIECE_BYTES:
                self._write(self._gatherings.pop((span, subject_id)), subject_id, now_ms)
        if self._gathered_bytes > _GATHERED_BYTES_MAX:
            self._flush(now_ms)

    def _flush(self, now_ms: int) -> None:
        gatherings, self._gatherings = self._gatherings, {}
        for (_, subject_id), each in gatherings.items():
            self._write(each, subject_id, now_ms)

    def _write(self, gathering: _SplitBatch, subject_id: int, now_ms: int) -> None:
        rows, part = self._rows, np.concatenate(gathering.parts)
        self._gathered_bytes -= gathering.composer.bytes
        child = self._children.get(gathering.span)
        if child is None:
            child = self._children[gathering.span] = self._log.create(gathering.span, of_split=True)
        index = rows.index_columns.only(part)
        data = gathering.composer.encode(_NOBODY, 0, index.due_ms)
        at = child.append(gathering.subject, subject_id, rows.sequence[part], data, index, now_ms)
        self._left += 1

        def arrived(outcome: FairwayError | None) -> None:
            self._left -= 1
            if outcome is None:
                self._rows.put(part, child.number, at)
            else:
                self._refused.append(part)
                self._refused_ms = now_ms

        child.when_durable(child.end, arrived)

    def _forget(self) -> None:
        self._rows.free(self._rows.of_file(self.file.number))
        self._on_split(self.file.number)


def is_live(rows: Rows, chosen: RowNumbers) -> NDArray[np.bool_]:
    """Which rows still need their data: to be sent, or sent again."""
    return np.isin(rows.state[chosen], (RowState.PENDING, RowState.INTENDED))


def live_rows(rows: Rows, file: BucketFile) -> RowNumbers:
    """The live rows of a bucket, in the order of their places."""
    found = rows.of_file(file.number)
    return in_order(rows, found[is_live(rows, found)])


def in_order(rows: Rows, chosen: RowNumbers) -> RowNumbers:
    return chosen[np.lexsort((rows.index[chosen], rows.position[chosen]))]


EVERY_MS = 60_000
_STATED_BYTES = 4 * limits.MIB  # of message log moved since the last manifest: a start reads about so much again
_CATALOGUES_PER_STEP = 2
_ACTIONS_BYTES = 16 * limits.MIB  # of dispatch log since the last checkpoint: a start reads so much of it


class DelayMaintenance(EnginePart):
    """Tends the buckets every minute, and continues a split in every step."""

    def __init__(self, data: EngineData, memory: Memory, every_ms: int | None) -> None:
        super().__init__(data)
        self._memory = memory
        self._every_ms = EVERY_MS if every_ms is None else every_ms
        self._split: BucketSplit | None = None
        self._looked_ms: int | None = None
        self._to_catalogue: list[BucketFile] = []
        self._actions_end = 0
        self._dead: dict[int, int] = {}  # by dead bucket: the end of the decisions it rests on
        self.splits = 0

    @property
    def is_busy(self) -> bool:
        return self._split is not None

    def wait_ms(self, now_ms: int) -> int:
        """Time to the next round. A clock that went back does not put the round off."""
        return 0 if self._looked_ms is None else max(0, min(self._looked_ms + self._every_ms - now_ms, self._every_ms))

    def step(self, now_ms: int) -> None:
        """Do the work of one turn. The engine calls this in every turn."""
        self._memory.step(now_ms)
        for file in [self._to_catalogue.pop() for _ in self._to_catalogue[-_CATALOGUES_PER_STEP:]]:
            if not file.is_retired:
                file.catalogue(now_ms, self._log.catalogue_messages // 4)
        if self._appender.moved_end - self._log.stated_end >= _STATED_BYTES:
            self._log.state(self._appender.moved_end)
        self._log.retry(now_ms)
        if self._split is not None:
            self._split.step(now_ms, self._settled_end())
            if self._split.is_done:
                self._split = None
                self.splits += 1
                self._looked_ms = None  # there may be more to split
        elif self._looked_ms is None or not 0 <= now_ms - self._looked_ms < self._every_ms:
            self._looked_ms = now_ms
            self._look(now_ms)

    def _look(self, now_ms: int) -> None:
        self._to_catalogue = []
        for file in list(self._log):
            if file.is_of_split:
                continue
            if self._split is None and (is_to_split(file.span, now_ms) or self._repairs.is_to_evacuate(file)):
                self._split = BucketSplit(self._data, file, self._forget)
            elif file.span.end_ms + KEEP_MS <= now_ms:
                self._look_at_past(file, now_ms)
            else:
                self._to_catalogue.append(file)
        self._store.follow_clock()
        self._store.retain(owed_from=min(self._appender.moved_end, self._repairs.needed_from))
        if self._store.actions.log.end - self._actions_end >= _ACTIONS_BYTES:
            self._actions_end = self._store.actions.log.end
            self._store.checkpoint()

    def _look_at_past(self, file: BucketFile, now_ms: int) -> None:
        live = live_rows(self._rows, file)
        if len(live):
            is_put_off = (self._rows.state[live] == RowState.PENDING) & (self._rows.due_ms[live] > now_ms + DAY_MS)
            if self._split is None and np.any(is_put_off):
                self._split = BucketSplit(self._data, file, self._forget)
        elif file.synced_end == file.end and file.source_end <= self._appender.moved_end and self._is_dead(file):
            self._log.switch([file], [], lambda: self._delete(file))

    def _is_dead(self, file: BucketFile) -> bool:
        """Whether nobody needs the bucket any more, and the decisions about its messages are final. Before that, a
        message might have to be sent again."""
        return self._dead.setdefault(file.number, self._journal.end) <= self._settled_end()

    def _delete(self, file: BucketFile) -> None:
        self._rows.free(self._rows.of_file(file.number))
        self._forget(file.number)

    def _forget(self, number: int) -> None:
        self._journal.gone.pop(number, None)
        self._dead.pop(number, None)
        self._repairs.forget(number)

    def _settled_end(self) -> int:
        """Decisions before this position are final: neither a crash nor a change of masters undoes them."""
        log = self._store.actions.log
        return min(log.synced_end, log.committed_end)
