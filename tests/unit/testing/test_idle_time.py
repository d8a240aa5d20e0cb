"""Time in which nothing happens costs nothing, and what is due in it comes at its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.client.app import App
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker
from tests.support.one_session import share_one_secret

SUBJECT = "order.changed"
LEASE_S = 15.0  # the default of a group
STEPS_MAX = 60  # callbacks and task steps in three idle days; with polls and heartbeats there were 640,000
STEPS_PER_DAY_MAX = 5  # the daily looks of housekeeping


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as made:
        yield made


def steps_of(broker: MemoryBroker, *, days: float) -> int:
    before = broker._world.loop.steps
    broker.clock.advance(days=days)
    return broker._world.loop.steps - before


def joined_app(broker: MemoryBroker, *, is_async: bool = False) -> App:
    app = App(broker.url)

    def handle(message: Message) -> None:
        """It is done."""

    async def handle_async(message: Message) -> None:
        """It is done."""

    app.listener(SUBJECT, group="mailer")(handle_async if is_async else handle)
    broker.connect().send(SUBJECT, b"paid").result()
    assert broker.handle(app) == 1
    return app


@pytest.mark.parametrize("is_async", [False, True])
def test_three_idle_days_with_a_joined_app_are_a_few_steps(broker: MemoryBroker, is_async: bool) -> None:
    app = joined_app(broker, is_async=is_async)
    assert steps_of(broker, days=3) <= STEPS_MAX
    assert broker.handle(app) == 0
    broker.connect().send(SUBJECT, b"paid").result()
    assert broker.handle(app) == 1


def test_a_year_costs_its_daily_looks_alone(broker: MemoryBroker) -> None:
    joined_app(broker)
    assert steps_of(broker, days=365) <= STEPS_MAX + 365 * STEPS_PER_DAY_MAX


def test_days_with_something_for_later_cost_a_look_an_hour(broker: MemoryBroker) -> None:
    app = joined_app(broker)
    broker.connect().send(SUBJECT, b"remind", after=timedelta(days=30)).result()
    assert steps_of(broker, days=3) <= STEPS_MAX + 3 * 24 * 2
    broker.clock.advance(days=27)
    assert broker.handle(app) == 1


def test_who_holds_a_message_keeps_it_for_days_at_no_cost(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"paid").result()
    consumer = fw.consumer(SUBJECT, group="hotel")
    message = consumer.poll(timeout=1)
    assert message is not None
    assert steps_of(broker, days=3) <= STEPS_MAX

    with broker.connect().consumer(SUBJECT, group="hotel") as other:
        assert other.poll(timeout=60) is None
    assert not message.is_lapsed
    message.ack()
    consumer.flush()
    fw.abandon()
    broker.clock.advance(days=1)
    with broker.connect().consumer(SUBJECT, group="hotel") as other:
        assert other.poll(timeout=60) is None


def test_the_lease_of_one_that_dies_runs_from_its_end(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"paid").result()
    assert fw.consumer(SUBJECT, group="hotel").poll(timeout=1) is not None
    other = broker.connect().consumer(SUBJECT, group="hotel")
    broker.clock.advance(days=3)
    fw.abandon()

    assert other.poll(timeout=LEASE_S - 1) is None
    again = other.poll(timeout=2)
    assert again is not None
    assert again.attempt == 2


@pytest.mark.parametrize("trouble", ["restart", "kill"])
def test_after_a_restart_a_lease_lasts_as_before_and_ends_as_before(broker: MemoryBroker, trouble: str) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"paid").result()
    consumer = fw.consumer(SUBJECT, group="hotel")
    message = consumer.poll(timeout=1)
    assert message is not None
    broker.clock.advance(days=1)
    getattr(broker, trouble)()
    broker.clock.advance(days=1)
    assert not message.is_lapsed

    other = broker.connect().consumer(SUBJECT, group="hotel")
    assert other.poll(timeout=60) is None
    fw.abandon()
    assert other.poll(timeout=LEASE_S - 1) is None
    assert other.poll(timeout=2) is not None


def test_a_name_that_moved_to_another_connection_is_not_touched_by_the_end_of_the_first(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_one_secret(monkeypatch)
    first, second = broker.connect(), broker.connect()
    first.send(SUBJECT, b"paid").result()
    first.consumer(SUBJECT, group="hotel", consumer="c-1").poll(timeout=1)
    successor = second.consumer(SUBJECT, group="hotel", consumer="c-1")
    message = successor.poll(timeout=60)
    assert message is not None
    first.abandon()
    assert steps_of(broker, days=1) <= STEPS_MAX
    with broker.connect().consumer(SUBJECT, group="hotel") as other:
        assert other.poll(timeout=60) is None
    assert successor.poll(timeout=60) is None  # nor did it come back to the one that holds it
    message.ack()
    successor.flush()


def test_a_redriven_message_is_held_as_long_as_any_other(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"paid").result()
    consumer = fw.consumer(SUBJECT, group="hotel")
    first = consumer.poll(timeout=1)
    assert first is not None
    first.reject("not today")
    consumer.flush()
    broker.clock.advance(seconds=1)
    fw.redrive(SUBJECT, group="hotel")
    again = consumer.poll(timeout=60)
    assert again is not None
    assert steps_of(broker, days=1) <= STEPS_MAX
    assert consumer.poll(timeout=1) is None
    with broker.connect().consumer(SUBJECT, group="hotel") as other:
        assert other.poll(timeout=60) is None
    again.ack()
    consumer.flush()


def test_a_clock_that_is_set_ahead_is_believed_after_a_minute_also_in_an_idle_hour(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"remind", after=timedelta(hours=5)).result()
    consumer = fw.consumer(SUBJECT, group="hotel")
    broker.clock.advance(minutes=10)
    broker.clock.jump(6 * 3_600)
    assert consumer.poll(timeout=50) is None
    assert consumer.poll(timeout=20) is not None


DELAYS = st.lists(st.integers(0, 3 * 86_400_000), min_size=1, max_size=8)
RETRIES = st.lists(st.integers(1, 12 * 3_600_000), max_size=3)


async def _story(broker: MemoryBroker, delays_ms: list[int], retries_ms: list[int]) -> list[tuple[str, int, int]]:
    """What a consumer that joined before was handed: payload, attempt and virtual time of each."""
    seen: list[tuple[str, int, int]] = []
    loop = asyncio.get_running_loop()
    async with broker.aio_connect() as fw, fw.consumer(SUBJECT, group="hotel") as consumer:
        begun = loop.time()
        for number, delay_ms in enumerate(delays_ms):
            await fw.send(SUBJECT, str(number).encode(), after=delay_ms / 1_000)
        expected = len(delays_ms) * (1 + len(retries_ms))
        while len(seen) < expected:
            message = await consumer.poll(timeout=4 * 86_400)
            assert message is not None
            seen.append((message.payload.decode(), message.attempt, round((loop.time() - begun) * 1_000)))
            if message.attempt <= len(retries_ms):
                message.retry(after=retries_ms[message.attempt - 1] / 1_000)
            else:
                message.ack()
    return seen


@settings(max_examples=20, deadline=None)
@given(delays_ms=DELAYS, retries_ms=RETRIES)
def test_what_is_due_comes_at_its_time_and_in_its_order(delays_ms: list[int], retries_ms: list[int]) -> None:
    with MemoryBroker() as broker:
        seen = broker.run(_story(broker, delays_ms, retries_ms))
    taken = {(payload, attempt): at_ms for payload, attempt, at_ms in seen}
    for number, delay_ms in enumerate(delays_ms):
        due_ms = delay_ms
        for attempt in range(1, len(retries_ms) + 2):
            at_ms = taken[str(number), attempt]
            assert due_ms <= at_ms <= due_ms + 500
            if attempt <= len(retries_ms):
                due_ms = at_ms + retries_ms[attempt - 1]
    assert [at_ms for _, _, at_ms in seen] == sorted(at_ms for _, _, at_ms in seen)
