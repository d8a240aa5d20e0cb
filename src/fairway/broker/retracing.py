"""The logs for those who retrace what happened: bytes of the action log, the index of a subject, names for numbers.

Bytes go out as they were written, so this costs a broker no more than a scan does: nothing here looks at an action. One
actor for all of it, with the low weight of scans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from functools import partial
from typing import Final

from fairway import limits
from fairway.broker.desk import GroupCoordinator
from fairway.broker.fetching import ColdReads, FetchCache
from fairway.broker.naming import NameTable
from fairway.broker.reading import RECENT_BYTES, MessageReader
from fairway.broker.scan import place
from fairway.errors import Code, Refused
from fairway.protocol import ControlMessage
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed, Names, Retrace, Retraced
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage import log_time
from fairway.storage.index_file import ENTRY, ENTRY_BYTES
from fairway.storage.log import Damaged, Log
from fairway.storage.segment import HEADER_BYTES, Segment

KEY: Final[Hashable] = ("scan", "actions")
WATCHED: Final = 0  # among the subjects that scans wait for: no subject has this number
_FRAME_SPARE_BYTES = 4 * limits.KIB  # of an answer, for all but the bytes


class RetraceProcessor:
    """Handles RETRACE, INDEX and NAMES."""

    def __init__(
        self, desk: GroupCoordinator, reader: MessageReader, fetches: ColdReads | None, names: NameTable
    ) -> None:
        self._desk = desk
        self._reader = reader
        self._fetches = fetches
        self._names = names

    def process(self, request: ServedRequest[ControlMessage], actor: Actor) -> TurnResult:
        message = request.message
        if isinstance(message, Retrace):
            return self._retrace(request, message, actor)
        if isinstance(message, Index):
            return self._index(request, message, actor)
        if isinstance(message, Names):
            request.respond(self._names.answer(message, self._desk.store.messages.views.subjects))
        return TurnResult.DONE

    def expire(self, request: ServedRequest[ControlMessage], expiry: Expiry) -> None:
        if expiry is Expiry.WAITED and isinstance(request.message, Retrace):
            request.respond(self._answer(self._place(request.message)))
        else:
            request.expire(expiry)

    def fail(self, request: ServedRequest[ControlMessage], error: Exception) -> None:
        request.fail(error)

    # --- the action log ----------------------------------------------------------------------------------------------

    @property
    def _log(self) -> Log:
        return self._desk.store.actions.log

    def _retrace(self, request: ServedRequest[ControlMessage], message: Retrace, actor: Actor) -> TurnResult:
        _check_log(message.log_id, self._log.log_id)
        position = self._place(message)
        now_ns = self._desk.clock.monotonic_ns()
        if position >= self._log.committed_end and now_ns < request.wait_until_ns:
            self._desk.watches.add(WATCHED, actor.key, request, self, now_ns)
            return TurnResult.DONE
        found = self._segment(position)
        if found is None or not message.bytes_max:
            request.respond(self._answer(position))
            return TurnResult.DONE
        position = max(position, found.base + HEADER_BYTES)
        size = min(self._end(found) - position, _bounded(message.bytes_max, request))
        data = self._read(actor, position, size) if size > 0 else b""
        if data is None:
            return TurnResult.AGAIN
        actor.charge(size_bytes=len(data))
        request.respond(self._answer(position, data))
        return TurnResult.DONE

    def _place(self, message: Retrace) -> int:
        log = self._log
        if message.whence is Whence.EARLIEST:
            return self._first
        if message.whence is Whence.LATEST:
            return log.committed_end
        if message.whence is Whence.TIME:
            found = log_time.segment_at(log.segments, message.value)
            return log.committed_end if found is None else min(found.base, log.committed_end)
        return message.value

    @property
    def _first(self) -> int:
        segments = self._log.segments
        return segments[0].base if segments else self._log.committed_end

    def _segment(self, position: int) -> Segment | None:
        """The one that holds the position, or the next one after it; None: there is nothing committed."""
        segments = self._log.segments
        index = bisect_right(segments, position, key=lambda each: each.end)
        if index == len(segments) or max(position, segments[index].base) >= self._log.committed_end:
            return None
        return segments[index]

    def _end(self, of: Segment) -> int:
        return min(of.end, self._log.committed_end)

    def _answer(self, position: int, data: bytes = b"") -> Retraced:
        log, found = self._log, self._segment(position)
        base, end = (position, position) if found is None else (found.base, self._end(found))
        at = max(position, base + HEADER_BYTES) if found is not None else position
        return Retraced(data, at, base, end, self._first, log.committed_end, log.log_id, log.epoch)

    def _read(self, actor: Actor, position: int, size: int) -> bytes | None:
        """What there is at that place, from the first byte on; None: it is being fetched."""
        log, fetches = self._log, self._fetches
        if fetches is None:
            return log.read(position, size)
        shelf = fetches.shelf(actor)
        piece = None if shelf is None else shelf.piece(position, size)
        if piece is not None:
            fetches.clear(actor)
            if not piece.data:
                raise Damaged(position, "missing")
            return piece.data
        is_recent = position >= log.committed_end - RECENT_BYTES
        if is_recent:
            actor.is_background = False
        data = log.read_recent(position, size) if is_recent else log.read_cached(position, size)
        if data:
            return data
        shelf = FetchCache()
        fetches.start(actor, shelf, [(partial(log.fetch, position, size), partial(shelf.keep, position, size))])
        return None

    # --- the index of a subject --------------------------------------------------------------------------------------

    def _index(self, request: ServedRequest[ControlMessage], message: Index, actor: Actor) -> TurnResult:
        messages = self._desk.store.messages
        _check_log(message.log_id, messages.log.log_id)
        subject_id = self._desk.subject(message.subject).id
        begin = place(self._desk, subject_id, message.whence, message.value)
        if not self._reader.is_indexed(actor, subject_id, begin):
            return TurnResult.AGAIN
        stored_end = messages.end_sequence(subject_id)
        end = stored_end if message.end is None else min(message.end, stored_end)
        entries_max = _bounded(message.entries_max * ENTRY_BYTES, request) // ENTRY_BYTES
        data = b""
        if begin < end and entries_max:
            committed_end = messages.log.committed_end
            data = messages.views.entries.packed(subject_id, begin, end, committed_end, entries_max)
        reached = begin
        if data:
            first_sequence, count = ENTRY.unpack_from(data, len(data) - ENTRY_BYTES)[:2]
            reached = first_sequence + count
        elif entries_max:
            reached = max(begin, end)  # a hole up to the end
        if not message.is_dry:
            actor.charge(size_bytes=len(data))
        request.respond(
            Indexed(
                b"" if message.is_dry else data,
                len(data) // ENTRY_BYTES,
                reached,
                messages.first_sequence(subject_id),
                stored_end,
                messages.log.log_id,
                messages.log.epoch,
            )
        )
        return TurnResult.DONE


def _bounded(asked_bytes: int, request: ServedRequest[ControlMessage]) -> int:
    """No more than one answer may hold."""
    room = request.session.frame_bytes_max - _FRAME_SPARE_BYTES
    return max(min(asked_bytes, limits.RETRACE_BYTES_MAX, room), min(asked_bytes, ENTRY_BYTES))


def _check_log(expected: int | None, log_id: int) -> None:
    if expected is not None and expected != log_id:
        raise Refused(Code.FENCED, "this log is another one than the reading began with: begin anew")
