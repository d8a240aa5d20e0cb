"""Requests that trace messages: RETRACE reads the action log, INDEX the index of a subject, NAMES the names of numbers.

The broker sends the bytes as they were written and decodes no action, so these requests cost no more than a scan. One
actor handles all of them, with the low weight of scans.

`NameTable` finds the names for the numbers in the action log. A group and its members know their own. For consumers
that have left, the table remembers the latest 10,000 joins. That serves readers at the end of the log. Readers further
back find the names in the log, where each segment restates the names that it needs (`fairway.storage.action_log`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Final

from fairway import limits
from fairway.broker.cold_reads import ColdReads, FetchCache
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.groups import GroupHost, Groups
from fairway.broker.message_reader import RECENT_BYTES, MessageReader
from fairway.broker.scan import place
from fairway.errors import Code, Refused
from fairway.group_events import ActionKind
from fairway.groups import GroupDecision
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import Index, Indexed, Named, Names, NumberedConsumer, Retrace, Retraced
from fairway.protocol.messages import Whence
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage import log as logs
from fairway.storage.index_file import ENTRY, ENTRY_BYTES
from fairway.storage.log import Damaged, Log
from fairway.storage.segment import HEADER_BYTES, Segment
from fairway.storage.subjects import SubjectTable

LATEST_MAX = 10_000  # consumers that have joined, about 2 MB


class NameTable:
    """The names of groups and consumers by number, as far as memory has them."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._latest: OrderedDict[tuple[int, int], str] = OrderedDict()

    def note(self, decided: Iterable[tuple[GroupHost, GroupDecision]]) -> None:
        """Remember consumers that join."""
        for host, decision in decided:
            for event in decision.events:
                if event.kind is ActionKind.JOIN:
                    self._latest[host.id, event.consumer_id] = event.detail.decode()
        while len(self._latest) > LATEST_MAX:
            self._latest.popitem(last=False)

    def answer(self, asked: Names, subjects: SubjectTable) -> Named:
        count = len(asked.subjects) + len(asked.groups) + len(asked.consumers)
        if count > limits.NAMES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{count} names asked for at once: at most {limits.NAMES_MAX}")
        return Named(
            [str(subjects.by_id(each).name) if each in subjects else "" for each in asked.subjects],
            [self._group(each) for each in asked.groups],
            [self._consumer(each) for each in asked.consumers],
        )

    def _group(self, group_id: int) -> str:
        host = self._groups.of_id(group_id)
        return "" if host is None else str(host.name)

    def _consumer(self, asked: NumberedConsumer) -> str:
        host = self._groups.of_id(asked.group)
        name = None if host is None else host.state_machine.name_of(asked.consumer)
        return str(name) if name is not None else self._latest.get((asked.group, asked.consumer), "")


KEY: Final[Hashable] = ("scan", "actions")
WATCHED: Final = 0  # the key for RETRACE among the subjects that scans watch: no subject has this number
_FRAME_SPARE_BYTES = 4 * limits.KIB  # of an answer, for all but the bytes


class RetraceProcessor:
    """Handles RETRACE, INDEX and NAMES."""

    def __init__(
        self, coordinator: GroupCoordinator, reader: MessageReader, fetches: ColdReads | None, names: NameTable
    ) -> None:
        self._coordinator = coordinator
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
            request.respond(self._names.answer(message, self._coordinator.store.messages.views.subjects))
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
        return self._coordinator.store.actions.log

    def _retrace(self, request: ServedRequest[ControlMessage], message: Retrace, actor: Actor) -> TurnResult:
        _check_log(message.log_id, self._log.log_id)
        position = self._place(message)
        now_ns = self._coordinator.clock.monotonic_ns()
        if position >= self._log.committed_end and now_ns < request.wait_until_ns:
            self._coordinator.watches.add(WATCHED, actor.key, request, self, now_ns)
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
            found = logs.segment_at(log.segments, message.value)
            return log.committed_end if found is None else min(found.base, log.committed_end)
        return message.value

    @property
    def _first(self) -> int:
        segments = self._log.segments
        return segments[0].base if segments else self._log.committed_end

    def _segment(self, position: int) -> Segment | None:
        """The segment that holds the position, or the next one after it; None: nothing is committed there."""
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
        """The bytes at that place, from the first byte on; None: a fetch is under way."""
        log, fetches = self._log, self._fetches
        if fetches is None:
            return log.read(position, size)
        fetch_cache = fetches.fetch_cache(actor)
        piece = None if fetch_cache is None else fetch_cache.piece(position, size)
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
        fetch_cache = FetchCache()
        fetches.start(
            actor, fetch_cache, [(partial(log.fetch, position, size), partial(fetch_cache.keep, position, size))]
        )
        return None

    # --- the index of a subject --------------------------------------------------------------------------------------

    def _index(self, request: ServedRequest[ControlMessage], message: Index, actor: Actor) -> TurnResult:
        messages = self._coordinator.store.messages
        _check_log(message.log_id, messages.log.log_id)
        subject_id = self._coordinator.subject(message.subject).id
        begin = place(self._coordinator, subject_id, message.whence, message.value)
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
    """The bytes asked for, cut to what one answer may hold."""
    room = request.session.frame_bytes_max - _FRAME_SPARE_BYTES
    return max(min(asked_bytes, limits.RETRACE_BYTES_MAX, room), min(asked_bytes, ENTRY_BYTES))


def _check_log(expected: int | None, log_id: int) -> None:
    if expected is not None and expected != log_id:
        raise Refused(Code.FENCED, "this log is another one than the reading began with: begin anew")
