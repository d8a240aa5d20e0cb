"""A catalogue says what its pieces say, and a start that reads it knows what a start that reads them knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fairway.delay.schedule import bucket_file
from fairway.delay.schedule.bucket_file import Draft
from fairway.delay.schedule.bucket_record import BucketIndex
from fairway.errors import RemoteProtocolError
from tests.unit.delay.helpers import BILLS, DAY_MS, OPTIONS, ORDERS, World
from tests.unit.storage.helpers import content

FEW = replace(OPTIONS, catalogue_messages=4)


def numbers(*values: int) -> BucketIndex:
    column = np.array(values, np.uint64)
    return BucketIndex(column.astype(np.int64), column + 1, column + 2, column + 3)


def packed() -> bytes:
    draft = Draft()
    draft.add(500, BILLS, 2, np.array([9], np.uint64), numbers(30))
    draft.add(100, ORDERS, 1, np.array([4, 7], np.uint64), numbers(10, 20))
    draft.add(900, ORDERS, 1, np.array([8], np.uint64), numbers(40))
    draft.cut(900)  # a full disk undid it
    return draft.pack(64, 80)


def test_a_catalogue_comes_back_in_the_order_of_its_pieces() -> None:
    found = bucket_file.unpack(packed())
    assert (found.previous_at, found.start, found.names) == (64, 80, {1: ORDERS, 2: BILLS})
    assert (found.positions.tolist(), found.subject_ids.tolist(), found.counts.tolist()) == ([100, 500], [1, 2], [2, 1])
    assert found.sequences.tolist() == [4, 7, 9]
    assert [each.tolist() for each in found.columns] == [[10, 20, 30], [11, 21, 31], [12, 22, 32], [13, 23, 33]]


@pytest.mark.parametrize("size", [0, 8, 40, -8])
def test_one_that_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        bucket_file.unpack(packed()[:size])


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("end", ["close", "crash", "kill"])
def test_a_start_knows_everything_again(end: str, is_damaged: bool) -> None:
    with World(f"{end} {is_damaged}", options=FEW) as world:
        due_ms = world.now_ms + 40 * DAY_MS
        ids = []
        for number in range(30):
            ids += world.schedule([b"%d" % number], [due_ms + number], keys=[f"k-{number}"])
            if number % 3 == 0:
                world.settle()
        world.settle()
        world.decide(world.engine.cancel(ids[3]))
        world.decide(world.engine.reschedule(ids[4], due_ms + 50))
        world.engine.log.publish()
        world.sleep(50)
        (file,) = list(world.engine.log)
        at = file.catalogue_at
        assert at
        {"close": world.close, "crash": world.crash, "kill": world.kill}[end]()
        if is_damaged:
            world.disk.flip(f"schedule/{world.files[0]}", (at + 100) * 8)
        world.open()
        world.settle()
        page = world.run(world.engine.page(world.engine.filter()))
        expected = [*ids[:3], *ids[5:], ids[4]]
        assert [each.id for each in page.messages] == expected
        assert len(world.engine.damaged) == is_damaged
        world.advance(41 * DAY_MS)
        world.advance(DAY_MS)
        assert sorted(world.broker.payloads) == sorted(b"%d" % n for n in range(30) if n != 3)


def test_the_contents_of_what_is_catalogued_are_not_read_by_a_start() -> None:
    with World(options=FEW) as world:
        world.schedule([b"first", b"x", b"x", b"x"], [world.now_ms + 40 * DAY_MS] * 4)
        world.settle()
        world.close()
        name = f"schedule/{world.files[0]}"
        world.disk.flip(name, content(world.disk, name).index(b"first") * 8)
        world.open()
        world.settle()
        assert (world.engine.damaged, world.engine.repairs.repaired) == ([], 0)
        assert world.engine.rows.pending == 4
        for _ in range(5):
            world.advance(9 * DAY_MS)
        assert (world.engine.damaged, world.engine.repairs.repaired) == ([], 1)  # when it was needed
        assert world.broker.payloads == [b"first", b"x", b"x", b"x"]


@pytest.mark.parametrize("is_in_message_log", [True, False])
def test_the_log_tells_of_damaged_records_that_are_repaired_or_lost(
    caplog: pytest.LogCaptureFixture, is_in_message_log: bool
) -> None:
    with World(options=OPTIONS) as world:
        world.schedule([b"first", b"x", b"x"], [world.now_ms + 40 * DAY_MS] * 3)
        world.settle()
        world.close()
        names = [f"schedule/{world.files[0]}"]
        if not is_in_message_log:
            names.append("messages/00000000000000000000.log")
        for name in names:
            world.disk.flip(name, content(world.disk, name).index(b"first") * 8)
        world.open()
        world.settle()
        for _ in range(5):
            world.advance(9 * DAY_MS)
        (told,) = [each for each in caplog.records if each.name == "fairway.delay"]
        assert names[0] in told.getMessage()
        if is_in_message_log:
            assert "was damaged, and is repaired" in told.getMessage()
        else:
            assert "3 messages are lost" in told.getMessage()
            assert told.levelname == "ERROR"
        assert len(world.engine.damaged) != is_in_message_log
