"""Delayed messages in a user's own test: the real delay server, on the test's clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import fairway
from fairway.client.core import ClientOptions
from fairway.delay.engine import DelayOptions
from fairway.errors import Code, Misuse, NotSent, Refused
from fairway.protocol.producer_session import ProducerOptions
from fairway.testing import MemoryBroker

SUBJECT = "order.remind"
DAY_MS = 86_400_000


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as made:
        yield made


def stored(fw: fairway.Client, subject: str = SUBJECT) -> list[bytes]:
    try:
        return [bytes(payload) for page in fw.scan(subject) for payload in page.batch.payloads]
    except Refused as refused:
        if refused.code is not Code.NO_SUCH_SUBJECT:
            raise
        return []


def test_a_delayed_message_comes_when_the_clock_says_so_and_not_before(broker: MemoryBroker) -> None:
    fw = broker.connect()
    receipt = fw.send(
        SUBJECT, b"pay", key="o-42", tags=("paid",), headers={"source": "pos"}, after=timedelta(days=3)
    ).result()
    sent_at = broker.clock.now()
    broker.clock.advance(days=3, seconds=-1)
    assert stored(fw) == []
    broker.clock.advance(seconds=1)
    message = fw.consumer(SUBJECT, group="hotel").poll(timeout=1)
    assert message is not None
    assert (message.payload, message.key, message.tags) == (b"pay", "o-42", ("paid",))
    assert (message.headers, message.id) == ({"source": "pos"}, receipt.message_id)
    assert message.created_at <= sent_at
    assert message.appended_at >= message.created_at + timedelta(days=3)


def test_a_time_that_is_past_means_at_once(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"late", at=datetime(2000, 1, 1, tzinfo=UTC)).result()
    fw.send(SUBJECT, b"now", after=0).result()
    broker.clock.advance(seconds=1)
    assert sorted(stored(fw)) == [b"late", b"now"]


def test_one_time_for_each_message_of_a_list(broker: MemoryBroker) -> None:
    fw = broker.connect()
    receipts = fw.send_many(SUBJECT, [b"c", b"a", b"b"], after=[3_600, 60, timedelta(minutes=30)]).result()
    assert sum(each.count for each in receipts) == 3
    broker.clock.advance(hours=2)
    assert stored(fw) == [b"a", b"b", b"c"]


def test_one_time_for_a_list_of_thousands(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send_many(SUBJECT, [b"%d" % number for number in range(5_000)], at=broker.clock.now() + timedelta(hours=5))
    fw.flush()
    assert fw.delayed.count() == 5_000
    broker.clock.advance(hours=5, seconds=1)
    assert sorted(stored(fw), key=int) == [b"%d" % number for number in range(5_000)]
    assert fw.delayed.count() == 0


def test_cancel_tells_the_truth(broker: MemoryBroker) -> None:
    fw = broker.connect()
    first, second = (fw.send(SUBJECT, b"pay", key="o-42", after=60).result() for _ in range(2))
    assert fw.delayed.cancel(first.id) == fairway.DelayedOutcome("cancelled", 1)
    assert fw.delayed.cancel(first.message_id) == fairway.DelayedOutcome("cancelled", 0)
    broker.clock.advance(minutes=2)
    assert fw.delayed.cancel(second.id) == fairway.DelayedOutcome("already_dispatched", 0)
    assert fw.delayed.cancel(fairway.MessageId(1, 1)) == fairway.DelayedOutcome("unknown", 0)
    assert fw.delayed.cancel(second.id, subject="order.other").fate == "unknown"
    assert stored(fw) == [b"pay"]


def test_all_messages_of_a_key_are_cancelled_or_put_off(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send_many(SUBJECT, [b"1", b"2", b"3"], keys=["o-1", "o-1", "o-2"], after=60).result()
    assert fw.delayed.reschedule(subject=SUBJECT, key="o-1", after=3_600) == fairway.DelayedOutcome("rescheduled", 2)
    assert fw.delayed.cancel(subject=SUBJECT, key="o-2") == fairway.DelayedOutcome("cancelled", 1)
    assert fw.delayed.cancel(subject=SUBJECT, key="o-3").fate == "unknown"
    broker.clock.advance(minutes=59)
    assert stored(fw) == []
    broker.clock.advance(minutes=2)
    assert sorted(stored(fw)) == [b"1", b"2"]


def test_what_is_put_off_into_the_past_goes_out_at_once(broker: MemoryBroker) -> None:
    fw = broker.connect()
    receipt = fw.send(SUBJECT, b"pay", after=timedelta(days=300)).result()
    assert fw.delayed.reschedule(receipt.id, at=broker.clock.now() - timedelta(days=1)).fate == "rescheduled"
    broker.clock.advance(seconds=5)
    assert stored(fw) == [b"pay"]


def test_what_is_pending_is_listed_counted_and_tallied(broker: MemoryBroker) -> None:
    fw, start = broker.connect(), broker.clock.now()
    for day in (3, 1, 2):
        fw.send(SUBJECT, b"pay", key=f"o-{day}", at=start + timedelta(days=day)).result()
    fw.send("shop.open", b"", after=timedelta(days=1)).result()
    listed = list(fw.delayed.list(SUBJECT))
    assert [(each.key, each.due_at) for each in listed] == [
        (f"o-{day}", start + timedelta(days=day)) for day in (1, 2, 3)
    ]
    assert [each.size_bytes for each in listed] == [3, 3, 3]
    assert len(list(fw.delayed.list(limit=2))) == 2
    assert [each.key for each in fw.delayed.list(key_prefix="o-3")] == ["o-3"]
    assert (fw.delayed.count(), fw.delayed.count(SUBJECT), fw.delayed.count("order.none")) == (4, 3, 0)
    assert fw.delayed.count(between=(start + timedelta(days=2), None)) == 2
    assert fw.delayed.count(between=(None, start + timedelta(days=2))) == 2
    by_day = fw.delayed.histogram(timedelta(days=1), SUBJECT)
    assert list(by_day.values()) == [1, 1, 1]
    assert all(at.hour == 0 and at.tzinfo is UTC for at in by_day)


def test_a_list_longer_than_a_page_is_walked(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send_many(SUBJECT, [b"x"] * 2_500, keys=[f"o-{number}" for number in range(2_500)], after=3_600).result()
    assert len({each.key for each in fw.delayed.list()}) == 2_500
    assert len(list(fw.delayed.list(limit=1_700))) == 1_700


@pytest.mark.parametrize("trouble", ["restart", "kill"])
def test_a_broker_that_goes_away_forgets_nothing(broker: MemoryBroker, trouble: str) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"pay", after=timedelta(days=3)).result()
    cancelled = fw.send(SUBJECT, b"never", after=timedelta(days=3)).result()
    assert fw.delayed.cancel(cancelled.id).fate == "cancelled"
    getattr(broker, trouble)()
    broker.clock.advance(days=2)
    assert stored(fw) == []
    getattr(broker, trouble)()
    assert fw.delayed.count() == 1
    broker.clock.advance(days=2)
    getattr(broker, trouble)()
    broker.clock.advance(minutes=1)
    assert stored(fw) == [b"pay"]


def test_a_clock_that_is_set_forward_sends_nothing_before_it_has_been_so_for_a_minute(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"pay", after=3_600).result()
    broker.clock.jump(7_200)
    broker.clock.advance(seconds=30)
    broker.clock.jump(-7_200)
    broker.clock.advance(minutes=5)
    assert stored(fw) == []
    broker.clock.jump(7_200)
    broker.clock.advance(minutes=3)
    assert stored(fw) == [b"pay"]


def test_direct_messages_do_not_wait_for_delayed_ones(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"later", after=60)
    assert fw.send(SUBJECT, b"now").result().sequence == 0
    assert stored(fw) == [b"now"]


def test_beyond_the_horizon_a_message_is_refused_alone() -> None:
    with MemoryBroker() as broker:
        fw = broker.connect()
        near, far, too_near = (fw.send(SUBJECT, b"x", after=timedelta(days=days)) for days in (1, 800, 2))
        error = far.exception()
        assert isinstance(error, Refused)
        assert "731 days" in str(error)
        assert "2026-" in str(error)
        assert near.exception() is None
        assert too_near.exception() is None
        with pytest.raises(Refused, match="731 days"):
            fw.delayed.reschedule(near.result().id, after=timedelta(days=800))


def test_a_horizon_of_ones_own() -> None:
    with MemoryBroker(delay=DelayOptions(horizon_ms=1_000 * DAY_MS)) as broker:
        broker.connect().send(SUBJECT, b"x", after=timedelta(days=800)).result()


def test_a_full_delay_server_says_so_and_takes_more_when_it_has_room() -> None:
    impatient = ClientOptions(producer=ProducerOptions(delivery_timeout_ms=2_000))
    with MemoryBroker(delay=DelayOptions(pending_max=2)) as broker:
        fw = broker.connect(impatient)
        fw.send_many(SUBJECT, [b"1", b"2"], after=60).result()
        error = fw.send(SUBJECT, b"3", after=60).exception()
        assert isinstance(error, NotSent)
        assert "BUSY" in str(error)
        assert fw.send(SUBJECT, b"now").exception() is None
        broker.clock.advance(minutes=2)
        fw.send(SUBJECT, b"4", after=60).result()


def test_a_time_without_a_zone_is_refused_with_the_remedy(broker: MemoryBroker) -> None:
    fw = broker.connect()
    naive = datetime(2027, 1, 1)  # noqa: DTZ001
    with pytest.raises(Misuse, match=r"give it a time zone, such as datetime\.now\(timezone\.utc\)"):
        fw.send(SUBJECT, b"x", at=naive)
    with pytest.raises(Misuse, match="time zone"):
        fw.send_many(SUBJECT, [b"x"], at=[naive])
    with pytest.raises(Misuse, match="not by both"):
        fw.send(SUBJECT, b"x", after=1, at=datetime.now(UTC))
    assert fw.delayed.count() == 0


def test_coroutines_have_the_same(broker: MemoryBroker) -> None:
    async def story() -> None:
        async with broker.aio_connect() as fw:
            receipt = await fw.send(SUBJECT, b"pay", key="o-1", after=60)
            await fw.send_many(SUBJECT, [b"1", b"2"], keys=["o-2", "o-2"], after=timedelta(hours=1))
            pending = fw.send_nowait(SUBJECT, b"3", after=[60][0])
            await pending
            assert [each.key async for each in fw.delayed.list(key_prefix="o-")] == ["o-1", "o-2", "o-2"]
            assert await fw.delayed.count() == 4
            assert sum((await fw.delayed.histogram(60)).values()) == 4
            assert (await fw.delayed.cancel(receipt.id)).fate == "cancelled"
            assert (await fw.delayed.reschedule(subject=SUBJECT, key="o-2", after=1)).messages == 2
            with pytest.raises(Misuse, match="time zone"):
                await fw.send(SUBJECT, b"x", at=datetime(2027, 1, 1))  # noqa: DTZ001

    broker.run(story())
    broker.clock.advance(minutes=2)
    assert sorted(stored(broker.connect())) == [b"1", b"2", b"3"]


def test_the_same_seed_gives_the_same_ids() -> None:
    def run() -> str:
        with MemoryBroker("seed") as broker:
            return broker.connect().send(SUBJECT, b"x", after=60).result().id

    assert run() == run()
