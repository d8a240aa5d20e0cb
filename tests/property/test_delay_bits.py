"""One flipped bit in any file of a delay server: it starts, `verify` sees it, and what is delivered is what was sent.

In the schedule log nothing is lost by it, as long as the message log has the messages. Elsewhere a decision or a name
may be lost; then the start refuses with a sentence, or the rest is served.
"""

from __future__ import annotations

import random

import pytest

from fairway.delay.schedule.repair import audit
from fairway.errors import FairwayError
from fairway.storage.survey import survey
from tests.unit.delay.helpers import DAY_MS, SECOND_MS, World
from tests.unit.storage.helpers import content

DIRECTORIES = ("messages", "actions", "index", "checkpoints", "schedule")
SENT = [b"%s %d" % (when, number) for when in (b"soon", b"day", b"month") for number in range(5)]


def written(world: World) -> None:
    """Some messages are delivered, others wait in several buckets."""
    for number in range(5):
        dues = [world.now_ms + wait_ms for wait_ms in (SECOND_MS, 2 * DAY_MS, 40 * DAY_MS)]
        world.schedule(SENT[number::5], dues, keys=["a", None, "b"])
    world.settle()
    world.advance(5 * SECOND_MS)
    assert sorted(world.broker.payloads) == SENT[:5]
    world.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_loses_nothing_of_the_schedule_and_delivers_nothing_wrong(seed: int) -> None:
    rng = random.Random(seed)
    with World(f"bits {seed}") as world:
        written(world)
        names = [f"{folder}/{name}" for folder in DIRECTORIES for name in sorted(world.disk.listing(folder))]
        names = [name for name in names if content(world.disk, name)]
        is_of_schedule = seed % 2 == 1
        name = rng.choice([each for each in names if each.startswith("schedule/") or not is_of_schedule])
        world.disk.flip(name, rng.randrange(8 * len(content(world.disk, name))))
        audited, looked = audit(world.disk), survey(world.disk, verify=True)
        assert audited.damages or audited.flaws or looked.damages or looked.flaws, f"nobody sees it in {name}"
        try:
            world.open()
        except FairwayError:
            assert not name.startswith("schedule/"), name
            world.disk = world.disk.beside()
            return
        world.advance(3 * DAY_MS)
        for _ in range(5):
            world.advance(9 * DAY_MS)
        assert set(world.broker.payloads) <= set(SENT), name
        if name.startswith("schedule/"):
            assert sorted(world.broker.payloads) == sorted(SENT), name
            assert audit(world.disk).flaws == []
