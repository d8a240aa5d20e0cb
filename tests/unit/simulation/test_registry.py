"""The simulated registry: each fault that a test can switch does what it says, and a seed replays the whole story."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from fairway.errors import Misuse
from fairway.registry.port import AnswerLost, Node, SessionOver, SessionState
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble, SimulatedFaults
from fairway.simulation.registry_client import SimRegistry
from fairway.simulation.wire import Conditions
from tests.unit.registry.forms import until

SESSION_MS = 6_000


def play(story: Callable[[Simulation, SimEnsemble], Coroutine[Any, Any, None]], seeds: int = 20) -> None:
    for seed in range(seeds):
        with Simulation(seed) as world:
            world.run(story(world, SimEnsemble(world)))


async def opened(ensemble: SimEnsemble, name: str) -> SimRegistry:
    client = ensemble.client(name, session_ms=SESSION_MS)
    await until(lambda: client.session_id != 0)
    return client


async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await call
    except (AnswerLost, SessionOver) as error:
        return error


def test_lost_request_was_not_carried_out_and_lost_reply_was() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        ensemble.lose(requests=1.0)
        with pytest.raises(AnswerLost, match="/x"):
            await client.create("/x")
        ensemble.lose(replies=1.0)
        assert ensemble.tree.get("/x") is None
        await until(lambda: client.connection is None)
        ensemble.lose()
        await until(lambda: client.connection is not None)
        ensemble.lose(replies=1.0)
        with pytest.raises(AnswerLost, match="/y"):
            await client.create("/y")
        ensemble.lose()
        assert ensemble.tree.get("/y") is not None
        assert await client.get("/y", fresh=True) is not None

    play(story)


def test_after_lost_a_fresh_read_tells_what_has_become_of_the_change() -> None:
    """Whatever it says then stays true: no change comes late."""

    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        node = await client.create("/x", b"0")
        ensemble.lose(requests=0.2, replies=0.2)
        for _turn in range(40):
            word = b"%d" % (node.version + 1)
            made = await outcome(client.put("/x", word, node.version))
            while not isinstance(made, Node):
                made = await outcome(client.get("/x", fresh=True))
            assert made.version in (node.version, node.version + 1)
            assert made.value == b"%d" % made.version
            node = made
        ensemble.lose()
        await asyncio.sleep(2 * SESSION_MS / 1e3)
        assert ensemble.tree.get("/x") == node

    play(story)


def test_client_that_is_cut_off_loses_its_session_to_the_ensembles_clock() -> None:
    async def story(world: Simulation, ensemble: SimEnsemble) -> None:
        client, other = await opened(ensemble, "a"), await opened(ensemble, "b")
        states: list[SessionState] = []
        client.on_session = states.append
        await client.create("/m/a", is_ephemeral=True)
        session, cut_s = client.session_id, world.loop.time()
        ensemble.cut("a")
        await until(lambda: ensemble.tree.get("/m/a") is None)
        lasted_s = world.loop.time() - cut_s
        assert SESSION_MS * 5 / 6 <= lasted_s * 1e3 <= SESSION_MS + 1_000
        assert client.session_id == session  # it cannot know
        assert client.certain_until_ns() <= world.clock.monotonic_ns()
        assert states == [SessionState.SUSPENDED]
        assert await other.get("/m/a", fresh=True) is None
        ensemble.mend("a")
        await until(lambda: client.session_id not in (0, session))
        await asyncio.sleep(0)
        assert states == [SessionState.SUSPENDED, SessionState.OVER, SessionState.OPEN]

    play(story)


def test_client_that_is_cut_off_for_a_while_keeps_its_session() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        await client.create("/m/a", is_ephemeral=True)
        session = client.session_id
        ensemble.cut("a")
        await asyncio.sleep(SESSION_MS / 2e3)
        ensemble.mend("a")
        await asyncio.sleep(2 * SESSION_MS / 1e3)
        assert client.session_id == session
        assert ensemble.tree.get("/m/a") is not None

    play(story)


def test_change_that_is_cut_off_from_its_answer_was_made() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        ensemble.cut("a", "back")
        asked = asyncio.create_task(client.create("/x"))
        await until(lambda: ensemble.tree.get("/x") is not None)
        with pytest.raises(AnswerLost):
            await asked
        ensemble.mend("a", "back")
        ensemble.cut("a", "there")
        asked = asyncio.create_task(client.create("/y"))
        await asyncio.sleep(SESSION_MS / 1e3)
        ensemble.mend("a", "there")
        with pytest.raises(AnswerLost):
            await asked
        assert await client.get("/y", fresh=True) is None
        await asyncio.sleep(SESSION_MS / 1e3)
        assert ensemble.tree.get("/y") is None

    play(story)


def test_session_that_the_ensemble_ends_is_followed_by_another() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        states: list[SessionState] = []
        client.on_session = states.append
        await client.create("/m/a", is_ephemeral=True)
        session = client.session_id
        ensemble.expire("a")
        assert ensemble.tree.get("/m/a") is None
        await until(lambda: client.session_id not in (0, session))
        assert SessionState.OVER in states
        assert (await client.create("/m/a", is_ephemeral=True)).owner == client.session_id

    play(story)


def test_paused_client_hears_nothing_until_it_goes_on() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client, other = await opened(ensemble, "a"), await opened(ensemble, "b")
        calls: list[None] = []
        client.watch("/x", lambda: calls.append(None))
        await asyncio.sleep(1)
        calls.clear()
        ensemble.pause("a")
        asked = asyncio.create_task(client.get("/x"))
        await other.create("/x")
        await asyncio.sleep(1)
        assert calls == []
        assert not asked.done()
        ensemble.resume("a")
        await until(lambda: bool(calls))
        assert await asked is not None

    play(story)


def test_paused_beyond_its_session_is_over() -> None:
    async def story(world: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        states: list[SessionState] = []
        client.on_session = states.append
        session = client.session_id
        ensemble.pause("a")
        await asyncio.sleep(2 * SESSION_MS / 1e3)
        assert states == []
        assert client.certain_until_ns() <= world.clock.monotonic_ns()
        ensemble.resume("a")
        await until(lambda: client.session_id not in (0, session))
        assert SessionState.OVER in states

    play(story)


def test_reads_may_be_stale_but_fresh_ones_are_not_nor_reads_of_what_one_was_told() -> None:
    stale = []

    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        ensemble.simulated_faults = SimulatedFaults(stale_us=500_000, watch_late_us=200_000)
        writer, reader = await opened(ensemble, "a"), await opened(ensemble, "b")
        node = await writer.create("/x")
        heard: list[None] = []
        reader.watch("/x", lambda: heard.append(None))
        await asyncio.sleep(1)
        for _turn in range(10):
            node = await writer.put("/x", b"", node.version)
            assert await writer.get("/x") == node
            plain = await reader.get("/x")
            stale.append(plain != node)
            assert await reader.get("/x", fresh=True) == node
            assert await reader.get("/x") == node
        await asyncio.sleep(1)
        heard.clear()
        node = await writer.put("/x", b"last", node.version)
        await until(lambda: bool(heard))
        assert await reader.get("/x") == node

    play(story)
    assert any(stale)
    assert not all(stale)


def test_stopped_ensemble_answers_nobody_and_ends_no_session() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        await client.create("/m/a", is_ephemeral=True)
        session = client.session_id
        ensemble.stop()
        with pytest.raises(AnswerLost):
            await client.get("/m/a")
        await asyncio.sleep(2 * SESSION_MS / 1e3)
        ensemble.start()
        assert await client.get("/m/a") is not None
        assert client.session_id == session

    play(story)


def test_crashed_client_leaves_its_nodes_until_the_session_is_over_and_its_name_can_be_had_again() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        client = await opened(ensemble, "a")
        await client.create("/m/a", is_ephemeral=True)
        with pytest.raises(Misuse, match="lives"):
            ensemble.client("a")
        ensemble.crash("a")
        again = await opened(ensemble, "a")
        assert await again.get("/m/a", fresh=True) is not None
        await until(lambda: ensemble.tree.get("/m/a") is None)

    play(story)


def test_long_story_is_forgotten_but_for_what_it_led_to() -> None:
    async def story(_: Simulation, ensemble: SimEnsemble) -> None:
        writer, reader = await opened(ensemble, "a"), await opened(ensemble, "b")
        node = await writer.create("/x")
        for _turn in range(1_200):
            node = await writer.put("/x", b"", node.version)
        found = await reader.get("/x")
        assert found is not None
        assert found.version > 900
        assert await reader.get("/x", fresh=True) == node

    play(story, seeds=1)


def test_same_seed_is_the_same_story() -> None:
    async def story(world: Simulation) -> list[str]:
        simulated_faults = SimulatedFaults(there=Conditions(drop_chance=0.1), back=Conditions(drop_chance=0.1))
        ensemble = SimEnsemble(world, simulated_faults=simulated_faults)
        names = []
        for number in range(4):
            client = ensemble.client(f"c{number}")
            made = await outcome(client.create("/n-", is_numbered=True))
            names.append(repr(made))
        ensemble.simulated_faults = replace(ensemble.simulated_faults, there=Conditions())
        await asyncio.sleep(60)
        return names

    assert simulate(story, 3) == simulate(story, 3)
    assert simulate(story, 3).trace_hash != simulate(story, 4).trace_hash
