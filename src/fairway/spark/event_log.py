"""The action log of a broker as a reader sees it: bytes from afar, put together to records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

from fairway.errors import Code, FairwayError, Refused
from fairway.limits import NAMES_MAX, RETRACE_BYTES_MAX
from fairway.protocol import tracing
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Named, NumberedConsumer, Retrace, Retraced
from fairway.spark.calling import Caller, Ticket
from fairway.spark.event_frames import Ids
from fairway.spark.event_names import Names
from fairway.spark.reading import DataLoss, cut_short, other_log
from fairway.storage import record
from fairway.storage.record import BadRecord, Kind, Record
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES

IdT = TypeVar("IdT")

WHAT: Final = "actions"
_ACCEPT: Final = 'or accept the loss with option("failOnDataLoss", "false")'
_WITH_NAMES: Final = frozenset({int(Kind.ACTIONS), int(Kind.NAMES)})


class Trail:
    """Reads the action log in order. Strict: what is missing or damaged is an error, else it is passed over."""

    def __init__(self, caller: Caller, log_id: int | None, *, is_strict: bool) -> None:
        self._caller = caller
        self._log_id = log_id
        self._is_strict = is_strict

    def look(self, whence: Whence, value: int = 0) -> Retraced:
        """Where things are."""
        return self._take(self._caller.put(Retrace(whence, value, 0, self._log_id)))

    def ask(self, position: int) -> Ticket:
        return self._caller.put(Retrace(Whence.SEQUENCE, position, RETRACE_BYTES_MAX, self._log_id))

    def _take(self, ticket: Ticket) -> Retraced:
        try:
            return self._caller.take(ticket, Retraced)[0]
        except Refused as refused:
            if refused.code is Code.FENCED:
                raise other_log(WHAT, self._caller.where) from refused
            raise FairwayError(f"the broker at {self._caller.where} will not show its actions: {refused}") from refused

    def records(self, begin: int, end: int) -> Iterator[Record]:
        """The records from `begin` up to `end`; both are where a record or a segment begins."""
        piecing: _Piecing | None = None
        at = begin
        ticket: Ticket | None = self.ask(at) if begin < end else None
        while ticket is not None:
            found = self._take(ticket)
            if self._is_strict and found.committed_end < end:
                raise cut_short(WHAT, found.committed_end, end)
            if piecing is None or found.position != at:
                self._check_jump(piecing, at, found)
                piecing = _Piecing(found.log_id, found.position, is_strict=self._is_strict)
            is_stuck = found.position == at and not found.data
            at = found.position + len(found.data)
            ticket = None if is_stuck or at >= min(end, found.committed_end) else self.ask(at)
            for each in piecing.add(found.data):
                if each.header.position >= end:
                    return
                yield each
        if piecing is not None and piecing.rest_at < min(at, end):
            self._lose(piecing.rest_at, "cut short")

    def boundary(self, position: int, end: int) -> int:
        """The first place from `position` on where a record begins; `end` if there is none before it."""
        at = position
        data, start = b"", position
        while at < end:
            found = self._take(self.ask(at))
            if found.position != at:
                return min(found.position, end)  # a segment begins
            if not found.data:
                break
            data += found.data
            offset = record.find_header(data, 0, start, found.log_id)
            if offset is not None:
                return min(start + offset, end)
            at = found.position + len(found.data)
            keep = min(len(data), record.HEADER_BYTES)
            data, start = data[len(data) - keep :], at - keep
        return end

    def position_at(self, time_ms: int) -> int:
        """Where the first record lies that was written at that time or later."""
        found = self.look(Whence.TIME, time_ms)
        for each in self.records(found.segment_base, found.segment_end):
            if each.header.appended_ms >= time_ms:
                return each.header.position
        return found.segment_end

    def _check_jump(self, piecing: _Piecing | None, asked: int, found: Retraced) -> None:
        if piecing is not None and piecing.rest_at < asked:
            self._lose(piecing.rest_at, "cut short")
        if found.position > asked and found.position - asked != SEGMENT_HEADER_BYTES:
            self._lose(asked, "missing")

    def _lose(self, position: int, why: str) -> None:
        if self._is_strict:
            raise damaged(position, why)


class _Piecing:
    """Puts records together from bytes that follow one another."""

    def __init__(self, log_id: int, position: int, *, is_strict: bool) -> None:
        self._log_id = log_id
        self._is_strict = is_strict
        self._data = b""
        self.rest_at = position  # of what has not made a record yet

    def add(self, data: bytes) -> Iterator[Record]:
        self._data = data if not self._data else self._data + data
        at = 0
        while len(self._data) - at >= record.HEADER_BYTES:
            try:
                header = record.parse_header(self._data, at, self.rest_at + at, self._log_id)
                body_at = at + record.HEADER_BYTES
                if len(self._data) - body_at < header.body_bytes:
                    break
                body = self._data[body_at : body_at + header.body_bytes]
                record.check_body(header, body)
            except BadRecord as bad:
                at = self._step_over(at, bad)
            else:
                yield Record(header, body)
                at = body_at + header.body_bytes
        self._data = self._data[at:]
        self.rest_at += at

    def _step_over(self, at: int, bad: BadRecord) -> int:
        if self._is_strict:
            raise damaged(self.rest_at + at, bad.why)
        found = record.find_header(self._data, at + record.ALIGNMENT, self.rest_at, self._log_id)
        if found is not None:
            return found
        end = len(self._data) - record.HEADER_BYTES + record.ALIGNMENT  # behind it a header may have begun
        return max(at + record.ALIGNMENT, end)


class Resolver:
    """Finds names: on the way, from the broker, or in the log before the place where a task begins."""

    def __init__(self, caller: Caller, trail: Trail, names: Names, begin: int) -> None:
        self._caller = caller
        self._trail = trail
        self._names = names
        self._searched_from = begin
        self._is_done = False  # nothing further back can be of use
        self._is_first = True

    def meet(self, found: Record) -> None:
        """A record on the way."""
        if found.header.kind in _WITH_NAMES:
            self._names.learn(found)
        if self._is_first:
            self._is_done = found.header.kind == Kind.NAMES
            self._is_first = False

    def resolve(self, ids: Ids) -> None:
        names = self._names
        self._ask([each for each in sorted(ids.subjects) if each not in names.subjects], [], [])
        self._ask([], *self._missing(ids))
        while not self._is_done and any(self._missing(ids)):
            self._search_back()

    def _missing(self, ids: Ids) -> tuple[list[int], list[tuple[int, int]]]:
        names = self._names
        return (
            [each for each in sorted(ids.groups) if each not in names.groups],
            [each for each in sorted(ids.consumers) if each not in names.consumers],
        )

    def _ask(self, subjects: list[int], groups: list[int], consumers: list[tuple[int, int]]) -> None:
        for at in range(0, max(len(subjects), len(groups), len(consumers)), NAMES_MAX // 2):
            page = slice(at, at + NAMES_MAX // 2)
            pairs = consumers[page]
            asked = tracing.Names(subjects[page], groups[page], [NumberedConsumer(*each) for each in pairs])
            named = self._caller.ask(asked, Named)
            self._names.subjects |= _known(subjects[page], named.subjects)
            self._names.groups |= _known(groups[page], named.groups)
            self._names.consumers |= _known(pairs, named.consumers)

    def _search_back(self) -> None:
        """Learn the names in the segment before what is known, or in what is left of it."""
        if not self._searched_from:
            self._is_done = True
            return
        end = self._searched_from
        found = self._trail.look(Whence.SEQUENCE, end - 1)
        if found.segment_base >= end:
            self._is_done = True  # the segment before is gone
            return
        for each in self._trail.records(found.segment_base, end):
            if each.header.kind in _WITH_NAMES:
                self._names.learn(each)
            self._is_done |= each.header.kind == Kind.NAMES
        self._searched_from = found.segment_base


def damaged(position: int, why: str) -> DataLoss:
    return DataLoss(
        f"the action log is damaged at position {position} ({why}): `fairway verify` shows how much is. Begin later "
        f"(option starting), {_ACCEPT}"
    )


def _known(ids: list[IdT], names: list[str]) -> dict[IdT, str]:
    return {each: name for each, name in zip(ids, names, strict=True) if name}
