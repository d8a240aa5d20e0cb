"""A delay server and brokers, from a client's schedule to the message in its subject; whoever dies in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from fairway.delay.server import ServerOptions
from fairway.errors import FairwayError, Misuse, StorageFault
from fairway.names import Subject
from fairway.protocol.delay_messages import Fate
from tests.support.client import ConnectionEnded
from tests.unit.delay.helpers import OPTIONS
from tests.unit.delay.scene import PORT, Scene, staged

MINUTE_S = 60
HOUR_S = 3_600


@staged()
async def test_a_message_appears_when_it_is_due_and_once(scene: Scene) -> None:
    due_ms = scene.now_ms + 60_000
    ids = await scene.schedule([b"a", b"b"], after_s=60)
    await scene.sleep(59)
    assert await scene.payloads() == []
    await scene.sleep(60)
    found = await scene.stored()
    assert [each.payload for each in found] == [b"a", b"b"]
    assert [each.id for each in found] == ids
    assert all(due_ms <= each.appended_ms < due_ms + 100 for each in found)


@staged(is_embedded=True)
async def test_a_message_appears_behind_the_brokers_own_port(scene: Scene) -> None:
    await scene.schedule([b"a"], after_s=3)
    await scene.sleep(2)
    assert await scene.payloads() == []
    await scene.sleep(2)
    assert await scene.payloads() == [b"a"]


@staged(is_embedded=True)
async def test_what_is_past_due_goes_out_at_once(scene: Scene) -> None:
    await scene.schedule([b"a"], after_s=-HOUR_S)
    await scene.sleep(1)
    assert await scene.payloads() == [b"a"]


@staged()
async def test_a_clean_stop_keeps_what_is_pending(scene: Scene) -> None:
    await scene.schedule([b"near"], after_s=2 * MINUTE_S)
    await scene.schedule([b"far"], after_s=3 * HOUR_S)
    await scene.restart_delay()
    await scene.sleep(3 * MINUTE_S)
    assert await scene.payloads() == [b"near"]
    await scene.sleep(3 * HOUR_S)
    assert await scene.payloads() == [b"near", b"far"]


@staged()
async def test_a_broker_that_is_down_gets_its_messages_when_it_is_back(scene: Scene) -> None:
    scene.kill_broker("east")
    await scene.schedule([b"a", b"b"], after_s=5)
    await scene.sleep(MINUTE_S)
    assert scene.delay.engine.held_back == 2
    await scene.start_broker("east")
    await scene.sleep(10)
    assert sorted(await scene.payloads()) == [b"a", b"b"]


@staged()
async def test_a_broker_that_dies_while_messages_are_on_their_way_has_each_once(scene: Scene) -> None:
    for number in range(40):
        await scene.schedule([b"%d" % number], after_s=1 + number / 100)
    await scene.sleep(1.1)
    scene.kill_broker("east", is_power_cut=True)
    await scene.sleep(5)
    await scene.start_broker("east")
    await scene.sleep(20)
    assert sorted(await scene.payloads(), key=int) == [b"%d" % number for number in range(40)]


@staged("east", "west")
async def test_a_target_that_is_down_holds_back_nobody_else(scene: Scene) -> None:
    subjects = [f"subject-{number}" for number in range(12)]
    homes = {subject: scene.delay.dispatch_sender.target_of(Subject(subject)) for subject in subjects}
    assert set(homes.values()) == {"east", "west"}
    scene.kill_broker("west")
    for subject in subjects:
        await scene.schedule([subject.encode()], after_s=2, subject=subject)
    await scene.sleep(10)
    there = {subject: await scene.payloads(subject) for subject in subjects}
    assert there == {subject: [subject.encode()] if homes[subject] == "east" else [] for subject in subjects}
    await scene.start_broker("west")
    await scene.sleep(10)
    assert all([await scene.payloads(subject) == [subject.encode()] for subject in subjects])


@staged()
async def test_a_subject_that_takes_nothing_holds_back_nobody_else(scene: Scene) -> None:
    await scene.read_only("east", is_on=True, subject="closed")
    await scene.schedule([b"a"], after_s=1, subject="closed")
    await scene.schedule([b"b"], after_s=1, subject="open")
    await scene.sleep(MINUTE_S)
    assert (await scene.payloads("closed"), await scene.payloads("open")) == ([], [b"b"])
    await scene.read_only("east", is_on=False, subject="closed")
    await scene.sleep(MINUTE_S)
    assert await scene.payloads("closed") == [b"a"]


# --- cancel and reschedule --------------------------------------------------------------------------------------------


@staged(is_embedded=True)
async def test_what_is_cancelled_never_appears(scene: Scene) -> None:
    first, second = await scene.schedule([b"a", b"b"], after_s=30)
    assert (await scene.cancel(first)).fate is Fate.CANCELLED
    await scene.sleep(MINUTE_S)
    assert await scene.payloads() == [b"b"]
    assert (await scene.cancel(second)).fate is Fate.ALREADY_DISPATCHED


@staged(is_embedded=True)
async def test_what_is_rescheduled_appears_at_its_new_time(scene: Scene) -> None:
    later, sooner = await scene.schedule([b"later", b"sooner"], after_s=60)
    await scene.reschedule(later, 120)
    await scene.reschedule(sooner, 3)
    await scene.sleep(5)
    assert await scene.payloads() == [b"sooner"]
    await scene.sleep(100)
    assert await scene.payloads() == [b"sooner"]
    await scene.sleep(30)
    assert await scene.payloads() == [b"sooner", b"later"]


@staged()
async def test_a_cancel_that_races_with_the_dispatch_is_told_the_truth(scene: Scene) -> None:
    fates: Counter[Fate] = Counter()
    cancelled: set[bytes] = set()
    for number in range(60):
        payload = b"%d" % number
        [message_id] = await scene.schedule([payload], after_s=0.2)
        await scene.sleep(0.15 + number / 500)
        decided = await scene.cancel(message_id)
        fates[decided.fate] += 1
        if decided.fate is Fate.CANCELLED:
            cancelled.add(payload)
    await scene.sleep(5)
    everybody = {b"%d" % number for number in range(60)}
    assert set(await scene.payloads()) == everybody - cancelled
    assert len(await scene.payloads()) == 60 - len(cancelled)
    assert min(fates[Fate.CANCELLED], fates[Fate.ALREADY_DISPATCHED]) > 0


# --- clocks -----------------------------------------------------------------------------------------------------------


@staged()
async def test_a_clock_that_is_set_back_sends_nothing_early_and_nothing_twice(scene: Scene) -> None:
    await scene.schedule([b"a"], after_s=10)
    await scene.schedule([b"b"], after_s=100)
    due_ms = scene.now_ms + 100_000
    await scene.sleep(20)
    scene.clock.jump(-3_600_000)
    await scene.sleep(1_000)
    assert await scene.payloads() == [b"a"]
    await scene.sleep(3_600)
    found = await scene.stored()
    assert [each.payload for each in found] == [b"a", b"b"]
    assert found[1].appended_ms >= due_ms


@staged()
async def test_a_clock_that_jumps_ahead_and_back_again_sends_nothing_early(scene: Scene) -> None:
    await scene.schedule([b"a"], after_s=3_000)
    scene.clock.jump(7_200_000)
    await scene.sleep(30)
    assert await scene.payloads() == []
    scene.clock.jump(-7_200_000)
    await scene.sleep(2_900)
    assert await scene.payloads() == []
    await scene.sleep(200)
    assert await scene.payloads() == [b"a"]


# --- lives ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whoever_dies_and_whenever_nothing_is_lost_and_nothing_repeated(seed: int) -> None:
    chance = random.Random(seed)

    async def story(scene: Scene) -> None:
        sure: set[bytes] = set()
        perhaps: set[bytes] = set()
        dues: dict[bytes, int] = {}
        for number in range(60):
            match chance.choice(["send", "send", "send", "wait", "wait", "kill delay", "kill broker"]):
                case "send":
                    await _send(scene, chance, number, sure, perhaps, dues)
                case "wait":
                    await scene.sleep(chance.uniform(0, 3))
                case "kill delay":
                    scene.kill_delay(is_power_cut=chance.random() < 0.5)
                    await scene.sleep(chance.uniform(0, 2))
                    await scene.start_delay()
                case "kill broker":
                    scene.kill_broker("east", is_power_cut=chance.random() < 0.5)
                    await scene.sleep(chance.uniform(0, 2))
                    await scene.start_broker("east")
        await scene.sleep(MINUTE_S)
        found = await scene.stored()
        counts = Counter(each.payload for each in found)
        assert sure <= set(counts), "what was answered is delivered"
        assert set(counts) <= sure | perhaps
        assert max(counts.values(), default=1) == 1, "nothing is repeated"
        assert all(each.appended_ms >= dues[each.payload] for each in found), "never early"

    Scene(f"lives {seed}", ("east",), False, OPTIONS).play(story)


async def _send(
    scene: Scene, chance: random.Random, number: int, sure: set[bytes], perhaps: set[bytes], dues: dict[bytes, int]
) -> None:
    """A batch; sometimes nobody waits for the answer."""
    payloads = [b"%d/%d" % (number, index) for index in range(chance.randint(1, 5))]
    due_ms = [scene.now_ms + chance.randint(-100, 5_000) for _ in payloads]
    dues.update(zip(payloads, due_ms, strict=True))
    data, _ = scene.batch_of(payloads, due_ms)
    try:
        client = await scene.client()
        asking = asyncio.ensure_future(client.produce("orders", data))
        await asyncio.sleep(0)
        if chance.random() < 0.3:
            perhaps.update(payloads)
            asking.add_done_callback(lambda done: done.exception())
        else:
            await asking
            sure.update(payloads)
    except (ConnectionEnded, FairwayError):
        perhaps.update(payloads)


def test_a_fault_of_the_disk_ends_it_and_nothing_is_answered_any_more() -> None:
    async def story(scene: Scene) -> None:
        await scene.schedule([b"a"], after_s=3_600)
        scene.disk.fail_sync()
        asked = asyncio.ensure_future(scene.schedule([b"b"], after_s=3_600))
        await scene.delay.failed()
        await scene.sleep(5)
        assert not asked.done()
        asked.cancel()

    with pytest.raises(StorageFault):
        Scene("fault", ("east",), True, OPTIONS).play(story)


def test_an_address_that_others_can_reach_must_be_meant() -> None:
    with pytest.raises(Misuse, match="--allow-remote"):
        ServerOptions(host="0.0.0.0", port=PORT)
