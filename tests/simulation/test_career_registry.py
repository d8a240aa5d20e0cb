"""Careers in a line in a registry, as at a meta server, on virtual time and from seeds.

At the instant at which a leader begins a piece of work, its node is the first in line at the registry: nobody else can
rule. Tokens grow from reign to reign, and when all is well again somebody rules.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

import fairway.aio
from fairway.career.meta_election import LeasedRegistry, RegistryElection
from fairway.career.state_machine import Confirmation
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble
from tests.simulation.test_career import Clerk, Hasty, History

PATH = "/fairway/careers/clerk"
SESSION_MS = 10_000
CANDIDATES = 4
RUN_S = 300.0
SEEDS = 2
TELLING = "line/3"  # a leader is cut off there while it has much to do


@dataclass
class Place:
    token: int


class Line:
    """What is true at the registry."""

    def __init__(self, ensemble: SimEnsemble) -> None:
        self._ensemble = ensemble

    def first(self) -> Place | None:
        numbers = [int(name[-10:]) for name in self._ensemble.tree.children(PATH)]
        return Place(min(numbers) + 1) if numbers else None


class CountsWrongly(RegistryElection):
    """An office is certain for as long again as its session lasts: somebody else may rule by then."""

    async def _confirm(self, registry: LeasedRegistry, listener: fairway.career.ElectionListener) -> None:
        class Believer:
            def __getattr__(self, name: str) -> object:
                return getattr(listener, name)

            def confirmed(self, confirmation: Confirmation) -> None:
                late_ns = 2 * SESSION_MS * 1_000_000
                listener.confirmed(
                    Confirmation(confirmation.token, confirmation.until_ns + late_ns, confirmation.gone_ns + late_ns)
                )

        await super()._confirm(registry, Believer())  # type: ignore[arg-type]

    def _suspend(self, listener: fairway.career.ElectionListener) -> None:
        """Nor does it say that it does not know."""


async def trouble(ensemble: SimEnsemble, names: list[str], rng: SeededRng) -> None:
    """Connections that break, and stay broken for longer or shorter than a session lasts."""
    loop = asyncio.get_running_loop()
    while loop.time() < RUN_S:
        await asyncio.sleep(rng.uniform() * 20)
        name = names[rng.below(len(names))]
        ensemble.cut(name)
        if rng.below(2):
            ensemble.drop(name)
        await asyncio.sleep(rng.uniform() * 2 * SESSION_MS / 1_000)
        ensemble.mend(name)


async def story(world: Simulation, election_type: type[RegistryElection]) -> History:
    ensemble = SimEnsemble(world)
    history = History(Line(ensemble))  # type: ignore[arg-type]
    rng = world.rng.child("careers")
    names = [f"candidate-{number}" for number in range(CANDIDATES)]

    def election(name: str) -> RegistryElection:
        async def connect() -> LeasedRegistry:
            return ensemble.client(name, session_ms=SESSION_MS)

        return election_type(connect, PATH, world.rng.child(name))

    candidacies = [
        fairway.aio.Candidacy(
            (Hasty if number % 2 else Clerk)(history, rng.child(name)), election(name), clock=world.clock
        )
        for number, name in enumerate(names)
    ]
    running = [asyncio.get_running_loop().create_task(each.run()) for each in candidacies]
    await asyncio.sleep(1)
    await trouble(ensemble, names, rng.child("trouble"))
    await asyncio.sleep(5 * SESSION_MS / 1_000)
    done = len(history.parts)
    await asyncio.sleep(5 * SESSION_MS / 1_000)
    assert len(history.parts) > done, "when all is well again nobody rules"
    for candidacy in candidacies:
        candidacy.stop()
    for task in running:
        await task
    return history


def run(seed: str, election_type: type[RegistryElection] = RegistryElection) -> History:
    return simulate(lambda world: story(world, election_type), seed).result


@pytest.mark.parametrize("number", range(SEEDS))
def test_nobody_begins_anything_while_another_one_rules(number: int) -> None:
    history = run(f"line/{number}")
    history.judge()
    assert sum(what == "inaugurate" for what, _ in history.parts) > 5


def test_history_finds_an_election_that_counts_wrongly() -> None:
    assert run(TELLING, CountsWrongly).breaches
    assert run(TELLING).breaches == []
