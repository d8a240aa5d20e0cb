"""What was sent or cancelled is remembered for a while, and never sent again after that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway.errors import WrongDirectory
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, OPTIONS, SECOND_MS, Fate, World

SHORT = replace(OPTIONS, remembered_max=2)


def test_the_newest_are_remembered_and_the_memory_of_the_others_is_used_again() -> None:
    with World(options=SHORT) as world:
        ids = []
        for _ in range(200):
            ids += world.schedule([b"x"], [world.now_ms + 5])
            world.advance(60)
        world.advance(2 * SECOND_MS)
        assert len(world.broker.payloads) == 200
        assert world.engine.rows.end < 50
        assert world.decide(world.engine.cancel(ids[-1])) is Fate.ALREADY_DISPATCHED
        assert world.decide(world.engine.cancel(ids[0])) is Fate.UNKNOWN


def test_an_hour_is_remembered() -> None:
    with World() as world:
        (message_id,) = world.schedule([b"x"], [world.now_ms])
        world.advance(HOUR_MS // 2)
        assert world.decide(world.engine.cancel(message_id)) is Fate.ALREADY_DISPATCHED
        world.advance(HOUR_MS)
        world.advance(SECOND_MS)
        assert world.decide(world.engine.cancel(message_id)) is Fate.UNKNOWN


@pytest.mark.parametrize("end", ["close", "crash", "kill"])
@pytest.mark.parametrize("is_pictured", [True, False])
def test_what_is_forgotten_is_not_sent_again(end: str, is_pictured: bool) -> None:
    with World(f"{end} {is_pictured}", options=SHORT) as world:
        due_ms = world.now_ms + SECOND_MS
        ids = world.schedule([b"%d" % number for number in range(40)], [due_ms + 40 * each for each in range(40)])
        world.schedule([b"later"], [world.now_ms + 2 * HOUR_MS], producer=2)
        world.settle()
        world.decide(world.engine.cancel(ids[1]))
        for _ in range(30):
            world.advance(100)
        if is_pictured:
            world.engine.store.checkpoint()
            world.sleep(100)
        {"close": world.close, "crash": world.crash, "kill": world.kill}[end]()
        world.open()
        world.settle()
        assert world.engine.rows.pending == 1
        world.advance(3 * HOUR_MS)
        assert len(world.broker.payloads) == 40
        assert world.broker.payloads.count(b"later") == 1
        world.advance(DAY_MS)
        assert world.files == []


def test_the_dispatch_log_stays_small_and_is_missed_without_its_checkpoints() -> None:
    with World(options=SHORT) as world:
        for _ in range(400):
            world.schedule([b"x"], [world.now_ms])
            world.advance(20)
        for _ in range(4):
            world.engine.store.checkpoint()
            world.sleep(200)
        segments = [name for name in world.disk.listing("actions") if name.endswith(".log")]
        assert len(segments) <= 2
        assert len(world.broker.payloads) == 400
        world.reopen()
        world.advance(HOUR_MS)
        assert len(world.broker.payloads) == 400
        world.close()
        for name in world.disk.listing("checkpoints"):
            world.disk.remove(f"checkpoints/{name}")
        with pytest.raises(WrongDirectory, match="checkpoints"):
            world.open()


def test_a_row_that_went_with_its_bucket_and_is_used_again_is_remembered_anew() -> None:
    """Otherwise the new message is forgotten before a manifest covers it, and a start sends it once more."""
    with World() as world:
        (first,) = world.schedule([b"first"], [world.now_ms + HOUR_MS])
        world.settle()
        world.decide(world.engine.reschedule(first, world.now_ms + 20 * HOUR_MS))
        world.advance(4 * HOUR_MS)
        world.decide(world.engine.cancel(first))
        world.advance(50 * 60 * SECOND_MS)
        assert len(world.engine.rows) == 0, "its bucket is past, and was deleted"
        (second,) = world.schedule([b"second"], [world.now_ms])
        world.advance(SECOND_MS)
        world.advance(11 * 60 * SECOND_MS)
        assert world.decide(world.engine.cancel(second)) is Fate.ALREADY_DISPATCHED
        world.crash()
        world.open()
        world.advance(HOUR_MS)
        assert world.broker.payloads == [b"second"]
