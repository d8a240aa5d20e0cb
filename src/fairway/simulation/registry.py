"""Simulated registry: a ZooKeeper ensemble on virtual time, as clients see one, with faults that tests switch.

    ensemble = SimEnsemble(simulation)          for one simulation, with its own clients
    registry = ensemble.client("broker-1")      a `Registry`, which opens its session by itself

The simulation keeps the properties of the real registry. Requests of a client are carried out in order, and answers
come back in order. A connection that breaks loses everything in flight in both directions, so a change may have been
made or not. A server that may be behind answers plain reads, though it is never behind what this client has seen. The
server of a client informs the others twice per tick that the client is alive. It does not if the connection breaks
before. A session ends on the ensemble's own clock.

    simulated_faults   delays each way, chances that a request or a reply breaks the connection, late watches, old reads
    cut, mend          nothing passes between a client and the ensemble, both ways or one: messages are held, not lost
    drop               the connection breaks
    pause, resume      the client's process stands still: it sends and receives nothing
    expire             the ensemble ends a client's session
    crash              the client is gone without closing its session
    stop, start        all servers are gone for a while; sessions get their whole time-out from the start on
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
from fairway.registry.port import Node, RegistryError
from fairway.registry.sessions import SessionLeases
from fairway.registry.tree import NodeChange, Tree, changed, is_below, touched
from fairway.runtime.clock import Clock, SimClock
from fairway.simulation import Simulation
from fairway.simulation.registry_client import SimRegistry, SimulatedConnection
from fairway.simulation.wire import Conditions, SimulatedRoute, SimulatedWire

SESSION_MS = 10_000
TICK_MS = 500  # a session lasts at least two ticks
_LOG_MAX = 512  # changes kept for servers that are behind

Direction: TypeAlias = Literal["there", "back"]


@dataclass(frozen=True)
class SimulatedFaults:
    """The faults in force. `drop_chance` of a direction: the chance that a message breaks the connection."""

    there: Conditions = field(default_factory=Conditions)  # requests; a dropped request is not carried out
    back: Conditions = field(default_factory=Conditions)  # replies and watch events; the request was carried out
    notice_us: int = 200_000  # at most, until a client learns that its connection broke
    watch_late_us: int = 50_000  # at most, from a change to its watch event
    stale_us: int = 100_000  # at most, the lag of the server behind a read that is not fresh
    late_us: int = 0  # at most, until a request of a broken connection is carried out all the same; 0: never


class SimulatedRoutes(NamedTuple):
    """Between the ensemble and one client."""

    there: SimulatedRoute
    back: SimulatedRoute


class _TreeChange(NamedTuple):
    """One change of the tree, for servers that are behind."""

    at_ns: int
    changes: list[NodeChange]


class _SimulatedServer:
    """The server that answers one client's reads: a copy of the tree after so many changes."""

    def __init__(self, tree: Tree, position: int) -> None:
        self.tree = tree.copy()
        self.position = position


class SimEnsemble:
    """The servers' common state, and the routes to their clients."""

    def __init__(
        self, simulation: Simulation, *, simulated_faults: SimulatedFaults | None = None, tick_ms: int = TICK_MS
    ) -> None:
        self.tree = Tree()  # for tests to look at
        self.leases = SessionLeases()
        self.loop = simulation.loop
        self.clock = SimClock(simulation.loop.now_ns)  # the ensemble's own
        self._rng = simulation.rng.child("ensemble")
        self._simulated_faults = simulated_faults or SimulatedFaults()
        self._tick_ns = tick_ms * 1_000_000
        self._log: list[_TreeChange] = []
        self._log_start = 0
        self._sessions_made = 0
        self._connections_made = 0
        self._clients: dict[str, SimRegistry] = {}
        self._servers: dict[str, _SimulatedServer] = {}
        self._ways: dict[str, SimulatedRoutes] = {}
        self._connections: dict[int, SimulatedConnection] = {}  # by session
        self._late: Counter[str] = Counter()  # by client: requests that will be carried out late, or never
        self._beating: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def client(self, name: str, *, session_ms: int = SESSION_MS, clock: Clock | None = None) -> SimRegistry:
        """Create a client. The name of a closed or crashed client may be used again."""
        known = self._clients.get(name)
        if known is not None and not known.is_gone:
            raise Misuse(f"client {name!r} lives: close or crash it first")
        if name not in self._ways:
            self._ways[name] = SimulatedRoutes(
                SimulatedRoute(self._simulated_faults.there), SimulatedRoute(self._simulated_faults.back)
            )
        self._servers[name] = _SimulatedServer(self.tree, self._end)
        granted_ns = max(session_ms * 1_000_000, 2 * self._tick_ns)
        client = SimRegistry(self, name, granted_ns, clock or self.clock, self.loop)
        self._clients[name] = client
        return client

    # --- faults ------------------------------------------------------------------------------------------------------

    @property
    def simulated_faults(self) -> SimulatedFaults:
        return self._simulated_faults

    @simulated_faults.setter
    def simulated_faults(self, simulated_faults: SimulatedFaults) -> None:
        self._simulated_faults = simulated_faults
        for ways in self._ways.values():
            ways.there.conditions, ways.back.conditions = simulated_faults.there, simulated_faults.back

    def lose(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """Set the chance that a request, or a reply, breaks its connection."""
        simulated_faults = self._simulated_faults
        there, back = (
            replace(simulated_faults.there, drop_chance=requests),
            replace(simulated_faults.back, drop_chance=replies),
        )
        self.simulated_faults = replace(simulated_faults, there=there, back=back)

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
        """Whether requests of a client over a broken connection may still be carried out."""
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
        """Create a connection. Its messages may arrive or not."""
        self._connections_made += 1
        rng = self._rng.child(f"connection-{self._connections_made}")
        ways = self._ways[client.name]
        connection = SimulatedConnection(client)
        broke = partial(self._broke, connection)
        connection.there = SimulatedWire(self.loop, rng.child("there"), ways.there, broke)
        connection.back = SimulatedWire(self.loop, rng.child("back"), ways.back, broke)
        return connection

    def welcome(self, connection: SimulatedConnection, session: int, session_ns: int) -> None:
        """A client asks for a session, or for its current one. The answer 0 says that its session has ended."""
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
                before.close()  # the session has moved: requests in flight there are not carried out any more
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
        """Close both ends; the client will notice. The other servers do not learn any more that the client was
        alive."""
        if connection.is_closed:
            return
        connection.close()
        if self._simulated_faults.late_us:
            self._delay(connection)
        if self._connections.get(connection.session) is connection:
            del self._connections[connection.session]
        late_s = self._rng.below(self._simulated_faults.notice_us + 1) / 1e6
        self.loop.call_later(late_s, connection.client.noticed, connection)

    def _delay(self, connection: SimulatedConnection) -> None:
        """Requests in flight wait in some queue, and arrive late. ZooKeeper refuses them once the session has moved on;
        other registries may not."""
        for act in connection.waiting.values():
            if act is not None and self._rng.below(2):
                late_s = self._rng.below(self._simulated_faults.late_us + 1) / 1e6
                self._late[connection.client.name] += 1
                self.loop.call_later(late_s, self._carry_out_late, connection, act)

    def _carry_out_late(self, connection: SimulatedConnection, act: Callable[[], Any]) -> None:
        self._late[connection.client.name] -= 1
        with suppress(RegistryError):
            self.leases.check(connection.session)
            act()

    def end_session(self, connection: SimulatedConnection) -> None:
        """End a session at its owner's request."""
        self._connections.pop(connection.session, None)  # its owner knows
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
        """Twice per tick: servers inform each other which clients are alive. Then the silent sessions end."""
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

    # --- requests ----------------------------------------------------------------------------------------------------

    def watch(self, connection: SimulatedConnection, path: str, is_tree: bool) -> None:
        """Report every change of the node, or of every node below, from now on. Reads from now on see the changes
        before."""
        (connection.trees if is_tree else connection.watched)[path] = None
        connection.floor = self._end

    def change(self, connection: SimulatedConnection, changes: list[NodeChange]) -> Node | None:
        """Make changes of the tree, and return the last changed node."""
        self._commit(changes)
        connection.floor = self._end
        return changes[-1].node

    def _commit(self, changes: list[NodeChange]) -> None:
        if not changes:
            return
        self.tree.apply(changes)
        self._log.append(_TreeChange(self.clock.monotonic_ns(), changes))
        paths, below = touched(changes), changed(changes)
        for connection in list(self._connections.values()):
            found = [(path, False) for path in paths if path in connection.watched]
            found += [(path, True) for path in below if any(is_below(path, root) for root in connection.trees)]
            for path, is_tree in found:  # each is reported late, and in any order
                late_s = self._rng.below(self._simulated_faults.watch_late_us + 1) / 1e6
                self.loop.call_later(late_s, self._emit, connection, path, self._end, is_tree)
        if len(self._log) > _LOG_MAX:
            self._trim()

    def _emit(self, connection: SimulatedConnection, path: str, position: int, is_tree: bool) -> None:
        if not connection.is_closed:
            self._advance(self._servers[connection.client.name], position)
            connection.back.send(connection.client.changed, connection, path, is_tree)

    # --- servers that are behind -------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._log_start + len(self._log)

    def seen(self, connection: SimulatedConnection, is_fresh: bool = False) -> Tree:
        """The tree as the client's server sees it: behind by a while, but never behind what the client has seen."""
        server = self._servers[connection.client.name]
        position = self._end if is_fresh else max(server.position, connection.floor)
        lag_us = (
            self._rng.below(self._simulated_faults.stale_us + 1) if self._rng.below(2) else 0
        )  # half of the reads do not lag
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
        """Drop the older half; no server is that far behind afterwards."""
        start = self._end - _LOG_MAX // 2
        for server in self._servers.values():
            self._advance(server, start)
        del self._log[: start - self._log_start]
        self._log_start = start
