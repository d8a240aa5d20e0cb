"""A registry on virtual time, as ZooKeeper is one seen from afar, with the faults that tests switch on and off.

    ensemble = SimEnsemble(world)               for one simulation; its clients are its own
    registry = ensemble.client("broker-1")      a `Registry`; its session is opened by itself

What is the same as with the real one: requests of a client are carried out in order, answers come back in order; a
connection that breaks takes with it what is under way in both directions, so that a change may have been made or not;
reads that are not fresh are answered by a server that may be behind, though never behind what this client has been
told; the server that hears a client passes that on twice per tick, and forgets to if the connection breaks before; a
session ends on the ensemble's own clock.

    weather       delays each way, chances that a request or a reply breaks the connection, late watches, stale reads
    cut, mend     nothing passes between a client and the ensemble, both ways or one: held back, not lost
    drop          the connection breaks
    pause, resume the client's process stands still: it sends nothing and hears nothing
    expire        the ensemble ends a client's session
    crash         the client is gone without a word
    stop, start   all servers are gone for a while; sessions last for their whole time from the start on
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from fairway.errors import Misuse
from fairway.registry.leases import SessionLeases
from fairway.registry.port import Node, RegistryError
from fairway.registry.sim_client import SimRegistry, SimulatedConnection
from fairway.registry.tree import NodeChange, Tree, changed, is_below, touched
from fairway.world.clock import Clock, SimClock
from fairway.world.sim_wire import Conditions, SimulatedRoute, SimulatedWire
from fairway.world.simulation import Simulation

SESSION_MS = 10_000
TICK_MS = 500  # sessions last for at least two
_LOG_MAX = 512  # changes kept for servers that are behind

Direction: TypeAlias = Literal["there", "back"]


@dataclass(frozen=True)
class SimulatedFaults:
    """How things go when nobody switches anything. `drop_chance` of a way: that the connection breaks, per message."""

    there: Conditions = field(default_factory=Conditions)  # requests; one that is dropped is not carried out
    back: Conditions = field(default_factory=Conditions)  # replies and watches; the request was carried out
    notice_us: int = 200_000  # at most, until a client learns that its connection broke
    watch_late_us: int = 50_000  # at most, from a change to the telling of it
    stale_us: int = 100_000  # at most, how far the server behind a read that is not fresh lags
    late_us: int = 0  # at most, until a request of a connection that broke is carried out all the same; 0: it never is


class SimulatedRoutes(NamedTuple):
    """Between the ensemble and one client."""

    there: SimulatedRoute
    back: SimulatedRoute


class _TreeChange(NamedTuple):
    """One change of the tree, as servers that are behind will see it."""

    at_ns: int
    changes: list[NodeChange]


class _SimulatedServer:
    """The server that answers one client's reads: a copy of the tree as it was after so many changes."""

    def __init__(self, tree: Tree, position: int) -> None:
        self.tree = tree.copy()
        self.position = position


class SimEnsemble:
    """What the servers agree on, and the ways to their clients."""

    def __init__(
        self, simulation: Simulation, *, weather: SimulatedFaults | None = None, tick_ms: int = TICK_MS
    ) -> None:
        self.tree = Tree()  # for tests to look at
        self.leases = SessionLeases()
        self.loop = simulation.loop
        self.clock = SimClock(simulation.loop.now_ns)  # the ensemble's own
        self._rng = simulation.rng.child("ensemble")
        self._weather = weather or SimulatedFaults()
        self._tick_ns = tick_ms * 1_000_000
        self._log: list[_TreeChange] = []
        self._log_start = 0
        self._sessions_made = 0
        self._connections_made = 0
        self._clients: dict[str, SimRegistry] = {}
        self._servers: dict[str, _SimulatedServer] = {}
        self._ways: dict[str, SimulatedRoutes] = {}
        self._connections: dict[int, SimulatedConnection] = {}  # session → where it is
        self._late: Counter[str] = Counter()  # by client: requests that are carried out later, or never
        self._beating: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def client(self, name: str, *, session_ms: int = SESSION_MS, clock: Clock | None = None) -> SimRegistry:
        """One more client; a name that was closed or crashed can be had again."""
        known = self._clients.get(name)
        if known is not None and not known.is_gone:
            raise Misuse(f"client {name!r} lives: close or crash it first")
        if name not in self._ways:
            self._ways[name] = SimulatedRoutes(SimulatedRoute(self._weather.there), SimulatedRoute(self._weather.back))
        self._servers[name] = _SimulatedServer(self.tree, self._end)
        granted_ns = max(session_ms * 1_000_000, 2 * self._tick_ns)
        client = SimRegistry(self, name, granted_ns, clock or self.clock, self.loop)
        self._clients[name] = client
        return client

    # --- faults ------------------------------------------------------------------------------------------------------

    @property
    def weather(self) -> SimulatedFaults:
        return self._weather

    @weather.setter
    def weather(self, weather: SimulatedFaults) -> None:
        self._weather = weather
        for ways in self._ways.values():
            ways.there.conditions, ways.back.conditions = weather.there, weather.back

    def lose(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """From now on, the chance that a connection breaks under a request, or under the reply to it."""
        weather = self._weather
        there, back = replace(weather.there, drop_chance=requests), replace(weather.back, drop_chance=replies)
        self.weather = replace(weather, there=there, back=back)

    def cut(self, name: str, only: Direction | None = None) -> None:
        for way in self._ways_of(name, only):
            way.cut()

    def mend(self, name: str, only: Direction | None = None) -> None:
        for way in self._ways_of(name, only):
            way.mend()

    def drop(self, name: str) -> None:
        connection = self._known(name).connection
        if connection is not None:
            self._broke(connection)

    def pause(self, name: str) -> None:
        self._known(name).pause()

    def resume(self, name: str) -> None:
        self._known(name).resume()

    def expire(self, name: str) -> None:
        session = self._known(name).session_id
        if session in self.leases:
            self.leases.close(session)
            self._end_session(session)

    def crash(self, name: str) -> None:
        self._known(name).crash()

    def is_still_heard(self, name: str) -> bool:
        """Whether anything may still be carried out that a client asked for over a connection that broke."""
        return self._late[name] > 0

    def stop(self) -> None:
        self._is_stopped = True
        for connection in list(self._connections.values()):
            self._broke(connection)

    def start(self) -> None:
        self._is_stopped = False
        for session in self.leases.sessions:
            self.leases.touch(session, self.clock.monotonic_ns())

    def _known(self, name: str) -> SimRegistry:
        if name not in self._clients:
            raise Misuse(f"no client {name!r}: take it with client() first")
        return self._clients[name]

    def _ways_of(self, name: str, only: Direction | None) -> list[SimulatedRoute]:
        self._known(name)
        ways = self._ways[name]
        return [ways.there, ways.back] if only is None else [ways.there if only == "there" else ways.back]

    # --- connections and sessions ------------------------------------------------------------------------------------

    def dial(self, client: SimRegistry) -> SimulatedConnection:
        """Set out: what is sent on it arrives, or does not."""
        self._connections_made += 1
        rng = self._rng.child(f"connection-{self._connections_made}")
        ways = self._ways[client.name]
        connection = SimulatedConnection(client)
        broke = partial(self._broke, connection)
        connection.there = SimulatedWire(self.loop, rng.child("there"), ways.there, broke)
        connection.back = SimulatedWire(self.loop, rng.child("back"), ways.back, broke)
        return connection

    def welcome(self, connection: SimulatedConnection, session: int, session_ns: int) -> None:
        """A client wants a session, or the one that it has. 0 is the answer to who has none any more."""
        if self._is_stopped:
            self._broke(connection)
            return
        now_ns = self.clock.monotonic_ns()
        if session == 0:
            self._sessions_made += 1
            session = self._sessions_made
            self.leases.open(session, session_ns, now_ns)
            self._beat_on()
        elif session in self.leases:
            self.leases.touch(session, now_ns)
        else:
            session = 0
        if session:
            before = self._connections.get(session)
            if before is not None and before is not connection:
                before.close()  # it has moved: what is under way to where it was is not carried out any more
            connection.session = session
            self._connections[session] = connection
        connection.back.send(connection.client.welcomed, connection, session)

    def hear(self, connection: SimulatedConnection, act: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        """A request has arrived: carry it out, and answer."""
        outcome: Any
        try:
            if answer in connection.waiting:
                connection.waiting[answer] = None
            self.leases.check(connection.session)
            connection.is_heard = True
            outcome = act()
        except RegistryError as error:
            outcome = error
        connection.back.send(connection.client.answered, connection, answer, outcome)

    def _broke(self, connection: SimulatedConnection) -> None:
        """Both ends are closed, and the client will notice. That it was heard of is not passed on any more."""
        if connection.is_closed:
            return
        connection.close()
        if self._weather.late_us:
            self._delay(connection)
        if self._connections.get(connection.session) is connection:
            del self._connections[connection.session]
        late_s = self._rng.below(self._weather.notice_us + 1) / 1e6
        self.loop.call_later(late_s, connection.client.noticed, connection)

    def _delay(self, connection: SimulatedConnection) -> None:
        """What was on its way when the connection broke sits in some queue, and comes out of it. ZooKeeper refuses it
        once the session has moved on; others may not."""
        for act in connection.waiting.values():
            if act is not None and self._rng.below(2):
                late_s = self._rng.below(self._weather.late_us + 1) / 1e6
                self._late[connection.client.name] += 1
                self.loop.call_later(late_s, self._carry_out_late, connection, act)

    def _carry_out_late(self, connection: SimulatedConnection, act: Callable[[], Any]) -> None:
        self._late[connection.client.name] -= 1
        with suppress(RegistryError):
            self.leases.check(connection.session)
            act()

    def end_session(self, connection: SimulatedConnection) -> None:
        """By its owner's wish."""
        self._connections.pop(connection.session, None)  # its owner need not be told
        self.leases.close(connection.session)
        self._end_session(connection.session)

    def _end_session(self, session: int) -> None:
        self._commit(self.tree.end(session))
        connection = self._connections.pop(session, None)
        if connection is not None:
            connection.back.send(connection.client.told_over, connection)

    def _beat_on(self) -> None:
        if self._beating is None:
            self._beating = self.loop.call_later(self._tick_ns / 2e9, self._beat)

    def _beat(self) -> None:
        """Twice per tick: servers pass on whom they have heard, then those of whom nobody has are over."""
        self._beating = None
        now_ns = self.clock.monotonic_ns()
        for connection in self._connections.values():
            if connection.is_heard and connection.session in self.leases:
                connection.is_heard = False
                self.leases.touch(connection.session, now_ns)
        if not self._is_stopped:
            for session in self.leases.expire(now_ns):
                self._end_session(session)
        if len(self.leases):
            self._beat_on()

    # --- what requests do --------------------------------------------------------------------------------------------

    def get(self, connection: SimulatedConnection, path: str, is_fresh: bool) -> Node | None:
        return self._server(connection, is_fresh).get(path)

    def get_many(self, connection: SimulatedConnection, paths: list[str]) -> list[Node | None]:
        tree = self._server(connection, False)
        return [tree.get(path) for path in paths]

    def children(self, connection: SimulatedConnection, path: str) -> list[str]:
        return self._server(connection, False).children(path)

    def create(
        self, connection: SimulatedConnection, path: str, value: bytes, *, is_ephemeral: bool, is_numbered: bool
    ) -> Node | None:
        owner = connection.session if is_ephemeral else 0
        changes = self.tree.create(path, value, owner=owner, is_numbered=is_numbered)
        self._change(connection, changes)
        return changes[-1].node

    def put(self, connection: SimulatedConnection, path: str, value: bytes, version: int) -> Node | None:
        changes = self.tree.put(path, value, version)
        self._change(connection, changes)
        return changes[-1].node

    def remove(self, connection: SimulatedConnection, path: str, version: int | None) -> None:
        self._change(connection, self.tree.remove(path, version))

    def watch(self, connection: SimulatedConnection, path: str) -> None:
        """Tell of every change from now on; and reads from now on know of those before."""
        connection.watched[path] = None
        connection.floor = self._end

    def watch_tree(self, connection: SimulatedConnection, path: str) -> None:
        """The same, of every node below."""
        connection.trees[path] = None
        connection.floor = self._end

    def _change(self, connection: SimulatedConnection, changes: list[NodeChange]) -> None:
        self._commit(changes)
        connection.floor = self._end

    def _commit(self, changes: list[NodeChange]) -> None:
        if not changes:
            return
        self.tree.apply(changes)
        self._log.append(_TreeChange(self.clock.monotonic_ns(), changes))
        paths = touched(changes)
        for connection in list(self._connections.values()):
            for path in paths:
                if path in connection.watched:
                    late_s = self._rng.below(self._weather.watch_late_us + 1) / 1e6
                    self.loop.call_later(late_s, self._emit, connection, path, self._end)
            self._emit_below(connection, changed(changes))
        if len(self._log) > _LOG_MAX:
            self._trim()

    def _emit_below(self, connection: SimulatedConnection, paths: list[str]) -> None:
        """Tell of each change in a tree that is watched; late, and in any order."""
        for path in paths:
            if any(is_below(path, root) for root in connection.trees):
                late_s = self._rng.below(self._weather.watch_late_us + 1) / 1e6
                self.loop.call_later(late_s, self._emit, connection, path, self._end, True)

    def _emit(self, connection: SimulatedConnection, path: str, position: int, is_tree: bool = False) -> None:
        if not connection.is_closed:
            self._advance(self._servers[connection.client.name], position)
            told = connection.client.changed_below if is_tree else connection.client.changed
            connection.back.send(told, connection, path)

    # --- servers that are behind -------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._log_start + len(self._log)

    def _server(self, connection: SimulatedConnection, is_fresh: bool) -> Tree:
        """The tree as the client's server sees it now: behind by a while, never behind what the client was told."""
        server = self._servers[connection.client.name]
        position = self._end if is_fresh else max(server.position, connection.floor)
        lag_us = self._rng.below(self._weather.stale_us + 1) if self._rng.below(2) else 0  # every other one is not
        seen_ns = self.clock.monotonic_ns() - lag_us * 1_000
        while position < self._end and self._log[position - self._log_start].at_ns <= seen_ns:
            position += 1
        self._advance(server, position)
        return server.tree

    def _advance(self, server: _SimulatedServer, position: int) -> None:
        while server.position < position:
            server.tree.apply(self._log[server.position - self._log_start].changes)
            server.position += 1

    def _trim(self) -> None:
        """Let go of the older half; nobody is that far behind."""
        start = self._end - _LOG_MAX // 2
        for server in self._servers.values():
            self._advance(server, start)
        del self._log[: start - self._log_start]
        self._log_start = start
