"""What a consumer's session does with a run of messages of one key."""

from __future__ import annotations

from fairway.groups import Backoff, GroupConfig, Order, TagFilter
from fairway.protocol import messages as m
from fairway.protocol.delivery import Message
from tests.support.mini_broker import MS_NS
from tests.unit.protocol.consuming_stage import LEASE_MS, Stage, payloads

BY_KEY = GroupConfig(order=Order.KEY, backoff=Backoff(first_ms=1_000, jitter=0))


def begun(stage: Stage, *texts: bytes) -> list[Message]:
    """A stage with these messages, "a1" of key a, and what may be begun at first."""
    stage.broker.produce(texts, keys=[chr(text[0]) for text in texts])
    return stage.begin()


def test_one_of_each_key_is_given_out_at_a_time() -> None:
    stage = Stage(BY_KEY)
    first = begun(stage, b"a1", b"a2", b"b1", b"a3")
    assert payloads(first) == [b"a1", b"b1"]
    assert (stage.session.waiting_count, stage.session.held_count) == (0, 4)
    asked = len(stage.wire.said)
    first[0].ack()
    second = stage.session.take_messages()
    assert payloads(second) == [b"a2"]
    assert stage.session.take_messages() == []
    second[0].ack()
    assert payloads(stage.session.take_messages()) == [b"a3"]
    assert len(stage.wire.said) == asked, "without a word to the broker in between"


def test_messages_are_pushed_one_after_another_too() -> None:
    stage = Stage(BY_KEY, is_pushed=True)
    begun(stage, b"a1", b"a2", b"a3")
    for seen in ([b"a1"], [b"a1", b"a2"], [b"a1", b"a2", b"a3"]):
        assert payloads(stage.pushed) == seen
        stage.pushed[-1].ack()
        stage.wire.settle_down()


def test_what_is_behind_a_failure_goes_back_with_it() -> None:
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1", b"a2", b"a3")
    first.retry(reason="no")
    assert stage.session.take_messages() == []
    stage.wire.settle_down()
    (settled,) = stage.said(m.SettleAll)
    assert [(each.kind, [*map(tuple_of, each.spans)]) for each in settled.outcomes] == [
        (m.Settlement.RETRY, [(0, 1)]),
        (m.Settlement.RELEASE, [(1, 2)]),
    ]
    stage.wire.pass_time(1_100)
    again = stage.session.take_messages()
    assert [(each.payload, each.attempt) for each in again] == [(b"a1", 2)]


def tuple_of(span: m.SequenceRange) -> tuple[int, int]:
    return span.first, span.count


def test_nothing_is_begun_behind_another_when_the_lease_may_have_run_out() -> None:
    for late_ms, is_begun in ((LEASE_MS - 1, True), (LEASE_MS, False)):
        stage = Stage(BY_KEY)
        (first,) = begun(stage, b"a1", b"a2")
        stage.wire.cut()
        stage.broker.now_ns += late_ms * MS_NS
        first.ack()
        taken = payloads(stage.session.take_messages(10))
        assert taken == ([b"a2"] if is_begun else []), "from then on others may have the key"


def test_a_drain_gives_back_what_waits_behind_others() -> None:
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1", b"a2", b"a3")
    stage.session.drain(stage.broker.now_ns)
    stage.wire.settle_down()
    assert stage.broker.held() == 1
    first.ack()
    stage.wire.settle_down()
    assert stage.has_ended()
    assert stage.broker.group.oldest_unacked == 1


def test_a_message_that_nobody_wants_holds_up_nobody() -> None:
    stage = Stage(GroupConfig(order=Order.KEY, tags=TagFilter(("x",))))
    tags = [["x"], ["y"], ["y"], ["x"]]
    stage.broker.produce([b"1", b"2", b"3", b"4"], tags=tags, keys=["a"] * 4)
    (first,) = stage.begin()
    first.ack()
    assert payloads(stage.session.take_messages()) == [b"4"]


def test_what_has_no_key_waits_for_nobody_when_it_comes_again() -> None:
    """A response that got lost comes with its marks, and a lot has one for all its messages."""
    stage = Stage(BY_KEY)
    begun(stage, b"z1")
    stage.broker.produce([b"a1", b"1", b"2", b"a2"], keys=["a", None, None, "a"])
    assert stage.wire.handle(), "the pull that waits"
    stage.reconnect()
    again = stage.session.take_messages()
    assert [(each.payload, each.attempt) for each in again] == [(b"a1", 1), (b"1", 1), (b"2", 1)]


def test_nothing_passes_one_that_failed_before_it_came_again() -> None:
    """Somebody moved the cursor back, and what was said of the first handout had not been sent."""
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1")
    stage.broker.seek(0)
    stage.broker.produce([b"a2"], keys=["a"])
    assert stage.wire.handle(), "the pull that waits"
    first.retry()
    assert stage.wire.hear()
    assert stage.session.take_messages() == []
    stage.wire.pass_time(1_100)
    (again,) = stage.session.take_messages()
    assert (again.payload, again.attempt) == (b"a1", 2)


def longer(stage: Stage, *texts: bytes) -> None:
    """The pull that waits is answered: these messages of key a come behind those that are here."""
    stage.broker.produce(texts, keys=["a"] * len(texts))
    assert stage.wire.handle()


def test_a_message_waits_for_one_of_an_earlier_response() -> None:
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1")
    longer(stage, b"a2", b"a3")
    assert stage.wire.hear()
    assert (stage.session.held_count, stage.session.take_messages()) == (3, [])
    first.ack()
    second = stage.session.take_messages()
    assert payloads(second) == [b"a2"]
    second[0].ack()
    assert payloads(stage.session.take_messages()) == [b"a3"]


def test_a_message_that_comes_behind_an_acked_one_begins_at_once() -> None:
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1")
    longer(stage, b"a2", b"a3")
    first.ack()
    assert stage.wire.hear()
    assert payloads(stage.session.take_messages()) == [b"a2"]


def test_a_message_that_comes_behind_a_failed_one_goes_back() -> None:
    """The broker answered the pull before it knew of the failure."""
    stage = Stage(BY_KEY)
    (first,) = begun(stage, b"a1")
    longer(stage, b"a2", b"a3")
    first.retry()
    assert stage.wire.hear()
    assert stage.session.take_messages() == []
    stage.wire.settle_down()
    assert stage.broker.held() == 0
    stage.wire.pass_time(1_100)
    (again,) = stage.session.take_messages()
    assert (again.payload, again.attempt) == (b"a1", 2)
    again.ack()
    stage.wire.settle_down()
    assert payloads(stage.session.take_messages()) == [b"a2"]


def test_the_last_message_of_a_key_is_forgotten_when_its_outcome_is_confirmed() -> None:
    stage = Stage(BY_KEY)
    for number in range(20):
        texts = [b"%d-%d" % (number, each) for each in range(1_000)]
        stage.broker.produce(texts, keys=[text.decode() for text in texts])
        stage.wire.settle_down()
        while found := stage.session.take_messages():
            stage.session.ack(found)
            stage.wire.settle_down()
    assert len(stage.session._behind._tail_lots) < 10_000


def test_to_go_on_after_a_pause_begins_nothing_when_the_lease_may_have_run_out() -> None:
    stage = Stage(BY_KEY, is_pushed=True)
    begun(stage, b"a1", b"a2")
    stage.session.pause()
    stage.broker.produce([b"b1"], keys=["b"])
    stage.wire.settle_down()
    stage.wire.cut()
    stage.broker.now_ns += (LEASE_MS + 1) * MS_NS
    stage.pushed[0].ack()
    stage.session.resume()
    stage.wire.ask()
    assert payloads(stage.pushed) == [b"a1"], "neither what is behind it nor what waited in the pause"
