"""A delayed message from the first byte to the last: due, sent, cancelled, put off; and what a restart makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway import limits
from fairway.batch import MessageId
from fairway.delay.schedule.pending_rows import RowState
from fairway.errors import Code, Refused
from fairway.storage import segment
from tests.unit.delay.helpers import BILLS, DAY_MS, HOUR_MS, OPTIONS, ORDERS, SECOND_MS, YEAR_MS, Fate, World
from tests.unit.storage.helpers import content


def test_a_message_goes_out_when_it_is_due_and_not_before() -> None:
    with World() as world:
        due_ms = world.now_ms + 5 * SECOND_MS
        (message_id,) = world.schedule([b"later"], [due_ms])
        world.settle()
        world.sleep(due_ms - world.now_ms - 1)
        world.tick()
        world.tick()
        assert world.broker.deliveries == []
        world.sleep(1)
        world.settle()
        (delivery,) = world.broker.deliveries
        assert (delivery.id, delivery.payload) == (message_id, b"later")
        assert delivery.at_ms >= due_ms


def test_what_is_past_due_goes_out_at_once() -> None:
    with World() as world:
        world.schedule([b"late", b"now"], [world.now_ms - DAY_MS, 0])
        world.settle()
        assert world.broker.payloads == [b"late", b"now"]


def test_what_lies_beyond_the_horizon_is_refused_and_nothing_is_kept() -> None:
    with World() as world:
        with pytest.raises(Refused) as caught:
            world.send([b"far"], [world.now_ms + 3 * YEAR_MS])
        assert caught.value.code is Code.BAD_REQUEST
        world.settle()
        assert len(world.engine.rows) == 0


def test_a_message_two_years_ahead_survives_restarts_and_splits_and_goes_out_once() -> None:
    with World() as world:
        due_ms = world.now_ms + 700 * DAY_MS
        world.schedule([b"far", b"near"], [due_ms, world.now_ms + HOUR_MS])
        for number in range(70):
            world.advance(10 * DAY_MS)
            if number % 7 == 3:
                world.reopen()
                world.settle()
        assert world.broker.payloads == [b"near", b"far"]
        assert world.broker.deliveries[-1].at_ms >= due_ms
        assert world.engine.damaged == []
        world.advance(5 * DAY_MS)
        assert world.files == []


def test_two_years_are_about_a_hundred_files() -> None:
    with World() as world:
        now_ms = world.now_ms
        for day in range(730):
            world.send([b"x"] * 4, [now_ms + day * DAY_MS + hour * 6 * HOUR_MS for hour in range(4)])
        world.run(world.engine.store.durable(world.receipt))
        world.settle()
        assert len(world.files) <= 120


@pytest.mark.parametrize("end", [World.crash, World.kill])
def test_what_was_answered_survives_a_crash_before_it_was_moved(end: object) -> None:
    with World() as world:
        world.schedule([b"a", b"b"], [world.now_ms + SECOND_MS, world.now_ms + 90 * DAY_MS])
        end(world)  # type: ignore[operator]
        world.open()
        world.advance(2 * SECOND_MS)
        assert world.broker.payloads == [b"a"]
        world.advance(91 * DAY_MS)
        assert world.broker.payloads == [b"a", b"b"]


def test_an_intent_comes_again_after_a_crash_with_the_same_bytes() -> None:
    with World() as world:
        world.schedule([b"a", b"b"], [world.now_ms + SECOND_MS] * 2, keys=["k", None])
        world.settle()
        world.sleep(2 * SECOND_MS)
        world.engine.on_time()
        world.sleep(50)
        (first,) = world.engine.on_time()
        world.deliver(first)  # it arrives, and the answer is lost
        world.crash()
        world.open()
        world.settle()
        assert world.broker.repeats == 1
        assert world.broker.payloads == [b"a", b"b"]


def test_a_target_that_is_down_holds_back_nobody_else() -> None:
    with World() as world:
        world.routes = {ORDERS: None, BILLS: "west"}
        due_ms = world.now_ms + SECOND_MS
        world.schedule([b"o"], [due_ms])
        world.schedule([b"b"], [due_ms], subject=BILLS, producer=2)
        world.advance(HOUR_MS)
        assert world.brokers["west"].payloads == [b"b"]
        assert world.broker.payloads == []
        world.routes[ORDERS] = "east"
        world.settle()
        assert world.broker.payloads == [b"o"]


def test_cancel_is_answered_truthfully() -> None:
    with World() as world:
        due_ms = world.now_ms + DAY_MS
        first, second = world.schedule([b"1", b"2"], [due_ms] * 2, keys=["k-1", "k-2"])
        world.settle()
        assert world.decide(world.engine.cancel(first)) is Fate.CANCELLED
        assert world.decide(world.engine.cancel_key(ORDERS, "k-1")) is Fate.CANCELLED  # still true
        assert world.decide(world.engine.cancel_key(ORDERS, "k-9")) is Fate.UNKNOWN
        assert world.decide(world.engine.cancel_key(BILLS, "k-2")) is Fate.UNKNOWN
        assert world.decide(world.engine.cancel(MessageId(9, 9))) is Fate.UNKNOWN
        world.crash()
        world.open()
        world.advance(DAY_MS + SECOND_MS)
        assert world.broker.payloads == [b"2"]
        assert world.decide(world.engine.cancel(second)) is Fate.ALREADY_DISPATCHED
        assert world.decide(world.engine.cancel_key(ORDERS, "k-2")) is Fate.ALREADY_DISPATCHED


def test_a_message_can_be_cancelled_as_soon_as_it_is_answered() -> None:
    with World() as world:
        world.settle()
        (message_id,) = world.schedule([b"1"], [world.now_ms])
        assert world.decide(world.engine.cancel(message_id)) is Fate.CANCELLED
        world.advance(HOUR_MS)
        assert world.broker.payloads == []


def test_reschedule_earlier_and_later_survives_a_crash() -> None:
    with World() as world:
        now_ms = world.now_ms
        early, late = world.schedule([b"early", b"late"], [now_ms + 300 * DAY_MS, now_ms + HOUR_MS])
        world.settle()
        assert world.decide(world.engine.reschedule(early, now_ms + 2 * SECOND_MS)) is Fate.RESCHEDULED
        assert world.decide(world.engine.reschedule(late, now_ms + 400 * DAY_MS)) is Fate.RESCHEDULED
        world.crash()
        world.open()
        world.advance(2 * HOUR_MS)
        assert world.broker.payloads == [b"early"]
        for _ in range(42):
            world.advance(9.5 * DAY_MS)
        assert world.broker.payloads == [b"early"]
        assert len(world.files) == 1  # it was carried over into a bucket of its own time
        world.advance(2 * DAY_MS)
        assert world.broker.payloads == [b"early", b"late"]


def test_what_is_pending_is_listed_and_counted() -> None:
    with World() as world:
        now_ms = world.now_ms
        dues = [now_ms + day * DAY_MS for day in range(1, 7)]
        keys: list[str | None] = ["eu-1", "eu-2", "us-1", None, "eu-3", "us-2"]
        ids = world.schedule([b"x"] * 6, dues, keys=keys)
        world.schedule([b"y"], [now_ms + DAY_MS], subject=BILLS, producer=2)
        world.settle()
        assert world.count() == 7
        assert world.count(ORDERS) == 6
        assert world.count(ORDERS, key_prefix="eu-", to_ms=now_ms + 3 * DAY_MS) == 2
        listed = world.run(world.engine.page(world.engine.filter(key_prefix="us-"), items_max=10))
        assert [(each.id, each.key, each.due_ms) for each in listed.messages] == [
            (ids[2], "us-1", dues[2]),
            (ids[5], "us-2", dues[5]),
        ]
        width_ms = 7 * DAY_MS
        counted = world.run(world.engine.tally(world.engine.filter(ORDERS), width_ms))
        assert sum(count for _, count in counted.stretches) == counted.count == 6
        assert all(start % width_ms == 0 for start, _ in counted.stretches)
        world.engine.cancel_key(ORDERS, "eu-1")
        assert world.count(key_prefix="eu-") == 2


def test_questions_wait_until_everything_is_loaded_and_scheduling_does_not() -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.reopen()
        with pytest.raises(Refused) as caught:
            world.engine.cancel(MessageId(1, 0))
        assert caught.value.code is Code.BUSY
        world.schedule([b"2"], [world.now_ms + DAY_MS])
        world.settle()
        assert world.count() == 2


def test_the_message_log_stays_small() -> None:
    with World() as world:
        for number in range(200):
            world.schedule([b"%d" % number * 50], [world.now_ms + 400 * DAY_MS])
            if number % 10 == 0:
                world.advance(60 * SECOND_MS)
        world.advance(120 * SECOND_MS)
        world.advance(120 * SECOND_MS)
        assert len(world.disk.listing("messages")) <= 2


def test_the_message_log_may_have_a_disk_of_its_own() -> None:
    with World(apart=True) as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        assert "schedule" not in world.disk.listing("")
        world.crash()
        world.open()
        world.advance(2 * DAY_MS)
        assert world.broker.payloads == [b"1"]


def test_a_full_quota_is_said() -> None:
    with World(options=replace(OPTIONS, pending_max=2)) as world:
        world.schedule([b"1", b"2"], [world.now_ms + DAY_MS] * 2)
        with pytest.raises(Refused) as caught:
            world.send([b"3"], [world.now_ms + DAY_MS])
        assert caught.value.code is Code.BUSY
        world.settle()
        world.engine.cancel(MessageId(1, 0))
        world.schedule([b"3"], [world.now_ms + DAY_MS])


def test_a_clock_that_leaps_forward_and_is_put_right_has_sent_nothing_early() -> None:
    with World() as world:
        world.schedule([b"1"], [world.now_ms + DAY_MS])
        world.settle()
        world.clock.jump(2 * DAY_MS)
        world.advance(30 * SECOND_MS)
        assert world.broker.payloads == []
        world.clock.jump(-2 * DAY_MS)
        world.advance(HOUR_MS)
        assert world.broker.payloads == []
        world.clock.jump(2 * DAY_MS)
        world.settle()
        world.advance(30 * SECOND_MS)
        world.advance(31 * SECOND_MS)
        assert world.broker.payloads == [b"1"]  # it stayed so for a minute: it is believed


def test_a_clock_that_goes_back_makes_messages_wait() -> None:
    with World() as world:
        due_ms = world.now_ms + HOUR_MS
        world.schedule([b"1"], [due_ms])
        world.settle()
        world.clock.jump(-10 * HOUR_MS)
        world.advance(2 * HOUR_MS)
        assert world.broker.payloads == []
        world.advance(9 * HOUR_MS)
        assert world.broker.payloads == [b"1"]
        assert world.broker.deliveries[0].at_ms >= due_ms


def test_a_stream_goes_on_without_a_gap_and_one_that_was_idle_is_left() -> None:
    with World() as world:
        now_ms = world.now_ms
        for hour in (1, 2, 100):
            world.schedule([b"%d" % hour], [now_ms + hour * HOUR_MS])
        for _ in range(3):
            world.advance(HOUR_MS)
        assert [len(stored) for stored in world.broker.streams.values()] == [2]
        world.advance(100 * HOUR_MS)
        assert [len(stored) for stored in world.broker.streams.values()] == [2, 1]  # a broker forgets idle streams


def test_no_more_intents_are_under_way_than_a_broker_remembers() -> None:
    count = limits.INTENTS_PER_STREAM_MAX + 5
    with World(options=replace(OPTIONS, messages_per_step=4_096)) as world:
        world.settle()
        large = bytes(limits.INTENT_BYTES_MAX)
        for number in range(count):
            world.send([b"%d" % number + large], [0])
            world.sleep(5)
        world.sleep(50)
        held = []
        for _ in range(20):
            held += world.look()
            world.sleep(5)
        assert len(held) == limits.INTENTS_PER_STREAM_MAX
        for intent in held:
            world.deliver(intent)
            world.engine.sent(intent.number)
        world.settle()
        assert len(world.broker.payloads) == count


@pytest.mark.parametrize("is_moved", [True, False])
def test_an_intent_whose_messages_have_rotted_holds_back_nobody(is_moved: bool) -> None:
    """It is sent after all as long as the message log has what the bucket has lost; else it is reported."""
    with World(options=replace(OPTIONS, hold_ms=0)) as world:
        world.schedule([b"first"], [world.now_ms + SECOND_MS])
        world.schedule([b"second"], [world.now_ms + HOUR_MS])
        world.settle()
        world.sleep(2 * SECOND_MS)
        world.look()
        world.sleep(50)
        assert len(world.look()) == 1  # and it dies before that is sent
        (world.close if is_moved else world.kill)()
        for name in world.files:
            at = content(world.disk, f"schedule/{name}").find(b"first")
            if at >= 0:
                world.disk.flip(f"schedule/{name}", at * 8)
        if is_moved:
            log = segment.file_name("messages", 0)
            world.disk.flip(log, content(world.disk, log).index(b"first") * 8)
        world.open()
        world.advance(2 * HOUR_MS)
        assert len(world.engine.damaged) == is_moved  # else it may as well be torn, and is cut
        assert len(world.engine.stuck) == is_moved
        assert world.broker.payloads == ([b"second"] if is_moved else [b"first", b"second"])


def test_an_idle_engine_wants_to_be_woken_once_a_minute_and_a_due_message_on_its_tick() -> None:
    with World() as world:
        world.settle()
        assert 0 < world.engine.wait_ms() <= 60 * SECOND_MS
        world.schedule([b"1"], [world.now_ms + 1_234])
        world.sleep(5)
        wait_ms = world.engine.wait_ms()
        assert (world.now_ms + wait_ms) % 10 == 0
        world.sleep(wait_ms)
        world.tick()
        world.sleep(5)
        world.tick()
        assert world.broker.payloads == [b"1"]
        world.clock.jump(-DAY_MS)
        assert world.engine.wait_ms() <= 60 * SECOND_MS


def test_messages_that_cannot_be_read_are_lost_and_not_counted_as_sent_elsewhere() -> None:
    with World(options=replace(OPTIONS, catalogue_messages=4)) as world:
        payloads = [b"payload %d" % number for number in range(4)]
        due_ms = world.now_ms + DAY_MS
        for payload in payloads:
            world.schedule([payload], [due_ms])
            world.settle()  # a piece each
        world.sleep(2 * DAY_MS)
        for _ in range(20):  # intents are made, and none of them is sent
            world.look()
            world.sleep(10)
        assert world.engine.in_transit() == {"east": 4}
        world.close()
        (name,) = world.files
        for file in (f"schedule/{name}", segment.file_name("messages", 0)):
            for payload in payloads[1:3]:
                world.disk.flip(file, content(world.disk, file).index(payload) * 8)
        world.open()
        world.routes[ORDERS] = "west"
        for _ in range(20):
            world.look()
            world.sleep(10)
        assert world.engine.in_transit() == {"east": 4}
        assert world.engine.redirect("east", is_reached=False)[1:3] == (2, 0)
        assert world.engine.in_transit() == {"west": 2}
        assert len(world.engine.rows.in_state(RowState.LOST)) == 2
        assert len(world.engine.damaged) == 2
        world.settle()
        assert sorted(world.brokers["west"].payloads) == [payloads[0], payloads[3]]
