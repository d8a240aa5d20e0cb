"""The checks after every recovery: all that can be read, and whether recovery itself can be trusted."""

from __future__ import annotations

from array import array
from dataclasses import astuple
from typing import TypeAlias, TypedDict

from fairway.names import Subject
from fairway.runtime.disk import TEMPORARY
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import ScheduleCall, SimDisk
from fairway.storage import action_log, checkpoint, index_file, message_log
from fairway.storage.action_log import unpack
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.dedupe import DedupeEntry
from fairway.storage.directory import IDENTITY
from fairway.storage.message_log import StoredBatch, Views
from fairway.storage.open_store import RecoveredStore, open_directory
from fairway.storage.record import Record, RecordKind
from fairway.storage.recovery import DamageVerdict, Finding
from fairway.storage.store import Store
from tests.simulation.clients import REPEATED_FROM
from tests.simulation.truth import Invariant, Truth

LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)
DERIVED = (index_file.DIRECTORY, checkpoint.DIRECTORY)
EVERYTHING = 1 << 62

Streams: TypeAlias = dict[int, tuple[int, int, int, tuple[DedupeEntry, ...]]]


class Picture(TypedDict):
    """The views, in a form that can be compared."""

    subjects: dict[int, tuple[Subject, int]]
    entries: dict[int, list[ConsumeLogEntry]]
    streams: Streams


class ActionNumbers:
    """A view of the action log: the numbers that the actor gave, in the order of the log."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def replay(self, record: Record) -> None:
        if record.header.kind == RecordKind.ACTIONS:
            self.found.extend(action.event.lot for action in unpack(record.body))

    def picture(self) -> bytes:
        return array("Q", self.found).tobytes()

    def is_whole(self, first_base: int) -> bool:
        del first_base
        return True

    def restore(self, picture: bytes, end: int) -> None:
        del end
        self.found = list(array("Q", picture))


def _never(*_: object) -> None:
    """A copy is only read and recovered: nothing on it happens later."""


def copy_of(disk: SimDisk, directories: tuple[str, ...] = (*LOGS, *DERIVED)) -> SimDisk:
    """A disk with the same files as a process sees them, all of them synced."""
    call_later: ScheduleCall = _never
    copy = SimDisk(SeededRng("copy"), call_later)
    names = [IDENTITY] if IDENTITY in disk.listing("") else []
    for directory in directories:
        names += [f"{directory}/{name}" for name in disk.listing(directory) if not name.endswith(TEMPORARY)]
    for name in names:
        file = disk.open(name)
        copy.publish(name, [file.read(0, file.size)])
        file.close()
    return copy


def read_by_id(store: Store) -> dict[int, list[StoredBatch]]:
    """Every committed batch of every subject."""
    messages = store.messages
    return {
        subject.id: messages.read(subject.id, 0, messages_max=EVERYTHING, bytes_max=EVERYTHING)
        for subject in messages.views.subjects
    }


def read_all(store: Store) -> dict[Subject, list[StoredBatch]]:
    """The same, by the subjects' names."""
    return {store.messages.views.subjects.by_id(each).name: batches for each, batches in read_by_id(store).items()}


def entries_of(views: Views) -> dict[int, list[ConsumeLogEntry]]:
    """By subject, where its batches lie."""
    return {subject.id: list(views.entries.entries(subject.id, 0, EVERYTHING)) for subject in views.subjects}


def streams_of(views: Views) -> Streams:
    """By producer id: subject, epoch, next sequence, and the newest batches in the window. The oldest do not
    count: what is under way has pushed them out, and if it never arrives the window is shorter than it could be."""
    return {
        producer_id: (stream.subject_id, stream.epoch, stream.next, tuple(stream)[:REPEATED_FROM])
        for producer_id, stream in views.dedupe._streams.items()
    }


def picture(views: Views) -> Picture:
    """All that the views say, in a form that can be compared."""
    return {
        "subjects": {each.id: (each.name, each.next_sequence) for each in views.subjects},
        "entries": entries_of(views),
        "streams": streams_of(views),
    }


def differences(one: Picture, other: Picture) -> str:
    """Which parts of two pictures differ."""
    mine, others = dict(one), dict(other)
    return ", ".join(name for name in mine if mine[name] != others[name])


def check_recovery(truth: Truth, disk: SimDisk) -> Picture:
    """Recover a copy, again, and once without the views; the picture that the store itself must arrive at."""
    copy = copy_of(disk)
    opened = check_stable(truth, copy)
    recovered = picture(opened.views)
    _check_views(truth, opened, copy)
    return recovered


def check_stable(truth: Truth, copy: SimDisk) -> RecoveredStore:
    """Recover twice: the second time there is nothing left to do, and it comes to the same."""
    first = open_directory(copy, SeededRng("first"))
    second = open_directory(copy, SeededRng("second"))
    differing = differences(picture(first.views), picture(second.views))
    if differing or logs_of(first) != logs_of(second):
        truth.blame(Invariant.UNSTABLE, f"recovered twice, these differ: {differing or 'logs'}")
    if again := [each for each in second.findings if each.verdict is DamageVerdict.TORN]:
        truth.blame(Invariant.UNSTABLE, f"the second recovery still finds {again[0]}")
    return first


def logs_of(opened: RecoveredStore) -> object:
    return [astuple(log) for log in (opened.messages, opened.actions)]


def check_rot(truth: Truth, findings: list[Finding]) -> None:
    for each in findings:
        if each.verdict is DamageVerdict.ROTTEN:
            truth.blame(Invariant.ROTTEN, f"{each.log} {each.damage.start} to {each.damage.end}: {each.damage.why}")


def _check_views(truth: Truth, opened: RecoveredStore, disk: SimDisk) -> None:
    """Checkpoint and indexes must give what the log alone gives; and all actions are there."""
    actions = ActionNumbers()
    rebuilt = open_directory(copy_of(disk, LOGS), SeededRng("rebuilt"), actions)
    truth.see_actions(actions.found)
    mine, other = picture(opened.views), picture(rebuilt.views)
    mine["streams"] = _as_the_log_knows(mine["streams"], rebuilt)
    if differing := differences(mine, other):
        truth.blame(Invariant.VIEWS, f"these differ from what the log alone says: {differing}")


def _as_the_log_knows(streams: Streams, rebuilt: RecoveredStore) -> Streams:
    """Retention may have taken a stream's older batches; the checkpoint has them still."""
    oldest = rebuilt.messages.segments[0].base if rebuilt.messages.segments else 0
    kept = {
        producer_id: (subject_id, epoch, next_, tuple(each for each in window if each.end > oldest))
        for producer_id, (subject_id, epoch, next_, window) in streams.items()
    }
    return {producer_id: stream for producer_id, stream in kept.items() if stream[-1]}
