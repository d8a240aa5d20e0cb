"""A copy: the master's bytes, the master's views, whatever happens on the way."""

from __future__ import annotations

from contextlib import suppress

import pytest

from fairway.errors import DiskFull, Misuse, RemoteProtocolError, WrongDirectory
from fairway.simulation.disk import SimDisk
from fairway.storage import record, segment
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability, Flusher
from fairway.storage.log import Damaged
from fairway.storage.log_copies import NO_MARK, ROTTEN_MARK
from fairway.storage.record import RecordHeader, RecordKind
from fairway.storage.recovery import DamageVerdict
from fairway.storage.store import Store, StoreOptions
from tests.simulation.checks import picture
from tests.simulation.planted import swapped
from tests.unit.storage.copies import Pair, bytes_of
from tests.unit.storage.helpers import BILLS, FIRST_MESSAGES, ORDERS, SMALL, batch_of, messages, records_of


def _fill(pair: Pair, count: int = 30) -> None:
    for number in range(count):
        pair.send([b"%d" % number * 80], *((ORDERS, 1) if number % 3 else (BILLS, 2)))
        pair.act(number)
        if number % 4 == 0:
            pair.wait(0.01)


def _same(pair: Pair) -> None:
    assert bytes_of(pair.copy) == bytes_of(pair.master)
    assert picture(pair.copy.store.messages.views) == picture(pair.master.store.messages.views)
    assert pair.copy.view.found == pair.master.view.found
    for subject in (ORDERS, BILLS):
        assert messages(pair.copy.store, subject) == messages(pair.master.store, subject)


def test_a_copy_is_the_same_bytes_and_the_same_views() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.settle()
        assert len(pair.master.store.messages.log.segments) > 2
        _same(pair)
        assert pair.copy.store.committed_ends() == pair.master.store.ends()
        assert pair.copy.store.identity[1:] == pair.master.store.identity[1:]
        assert pair.copy.store.identity.directory_id != pair.master.store.identity.directory_id


def test_a_copy_shows_nothing_that_is_not_committed() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.wait()
        pair.pass_on()
        pair.wait()
        assert messages(pair.copy.store) == {}
        assert pair.copy.store.ends() == pair.master.store.ends()
        pair.confirm()
        assert len(messages(pair.copy.store)) == 20


def test_a_copy_leaves_checkpoints_and_indexes_and_starts_from_them() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.settle()
        pair.copy.store.checkpoint()
        pair.wait()
        pair.copy.end()
        store = pair.copy.open(follows=True)
        assert (store.findings, store.remarks) == ([], [])
        assert store.committed_ends() == store.ends()
        _same(pair)


@pytest.mark.parametrize("how", [SimDisk.crash, SimDisk.crash_process])
def test_a_copy_goes_on_after_a_crash(how: object) -> None:
    with Pair() as pair:
        _fill(pair)
        pair.wait()
        pair.pass_on(chunks_max=5)
        pair.copy.end(SimDisk.crash if how is SimDisk.crash else SimDisk.crash_process)
        store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
        assert all(each.verdict is DamageVerdict.TORN for each in store.findings)
        pair.settle()
        _same(pair)


def test_a_copy_that_leads_goes_on_where_it_was() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.wait()
        pair.pass_on()  # still in the flusher when it comes to lead
        pair.master, pair.copy = pair.copy, pair.master
        with pytest.raises(Misuse, match="epoch 1 cannot begin"):
            pair.master.store.lead(1)
        pair.master.store.lead(5)
        assert pair.master.store.epoch == 5
        pair.send([b"under a new master"])
        pair.copy.abandon()
        pair.copy.open(follows=True)
        pair.settle()
        _same(pair)
        assert list(messages(pair.copy.store).values())[-1] == b"under a new master"
        assert pair.copy.store.epoch == 5
        assert pair.copy.store.messages.log.committed_epoch == 5


def test_bytes_that_do_not_fit_are_refused_whole() -> None:
    with Pair() as pair:
        _fill(pair, 6)
        pair.wait()
        chunk = pair.master.store.read_chunk(0, 0, 4_096)
        assert chunk is not None
        store, data = pair.copy.store, chunk.data
        turned = bytearray(data)
        turned[-1] ^= 1
        for base, position, given, why in [
            (0, 8, data, "do not follow on"),
            (64, 0, data, "no segment 64"),
            (0, 0, data[64:], "magic|header"),
            (0, 0, data[:-8], "cut short"),
            (0, 0, bytes(turned), "damaged body"),
            (0, 0, data[:64], "no record came"),
            (0, 0, b"", "header"),
        ]:
            with pytest.raises(RemoteProtocolError, match=why):
                store.follow(0, base, position, given)
        with pytest.raises(RemoteProtocolError):
            store.follow(1, 0, 0, data)
        assert (store.messages.log.end, len(store.messages.views.subjects), store.fault) == (0, 0, None)
        store.follow(0, *chunk)
        with pytest.raises(RemoteProtocolError, match="do not follow on"):
            store.follow(0, *chunk)
        pair.settle()
        _same(pair)


def test_an_epoch_never_goes_down() -> None:
    with Pair() as pair:
        _fill(pair, 6)
        pair.settle()
        log = pair.copy.store.messages.log
        old = record.pack_header(RecordHeader(RecordKind.EPOCH, 0, log.end, 0, 0, 0, 0, 0, 0, 0), log.log_id)
        with pytest.raises(RemoteProtocolError, match="epoch 0, after 1"):
            pair.copy.store.follow(0, log.segments[-1].base, log.end, old)


def test_a_directory_of_another_group_is_refused_and_an_unused_one_is_not() -> None:
    with Pair(opened=False) as pair:
        pair.master.open()
        unused = pair.copy.open(follows=True).identity  # before there is a group
        pair.copy.end()
        store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
        assert store.identity == DirectoryIdentity(unused.directory_id, *pair.master.store.identity[1:])
        pair.master.store.hold()
        _fill(pair, 3)
        pair.settle()
        pair.copy.end()
        with pytest.raises(WrongDirectory, match="choose an empty directory"):
            pair.copy.open(follows=True, adopt=DirectoryIdentity(0, 1, 2))


def test_a_full_disk_ends_a_copy_until_there_is_room() -> None:
    with Pair() as pair:
        _fill(pair, 10)
        pair.settle()
        before = pair.copy.store.ends()
        faults: list[object] = []
        pair.copy.store.on_fault = faults.append
        _fill(pair, 10)
        pair.wait()
        pair.copy.disk.fail_write()
        pair.pass_on()
        pair.wait()
        assert isinstance(pair.copy.store.fault, DiskFull)
        assert faults == [pair.copy.store.fault]
        with pytest.raises(DiskFull, match="make room"):
            pair.pass_on()
        assert pair.copy.store.ends()[0] >= before[0]
        pair.copy.disk.fail_write(0)
        pair.copy.abandon()
        pair.copy.open(follows=True)
        pair.settle()
        _same(pair)


def test_no_room_for_a_segment_ends_a_copy_with_nothing_half_taken() -> None:
    small = StoreOptions(segment_bytes=4_096, action_segment_bytes=4_096, low_water_bytes=0)
    with Pair(options=small, copy_bytes=30_000) as pair:
        for number in range(60):
            pair.send([b"%d" % number * 300])
        pair.wait()
        while pair.copy.store.fault is None:
            with suppress(DiskFull):
                pair.pass_on()
            pair.wait(0.1)
        assert isinstance(pair.copy.store.fault, DiskFull)
        pair.copy.abandon()
        store = pair.copy.open(follows=True)
        assert [each for each in store.findings if each.verdict is DamageVerdict.ROTTEN] == []
        ends = store.ends()
        assert (
            bytes_of(pair.copy).items()
            <= {
                name: data[: ends[0] - segment_base(name)] if name.startswith("messages") else data
                for name, data in bytes_of(pair.master).items()
            }.items()
        )


def segment_base(name: str) -> int:
    base = segment.base_of(name.rpartition("/")[2])
    assert base is not None
    return base


def test_chunks_are_whole_records_of_one_segment() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.wait()
        store = pair.master.store
        for bytes_max in (1, 100, 700, 1 << 20):
            at, joined = 0, b""
            while (chunk := store.read_chunk(0, at, bytes_max)) is not None:
                assert chunk.position == at
                joined += chunk.data
                at += len(chunk.data)
            assert at == store.ends()[0]
            assert joined == b"".join(data for name, data in bytes_of(pair.master).items() if "messages" in name)
        with pytest.raises(Damaged):
            store.read_chunk(0, 8, 100)


def test_marks_tell_records_apart() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.settle()
        store, log = pair.master.store, pair.master.store.messages.log
        own = records_of(pair.master.disk, FIRST_MESSAGES, log.log_id)
        places = [each.header.position for each in own]
        assert store.positions(0, 0, own[-1].header.end) == places
        assert store.tail_positions(0)[: len(places)] == places  # all is near the end
        marks = store.marks(0, [0, 8, *places, store.ends()[0], 1 << 40])
        assert [marks[0], marks[1], marks[-2], marks[-1]] == [NO_MARK] * 4
        assert len(set(marks[2:-2])) == len(places)
        assert store.marks(0, store.tail_positions(0)) == pair.copy.store.marks(0, store.tail_positions(0))


def test_a_rotten_record_is_no_difference() -> None:
    with Pair() as pair:
        _fill(pair)
        pair.settle()
        place = pair.master.store.tail_positions(0)[2]
        pair.master.disk.flip(FIRST_MESSAGES, (place + 3) * 8)
        with pytest.raises(Damaged):
            pair.master.store.read_chunk(0, place, 100)
        assert pair.master.store.marks(0, [place]) == [ROTTEN_MARK]


def test_the_first_records_of_old_segments_are_compared_too() -> None:
    roomy = StoreOptions(segment_bytes=1 << 20, action_segment_bytes=4_096, low_water_bytes=0)
    with Pair(options=roomy) as pair:
        for number in range(50):
            pair.send([b"%d" % number * 10_000 * 7])
        pair.settle()
        pair.run(pair.master.store.close())
        pair.master.end(SimDisk.crash_process)
        store = pair.master.open()
        found = store.tail_positions(0)
        bases = [each.base + segment.HEADER_BYTES for each in store.messages.log.segments]
        assert len(bases) > 2
        assert set(bases) <= set(found)
        assert found == sorted(found)
        assert found[-1] == store.positions(0, 0, store.ends()[0])[-1]
        assert len(found) < len(store.positions(0, 0, store.ends()[0]))


def test_a_copy_in_memory_syncs_until_it_leads() -> None:
    lazy = StoreOptions(SMALL.segment_bytes, SMALL.action_segment_bytes, 0, durability=Durability.MEMORY)
    with Pair(options=lazy) as pair:
        _fill(pair)
        pair.master.store.sync()
        pair.settle()
        assert pair.copy.store.ends() == pair.master.store.ends()
        pair.copy.store.lead(2)
        pair.wait()
        log = pair.copy.store.messages.log
        pair.copy.store.produce(ORDERS, _next_batch(pair))
        pair.wait()
        pair.copy.store.produce(ORDERS, _next_batch(pair))
        pair.wait()
        assert log.synced_end < log.flusher.written_end == log.end


def _next_batch(pair: Pair) -> bytes:
    first = pair.sequences[1]
    pair.sequences[1] = first + 1
    return batch_of([b"more"], producer=1, first=first)


# --- rounds ----------------------------------------------------------------------------------------------------------


def _torn_or_rotten(seed: int) -> list[DamageVerdict]:
    """A copy takes in what its master wrote with many syncs, and loses its power on the way."""
    with Pair(f"rounds {seed}") as pair:
        for number in range(20):
            pair.send([b"%d" % number * 150])
            pair.wait(0.01)
        pair.pass_on(bytes_max=1 << 20)
        pair.wait(0.000_1 * (seed % 40))
        pair.copy.end()
        store: Store = pair.copy.open(follows=True, adopt=pair.master.store.identity)
        return [each.verdict for each in store.findings]


def test_no_crash_of_a_copy_passes_for_rot() -> None:
    seen = [verdict for seed in range(40) for verdict in _torn_or_rotten(seed)]
    assert DamageVerdict.TORN in seen
    assert DamageVerdict.ROTTEN not in seen


def test_a_copy_that_merges_rounds_is_caught() -> None:
    with swapped(Flusher, "part", lambda *_: None):
        assert any(DamageVerdict.ROTTEN in _torn_or_rotten(seed) for seed in range(60))
