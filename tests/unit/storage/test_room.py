"""Room: a full disk stops produce, not acks."""

from __future__ import annotations

import pytest

from fairway.errors import Code, Refused
from fairway.limits import KIB
from fairway.storage.store import StoreOptions
from tests.unit.storage.counting import CountingDisk
from tests.unit.storage.helpers import World, ack, messages, names

OPTIONS = StoreOptions(segment_bytes=64 * KIB, action_segment_bytes=16 * KIB, low_water_bytes=64 * KIB)
CAPACITY = 400 * KIB


def produce_until_refused(world: World) -> Code:
    for _ in range(1_000):
        try:
            world.produce([b"x" * 4_000])
        except Refused as refusal:
            return refusal.code
    raise AssertionError("the disk never filled")


def test_produce_closes_at_the_low_water_mark_and_acts_go_on() -> None:
    with World("room", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        assert produce_until_refused(world) is Code.READ_ONLY
        assert world.disk.free_bytes() < OPTIONS.low_water_bytes
        stored = len(messages(world.store))
        for number in range(200):
            world.act(ack(number, detail=b"d" * 100))
        assert len(messages(world.store)) == stored
        with pytest.raises(Refused) as caught:
            world.send([b"x"])
        assert caught.value.retry_after_ms is not None


def test_acts_find_their_reserved_room_on_a_disk_without_any() -> None:
    """The rest of the newest segment and the ballast: two segments' worth of acks."""
    with World("full", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        world.act(ack(0))
        fill_up(world)
        acted = act_until_refused(world)
        assert acted * 500 >= 1.5 * OPTIONS.action_segment_bytes
        assert not world.store.actions.has_ballast


def act_until_refused(world: World) -> int:
    """How many acts found room."""
    for number in range(1_000):
        try:
            world.act(ack(number, detail=b"d" * 400))
        except Refused as refusal:
            assert refusal.code is Code.READ_ONLY  # noqa: PT017
            return number
    raise AssertionError("the disk never filled")


def fill_up(world: World) -> None:
    world.disk.publish("filler", [bytes(world.disk.free_bytes())])
    assert world.disk.free_bytes() == 0


@pytest.mark.parametrize("cut", ["kill", "crash"])
def test_the_reserved_room_is_claimed_again_after_a_restart(cut: str) -> None:
    """Found in review: the newest segment's share was given up by a power cut, or a cut, and never claimed again."""
    with World("again", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        world.act(ack(0))
        world.settle()
        if cut == "kill":
            world.kill()
        else:
            world.crash()
        world.open()
        world.settle()
        fill_up(world)
        for number in range(40):
            world.act(ack(number, detail=b"d" * 400))


def test_produce_goes_on_when_room_returns(caplog: pytest.LogCaptureFixture) -> None:
    with World("returns", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        world.produce([b"a"])
        fill_up(world)
        assert produce_until_refused(world) is Code.READ_ONLY
        with pytest.raises(Refused):
            world.send([b"x"])
        assert ["nearly full" in line for line in caplog.messages] == [True], "said when it happens, and once"
        world.disk.remove("filler")
        world.sequences[1] = len(messages(world.store))
        world.produce([b"d"])
        assert "room again" in caplog.messages[-1]
        assert world.store.actions.has_ballast
        assert b"d" in messages(world.reopen()).values()


def test_produce_stays_closed_while_the_room_for_acts_is_not_safe() -> None:
    with World("ballast", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        fill_up(world)
        for number in range(45):  # into the ballast
            world.act(ack(number, detail=b"d" * 400))
        assert not world.store.actions.has_ballast
        world.disk.remove("filler")
        world.produce([b"open again"])
        assert world.store.actions.has_ballast


def test_a_refused_roll_leaves_no_file_open_and_none_behind() -> None:
    """Found in review: every refused act left an open descriptor."""
    with World("leak", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        world.kill()
        counting = CountingDisk(world.disk)
        world.open(disk=counting)
        world.act(ack(0))
        fill_up(world)
        act_until_refused(world)
        before, opened = names(world.disk, "actions"), counting.open_files
        for _ in range(5):
            with pytest.raises(Refused):
                world.act(ack(0, detail=b"d" * 400))
        assert (names(world.disk, "actions"), counting.open_files) == (before, opened)
        world.disk.remove("filler")
        world.act(ack(0, detail=b"d" * 400))


def test_a_store_opens_on_a_full_disk_for_reading() -> None:
    with World("full start", options=OPTIONS, capacity_bytes=CAPACITY) as world:
        world.produce([b"a"])
        world.close()
        fill_up(world)
        store = world.open()
        world.settle_undone()
        assert messages(store) == {0: b"a"}
        with pytest.raises(Refused):
            world.produce([b"b"])
