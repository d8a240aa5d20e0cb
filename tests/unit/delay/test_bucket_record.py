"""What a record of a bucket holds, and what can be known of it without opening its batch."""

from __future__ import annotations

import numpy as np
import pytest

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.schedule import bucket_record
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer
from fairway.delay.schedule.manifest import Calendar
from fairway.errors import RemoteProtocolError
from fairway.storage.record import Record, RecordHeader, RecordKind
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, ORDERS

NOW_MS = 1_700_000_000_000


def made(count: int = 3, **columns: object) -> bytes:
    payloads = [b"payload %d" % index for index in range(count)]
    return batch.encode(payloads, producer_id=9, first_sequence=5, created_ms=NOW_MS, **columns)  # type: ignore[arg-type]


def record(body: bytes, sequences: list[int]) -> Record:
    return Record(
        RecordHeader(RecordKind.SCHEDULE, 3, 64, 0, 0, sequences[0], NOW_MS, len(sequences), len(body), 0), body
    )


@pytest.mark.parametrize("sequences", [[4, 5, 6], [4, 9, 10]])
def test_a_piece_comes_back(sequences: list[int]) -> None:
    data = made()
    found = bucket_record.unpack(record(bucket_record.pack(ORDERS, np.array(sequences, np.uint64), data), sequences))
    assert (found.subject, found.subject_id, found.data) == (ORDERS, 3, data)
    assert found.sequences.tolist() == sequences


def test_sequences_that_follow_on_one_another_are_not_listed() -> None:
    runs, listed = (
        len(bucket_record.pack(ORDERS, np.array(each, np.uint64), made())) for each in ([4, 5, 6], [4, 5, 7])
    )
    assert listed - runs == 24


def test_the_index_is_what_the_batch_says() -> None:
    data = made(due_ms=[10, 0, 30], keys=["a", None, "b"], ids=[None, MessageId(77, 8), None])
    index, opened = bucket_record.index_of(data), batch.decode(data)
    assert index.due_ms.tolist() == [10, 0, 30]
    assert index.key.tolist() == [batch.key_hash("a"), 0, batch.key_hash("b")]
    assert list(zip(index.id_high.tolist(), index.id_low.tolist(), strict=True)) == opened.ids()
    plain = bucket_record.index_of(made())
    assert (plain.due_ms.tolist(), plain.key.tolist(), plain.id_low.tolist()) == ([0] * 3, [0] * 3, [5, 6, 7])


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, b"\x03\x00\x02\x00\x00\x00\x00\x00abc"])
def test_what_is_no_piece_is_refused(damage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        bucket_record.unpack(record(damage, [1]))


def test_a_piece_with_another_count_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="3"):
        bucket_record.unpack(record(bucket_record.pack(ORDERS, np.array([1, 2], np.uint64), made(3)), [1, 2]))


def test_a_part_of_a_batch_keeps_everything_but_its_place() -> None:
    data = made(
        4,
        keys=["a", None, "c", "d"],
        tags=[["x"], None, ["y", "z"], None],
        headers=[None, None, {"h": "1"}, None],
        created_deltas_ms=[0, 1, 2, 3],
    )
    letters = BatchComposer()
    letters.take(BatchArrays(data), np.array([2, 1]))
    part = batch.decode(letters.encode(9, 5, np.array([22, 11])))
    assert part.payloads == [b"payload 2", b"payload 1"]
    assert part.ids() == [MessageId(9, 7), MessageId(9, 6)]
    assert (part.keys(), part.tag_lists()) == (["c", None], [["y", "z"], []])
    assert part.header_maps() == [{"h": "1"}, {}]
    assert part.created_times_ms() == [NOW_MS + 2, NOW_MS + 1]
    assert part.due_times_ms() == [22, 11]


def test_the_same_messages_are_always_the_same_bytes() -> None:
    def taken(*runs: list[int]) -> bytes:
        letters, opened = BatchComposer(), BatchArrays(made(5, keys=list("abcde")))
        for run in runs:
            letters.take(opened, np.array(run))
        return letters.encode(1, 100)

    assert taken([0, 1], [2], [4]) == taken([0, 1, 2, 4])


def test_due_times_are_grouped_by_stretch() -> None:
    due_ms = np.array([0, NOW_MS + 1, NOW_MS + 90 * DAY_MS, NOW_MS + 2 * HOUR_MS, NOW_MS + 91 * DAY_MS])
    groups = {tuple(indices.tolist()) for _, indices in Calendar().sort(due_ms, NOW_MS)}
    assert groups == {(0, 1), (2, 4), (3,)}
