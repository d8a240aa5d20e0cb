"""The action log of a broker as a reader sees it: bytes from afar, put together to records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fairway.errors import Code, FairwayError, Refused
from fairway.limits import RETRACE_BYTES_MAX
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Retrace, Retraced
from fairway.storage import record
from fairway.storage.record import BadRecord, Record
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES

Answer = Callable[[], Retraced]  # waits for it
Ask = Callable[[Retrace], Answer]  # does not wait: so one answer is under way while another is looked at


class ActionLogReader:
    """Reads the action log in order. Strict: what is missing or damaged is an error, else it is passed over."""

    def __init__(self, ask: Ask, log_id: int | None, *, is_strict: bool) -> None:
        self._ask = ask
        self._log_id = log_id
        self._is_strict = is_strict

    # --- what goes wrong, in the words of whoever reads ---------------------------------------------------------------

    def other_log(self) -> FairwayError:
        return FairwayError("the action log is another one than this reading began with: the broker has new data")

    def refused(self, refused: Refused) -> FairwayError:
        return FairwayError(f"the broker will not show its actions: {refused}")

    def cut_short(self, at: int, end: int) -> FairwayError:
        return FairwayError(f"the action log ends at {at}, and it was seen to reach to {end} before")

    def damaged(self, position: int, why: str) -> FairwayError:
        return FairwayError(f"the action log is damaged at position {position} ({why}): `fairway verify` shows more")

    # --- places -------------------------------------------------------------------------------------------------------

    def look(self, whence: Whence, value: int = 0) -> Retraced:
        """Where things are."""
        return self._take(self._ask(Retrace(whence, value, 0, self._log_id)))

    def told_from_ms(self) -> int:
        """Since when the log tells what happens; 0: from the beginning."""
        log = self.look(Whence.EARLIEST)
        if log.first_position <= SEGMENT_HEADER_BYTES:  # of the first segment
            return 0
        first = next(self.records(log.first_position, log.committed_end), None)
        return 0 if first is None else first.header.appended_ms

    def position_at(self, time_ms: int) -> int:
        """Where the first record lies that was written at that time or later."""
        found = self.look(Whence.TIME, time_ms)
        for each in self.records(found.segment_base, found.segment_end):
            if each.header.appended_ms >= time_ms:
                return each.header.position
        return found.segment_end

    def boundary(self, position: int, end: int) -> int:
        """The first place from `position` on where a record begins; `end` if there is none before it."""
        at = position
        data, start = b"", position
        while at < end:
            found = self._take(self._page(at))
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

    # --- records ------------------------------------------------------------------------------------------------------

    def records(self, begin: int, end: int) -> Iterator[Record]:
        """The records from `begin` up to `end`; both are where a record or a segment begins."""
        piecing: _Piecing | None = None
        at = begin
        answer: Answer | None = self._page(at) if begin < end else None
        while answer is not None:
            found = self._take(answer)
            if self._is_strict and found.committed_end < end:
                raise self.cut_short(found.committed_end, end)
            if piecing is None or found.position != at:
                self._check_jump(piecing, at, found)
                piecing = _Piecing(found.log_id, found.position, self._lose)
            is_stuck = found.position == at and not found.data
            at = found.position + len(found.data)
            answer = None if is_stuck or at >= min(end, found.committed_end) else self._page(at)
            for each in piecing.add(found.data):
                if each.header.position >= end:
                    return
                yield each
        if piecing is not None and piecing.rest_at < min(at, end):
            self._lose(piecing.rest_at, "cut short")

    def _page(self, position: int) -> Answer:
        return self._ask(Retrace(Whence.SEQUENCE, position, RETRACE_BYTES_MAX, self._log_id))

    def _take(self, answer: Answer) -> Retraced:
        try:
            return answer()
        except Refused as refused:
            raise (self.other_log() if refused.code is Code.FENCED else self.refused(refused)) from refused

    def _check_jump(self, piecing: _Piecing | None, asked: int, found: Retraced) -> None:
        if piecing is not None and piecing.rest_at < asked:
            self._lose(piecing.rest_at, "cut short")
        if found.position > asked and found.position - asked != SEGMENT_HEADER_BYTES:
            self._lose(asked, "missing")

    def _lose(self, position: int, why: str) -> None:
        if self._is_strict:
            raise self.damaged(position, why)


class _Piecing:
    """Puts records together from bytes that follow one another."""

    def __init__(self, log_id: int, position: int, lose: Callable[[int, str], None]) -> None:
        self._log_id = log_id
        self._lose = lose  # is told of what is damaged; raises, unless that is to be passed over
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
        self._lose(self.rest_at + at, bad.why)
        found = record.find_header(self._data, at + record.ALIGNMENT, self.rest_at, self._log_id)
        if found is not None:
            return found
        end = len(self._data) - record.HEADER_BYTES + record.ALIGNMENT  # behind it a header may have begun
        return max(at + record.ALIGNMENT, end)
