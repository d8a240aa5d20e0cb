"""Every single-bit flip and every truncation of a segment, and what becomes of it.

The design's "Damage", exhaustively: no wrong payload is ever returned; nothing below the synced end is lost unless the
damage itself hit it; every damage is reported; nothing is deleted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from fairway.limits import KIB
from fairway.runtime.disk import Disk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import action_log, message_log, record, recovery, segment
from fairway.storage.record import Record
from fairway.storage.recovery import DamageVerdict, Finding, Judgement, LogRecovery
from fairway.storage.segment import Damage
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.helpers import ORDERS, World, ack, content, messages, names, records_of

SEGMENT_BYTES = 4 * KIB
ROOMY = StoreOptions(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB, low_water_bytes=0)


@dataclass(frozen=True)
class Original:
    """A log as it was before the damage."""

    directory: str
    log_id: int
    segments: dict[int, bytes]
    records: list[Record]

    @property
    def end(self) -> int:
        return self.records[-1].header.end

    def synced_end(self, without: Record | None = None) -> int:
        """What the headers name, apart from one that cannot be read."""
        return max(each.header.synced_end for each in self.records if each is not without)


def fill(world: World) -> None:
    """Commits that later records vouch for, then two records that share a commit which nothing vouches for."""
    for number in range(7):
        world.produce([bytes([65 + number]) * (40 + 30 * number)] * 2)
        world.act(ack(number, detail=b"d" * (200 + 30 * number)))
    for number in range(2):
        world.send([b"last" * 30])
        world.store.act([ack(number, detail=b"last" * 100)])
    world.settle()


@functools.cache
def original(directory: str, segment_bytes: int = 64 * KIB) -> Original:
    options = StoreOptions(segment_bytes=segment_bytes, action_segment_bytes=segment_bytes, low_water_bytes=0)
    with World("damage", options=options) as world:
        fill(world)
        identity = world.store.identity
        log_id = identity.messages_id if directory == message_log.DIRECTORY else identity.actions_id
        files = [name for name in names(world.disk, directory) if name.endswith(segment.SUFFIX)]
        records = [each for name in files for each in records_of(world.disk, name, log_id)]
        bases = [segment.base_of(name.rpartition("/")[2]) for name in files]
        segments = {
            base: content(world.disk, name) for base, name in zip(bases, files, strict=True) if base is not None
        }
    return Original(directory, log_id, segments, records)


def disk_with(of: Original, segments: dict[int, bytes]) -> SimDisk:
    disk = SimDisk(SeededRng(0), _never)
    for base, data in segments.items():
        disk.publish(segment.file_name(of.directory, base), [data])
    return disk


def _never(*_: object) -> None:
    raise AssertionError("recovery uses the blocking calls")


@dataclass
class Outcome:
    """What recovery made of a log."""

    served: list[Record]
    lost: list[Damage]
    findings: list[Finding]
    disk: SimDisk
    end: int


def recover(
    disk: SimDisk, of: Original, *, vouched_end: int = 0, epoch: int = 0, kind: type[LogRecovery] = LogRecovery
) -> Outcome:
    served: list[Record] = []
    lost: list[Damage] = []
    act = kind(
        disk,
        of.directory,
        of.log_id,
        start=vouched_end,
        vouched_end=vouched_end,
        epoch=epoch,
        apply=served.append,
        on_rot=lost.append,
    )
    state = act.run()
    return Outcome(served, lost, act.findings, disk, state.end)


def expect(of: Original, damaged: dict[int, bytes], outcome: Outcome, lost: list[Record], cut_at: int | None) -> None:
    """Everything is served but `lost` and what lies from `cut_at` on; the cut is aside, the rest in its place."""
    end = of.end if cut_at is None else cut_at
    assert outcome.served == [each for each in of.records if each not in lost and each.header.end <= end]
    kept = {}
    for base, data in damaged.items():
        offset = max(end - base, 0) if cut_at is not None else len(data)
        if data[offset:]:
            torn = [
                each for each in outcome.findings if each.verdict is DamageVerdict.TORN and each.damage.start >= base
            ]
            assert torn[-1].aside is not None
            assert content(outcome.disk, torn[-1].aside) == data[offset:]
        if offset > segment.HEADER_BYTES:  # one that holds no record is begun again
            kept[base] = data[:offset]
    there = {name: content(outcome.disk, name) for name in names(outcome.disk, of.directory) if name.endswith(".log")}
    assert there == {segment.file_name(of.directory, base): data for base, data in kept.items()}


def flips(data: bytes, bits: range) -> Iterator[tuple[int, bytes]]:
    """Each byte with each of these bits turned."""
    for at in range(len(data)):
        for bit in bits:
            turned = bytearray(data)
            turned[at] ^= 1 << (at + bit) % 8
            yield at, bytes(turned)


def judge(of: Original, position: int) -> tuple[list[Record], int | None]:
    """The oracle for one flipped bit at a position: the records that are lost, and where the log is cut."""
    hit = next((each for each in of.records if each.header.position <= position < each.header.end), None)
    if hit is None:
        return [], None  # a segment header: reported, and nothing else
    in_header = position < hit.header.position + record.HEADER_BYTES
    synced_end = of.synced_end(without=hit if in_header else None)
    return [hit], (None if hit.header.end <= synced_end else hit.header.position)


LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)


@pytest.mark.parametrize("log", LOGS)
def test_the_segment_is_what_the_sweep_needs(log: str) -> None:
    of = original(log)
    assert len(of.segments) == 1
    assert 3_500 <= len(of.segments[0]) <= 5_000
    unvouched = [each for each in of.records if each.header.end > of.synced_end()]
    assert len(unvouched) == 2
    assert len(of.records) >= 10


def sweep(of: Original, bits: range, kind: type[LogRecovery] = LogRecovery) -> None:
    for at, data in flips(of.segments[0], bits):
        outcome = recover(disk_with(of, {0: data}), of, kind=kind)
        lost, cut_at = judge(of, at)
        expect(of, {0: data}, outcome, lost, cut_at)
        if cut_at is None:
            assert [(each.verdict, each.damage.start <= at < each.damage.end) for each in outcome.findings] == [
                (DamageVerdict.ROTTEN, True)
            ]
            assert len(outcome.lost) == 1
        else:
            assert [each.verdict for each in outcome.findings] == [DamageVerdict.TORN]


@pytest.mark.parametrize("log", LOGS)
def test_every_single_bit_flip(log: str) -> None:
    sweep(original(log), range(8))


class CutsAtTheFirstDamage(LogRecovery):
    """Planted: what lies behind damage is lost with it."""

    def look(self, start: int, epoch: int, take: Callable[[Record], None]) -> Judgement:
        return recovery.judge(0, super().look(start, epoch, take).damages)


class NeverCuts(LogRecovery):
    """Planted: what nobody vouches for is served behind a hole."""

    def look(self, start: int, epoch: int, take: Callable[[Record], None]) -> Judgement:
        return recovery.judge(1 << 60, super().look(start, epoch, take).damages)


class KeepsNothingAside(LogRecovery):
    """Planted: a cut is a deletion."""

    def _keep_aside(self, position: int, tail: bytes) -> str:
        return super()._keep_aside(position, b"")


class SaysNothing(LogRecovery):
    """Planted: rot is passed over in silence."""

    def _note_rot(self, damage: Damage) -> None:
        pass


@pytest.mark.parametrize("kind", [CutsAtTheFirstDamage, NeverCuts, KeepsNothingAside, SaysNothing])
def test_the_sweep_notices_a_recovery_that_is_wrong(kind: type[LogRecovery]) -> None:
    with pytest.raises(AssertionError):
        sweep(original(message_log.DIRECTORY), range(1), kind)


@pytest.mark.parametrize("log", LOGS)
def test_every_truncation(log: str) -> None:
    of = original(log)
    whole = of.segments[0]
    ends = [0, segment.HEADER_BYTES, *(each.header.end for each in of.records)]
    for size in range(len(whole)):
        outcome = recover(disk_with(of, {0: whole[:size]}), of)
        boundary = max(end for end in ends if end <= size)
        expect(of, {0: whole[:size]}, outcome, [], boundary)
        assert [each.verdict for each in outcome.findings] == ([] if size == boundary else [DamageVerdict.TORN])


@pytest.mark.parametrize("log", LOGS)
def test_every_truncation_below_a_checkpoint_is_rot(log: str) -> None:
    """The checkpoint is a witness: what it covers was there, so its absence is reported, and its place stays empty."""
    of = original(log)
    whole, covered = of.segments[0], of.records[-3].header.end
    for size in range(covered):
        outcome = recover(disk_with(of, {0: whole[:size]}), of, vouched_end=covered, epoch=1)
        assert outcome.served == []
        assert [(each.verdict, each.damage.why) for each in outcome.findings] == [(DamageVerdict.ROTTEN, "missing")]
        assert outcome.end == covered
        if size:
            assert content(outcome.disk, segment.file_name(log, 0)) == whole[:size]


@pytest.mark.parametrize("log", LOGS)
def test_flips_behind_a_checkpoint(log: str) -> None:
    """Start-up reads only what came after it, and judges that as ever."""
    of = original(log)
    covered = of.records[-5].header.end
    after = Original(of.directory, of.log_id, of.segments, of.records[-4:])
    for at, data in flips(of.segments[0], range(1)):
        outcome = recover(disk_with(of, {0: data}), of, vouched_end=covered, epoch=1)
        if at < covered:
            assert (outcome.served, outcome.findings) == (after.records, [])
            continue
        lost, cut_at = judge(after, at)
        expect(after, {0: data}, outcome, lost, cut_at)
        assert len(outcome.findings) == 1


@pytest.mark.parametrize("log", LOGS)
def test_flips_in_two_segments(log: str) -> None:
    of = original(log, 2_600)
    assert len(of.segments) == 2
    for base, whole in of.segments.items():
        for at, data in flips(whole, range(1)):
            damaged = {**of.segments, base: data}
            outcome = recover(disk_with(of, damaged), of)
            lost, cut_at = judge(of, base + at)
            expect(of, damaged, outcome, lost, cut_at)
            assert outcome.findings


@pytest.mark.parametrize("log", LOGS)
def test_recovery_of_any_damage_is_idempotent(log: str) -> None:
    of = original(log, 2_600)
    for base, whole in of.segments.items():
        for at, data in list(flips(whole, range(1)))[::5]:
            first = recover(disk_with(of, {**of.segments, base: data}), of)
            before = {name: content(first.disk, name) for name in names(first.disk, log)}
            second = recover(first.disk, of)
            assert (second.served, second.end) == (first.served, first.end), at
            assert {name: content(first.disk, name) for name in names(first.disk, log)} == before
            assert [each.verdict for each in second.findings] == [
                each.verdict for each in first.findings if each.verdict is DamageVerdict.ROTTEN
            ]


# --- the whole store, on a sample ------------------------------------------------------------------------------------


def reopened(damage: Callable[[Disk, SimDisk], None], *, checkpointed: bool) -> tuple[Store, dict[int, bytes], World]:
    """A store that was filled, damaged and opened again; and what it held before."""
    world = World("store", options=ROOMY)
    fill(world)
    if checkpointed:
        world.checkpoint()
        world.produce([b"after"])
    before = messages(world.store)
    world.kill()
    damage(world.disk, world.disk)
    return world.open(), before, world


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("at", range(3, 4_200, 97))
def test_a_flipped_bit_never_yields_a_wrong_payload(at: int, checkpointed: bool) -> None:
    name = segment.file_name(message_log.DIRECTORY, 0)

    def damage(_: Disk, disk: SimDisk) -> None:
        disk.flip(name, min(at, len(content(disk, name)) - 1) * 8 + at % 8)

    store, before, world = reopened(damage, checkpointed=checkpointed)
    with world:
        after = messages(store)
        assert after.items() <= before.items()
        assert len(after) >= len(before) - (2 if at < 3_800 else 4)
        is_reported = store.findings or store.rotten
        assert is_reported or after == before  # a segment header that a checkpoint covers is not read
        world.produce([b"new"], producer=9)
        assert messages(store)[max(messages(store))] == b"new"
        assert max(messages(store)) > max(after)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("size", range(0, 4_200, 211))
def test_a_truncated_segment_never_yields_a_wrong_payload(size: int, checkpointed: bool) -> None:
    name = segment.file_name(message_log.DIRECTORY, 0)
    store, before, world = reopened(
        lambda _, disk: disk.chop(name, min(size, len(content(disk, name)))), checkpointed=checkpointed
    )
    with world:
        after = messages(store)
        assert after.items() <= before.items()
        if checkpointed:
            assert store.findings or after == before
        world.produce([b"new"], producer=9)
        assert messages(store) == {**after, max(messages(store)): b"new"}
        if checkpointed:
            assert max(messages(store)) >= 16, "a sequence that was once confirmed is never used again"


def test_the_subject_is_still_the_same_after_damage() -> None:
    store, _, world = reopened(lambda _, disk: disk.flip(segment.file_name("messages", 0), 30_000), checkpointed=True)
    with world:
        assert store.messages.views.subjects.find(ORDERS) is not None
