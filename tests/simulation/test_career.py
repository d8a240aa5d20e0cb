"""Careers on virtual time, from seeds: sessions expire, connections break, candidates come and go.

At the instant at which a leader begins a piece of work, nobody else can rule: its node is the first in line at the
server, though no message in between says so. Reigns have their parts in order, tokens grow from reign to reign, and
when all is well again somebody rules.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

import fairway.aio
from fairway.career.state_machine import Confirmation
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation, simulate
from tests.simulation.career_registry import SESSION_S, Node, SimElection, SimServer

CANDIDATES = 4
RUN_S = 300.0
SEEDS = 4


@dataclass
class History:
    """What careers did, and what must not be."""

    server: SimServer
    parts: list[tuple[str, int]] = field(default_factory=list)  # what, token
    breaches: list[str] = field(default_factory=list)

    def note(self, what: str, token: int) -> None:
        self.parts.append((what, token))

    def begins(self, what: str, token: int) -> None:
        """Something that only a leader may begin."""
        first = self.server.first()
        if first is None or first.token != token:
            self.breaches.append(f"{what} of token {token} begins while {first} rules")
        self.note(what, token)

    def judge(self) -> None:
        for token in {token for _, token in self.parts}:
            told = [what for what, of in self.parts if of == token]
            assert told[0] == "inaugurate"
            assert told.count("inaugurate") == 1
            assert told.count("hand over") <= 1
            assert "hand over" not in told[:-1], told
        inaugurated = [token for what, token in self.parts if what == "inaugurate"]
        assert inaugurated == sorted(inaugurated)
        assert self.breaches == []


class Clerk(fairway.aio.Career):
    name = "clerk"

    def __init__(self, history: History, rng: SeededRng) -> None:
        self._history = history
        self._rng = rng
        self._pieces_left = 0

    async def inaugurate(self) -> None:
        self._history.begins("inaugurate", self.leadership.token)
        self._pieces_left = 1 + self._rng.below(60)
        await asyncio.sleep(self._rng.uniform())

    async def execute(self, token: int) -> bool:
        self._history.begins("execute", token)
        await asyncio.sleep(self._rng.uniform() * (20 if self._rng.below(20) == 0 else 1))
        self._pieces_left -= 1
        return self._pieces_left > 0

    async def hand_over(self) -> None:
        token = self.leadership.token
        await asyncio.sleep(self._rng.uniform() * 3)
        self._history.note("hand over", token)


class Hasty(Clerk):
    in_hand = "abort"


async def trouble(elections: list[SimElection], rng: SeededRng, until_s: float) -> None:
    """Connections that break for longer or shorter than a session lasts."""
    loop = asyncio.get_running_loop()
    while loop.time() < until_s:
        await asyncio.sleep(rng.uniform() * 20)
        election = elections[rng.below(len(elections))]
        election.cut(is_frozen=rng.below(2) == 0)
        await asyncio.sleep(rng.uniform() * 2 * SESSION_S)
        election.mend()


async def story(world: Simulation, election_type: type[SimElection]) -> History:
    server = SimServer(world)
    serving = asyncio.get_running_loop().create_task(server.run())
    history = History(server)
    rng = world.rng.child("careers")
    elections = [election_type(world, server, f"election-{number}") for number in range(CANDIDATES)]
    careers = [(Hasty if number % 2 else Clerk)(history, rng.child(str(number))) for number in range(CANDIDATES)]
    candidacies = [
        fairway.aio.Candidacy(career, election, clock=world.clock)
        for career, election in zip(careers, elections, strict=True)
    ]
    running = [asyncio.get_running_loop().create_task(each.run()) for each in candidacies]
    await trouble(elections, rng.child("trouble"), RUN_S)
    await asyncio.sleep(5 * SESSION_S)
    done = len(history.parts)
    await asyncio.sleep(5 * SESSION_S)
    assert len(history.parts) > done, "when all is well again nobody rules"
    for candidacy in candidacies:
        candidacy.stop()
    for task in running:
        await task
    serving.cancel()
    await asyncio.wait([serving])
    return history


def run(seed: str, election_type: type[SimElection] = SimElection) -> History:
    return simulate(lambda world: story(world, election_type), seed).result


@pytest.mark.parametrize("number", range(SEEDS))
def test_nobody_begins_anything_while_another_one_rules(number: int) -> None:
    history = run(f"career/{number}")
    history.judge()
    assert sum(what == "inaugurate" for what, _ in history.parts) > 5


def test_same_seed_same_story() -> None:
    hashes = {simulate(lambda world: story(world, SimElection), "career/0").trace_hash for _ in range(2)}
    assert len(hashes) == 1


class CountsWrongly(SimElection):
    """An office is certain for as long again as its session lasts: somebody else may rule by then."""

    def _confirmation(self, node: Node, asked_ns: int) -> Confirmation:
        session_ns = int(SESSION_S * 1e9)
        return Confirmation(node.token, asked_ns + 2 * session_ns, asked_ns + 3 * session_ns)


def test_history_finds_an_election_that_counts_wrongly() -> None:
    assert any(run(f"career/{number}", CountsWrongly).breaches for number in range(SEEDS))
