"""A consumer pulls ahead as far as its program is fast: a slow one leaves messages to those who come to help."""

from __future__ import annotations

from fairway.protocol.prefetch_buffer import PrefetchTarget
from tests.unit.protocol.consuming_stage import Stage

MS = 1_000_000


def handle(stage: Stage, messages: int, each_ms: int) -> None:
    """One after the other."""
    for _ in range(messages):
        for message in stage.session.take_messages(1):
            stage.wire.pass_time(each_ms)
            message.ack()


def backlog(messages: int) -> Stage:
    stage = Stage()
    for _ in range(messages // 1_000):
        stage.broker.produce([b"x"] * 1_000)
    stage.wire.open()
    stage.wire.settle_down()
    return stage


def test_a_slow_program_holds_a_quarter_of_a_second_of_work() -> None:
    stage = backlog(2_000)
    handle(stage, 200, 20)
    assert stage.session.held_count <= 13


def test_a_very_slow_program_holds_one_message_more() -> None:
    stage = backlog(2_000)
    handle(stage, 50, 2_000)
    assert stage.session.waiting_count <= 1


def test_a_fast_program_holds_as_much_as_it_may() -> None:
    stage = backlog(20_000)
    for _ in range(12):
        stage.session.ack(stage.session.take_messages())
        stage.wire.settle_down()
    assert stage.session.held_count == stage.session.options.prefetch_messages


def test_a_program_that_is_slow_no_more_gets_more_again() -> None:
    stage = backlog(20_000)
    handle(stage, 50, 500)
    for _ in range(14):
        stage.session.ack(stage.session.take_messages())
        stage.wire.settle_down()
    assert stage.session.held_count == stage.session.options.prefetch_messages


def test_who_takes_many_at_once_finds_them_however_slow_it_is() -> None:
    stage = backlog(5_000)
    stage.session.set_take_count(1_000)
    sizes = []
    for _ in range(4):
        messages = stage.session.take_messages(1_000)
        stage.wire.pass_time(10_000)
        sizes.append(len(messages))
        stage.session.ack(messages)
    assert sizes[1:] == [1_000] * 3


def test_a_program_that_waits_for_messages_is_not_slow() -> None:
    ahead = PrefetchTarget(2_000)
    before = ahead.limit
    for second in range(1, 10):
        ahead.arrived(before, 1)
        ahead.look(1, second, second * 1_000 * MS)
        ahead.look(0, second, second * 1_000 * MS + 1)
    assert ahead.limit == before


def test_a_pause_is_not_slowness() -> None:
    stage = backlog(2_000)
    before = stage.session.waiting_count
    stage.session.pause()
    stage.wire.pass_time(5_000)
    stage.session.resume()
    stage.wire.pass_time(10)
    assert stage.session.waiting_count == before
