"""The subject table: the subjects of a message log, with the id and the next sequence of each.

A SUBJECT record writes a subject's name into the log before its first batch, and again behind it. From then on the id
stands for the name. Every new segment restates the whole table, so that any suffix of the log explains itself after
retention: names are known, and a used sequence is never used again.

A REMOVED record, written twice, removes a subject. Until the record is settled the subject is *leaving*: its name is
taken and its messages stay, so that an undo of the record only has to clear the flag. Afterwards the subject is gone:

    its name            is free. A subject of that name gets a new id and starts above every sequence of the old one,
                        because the record raises the sequence floor: (subject, sequence) names one payload for ever
    its id              is never used again
    its records         stay in their segments until retention takes those, and belong to nobody
    a repaired record   of it is ignored. For that, the table keeps the ids of removed subjects with messages until
                        retention has passed the REMOVED record, the newest `REMOVED_SUBJECTS_MAX` of them

No record of a subject follows its REMOVED record. So a replay from any position meets the records of a removed subject
before its removal, and never creates the subject again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from fairway import limits
from fairway.errors import BadName, RemoteProtocolError, invariant
from fairway.names import Subject
from fairway.storage import record
from fairway.storage.segment import STALE, Damage

_HEAD = struct.Struct("<IIQ")  # entries, next id, sequence floor
_ENTRY = struct.Struct("<IIQ")  # id, length of the name (0: the name is lost), next sequence
_REMOVED_HEAD = struct.Struct("<IIQ")  # ids, next id, sequence floor
_REMOVED_ID = struct.Struct("<I")
_SECTION = struct.Struct("<II")  # behind the table: kind, entries; a reader stops at an unknown kind
_UNWRITTEN, _REMOVED = 1, 2  # subjects that start above 0 and have no message; in a checkpoint: removed subjects
_UNWRITTEN_ID = struct.Struct("<I")
_REMOVED_AT = struct.Struct("<IQ")  # id, end of the REMOVED record

_DELETED_MAX = 2_000  # deleted subjects that are remembered, for readers that keep an order of names
_BATCH_BYTES_MIN = 64  # no batch is shorter, which bounds how many batches a lost span may have held


@dataclass(slots=True)
class SubjectState:
    """One subject of this log."""

    id: int
    name: Subject
    next_sequence: int
    born_at: int  # position of the record that introduced it
    ceiling: int = 0  # durability `memory`: the log says, synced, that sequences below it may be in use
    nameless: bool = False  # the record with its name is rotten; a segment begun before the rot may restate it
    start: int = 0  # the next sequence of a subject without any message; 0 if unknown
    removed_end: int | None = None  # end of the record that removes the subject; None: no record does
    is_deduped: bool = field(init=False)  # others than the broker send to it, and their repeats are stored once
    is_shut: bool = field(init=False)  # nobody may send to it: it is nameless, or leaving

    @property
    def is_unwritten(self) -> bool:
        """Whether no message was ever stored in it, as far as the log tells."""
        return self.next_sequence == self.start and not self.ceiling

    def __post_init__(self) -> None:
        self.is_deduped = not self.name.is_internal or self.name.is_inbox
        self.is_shut = self.nameless or self.removed_end is not None


class SubjectTable:
    """Subjects by name and by id. A view: rebuilt from the log's SUBJECT, DATA and REMOVED records."""

    def __init__(self) -> None:
        self._by_name: dict[str, SubjectState] = {}
        self._by_id: dict[int, SubjectState] = {}
        self._next_id = 1  # 0 means "no subject" in a record
        self._sequence_floor = 0  # where new subjects start: above 0 after a removal, or a lost record
        self._nameless: dict[int, SubjectState] = {}
        self._leaving: dict[int, SubjectState] = {}
        self._removed: dict[int, int] = {}  # by id: end of the record that removed it; oldest first
        self._of_owner: dict[str, dict[int, None]] = {}  # by the name of a subject: ids of its dead letters and inboxes
        self.deletions = 0  # subjects deleted by removal or by a cut
        self._last_deleted: deque[SubjectState] = deque(maxlen=_DELETED_MAX)
        self.inserted = 0  # subjects added or named below the highest id, as a repair does

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, subject_id: object) -> bool:
        return subject_id in self._by_id

    def __iter__(self) -> Iterator[SubjectState]:
        return iter(self._by_id.values())

    def find(self, name: Subject) -> SubjectState | None:
        return self._by_name.get(name)

    @property
    def next_id(self) -> int:
        return self._next_id

    def by_id(self, subject_id: int) -> SubjectState:
        return self._by_id[subject_id]

    def introduce(self, name: Subject, born_at: int) -> SubjectState:
        """Number a new subject. A lost name may be this one, so the subject starts above all nameless ones."""
        invariant(name not in self._by_name, "a subject is introduced once")
        lost = max((each.next_sequence for each in self._nameless.values()), default=0)  # only rot makes nameless ones
        start = max(self._sequence_floor, lost)
        return self._add(SubjectState(self._next_id, name, start, born_at, start=start))

    def _add_nameless(self, subject_id: int, next_sequence: int, born_at: int) -> SubjectState:
        """Add a subject whose name is lost to rot: its messages stay readable under a name that says so."""
        return self._add(SubjectState(subject_id, self._free_name(subject_id), next_sequence, born_at, nameless=True))

    def _free_name(self, subject_id: int) -> Subject:
        """A free name for a nameless subject. Early versions let users have subjects of such a name."""
        spare, name = 0, Subject.nameless(subject_id)
        while name in self._by_name:
            spare += 1
            name = Subject.nameless(subject_id, spare)
        return name

    def _add(self, state: SubjectState) -> SubjectState:
        """Add a subject. A real name displaces a nameless subject of that name, which gets another."""
        holder = self._by_name.get(state.name)
        self._by_name[state.name] = self._by_id[state.id] = state
        if state.nameless:
            self._nameless[state.id] = state
        else:
            self._nameless.pop(state.id, None)
        if state.name.is_internal:
            self._of_owner.setdefault(state.name.owner, {})[state.id] = None
        if holder is not None and holder.nameless and holder.id != state.id:
            holder.name = self._free_name(holder.id)
            self._by_name[holder.name] = holder
        if state.id < self._next_id or holder is not None:
            self.inserted += 1
        self._next_id = max(self._next_id, state.id + 1)
        return state

    def _forget(self, state: SubjectState) -> None:
        del self._by_id[state.id]
        if self._by_name.get(state.name) is state:
            del self._by_name[state.name]
        self._nameless.pop(state.id, None)
        self._leaving.pop(state.id, None)
        owner = state.name.owner if state.name.is_internal else ""
        if (owned := self._of_owner.get(owner)) is not None:
            owned.pop(state.id, None)
            if not owned:
                del self._of_owner[owner]
        self.deletions += 1
        self._last_deleted.append(state)

    def last_deleted(self, number: int) -> list[SubjectState] | None:
        """The last so many deleted subjects; None: they are no longer known."""
        if number > len(self._last_deleted):
            return None
        return [*islice(self._last_deleted, len(self._last_deleted) - number, None)]

    def take_back(self, state: SubjectState) -> None:
        """Undo `introduce`: the record with the subject's name was not written."""
        self._forget(state)

    def owned_by(self, name: Subject) -> list[SubjectState]:
        """The dead letters and inboxes of groups on this subject, and of groups on those dead letters."""
        return [self._by_id[each] for each in self._of_owner.get(name, ())]

    # --- removal -----------------------------------------------------------------------------------------------------

    def pack_removal(self, states: Collection[SubjectState]) -> bytes:
        """The body of the REMOVED record for these subjects."""
        floor = max(self._sequence_floor, *(max(each.next_sequence, each.ceiling) for each in states))
        ids = b"".join(_REMOVED_ID.pack(each.id) for each in states)
        return record.padded(_REMOVED_HEAD.pack(len(states), self._next_id, floor) + ids)

    def take_removal(self, body: bytes, end: int) -> None:
        """Apply a REMOVED record that ends at `end`. Its subjects are leaving until `settle`."""
        ids, next_id, floor = unpack_removal(body)
        self._next_id = max(self._next_id, next_id)
        self._sequence_floor = max(self._sequence_floor, floor)
        for subject_id in ids:
            state = self._by_id.get(subject_id)
            if state is not None and state.removed_end is None:
                self._leave(state, end)
            elif state is None:
                self._note_removed(subject_id, end)  # its own records are rotten, and may be repaired

    def _leave(self, state: SubjectState, end: int) -> None:
        state.removed_end, state.is_shut = end, True
        self._sequence_floor = max(self._sequence_floor, state.next_sequence)
        self._leaving[state.id] = state

    def settle(self, settled_end: int) -> list[SubjectState]:
        """Forget the subjects whose removal can no longer be undone; return them."""
        if not self._leaving:
            return []
        gone = [each for each in self._leaving.values() if (each.removed_end or 0) <= settled_end]
        for state in gone:
            self._forget(state)
            if state.next_sequence:  # otherwise a repair can only restore its name, and an empty subject expires
                self._note_removed(state.id, state.removed_end or 0)
        return gone

    def _note_removed(self, subject_id: int, end: int) -> None:
        self._removed[subject_id] = end
        while len(self._removed) > limits.REMOVED_SUBJECTS_MAX:
            del self._removed[next(iter(self._removed))]

    def is_removed(self, subject_id: int) -> bool:
        """Whether the subject was removed, as long as its records may still be in the log."""
        return subject_id in self._removed

    def forget_removed(self, first_base: int) -> None:
        """Retention has deleted everything below: no record is left of subjects that were removed there."""
        while self._removed and (oldest := next(iter(self._removed.items())))[1] <= first_base:
            del self._removed[oldest[0]]

    def pack_picture(self, upto: int, rewound: Mapping[int, int]) -> bytes:
        """The body for the checkpoint: the table as `pack` makes it, followed by the removed subjects. Older versions
        read the table alone."""
        return self.pack(upto, rewound) + _section(_REMOVED, _REMOVED_AT, self._removed.items())

    # --- a view of the log -------------------------------------------------------------------------------------------

    def restate(self, body: bytes, position: int) -> None:
        """Apply a SUBJECT record: add what is new; a known subject only moves forward."""
        end = _HEAD.size
        for subject_id, name, next_sequence in unpack(body):
            end += _ENTRY.size + (0 if name is None else len(name))
            known = self._by_id.get(subject_id)
            if known is None and subject_id in self._removed:
                continue  # a repaired record from before the removal
            if known is None:
                known = (
                    self._add_nameless(subject_id, next_sequence, position)
                    if name is None
                    else self._add(SubjectState(subject_id, name, next_sequence, position))
                )
            elif known.nameless and name is not None:
                del self._by_name[known.name]
                removed_end = known.removed_end
                known = self._add(SubjectState(subject_id, name, known.next_sequence, known.born_at))
                if removed_end is not None:
                    self._leave(known, removed_end)
            known.next_sequence = max(known.next_sequence, next_sequence)
        _, next_id, sequence_floor = _HEAD.unpack_from(body, 0)
        self._next_id = max(self._next_id, next_id)
        self._sequence_floor = max(self._sequence_floor, sequence_floor)
        self._read_sections(body, end + -end % record.ALIGNMENT)

    def _read_sections(self, body: bytes, at: int) -> None:
        while at + _SECTION.size <= len(body):
            kind, count = _SECTION.unpack_from(body, at)
            entry = {_UNWRITTEN: _UNWRITTEN_ID, _REMOVED: _REMOVED_AT}.get(kind)
            if entry is None:
                return  # padding, or a section of a later version
            at += _SECTION.size
            data = body[at : at + count * entry.size]
            if len(data) != count * entry.size:
                raise RemoteProtocolError("what follows the subject table is cut short")
            at += len(data) + -len(data) % record.ALIGNMENT
            if kind == _REMOVED:
                self._removed.update(entry.iter_unpack(data))
                continue
            for (subject_id,) in entry.iter_unpack(data):
                state = self._by_id.get(subject_id)
                if state is not None and not state.start:
                    state.start = state.next_sequence

    def advance(self, subject_id: int, next_sequence: int) -> SubjectState:
        state = self._by_id.get(subject_id)
        if state is None:
            state = self._add_nameless(subject_id, 0, born_at=0)
        state.next_sequence = max(state.next_sequence, next_sequence)
        return state

    def skip_lost(self, damage: Damage) -> None:
        """Never reuse a sequence that a lost record may have had: a sequence names one payload for ever."""
        if damage.header is not None and damage.why != STALE:  # a stale header is not the lost record's
            if damage.header.subject_id and damage.header.subject_id not in self._removed:
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
        """Undo subjects and removals that were written at or after `position`."""
        for state in [each for each in self if each.born_at >= position]:
            self._forget(state)
        for state in [each for each in self._leaving.values() if (each.removed_end or 0) > position]:
            state.removed_end, state.is_shut = None, state.nameless
            del self._leaving[state.id]
            self._by_name.setdefault(state.name, state)
        self.lower_ceilings()  # the undo may have taken the records that stated them

    def lower_ceilings(self) -> None:
        """Forget all ceilings: no sequence is in use that the log does not show."""
        for state in self:
            state.ceiling = 0

    def pack(self, upto: int | None = None, rewound: Mapping[int, int] = MappingProxyType({})) -> bytes:
        """The table as the body of a SUBJECT record: all of it, or as it was at position `upto`.

        `rewound`: the next sequence at that position, for each subject that has moved on since.
        """
        if upto is None:  # a new segment does not restate subjects that are leaving
            return self._pack([each for each in self if each.removed_end is None])
        known = [each for each in self if each.born_at < upto and (each.removed_end is None or each.removed_end > upto)]
        return self._pack(known, rewound)

    def pack_one(self, state: SubjectState) -> bytes:
        """The body of the SUBJECT record that introduces a subject."""
        return self._pack([state])

    def _pack(self, states: Collection[SubjectState], rewound: Mapping[int, int] = MappingProxyType({})) -> bytes:
        parts = [_HEAD.pack(len(states), self._next_id, self._sequence_floor)]
        unwritten: list[tuple[int]] = []
        for state in states:
            name = b"" if state.nameless else state.name.encode()
            next_sequence = rewound.get(state.id, state.next_sequence)
            parts += (_ENTRY.pack(state.id, len(name), max(next_sequence, state.ceiling)), name)
            if state.start and max(next_sequence, state.ceiling) == state.start:
                unwritten.append((state.id,))
        return record.padded(b"".join(parts)) + _section(_UNWRITTEN, _UNWRITTEN_ID, unwritten)


def unpack(body: bytes) -> Iterator[tuple[int, Subject | None, int]]:
    """(id, name, next sequence) of each subject in a SUBJECT record's body; the name is None where it is lost."""
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


def unpack_head(body: bytes) -> tuple[int, int]:
    """(next id, sequence floor) of a SUBJECT record's body, which `unpack` has read before."""
    _, next_id, floor = _HEAD.unpack_from(body, 0)
    return next_id, floor


def _section(kind: int, entry: struct.Struct, entries: Collection[tuple[int, ...]]) -> bytes:
    """An optional section behind the table; older versions read the table alone."""
    if not entries:
        return b""
    return record.padded(_SECTION.pack(kind, len(entries)) + b"".join(entry.pack(*each) for each in entries))


def unpack_removal(body: bytes) -> tuple[list[int], int, int]:
    """(ids, next id, sequence floor) of a REMOVED record's body."""
    if len(body) < _REMOVED_HEAD.size:
        raise RemoteProtocolError("the removal of subjects is cut short")
    count, next_id, floor = _REMOVED_HEAD.unpack_from(body)
    if len(body) < _REMOVED_HEAD.size + count * _REMOVED_ID.size:
        raise RemoteProtocolError("the removal of subjects is cut short")
    at = _REMOVED_HEAD.size
    return [_REMOVED_ID.unpack_from(body, at + n * _REMOVED_ID.size)[0] for n in range(count)], next_id, floor
