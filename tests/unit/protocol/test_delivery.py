"""Pages: compressed until somebody reads a message, decoded within a budget, checked for damage at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from fairway import batch, limits
from fairway.errors import RemoteProtocolError
from fairway.groups import GroupConfig
from fairway.groups.config import TagFilter
from fairway.protocol.delivery import DecodedBatches, LazyBatch
from tests.support.mini_broker import MiniBroker
from tests.unit.batch.forge import forge, ints
from tests.unit.protocol.consuming_stage import Stage, payloads

KIB = limits.KIB


def data_of(*sent: bytes, first: int = 0, keys: Sequence[str] | None = None) -> bytes:
    return batch.encode(
        list(sent), producer_id=7, first_sequence=first, created_ms=1, keys=keys, codec=batch.Codec.ZSTD
    )


def pages_of(decoded: DecodedBatches, count: int) -> list[LazyBatch]:
    """Each of a little more than 1 KiB."""
    return [LazyBatch(data_of(b"%d" % number * KIB, first=number), number, 1, decoded) for number in range(count)]


def test_a_page_is_decoded_when_its_batch_is_first_read() -> None:
    [page] = pages_of(DecodedBatches(), 1)
    assert (len(page), page.end_sequence, page.is_decoded) == (1, 1, False)
    assert page.raw_bytes == page.header.raw_length > KIB
    assert page.batch.payloads == [b"0" * KIB]
    assert page.is_decoded
    assert page.batch is page.batch


def test_the_oldest_pages_make_room_and_are_decoded_again() -> None:
    pages = pages_of(DecodedBatches(3 * KIB), 6)
    for page in pages:
        assert page.batch
    assert [page.is_decoded for page in pages] == [False, False, False, False, True, True]
    assert pages[0].batch.payloads == [b"0" * KIB]
    assert [page.is_decoded for page in pages] == [True, False, False, False, False, True]


def test_one_page_fits_however_large() -> None:
    pages = pages_of(DecodedBatches(1), 2)
    for page in pages:
        assert page.batch.payloads
    assert [page.is_decoded for page in pages] == [False, True]


def test_pages_that_are_gone_do_not_fill_the_budget_for_ever() -> None:
    decoded = DecodedBatches(3 * KIB)
    for page in pages_of(decoded, 50):
        assert page.batch
    last = pages_of(decoded, 2)
    for page in last:
        assert page.batch
    assert [page.is_decoded for page in last] == [True, True]


def test_key_hashes_are_read_without_decoding() -> None:
    page = LazyBatch(data_of(b"x" * KIB, b"y", keys=["a", "b"]), 0, 1, DecodedBatches())
    assert page.key_hashes() == [batch.key_hash("a"), batch.key_hash("b")]
    assert page.tag_lists() == [[], []]
    assert not page.is_decoded


def test_damage_is_found_before_the_columns_are_decompressed() -> None:
    data = bytearray(data_of(b"x" * KIB))
    data[-9] ^= 1
    with pytest.raises(RemoteProtocolError, match="wrong checksum"):
        LazyBatch(bytes(data), 0, 1, DecodedBatches())


def test_many_threads_read_the_same_pages() -> None:
    pages = pages_of(DecodedBatches(3 * KIB), 8)
    wrong: list[int] = []

    def read() -> None:
        for _ in range(50):
            wrong.extend(at for at, page in enumerate(pages) if page.batch.payloads != [b"%d" % at * KIB])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(page.is_decoded for page in pages) <= 2


# --- in a consumer ----------------------------------------------------------------------------------------------------


def add(broker: MiniBroker, data: bytes) -> None:
    """Store a batch as it is."""
    broker.batches.append((broker.end, data))
    count = batch.peek(data).count
    broker.keys += [0] * count
    broker.end += count


def bombed(count: int, each: int = 4, **options: Any) -> Stage:
    """A consumer of so many batches of 4 KiB each, in as few answers as may be."""
    stage = Stage(**options)
    for number in range(count):
        add(stage.broker, data_of(*[b"%02d" % number * (2 * KIB // each)] * each, first=number * each))
    return stage


def test_one_take_hands_out_no_more_bytes_than_the_budget() -> None:
    stage = bombed(10, decoded_bytes_max=13 * KIB, prefetch_bytes=limits.MIB)
    taken = stage.begin()
    assert len(taken) == 3 * 4, "three batches of a little more than 4 KiB"
    assert stage.session.has_ready
    got = [taken]
    while more := stage.session.take_messages():
        got.append(more)
        stage.session.ack(more)
        stage.wire.pass_time(10)
    assert [each.sequence for some in got for each in some] == list(range(40))
    stage.session.ack(taken)
    stage.wire.pass_time(100)
    assert stage.broker.is_all_done()


def test_one_batch_is_handed_out_however_large() -> None:
    stage = bombed(3, decoded_bytes_max=1, prefetch_bytes=limits.MIB)
    assert [each.sequence for each in stage.begin()] == [0, 1, 2, 3]
    assert [each.sequence for each in stage.session.take_messages(2)] == [4, 5]
    assert [each.sequence for each in stage.session.take_messages()] == [6, 7]


def test_the_prefetch_counts_bytes_before_compression() -> None:
    stage = bombed(100, prefetch_bytes=4 * KIB, prefetch_messages=8)
    stage.wire.open()
    stage.wire.pass_time(1_000)
    assert stage.session.held_count == 8, "the mini broker answers by messages, once"
    taken = stage.session.take_messages(3)
    stage.session.ack(taken)
    stage.wire.pass_time(1_000)
    assert stage.session.held_count == 5, "what is left is more than 4 KiB, though it was sent as a few hundred bytes"


def test_a_message_says_who_it_is_after_its_batch_was_released() -> None:
    stage = bombed(6, decoded_bytes_max=1, prefetch_bytes=limits.MIB)
    taken = stage.begin()
    while more := stage.session.take_messages():
        taken += more
    assert len(taken) == 24
    assert [each.id.sequence for each in taken] == list(range(24))
    assert {each.key for each in taken} == {None}
    assert [each.payload[:2] for each in taken] == [b"%02d" % (at // 4) for at in range(24)]


def test_what_was_settled_in_part_comes_again_in_part() -> None:
    stage = bombed(5, decoded_bytes_max=5 * KIB, prefetch_bytes=limits.MIB)
    taken = stage.begin()
    stage.session.ack(taken[:2])
    taken[2].retry(after=0)
    taken[3].release()
    stage.wire.pass_time(100)
    got: list[int] = []
    for _ in range(20):
        more = stage.session.take_messages()
        got += [each.sequence for each in more]
        stage.session.ack(more)
        stage.wire.pass_time(100)
    assert sorted(got) == [2, 3, *range(4, 20)]
    assert [at for at in got if at >= 4] == list(range(4, 20))
    assert stage.broker.is_all_done()


def test_a_consumer_that_ends_hands_back_what_it_never_decoded() -> None:
    stage = bombed(5, decoded_bytes_max=5 * KIB, prefetch_bytes=limits.MIB)
    taken = stage.begin()
    assert [each.sequence for each in taken] == [0, 1, 2, 3]
    stage.session.ack(taken)
    stage.session.drain(stage.broker.monotonic_ns())
    stage.wire.settle_down()
    assert stage.session.is_finished
    assert stage.broker.held() == 0
    assert not stage.broker.is_all_done()


def test_pushed_messages_come_a_budget_at_a_time_and_all_of_them() -> None:
    stage = Stage(is_pushed=True, decoded_bytes_max=5 * KIB, prefetch_bytes=limits.MIB)
    for number in range(5):
        add(stage.broker, data_of(*[b"x" * KIB] * 4, first=4 * number))
    stage.begin()
    assert [each.sequence for each in stage.pushed] == list(range(20))


def test_a_group_that_filters_by_tags_decodes_within_the_budget() -> None:
    stage = Stage(GroupConfig(tags=TagFilter(("paid",))), prefetch_bytes=limits.MIB, decoded_bytes_max=5 * KIB)
    for number in range(5):
        tags = [("paid",), ("other",)]
        sent = [b"%d" % number * 2 * KIB] * 2
        data = batch.encode(
            sent, producer_id=7, first_sequence=2 * number, created_ms=1, tags=tags, codec=batch.Codec.ZSTD
        )
        add(stage.broker, data)
    got = stage.begin()
    while more := stage.session.take_messages():
        got += more
    assert payloads(got) == [b"%d" % number * 2 * KIB for number in range(5)]
    assert stage.session.counts.filtered == 5


def test_columns_that_are_not_sound_end_the_consumer() -> None:
    """The checksum is right, so the broker has stored what it should have refused: to ask again would not help."""
    stage = Stage()
    add(stage.broker, data_of(b"good"))
    add(stage.broker, forge(ints(1, 0)))
    assert stage.begin() == []
    assert isinstance(stage.session.error, RemoteProtocolError)
    assert stage.has_ended()
