"""The two logs of a store under pressure: rolls, full disks, faults, bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from fairway import limits
from fairway.errors import Code, InvariantViolated, Refused, RemoteProtocolError, StorageFault
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage.record import RecordKind
from fairway.storage.store import Store, StoreOptions
from tests.unit.storage.helpers import (
    BILLS,
    FIRST_MESSAGES,
    ORDERS,
    ROOMY,
    SMALL,
    World,
    ack,
    batch_of,
    content,
    descriptors,
    messages,
    names,
    records_of,
)


def refused(world: World, payloads: list[bytes]) -> Code:
    with pytest.raises(Refused) as caught:
        world.produce(payloads)
    return caught.value.code


# --- appending -------------------------------------------------------------------------------------------------------


def test_sequences_count_per_subject() -> None:
    with World(options=ROOMY) as world:
        receipts = [
            world.produce([b"a", b"b"], ORDERS, producer=1),
            world.produce([b"c"], BILLS, producer=2),
            world.produce([b"d"], ORDERS, producer=1),
        ]
        assert [each.first_sequence for each in receipts] == [0, 0, 2]
        assert messages(world.store, ORDERS) == {0: b"a", 1: b"b", 2: b"d"}
        assert messages(world.store, BILLS) == {0: b"c"}


def test_nothing_is_shown_before_it_is_committed() -> None:
    with World(options=ROOMY) as world:
        receipt = world.send([b"a"])
        assert messages(world.store) == {}
        world.run(world.store.durable(receipt))
        assert messages(world.store) == {0: b"a"}


def test_a_batch_that_breaks_its_format_is_not_appended() -> None:
    with World(options=ROOMY) as world:
        end = world.store.messages.log.end
        data = bytearray(batch_of([b"x"]))
        data[-1] ^= 1
        with pytest.raises(RemoteProtocolError):
            world.store.produce(ORDERS, bytes(data))
        assert world.store.messages.log.end == end


def test_append_times_never_decrease_when_the_wall_clock_jumps_back() -> None:
    with World(options=ROOMY) as world:
        first = world.produce([b"a"])
        world.clock.jump(-3_600_000)
        second = world.produce([b"b"])
        assert second.appended_ms >= first.appended_ms
        world.reopen()
        assert world.produce([b"c"]).appended_ms >= second.appended_ms
        world.clock.jump(7_200_000)
        assert second.appended_ms <= world.produce([b"d"]).appended_ms < second.appended_ms + 3_000_000, "not at once"
        world.run(asyncio.sleep(60))
        assert world.produce([b"e"]).appended_ms > second.appended_ms + 3_000_000


def test_every_segment_opens_with_the_table_of_subjects() -> None:
    with World(options=SMALL) as world:
        world.produce([b"once"], BILLS, producer=2)
        for number in range(30):
            world.produce([b"%d" % number * 100])
        files = [name for name in names(world.disk, "messages") if name != FIRST_MESSAGES]
        assert len(files) >= 2
        for name in files:
            assert len(content(world.disk, name)) <= SMALL.segment_bytes
            first = records_of(world.disk, name, world.store.identity.messages_id)[0]
            assert first.header.kind == RecordKind.SUBJECT
            assert b"orders" in first.body
            assert b"bills" in first.body


def test_a_batch_larger_than_a_segment_has_one_of_its_own() -> None:
    with World(options=SMALL) as world:
        world.produce([b"small"])
        world.produce([b"x" * 10_000])
        world.produce([b"small"])
        assert [len(payload) for payload in messages(world.reopen()).values()] == [5, 10_000, 5]


def test_a_record_holds_at_most_what_its_reader_accepts() -> None:
    with World(options=ROOMY) as world, pytest.raises(Refused) as caught:
        world.store.messages.log.append(RecordKind.DATA, bytes(limits.BATCH_RAW_BYTES_MAX + 2 * limits.MIB), 0)
    assert caught.value.code is Code.TOO_LARGE


def test_a_body_that_no_reader_would_accept_is_not_written() -> None:
    with World(options=ROOMY) as world, pytest.raises(InvariantViolated):
        world.store.messages.log.append(RecordKind.DATA, b"seven b", 0)


def test_too_many_unsynced_bytes_are_busy() -> None:
    with World(options=StoreOptions(low_water_bytes=0)) as world:
        large = bytes(limits.BATCH_RAW_BYTES_MAX // 2)
        for _ in range(2):
            world.send([large])
        with pytest.raises(Refused) as caught:
            world.send([large])
        assert (caught.value.code, caught.value.retry_after_ms) == (Code.BUSY, 50)
        world.settle()
        world.produce([b"after"])


# --- reading ---------------------------------------------------------------------------------------------------------


def test_reading_stops_at_the_bounds_and_always_gives_one() -> None:
    with World(options=ROOMY) as world:
        for number in range(6):
            world.send([b"%d" % number] * 10)
        world.settle()

        def counts(messages_max: int, bytes_max: int) -> list[int]:
            found = world.store.messages.read(1, 0, messages_max=messages_max, bytes_max=bytes_max)
            return [each.entry.count for each in found]

        assert counts(25, 1 << 20) == [10, 10]
        assert counts(1, 1 << 20) == [10]
        assert counts(1_000, 1) == [10]
        assert counts(1_000, 1 << 20) == [10] * 6


def test_a_reader_passes_over_damaged_batches() -> None:
    """Found in review: a reader with a small bound was told that there was nothing, for ever."""
    with World(options=ROOMY) as world:
        for number in range(5):
            world.produce([b"message %d" % number])
        data = [each.header for each in records_of(world.disk, FIRST_MESSAGES, world.store.identity.messages_id)]
        for header in [each for each in data if each.kind == RecordKind.DATA][1:4]:
            world.disk.flip(FIRST_MESSAGES, header.body_at * 8)
        (found,) = world.store.messages.read(1, 1, messages_max=1, bytes_max=1)
        assert found.entry.first_sequence == 4
        assert len(world.store.rotten) == 3


def test_an_index_that_points_elsewhere_yields_no_wrong_payload() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"], ORDERS, producer=1)
        world.produce([b"b"], BILLS, producer=2)
        entries = world.store.messages.views.entries
        (of_bills,) = entries.entries(2, 0, 1 << 40)
        entries.append(1, msgspec.structs.replace(of_bills, first_sequence=1))
        assert messages(world.store, ORDERS) == {0: b"a"}
        assert len(world.store.rotten) == 1


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_undoes_exactly_what_was_not_committed() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"kept"])
        before = world.store.messages.log.end
        world.disk.fail_write()
        assert refused(world, [b"undone"]) is Code.READ_ONLY
        assert world.store.messages.log.end == before
        world.sequences[1] = 1
        assert world.produce([b"again"]).first_sequence == 1
        assert messages(world.store) == {0: b"kept", 1: b"again"}
        assert messages(world.reopen()) == {0: b"kept", 1: b"again"}


def test_a_full_disk_undoes_a_subject_that_was_introduced_in_vain() -> None:
    with World(options=ROOMY) as world:
        world.settle()
        world.disk.fail_write()
        assert refused(world, [b"undone"]) is Code.READ_ONLY
        assert world.store.messages.views.subjects.find(ORDERS) is None
        world.sequences.clear()
        world.produce([b"stored"])
        assert messages(world.reopen()) == {0: b"stored"}


def test_a_full_disk_undoes_segments_that_were_begun_in_vain() -> None:
    """Found in review: the undone segment stayed on the list of those to seal, and came back as entries that were
    there twice."""
    with World(options=SMALL) as world:
        world.produce([b"x" * 500])
        world.disk.fail_write()
        for _ in range(20):
            world.send([b"y" * 500])
        world.settle_undone()
        assert [each.base for each in world.store.messages.log.segments] == [0]
        assert names(world.disk, "messages") == [FIRST_MESSAGES]
        world.sequences[1] = 1
        for number in range(30):
            world.produce([b"%02d" % number * 250])
        expected = {0: b"x" * 500} | {number + 1: b"%02d" % number * 250 for number in range(30)}
        assert messages(world.store) == expected
        world.settle()
        for name in names(world.disk, "index"):
            world.disk.flip(name, 8 * 70)
        assert messages(world.reopen()) == expected


def test_a_duplicate_of_an_undone_batch_is_told_the_same() -> None:
    with World(options=ROOMY) as world:
        world.settle()
        world.disk.fail_write()
        original = world.send([b"a"])
        again = world.store.produce(ORDERS, batch_of([b"a"]))
        assert again.is_duplicate
        assert again.end == original.end
        for receipt in (original, again):
            with pytest.raises(Refused, match="nothing was appended"):
                world.run(world.store.durable(receipt))


def test_the_epoch_is_opened_again_if_a_full_disk_undid_it() -> None:
    """Found in review: the records of that life followed without the record that opens their epoch."""
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.close()
        world.disk.fail_write()
        world.disk.fail_write()
        store = world.open()
        world.settle_undone()
        world.produce([b"b"])
        world.act(ack(1))
        found = records_of(world.disk, FIRST_MESSAGES, store.identity.messages_id)
        assert [each.header.epoch for each in found if each.header.kind == RecordKind.EPOCH] == [1, 2]
        epochs = [each.header.epoch for each in found]
        assert epochs == sorted(epochs)


# --- a failed sync ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", ["messages", "actions"])
def test_a_failed_sync_stops_both_logs(log: str) -> None:
    with World(options=ROOMY) as world:
        world.produce([b"before"])
        world.disk.fail_sync()
        attempts = (lambda: world.produce([b"lost"]), lambda: world.act(ack(0)))
        first = attempts[log == "actions"]
        for attempt in (first, *attempts):
            with pytest.raises(StorageFault, match="sync"):
                attempt()
        assert messages(world.store) == {0: b"before"}


def test_after_a_failed_sync_nothing_that_was_answered_is_lost() -> None:
    with World("poison", options=ROOMY) as world:
        world.produce([b"before"])
        world.disk.fail_sync()
        with pytest.raises(StorageFault):
            world.produce([b"unknown"])
        world.crash()
        assert messages(world.open())[0] == b"before"


# --- files -----------------------------------------------------------------------------------------------------------


def test_few_segments_are_kept_open(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        disk = RealDisk(tmp_path / "data", post=loop.call_soon_threadsafe)
        store = Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=SMALL)
        for number in range(limits.OPEN_SEGMENTS_MAX + 30):
            receipt = store.produce(ORDERS, batch_of([b"%03d" % number * 1_300], first=number))
            await store.durable(receipt)
        assert len(messages(store)) == limits.OPEN_SEGMENTS_MAX + 30
        count = len(store.messages.log.segments)
        opened = sum(1 for target in descriptors() if "/messages/" in target)
        await store.close()
        return count, opened

    count, opened = asyncio.run(scenario())
    assert count > limits.OPEN_SEGMENTS_MAX
    assert opened <= limits.OPEN_SEGMENTS_MAX
    assert not any(str(tmp_path) in target for target in descriptors())
