"""Turns, slices, suspension, refusal, expiry, removal; and that what a processor throws harms nobody."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fairway.errors import Code, InvariantViolated, Misuse, Refused
from fairway.scheduling import Actor, Expiry, SchedulerOptions, TurnResult
from tests.unit.scheduling.stage import Ask, Group, Planted, Stage, nothing_there, throw

MS = 1_000_000
OPTIONS = SchedulerOptions()


# --- turns and slices ------------------------------------------------------------------------------------------------


def test_requests_of_one_actor_are_handled_in_order() -> None:
    stage = Stage()
    asks = [stage.ask("group", cost_ns) for cost_ns in (700_000, 10, 400_000, 10)]
    stage.run(5 * MS)
    assert sorted(asks, key=lambda ask: ask.ended_ns) == asks
    assert {fate for ask in asks for fate in ask.fates} == {"done"}


def test_loop_runs_its_other_callbacks_after_a_slice() -> None:
    stage = Stage()
    for key in range(70):
        Group(stage, key, 3, 50_000)
    beats = []

    def beat() -> None:
        beats.append(stage.now_ns)
        stage.loop.call_soon(beat)

    beat()
    stage.run(100 * MS)
    longest_ns = max(after - before for before, after in pairwise(beats))
    assert longest_ns <= OPTIONS.slice_ns + 75_000  # and the request that overran it


def test_many_short_slices_share_a_turn() -> None:
    stage = Stage()
    for key in range(50):
        stage.ask(key, 5_000)
    before = stage.loop.steps
    stage.run(1 * MS)
    assert len(stage.served) == 50
    assert stage.loop.steps - before <= 3


def test_turn_ends_on_a_clock_that_stands_still() -> None:
    stage = Stage()
    Group(stage, "eager", 2, 0)  # each answered request is followed by the next, and no time passes
    stage.loop.call_soon(stage.loop.stop)
    stage.loop.run_forever()
    assert 0 < len(stage.served) <= OPTIONS.turn_slices_max * OPTIONS.slice_ns // OPTIONS.floor_ns


def test_requests_too_short_for_the_clock_are_not_free() -> None:
    stage = Stage()
    Group(stage, "flood", 50, 0)
    Group(stage, "steady", 2, 20_000)
    stage.run(20 * MS)
    flood_ns = OPTIONS.floor_ns * sum(one.key == "flood" for one in stage.served)
    assert flood_ns == pytest.approx(stage.time_of("steady"), rel=0.1)


def test_unfinished_request_comes_first_in_the_next_slice() -> None:
    stage = Stage()

    def scan(ask: Ask, _: Actor) -> TurnResult:
        return TurnResult.DONE if ask.looks == 3 else TurnResult.AGAIN

    long_scan = stage.ask("group", 100_000, work=scan)
    after = stage.ask("group")
    other = stage.ask("other")
    stage.run(2 * MS)
    assert (long_scan.looks, long_scan.fates) == (3, ["done"])
    assert other.ended_ns < long_scan.ended_ns < after.ended_ns


def test_several_kinds_of_processors_share_an_actor() -> None:
    stage, acks = Stage(), Stage()
    pull = stage.ask("group", work=nothing_there, wait_until_ns=100 * MS)
    ack = Ask("group", cost_ns=0)
    stage.scheduler.dispatch("group", ack, acks)
    stage.run(1 * MS)
    assert (pull.looks, ack.looks, len(acks.served)) == (1, 1, 1)


# --- suspension ------------------------------------------------------------------------------------------------------


def test_suspensions_nest() -> None:
    stage = Stage()
    stage.ask("group")
    actor = stage.actor("group")
    actor.suspend()
    actor.suspend()
    ask = stage.ask("group")
    stage.run(1 * MS)
    stage.scheduler.resume(actor)
    stage.run(1 * MS)
    assert ask.fates == []
    stage.scheduler.resume(actor)
    stage.run(1 * MS)
    assert ask.fates == ["done"]


def test_resuming_more_often_than_suspending_is_a_bug() -> None:
    stage = Stage()
    stage.ask("group")
    with pytest.raises(InvariantViolated):
        stage.scheduler.resume(stage.actor("group"))


def test_actor_that_suspends_itself_stops_after_the_request_at_hand() -> None:
    stage = Stage()

    def suspend(_: Ask, actor: Actor) -> TurnResult:
        actor.suspend()
        return TurnResult.DONE

    asks = [stage.ask("group", work=suspend) for _ in range(3)]
    for handled in (1, 2, 3):
        stage.run(1 * MS)
        assert sum(bool(ask.fates) for ask in asks) == handled
        stage.scheduler.resume(stage.actor("group"))


def test_suspended_actor_is_not_removed() -> None:
    stage = Stage(options=SchedulerOptions(idle_ns_max=10 * MS))
    stage.ask("group")
    actor = stage.actor("group")
    actor.suspend()
    stage.run(1 * MS)
    list(actor.mailbox.empty())
    stage.run(100 * MS)
    assert stage.scheduler.find("group") is actor
    stage.scheduler.resume(actor)
    stage.run(30 * MS)
    assert stage.scheduler.find("group") is None


# --- room ------------------------------------------------------------------------------------------------------------


def test_full_mailbox_refuses_and_says_when_to_come_back() -> None:
    stage = Stage(options=SchedulerOptions(mailbox_requests_max=3))
    for _ in range(3):
        stage.ask("group")
    with pytest.raises(Refused) as refused:
        stage.scheduler.dispatch("group", Ask("group"), stage)
    assert (refused.value.code, refused.value.retry_after_ms) == (Code.BUSY, 50)
    assert stage.ask("other").fates == []
    stage.run(1 * MS)
    assert stage.ask("group").fates == []
    assert stage.scheduler.tally.refused == 1


def test_number_of_actors_is_bounded_and_idle_ones_make_room() -> None:
    stage = Stage(options=SchedulerOptions(actors_max=3))
    for key in range(3):
        stage.ask(key)
    assert stage.ask("fourth").fates == ["refused"]
    stage.run(60 * MS)
    assert stage.ask("fourth").fates == []
    assert len(stage.scheduler) == 1
    stage.run(120_000 * MS)
    assert len(stage.scheduler) == 0


def test_running_actor_does_not_make_room() -> None:
    stage = Stage(options=SchedulerOptions(actors_max=1))
    others: list[Ask] = []

    def ask_another(_: Ask, __: Actor) -> TurnResult:
        others.append(stage.ask("another"))
        return TurnResult.DONE

    stage.ask("running", work=ask_another)
    actor = stage.actor("running")
    stage.run(1 * MS)
    assert [ask.fates for ask in others] == [["refused"]]
    assert stage.scheduler.find("running") is actor


def test_looking_for_idle_actors_costs_too_much_to_do_it_for_each_newcomer() -> None:
    stage = Stage(options=SchedulerOptions(actors_max=2))
    stage.ask("idle")
    stage.run(1 * MS)
    stage.ask("busy", 10 * MS)
    assert stage.ask("newcomer").fates == []
    stage.run(1 * MS)
    assert stage.ask("too soon").fates == ["refused"]
    stage.run(OPTIONS.retry_after_ms * MS)
    assert stage.ask("later").fates == []


def test_alarm_of_a_removed_actor_does_not_ring_for_the_next_of_its_key() -> None:
    stage = Stage(options=SchedulerOptions(actors_max=1, idle_ns_max=1_000 * MS))
    stage.ask("a")
    stage.run(900 * MS)
    stage.ask("b")
    stage.run(60 * MS)
    stage.ask("a")
    stage.run(200 * MS)
    assert stage.scheduler.find("a") is not None


def test_weights_are_bounded() -> None:
    scheduler = Stage(options=SchedulerOptions(weights_max=1)).scheduler
    for weight in (0.0, -1.0, 1_000.0, float("nan"), float("inf")):
        with pytest.raises(Misuse):
            scheduler.set_weight("group", weight)
    scheduler.set_weight("group", 2)
    scheduler.set_weight("group", 3)
    with pytest.raises(Refused):
        scheduler.set_weight("another", 2)
    scheduler.set_weight("group", 1)
    scheduler.set_weight("another", 2)


def test_weight_of_an_absent_actor_holds_when_it_comes() -> None:
    stage = Stage()
    stage.scheduler.set_weight("group", 4)
    stage.ask("group")
    assert stage.actor("group").weight == 4


# --- expiry ----------------------------------------------------------------------------------------------------------


def test_request_that_cannot_be_answered_in_time_is_told_so_without_being_handled() -> None:
    stage = Stage()
    stage.ask("group", 30 * MS)
    late = stage.ask("group", deadline_ns=30 * MS)
    in_time = stage.ask("group", deadline_ns=60 * MS)
    stage.run(100 * MS)
    assert (late.fates, late.looks) == (["late"], 0)
    assert in_time.fates == ["done"]


def test_request_behind_many_others_is_told_in_time() -> None:
    stage = Stage()
    for _ in range(500):
        stage.ask("group", 1 * MS)
    late = stage.ask("group", deadline_ns=100 * MS)
    stage.run(200 * MS)
    assert late.fates == ["late"]
    assert late.ended_ns <= 100 * MS


def test_request_whose_sender_is_gone_is_not_handled() -> None:
    stage = Stage()
    gone = stage.ask("group", is_cancelled=True)
    stage.run(1 * MS)
    assert (gone.fates, gone.looks) == (["gone"], 0)


def test_close_tells_everybody_and_takes_no_more() -> None:
    stage = Stage()
    waiting = stage.ask("group", work=nothing_there, wait_until_ns=1_000 * MS)
    stage.run(1 * MS)
    rude = stage.ask("group", throws_when_told=True)
    arrived = stage.ask("other")
    with pytest.raises(ExceptionGroup):
        stage.scheduler.close()
    stage.run(2_000 * MS)
    assert [ask.fates for ask in (waiting, rude, arrived)] == [["stopped"]] * 3
    assert stage.ask("group").fates == ["refused"]
    assert stage.scheduler.tally.expired[Expiry.STOPPED] == 3


@pytest.mark.parametrize("verdict", [TurnResult.WAIT, TurnResult.AGAIN])
def test_close_by_a_processor_ends_its_own_request_too(verdict: TurnResult) -> None:
    stage = Stage()

    def close(_: Ask, __: Actor) -> TurnResult:
        stage.scheduler.close()
        return verdict

    asks = [stage.ask("group", work=close, wait_until_ns=100 * MS), stage.ask("group")]
    stage.run(1 * MS)
    assert [ask.fates for ask in asks] == [["stopped"], ["stopped"]]


# --- isolation -------------------------------------------------------------------------------------------------------


def test_processor_that_throws_harms_nobody() -> None:
    stage = Stage()
    thrower = stage.ask("group", work=throw)
    rude = stage.ask("group", work=throw, throws_when_told=True)
    late = stage.ask("group", deadline_ns=1, throws_when_told=True)
    others = [stage.ask("group"), stage.ask("other")]
    stage.run(10 * MS)
    assert [ask.fates for ask in (thrower, rude, late)] == [["failed"], ["failed"], ["late"]]
    assert [ask.fates for ask in others] == [["done"], ["done"]]
    assert [type(error) for error in stage.errors] == [Planted, Planted]
    assert stage.scheduler.tally.failed == 2


def test_time_of_one_that_throws_is_on_its_account() -> None:
    stage = Stage()
    Group(stage, "steady", 3, 50_000)

    def follow(_: Ask, __: Actor) -> TurnResult:
        stage.ask("thrower", 50_000, work=follow, throws_when_told=True)
        raise Planted

    stage.ask("thrower", 50_000, work=follow, throws_when_told=True)
    stage.run(100 * MS)
    assert stage.time_of("thrower") == pytest.approx(stage.time_of("steady"), rel=0.05)
