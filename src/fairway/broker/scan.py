"""SCAN: reads committed batches of a subject without a group, for Spark, tools and replay.

Scans have 64 actors of their own, with a low weight, so that a job that reads everything cannot disturb consumers. One
of these actors serves all scans of a subject.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway.batch import may_hold, tag_mask
from fairway.broker import response_bounds
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.message_reader import MessageReader
from fairway.errors import Code, Refused
from fairway.limits import KIB
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import AttachedBatch, Whence
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch

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
        if message.log_id is not None and message.log_id != log.log.log_id:
            raise Refused(Code.FENCED, "this log is another one than the scan began with: begin anew")
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
