"""What a consumer's session hands out, how messages are settled, and that they stay its own meanwhile."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any

import pytest

from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.groups import GroupConfig
from fairway.protocol import messages as m
from fairway.protocol.consumer_options import DeadLettered
from fairway.protocol.delivery import Message
from fairway.protocol.lots import StaleSettlement
from tests.support.mini_broker import MS_NS, WALL_MS, Wire
from tests.unit.protocol.consuming_stage import LEASE_MS, Stage, payloads

# --- handing out -----------------------------------------------------------------------------------------------------


def test_messages_are_pulled_handed_out_and_acked() -> None:
    stage = Stage()
    messages = stage.begin(b"a", b"b", b"c")
    assert payloads(messages) == [b"a", b"b", b"c"]
    for message in messages:
        message.ack()
    stage.wire.settle_down()
    assert stage.broker.is_all_done()
    assert (stage.session.counts.settled, stage.session.counts.stale) == (3, 0)
    assert stage.session.unconfirmed_count == 0


def test_a_message_knows_where_it_comes_from() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    assert (message.subject, message.group, message.sequence, message.attempt) == ("orders", "billing", 0, 1)
    assert (message.key, message.tags, message.headers) == (None, (), {})
    assert not message.is_redelivered
    assert len(str(message.id)) == 26
    assert message.appended_at == message.created_at == datetime.fromtimestamp(WALL_MS / 1_000, UTC)


def test_messages_are_taken_a_few_at_a_time() -> None:
    stage = Stage()
    assert payloads(stage.begin(*(b"%d" % number for number in range(5)))[:0]) == []
    stage.broker.produce([b"x", b"y", b"z"])
    stage.wire.pass_time(10)
    assert payloads(stage.session.take_messages(2)) == [b"x", b"y"]
    assert payloads(stage.session.take_messages(2)) == [b"z"]
    assert stage.session.take_messages(2) == []


def test_messages_are_pushed_where_somebody_asks_for_that() -> None:
    stage = Stage(is_pushed=True)
    stage.begin(b"a", b"b")
    assert payloads(stage.pushed) == [b"a", b"b"]


def test_no_more_is_held_than_the_prefetch_allows() -> None:
    stage = Stage(prefetch_messages=10)
    first = stage.begin(*(b"%d" % number for number in range(100)))
    stage.wire.pass_time(1_000)
    assert len(first) + stage.session.waiting_count == 10
    stage.session.ack(first[:3])
    stage.wire.pass_time(1_000)
    assert len(first) + stage.session.waiting_count == 13


def test_no_more_bytes_are_held_than_the_prefetch_allows() -> None:
    stage = Stage(prefetch_bytes=1_000, prefetch_messages=4)
    for _ in range(20):
        stage.broker.produce([b"x" * 600])
    stage.wire.open()
    stage.wire.pass_time(1_000)
    assert stage.session.held_count == 4, "the last pull is answered by messages"
    stage.session.ack(stage.session.take_messages(3))
    stage.wire.pass_time(1_000)
    assert stage.session.held_count <= 4


def test_a_batch_larger_than_a_lot_comes_in_several_answers() -> None:
    stage = Stage(prefetch_messages=1_000)
    stage.broker.produce([b"%d" % number for number in range(3_000)])
    stage.wire.open()
    got: list[bytes] = []
    for _ in range(10):
        stage.wire.pass_time(10)
        messages = stage.session.take_messages()
        got += payloads(messages)
        stage.session.ack(messages)
    assert got == [b"%d" % number for number in range(3_000)]
    assert stage.broker.is_all_done()


def test_paused_it_neither_pulls_nor_hands_out() -> None:
    stage = Stage(is_pushed=True)
    stage.session.pause()
    stage.begin(b"a")
    stage.wire.pass_time(60_000)
    assert stage.pushed == []
    assert not stage.said(m.Pull)
    stage.session.resume()
    stage.wire.settle_down()
    assert payloads(stage.pushed) == [b"a"]


def test_what_arrives_during_a_pause_waits() -> None:
    stage = Stage(is_pushed=True)
    stage.begin()
    stage.session.pause()
    stage.broker.produce([b"a"])
    stage.wire.settle_down()
    assert stage.pushed == []
    stage.session.resume()
    assert payloads(stage.pushed) == [b"a"]


# --- settling --------------------------------------------------------------------------------------------------------


def test_a_retry_comes_again_after_its_time() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.retry(after=30, reason="not yet")
    stage.wire.pass_time(29_000)
    assert stage.session.take_messages() == []
    stage.wire.pass_time(2_000)
    [again] = stage.session.take_messages()
    assert (again.payload, again.attempt, again.is_redelivered) == (b"a", 2, True)


@pytest.mark.parametrize("after", [30, 30.0, timedelta(seconds=30)])
def test_after_is_seconds_or_a_timedelta(after: float | timedelta) -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.retry(after)
    stage.wire.settle_down()
    [said] = stage.said(m.SettleAll)
    assert said.outcomes[0].after_ms == 30_000


@pytest.mark.parametrize("after", [-1, 86_401, float("nan"), True, "30"])
def test_after_outside_its_range_is_misuse_and_settles_nothing(after: Any) -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    with pytest.raises(Misuse, match="after is"):
        message.retry(after)
    message.ack()


def test_a_rejected_message_does_not_come_again() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.reject("x" * 5_000)
    stage.wire.pass_time(3_600_000)
    assert stage.broker.is_all_done()
    assert len(stage.said(m.SettleAll)[0].outcomes[0].reason) == 1_024


def test_a_released_message_comes_again_at_once_and_counts_no_attempt() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.release()
    stage.wire.settle_down()
    [again] = stage.session.take_messages()
    assert (again.payload, again.attempt) == (b"a", 1)


def test_to_settle_twice_is_misuse() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.ack()
    assert message.is_settled
    with pytest.raises(Misuse, match="message 0 of orders was acked before"):
        message.retry()
    stage.wire.settle_down()
    with pytest.raises(Misuse, match="settle each message once"):
        message.ack()
    with pytest.raises(Misuse):
        stage.session.ack([message])


def test_acks_are_folded_to_ranges() -> None:
    stage = Stage()
    messages = stage.begin(*(b"%d" % number for number in range(10)))
    stage.session.ack([messages[number] for number in (3, 1, 2, 7, 8)])
    stage.wire.settle_down()
    [said] = stage.said(m.SettleAll)
    assert [(span.first, span.count) for span in said.outcomes[0].spans] == [(1, 3), (7, 2)]


def test_retries_with_the_same_words_are_one_outcome() -> None:
    stage = Stage()
    messages = stage.begin(*(b"%d" % number for number in range(6)))
    for message in messages[:4]:
        message.retry(after=1, reason="down")
    messages[4].retry(after=2, reason="down")
    messages[5].reject("bad")
    stage.wire.settle_down()
    [said] = stage.said(m.SettleAll)
    assert [(each.kind, each.after_ms, len(each.spans)) for each in said.outcomes] == [
        (m.Settlement.RETRY, 1_000, 1),
        (m.Settlement.RETRY, 2_000, 1),
        (m.Settlement.REJECT, None, 1),
    ]


def test_settlements_wait_for_company_only_while_others_are_in_flight() -> None:
    stage = Stage(linger_ms=5)
    messages = stage.begin(*(b"%d" % number for number in range(10)))
    messages[0].ack()
    stage.wire.ask()
    assert len(stage.said(m.SettleAll)) == 1
    messages[1].ack()
    stage.wire.ask()
    messages[2].ack()
    stage.wire.ask()
    assert len(stage.said(m.SettleAll)) == 1
    due_ns = stage.session.next_deadline()
    assert due_ns == stage.broker.now_ns + 5 * MS_NS
    stage.broker.advance(5)
    stage.wire.ask()
    [_, second] = stage.said(m.SettleAll)
    assert [(span.first, span.count) for span in second.outcomes[0].spans] == [(1, 2)]


def test_enough_settlements_wait_for_nobody() -> None:
    stage = Stage(linger_ms=1_000, settle_messages=5)
    messages = stage.begin(*(b"%d" % number for number in range(10)))
    messages[0].ack()
    stage.wire.ask()
    stage.session.ack(messages[1:6])
    stage.wire.ask()
    assert len(stage.said(m.SettleAll)) == 2


def test_the_line_is_called_once_until_it_looks() -> None:
    stage = Stage()
    messages = stage.begin(*(b"%d" % number for number in range(10)))
    stage.calls = 0
    for message in messages[:5]:
        message.ack()
    assert stage.calls == 1
    stage.wire.settle_down()
    messages[5].ack()
    assert stage.calls == 2


def test_who_waits_is_told_when_the_outcome_is_durable() -> None:
    stage = Stage()
    messages = stage.begin(b"a", b"b")
    told: list[FairwayError | None] = []
    with pytest.raises(Misuse, match="settle a message before"):
        stage.session.when_settled(messages, told.append)
    stage.session.ack(messages)
    stage.session.when_settled(messages, told.append)
    stage.wire.ask()
    stage.wire.handle()
    assert told == []
    stage.wire.hear()
    assert told == [None]
    stage.session.when_settled(messages, told.append)
    assert told == [None, None]


def test_who_waits_for_what_was_no_longer_ours_is_told_so() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    told: list[FairwayError | None] = []
    stage.broker.advance(LEASE_MS + 1)
    message.ack()
    stage.session.when_settled([message], told.append)
    stage.wire.settle_down()
    assert isinstance(told[0], StaleSettlement)
    assert stage.session.counts.stale == 1


def test_an_ack_that_was_lost_on_the_way_is_sent_again() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.ack()
    stage.wire.ask()
    stage.reconnect()
    assert stage.broker.is_all_done()
    assert stage.session.counts.settled == 1


def test_an_ack_whose_answer_was_lost_is_sent_again_and_comes_back_stale() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.ack()
    stage.wire.ask()
    stage.wire.handle()
    stage.reconnect()
    assert stage.broker.is_all_done()
    assert stage.session.counts.stale == 1


def dead_letters(stage: Stage) -> list[DeadLettered]:
    return [event for event in stage.events if isinstance(event, DeadLettered)]


def test_a_dead_letter_is_told_when_the_broker_has_stored_it() -> None:
    stage = Stage(GroupConfig(attempts_max=2))
    rejected, failed, done = stage.begin(b"a", b"b", b"c")
    rejected.reject("no such order")
    failed.retry(after=0)
    done.ack()
    assert dead_letters(stage) == []
    stage.wire.settle_down()
    [told] = dead_letters(stage)
    assert (told.sequence, told.id, told.reason) == (rejected.sequence, rejected.id, "no such order")
    assert (told.is_rejected, told.is_certain) == (True, True)
    stage.broker.advance(1)
    stage.wire.settle_down()
    [again] = stage.session.take_messages()
    again.retry(reason="out of stock")
    stage.wire.settle_down()
    told = dead_letters(stage)[1]
    assert (told.sequence, told.id, told.attempt) == (failed.sequence, failed.id, 2)
    assert (told.reason, told.is_rejected, told.is_certain) == ("out of stock", False, True)


def test_a_rejection_that_came_too_late_is_no_certain_dead_letter() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    stage.broker.advance(LEASE_MS + 1)
    message.reject("no such order")
    stage.wire.settle_down()
    assert [event.is_certain for event in dead_letters(stage)] == [False]


def test_a_refused_settlement_is_sent_again_after_the_time_that_was_said() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.ack()
    stage.wire.ask()
    ask = stage.wire.asked.pop()
    stage.session.answered(ask.token, Refused(Code.BUSY, "later", retry_after_ms=200), stage.broker.now_ns)
    stage.wire.settle_down()
    assert not stage.broker.is_all_done()
    stage.wire.pass_time(300)
    assert stage.broker.is_all_done()


def test_a_great_many_outcomes_are_several_requests() -> None:
    stage = Stage(prefetch_messages=2_000, settle_messages=1)
    stage.session.set_take_count(2_000)
    messages = stage.begin(*(b"%d" % number for number in range(2_000)))
    for number, message in enumerate(messages):
        message.retry(after=1, reason=str(number))
    stage.wire.settle_down()
    assert max(len(each.outcomes) for each in stage.said(m.SettleAll)) == 256
    assert stage.session.counts.settled == len(messages) == 2_000


def test_threads_settle_while_the_line_sends() -> None:
    count, threads = 20_000, 4
    stage = Stage(is_pushed=True, prefetch_messages=4_000)
    for first in range(0, count, 2_000):
        stage.broker.produce([b"%d" % number for number in range(first, first + 2_000)])
    stage.wire.open()
    queue: SimpleQueue[Message | None] = SimpleQueue()

    def work() -> None:
        while (message := queue.get()) is not None:
            message.ack()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for _ in range(100_000):
        stage.broker.advance(1)
        stage.wire.ask()
        if not (stage.wire.handle() | stage.wire.hear()):
            workers[0].join(0.0005)  # their turn
        for message in stage.pushed:
            queue.put(message)
        stage.pushed.clear()
        if stage.session.counts.settled == count:
            break
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join()
    assert stage.session.counts.settled == count
    assert stage.session.counts.stale == 0
    assert stage.broker.is_all_done()


# --- the lease -------------------------------------------------------------------------------------------------------


def test_a_handler_that_runs_for_an_hour_keeps_its_message() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    stage.wire.pass_time(3_600_000)
    message.ack()
    stage.wire.settle_down()
    assert (stage.session.counts.settled, stage.session.counts.stale) == (1, 0)


def test_the_lease_is_renewed_while_paused_and_full() -> None:
    stage = Stage(prefetch_messages=1)
    [message] = stage.begin(b"a", b"b")
    stage.session.pause()
    stage.wire.pass_time(60_000)
    assert len(stage.said(m.Heartbeat)) == 12
    assert stage.broker.held() == 1
    assert not message.is_lapsed


def test_idle_it_says_little() -> None:
    stage = Stage()
    stage.begin()
    stage.wire.pass_time(75_000)
    assert len(stage.wire.said) <= 12


def test_what_was_not_begun_when_the_lease_ran_out_goes_back() -> None:
    stage = Stage()
    stage.broker.produce([b"a", b"b"])
    stage.wire.open()
    stage.wire.settle_down()
    [begun] = stage.session.take_messages(1)
    stage.broker.advance(LEASE_MS + 1)
    stage.wire.settle_down()
    assert begun.is_lapsed is False, "it came again, so it is ours"
    assert stage.session.counts.lapsed == 1
    [other] = stage.session.take_messages()
    assert (other.payload, other.attempt) == (b"b", 2)


def test_a_message_that_somebody_else_may_have_says_so() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    stage.broker.advance(LEASE_MS + 1)
    ben = stage.consumer(consumer="ben")
    other = Wire(ben, stage.broker)
    other.open()
    other.settle_down()
    [theirs] = ben.take_messages()
    stage.wire.settle_down()
    assert message.is_lapsed
    message.release()
    theirs.ack()
    stage.wire.settle_down()
    other.settle_down()
    assert stage.broker.is_all_done()
    assert (stage.session.counts.stale, ben.counts.settled) == (1, 1)
