"""The dedupe window's answers: live, after a restart with a checkpoint, and rebuilt from the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway import batch, limits
from fairway.errors import Code, FairwayError, Refused
from fairway.names import Subject
from fairway.storage import dedupe
from fairway.storage.dedupe import DedupeWindow, PlaceTaken
from fairway.storage.message_log import AppendReceipt
from tests.unit.storage.helpers import BILLS, ORDERS, ROOMY, World, batch_of, messages


@pytest.fixture(params=["live", "with checkpoint", "rebuilt"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A store in which producer 1 has stored 0..1 and 2..4 in epoch 3, as three kinds of memory know it."""
    with World("dedupe", options=ROOMY) as made:
        for first, payloads in ((0, [b"a", b"b"]), (2, [b"c", b"d", b"e"])):
            made.run(made.store.durable(offer(made, payloads, first=first)))
        if request.param == "with checkpoint":
            made.reopen()
        elif request.param == "rebuilt":
            made.kill()
            made.open()
        yield made


def offer(
    world: World, payloads: list[bytes], *, first: int, epoch: int = 3, subject: Subject = ORDERS
) -> AppendReceipt:
    return world.store.produce(subject, batch_of(payloads, first=first, epoch=epoch))


def answer(world: World, payloads: list[bytes], *, first: int, epoch: int = 3, subject: Subject = ORDERS) -> Code:
    end = world.store.messages.log.end
    with pytest.raises(Refused) as caught:
        offer(world, payloads, first=first, epoch=epoch, subject=subject)
    assert world.store.messages.log.end == end
    return caught.value.code


def test_what_goes_on_is_new(world: World) -> None:
    receipt = offer(world, [b"f"], first=5)
    assert (receipt.first_sequence, receipt.is_duplicate) == (5, False)


@pytest.mark.parametrize(("first", "payloads"), [(0, [b"a", b"b"]), (2, [b"c", b"d", b"e"])])
def test_the_same_again_is_answered_with_the_original_receipt(world: World, first: int, payloads: list[bytes]) -> None:
    end = world.store.messages.log.end
    receipt = offer(world, payloads, first=first)
    assert (receipt.first_sequence, receipt.count, receipt.is_duplicate) == (first, len(payloads), True)
    assert world.store.messages.log.end == end
    world.run(world.store.durable(receipt))
    assert len(messages(world.store)) == 5


@pytest.mark.parametrize(
    ("first", "payloads"),
    [(2, [b"c", b"d", b"other"]), (2, [b"c", b"d"]), (3, [b"d", b"e"]), (4, [b"e", b"f"]), (1, [b"b"])],
    ids=["other bytes", "shorter", "later", "overlapping the end", "inside"],
)
def test_any_other_overlap_is_a_conflict(world: World, first: int, payloads: list[bytes]) -> None:
    assert answer(world, payloads, first=first) is Code.SEQUENCE_CONFLICT


def test_another_subject_is_a_conflict(world: World) -> None:
    assert answer(world, [b"f"], first=5, subject=BILLS) is Code.SEQUENCE_CONFLICT
    world.produce([b"x"], BILLS, producer=2)
    assert answer(world, [b"f"], first=5, subject=BILLS) is Code.SEQUENCE_CONFLICT


def test_an_older_epoch_is_a_conflict(world: World) -> None:
    assert answer(world, [b"f"], first=5, epoch=2) is Code.SEQUENCE_CONFLICT


def test_a_newer_epoch_takes_the_stream_over(world: World) -> None:
    offer(world, [b"f"], first=5, epoch=4)
    assert answer(world, [b"g"], first=6, epoch=3) is Code.SEQUENCE_CONFLICT


def test_a_gap_is_refused(world: World) -> None:
    assert answer(world, [b"g"], first=6) is Code.SEQUENCE_GAP


def test_a_stream_that_resumes_and_is_not_remembered_is_unknown(world: World) -> None:
    with pytest.raises(Refused) as caught:
        world.store.produce(ORDERS, batch_of([b"x"], producer=99, first=1))
    assert caught.value.code is Code.UNKNOWN_PRODUCER


def test_the_original_receipt_is_given_while_the_original_is_in_flight() -> None:
    with World(options=ROOMY) as world:
        original = world.send([b"a"])
        again = world.store.produce(ORDERS, batch_of([b"a"]))
        assert again.is_duplicate
        assert (again.first_sequence, again.end) == (original.first_sequence, original.end)
        assert again.end > world.store.messages.log.committed_end
        world.run(world.store.durable(again))
        assert again.end <= world.store.messages.log.committed_end


def test_a_stream_outlives_the_deletion_of_its_messages_by_its_checkpoint() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.close()
        assert world.disk.listing("checkpoints")
        world.open()
        assert world.store.produce(ORDERS, batch_of([b"a"])).is_duplicate


# --- more on its way to the disk than is remembered ------------------------------------------------------------------


def flooded(world: World) -> AppendReceipt:
    """A stream of which more batches are on their way than its window holds."""
    world.produce([b"x"])
    firsts = range(1, limits.STREAM_BATCHES_MAX + 20)
    last = [world.store.produce(ORDERS, batch_of([b"x"], first=first)) for first in firsts][-1]
    assert world.store.messages.settled_end < last.end
    return last


def test_that_a_place_is_taken_is_not_said_before_it_is_certain_however_many_came_behind() -> None:
    """Two relays sent the same thousand rows: one was told of a conflict, deleted a row, and the broker died."""
    with World(options=ROOMY) as world:
        last = flooded(world)
        with pytest.raises(PlaceTaken) as caught:
            offer(world, [b"x"], first=2, epoch=0)
        said: list[FairwayError | None] = []
        world.store.when_taken(caught.value, lambda fault, _: said.append(fault))
        assert not said
        world.run(world.store.durable(last))
        assert said == [None]


def test_a_checkpoint_takes_no_place_for_stored_that_is_not() -> None:
    with World(options=ROOMY) as world:
        flooded(world)
        restarted = DedupeWindow.unpack(world.store._picture().streams)
        assert restarted.judge(header(1), 1) is None, "what comes next after the only one that is committed"
        with pytest.raises(PlaceTaken):
            restarted.judge(header(0), 1)


@given(
    st.lists(st.sampled_from([(ORDERS, 1), (ORDERS, 1), (ORDERS, 2), (BILLS, 3)]), min_size=1, max_size=40),
    st.integers(0, 40),
)
def test_what_is_undone_is_undone_to_the_place(sends: list[tuple[Subject, int]], kept: int) -> None:
    """However small the window is, and whether it is cut or pictured."""
    with World(options=ROOMY) as world, mock.patch.object(dedupe, "_WINDOW_BYTES_MAX", 3 * dedupe._STORED.size):
        next_: Counter[int] = Counter()
        position, expected = world.store.messages.log.end, Counter[int]()
        for number, (subject, producer) in enumerate(sends):
            sent = batch_of([b"x"] * (1 + number % 2), producer=producer, first=next_[producer])
            receipt = world.store.produce(subject, sent)
            next_[producer] += 1 + number % 2
            if number < kept:
                position, expected = receipt.end, next_.copy()
        views = world.store.messages.views
        pictured = DedupeWindow.unpack(views.dedupe.pack(position, partial(views.entries.first_places_from, position)))
        views.dedupe.cut(position, partial(views.entries.first_places_from, position))
        for window in (pictured, views.dedupe):
            assert {producer: stream.next for producer, stream in window._streams.items()} == expected
            assert all(stream.end_before(1) <= position for stream in window._streams.values())


# --- bounds ----------------------------------------------------------------------------------------------------------


def header(first: int, producer: int = 1) -> batch.BatchHeader:
    return batch.peek(batch_of([b"x"], producer=producer, first=first))


def note(window: DedupeWindow, first: int, producer: int = 1, at_ms: int = 0) -> None:
    of = header(first, producer)
    window.note(of, 1, first, (first + 1) * 100, at_ms)


def test_the_oldest_batches_of_a_stream_are_forgotten_and_then_a_conflict() -> None:
    window = DedupeWindow()
    for first in range(limits.STREAM_BATCHES_MAX + 1):
        note(window, first)
    assert window.judge(header(1), 1) is not None
    with pytest.raises(PlaceTaken) as caught:
        window.judge(header(0), 1)
    assert caught.value.code is Code.SEQUENCE_CONFLICT
    assert caught.value.end == 100, "when it is committed"


def test_the_stream_used_least_recently_makes_room() -> None:
    window = DedupeWindow()
    of = header(0)
    for producer in range(1, limits.STREAMS_MAX + 1):
        named = msgspec.structs.replace(of, producer_id=producer)
        window.note(named, 1, 0, 100, 0)
    note(window, 1, 1)
    note(window, 0, limits.STREAMS_MAX + 1)
    assert len(window) == limits.STREAMS_MAX
    assert window.judge(header(1, 1), 1) is not None
    with pytest.raises(Refused) as caught:
        window.judge(header(1, 2), 1)
    assert caught.value.code is Code.UNKNOWN_PRODUCER


def test_idle_streams_are_forgotten_after_days() -> None:
    window = DedupeWindow()
    note(window, 0, 1, at_ms=0)
    note(window, 0, 2, at_ms=5_000)
    window.expire(limits.STREAM_IDLE_MS_MAX + 1)
    assert len(window) == 1
    window.expire(limits.STREAM_IDLE_MS_MAX + 5_001)
    assert len(window) == 0


def test_idle_streams_leave_with_a_checkpoint() -> None:
    with World(options=ROOMY) as world:
        world.produce([b"a"])
        world.run(asyncio.sleep(limits.STREAM_IDLE_MS_MAX / 1_000 + 1))
        world.reopen()
        with pytest.raises(Refused) as caught:
            world.send([b"b"])
        assert caught.value.code is Code.UNKNOWN_PRODUCER


def test_a_cut_forgets_exactly_what_lies_above_it() -> None:
    window = DedupeWindow()
    for first in range(4):
        note(window, first)
    note(window, 0, producer=2)
    window.cut(200, dict)
    assert window.judge(header(1), 1) is not None
    assert window.judge(header(2), 1) is None
    assert DedupeWindow.unpack(window.pack(1 << 40, dict)).judge(header(2), 1) is None


def test_a_picture_shows_only_what_is_committed() -> None:
    window = DedupeWindow()
    for first in range(4):
        note(window, first)
    seen = DedupeWindow.unpack(window.pack(200, dict))
    assert seen.judge(header(1), 1) is not None
    assert seen.judge(header(2), 1) is None
    with pytest.raises(Refused):
        seen.judge(header(3), 1)
