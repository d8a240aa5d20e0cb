"""Requests at a delay server: which it takes or refuses, with which remedy, and its answers about pending messages."""

from __future__ import annotations

import inspect
import re

import pytest

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.engine import DelayOptions
from fairway.delay.requests import Figures
from fairway.delay.server import DelayServer
from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.delay_messages import (
    Cancel,
    Decided,
    DelayTally,
    Fate,
    PendingListed,
    PendingPage,
    Reschedule,
    Tallied,
    Which,
)
from fairway.serving.metrics import MetricsText
from tests.unit.delay.helpers import DAY_MS, STORE
from tests.unit.delay.scene import Scene, staged

HOUR_S = 3_600
SMALL = DelayOptions(store=STORE, messages_per_step=2, pending_max=3)


async def refused(
    scene: Scene, message: m.ControlMessage, *, data: bytes | None = None, host: str | None = None
) -> Refused:
    client = await scene.client(host)
    with pytest.raises(Refused) as caught:
        await client.ask(message, m.ControlMessage, [] if data is None else [data])
    return caught.value


async def settled(scene: Scene) -> None:
    """Until its files are read and all is where it belongs."""
    await scene.sleep(2)


# --- what it takes ----------------------------------------------------------------------------------------------------


@staged(is_embedded=True)
async def test_a_batch_that_comes_twice_is_taken_once(scene: Scene) -> None:
    data, _ = scene.batch_of([b"a"], scene.now_ms + 5_000)
    first = await (await scene.client()).produce("orders", data)
    again = await (await scene.client()).produce("orders", data)
    assert (first.is_duplicate, again.is_duplicate) == (False, True)
    assert again.first_sequence == first.first_sequence
    await scene.sleep(10)
    assert await scene.payloads() == [b"a"]


@staged()
async def test_a_broker_alone_refuses_delayed_messages_and_names_the_remedy(scene: Scene) -> None:
    data, _ = scene.batch_of([b"a"], scene.now_ms)
    for message, attached in ((m.Produce("orders"), data), (DelayTally(Which()), None)):
        no = await refused(scene, message, data=attached, host="east")
        assert no.code is Code.BAD_REQUEST
        assert "?delay=HOST:PORT" in no.sentence


@staged()
async def test_a_delay_server_refuses_what_is_a_brokers(scene: Scene) -> None:
    data = batch.encode([b"now"], producer_id=1, first_sequence=0, created_ms=0)
    no = await refused(scene, m.Produce("orders"), data=data)
    assert (no.code, "?delay=" in no.sentence) == (Code.BAD_REQUEST, True)
    assert (await refused(scene, m.Join("orders", "g", "c", 0, 0))).code is Code.UNSUPPORTED
    described: Described = await scene.ask(Describe(Depth.SUBJECTS), Described)
    assert described.subjects == []
    assert described.broker.is_master


@staged(is_embedded=True)
async def test_beyond_the_horizon_is_refused_and_the_sentence_says_how_far(scene: Scene) -> None:
    far_ms = scene.now_ms + 800 * DAY_MS
    data, _ = scene.batch_of([b"a"], far_ms)
    no = await refused(scene, m.Produce("orders"), data=data)
    assert no.code is Code.BAD_REQUEST
    assert "731 days" in no.sentence
    [message_id] = await scene.schedule([b"a"], after_s=HOUR_S)
    await settled(scene)
    for due_ms in (far_ms, 2**63 - 1):
        assert (await refused(scene, Reschedule("", str(message_id), None, due_ms))).code is Code.BAD_REQUEST


@staged(is_embedded=True, options=SMALL)
async def test_a_quota_has_an_answer(scene: Scene) -> None:
    await scene.schedule([b"a", b"b"], after_s=HOUR_S)
    data, _ = scene.batch_of([b"c", b"d"], scene.now_ms)
    no = await refused(scene, m.Produce("orders"), data=data)
    assert (no.code, "3 messages" in no.sentence) == (Code.BUSY, True)


@staged(is_embedded=True)
async def test_a_name_that_is_none_is_refused(scene: Scene) -> None:
    data, _ = scene.batch_of([b"a"], scene.now_ms)
    assert (await refused(scene, m.Produce("../x"), data=data)).code is Code.BAD_NAME
    assert (await refused(scene, DelayTally(Which(subject="../x")))).code is Code.BAD_NAME


# --- what it decides --------------------------------------------------------------------------------------------------


@staged(is_embedded=True)
async def test_a_key_cancels_all_of_its_subject(scene: Scene) -> None:
    await scene.schedule([b"a", b"b", b"c"], after_s=HOUR_S, keys=["k", "k", "other"])
    await scene.schedule([b"d"], after_s=HOUR_S, keys=["k"], subject="bills")
    await settled(scene)
    decided: Decided = await scene.ask(Cancel("orders", None, "k"), Decided)
    assert decided == Decided(Fate.CANCELLED, 2)
    later: Decided = await scene.ask(Reschedule("bills", None, "k", scene.now_ms + 5_000), Decided)
    assert later == Decided(Fate.RESCHEDULED, 1)
    await scene.sleep(10)
    assert await scene.payloads("bills") == [b"d"]
    await scene.sleep(HOUR_S)
    assert await scene.payloads() == [b"c"]


@staged(is_embedded=True)
async def test_an_id_of_another_subject_or_of_nobody_is_unknown(scene: Scene) -> None:
    [message_id] = await scene.schedule([b"a"], after_s=HOUR_S)
    await settled(scene)
    assert (await scene.cancel(message_id, subject="bills")).fate is Fate.UNKNOWN
    assert (await scene.cancel(MessageId(99, 99))).fate is Fate.UNKNOWN
    assert (await scene.cancel(message_id, subject="orders")).fate is Fate.CANCELLED


@staged(is_embedded=True)
async def test_neither_id_nor_key_and_both_are_refused(scene: Scene) -> None:
    some_id = str(MessageId(1, 1))
    for message in (
        Cancel("orders", None, None),
        Cancel("orders", some_id, "k"),
        Cancel("orders", "no id", None),
        Reschedule("orders", some_id, "k", 0),
        Reschedule("orders", None, None, 0),
    ):
        assert (await refused(scene, message)).code is Code.BAD_REQUEST


# --- what it says -----------------------------------------------------------------------------------------------------


@staged(is_embedded=True)
async def test_what_is_pending_is_listed_page_by_page_in_the_order_of_due_times(scene: Scene) -> None:
    ids = [*await scene.schedule([b"later", b"last"], after_s=2 * HOUR_S, keys=["k1", None])]
    ids += await scene.schedule([b"soon"], after_s=HOUR_S, subject="bills", keys=["k2"])
    await settled(scene)
    listed = []
    after = ""
    for _ in range(10):
        page, attached = await (await scene.client()).ask(PendingListed(Which(), after, 2, True), PendingPage)
        opened = [each for data in attached for each in batch.decode(data).payloads]
        listed += list(zip(page.messages, opened, strict=True))
        after = page.next
        if not after:
            break
    assert [payload for _, payload in listed] == [b"soon", b"later", b"last"]
    assert [(each.subject, each.key, each.size_bytes) for each, _ in listed] == [
        ("bills", "k2", 4),
        ("orders", "k1", 5),
        ("orders", None, 4),
    ]
    assert [each.id for each, _ in listed] == [str(each) for each in (ids[2], ids[0], ids[1])]


@staged(is_embedded=True)
async def test_what_is_pending_is_counted_by_stretches(scene: Scene) -> None:
    start_ms = scene.now_ms - scene.now_ms % 60_000 + 600_000
    data, _ = scene.batch_of(
        [b"x"] * 5, [start_ms, start_ms + 1, start_ms + 60_000, start_ms + 90_000, start_ms + 300_000]
    )
    await (await scene.client()).produce("orders", data)
    await settled(scene)
    whole: Tallied = await scene.ask(DelayTally(Which(), 60_000), Tallied)
    assert whole.count == 5
    assert [(each.start_ms, each.count) for each in whole.stretches] == [
        (start_ms, 2),
        (start_ms + 60_000, 2),
        (start_ms + 300_000, 1),
    ]
    part: Tallied = await scene.ask(DelayTally(Which("orders", None, start_ms + 1, start_ms + 90_000)), Tallied)
    assert part == Tallied(2, [], [])
    assert (await scene.ask(DelayTally(Which("nobody")), Tallied)).count == 0


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(scene: Scene) -> dict[str, float]:
    out = MetricsText()
    scene.delay.request_handler.show(out)
    samples = (line.rsplit(" ", 1) for line in out.text().splitlines() if not line.startswith("#"))
    return {name.removeprefix("fairway_delay_"): float(value) for name, value in samples}


@staged("east", "west")
async def test_the_figures_say_what_happened(scene: Scene) -> None:
    first, second, _ = await scene.schedule([b"a", b"b", b"c"], after_s=HOUR_S)
    await scene.schedule([b"d"] * 5, after_s=10)
    await settled(scene)
    await scene.cancel(first)
    await scene.reschedule(second, 2 * HOUR_S)
    await scene.sleep(20)
    seen = figures(scene)
    assert seen["scheduled_messages_total"] == 8
    assert seen["dispatched_messages_total"] == seen["lateness_seconds_count"] == 5
    assert seen['lateness_seconds_bucket{le="0.1"}'] == 5
    assert (seen["cancelled_messages_total"], seen["rescheduled_messages_total"]) == (1, 1)
    assert (seen["pending_messages"], seen["due_messages"]) == (2, 0)
    assert seen["buckets"] >= 1
    assert seen["index_bytes"] > 0
    assert seen['target_down{target="east"}'] == seen['target_down{target="west"}'] == 0


@staged()
async def test_a_broker_that_is_down_shows(scene: Scene) -> None:
    scene.kill_broker("east")
    await scene.schedule([b"a"], after_s=1)
    await scene.sleep(20)
    seen = figures(scene)
    assert seen['target_down{target="east"}'] == 1
    assert seen["due_messages"] == seen["held_back_messages"] == 1


def test_the_manual_names_only_figures_there_are() -> None:
    from tests.tidy.source import ROOT

    text = (ROOT / "docs" / "how-to" / "delayed-messages.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`fairway_(delay_\w+)`", text))
    sources = [inspect.getsource(each) for each in (Figures, DelayServer)]
    there = {name for source in sources for name in re.findall(r'"(delay_\w+)"', source)}
    assert named == there
