"""What a delay server tells of the past: everything that happened, in order, as far as its logs go back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway import batch
from fairway.delay.engine import DelayOptions
from fairway.errors import Code, Refused
from fairway.limits import DELAY_HISTORY_BYTES, KIB, MIB, PENDING_PAGE_MAX
from fairway.protocol import messages as m
from fairway.protocol.delay_messages import Chronicle, History, HistoryPage, PastEvent, PastKind
from fairway.storage import retention
from tests.unit.delay.helpers import OPTIONS, STORE
from tests.unit.delay.scene import Scene, staged

HOUR_S = 3_600


def keeping(bytes_max: int) -> DelayOptions:
    return replace(
        OPTIONS,
        store=replace(STORE, retention=retention.Policy(bytes_max=bytes_max), actions_kept_bytes=bytes_max),
    )


KEEPING = keeping(64 * KIB)


async def told(scene: Scene, chronicle: Chronicle, *, most: int = PENDING_PAGE_MAX, begin: int = 0) -> list[PastEvent]:
    """All of it, page by page."""
    events: list[PastEvent] = []
    at, skip = begin, 0
    for _ in range(10_000):
        asked = History(chronicle, m.Whence.SEQUENCE, at, None, skip, most)
        page: HistoryPage = await scene.ask(asked, HistoryPage)
        events += page.events
        assert len(page.events) <= most
        at, skip = page.next, page.next_skip
        if at >= page.committed_end:
            return events
    raise AssertionError("a history ends")


@staged(is_embedded=True, options=KEEPING)
async def test_a_message_from_its_schedule_to_its_dispatch(scene: Scene) -> None:
    begun_ms = scene.now_ms
    first, second, third = await scene.schedule([b"a", b"b", b"c"], after_s=60, keys=["k", None, "l"])
    await scene.sleep(2)
    await scene.cancel(second)
    put_off_ms = scene.now_ms + HOUR_S * 1_000
    await scene.reschedule(third, HOUR_S)
    await scene.sleep(100)
    scheduled = await told(scene, Chronicle.SCHEDULED)
    assert [(each.kind, each.subject, each.first_sequence, each.count) for each in scheduled] == [
        (PastKind.SCHEDULED, "orders", number, 1) for number in range(3)
    ]
    assert [(each.id, each.key) for each in scheduled] == [(str(first), "k"), (str(second), None), (str(third), "l")]
    assert all(begun_ms <= each.at_ms <= begun_ms + 1_000 and each.due_ms == begun_ms + 60_000 for each in scheduled)
    decided = await told(scene, Chronicle.DECIDED)
    assert [(each.kind, each.first_sequence, each.count) for each in decided] == [
        (PastKind.CANCELLED, 1, 1),
        (PastKind.RESCHEDULED, 2, 1),
        (PastKind.DISPATCHED, 0, 1),
    ]
    assert [each.due_ms for each in decided] == [None, put_off_ms, None]
    assert [each.target for each in decided] == ["", "", "here"]
    assert begun_ms + 60_000 <= decided[-1].at_ms <= (await scene.stored())[0].appended_ms
    await scene.sleep(HOUR_S)
    last = (await told(scene, Chronicle.DECIDED))[-1]
    assert (last.kind, last.first_sequence) == (PastKind.DISPATCHED, 2)


@staged(options=keeping(MIB))
async def test_pages_of_any_size_tell_the_same_also_after_a_crash(scene: Scene) -> None:
    for number in range(12):
        await scene.schedule([b"%d-%d" % (number, each) for each in range(5)], after_s=1 + number % 3)
    large = batch.encode(
        [bytes(1_000)] * 300, producer_id=99, first_sequence=0, created_ms=1, due_ms=[scene.now_ms + 500] * 300
    )
    await (await scene.client()).produce("bulk", large)  # more than is read at a time
    await scene.sleep(20)
    whole = {chronicle: await told(scene, chronicle) for chronicle in Chronicle}
    assert len(whole[Chronicle.SCHEDULED]) == 360
    sent = [each for each in whole[Chronicle.DECIDED] if each.kind is PastKind.DISPATCHED]
    assert sum(each.count for each in sent) == 360
    for chronicle, events in whole.items():
        for most in (1, 7, 299):
            assert await told(scene, chronicle, most=most) == events
        middle = events[len(events) // 2].position
        behind = [each for each in events if each.position >= middle]
        assert await told(scene, chronicle, begin=middle) == behind
        asked = History(chronicle, m.Whence.EARLIEST, 0, middle)
        page: HistoryPage = await scene.ask(asked, HistoryPage)
        assert page.events == events[: len(page.events)]
        assert all(each.position < middle for each in page.events)
    scene.kill_delay(is_power_cut=True)
    await scene.start_delay()
    await scene.sleep(2)
    assert {chronicle: await told(scene, chronicle) for chronicle in Chronicle} == whole


@staged(options=KEEPING)
async def test_places(scene: Scene) -> None:
    await scene.schedule([b"early"], after_s=1)
    await scene.sleep(10)
    for chronicle in Chronicle:
        page: HistoryPage = await scene.ask(History(chronicle, m.Whence.LATEST, 0), HistoryPage)
        assert (page.events, page.next) == ([], page.committed_end)
        page = await scene.ask(History(chronicle, m.Whence.EARLIEST, 0, events_max=0), HistoryPage)
        assert (page.events, page.next) == ([], page.first_position)
        page = await scene.ask(History(chronicle, m.Whence.TIME, scene.now_ms), HistoryPage)
        assert page.events == []
        page = await scene.ask(History(chronicle, m.Whence.TIME, scene.now_ms - 60_000), HistoryPage)
        assert page.events
        client = await scene.client()
        with pytest.raises(Refused) as refused:
            await client.ask(History(chronicle, m.Whence.EARLIEST, 0, log_id=page.log_id + 1), HistoryPage)
        assert refused.value.code is Code.FENCED


@staged(options=KEEPING)
async def test_so_much_is_kept_and_no_more(scene: Scene) -> None:
    for number in range(400):
        await scene.schedule([bytes(500)], after_s=1 + number % 60)
    await scene.sleep(600)
    engine = scene.delay.engine
    for log in (engine.store.messages.log, engine.store.actions.log):
        assert log.committed_end - log.segments[0].base <= 64 * KIB + 2 * STORE.segment_bytes
    page: HistoryPage = await scene.ask(History(Chronicle.SCHEDULED, m.Whence.EARLIEST, 0), HistoryPage)
    assert page.first_position > 0
    events = await told(scene, Chronicle.SCHEDULED)
    assert 50 < len(events) < 400
    assert [each.first_sequence for each in events] == list(range(400 - len(events), 400)), "the latest, without a gap"


@staged()
async def test_without_a_history_the_latest_is_told(scene: Scene) -> None:
    await scene.schedule([b"a"], after_s=1)
    await scene.sleep(5)
    assert [each.kind for each in await told(scene, Chronicle.DECIDED)] == [PastKind.DISPATCHED]
    assert DelayOptions().store.actions_kept_bytes == DELAY_HISTORY_BYTES
