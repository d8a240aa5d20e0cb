"""Holes in the sequences of a subject: which of them are messages that the disk has lost.

A reader steps over a hole. A group that does so has to count what it missed, and not every hole is a loss:

    a batch that the index knows and that was found damaged     lost, if the group's filter wants it
    a gap in the index around a rotten span of the log          lost
    any other gap                                               never held a message that was acknowledged: with
                                                                durability `memory` a power cut skips sequences

Between two batches of a subject the number is exact. Where rot took a record's header too, and the subject had no batch
behind it, nobody knows how many messages were there: recovery skips as many sequences as there may have been, and all
of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fairway.storage import message_log
from fairway.storage.checkpoint import RotMark
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import MessageLog


def lost_ranges(
    messages: MessageLog,
    rotten: Iterable[RotMark],
    subject_id: int,
    first: int,
    end: int,
    is_wanted: Callable[[ConsumeLogEntry], bool] = lambda _: True,
) -> list[tuple[int, int]]:
    """The messages in [first, end) that the disk has lost, as (first, count), in order. Costs nothing where nothing has
    rotted."""
    spans = [(each.start, max(each.end, each.start + 1)) for each in rotten if each.log == message_log.DIRECTORY]
    if not spans or first >= end:
        return []
    committed_end = messages.log.committed_end
    found: list[tuple[int, int]] = []
    at, above = first, 0  # the next sequence to explain, and where in the log it cannot lie below
    for entry in messages.views.entries.entries(subject_id, max(first - 1, 0), committed_end):
        if entry.first_sequence > at and _touches(spans, above, entry.position):
            _add(found, at, min(entry.first_sequence, end))
        if entry.first_sequence >= end:
            return found
        if messages.is_damaged(entry.position) and is_wanted(entry):
            _add(found, max(entry.first_sequence, at), min(entry.end_sequence, end))
        at, above = max(at, entry.end_sequence), entry.position + entry.size
    if at < end and _touches(spans, above, committed_end):
        _add(found, at, end)
    return found


def _touches(spans: Iterable[tuple[int, int]], low: int, high: int) -> bool:
    return any(start < high and low < end for start, end in spans)


def _add(found: list[tuple[int, int]], first: int, end: int) -> None:
    if first >= end:
        return
    if found and sum(found[-1]) == first:
        first = found.pop()[0]
    found.append((first, end - first))
