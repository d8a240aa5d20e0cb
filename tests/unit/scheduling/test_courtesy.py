"""Those who send too much at a time give way: to other actors, and within one actor, though not for ever."""

from __future__ import annotations

from fairway.scheduling.mailbox import OVERTAKING_MAX, SWEEP_LETTERS
from tests.unit.scheduling.stage import Ask, Stage

MS = 1_000_000
US = 1_000


def put(stage: Stage, key: str, count: int, *, is_hasty: bool, cost_ns: int = 50 * US) -> list[Ask]:
    asks = [Ask(key, cost_ns) for _ in range(count)]
    for ask in asks:
        stage.scheduler.dispatch(ask.key, ask, stage, is_hasty=is_hasty)
    return asks


def calm_rounds(stage: Stage, rounds: int) -> None:
    """Somebody who asks, waits for a millisecond, and asks again."""
    for _ in range(rounds):
        put(stage, "calm", 1, is_hasty=False)
        stage.run(1 * MS)


def test_a_hasty_actor_alone_has_all_the_time() -> None:
    stage = Stage()
    put(stage, "flood", 200, is_hasty=True)
    stage.run(11 * MS)
    assert stage.time_of("flood") == 10 * MS


def test_a_hasty_actor_gives_way_while_others_are_at_work_and_is_served_all_the_same() -> None:
    stage = Stage()
    asks = put(stage, "flood", 1_000, is_hasty=True)
    calm_rounds(stage, 50)
    assert 0.05 < stage.time_of("flood") / stage.now_ns < 0.35
    stage.run(500 * MS)
    assert all(ask.fates == ["done"] for ask in asks)


def test_a_hasty_actor_gives_way_to_those_who_ask_for_what_no_actor_does() -> None:
    stage = Stage()
    put(stage, "flood", 1_000, is_hasty=True)
    for _ in range(50):
        stage.scheduler.courtesy.polite_ns = stage.now_ns  # a produce, say
        stage.run(1 * MS)
    assert 0.05 < stage.time_of("flood") / stage.now_ns < 0.35


def test_an_actor_that_is_not_hasty_gives_way_to_nobody() -> None:
    stage = Stage()
    put(stage, "busy", 1_000, is_hasty=False)
    calm_rounds(stage, 50)
    assert stage.time_of("busy") / stage.now_ns > 0.8


def test_a_calm_request_goes_before_the_hasty_ones_of_its_actor() -> None:
    stage = Stage()
    put(stage, "steer", 1_000, is_hasty=True)
    [calm] = put(stage, "steer", 1, is_hasty=False)
    stage.run(1 * MS)
    assert calm.fates == ["done"]


def test_hasty_ones_are_overtaken_only_so_often_and_go_before_none_that_came_earlier() -> None:
    stage = Stage()
    early = put(stage, "steer", OVERTAKING_MAX + 2, is_hasty=False)
    hasty = put(stage, "steer", 2, is_hasty=True)
    late = put(stage, "steer", 3 * OVERTAKING_MAX, is_hasty=False)
    stage.run(100 * MS)
    order = sorted(early + hasty + late, key=lambda ask: ask.ended_ns)
    places = [order.index(ask) for ask in hasty]
    assert places[0] == len(early)
    assert places[1] == places[0] + OVERTAKING_MAX + 1


def test_a_held_actor_runs_at_once_for_a_calm_request() -> None:
    stage = Stage()
    put(stage, "flood", 100, is_hasty=True, cost_ns=150 * US)
    put(stage, "calm", 1, is_hasty=False)
    stage.run(MS // 2)
    assert stage.actor("flood").is_held
    [asked] = put(stage, "flood", 1, is_hasty=False)
    assert not stage.actor("flood").is_held
    stage.run(MS // 4)
    assert asked.fates == ["done"]


def test_close_ends_what_is_held() -> None:
    stage = Stage()
    asks = put(stage, "flood", 100, is_hasty=True, cost_ns=150 * US)
    put(stage, "calm", 1, is_hasty=False)
    stage.run(MS // 2)
    stage.scheduler.close()
    stage.run(50 * MS)
    assert {fate for ask in asks for fate in ask.fates} == {"done", "stopped"}
    assert all(len(ask.fates) == 1 for ask in asks)


def test_a_long_mailbox_is_swept_step_by_step_and_nobody_is_missed() -> None:
    """A slow actor, so that most of them are in its mailbox when their time is up or their senders are gone."""
    stage = Stage()
    asks = [Ask("slow", 1 * MS, deadline_ns=(200 + number % 7) * MS) for number in range(3 * SWEEP_LETTERS)]
    for number, ask in enumerate(asks):
        stage.scheduler.dispatch(ask.key, ask, stage, is_hasty=number % 3 == 0)
    stage.run(100 * MS)
    for ask in asks[::5]:
        ask.is_cancelled = True
    stage.run(300 * MS)
    assert all(len(ask.fates) == 1 for ask in asks)
    assert {ask.fates[0] for ask in asks} == {"done", "late", "gone"}
    assert len(stage.actor("slow").mailbox) == 0
