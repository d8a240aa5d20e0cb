"""Opening a data directory: checkpoint, index files, recovery of both logs, and the views built from them.

`recover` locks the directory, then `open_directory` does the work. A killed start can be repeated at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from fairway.errors import DiskFull, RemoteProtocolError
from fairway.runtime.clock import HeldJump
from fairway.runtime.disk import TEMPORARY, Disk
from fairway.runtime.rng import Rng
from fairway.storage import action_log, directory, index_file, message_log, recovery, replica_directory, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.action_log import ActionRetention, ActionView
from fairway.storage.checkpoint import Checkpoint, LogMark, RotMark
from fairway.storage.consume_log import ConsumeLog
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.log import LogState
from fairway.storage.message_log import Views, entries_of_segment
from fairway.storage.record import Record, RecordKind
from fairway.storage.recovery import DamageVerdict, Finding, LogRecovery
from fairway.storage.segment import Damage
from fairway.storage.subjects import SubjectTable


@dataclass(slots=True)
class RecoveredStore:
    """Everything that a store needs to go on."""

    identity: DirectoryIdentity
    messages: LogState
    actions: LogState
    views: Views
    unsealed_from: int  # entries of segments from this base on are in memory
    checkpoint_number: int
    checkpointed_ends: tuple[int, int]  # of messages and actions; without a checkpoint, where the logs begin
    checkpointed_epoch: int
    rotten: list[RotMark]
    findings: list[Finding] = field(default_factory=list)  # new ones, of this start
    remarks: list[str] = field(default_factory=list)  # views that had to be rebuilt, and why
    action_retention: ActionRetention = field(default_factory=ActionRetention)
    is_new: bool = False  # nothing was ever written to the directory, and it joins no group
    aging_ms: int | None = None  # the earliest time that it can have been when last recorded; None: unknown
    latest_ms: int | None = None  # the latest time that it can have been then
    held: HeldJump | None = None  # the jump of the clock that was held back then

    @property
    def times(self) -> tuple[int | None, int | None, HeldJump | None]:
        """What a `LogClock` begins with."""
        return self.aging_ms, self.latest_ms, self.held


def recover(
    disk: Disk, rng: Rng, action_view: ActionView | None = None, adopt: DirectoryIdentity | None = None
) -> RecoveredStore:
    """Lock a directory and recover its contents. This call blocks, so a running server calls it beside its loop. A
    foreign directory is left untouched."""
    directory.identify(disk)  # before the lock, which would leave a file in a foreign directory
    disk.lock()
    return open_directory(disk, rng, action_view, adopt)


def open_directory(
    disk: Disk, rng: Rng, action_view: ActionView | None = None, adopt: DirectoryIdentity | None = None
) -> RecoveredStore:
    """Recover what is there. Every step may be killed and repeated."""
    replica_directory.finish(disk)
    _refuse_newer(disk)
    identity, remark = directory.claim(disk, rng, adopt)
    _sweep(disk)
    known, unreadable = checkpoints.newest(disk, identity)
    remarks = ([remark] if remark else []) + unreadable
    marks = marks_of(disk, known)
    if known is not None:
        _delete_doomed(disk, known, marks)
    believed = replica_directory.read_catch_up(disk)
    if known is None:
        marks = {log: _proven(disk, log, log_id, marks[log], believed.get(log)) for log, log_id in _log_ids(identity)}
    replay = _ViewBuilder(disk, identity.messages_id, known, marks[message_log.DIRECTORY])
    action_retention = ActionRetention(known.action_bounds, known.pictures) if known else ActionRetention()
    recovery_of = partial(_recovery, disk, known, marks, believed)
    replay_action = partial(_apply_action, action_view, action_retention)
    messages = recovery_of(message_log.DIRECTORY, identity.messages_id, replay.apply, replay.views.subjects.skip_lost)
    actions = recovery_of(action_log.DIRECTORY, identity.actions_id, replay_action)
    if action_view is not None:
        remarks += _begin_view(action_view, known, actions)
    judgements = messages.examine(), actions.examine()  # both before either changes: one may be of a newer version
    replay.views.entries.keep_only(replay.views.subjects)  # index files have the batches of removed ones too
    messages_state, actions_state = messages.settle(judgements[0]), actions.settle(judgements[1])
    if believed:
        disk.remove(directory.CATCHING_UP)  # the logs are whole and synced now
    findings = messages.findings + actions.findings
    aging_ms, latest_ms = _times(known, messages_state, replay.views)
    return RecoveredStore(
        identity,
        messages_state,
        actions_state,
        replay.views,
        replay.open_base,
        max(checkpoints.numbers(disk), default=0),
        (marks[message_log.DIRECTORY].end, marks[action_log.DIRECTORY].end),
        known.epoch if known else 0,
        _rotten(known, findings),
        findings,
        remarks + replay.remarks,
        action_retention,
        is_new=adopt is None and messages_state.end == actions_state.end == 0,
        aging_ms=aging_ms,
        latest_ms=latest_ms,
        held=HeldJump(known.held_to_ms, known.held_for_ms) if known is not None and known.held_to_ms else None,
    )


def _apply_action(view: ActionView | None, of: ActionRetention, record: Record) -> None:
    if record.header.kind == RecordKind.GROUPS:
        of.note_picture(record.header.position)
    if view is not None:
        view.replay(record)


def _times(known: Checkpoint | None, messages: LogState, views: Views) -> tuple[int | None, int | None]:
    """The earliest and the latest that the time can have been, as far as the checkpoint vouches. Later append times
    prove nothing: a clock that was ahead may have made them. Without a checkpoint the oldest append time is the best
    evidence. If everything left in front was dated ahead, the place where times go back is the evidence."""
    if known is None:
        firsts = (next(views.entries.entries(each.id, 0, messages.end), None) for each in views.subjects)
        times = [entry.appended_ms for entry in firsts if entry is not None]
        times += [each.set_back_ms for each in messages.segments if each.set_back_ms]
        oldest_ms = min(times, default=None)
        return oldest_ms, oldest_ms
    marks = (*known.messages.newest_ms.values(), *known.actions.newest_ms.values())
    aging_ms = known.aging_ms or max(marks, default=0)
    return aging_ms, max(known.latest_ms, aging_ms)


def _begin_view(view: ActionView, known: Checkpoint | None, actions: LogRecovery) -> list[str]:
    """Restore the view from the checkpoint; if that cannot be read, let recovery replay all actions."""
    if known is None:
        return []
    try:
        if known.groups:
            view.restore(known.groups, known.actions.end)
            return []
        remark = "the groups were made again from the action log"
    except RemoteProtocolError as error:
        remark = f"the groups were made again from the action log: {error}"
    actions.start, actions.epoch = actions.first_base, 0
    return [remark]


def _recovery(
    disk: Disk,
    known: Checkpoint | None,
    marks: dict[str, LogMark],
    believed: dict[str, int],
    log: str,
    log_id: int,
    apply: Callable[[Record], None],
    on_rot: Callable[[Damage], None] = lambda _: None,
) -> LogRecovery:
    mark = marks[log]
    return LogRecovery(
        disk,
        log,
        log_id,
        first_base=mark.first_base,
        start=mark.end,
        vouched_end=mark.end,
        believed_end=believed.get(log),
        epoch=known.epoch if known else 0,
        newest_ms=dict(mark.newest_ms),
        first_ms=dict(mark.set_back_ms),
        apply=apply,
        on_rot=on_rot,
    )


def _refuse_newer(disk: Disk) -> None:
    """Refuse a newer version before anything changes: it may use differently what this version would repair."""
    for number in checkpoints.numbers(disk):
        checkpoints.check_version(disk, number)
    for log in (message_log.DIRECTORY, action_log.DIRECTORY):
        for base in segment.bases(disk, log):
            with closing(disk.open(segment.file_name(log, base))) as file:
                segment.check_segment_header(file, base, log_id=0)  # recovery handles damage


def marks_of(disk: Disk, known: Checkpoint | None) -> dict[str, LogMark]:
    """How far each log is covered. Without a checkpoint, a log begins with its first segment."""
    if known is not None:
        return {message_log.DIRECTORY: known.messages, action_log.DIRECTORY: known.actions}
    firsts = {log: min(segment.bases(disk, log), default=0) for log in (message_log.DIRECTORY, action_log.DIRECTORY)}
    return {log: LogMark(first, first, {}) for log, first in firsts.items()}


def _log_ids(identity: DirectoryIdentity) -> tuple[tuple[str, int], ...]:
    return (message_log.DIRECTORY, identity.messages_id), (action_log.DIRECTORY, identity.actions_id)


def _proven(disk: Disk, log: str, log_id: int, mark: LogMark, believed_end: int | None) -> LogMark:
    """Where a log without a checkpoint begins: with its first segment, if a record says that everything before was
    synced. Otherwise a crash took earlier, unsynced files and left the name of a later one: the log is still empty."""
    if not mark.first_base:
        return mark
    walk = recovery.LogWalk(disk, log, log_id, first_base=mark.first_base)
    walk.measure()
    for found in walk.walk(mark.first_base, 0):
        if found.header is None or found.header.position < mark.first_base:
            continue
        synced_end = found.header.synced_end if believed_end is None else believed_end
        if synced_end >= mark.first_base:
            return mark
    return LogMark(0, 0, {})


def _sweep(disk: Disk) -> None:
    """Remove temporary files: a crash during a `publish` leaves one behind."""
    logs = (message_log.DIRECTORY, action_log.DIRECTORY)
    for where in ("", index_file.DIRECTORY, checkpoints.DIRECTORY, recovery.ASIDE, *logs):
        for name in disk.listing(where):
            if name.endswith(TEMPORARY):
                disk.remove(f"{where}/{name}" if where else name)


def _delete_doomed(disk: Disk, known: Checkpoint, marks: dict[str, LogMark]) -> None:
    """Finish the deletions of a retention that was killed. First make its checkpoint safe and delete older ones, which
    would report the deleted segments as missing."""
    doomed = [(log, base) for log, mark in marks.items() for base in segment.bases(disk, log) if base < mark.first_base]
    if not doomed:
        return
    directory.secure(disk, checkpoints.file_name(known.number))
    for number in checkpoints.numbers(disk):
        if number < known.number:
            disk.remove(checkpoints.file_name(number))
    for log, base in doomed:
        disk.remove(segment.file_name(log, base))
        if log == message_log.DIRECTORY:
            disk.remove(index_file.file_name(base))


def _rotten(known: Checkpoint | None, findings: list[Finding]) -> list[RotMark]:
    marks = [each for each in known.rotten if not _is_past(each, known)] if known else []
    for each in findings:
        mark = RotMark(each.log, each.damage.start, each.damage.end, each.damage.why)
        if each.verdict is DamageVerdict.ROTTEN and mark not in marks:
            marks.append(mark)
    return marks


def _is_past(mark: RotMark, known: Checkpoint) -> bool:
    """Whether retention has deleted the whole span."""
    of = known.messages if mark.log == message_log.DIRECTORY else known.actions
    return max(mark.end, mark.start + 1) <= of.first_base


class _ViewBuilder:
    """Builds the message log's views: from the checkpoint and the index files, then record by record.

    It seals each segment as soon as it has passed it. So a full rebuild of a large log needs the memory of one segment.
    """

    def __init__(self, disk: Disk, log_id: int, known: Checkpoint | None, mark: LogMark) -> None:
        self._disk = disk
        self.remarks: list[str] = []
        self._ends = _segment_ends(disk)
        entries = ConsumeLog(
            disk, log_id, rebuild=lambda base: entries_of_segment(disk, message_log.DIRECTORY, log_id, base)
        )
        dedupe = DedupeWindow.unpack(known.streams, known.verifiers) if known else DedupeWindow()
        self.views = Views(SubjectTable(), entries, dedupe)
        self.open_base = mark.first_base
        if known is not None:
            self.views.subjects.restate(known.subjects, position=0)
            self._load_indexes(mark)

    def _load_indexes(self, mark: LogMark) -> None:
        covered = [base for base in self._ends if mark.first_base <= base < mark.end]
        for base in covered[:-1]:
            if not self.views.entries.load_sealed(base, self._ends[base]):
                self.remarks.append(f"{index_file.file_name(base)} was made again from its segment")
        if covered:
            self.open_base = covered[-1]
            if not self.views.entries.load_open(self.open_base, mark.end):
                self.remarks.append(f"{index_file.file_name(self.open_base)} was made again from its segment")

    def apply(self, record: Record) -> None:
        while record.header.position >= self._ends.get(self.open_base, self.open_base):
            self._pass()
        self.views.apply(record)

    def _pass(self) -> None:
        """Seal the current segment and go on to the next. A missing segment leaves nothing to seal."""
        base = self.open_base
        if base in self._ends:
            parts, release = self.views.entries.seal(base, self._ends[base])
            try:
                self._disk.publish(index_file.file_name(base), parts)
            except DiskFull as full:  # a full disk stops produce, not a start: readers rebuild the entries
                self.remarks.append(f"a view was not written: {full}")
            release()
        self.open_base = min(each for each in self._ends if each > base)


def _segment_ends(disk: Disk) -> dict[int, int]:
    """The end of each segment of the message log, by its base."""
    ends: dict[int, int] = {}
    bases = segment.bases(disk, message_log.DIRECTORY)
    for base, following in zip_longest(bases, bases[1:]):
        with closing(disk.open(segment.file_name(message_log.DIRECTORY, base))) as file:
            size = file.size
        if size:
            ends[base] = base + size if following is None else min(base + size, following)
    return ends
