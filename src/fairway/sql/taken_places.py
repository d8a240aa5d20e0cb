"""Rows whose place in their stream is taken: whether they are there themselves, by what the broker says is there.

A row may have travelled with others in one batch, right after their commits (`posting`), and then it is sent by itself,
by a relay, as another batch at a part of the same places. The broker names the batch that it has. If the rows that it
was made of are all in the table, the same batch is made of them again: the same range and the same checksum prove that
they are stored, all of them. Nothing else does.

If some of those rows are gone, they were stored and deleted by somebody who may be about to delete the others: such a
row is looked at once more, a little later. What is not proven then has another stream, under which it is sent with the
ids that it has always had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from fairway import batch
from fairway.errors import StoredRange
from fairway.sql.letters import OutboxRow, together_again
from fairway.sql.posting import OutboxBatch

log = logging.getLogger("fairway.outbox")

RowsAt: TypeAlias = Callable[
    [int, int, int], Sequence[OutboxRow]
]  # by stream, first place and end: those that begin there
SOME: Final = "a batch of several is at its place, and some of their rows are gone"


class TakenRows(NamedTuple):
    """What is to become of the rows."""

    stored: list[str]  # ids of those that are there themselves, in one batch with others
    doubtful: list[tuple[OutboxRow, str]]  # to be looked at once more
    moved: list[tuple[OutboxRow, OutboxBatch]]  # that need another stream


def judge_taken(found: Sequence[tuple[OutboxRow, OutboxBatch]], rows_at: RowsAt) -> TakenRows:
    """What is at the place of each row: a batch that it travelled in, or something else."""
    taken = TakenRows([], [], [])
    for row, parcel in found:
        if row.id in taken.stored or row.stream is None or row.place is None:
            continue
        end = row.place + row.messages
        there = next((each for each in parcel.stored or () if each.first <= row.place and end <= each.end), None)
        company = [] if there is None else rows_at(row.stream, there.first, there.end)
        if there is not None and _range_of(company) == there:
            taken.stored.extend(each.id for each in company)
        elif there is not None and sum(each.messages for each in company) < there.messages and row.error != SOME:
            taken.doubtful.append((row, SOME))
        else:
            taken.moved.append((row, parcel))
    return taken


def _range_of(company: Sequence[OutboxRow]) -> StoredRange | None:
    """Of the batch that these rows make together."""
    made = together_again(company)
    if made is None:
        return None
    header = batch.peek(made)
    return StoredRange(header.first_sequence, header.count, header.crc)


def log_moved(moved: Sequence[tuple[OutboxRow, OutboxBatch]]) -> None:
    """Tell people that places were not free that should have been."""
    if not moved:
        return
    row, parcel = moved[0]
    log.warning(
        "%d batches have another stream now, because something else is at their place, or nobody knows what is (the "
        "first: %016x+%d to %s, %s): was this database, or a broker, restored from a backup?",
        len(moved), row.stream, row.place, row.subject, parcel.sentence,
    )  # fmt: skip
