"""The promises to the writer, and the judgement of what a recovery found.

lost       acknowledged, above retention's floor, and not there with the same bytes at its sequence
phantom    there, and never sent
corrupt    there with other bytes, twice, or out of its stream's or its subject's order
rotten     damage that recovery cannot blame on a crash
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage import action_log, segment
from fairway.storage.message_log import StoredBatch
from fairway.storage.record import Record, RecordKind
from fairway.storage.recovery import DamageVerdict
from fairway.storage.segment import SegmentScan
from fairway.storage.store import Store
from tests.crash.streams import REGULARS, action_at, batch_at, subject_of
from tests.crash.writer import OPTIONS


class Key(NamedTuple):
    """A batch: its producer, and the producer's own sequence of its first message."""

    producer_id: int
    first: int


class Place(NamedTuple):
    """Where a receipt says that a batch is."""

    sequence: int
    messages: int


@dataclass
class Ledger:
    """Everything that one writer said in all of its lives."""

    seed: int
    sent: set[Key] = field(default_factory=set)
    acked: dict[Key, Place] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    acting: set[int] = field(default_factory=set)
    acted: set[int] = field(default_factory=set)
    originals: int = 0  # answers with the receipt of an earlier life's batch
    lives: int = 0  # that got as far as writing

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            word, *rest = line.split()
            match word, rest:
                case "sent", [producer, first]:
                    self.sent.add(Key(int(producer), int(first)))
                case "acked", [producer, first, count, sequence, duplicate]:
                    self.acked[Key(int(producer), int(first))] = Place(int(sequence), int(count))
                    self.originals += int(duplicate)
                case "floor", [subject, sequence]:
                    self.floors[subject] = max(self.floors.get(subject, 0), int(sequence))
                case "acting", [number]:
                    self.acting.add(int(number))
                case "acted", [number]:
                    self.acted.add(int(number))
                case "open", []:
                    self.lives += 1
                case "begin", []:
                    pass
                case _:
                    raise AssertionError(f"the writer said {line!r}")

    def resume(self) -> dict[int, int]:
        """By regular producer: where the part of its stream ends that is known to be stored."""
        ends = dict.fromkeys(REGULARS, 0)
        for key, place in self.acked.items():
            if key.producer_id in ends:
                ends[key.producer_id] = max(ends[key.producer_id], key.first + place.messages)
        return ends

    @property
    def acknowledged(self) -> int:
        return len(self.acked) + len(self.acted)


@dataclass
class Judgement:
    """Counts, and a sentence for each of the first few things that are wrong."""

    lost: int = 0
    phantom: int = 0
    corrupt: int = 0
    rotten: int = 0
    torn: int = 0  # cuts, which are in order
    batches: int = 0
    sentences: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.phantom or self.corrupt or self.rotten)

    def note(self, kind: str, sentence: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        self.sentences.append(f"{kind}: {sentence}")

    def add(self, other: Judgement) -> None:
        for kind in ("lost", "phantom", "corrupt", "rotten", "torn", "batches"):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.sentences = (self.sentences + other.sentences)[:20]


def judge(root: Path, ledger: Ledger) -> Judgement:
    """Recover the directory as a store would, read everything, and compare."""
    return asyncio.run(_judge(root, ledger))


async def _judge(root: Path, ledger: Ledger) -> Judgement:
    loop = asyncio.get_running_loop()
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    try:
        store = Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=OPTIONS)
        judgement = Judgement()
        for finding in store.findings:
            if finding.verdict is DamageVerdict.ROTTEN:
                judgement.note("rotten", f"{finding.log} {finding.damage}")
            else:
                judgement.torn += 1
        _judge_messages(store, ledger, judgement)
        _judge_actions(store, ledger, judgement)
        await store.close()
    finally:
        disk.close()
    return judgement


def _judge_messages(store: Store, ledger: Ledger, judgement: Judgement) -> None:
    found: dict[Key, Place] = {}
    expected: dict[int, int] = {}  # by producer: where its stream goes on
    for state in store.messages.views.subjects:
        following: int | None = None
        for stored in batches(store, state.id):
            key = Key(stored.entry.producer_id, stored.entry.producer_sequence)
            judgement.batches += 1
            if key not in ledger.sent or subject_of(key.producer_id) != state.name:
                judgement.note("phantom", f"{key} in {state.name}")
            elif stored.data != batch_at(ledger.seed, *key):
                judgement.note("corrupt", f"{key} has other bytes")
            if following not in (None, stored.entry.first_sequence):
                judgement.note("corrupt", f"{key} is at {stored.entry.first_sequence}, not at {following}")
            if expected.get(key.producer_id, key.first) != key.first or key in found:
                judgement.note("corrupt", f"{key} is twice in the log, or there is a gap before it")
            following = stored.entry.end_sequence
            expected[key.producer_id] = key.first + stored.entry.count
            found[key] = Place(stored.entry.first_sequence, stored.entry.count)
    for key, place in ledger.acked.items():
        is_kept = place.sequence >= ledger.floors.get(subject_of(key.producer_id), 0)
        if found.get(key) != place and (is_kept or key in found):
            judgement.note("lost", f"{key} was acknowledged at {place}, found at {found.get(key)}")


def batches(store: Store, subject_id: int) -> Iterator[StoredBatch]:
    sequence = 0
    while stored := store.messages.read(subject_id, sequence, messages_max=10_000, bytes_max=1 << 20):
        yield from stored
        sequence = stored[-1].entry.end_sequence


def _judge_actions(store: Store, ledger: Ledger, judgement: Judgement) -> None:
    found: set[int] = set()
    for action in _actions(store):
        number = action.event.lot
        if number not in ledger.acting:
            judgement.note("phantom", f"action {number}")
        elif action != action_at(ledger.seed, number) or number in found:
            judgement.note("corrupt", f"action {number} is another, or there twice")
        found.add(number)
    for number in ledger.acted - found:
        judgement.note("lost", f"action {number}")


def _actions(store: Store) -> Iterator[action_log.Action]:
    log = store.actions.log
    for each in log.segments:
        for found in SegmentScan(log.file(each), each.base, each.base + segment.HEADER_BYTES, log.log_id):
            if isinstance(found, Record) and found.header.kind == RecordKind.ACTIONS:
                yield from action_log.unpack(found.body)
