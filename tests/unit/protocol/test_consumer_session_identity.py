"""A consumer's session shows its secret with every JOIN: so it resumes at once, and others with its id wait."""

from __future__ import annotations

from fairway.batch.identity import SECRET_BYTES
from fairway.groups import GroupConfig
from fairway.protocol import messages as m
from fairway.protocol.consumer_options import JoinDelayed
from fairway.protocol.line import ConnectionLost
from tests.support.mini_broker import Wire
from tests.unit.protocol.consuming_stage import LEASE_MS, Stage, payloads


def test_every_join_of_a_session_shows_one_secret_and_every_session_has_its_own() -> None:
    stage = Stage()
    stage.begin()
    stage.reconnect()
    other = Wire(stage.consumer(seed="other", consumer="ben"), stage.broker)
    other.open()
    other.settle_down()
    own, theirs = ([each.secret for each in stage.said(m.Join)], [each.secret for each in joins(other)])
    assert len(own) == 2
    assert len({*own}) == 1
    assert {len(each) for each in own + theirs} == {SECRET_BYTES}
    assert {*own}.isdisjoint(theirs)


def joins(wire: Wire) -> list[m.Join]:
    return [each for each in wire.said if isinstance(each, m.Join)]


def test_a_session_goes_on_at_once_after_a_lost_connection_and_after_a_crash_of_the_broker() -> None:
    stage = Stage()
    messages = stage.begin(b"a", b"b", b"c")
    stage.reconnect()
    messages[0].ack()
    stage.wire.settle_down()
    stage.wire.cut()
    stage.broker.crash(lost_most=0)
    stage.wire.open()
    stage.wire.settle_down()
    messages[1].ack()
    stage.wire.settle_down()
    assert stage.session.counts.settled == 2
    assert stage.delayed == []


def test_an_answer_to_join_that_is_lost_locks_nobody_out() -> None:
    """The reason why the client draws the secret, and not the broker."""
    stage = Stage()
    stage.broker.produce([b"a"])
    stage.wire.open()
    stage.wire.ask()
    stage.wire.handle()  # it is a member, and does not know
    [(ask, _)] = stage.wire.told
    stage.wire.told.clear()
    stage.session.answered(ask.token, ConnectionLost("cut"), stage.broker.now_ns)
    assert payloads(stage.begin()) == [b"a"]
    assert stage.delayed == []


def test_a_new_process_says_that_it_waits_and_takes_over_after_the_lease() -> None:
    stage = Stage()
    assert payloads(stage.begin(b"a")) == [b"a"]
    stage.wire.cut()  # killed
    wire = Wire(stage.consumer(seed="the next process"), stage.broker)
    wire.open()
    wire.pass_time(LEASE_MS - 1)
    assert wire.session.counts.handed_out == 0  # type: ignore[attr-defined]
    assert {(each.subject, each.group, each.consumer) for each in stage.delayed} == {("orders", "billing", "ann")}
    assert all("wait for the lease of consumer ann to end" in each.sentence for each in stage.delayed)
    assert len(stage.delayed) >= 5, "it asks again and again: the other may leave"
    wire.pass_time(5_000)
    [message] = wire.session.take_messages()  # type: ignore[attr-defined]
    assert (message.payload, message.attempt) == (b"a", 2)


def test_it_takes_over_soon_when_the_other_leaves() -> None:
    stage = Stage(config=GroupConfig(lease_ms=600_000))
    stage.begin()
    wire = Wire(stage.consumer(seed="the next process"), stage.broker)
    wire.open()
    wire.pass_time(20_000)
    stage.session.drain(stage.broker.now_ns)
    stage.wire.settle_down()
    assert stage.has_ended()
    stage.broker.produce([b"a"])
    wire.pass_time(5_000)
    assert payloads(wire.session.take_messages()) == [b"a"]  # type: ignore[attr-defined]


def test_one_that_waits_and_is_to_end_ends_at_once() -> None:
    stage = Stage()
    stage.begin()
    session = stage.consumer(seed="the next process")
    wire = Wire(session, stage.broker)
    wire.open()
    wire.ask()
    session.drain(stage.broker.now_ns)  # while its JOIN is under way
    seen = [session.is_finished]
    wire.settle_down()
    assert [*seen, session.is_finished] == [False, True]
    assert session.error is None
    assert len(stage.delayed) == 1


def test_no_repr_of_a_session_or_of_what_it_tells_shows_the_secret() -> None:
    stage = Stage()
    stage.begin()
    [join] = stage.said(m.Join)
    shown = [repr(join), repr(stage.session), repr(JoinDelayed("orders", "billing", "ann", "wait", 0))]
    assert not any(repr(join.secret)[2:-1] in each or join.secret.hex() in each for each in shown)
