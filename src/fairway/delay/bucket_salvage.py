"""Salvage of a damaged record of a bucket: each of its messages that the message log still has.

`bucket_repair` puts a record back byte for byte, and needs all of its messages for that. If the message log has only
some of them, the record cannot be checked as a whole any more. So each message must be proven to belong to the record,
at the index that it had there; a message that is not proven counts as lost, because a wrong one would be delivered
twice.

    the record's rows     a catalogue, whose checksum holds, named the messages: proof enough
    a run of sequences    the header, whose checksum holds, has the first one and their number; the body must have the
                          layout of a run
    a list of sequences   the list lies in the damaged body: a message is believed if the body also has its id, at the
                          same index

The salvaged piece has as many messages as the record had, with an empty message in place of each that is missing: the
rows of the others, and what the dispatch log says of indices in the record, stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import batch
from fairway.delay import piece
from fairway.delay.letters import BatchComposer
from fairway.delay.piece import BucketRecord, Sequences
from fairway.delay.sheet import BatchArrays, Numbers
from fairway.errors import Refused
from fairway.names import Subject
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import RecordHeader

_NOBODY = 1  # producer of a batch whose messages have ids of their own, every one


class Claim(NamedTuple):
    """Which messages a damaged record held, as far as that is known."""

    sequences: Sequences  # by index
    is_known: NDArray[np.bool_]  # by index
    ids: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None  # as the body has them; None: no need to compare


class Salvage(NamedTuple):
    """What the message log has of a damaged record."""

    piece: BucketRecord
    is_there: NDArray[np.bool_]  # by index
    messages_from: int  # the lowest position in the message log that a message was read from
    is_awaited: bool  # another copy may bring more of them


def claim_of(header: RecordHeader, body: bytes, subject: Subject) -> Claim | None:
    """What a damaged body itself proves; None: nothing."""
    count = header.count
    layout = piece.layout_in(body, subject, count)
    if layout is None:
        return None
    if not layout.is_listed:
        run = np.arange(header.first_sequence, header.first_sequence + count, dtype=np.uint64)
        return Claim(run, np.ones(count, np.bool_))
    index = piece.index_of(body[layout.batch_at :])
    listed = np.frombuffer(body, "<u8", count, layout.batch_at - 8 * count)
    return Claim(listed, np.ones(count, np.bool_), (index.id_high, index.id_low))


def salvage(messages: MessageLog, header: RecordHeader, subject: Subject, claim: Claim) -> Salvage | None:
    """Collect the messages of a claim; None where the message log has none of them."""
    found = _Collection(header.count)
    subject_id, log = header.subject_id, messages
    known = np.flatnonzero(claim.is_known)
    order = known[np.argsort(claim.sequences[known], kind="stable")]
    ordered, at = claim.sequences[order], 0
    while at < len(ordered):
        sequence = int(ordered[at])
        entry = next(log.views.entries.entries(subject_id, sequence, log.log.end), None)
        if entry is None:
            break
        if entry.first_sequence > sequence:  # the log has let go of it, or its index has lost it
            at = int(np.searchsorted(ordered, np.uint64(entry.first_sequence)))
            continue
        end = max(int(np.searchsorted(ordered, np.uint64(entry.end_sequence))), at + 1)
        try:
            for stored in log.read_entries(subject_id, [entry]):
                found.add(stored, order[at:end], claim)
        except Refused:  # by a master whose copies may have what it has lost
            found.is_awaited = True
        at = end
    if not found.batches:
        return None
    data = found.encode(header.appended_ms)
    return Salvage(
        BucketRecord(subject, subject_id, claim.sequences, data),
        found.owner >= 0,
        found.messages_from,
        found.is_awaited,
    )


@dataclass(slots=True, init=False)
class _Collection:
    """Batches of the message log, and which message of a record is where in them."""

    batches: list[StoredBatch]
    owner: Numbers  # by index in the record: the number of its batch; -1: missing
    places: Numbers  # by index in the record: the index in its batch
    messages_from: int
    is_awaited: bool

    def __init__(self, count: int) -> None:
        self.batches = []
        self.owner = np.full(count, -1, np.int64)
        self.places = np.zeros(count, np.int64)
        self.messages_from = 0
        self.is_awaited = False

    def add(self, stored: StoredBatch, indices: Numbers, claim: Claim) -> None:
        places = (claim.sequences[indices] - np.uint64(stored.entry.first_sequence)).astype(np.int64)
        if claim.ids is not None:
            index, (high, low) = piece.index_of(stored.data), claim.ids
            is_proven = (index.id_high[places] == high[indices]) & (index.id_low[places] == low[indices])
            indices, places = indices[is_proven], places[is_proven]
        if len(indices):
            position = stored.entry.position
            self.messages_from = min(self.messages_from, position) if self.batches else position
            self.owner[indices], self.places[indices] = len(self.batches), places
            self.batches.append(stored)

    def encode(self, created_ms: int) -> bytes:
        """A batch of all messages, an empty one in place of each that is missing."""
        count = len(self.owner)
        sheets = [BatchArrays(each.data) for each in self.batches]
        empty = BatchArrays(batch.encode([b""] * count, producer_id=_NOBODY, first_sequence=0, created_ms=created_ms))
        letters, due_ms = BatchComposer(is_copying=True), np.zeros(count, np.int64)
        for part in np.split(np.arange(count), np.flatnonzero(np.diff(self.owner)) + 1):
            owner, places = int(self.owner[part[0]]), self.places[part]
            if owner < 0:
                letters.take(empty, part)
            else:
                letters.take(sheets[owner], places)
                due_ms[part] = sheets[owner].due_ms[places]
        return letters.encode(_NOBODY, 0, due_ms)
