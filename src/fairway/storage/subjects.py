"""The subjects of a message log: names, numbers, and the next sequence of each.

A subject's name is written into the log in a SUBJECT record before its first batch, and once more behind it; from then
on its number stands for it. Every new segment restates the whole table, so that any suffix of the log explains itself
after retention has deleted the rest: names are known, and a sequence once used is never used again.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fairway import limits
from fairway.errors import BadName, RemoteProtocolError, invariant
from fairway.names import Subject
from fairway.storage import record
from fairway.storage.scan import STALE, Damage

_HEAD = struct.Struct("<IIQ")  # entries, next id, sequence floor
_ENTRY = struct.Struct("<IIQ")  # id, length of the name (0: it is lost), next sequence

_BATCH_BYTES_MIN = 64  # no batch is shorter, which bounds how many a lost span may have held


@dataclass(slots=True)
class SubjectState:
    """One subject of this log."""

    id: int
    name: Subject
    next_sequence: int
    born_at: int  # position of the record that introduced it
    ceiling: int = 0  # durability `memory`: the log says, synced, that sequences below it may be in use
    nameless: bool = False  # that record is rotten; a segment that was begun before the rot may restate the name
    is_deduped: bool = field(init=False)  # not the broker alone sends to it: what others repeat is stored once

    def __post_init__(self) -> None:
        self.is_deduped = not self.name.is_internal or self.name.is_inbox


class SubjectTable:
    """Names to numbers and back. A view: rebuilt from SUBJECT and DATA records."""

    def __init__(self) -> None:
        self._by_name: dict[str, SubjectState] = {}
        self._by_id: dict[int, SubjectState] = {}
        self._next_id = 1  # 0 means "no subject" in a record
        self._sequence_floor = 0  # where a new subject starts: above 0 once a lost record may have held messages of it

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, subject_id: int) -> bool:
        return subject_id in self._by_id

    def __iter__(self) -> Iterator[SubjectState]:
        return iter(self._by_id.values())

    def find(self, name: Subject) -> SubjectState | None:
        return self._by_name.get(name)

    def by_id(self, subject_id: int) -> SubjectState:
        return self._by_id[subject_id]

    def introduce(self, name: Subject, born_at: int) -> SubjectState:
        """Number a new subject. If a name was lost, this may be the one: it starts above what that one had."""
        invariant(name not in self._by_name, "a subject is introduced once")
        lost = max((each.next_sequence for each in self if each.nameless), default=0)
        return self._add(SubjectState(self._next_id, name, max(self._sequence_floor, lost), born_at))

    def _add_stated(self, subject_id: int, name: Subject | None, next_sequence: int, born_at: int) -> SubjectState:
        if name is None:
            return self._add_nameless(subject_id, next_sequence, born_at)
        return self._add(SubjectState(subject_id, name, next_sequence, born_at))

    def _add_nameless(self, subject_id: int, next_sequence: int, born_at: int) -> SubjectState:
        """The record that named it is rotten: keep its messages under a name that says so."""
        return self._add(SubjectState(subject_id, self._free_name(subject_id), next_sequence, born_at, nameless=True))

    def _free_name(self, subject_id: int) -> Subject:
        """Early versions let users have subjects of such a name."""
        spare, name = 0, Subject.nameless(subject_id)
        while name in self._by_name:
            spare += 1
            name = Subject.nameless(subject_id, spare)
        return name

    def _add(self, state: SubjectState) -> SubjectState:
        """Whoever has really been given a name has it, and a nameless subject gets another."""
        holder = self._by_name.get(state.name)
        self._by_name[state.name] = self._by_id[state.id] = state
        if holder is not None and holder.nameless and holder.id != state.id:
            holder.name = self._free_name(holder.id)
            self._by_name[holder.name] = holder
        self._next_id = max(self._next_id, state.id + 1)
        return state

    def restate(self, body: bytes, position: int) -> None:
        """Take in a SUBJECT record: what is new is added, what is known may only move forward."""
        for subject_id, name, next_sequence in unpack(body):
            known = self._by_id.get(subject_id)
            if known is None:
                known = self._add_stated(subject_id, name, next_sequence, position)
            elif known.nameless and name is not None:
                del self._by_name[known.name]
                known = self._add(SubjectState(subject_id, name, known.next_sequence, known.born_at))
            known.next_sequence = max(known.next_sequence, next_sequence)
        _, next_id, sequence_floor = _HEAD.unpack_from(body, 0)
        self._next_id = max(self._next_id, next_id)
        self._sequence_floor = max(self._sequence_floor, sequence_floor)

    def advance(self, subject_id: int, next_sequence: int) -> SubjectState:
        state = self._by_id.get(subject_id)
        if state is None:
            state = self._add_nameless(subject_id, 0, born_at=0)
        state.next_sequence = max(state.next_sequence, next_sequence)
        return state

    def skip_lost(self, damage: Damage) -> None:
        """Never reuse a sequence that a lost record may have had: a sequence names one payload for ever."""
        if damage.header is not None and damage.why != STALE:  # a stale header is not that of the lost record
            if damage.header.subject_id:
                self.advance(damage.header.subject_id, damage.header.first_sequence + damage.header.count)
            return
        records_max = (damage.end - damage.start) // (record.HEADER_BYTES + _BATCH_BYTES_MIN) + 1
        messages_max = records_max * limits.BATCH_MESSAGES_MAX
        for state in self:
            state.next_sequence += messages_max
        self._sequence_floor += messages_max
        self._next_id += records_max

    def rewind(self, subject_id: int, next_sequence: int) -> None:
        """Undo: the sequences from `next_sequence` on were never committed."""
        self._by_id[subject_id].next_sequence = next_sequence

    def cut(self, position: int) -> None:
        """Forget subjects that were introduced at or after `position`."""
        for state in [each for each in self if each.born_at >= position]:
            del self._by_id[state.id]
            del self._by_name[state.name]
        self.lower_ceilings()  # the records that stated them may be among what is undone

    def lower_ceilings(self) -> None:
        """No sequence is in use that the log does not show."""
        for state in self:
            state.ceiling = 0

    def pack(self, upto: int | None = None, rewound: Mapping[int, int] = MappingProxyType({})) -> bytes:
        """The table as the body of a SUBJECT record: all of it, or what was known at position `upto`.

        `rewound` has the next sequence, at that position, of each subject that has moved on since.
        """
        known = [each for each in self if upto is None or each.born_at < upto]
        return self._pack([replace(each, next_sequence=rewound.get(each.id, each.next_sequence)) for each in known])

    def pack_one(self, state: SubjectState) -> bytes:
        """The body of the SUBJECT record that introduces a subject."""
        return self._pack([state])

    def _pack(self, states: Collection[SubjectState]) -> bytes:
        parts = [_HEAD.pack(len(states), self._next_id, self._sequence_floor)]
        for state in states:
            name = b"" if state.nameless else state.name.encode()
            parts += (_ENTRY.pack(state.id, len(name), max(state.next_sequence, state.ceiling)), name)
        return record.padded(b"".join(parts))


def unpack(body: bytes) -> Iterator[tuple[int, Subject | None, int]]:
    """(id, name, next sequence) of each subject in a SUBJECT record's body; None for a name that is lost."""
    try:
        count, _, _ = _HEAD.unpack_from(body, 0)
        at = _HEAD.size
        for _ in range(count):
            subject_id, length, next_sequence = _ENTRY.unpack_from(body, at)
            at += _ENTRY.size
            if at + length > len(body):
                raise RemoteProtocolError("the subject table is cut short")
            name = Subject.parse_any(body[at : at + length].decode()) if length else None
            yield subject_id, name, next_sequence
            at += length
    except (struct.error, UnicodeDecodeError, BadName) as error:
        raise RemoteProtocolError(f"the subject table cannot be read: {error}") from error
