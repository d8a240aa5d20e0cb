"""Meta server: its port, its requests and its probes.

A meta server speaks the same protocol as a broker, with the same sessions and bounds. Any number of meta servers may
share one ZooKeeper ensemble: each keeps a cluster state of its own, and changes the registry by compare-and-set. With
an SQLite registry there is exactly one meta server, which also serves that registry to the brokers
(`RegistryRequestHandler`).

`Presence` keeps the meta server's own node in the registry, which shows others its address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from fairway import limits
from fairway.errors import BadName, Code, FairwayError, Misuse, Refused
from fairway.lookup.registries import META_PORT
from fairway.meta.admin import ClusterAdmin
from fairway.meta.cluster_state import ClusterState
from fairway.meta.decommission_check import Masters
from fairway.meta.registry_requests import QUESTIONS, RegistryRequestHandler
from fairway.meta.registry_watcher import RegistryWatcher
from fairway.meta.route_requests import RouteRequestHandler, SubjectCreator, check
from fairway.meta.route_upkeep import RouteUpkeep
from fairway.protocol import ConnectionOptions, RequestReceived
from fairway.protocol.admin_messages import BrokerState, Describe, Described
from fairway.protocol.connection_states import FEED
from fairway.protocol.line import RetryDelays
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import Govern, Governed, Register, Route, RouteChange
from fairway.registry import layout
from fairway.registry.port import Exists, Missing, Registry, RegistryError, SessionState
from fairway.registry.sqlite import SqliteRegistry
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng
from fairway.runtime.service import cancel
from fairway.scheduling import Scheduler
from fairway.serving.http import HttpResponse
from fairway.serving.memory_plan import MemoryAccount, server_accounts, show
from fairway.serving.metrics import CONTENT_TYPE, MetricsText
from fairway.serving.rates import CreationRate
from fairway.serving.requests import ServedRequest, admit
from fairway.serving.session import ServerSession
from fairway.serving.session_manager import SessionManagerOptions, SocketServer, check_host

_RETRY_FIRST_MS = 100
_RETRY_MOST_MS = 5_000
_NS = 1_000_000_000


class MetaRecord(msgspec.Struct, frozen=True):
    """The record of a meta server's node. The name of the node is the address."""

    name: str  # program and version
    started_ms: int = 0


class Presence:
    """Creates the meta server's node, again in every new session."""

    def __init__(self, registry: Registry, rng: Rng, address: str, record: MetaRecord) -> None:
        self._registry = registry
        self._path = f"{layout.METAS}/{address}"
        self._value = msgspec.json.encode(record)
        self._backoff = RetryDelays(rng, first_ms=_RETRY_FIRST_MS, most_ms=_RETRY_MOST_MS)
        self._is_due = asyncio.Event()
        self._is_due.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fairway-meta-presence")

    def session_is(self, state: SessionState) -> None:
        if state is SessionState.OPEN:
            self._is_due.set()

    async def stop(self) -> None:
        await cancel([self._task])

    async def _run(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            if await self._appear():
                self._backoff.reset()
            else:
                self._is_due.set()
                await asyncio.sleep(self._backoff.next_ns() / _NS)

    async def _appear(self) -> bool:
        """Return whether the node exists and is this server's. A node from before a restart is removed first."""
        try:
            node = await self._registry.get(self._path, fresh=True)
            if node is not None and node.owner == self._registry.session_id:
                return True
            if node is not None:
                with contextlib.suppress(Missing):
                    await self._registry.remove(self._path, node.version)
            with contextlib.suppress(Exists):
                await self._registry.create(self._path, self._value, is_ephemeral=True)
                return True
        except FairwayError:
            return False
        return False


_DECISIONS_MAX = 64  # of operators, under way at once
_NOT_META = Refused(
    Code.UNSUPPORTED,
    "this is a meta server, which has no messages: connect with meta://HOST:PORT, and it says where they are",
)
_BUSY = Refused(Code.BUSY, "too many decisions are being carried out: ask again", retry_after_ms=200)

MessageT = TypeVar("MessageT", bound=ControlMessage)


@dataclass(frozen=True, slots=True)
class MetaOptions:
    """What an operator may set."""

    host: str = "127.0.0.1"
    port: int = META_PORT
    allow_remote: bool = False  # there is no authentication: the operator must mean to let others connect
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: not served
    advertise: str = ""  # HOST:PORT, as others reach the server; empty: where it listens
    create_subjects: bool = True  # on first use
    spread: int = 1  # broker groups of a new subject
    waiting_bytes_max: int = 128 * limits.MIB  # of requests that are not answered yet
    memory_bytes_max: int = 0  # bound of the process, which the other bounds are parts of; 0: unknown
    registry_bytes_max: int = limits.REGISTRY_BYTES_MAX  # of nodes and sessions, if this server keeps the registry
    drain_ms_max: int = 2_000
    session_manager: SessionManagerOptions = field(default_factory=SessionManagerOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)
        if self.spread < 1:
            raise Misuse(f"a new subject is on 1 broker group or more, not on {self.spread} (--spread)")

    @property
    def connection(self) -> ConnectionOptions:
        return self.session_manager.connection

    def feeding(self) -> SessionManagerOptions:
        """The options for connections, with the features of a meta server."""
        return replace(
            self.session_manager, connection=replace(self.connection, features=(*self.connection.features, FEED))
        )


@dataclass(frozen=True, slots=True)
class MetaWorld:
    """The world of a meta server. With `sessions`, this server alone has the registry, and serves it to clients."""

    clock: Clock
    net: Net
    rng: Rng
    registry: Registry
    sessions: SqliteRegistry | None = None


class MetaServer(SocketServer):
    """One meta server on one loop. `await MetaServer.start(...)`, then `await server.stop()`, which closes the
    registry, too."""

    def __init__(self, world: MetaWorld, options: MetaOptions, remark: Callable[[str], None]) -> None:
        clock = world.clock
        accounts = Scheduler(clock, asyncio.get_running_loop())  # of connections: there are no actors here
        super().__init__(clock, world.net, accounts, options.feeding(), options.waiting_bytes_max, "meta server")
        self.options = options
        self.registers = RegistryRequestHandler(world.sessions, self._started_ms, options.registry_bytes_max)
        self.cluster_state = ClusterState()
        self._world = world
        self._registry = world.registry
        self.registry_watcher = RegistryWatcher(world.registry, self.cluster_state, world.rng, self._told, remark)
        masters = Masters(world.net, world.clock, world.rng)
        self.admin = ClusterAdmin(world.registry, self.cluster_state, self._told, masters, options.spread)
        self.creation_rate = CreationRate(world.clock)
        self._subject_creator = SubjectCreator(self.admin, world.clock, self.creation_rate)
        self.routes = RouteRequestHandler(
            self.cluster_state,
            self._subject_creator,
            lambda: self.registry_watcher.is_old,
            self.waiting,
            policy=options.create_subjects,
        )
        self.upkeep = RouteUpkeep(
            world.registry,
            self.cluster_state,
            self.admin,
            masters,
            world.clock,
            self.routes.is_awaited,
            may_expire=options.create_subjects,
            is_turn=self._keeps_routes,
        )
        self._presence: Presence | None = None
        self._decisions: dict[asyncio.Task[None], None] = {}

    @classmethod
    async def start(
        cls, world: MetaWorld, options: MetaOptions, remark: Callable[[str], None] = lambda _: None
    ) -> MetaServer:
        """Read the registry, then listen. `remark` gets news for people."""
        server = cls(world, options, remark)
        world.registry.on_session = server._session_is
        server.registry_watcher.start()
        try:
            await server.registry_watcher.loaded()
            await server.registers.start()
            await server._listeners.open(options.host, options.port, options.http_port)
        except BaseException:
            await server.stop()
            raise
        record = MetaRecord(options.connection.name, server._started_ms)
        server._presence = Presence(world.registry, world.rng, server.address, record)
        server.upkeep.start()
        return server

    def _on_closed(self, session: ServerSession) -> None:
        """The registry's sessions of a closed connection last a while, and cost nobody."""
        self.registers.memory.forget_payer(session)

    @property
    def address(self) -> str:
        """The address at which others reach the server."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return self.options.advertise or f"{host}:{self.port}"

    def _told(self, keys: list[tuple[str, str]]) -> None:
        self.routes.tell(keys)
        self.upkeep.note(keys)

    def _keeps_routes(self) -> bool:
        """Whether this meta server does the route upkeep."""
        return not self.registry_watcher.is_old and self.cluster_state.metas[:1] == [self.address]

    def _session_is(self, state: SessionState) -> None:
        self.registry_watcher.session_is(state)
        if self._presence is not None:
            self._presence.session_is(state)

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Take a request. The session answers `Refused` and `Misuse`."""
        message = received.message
        if isinstance(message, Route):
            check(message)
            self.routes.take(self._admit(session, received, message))
        elif isinstance(message, Register):
            self.registers.check(message)
            self.registers.take(self._admit(session, received, message))
        elif isinstance(message, Govern):
            self._decide(session, received, message)
        elif isinstance(message, Describe):
            session.respond(received.correlation, Described(self._state(), []))
        else:
            raise _NOT_META

    def _admit(self, session: ServerSession, received: RequestReceived, message: MessageT) -> ServedRequest[MessageT]:
        if isinstance(message, Register):
            is_waiting = message.act in QUESTIONS and message.wait_ms > 0
            beside_bytes = limits.TASK_BYTES
        else:
            is_waiting = isinstance(message, Route) and message.wait_ms > 0
            beside_bytes = len(message.subjects) * limits.ROUTE_SUBJECT_BYTES if isinstance(message, Route) else 0
        return admit(
            session,
            received,
            message,
            self.waiting,
            deadline_ns=0,
            wait_until_ns=1 if is_waiting else 0,
            beside_bytes=beside_bytes,
        )

    def _decide(self, session: ServerSession, received: RequestReceived, message: Govern) -> None:
        if len(self._decisions) >= _DECISIONS_MAX:
            raise _BUSY
        request = self._admit(session, received, message)
        task = asyncio.get_running_loop().create_task(self._govern(request), name="fairway-meta-govern")
        self._decisions[task] = None
        task.add_done_callback(self._decisions.pop)

    async def _govern(self, request: ServedRequest[Govern]) -> None:
        try:
            request.respond(await self._governed(request.message, request.session))
        except RegistryError as error:
            request.refuse(Refused(Code.OTHER, f"the registry did not do it: {error}"))
        except (Refused, BadName, Misuse) as error:
            request.fail(error)
        except FairwayError as error:
            request.refuse(Refused(Code.OTHER, str(error)))

    async def _governed(self, asked: Govern, connection: object) -> Governed:
        is_new = asked.change is RouteChange.CREATE and asked.name not in self.cluster_state.subjects
        if is_new:
            self.creation_rate.check(connection)
        done = await self.admin.govern(asked)
        if is_new and done.sentence:
            self.creation_rate.note(connection)
        return done

    def _state(self) -> BrokerState:
        return BrokerState(
            self.options.connection.name,
            0,
            0,
            is_master=False,
            is_read_only=self.registry_watcher.is_old,
            started_ms=self._started_ms,
            connections=len(self.session_manager),
            now_ms=self.clock.wall_ms(),
            connections_max=self.options.session_manager.connections_max,
        )

    def accounts(self) -> list[MemoryAccount]:
        """The memory that clients can make this server use."""
        registers, bytes_max = self.registers, self.options.registry_bytes_max
        found = server_accounts(self.options.memory_bytes_max, self.session_manager, self.waiting)
        found.append(MemoryAccount("registry", bytes_max, lambda: registers.held_bytes))
        found.append(MemoryAccount("sessions", registers.memory.bytes_max, lambda: registers.memory.taken_bytes))
        return found

    # --- probes ------------------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        out = MetricsText()
        self.show_connections(out)
        self.meters.show_refusals(out)
        show(out, self.accounts())
        out.one("meta_routes_total", "counter", "Questions for routes answered.", self.routes.answered)
        out.one("meta_routes_waiting", "gauge", "Questions that wait for a change.", len(self.routes))
        out.one("meta_subjects", "gauge", "Subjects in the registry.", len(self.cluster_state.subjects))
        expired, repaired = self.upkeep.expired, self.upkeep.repaired
        out.one("meta_expired_subjects_total", "counter", "Routes of unused subjects removed.", expired)
        out.one("meta_repaired_routes_total", "counter", "Routes that lacked a group with messages.", repaired)
        refused = self.creation_rate.refused
        out.one("creations_refused_total", "counter", "Subjects not made: too many a second.", refused)
        out.one("meta_version", "gauge", "Of the picture: changes seen so far.", self.cluster_state.version)
        out.one("meta_is_old", "gauge", "1: the registry cannot be reached.", int(self.registry_watcher.is_old))
        views = sorted(self.cluster_state.groups.items())
        out.family(
            "meta_group_has_master", "gauge", "1: somebody leads the group.",
            [({"group": name, "kind": view.kind}, int(view.master is not None)) for name, view in views],
        )  # fmt: skip
        out.family(
            "meta_group_copies", "gauge", "Copies of the group that live.",
            [({"group": name, "kind": view.kind}, len(view.living)) for name, view in views],
        )  # fmt: skip
        return HttpResponse(200, out.text(), CONTENT_TYPE)

    def _readiness(self) -> str:
        """A server that has read the registry answers clients, even while the registry is away."""
        why = self.registry_watcher.why_old()
        return f"ready, but {why}" if why else "ready"

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when the server cannot go on. Then `stop` raises the reason."""
        ways = [self.registry_watcher.failed()] + (
            [] if self._world.sessions is None else [self._world.sessions.failed()]
        )
        ending = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ending:
                each.cancel()
        self.session_manager.cut_off()

    async def stop(self) -> None:
        """Answer waiting requests, close all connections, release the registry."""
        self._is_stopping = True
        self._listeners.close()
        self.session_manager.close("the meta server is stopping")
        if self._presence is not None:
            await self._presence.stop()
        await self.upkeep.stop()
        await self._subject_creator.stop()
        await self.routes.stop()
        await self.registers.stop()
        await cancel(self._decisions)
        try:
            await self.registry_watcher.stop()
        finally:
            await self.session_manager.deserted(self.options.drain_ms_max)
            self._listeners.close_http()
            await self._registry.close()
