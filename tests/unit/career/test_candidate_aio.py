"""Candidates in tasks, on virtual time: the twin does the same, and can break off what is in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import fairway
import fairway.aio
from fairway.career import LocalBallot, LocalElection
from fairway.simulation import Simulation, simulate


class Clerk(fairway.aio.Career):
    name = "clerk"

    def __init__(self, who: str, lines: list[str], piece_s: float = 1.0) -> None:
        self.who = who
        self.lines = lines
        self.piece_s = piece_s
        self.finished = 0

    async def inaugurate(self) -> None:
        self.lines.append(f"{self.who} inaugurates")

    async def execute(self, token: int) -> bool:
        await asyncio.sleep(self.piece_s)
        self.finished += 1
        return True

    async def hand_over(self) -> None:
        await asyncio.sleep(0.5)
        self.lines.append(f"{self.who} hands over")


class Hasty(Clerk):
    in_hand = "abort"


Story = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.lines: list[str] = []
        self.ballot = LocalBallot()

    def stand(self, who: str, kind: type[Clerk] = Clerk, piece_s: float = 1.0) -> Running:
        return Running(kind(who, self.lines, piece_s), self.ballot.election(), self.world)


class Running:
    def __init__(self, career: Clerk, election: LocalElection, world: Simulation) -> None:
        self.career = career
        self.election = election
        self.candidacy = fairway.aio.Candidacy(career, election, clock=world.clock)
        self.task = asyncio.get_running_loop().create_task(self.candidacy.run())

    async def end(self) -> None:
        self.candidacy.stop()
        await self.task


def play(story: Story) -> None:
    async def main(world: Simulation) -> None:
        await story(Scene(world))

    simulate(main, seed=7)


def test_one_after_the_other() -> None:
    async def story(scene: Scene) -> None:
        first, second = scene.stand("first"), scene.stand("second")
        await asyncio.sleep(3.3)
        await first.end()
        await asyncio.sleep(2.2)
        await second.end()
        assert scene.lines == ["first inaugurates", "first hands over", "second inaugurates", "second hands over"]
        assert first.career.finished == 4
        assert second.career.finished >= 2

    play(story)


@pytest.mark.parametrize(("kind", "is_finished"), [(Clerk, True), (Hasty, False)])
def test_suspended_session_aborts_or_finishes_what_is_in_hand(kind: type[Clerk], is_finished: bool) -> None:
    async def story(scene: Scene) -> None:
        first = scene.stand("first", kind, piece_s=100.0)
        await asyncio.sleep(50)
        first.election.suspend()
        await asyncio.sleep(200)
        assert first.career.finished == int(is_finished)
        assert scene.lines == ["first inaugurates"]
        first.election.resume()  # the office is still ours: it goes on
        await asyncio.sleep(150)
        assert first.career.finished == 1 + int(is_finished)
        await first.end()

    play(story)


def test_lost_session_breaks_off_what_is_in_hand_whatever_was_declared() -> None:
    async def story(scene: Scene) -> None:
        first, second = scene.stand("first", piece_s=100.0), scene.stand("second")
        await asyncio.sleep(50)
        first.election.expire()
        await asyncio.sleep(1)
        assert first.career.finished == 0
        assert scene.lines == ["first inaugurates", "second inaugurates", "first hands over"]
        await second.end()
        await asyncio.sleep(1)
        assert scene.lines[-1] == "first inaugurates"
        await first.end()

    play(story)


def test_cancelled_task_hands_over_first() -> None:
    async def story(scene: Scene) -> None:
        first = scene.stand("first", piece_s=100.0)
        second = scene.stand("second")
        await asyncio.sleep(10)
        first.task.cancel()
        await asyncio.wait([first.task])
        assert first.task.cancelled()
        await asyncio.sleep(1)
        assert scene.lines == ["first inaugurates", "first hands over", "second inaugurates"]
        await second.end()

    play(story)


def test_task_that_is_cancelled_twice_ends_at_once_and_the_office_goes_on() -> None:
    async def story(scene: Scene) -> None:
        first, second = scene.stand("first"), scene.stand("second")
        await asyncio.sleep(10)
        first.task.cancel()
        await asyncio.sleep(0.1)
        first.task.cancel()
        await asyncio.wait([first.task])
        await asyncio.sleep(1)
        assert scene.lines == ["first inaugurates", "second inaugurates"]
        await second.end()

    play(story)


def test_what_execute_raises_is_raised() -> None:
    class Failing(Clerk):
        async def execute(self, token: int) -> bool:
            raise ZeroDivisionError

    async def story(scene: Scene) -> None:
        first = scene.stand("first", Failing)
        with pytest.raises(ZeroDivisionError):
            await first.task
        assert scene.lines == ["first inaugurates", "first hands over"]

    play(story)


def test_elect_on_a_loop_takes_careers_of_coroutines() -> None:
    class Plain(fairway.Career):
        name = "plain"

    class Once(Clerk):
        async def execute(self, token: int) -> bool:
            raise asyncio.CancelledError

    async def story() -> None:
        with pytest.raises(fairway.Misuse, match=r"a career on a loop is a fairway\.aio\.Career, not Plain"):
            await fairway.aio.elect(Plain(), election=LocalBallot().election())  # type: ignore[arg-type]
        with pytest.raises(fairway.Misuse, match="say where the election is held"):
            await fairway.aio.elect(Clerk("first", []))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fairway.aio.elect(Clerk("x", []), election=LocalBallot().election()), 0.05)

    asyncio.run(story())
