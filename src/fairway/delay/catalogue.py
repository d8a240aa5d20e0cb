"""The catalogue: what there is to know of a bucket's pieces without reading them, as a record of the bucket itself.

A start needs names, ids, key hashes and due times of all messages, and none of their contents. So every few thousand
messages a bucket gets a CATALOGUE record over the pieces since the one before it, and the manifest says where the
newest one lies: a start reads these, one after the other back to the first, and only the pieces behind the newest.

A catalogue says nothing that the pieces do not say: one that is damaged only makes a start read them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import BucketIndex, Sequences
from fairway.errors import BadName, RemoteProtocolError
from fairway.names import Subject
from fairway.storage.record import padded

_FIXED = struct.Struct("<IIIIQQ")  # pieces, subjects, messages, zero, where the one before it lies (0: none), start
_NAME = struct.Struct("<IHxx")  # subject id, length of its name
_PIECE = np.dtype([("position", "<u8"), ("subject_id", "<u4"), ("count", "<u4")])
_COLUMNS = 5


class Catalogue(NamedTuple):
    """All pieces from `start` on, up to where the record lies."""

    previous_at: int
    start: int
    names: dict[int, Subject]
    positions: NDArray[np.uint64]  # of the pieces
    subject_ids: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    sequences: Sequences  # of the messages, piece after piece
    columns: BucketIndex


@dataclass(slots=True)
class Draft:
    """The pieces that are in no catalogue yet."""

    messages: int = 0
    _names: dict[int, Subject] = field(default_factory=dict)
    _pieces: list[tuple[int, int, int]] = field(default_factory=list)
    _columns: list[NDArray[np.uint64]] = field(default_factory=list)

    def add(self, position: int, subject: Subject, subject_id: int, sequences: Sequences, index: BucketIndex) -> None:
        self.messages += len(sequences)
        self._names[subject_id] = subject
        self._pieces.append((position, subject_id, len(sequences)))
        self._columns.append(
            np.stack((sequences, index.due_ms.view(np.uint64), index.key, index.id_high, index.id_low))
        )

    def cut(self, position: int) -> None:
        """Forget the pieces from there on: a full disk undid them."""
        kept = [number for number, each in enumerate(self._pieces) if each[0] < position]
        self._pieces = [self._pieces[number] for number in kept]
        self._columns = [self._columns[number] for number in kept]
        self.messages = sum(each[2] for each in self._pieces)

    def pack(self, previous_at: int, start: int) -> bytes:
        """The body of a CATALOGUE record."""
        order = sorted(range(len(self._pieces)), key=lambda number: self._pieces[number][0])
        pieces = np.array([self._pieces[number] for number in order], _PIECE)
        names = [padded(_NAME.pack(number, len(name.encode())) + name.encode()) for number, name in self._names.items()]
        columns = np.concatenate([self._columns[number] for number in order], axis=1)
        head = _FIXED.pack(len(pieces), len(names), self.messages, 0, previous_at, start)
        return b"".join([head, *names, pieces.tobytes(), columns.tobytes()])


def unpack(body: bytes) -> Catalogue:
    """`RemoteProtocolError` where it breaks its format although its checksums hold."""
    try:
        pieces, subjects, messages, _, previous_at, start = _FIXED.unpack_from(body)
        at, names = _FIXED.size, dict[int, Subject]()
        for _ in range(subjects):
            number, length = _NAME.unpack_from(body, at)
            names[number] = Subject.parse_any(body[at + _NAME.size : at + _NAME.size + length].decode())
            at += _NAME.size + length + -(_NAME.size + length) % 8
        table = np.frombuffer(body, _PIECE, pieces, at)
        columns = np.frombuffer(body, "<u8", messages * _COLUMNS, at + table.nbytes).reshape(_COLUMNS, messages)
    except (struct.error, ValueError, BadName) as error:
        raise RemoteProtocolError(f"a catalogue cannot be read: {error}") from error
    if int(table["count"].sum()) != messages:
        raise RemoteProtocolError("a catalogue whose pieces have more or fewer messages than it says")
    index = BucketIndex(columns[1].view(np.int64), columns[2], columns[3], columns[4])
    return Catalogue(
        previous_at, start, names, table["position"], table["subject_id"], table["count"], columns[0], index
    )
