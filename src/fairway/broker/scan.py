"""Reads without a group, for Spark, tools and replay.

SCAN reads committed batches of a subject. RETRACE reads the action log, INDEX the index of a subject, and NAMES the
names of numbers: they trace messages.

Scans have 64 actors of their own, with a low weight, so that a job that reads everything cannot disturb consumers. One
of these actors serves all scans of a subject. One more, with the same weight, serves all requests that trace messages.
For those the broker sends the bytes as they were written and decodes no action, so they cost no more than a scan.

`NameTable` finds the names for the numbers in the action log. A group and its members know their own. For consumers
that have left, the table remembers the latest 10,000 joins. That serves readers at the end of the log. Readers further
back find the names in the log, where each segment restates the names that it needs (`fairway.storage.action_log`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Final

from fairway import limits
from fairway.batch import may_hold, tag_mask
from fairway.broker import response_bounds
from fairway.broker.cold_reads import ColdReads, FetchCache
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.groups import GroupHost, Groups
from fairway.broker.message_reader import RECENT_BYTES, MessageReader
from fairway.errors import Code, Refused
from fairway.group_events import ActionKind
from fairway.groups import GroupDecision
from fairway.limits import KIB
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import (
    Index,
    Indexed,
    Named,
    Names,
    NumberedConsumer,
    Retrace,
    Retraced,
    Scan,
    Scanned,
)  # fmt: skip
from fairway.protocol.messages import AttachedBatch, Whence
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage import log as logs
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.index_file import ENTRY, ENTRY_BYTES
from fairway.storage.log import Damaged, Log
from fairway.storage.message_log import StoredBatch
from fairway.storage.segment import HEADER_BYTES, Segment
from fairway.storage.subjects import SubjectTable

SCAN_WEIGHT = 0.1  # a tenth of a group's share, while groups have work
_ENTRIES_MAX = 4_096  # looked at in one slice
# A bound on an answer while groups are at work, unless one batch is larger. The loop makes an answer in one go: 1 MiB
# takes more than a millisecond, and a pull that comes meanwhile waits (bench/fairness_spark).
BESIDE_GROUPS_BYTES_MAX = 128 * KIB


def place(coordinator: GroupCoordinator, subject_id: int, whence: Whence, value: int) -> int:
    """The sequence that `whence` and `value` name in a subject."""
    log = coordinator.store.messages
    if whence is Whence.EARLIEST:
        return log.first_sequence(subject_id)
    if whence is Whence.LATEST:
        return log.end_sequence(subject_id)
    if whence is Whence.TIME:
        found = log.sequence_at(subject_id, value)
        return log.end_sequence(subject_id) if found is None else found
    return value


class ScanProcessor:
    """Handles SCAN."""

    def __init__(self, coordinator: GroupCoordinator, reader: MessageReader) -> None:
        self._coordinator = coordinator
        self._reader = reader

    def process(self, request: ServedRequest[Scan], actor: Actor) -> TurnResult:
        message = request.message
        log = self._coordinator.store.messages
        _check_log(message.log_id, log.log.log_id, "scan")
        subject = self._coordinator.subject(message.subject)
        begin = place(self._coordinator, subject.id, message.whence, message.value)
        now_ns = self._coordinator.clock.monotonic_ns()
        if begin >= log.end_sequence(subject.id) and now_ns < request.wait_until_ns:
            self._coordinator.watches.add(subject.id, actor.key, request, self, now_ns)  # type: ignore[arg-type]
            return TurnResult.DONE
        if not self._reader.is_indexed(actor, subject.id, begin):
            return TurnResult.AGAIN
        is_bounded = not message.is_dry and self._coordinator.is_busy(now_ns)
        bytes_max = min(message.bytes_max, BESIDE_GROUPS_BYTES_MAX) if is_bounded else message.bytes_max
        choice = self._choose(subject.id, begin, message, bytes_max)
        if message.is_dry:
            request.respond(self._answer(subject.id, choice.reached, choice.size))
            return TurnResult.DONE
        found = self._reader.prefix(actor, subject.id, choice.entries)
        if found is None:
            return TurnResult.AGAIN
        wanted, batches = found
        reached = choice.reached if len(wanted) == len(choice.entries) else wanted[-1].end_sequence
        kept = response_bounds.fitting_batches(batches, message.bytes_max)
        if kept < len(batches):
            reached = batches[kept].entry.first_sequence
        attachments = [each.data for each in batches[:kept]]
        size = sum(map(len, attachments))
        actor.charge(size_bytes=size)
        answer = self._answer(subject.id, reached, size, batches[:kept])
        request.respond(answer, attachments)
        return TurnResult.DONE

    def _answer(self, subject_id: int, reached: int, size: int, batches: Sequence[StoredBatch] = ()) -> Scanned:
        log = self._coordinator.store.messages
        return Scanned(
            [AttachedBatch(each.entry.first_sequence, each.entry.appended_ms) for each in batches],
            reached,
            log.first_sequence(subject_id),
            log.end_sequence(subject_id),
            log.log.log_id,
            log.log.epoch,
            size,
        )

    def _choose(self, subject_id: int, begin: int, message: Scan, bytes_max: int) -> _Choice:
        choice = _Choice(begin)
        if not bytes_max:
            return choice
        masks = [tag_mask(tag) for tag in message.tags]
        for seen, entry in enumerate(self._coordinator.store.messages.readable(subject_id, begin)):
            if seen >= _ENTRIES_MAX or (message.end is not None and entry.first_sequence >= message.end):
                break
            if not masks or any(may_hold(entry.tag_filter, mask) for mask in masks):
                if choice.entries and choice.size + entry.size > bytes_max:
                    break
                choice.entries.append(entry)
                choice.size += entry.size
            choice.reached = entry.end_sequence
        return choice

    def expire(self, request: ServedRequest[Scan], expiry: Expiry) -> None:
        if expiry is not Expiry.WAITED:
            request.expire(expiry)
            return
        message = request.message
        try:
            subject_id = self._coordinator.subject(message.subject).id
        except Refused as refused:  # the subject was removed
            request.refuse(refused)
            return
        request.respond(
            self._answer(subject_id, place(self._coordinator, subject_id, message.whence, message.value), 0)
        )

    def fail(self, request: ServedRequest[Scan], error: Exception) -> None:
        request.fail(error)


class _Choice:
    """The batches that a scan takes, their size in the log, and the sequence that the scan has reached."""

    __slots__ = ("entries", "reached", "size")

    def __init__(self, begin: int) -> None:
        self.entries: list[ConsumeLogEntry] = []
        self.reached = begin
        self.size = 0


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


RETRACE_KEY: Final[Hashable] = ("scan", "actions")
WATCHED: Final = 0  # the key for RETRACE among the subjects that scans watch: no subject has this number
_FRAME_SPARE_BYTES = 4 * KIB  # of an answer, for all but the bytes


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
        _check_log(message.log_id, self._log.log_id, "reading")
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
        _check_log(message.log_id, messages.log.log_id, "reading")
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


def _check_log(expected: int | None, log_id: int, what: str) -> None:
    if expected is not None and expected != log_id:
        raise Refused(Code.FENCED, f"this log is another one than the {what} began with: begin anew")
