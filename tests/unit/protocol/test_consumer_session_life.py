"""How a consumer's session lives through new connections and configurations, the kinds of groups, and its end."""

from __future__ import annotations

import msgspec
import pytest

from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.groups import Backoff, GroupConfig, Mode, TagFilter
from fairway.protocol import messages as m
from fairway.protocol.consumer_options import ConsumerOptions, Ended, Gap, HasJoined, Paused
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.protocol.line import Answer
from fairway.protocol.messages import WantedTags
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from tests.support.mini_broker import MS_NS, Wire
from tests.unit.protocol.consuming_stage import LEASE_MS, Stage, payloads

# --- connections -----------------------------------------------------------------------------------------------------


def test_an_answer_that_was_lost_comes_again() -> None:
    stage = Stage()
    first = stage.begin(b"a")
    stage.broker.produce([b"b"])
    stage.wire.ask()
    stage.wire.handle()
    stage.reconnect()
    second = stage.session.take_messages()
    assert (payloads(first), payloads(second)) == ([b"a"], [b"b"])
    assert second[0].attempt == 1


def test_what_is_held_is_not_handed_out_again_after_a_crash_that_forgot_it() -> None:
    stage = Stage()
    messages = stage.begin(b"a", b"b")
    stage.wire.cut()
    stage.broker.crash(lost_most=1)
    stage.broker.produce([b"c"])
    stage.wire.open()
    stage.wire.settle_down()
    more = stage.session.take_messages()
    assert (payloads(messages), payloads(more)) == ([b"a", b"b"], [b"c"])
    assert stage.session.counts.repeated == 2
    stage.session.ack([*messages, *more])
    stage.wire.pass_time(10)
    assert stage.broker.is_all_done()
    assert stage.session.counts.stale == 0


def test_an_ack_goes_out_under_the_name_that_the_broker_knows() -> None:
    stage = Stage(prefetch_messages=4)
    messages = stage.begin(b"a", b"b", b"c", b"d")
    stage.wire.cut()
    stage.broker.crash(lost_most=1)
    messages[0].ack()  # believed, and the cursor is behind it; the rest comes after a lease, under another name
    stage.wire.open()
    stage.wire.settle_down()
    stage.wire.pass_time(LEASE_MS + 1_000)
    assert stage.session.take_messages() == []
    stage.session.ack(messages[1:])
    stage.wire.pass_time(10)
    assert stage.broker.is_all_done()
    assert stage.session.counts.stale == 0


def test_an_outcome_is_said_under_both_names_after_a_crash_that_may_have_taken_a_release() -> None:
    stage = Stage()
    kept, released = stage.begin(b"a", b"b")
    released.release()
    stage.wire.ask()
    stage.wire.handle()  # the release
    stage.wire.handle()  # the pull that waited: it gets the same message, under another name
    stage.wire.hear(1)
    [again] = stage.session.take_messages()
    stage.wire.cut()
    stage.broker.crash(lost_most=2)
    stage.wire.open()
    stage.wire.settle_down()
    assert stage.session.take_messages() == [], "the broker takes it to be in our hands, and so it is"
    stage.session.ack([kept, again])
    stage.wire.pass_time(10)
    assert stage.broker.is_all_done()
    assert stage.session.unconfirmed_count == 0


def test_what_waited_while_the_broker_was_away_for_longer_than_a_lease_goes_back_and_comes_again() -> None:
    stage = Stage()
    stage.broker.produce([b"a", b"b"])
    stage.wire.open()
    stage.wire.settle_down()
    [begun] = stage.session.take_messages(1)
    stage.wire.cut()
    stage.broker.now_ns += (LEASE_MS + 1) * MS_NS
    stage.broker.crash(lost_most=0)
    stage.wire.open()
    stage.wire.settle_down()
    assert stage.session.counts.lapsed == 1
    [other] = stage.session.take_messages()
    assert (other.payload, other.attempt) == (b"b", 1)
    stage.session.ack([begun, other])
    stage.wire.settle_down()
    assert stage.broker.is_all_done()


def test_it_joins_again_with_a_new_configuration() -> None:
    stage = Stage()
    stage.begin()
    stage.broker.configure(GroupConfig(version=2, tags=TagFilter(("paid",))))
    stage.broker.produce([b"a", b"b"], tags=[["paid"], ["open"]])
    stage.wire.pass_time(LEASE_MS)
    assert payloads(stage.session.take_messages()) == [b"a"]
    assert [each.config_version for each in stage.events if isinstance(each, HasJoined)] == [1, 2]


def test_a_program_that_was_written_for_another_configuration_ends() -> None:
    stage = Stage(GroupConfig(version=1), config_version=3)
    stage.begin()
    assert stage.has_ended()
    assert isinstance(stage.session.error, Refused)
    assert stage.session.error.code is Code.STALE_CONFIG
    assert stage.events == [Ended(stage.session.error)]


def test_the_same_session_on_another_connection_ends_the_first() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    told: list[FairwayError | None] = []
    Wire(stage.consumer(), stage.broker).open()
    usurper = Wire(stage.consumer(), stage.broker)
    usurper.open()
    usurper.settle_down()
    message.ack()
    stage.session.when_settled([message], told.append)
    stage.wire.settle_down()
    assert isinstance(stage.session.error, Refused)
    assert stage.session.error.code is Code.FENCED
    assert told == [stage.session.error]
    assert stage.session.next_deadline() is None
    assert list(stage.session.asks(8, 0)) == []


def test_a_busy_broker_is_asked_again_later() -> None:
    stage = Stage()
    stage.wire.open()
    stage.wire.ask()
    ask = stage.wire.asked.pop()
    stage.session.answered(ask.token, Refused(Code.BUSY, "later", retry_after_ms=500), stage.broker.now_ns)
    stage.wire.settle_down()
    due_ns = stage.session.next_deadline()
    assert due_ns is not None
    assert due_ns >= stage.broker.now_ns + 500 * MS_NS
    stage.broker.produce([b"a"])
    stage.wire.pass_time(1_000)
    assert payloads(stage.session.take_messages()) == [b"a"]


def test_a_refusal_for_good_ends_it() -> None:
    stage = Stage()
    stage.wire.open()
    stage.wire.ask()
    stage.session.answered(stage.wire.asked.pop().token, Refused(Code.BAD_NAME, "no"), 0)
    assert stage.has_ended()
    assert isinstance(stage.session.error, Refused)


def test_an_answer_that_cannot_be_read_has_not_arrived() -> None:
    stage = Stage()
    stage.broker.produce([b"a"])
    stage.wire.open()
    for _ in range(10):
        stage.wire.ask()
        if stage.said(m.Pull):
            break
        stage.wire.handle()
        stage.wire.hear()
    stage.wire.handle()
    ask, told = stage.wire.told.pop()
    assert isinstance(told, Answer)
    broken = bytearray(told.attachments[0])
    broken[-1] ^= 1
    stage.session.answered(ask.token, Answer(told.message, [broken]), stage.broker.now_ns)
    stage.wire.pass_time(1_000)
    assert payloads(stage.session.take_messages()) == [b"a"]


def test_without_room_it_asks_nothing_and_wants_no_timer() -> None:
    stage = Stage()
    stage.wire.room = 0
    stage.wire.open()
    stage.wire.settle_down()
    assert stage.wire.said == []
    assert stage.session.next_deadline() is None


# --- kinds of groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_all", "wanted"), [(False, [b"1", b"2", b"3"]), (True, [b"3"])])
def test_what_the_group_does_not_want_is_acked_and_not_handed_out(is_all: bool, wanted: list[bytes]) -> None:
    stage = Stage(GroupConfig(tags=TagFilter(("x", "y"), is_all)))
    tags = [[], ["x"], ["y"], ["x", "y"], ["z"]]
    stage.broker.produce([b"0", b"1", b"2", b"3", b"4"], tags=tags)
    messages = stage.begin()
    assert payloads(messages) == wanted
    assert stage.session.counts.filtered == 5 - len(wanted)
    stage.session.ack(messages)
    stage.wire.pass_time(10)
    assert stage.broker.is_all_done()


def test_a_program_that_expects_other_tags_than_its_group_ends() -> None:
    stage = Stage(GroupConfig(tags=TagFilter(("x",))), wanted=WantedTags(("y",)))
    stage.begin()
    assert isinstance(stage.session.error, Refused)
    assert "wants x, this consumer y" in stage.session.error.sentence
    assert not Stage(GroupConfig(tags=TagFilter(("x",))), wanted=WantedTags(("x",), is_all=True)).begin()


def test_at_most_once_is_settled_by_being_handed_out() -> None:
    stage = Stage(GroupConfig(mode=Mode.AT_MOST_ONCE), prefetch_messages=2)
    messages = stage.begin(b"a", b"b", b"c", b"d")
    assert payloads(messages) == [b"a", b"b"]
    assert messages[0].is_final
    with pytest.raises(Misuse, match="at most once"):
        messages[0].retry()
    stage.session.ack(messages)
    stage.wire.pass_time(100)
    assert payloads(stage.session.take_messages()) == [b"c", b"d"]
    assert not stage.said(m.SettleAll)
    assert stage.broker.is_all_done()


def test_a_broadcast_consumer_is_a_group_of_its_own_and_is_told_of_a_gap() -> None:
    config = GroupConfig(is_broadcast=True, broadcast_ms_max=60_000)
    stage = Stage(config, is_broadcast=True)
    [message] = stage.begin(b"a")
    message.ack()
    stage.wire.settle_down()
    assert stage.said(m.Join)[0].group == "billing.ann"
    assert message.group == "billing"
    stage.wire.cut()
    stage.broker.advance(LEASE_MS + 1)
    stage.broker.advance(100_000)
    stage.broker.produce([b"missed"])
    stage.wire.open()
    stage.wire.settle_down()
    assert Gap() in stage.events
    assert stage.session.counts.gaps == 1
    assert stage.session.take_messages() == []


def test_a_pause_by_command_is_told() -> None:
    stage = Stage(prefetch_messages=1)
    stage.begin(b"a")
    decision = stage.broker.group.pause(now_ms=stage.broker.now_ms)
    stage.broker.group.apply_all(decision.events)
    stage.wire.pass_time(LEASE_MS)
    assert stage.events[-1] == Paused(True)
    assert stage.session.is_paused_by_broker


# --- the end ---------------------------------------------------------------------------------------------------------


def test_draining_hands_back_what_was_not_begun_and_waits_for_the_rest() -> None:
    stage = Stage()
    stage.broker.produce([b"a", b"b", b"c"])
    stage.wire.open()
    stage.wire.settle_down()
    [begun] = stage.session.take_messages(1)
    stage.session.drain(stage.broker.now_ns)
    stage.wire.pass_time(60_000)
    assert stage.broker.held() == 1, "the others can be had by anybody"
    assert stage.broker.has_something()
    assert not stage.has_ended()
    begun.ack()
    stage.wire.settle_down()
    assert stage.has_ended()
    assert stage.session.error is None
    assert stage.said(m.Leave)
    assert stage.broker.held() == 0
    assert stage.session.counts.stale == 0


def test_draining_leaves_at_its_end_whatever_is_in_hand() -> None:
    stage = Stage()
    [begun] = stage.begin(b"a")
    stage.session.drain(stage.broker.now_ns, stage.broker.now_ns + 5_000 * MS_NS)
    stage.wire.pass_time(4_000)
    assert not stage.has_ended()
    stage.wire.pass_time(2_000)
    assert stage.has_ended()
    assert stage.broker.held() == 0
    assert stage.broker.has_something()
    with pytest.raises(Misuse, match="the consumer has ended"):
        begun.ack()


def test_draining_at_once_still_says_everything_that_was_settled() -> None:
    stage = Stage(settle_messages=1)
    messages = stage.begin(*(b"%d" % number for number in range(20)))
    for message in messages[:8]:
        message.ack()
        stage.wire.ask()
    stage.session.ack(messages[8:])
    stage.session.drain(stage.broker.now_ns, stage.broker.now_ns)
    stage.wire.room = 64
    stage.wire.settle_down()
    assert stage.has_ended()
    assert stage.broker.is_all_done()


def test_what_is_pulled_while_draining_goes_back() -> None:
    stage = Stage(is_pushed=True)
    stage.begin(b"a")
    stage.session.drain(stage.broker.now_ns)
    stage.broker.produce([b"b"])
    stage.wire.settle_down()
    assert payloads(stage.pushed) == [b"a"]
    assert stage.broker.held() == 1


def test_a_drain_survives_a_lost_connection() -> None:
    stage = Stage()
    [message] = stage.begin(b"a")
    message.ack()
    stage.session.drain(stage.broker.now_ns)
    stage.wire.ask()
    stage.wire.cut()
    stage.broker.crash(lost_most=5)
    stage.wire.open()
    stage.wire.settle_down()
    assert stage.has_ended()
    assert stage.broker.is_all_done()


def test_a_drain_before_the_first_connection_is_done_at_once() -> None:
    stage = Stage()
    stage.session.drain(0)
    assert stage.has_ended()
    assert stage.events == [Ended(None)]


def test_options_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(Misuse):
        ConsumerOptions("no spaces", "billing")
    with pytest.raises(Misuse):
        ConsumerOptions("orders", "billing", start=m.Whence.TIME)
    with pytest.raises(Misuse):
        ConsumerOptions("orders", "billing", prefetch_messages=0)


def test_a_name_is_made_where_none_is_given() -> None:
    options = ConsumerOptions("orders", "billing")
    names = {ConsumerSession(options, ManualClock(), SeededRng(seed)).consumer for seed in range(10)}
    assert len(names) == 10


def test_attempts_count_up_by_the_backoff_of_the_group() -> None:
    stage = Stage(GroupConfig(backoff=Backoff(first_ms=1_000, jitter=0)))
    [message] = stage.begin(b"a")
    for attempt in range(1, 5):
        assert message.attempt == attempt
        message.retry()
        stage.wire.pass_time(1_000 << attempt)
        [message] = stage.session.take_messages()


def test_a_message_is_no_work_for_the_collector() -> None:
    assert msgspec.structs.fields(Message)[0].name == "payload"
    assert Message.__struct_config__.gc is False


def test_what_was_acked_before_somebody_moved_the_cursor_back_comes_again() -> None:
    """A pull does not wait for the disk, an ack's answer does: the second handout overtakes it."""
    stage = Stage()
    first = stage.begin(b"a", b"b")
    outcomes: list[object] = []
    stage.session.ack(first)
    stage.session.when_settled(first, outcomes.append)
    stage.wire.ask()
    stage.wire.handle()  # the ack
    stage.broker.seek(0)
    stage.wire.handle()  # the pull that waited
    stage.wire.hear(1)
    again = stage.session.take_messages()
    assert payloads(again) == [b"a", b"b"]
    stage.wire.settle_down()
    assert outcomes == [None]
    stage.session.ack(again)
    stage.wire.settle_down()
    assert stage.broker.is_all_done()
    assert (stage.session.counts.stale, stage.session.unconfirmed_count) == (0, 0)


def test_an_ack_on_its_way_while_somebody_moves_the_cursor_back_is_not_taken_for_that_of_the_next_handout() -> None:
    stage = Stage()
    first = stage.begin(b"a", b"b")
    stage.session.ack(first)
    stage.wire.ask()
    stage.broker.seek(0)
    stage.wire.handle()  # the pull that waited: the same messages under the same name
    stage.wire.handle()  # the ack
    assert not stage.broker.is_all_done()
    stage.wire.settle_down()
    again = stage.session.take_messages()
    assert payloads(again) == [b"a", b"b"]
    stage.session.ack(again)
    stage.wire.settle_down()
    assert stage.broker.is_all_done()
    assert stage.session.counts.stale == 2
