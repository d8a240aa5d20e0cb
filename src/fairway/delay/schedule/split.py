"""Bucket split: moves the live messages of one bucket into other buckets.

A month is split into days and a day into hours when they come near. A past bucket is split if it still holds messages
that were rescheduled by more than a day. A bucket with salvaged messages is split, too, so that they leave the damaged
record.

The old bucket takes no more messages from the start of the split. The split writes the live messages into private
buckets, some records per step so that nothing else waits, gathered into records of good size. Then one manifest
switches. A message that is cancelled, sent or rescheduled meanwhile changes only its row, which stays the same row.
After a crash before the switch, the old bucket is as it was, and a start deletes the private ones. If the disk has no
room, the split waits. The split also waits before the switch until the decisions of its messages are final. The old
bucket takes the data of cancelled and sent messages with it, and a decision that the replicas do not have yet may be
undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.delay.schedule.append import JOINED_BYTES, PIECE_BYTES, PIECE_MESSAGES
from fairway.delay.schedule.batch_arrays import BatchComposer
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.log import BucketRecordCache, OpenBucketRecord, ScheduleLog
from fairway.delay.schedule.manifest import Calendar, TimeRange
from fairway.delay.schedule.pending_rows import Rows, RowState
from fairway.delay.schedule.wheel import RowNumbers
from fairway.errors import FairwayError
from fairway.names import Subject

_AHEAD_PIECES = 32  # fetched before they are needed
_GATHERED_BYTES_MAX = 16 * limits.MIB
_RETRY_MS = 1_000  # after a full disk


@dataclass(slots=True)
class _SplitBatch:
    """The messages that are gathered for one record of one private bucket."""

    span: TimeRange
    subject: Subject
    letters: BatchComposer = field(default_factory=lambda: BatchComposer(is_copying=True))
    parts: list[RowNumbers] = field(default_factory=list)
    whole_bytes: int = 0  # raw bytes of the records that its parts come from: at least its own

    def has_room(self, messages: int, whole_bytes: int) -> bool:
        """Whether the parts still fit one record, which is one batch."""
        is_within = len(self.letters) + messages <= limits.BATCH_MESSAGES_MAX
        return is_within and self.whole_bytes + whole_bytes <= JOINED_BYTES


class BucketSplit:
    """The split of one bucket."""

    def __init__(
        self,
        log: ScheduleLog,
        record_cache: BucketRecordCache,
        rows: Rows,
        file: BucketFile,
        messages_per_step: int,
        on_done: Callable[[int], None],
        decided_end: Callable[[], int],
    ) -> None:
        """`decided_end`: where the newest decision ends in the dispatch log."""
        self.file = file
        self.is_done = False
        self._log = log
        self._record_cache = record_cache
        self._rows = rows
        self._messages_per_step = messages_per_step
        self._on_done = on_done
        self._decided_end = decided_end
        self._judged_end: int | None = None  # the rows reflect every decision before it
        self._children: dict[TimeRange, BucketFile] = {}
        self._gatherings: dict[tuple[TimeRange, int], _SplitBatch] = {}
        self._gathered_bytes = 0
        self._calendar = Calendar()
        self._todo: RowNumbers | None = None
        self._left = 0  # records that are not yet synced
        self._refused: list[RowNumbers] = []
        self._refused_ms = 0
        log.retire(file)

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
            self._judged_end = self._decided_end()
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
                ahead = np.unique(positions[: self._messages_per_step])[:_AHEAD_PIECES]
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
            before = gathering.letters.bytes
            gathering.letters.take(opened.sheet, rows.index[part].astype(np.int64))
            gathering.parts.append(part)
            self._gathered_bytes += gathering.letters.bytes - before
            if len(gathering.letters) >= PIECE_MESSAGES or gathering.letters.bytes >= PIECE_BYTES:
                self._write(self._gatherings.pop((span, subject_id)), subject_id, now_ms)
        if self._gathered_bytes > _GATHERED_BYTES_MAX:
            self._flush(now_ms)

    def _flush(self, now_ms: int) -> None:
        gatherings, self._gatherings = self._gatherings, {}
        for (_, subject_id), each in gatherings.items():
            self._write(each, subject_id, now_ms)

    def _write(self, gathering: _SplitBatch, subject_id: int, now_ms: int) -> None:
        rows, part = self._rows, np.concatenate(gathering.parts)
        self._gathered_bytes -= gathering.letters.bytes
        child = self._children.get(gathering.span)
        if child is None:
            child = self._children[gathering.span] = self._log.create(gathering.span, of_split=True)
        index = rows.index_columns.only(part)
        data = gathering.letters.encode(_NOBODY, 0, index.due_ms)
        at = child.append(gathering.subject, subject_id, rows.sequence[part], data, index, now_ms)
        self._left += 1
        child.when_durable(child.end, self._arrival(part, child, at, now_ms))

    def _arrival(
        self, part: RowNumbers, child: BucketFile, position: int, now_ms: int
    ) -> Callable[[FairwayError | None], None]:
        def arrived(outcome: FairwayError | None) -> None:
            self._left -= 1
            if outcome is None:
                self._rows.put(part, child.number, position)
            else:
                self._refused.append(part)
                self._refused_ms = now_ms

        return arrived

    def _forget(self) -> None:
        self._rows.free(self._rows.of_file(self.file.number))
        self._on_done(self.file.number)


_NOBODY = 1  # producer id for batches in which every message has its own explicit id


def is_live(rows: Rows, chosen: RowNumbers) -> NDArray[np.bool_]:
    """Which rows still need their data: to be sent, or sent again."""
    return np.isin(rows.state[chosen], (RowState.PENDING, RowState.INTENDED))


def live_rows(rows: Rows, file: BucketFile) -> RowNumbers:
    """The live rows of a bucket, in the order of their places."""
    found = rows.of_file(file.number)
    return in_order(rows, found[is_live(rows, found)])


def in_order(rows: Rows, chosen: RowNumbers) -> RowNumbers:
    return chosen[np.lexsort((rows.index[chosen], rows.position[chosen]))]
