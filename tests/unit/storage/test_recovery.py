"""Recovery's table, line by line; and recovery that is itself interrupted."""

from __future__ import annotations

import asyncio

import pytest

from fairway.batch import checksum
from fairway.errors import WrongDirectory
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import record, segment
from fairway.storage.record import RecordHeader, RecordKind
from fairway.storage.recovery import DamageVerdict, LogRecovery
from fairway.storage.segment import SegmentScan
from tests.unit.storage.helpers import (
    BILLS,
    FIRST_ACTIONS,
    FIRST_MESSAGES,
    ORDERS,
    ROOMY,
    SMALL,
    World,
    ack,
    batch_of,
    content,
    messages,
    names,
    records_of,
    verdicts,
)

TORN, ROTTEN = DamageVerdict.TORN, DamageVerdict.ROTTEN


def put(disk: SimDisk, name: str, data: bytes) -> None:
    disk.publish(name, [data])


def filled(seed: str = "recovery", batches: int = 4) -> World:
    """Batches 0, 1, 2 ... of one message each, every one synced on its own; the last one is vouched for by nobody."""
    world = World(seed, options=ROOMY)
    for number in range(batches):
        world.produce([b"message %d" % number])
        world.act(ack(number))
    return world


def log_records(world: World) -> list[record.Record]:
    return records_of(world.disk, FIRST_MESSAGES, world.store.identity.messages_id)


# --- intact ----------------------------------------------------------------------------------------------------------


def test_an_intact_log_is_served_whole() -> None:
    with filled() as world:
        world.kill()
        store = world.open()
        assert store.findings == []
        assert messages(store) == {number: b"message %d" % number for number in range(4)}


def test_every_life_has_a_greater_epoch_in_both_logs() -> None:
    with filled() as world:
        for epoch in (2, 3):
            world.kill()
            store = world.open()
            world.settle()
            assert (store.messages.log.epoch, store.actions.log.epoch) == (epoch, epoch)
        identity = world.store.identity
        for name, log_id in ((FIRST_MESSAGES, identity.messages_id), (FIRST_ACTIONS, identity.actions_id)):
            opened = [each for each in records_of(world.disk, name, log_id) if each.header.kind == RecordKind.EPOCH]
            assert [each.header.epoch for each in opened] == [1, 2, 3]


# --- torn ------------------------------------------------------------------------------------------------------------


def test_a_torn_tail_is_cut_and_kept_aside() -> None:
    with filled() as world:
        world.kill()
        whole = content(world.disk, FIRST_MESSAGES)
        last = log_records(world)[-1].header
        world.disk.chop(FIRST_MESSAGES, last.end - 5)
        store = world.open()
        assert verdicts(store.findings) == [(TORN, "cut short")]
        (aside,) = names(world.disk, "aside")
        assert store.findings[0].aside == aside
        assert content(world.disk, aside) == whole[last.position : last.end - 5]
        assert messages(store) == {number: b"message %d" % number for number in range(3)}


def test_whatever_follows_a_torn_record_is_cut_with_it() -> None:
    """A valid record behind a hole proves nothing: what lay in the hole was never confirmed, and neither was it."""
    with filled() as world:
        for number in (4, 5, 6):
            world.send([b"message %d" % number])
        world.settle()
        world.kill()
        hole = log_records(world)[-2].header
        world.disk.flip(FIRST_MESSAGES, hole.body_at * 8)
        store = world.open()
        assert verdicts(store.findings) == [(TORN, "damaged body")]
        assert messages(store) == {number: b"message %d" % number for number in range(5)}


def test_a_tail_of_zeros_is_torn() -> None:
    """A crash may leave a file longer than its data."""
    with filled() as world:
        world.kill()
        whole = content(world.disk, FIRST_MESSAGES)
        put(world.disk, FIRST_MESSAGES, whole + bytes(3_000))
        store = world.open()
        assert verdicts(store.findings) == [(TORN, "unreadable header")]
        assert len(messages(store)) == 4
        assert [content(world.disk, name) for name in names(world.disk, "aside")] == [bytes(3_000)]


def test_garbage_behind_the_log_is_torn() -> None:
    with filled() as world:
        world.kill()
        put(world.disk, FIRST_MESSAGES, content(world.disk, FIRST_MESSAGES) + b"FWR1 garbage" * 100)
        store = world.open()
        assert [verdict for verdict, _ in verdicts(store.findings)] == [TORN]
        assert len(messages(store)) == 4


def test_the_log_goes_on_where_it_was_cut() -> None:
    with filled() as world:
        world.kill()
        world.disk.chop(FIRST_MESSAGES, len(content(world.disk, FIRST_MESSAGES)) - 1)
        world.open()
        world.sequences[1] = 3
        assert world.produce([b"again"]).first_sequence == 3
        assert messages(world.reopen()) == {0: b"message 0", 1: b"message 1", 2: b"message 2", 3: b"again"}


# --- rotten ----------------------------------------------------------------------------------------------------------


def test_a_rotten_record_is_reported_and_the_rest_is_served() -> None:
    with filled() as world:
        world.kill()
        rotten = [each.header for each in log_records(world) if each.header.kind == RecordKind.DATA][1]
        world.disk.flip(FIRST_MESSAGES, rotten.body_at * 8 + 3)
        before = content(world.disk, FIRST_MESSAGES)
        store = world.open()
        assert verdicts(store.findings) == [(ROTTEN, "damaged body")]
        assert (store.findings[0].damage.start, store.findings[0].damage.end) == (rotten.position, rotten.end)
        assert messages(store) == {0: b"message 0", 2: b"message 2", 3: b"message 3"}
        assert content(world.disk, FIRST_MESSAGES) == before
        assert [(each.start, each.end) for each in store.rotten] == [(rotten.position, rotten.end)]


def test_what_is_rotten_is_still_known_after_a_checkpoint() -> None:
    with filled() as world:
        world.kill()
        world.disk.flip(FIRST_MESSAGES, 400 * 8)
        known = world.open().rotten
        assert world.reopen().rotten == known
        assert len(known) == 1


def test_a_rotten_segment_header_costs_nothing() -> None:
    with filled() as world:
        world.kill()
        world.disk.flip(FIRST_MESSAGES, 20 * 8)
        store = world.open()
        assert verdicts(store.findings) == [(ROTTEN, "the segment header fails its checksum")]
        assert len(messages(store)) == 4


def test_sequences_that_a_rotten_record_may_have_had_are_never_used_again() -> None:
    """Also for a subject whose very name went with the record."""
    with World(options=ROOMY) as world:
        world.produce([b"first"] * 3, ORDERS, producer=1)
        world.produce([b"other"] * 3, BILLS, producer=2)
        world.produce([b"more"] * 3, BILLS, producer=2)
        world.kill()
        of_bills = [each.header for each in log_records(world) if each.header.subject_id == 2]
        for header in of_bills[:2] + of_bills[2:3]:  # its name, its first batch, its name again: header and all
            world.disk.flip(FIRST_MESSAGES, (header.position + 5) * 8)
        store = world.open()
        assert messages(store, BILLS) == {}
        fresh = world.produce([b"fresh"], BILLS, producer=3)
        assert fresh.first_sequence >= 6
        world.produce([b"fresh"], ORDERS, producer=4)
        assert min(set(messages(store)) - {0, 1, 2}) >= 3
        before = {name: messages(store, name) for name in (ORDERS, BILLS)}
        assert {name: messages(world.reopen(), name) for name in (ORDERS, BILLS)} == before
        assert world.produce([b"later"], BILLS, producer=5).first_sequence == fresh.first_sequence + 1


# --- missing ---------------------------------------------------------------------------------------------------------


def segments(world: World) -> list[str]:
    return [name for name in names(world.disk, "messages") if name.endswith(segment.SUFFIX)]


def many_segments(count: int = 3) -> World:
    world = World("segments", options=SMALL)
    number = 0
    while len(segments(world)) < count:
        world.produce([b"%04d" % number * 50])
        number += 1
    world.produce([b"the last"])
    return world


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_missing_middle_segment_is_reported_and_the_rest_served(checkpointed: bool) -> None:
    with many_segments() as world:
        if checkpointed:
            world.checkpoint()
        before = messages(world.store)
        world.settle()
        world.kill()
        world.disk.remove(segments(world)[1])
        store = world.open()
        assert verdicts(store.findings) == [(ROTTEN, "missing")]
        after = messages(store)
        assert after.items() <= before.items()
        assert after[max(before)] == b"the last"
        assert 0 in after


def test_a_missing_segment_is_reported_when_the_checkpoint_ends_exactly_behind_it() -> None:
    """Found in review: a checkpoint on a segment's edge let the segment before it vanish without a word."""
    with many_segments() as world:
        bases = [each.base for each in world.store.messages.log.segments]
        log_id = world.store.identity.messages_id
        world.kill()
        world.disk.remove(segments(world)[1])
        recovery = LogRecovery(world.disk, "messages", log_id, start=bases[2], vouched_end=bases[2], epoch=1)
        recovery.run()
        (found,) = recovery.findings
        assert (found.verdict, found.damage.start, found.damage.end) == (ROTTEN, bases[1], bases[2])


def test_a_lost_end_that_a_checkpoint_vouches_for_is_rot_and_its_place_stays_empty() -> None:
    with filled() as world:
        world.checkpoint()
        end = world.store.messages.log.committed_end
        world.kill()
        world.disk.chop(FIRST_MESSAGES, 200)
        store = world.open()
        assert verdicts(store.findings) == [(ROTTEN, "missing")]
        assert world.produce([b"new"], producer=2).first_sequence == 4
        assert store.messages.log.segments[-1].base == end
        assert messages(store) == {4: b"new"}
        assert messages(world.reopen()) == {4: b"new"}


@pytest.mark.parametrize("is_empty", [False, True])
def test_the_first_segment_may_be_missing_or_empty(is_empty: bool) -> None:
    with many_segments() as world:
        world.kill()
        first = segments(world)[0]
        before = messages_of(world)
        if is_empty:
            world.disk.chop(first, 0)
        else:
            world.disk.remove(first)
        after = messages(world.open())
        assert after.items() < before.items()
        assert after[max(before)] == b"the last"


def messages_of(world: World) -> dict[int, bytes]:
    found = messages(world.open())
    world.kill()
    return found


# --- stale and misplaced ---------------------------------------------------------------------------------------------


def test_a_record_of_an_older_epoch_at_the_tail_is_stale() -> None:
    with filled() as world:
        world.kill()
        log_id = world.store.identity.messages_id
        world.open()
        world.settle()
        world.kill()
        whole = content(world.disk, FIRST_MESSAGES)
        body = batch_of([b"from the past"], producer=7)
        old = RecordHeader(RecordKind.DATA, 1, len(whole), len(whole), 1, 4, 1, 1, len(body), checksum(body))
        put(world.disk, FIRST_MESSAGES, whole + record.pack_header(old, log_id) + body)
        store = world.open()
        assert verdicts(store.findings) == [(TORN, "stale")]
        assert len(messages(store)) == 4


def test_swapped_segments_are_misplaced() -> None:
    with many_segments(4) as world:
        before = messages(world.store)
        world.kill()
        second, third = segments(world)[1:3]
        one, other = content(world.disk, second), content(world.disk, third)
        put(world.disk, second, other)
        put(world.disk, third, one)
        store = world.open()
        assert {why for _, why in verdicts(store.findings)} == {"misplaced"} or (ROTTEN, "misplaced") in verdicts(
            store.findings
        )
        assert messages(store).items() < before.items()
        assert (content(world.disk, second), content(world.disk, third)) == (other, one)


def test_a_segment_of_another_log_is_misplaced() -> None:
    with many_segments(3) as world, World("other", options=SMALL) as other:
        for number in range(30):
            other.produce([b"foreign %d" % number * 10])
        world.kill()
        put(world.disk, segments(world)[1], content(other.disk, segments(other)[0]))
        store = world.open()
        assert (ROTTEN, "misplaced") in verdicts(store.findings)
        assert not any(b"foreign" in payload for payload in messages(store).values())


def test_a_payload_that_looks_like_a_record_is_never_taken_for_one() -> None:
    """Payloads may hold anything: records of other logs and of newer formats too, right behind damage."""
    likeness = record.pack_header(RecordHeader(RecordKind.DATA, 1, 0, 0, 9, 0, 1, 1, 0, 0), log_id=99)
    newer = bytearray(likeness[:-4])
    newer[4] = 2
    newer += checksum(bytes(newer)).to_bytes(4, "little")
    with filled() as world:
        world.produce([likeness * 3 + bytes(newer) * 3])
        world.produce([b"the last"])
        world.produce([b"and one to vouch"])
        world.kill()
        forged = next(each.header for each in log_records(world) if each.header.body_bytes > 400)
        world.disk.flip(FIRST_MESSAGES, (forged.position + 9) * 8)
        store = world.open()
        assert verdicts(store.findings) == [(ROTTEN, "unreadable header")]
        assert (store.findings[0].damage.start, store.findings[0].damage.end) == (forged.position, forged.end)
        assert b"the last" in messages(store).values()


# --- newer -----------------------------------------------------------------------------------------------------------


def of_version(header: bytes, version: int, at: int) -> bytes:
    """The header, as a newer version would have written it."""
    covered = bytearray(header[:-4])
    covered[at] = version
    return bytes(covered) + checksum(bytes(covered)).to_bytes(4, "little")


def everything(disk: SimDisk) -> dict[str, bytes]:
    return {
        name: content(disk, name)
        for directory in ("messages", "actions", "index", "checkpoints", "aside")
        for name in names(disk, directory)
    }


@pytest.mark.parametrize("name", [FIRST_MESSAGES, FIRST_ACTIONS])
@pytest.mark.parametrize("what", ["segment", "record"])
def test_a_newer_version_is_refused_and_nothing_is_touched(name: str, what: str) -> None:
    with filled() as world:
        world.kill()
        whole = content(world.disk, name)
        if what == "segment":
            whole = of_version(whole[: segment.HEADER_BYTES], 2, 8) + whole[segment.HEADER_BYTES :]
        else:
            at = segment.HEADER_BYTES
            end = at + record.HEADER_BYTES
            whole = whole[:at] + of_version(whole[at:end], 2, 4) + whole[end:]
        put(world.disk, name, whole)
        torn = FIRST_ACTIONS if name == FIRST_MESSAGES else FIRST_MESSAGES
        put(world.disk, torn, content(world.disk, torn) + b"torn")
        before = everything(world.disk)
        with pytest.raises(WrongDirectory, match="newer"):
            world.open()
        assert everything(world.disk) == before


# --- interrupted -----------------------------------------------------------------------------------------------------


def damaged_world(seed: int) -> World:
    """Rot, a torn tail over two segments, and views that have to be made again."""
    world = World(f"half-way {seed}", options=SMALL)
    for number in range(24):
        world.produce([b"%03d" % number * 60])
        world.act(ack(number, detail=b"x" * 100))
    for number in range(24, 27):
        world.send([b"%03d" % number * 60])
    world.settle()
    world.kill()
    newest = segments(world)[-1]
    world.disk.flip(segments(world)[0], 1_200 * 8)
    world.disk.chop(newest, len(content(world.disk, newest)) - 7)
    world.disk.remove(names(world.disk, "index")[0])
    return world


def test_recovery_killed_at_each_operation_arrives_at_the_same_log() -> None:
    with damaged_world(0) as world:
        world.disk = world.disk.crash()  # counts from zero
        world.open()
        operations = world.disk.operations
        expected = messages(world.store)
    assert operations > 10
    for nth in range(1, operations + 1):
        with damaged_world(0) as world:
            world.disk = world.disk.crash()
            world.disk.crash_after(nth)
            with pytest.raises(SimulatedPowerCut):
                world.open()
            world.crash()
            assert messages(world.open()) == expected, f"killed in operation {nth}"
            world.produce([b"goes on"], producer=2)


def test_the_synced_end_does_not_sink_when_the_records_that_name_it_are_cut() -> None:
    """Found in review: rot that reaches up to a torn tail was taken for a part of that tail by the second recovery."""
    with many_segments(3) as world:
        world.send([b"unconfirmed"])
        world.settle()
        world.kill()
        middle, last = segments(world)[1:3]
        base = segment.base_of(last.rpartition("/")[2])
        assert base is not None
        world.disk.remove(middle)
        # Of the last segment only the head is sound; it names an end that lies in the segment that is missing.
        head = content(world.disk, last)[: segment.HEADER_BYTES]
        named = base - 8
        epoch = RecordHeader(RecordKind.EPOCH, 0, base + segment.HEADER_BYTES, named, 1, 0, 1, 0, 0, checksum(b""))
        put(world.disk, last, head + record.pack_header(epoch, world.store.identity.messages_id))
        first = world.open()
        assert first.messages.log.segments[-1].base == named
        world.kill()
        second = world.open()
        assert second.messages.log.segments[-1].base == named
        assert (ROTTEN, "missing") in verdicts(second.findings)


def test_what_a_killed_process_left_unsynced_is_synced_before_it_counts() -> None:
    """Found in review: a producer that sent again after a kill was answered at once, by bytes that only the page cache
    had; a power cut then took what had been confirmed."""
    confirmed = 0
    for seed in range(40):
        with World(f"kill {seed}", options=ROOMY) as world:
            world.produce([b"first"])
            world.send([b"second"])
            for _ in range(seed % 5):
                world.sim.loop.run_until_complete(_a_while())
            world.kill()
            store = world.open()
            receipt = store.produce(ORDERS, batch_of([b"second"], first=1))
            if receipt.end <= store.messages.log.committed_end:  # it would be answered in this very turn
                confirmed += 1
                world.crash()
                assert messages(world.open()) == {0: b"first", 1: b"second"}
    assert confirmed > 5


async def _a_while() -> None:
    await asyncio.sleep(0.000_2)


def test_a_segment_without_a_record_is_begun_again() -> None:
    """Found in review: after a crash during a roll, the new segment went on without its table of subjects."""
    with many_segments(2) as world:
        world.kill()
        newest = segments(world)[-1]
        world.disk.chop(newest, segment.HEADER_BYTES)
        for name in names(world.disk, "checkpoints"):
            world.disk.remove(name)
        store = world.open()
        world.settle()
        found = records_of(world.disk, newest, store.identity.messages_id)
        assert [each.header.kind for each in found[:2]] == [RecordKind.SUBJECT, RecordKind.EPOCH]


def test_scanning_resumes_at_the_next_record_across_chunks() -> None:
    """A damaged header in front of a body larger than what is read at a time."""
    disk = SimDisk(SeededRng(0), lambda *_: None)
    large = bytes(5 * 1024 * 1024)
    parts, position = [], segment.HEADER_BYTES
    for body in (large, b"8 bytes."):
        header = RecordHeader(RecordKind.DATA, 1, position, 0, 1, 0, 1, 1, len(body), checksum(body))
        parts += [record.pack_header(header, 5), body]
        position = header.end
    disk.publish(FIRST_MESSAGES, [segment.pack_header(5, 0, 1), b"X", parts[0][1:], *parts[1:]])
    damage, sound = SegmentScan(disk.open(FIRST_MESSAGES), 0, segment.HEADER_BYTES, 5)
    assert damage.header is None
    assert isinstance(sound, record.Record)
    assert sound.body == b"8 bytes."
