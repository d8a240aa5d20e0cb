"""Retention: the plan as a table, and what the store does about it."""

from __future__ import annotations

import asyncio

import pytest

from fairway.errors import StorageFault
from fairway.runtime.disk import Completion
from fairway.storage import segment
from fairway.storage.retention import Policy, RetentionPlan, plan
from fairway.storage.segment import Segment
from fairway.storage.store import StoreOptions
from tests.unit.storage.counting import CountingDisk
from tests.unit.storage.helpers import BILLS, ORDERS, World, messages, names

FOUR = [Segment(0, 100, 10), Segment(100, 200, 20), Segment(200, 300, 30), Segment(300, 400, 40)]


@pytest.mark.parametrize(
    ("now_ms", "policy", "owed_from", "expected"),
    [
        (1_000, Policy(), None, RetentionPlan()),
        (35, Policy(age_ms_max=10), None, RetentionPlan((0, 100))),
        (30, Policy(age_ms_max=10), None, RetentionPlan((0,))),
        (1_000, Policy(age_ms_max=10), None, RetentionPlan((0, 100, 200))),
        (0, Policy(bytes_max=250), None, RetentionPlan((0, 100))),
        (0, Policy(bytes_max=400), None, RetentionPlan()),
        (0, Policy(bytes_max=0), None, RetentionPlan((0, 100, 200))),
        (35, Policy(age_ms_max=10), 150, RetentionPlan((0,))),
        (35, Policy(age_ms_max=10), 0, RetentionPlan()),
        (35, Policy(age_ms_max=10), 100, RetentionPlan((0,))),
        (35, Policy(age_ms_max=10), 400, RetentionPlan((0, 100))),
        (0, Policy(bytes_max=100, owed_bytes_max=250), 0, RetentionPlan((0, 100), (0, 100))),
        (0, Policy(owed_bytes_max=250), None, RetentionPlan((0, 100))),
        (0, Policy(bytes_max=100, owed_bytes_max=350), 100, RetentionPlan((0,))),
        (0, Policy(bytes_max=100, owed_bytes_max=250), 150, RetentionPlan((0, 100), (100,))),
    ],
)
def test_the_plan(now_ms: int, policy: Policy, owed_from: int | None, expected: RetentionPlan) -> None:
    assert plan(FOUR, now_ms, policy, owed_from) == expected


def test_only_a_prefix_goes() -> None:
    """A young segment in front of an old one: the clock jumped, or the old one is all rot. The log has no holes."""
    segments = [Segment(0, 100, 50), Segment(100, 200, 1), Segment(200, 300, 60)]
    assert plan(segments, 55, Policy(age_ms_max=10)) == RetentionPlan()


def test_nothing_goes_from_an_empty_log() -> None:
    assert plan([], 0, Policy(bytes_max=0)) == RetentionPlan()


def test_what_is_not_sealed_stays() -> None:
    assert plan(FOUR, 0, Policy(bytes_max=0), below=200) == RetentionPlan((0, 100))


# --- the store -------------------------------------------------------------------------------------------------------

OPTIONS = StoreOptions(
    segment_bytes=2_048, action_segment_bytes=4_096, low_water_bytes=0, retention=Policy(bytes_max=4_096)
)


def filled(seed: str = "retention") -> World:
    world = World(seed, options=OPTIONS)
    world.produce([b"bill"] * 7, BILLS, producer=2)
    for number in range(40):
        world.produce([b"%02d" % number * 100])
    world.settle()
    return world


def test_readers_of_what_is_gone_get_the_next() -> None:
    with filled() as world:
        before = messages(world.store)
        gone = world.store.retain()
        assert gone.doomed
        after = messages(world.store)
        assert after.items() < before.items()
        assert after == {sequence: before[sequence] for sequence in range(min(after), 40)}
        assert world.store.messages.views.entries.first_sequence(1) is None
        assert world.store.rotten == []


def test_files_go_only_after_a_checkpoint_says_so() -> None:
    with filled() as world:
        gone = world.store.retain()
        doomed = [segment.file_name("messages", base) for base in gone.doomed]
        assert set(doomed) <= set(names(world.disk, "messages"))
        world.settle()
        assert not set(doomed) & set(names(world.disk, "messages"))
        assert len(world.disk.listing("checkpoints")) == 1
        assert len(names(world.disk, "index")) == len(names(world.disk, "messages"))


class Clinging(CountingDisk):
    """A disk that cannot delete."""

    def remove_later(self, name: str, done: Completion) -> None:
        done(StorageFault(f"cannot remove {name}: Input/output error"))


def test_a_removal_that_fails_stops_the_rest() -> None:
    """Found in review: it was ignored, and the segments went although a checkpoint that speaks of them was left."""
    with filled() as world:
        world.checkpoint()
        world.checkpoint()
        world.kill()
        store = world.open(disk=Clinging(world.disk))
        world.settle()
        before = names(world.disk, "messages")
        assert store.retain().doomed
        world.run(asyncio.sleep(1))
        assert store.fault is not None
        assert set(before) <= set(names(world.disk, "messages"))


def test_names_and_sequences_survive_the_deletion_of_all_their_segments() -> None:
    for without_checkpoint in (False, True):
        with filled() as world:
            world.store.retain()
            world.settle()
            world.close()
            if without_checkpoint:
                for name in names(world.disk, "checkpoints"):
                    world.disk.remove(name)
            store = world.open()
            assert messages(store, BILLS) == {}
            assert world.produce([b"next bill"], BILLS, producer=3).first_sequence == 7
            assert world.produce([b"next order"], ORDERS, producer=4).first_sequence == 40
            assert store.findings == []


@pytest.mark.parametrize("after_ms", [each / 2 for each in range(30)])
def test_a_crash_in_between_leaves_what_was_or_what_will_be(after_ms: float) -> None:
    with filled(f"between {after_ms}") as world:
        before = messages(world.store)
        world.store.retain()
        world.run(asyncio.sleep(after_ms / 1_000))
        world.crash()
        store = world.open()
        after = messages(store)
        assert after.items() <= before.items()
        assert after == {sequence: before[sequence] for sequence in range(min(after), 40)}
        assert store.findings == []
        assert world.produce([b"next bill"], BILLS, producer=3).first_sequence == 7


def test_a_segment_that_is_not_sealed_yet_stays() -> None:
    """Found in review: what was dropped before its entries were sealed left entries that led nowhere."""
    with World(options=OPTIONS) as world:
        for number in range(40):
            world.send([b"%02d" % number * 100])
        assert world.store.retain().doomed == ()
        world.settle()
        assert len(messages(world.store)) == 40
        assert world.store.retain().doomed
        world.settle()
        assert messages(world.store)
        assert world.store.rotten == []


def test_a_segment_whose_records_have_all_rotted_is_not_taken_for_old() -> None:
    options = StoreOptions(
        segment_bytes=2_048, action_segment_bytes=4_096, low_water_bytes=0, retention=Policy(age_ms_max=60_000)
    )
    with World(options=options) as world:
        for number in range(20):
            world.produce([b"%02d" % number * 100])
        world.kill()
        first = names(world.disk, "messages")[0]
        for at in range(64, 1_800, 16):
            world.disk.flip(first, at * 8)
        store = world.open()
        assert store.findings
        assert store.retain().doomed == ()
        assert first in names(world.disk, "messages")
