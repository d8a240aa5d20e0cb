"""Long polls: they wait beside the mailbox, end at their own time, and cost one look per message however many wait."""

from __future__ import annotations

from fairway.scheduling import Actor, Expiry, SchedulerOptions, TurnResult
from tests.unit.scheduling.stage import Ask, Stage, nothing_there, throw

MS = 1_000_000


class Shelf:
    """Messages that pulls take one of; a pull that finds none waits."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.messages = 0

    def pull(self, wait_ns: int, **fields: object) -> Ask:
        return self._stage.ask("group", 1_000, work=self._take, wait_until_ns=self._stage.now_ns + wait_ns, **fields)

    def put(self) -> None:
        self.messages += 1
        self._stage.scheduler.wake("group")

    def _take(self, _: Ask, __: Actor) -> TurnResult:
        if not self.messages:
            return TurnResult.WAIT
        self.messages -= 1
        return TurnResult.DONE


def test_pull_waits_for_a_message() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    pull = shelf.pull(1_000 * MS)
    stage.run(100 * MS)
    assert (pull.fates, pull.looks) == ([], 1)
    put_ns = stage.now_ns
    shelf.put()
    stage.run(1 * MS)
    assert pull.fates == ["done"]
    assert pull.ended_ns - put_ns <= 2_000


def test_pull_that_waits_for_nothing_is_answered_at_once_beside_those_that_wait() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    waiting = shelf.pull(1_000 * MS)
    stage.run(1 * MS)
    at_once = shelf.pull(0)
    ack = stage.ask("group")
    stage.run(1 * MS)
    assert (waiting.fates, at_once.fates, ack.fates) == ([], ["waited"], ["done"])


def test_wait_ends_at_its_own_time() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    pulls = {wait_ms: shelf.pull(wait_ms * MS) for wait_ms in (300, 100, 200, 105)}
    stage.run(400 * MS)
    for wait_ms, pull in pulls.items():
        assert pull.fates == ["waited"]
        assert wait_ms * MS <= pull.ended_ns <= (wait_ms + 12) * MS


def test_wait_ends_although_the_actor_is_suspended() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    waiting = shelf.pull(50 * MS)
    stage.run(1 * MS)
    stage.actor("group").suspend()
    unseen = shelf.pull(50 * MS, deadline_ns=80 * MS)
    stage.run(100 * MS)
    assert (waiting.fates, unseen.fates, unseen.looks) == (["waited"], ["late"], 0)


def test_those_that_wait_are_served_in_the_order_in_which_they_came() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    pulls = [shelf.pull(1_000 * MS) for _ in range(5)]
    stage.run(1 * MS)
    for served in range(1, 6):
        shelf.put()
        newcomer = shelf.pull(0)
        stage.run(1 * MS)
        assert [bool(pull.fates) for pull in pulls] == [True] * served + [False] * (5 - served)
        assert newcomer.fates == ["waited"]


def test_thousand_waiting_consumers_cost_one_fruitless_look_per_message() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    pulls = [shelf.pull(60_000 * MS) for _ in range(1_000)]
    stage.run(10 * MS)
    looks = sum(pull.looks for pull in pulls)
    for _ in range(100):
        shelf.put()
        stage.run(1 * MS)
    assert sum(bool(pull.fates) for pull in pulls) == 100
    assert sum(pull.looks for pull in pulls) - looks <= 200


def test_one_wake_up_serves_as_many_as_there_are_messages() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    pulls = [shelf.pull(1_000 * MS) for _ in range(10)]
    stage.run(1 * MS)
    shelf.messages = 7
    stage.scheduler.wake("group")
    stage.run(1 * MS)
    assert sum(bool(pull.fates) for pull in pulls) == 7


def test_wake_up_is_not_spent_on_one_that_throws_or_is_gone() -> None:
    stage = Stage()
    shelf = Shelf(stage)
    gone, thrower, rude, served = (shelf.pull(1_000 * MS) for _ in range(4))
    stage.run(1 * MS)
    gone.is_cancelled = True
    thrower.work = rude.work = throw
    rude.throws_when_told = True
    shelf.put()
    stage.run(1 * MS)
    assert [ask.fates for ask in (gone, thrower, rude, served)] == [["gone"], ["failed"], ["failed"], ["done"]]
    assert len(stage.errors) == 1


def test_wake_up_goes_on_past_one_that_needs_a_cold_read() -> None:
    """And what it waited before does not count while it is read for."""
    stage = Stage()
    shelf = Shelf(stage)
    cold, next_one = shelf.pull(20 * MS), shelf.pull(20 * MS)
    stage.run(1 * MS)

    def read(ask: Ask, actor: Actor) -> TurnResult:
        if ask.looks > 2:
            return TurnResult.DONE
        actor.suspend()
        stage.loop.call_later(0.05, stage.scheduler.resume, actor)
        return TurnResult.AGAIN

    cold.work = read
    next_one.wait_until_ns = 1_000 * MS
    shelf.put()
    stage.run(100 * MS)
    assert (cold.fates, next_one.fates) == (["done"], ["done"])


def test_wake_up_of_an_actor_that_is_not_there_is_harmless() -> None:
    stage = Stage()
    stage.scheduler.wake("nobody")
    assert len(stage.scheduler) == 0


def test_wake_up_without_anyone_waiting_makes_nobody_look_twice() -> None:
    stage = Stage()
    stage.ask("group")
    stage.run(1 * MS)
    stage.scheduler.wake("group")
    pull = stage.ask("group", work=nothing_there, wait_until_ns=1_000 * MS)
    stage.run(1 * MS)
    assert pull.looks == 1


def test_those_whose_senders_are_gone_make_room() -> None:
    stage = Stage(options=SchedulerOptions(mailbox_requests_max=10))
    shelf = Shelf(stage)
    dead = [shelf.pull(30_000 * MS, is_cancelled=False) for _ in range(10)]
    stage.run(1 * MS)
    for pull in dead:
        pull.is_cancelled = True
    assert shelf.pull(30_000 * MS).fates == ["refused"]
    stage.run(SchedulerOptions().retry_after_ms * MS)
    assert shelf.pull(0).fates == []
    stage.run(1 * MS)
    assert {fate for pull in dead for fate in pull.fates} == {"gone"}
    assert stage.scheduler.tally.expired[Expiry.GONE] == 10
