"""An election server on virtual time, as ZooKeeper is one seen from afar: sessions that expire, a line of numbered
nodes, watches that come late, answers that are lost. And an election that talks to it.

A session lives as long as the server hears of it often enough, and the server may hear of it without the answer ever
coming back. Connections break, stay broken for a while, or freeze, where nothing arrives and nothing fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fairway.career.election import ElectionListener
from fairway.career.state_machine import Confirmation
from fairway.errors import FairwayError
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation

SESSION_S = 10.0
DELAY_S = 0.3  # at most, each way
CERTAIN = 2 / 3


class Lost(FairwayError):
    """No answer came: whether the server heard the question is not known."""


class Expired(FairwayError):
    """The session is over."""


@dataclass
class Node:
    number: int
    token: int
    session: int


class SimServer:
    """What the servers of an ensemble agree on."""

    def __init__(self, world: Simulation) -> None:
        self._loop = world.loop
        self._sessions: dict[int, float] = {}  # when each expires
        self._made = 0
        self._changes = 0
        self.line: list[Node] = []
        self.watches: dict[int, list[asyncio.Event]] = {}

    def open(self) -> int:
        self._made += 1
        self._sessions[self._made] = self._loop.time() + SESSION_S
        return self._made

    def touch(self, session: int) -> None:
        self.expire()
        if session not in self._sessions:
            raise Expired
        self._sessions[session] = self._loop.time() + SESSION_S

    def create(self, session: int) -> Node:
        self._changes += 1
        node = Node(self._changes, self._changes, session)
        self.line.append(node)
        return node

    def delete(self, number: int) -> None:
        self.line = [node for node in self.line if node.number != number]
        for event in self.watches.pop(number, ()):
            event.set()

    def end(self, session: int) -> None:
        self._sessions.pop(session, None)
        for node in [node for node in self.line if node.session == session]:
            self.delete(node.number)

    def expire(self) -> None:
        """End the sessions whose time is up."""
        for session in [each for each, due_s in self._sessions.items() if due_s <= self._loop.time()]:
            self.end(session)

    def first(self) -> Node | None:
        self.expire()
        return self.line[0] if self.line else None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self.expire()


class SimElection:
    """One candidate's place in the line, over a connection that can be cut and frozen."""

    def __init__(self, world: Simulation, server: SimServer, name: str) -> None:
        self._world = world
        self._server = server
        self._rng: SeededRng = world.rng.child(name)
        self._listener: Any = None
        self._campaign: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._session = 0
        self._is_cut = False
        self._is_frozen = False
        self._flows = asyncio.Event()

    def cut(self, *, is_frozen: bool) -> None:
        """Frozen: nobody is told; otherwise whoever asks is."""
        self._is_cut, self._is_frozen = True, is_frozen
        self._flows.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flows.set()

    # --- the port ----------------------------------------------------------------------------------------------------

    def open(self, listener: ElectionListener) -> None:
        self._listener = listener

    def campaign(self) -> None:
        self._campaign = asyncio.get_running_loop().create_task(self._stand())

    def resign(self) -> None:
        self._leaving = asyncio.get_running_loop().create_task(self._resign())

    def close(self) -> None:
        self._leaving = asyncio.get_running_loop().create_task(self._close())

    # --- questions ---------------------------------------------------------------------------------------------------

    async def _ask(self, question: Any, *args: Any) -> Any:
        """Sent, perhaps heard, perhaps answered."""
        await self._travel()
        if self._session:
            self._server.touch(self._session)
        answer = question(*args)
        await self._travel()
        return answer

    async def _travel(self) -> None:
        await asyncio.sleep(self._rng.uniform() * DELAY_S)
        if self._is_cut:
            if self._is_frozen:
                await self._flows.wait()
            raise Lost

    async def _stand(self) -> None:
        """Until elected; then confirm it until it is lost."""
        while True:
            try:
                self._session = self._session or await self._ask(self._server.open)
                node = await self._ask(self._server.create, self._session)
                await self._wait_in_line(node)
                await self._rule(node)
                return
            except Lost:
                await asyncio.sleep(0.5)
                self._drop()  # perhaps a node was made: it goes with its session
            except Expired:
                self._drop()

    async def _wait_in_line(self, node: Node) -> None:
        while True:
            asked_ns = self._world.clock.monotonic_ns()
            line = await self._ask(lambda: list(self._server.line))
            if node.number not in [each.number for each in line]:
                raise Expired
            before = [each for each in line if each.number < node.number]
            if not before:
                self._listener.elected(self._confirmation(node, asked_ns))
                return
            event = asyncio.Event()
            is_there = await self._ask(self._watch, before[-1].number, event)
            while is_there and not event.is_set():
                await asyncio.sleep(SESSION_S / 6)  # a watch is late by as much; and the session is kept alive
                await self._ask(lambda: None)

    def _watch(self, number: int, event: asyncio.Event) -> bool:
        self._server.watches.setdefault(number, []).append(event)
        return any(each.number == number for each in self._server.line)

    async def _rule(self, node: Node) -> None:
        while True:
            await asyncio.sleep(SESSION_S / 6)
            asked_ns = self._world.clock.monotonic_ns()
            try:
                line = await self._ask(lambda: list(self._server.line))
            except Lost:
                self._listener.suspended()
                continue
            except Expired:
                self._drop()
                self._listener.lost(node.token)
                return
            if node.number in [each.number for each in line]:
                self._listener.confirmed(self._confirmation(node, asked_ns))

    def _confirmation(self, node: Node, asked_ns: int) -> Confirmation:
        session_ns = int(SESSION_S * 1e9)
        return Confirmation(node.token, asked_ns + int(CERTAIN * session_ns), asked_ns + session_ns)

    # --- going -------------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        """The session is left to expire."""
        self._session = 0

    async def _resign(self) -> None:
        await self._stop()
        try:
            if self._session:
                await self._ask(self._server.end, self._session)
        except (Lost, Expired):
            pass
        self._drop()
        self._listener.resigned()

    async def _close(self) -> None:
        await self._stop()
        self._listener.closed()

    async def _stop(self) -> None:
        if self._campaign is not None:
            self._campaign.cancel()
            await asyncio.wait([self._campaign])
            self._campaign = None
