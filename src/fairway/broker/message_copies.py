"""Copies of messages that the broker makes: dead letters, and redriven dead letters.

A copy is identified by its origin. All copies of one group from one subject form a producer stream of their own. The
producer id is a hash of both names, and a copy's producer sequence is the sequence of the original. So the consume log
of the target subject shows which messages are there already, without a read of any message. After a crash the broker
copies nothing twice, and it keeps no other record. Copies on their way to the disk count as present: the caller waits
until they are durable, or learns that a full disk has undone them.

The stream identifies the origin. The message keeps its first id, as an explicit id.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from fairway import batch, limits
from fairway.groups import Range
from fairway.names import GroupName, Subject
from fairway.storage.message_log import MessageLog


def stream_of(source: Subject, group: GroupName) -> int:
    """The producer id of the copies from a subject for a group."""
    return batch.key_hash(f"{source} {group}")


class CopiedRanges:
    """Which messages of one stream a subject holds, as ranges of their original sequences."""

    def __init__(self, log: MessageLog, subject_id: int, stream: int) -> None:
        self._log = log
        self._subject_id = subject_id
        self._stream = stream
        self._seen_to = 0
        self._undos = 0
        self._firsts: list[int] = []  # ranges that do not touch, ascending
        self._ends: list[int] = []

    def refresh(self) -> None:
        """Take in new entries. Starts over where a full disk has undone something."""
        log = self._log.log
        undos = len(log.flusher.undone_from)
        if undos != self._undos:
            self._undos, self._seen_to = undos, 0
            self._firsts.clear()
            self._ends.clear()
        for entry in self._log.views.entries.entries(self._subject_id, self._seen_to, log.end):
            if entry.position < log.committed_end:
                self._seen_to = entry.end_sequence
            if entry.producer_id == self._stream:
                self.add(entry.producer_sequence, entry.count)

    def add(self, first: int, count: int) -> None:
        end = first + count
        low = bisect_left(self._ends, first)
        high = bisect_right(self._firsts, end)
        if low < high:
            first = min(first, self._firsts[low])
            end = max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]

    def missing(self, first: int, count: int) -> list[Range]:
        """The parts of a range that have no copy."""
        end = first + count
        found: list[Range] = []
        at = bisect_right(self._ends, first)
        while first < end:
            begin = self._firsts[at] if at < len(self._firsts) else end
            if begin > first:
                found.append((first, min(begin, end) - first))
            first = self._ends[at] if at < len(self._ends) else end
            at += 1
        return found

    def count(self, first: int, end: int) -> int:
        """How many sequences of [first, end) have a copy."""
        return max(end - first, 0) - sum(count for _, count in self.missing(first, end - first))


class MessageCopy(NamedTuple):
    """One message to copy."""

    payload: bytes
    key: str | None
    tags: list[str]
    headers: dict[str, str]
    id: batch.MessageId
    created_ms: int


def taken_from(source: batch.Batch, first: int, count: int) -> list[MessageCopy]:
    """Messages of a batch, by index."""
    return [
        MessageCopy(
            source.payloads[index],
            source.key(index),
            source.tags(index),
            source.headers(index),
            source.id(index),
            source.created_ms(index),
        )
        for index in range(first, first + count)
    ]


def encoded(copies: list[MessageCopy], source: batch.BatchHeader, *, stream: int, sequence: int) -> bytes:
    """The copies as one batch; `sequence` is the origin of the first."""
    created_ms = copies[0].created_ms
    return batch.encode(
        [each.payload for each in copies],
        producer_id=stream,
        first_sequence=sequence,
        created_ms=created_ms,
        keys=[each.key for each in copies],
        tags=[each.tags for each in copies],
        headers=[each.headers for each in copies],
        created_deltas_ms=[each.created_ms - created_ms for each in copies],
        ids=[each.id for each in copies],
        codec=source.codec,
        schema_id=source.schema_id,
    )


def with_headers(copy: MessageCopy, more: Mapping[str, str]) -> MessageCopy:
    """The copy with more headers, as far as there is room: the sender's own come first."""
    kept = {name: value for name, value in copy.headers.items() if name not in more}
    room = max(limits.HEADERS_MAX - len(kept), 0)
    return copy._replace(headers=kept | dict(list(more.items())[:room]))
