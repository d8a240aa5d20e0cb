"""The meta server: who lives, which broker group carries which subject, and the registry for those who have no other.

The same protocol as a broker's, the same sessions and bounds. Any number of meta servers may stand before one ZooKeeper
ensemble: each keeps a picture of its own, and what they change there is compare-and-set. Before an SQLite registry
there is exactly one, and it serves that registry to the brokers, too (`registering`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fairway import limits
from fairway.errors import BadName, Code, FairwayError, Misuse, Refused
from fairway.lookup.opening import META_PORT
from fairway.meta.desk import RouteRequestHandler, check
from fairway.meta.founder import SubjectCreator
from fairway.meta.governing import ClusterAdmin
from fairway.meta.keeper import RegistryWatcher
from fairway.meta.masters import Masters
from fairway.meta.owing import MasterDecommissionCheck
from fairway.meta.picture import ClusterState
from fairway.meta.presence import MetaRecord, Presence
from fairway.meta.registering import QUESTIONS, RegistryRequestHandler, SessionMaker
from fairway.meta.route_upkeep import RouteAudit, RouteUpkeep, UnusedRoutes
from fairway.protocol import ConnectionOptions, RequestReceived
from fairway.protocol.admin import BrokerState, Describe, Described
from fairway.protocol.handshake import FEED
from fairway.protocol.messages import ControlMessage
from fairway.protocol.routing import Govern, Governed, Register, Route, RouteChange
from fairway.registry.port import Registry, RegistryError, SessionState
from fairway.scheduling import Scheduler
from fairway.serving.budget import Allowance
from fairway.serving.creation_rate import CreationRate
from fairway.serving.doors import Listeners, check_host
from fairway.serving.exposition import CONTENT_TYPE, MetricsText
from fairway.serving.hall import SessionManager, SessionManagerOptions
from fairway.serving.http import EXHAUSTED, HttpListener, HttpResponse
from fairway.serving.memory import MemoryAccount, server_accounts, show
from fairway.serving.meters import ServerCounters
from fairway.serving.requests import Requester, ServedRequest, admit
from fairway.serving.session import ServerSession
from fairway.world.clock import Clock
from fairway.world.net import Net
from fairway.world.rng import Rng

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
    allow_remote: bool = False  # there is no authentication yet: an address that others can reach must be meant
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: they are not served
    advertise: str = ""  # HOST:PORT, as others reach it; empty: where it listens
    create_subjects: bool = True  # on first use
    spread: int = 1  # broker groups of a new subject
    waiting_bytes_max: int = 128 * limits.MIB  # of questions that are not answered yet
    memory_bytes_max: int = 0  # of the process, which the other bounds are parts of; 0: nobody has said
    registry_bytes_max: int = limits.REGISTRY_BYTES_MAX  # of nodes and sessions, where this server keeps the registry
    drain_ms_max: int = 2_000
    hall: SessionManagerOptions = field(default_factory=SessionManagerOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)
        if self.spread < 1:
            raise Misuse(f"a new subject is on 1 broker group or more, not on {self.spread} (--spread)")

    @property
    def connection(self) -> ConnectionOptions:
        return self.hall.connection

    def feeding(self) -> SessionManagerOptions:
        """What concerns connections, with the features of a meta server."""
        return replace(self.hall, connection=replace(self.connection, features=(*self.connection.features, FEED)))


@dataclass(frozen=True, slots=True)
class MetaWorld:
    """The world as a meta server sees it. With `sessions`, the registry is ours alone and is served to others."""

    clock: Clock
    net: Net
    rng: Rng
    registry: Registry
    sessions: SessionMaker | None = None


class MetaServer:
    """One meta server on one loop. `await MetaServer.start(...)`, then `await server.stop()`, registry included."""

    def __init__(self, world: MetaWorld, options: MetaOptions, remark: Callable[[str], None]) -> None:
        self.clock = world.clock
        self.options = options
        self.meters = ServerCounters()
        self._started_ms = world.clock.wall_ms()
        accounts = Scheduler(world.clock, asyncio.get_running_loop())  # of connections: there are no actors here
        self.waiting: Allowance[Requester] = Allowance(options.waiting_bytes_max, "wait in this meta server's requests")
        self.hall = SessionManager(world.clock, options.feeding(), self.meters, accounts, self.waiting, self.handle)
        self.picture = ClusterState()
        self._world = world
        self._registry = world.registry
        self.keeper = RegistryWatcher(world.registry, self.picture, world.rng, self._told, remark)
        masters = Masters(world.net, world.clock, world.rng)
        self.governor = ClusterAdmin(
            world.registry, self.picture, self._told, MasterDecommissionCheck(masters), options.spread
        )
        self.creation_rate = CreationRate(world.clock)
        self._founder = SubjectCreator(self.governor, world.clock, self.creation_rate)
        self.routes = RouteRequestHandler(
            self.picture, self._founder, lambda: self.keeper.is_old, self.waiting, policy=options.create_subjects
        )
        self.unused_routes = UnusedRoutes(
            world.registry, self.picture, self.governor, masters, world.clock, self.routes.is_awaited
        )
        self.audit = RouteAudit(self.picture, self.governor, masters, self.unused_routes.note_used)
        self._upkeep = RouteUpkeep(
            self.unused_routes, self.audit, may_expire=options.create_subjects, is_turn=self._keeps_routes
        )
        self.registers = RegistryRequestHandler(world.sessions, self._started_ms, options.registry_bytes_max)
        self.hall.on_closed = self.registers.connection_closed
        pages = {"/metrics": self._metrics_page, "/livez": self._live_page, "/readyz": self._ready_page}
        self._doors = Listeners(world.net, self.hall, HttpListener(pages))
        self._presence: Presence | None = None
        self._decisions: dict[asyncio.Task[None], None] = {}
        self._is_stopping = False

    @classmethod
    async def start(
        cls, world: MetaWorld, options: MetaOptions, remark: Callable[[str], None] = lambda _: None
    ) -> MetaServer:
        """Read the registry, then listen. `remark` is told what people should know."""
        server = cls(world, options, remark)
        world.registry.on_session = server._session_is
        server.keeper.start()
        try:
            await server.keeper.loaded()
            await server.registers.start()
            await server._doors.open(options.host, options.port, options.http_port)
        except BaseException:
            await server.stop()
            raise
        record = MetaRecord(options.connection.name, server._started_ms)
        server._presence = Presence(world.registry, world.rng, server.address, record)
        server._upkeep.start()
        return server

    @property
    def port(self) -> int:
        return self._doors.port

    @property
    def http_port(self) -> int | None:
        return self._doors.http_port

    @property
    def address(self) -> str:
        """As others reach it."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return self.options.advertise or f"{host}:{self.port}"

    def _told(self, keys: list[tuple[str, str]]) -> None:
        self.routes.tell(keys)
        self.unused_routes.note(keys)

    def _keeps_routes(self) -> bool:
        """Whether this meta server is the one that keeps routes in step with brokers."""
        return not self.keeper.is_old and self.picture.metas[:1] == [self.address]

    def _session_is(self, state: SessionState) -> None:
        self.keeper.session_is(state)
        if self._presence is not None:
            self._presence.session_is(state)

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Take a request in; `Refused` and `Misuse` are answered by the session."""
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
        is_new = asked.change is RouteChange.CREATE and asked.name not in self.picture.subjects
        if is_new:
            self.creation_rate.check(connection)
        done = await self.governor.govern(asked)
        if is_new and done.sentence:
            self.creation_rate.note(connection)
        return done

    def _state(self) -> BrokerState:
        return BrokerState(
            self.options.connection.name,
            0,
            0,
            is_master=False,
            is_read_only=self.keeper.is_old,
            started_ms=self._started_ms,
            connections=len(self.hall),
            now_ms=self.clock.wall_ms(),
            connections_max=self.options.hall.connections_max,
        )

    def accounts(self) -> list[MemoryAccount]:
        """Everything that clients make this server hold."""
        registers, bytes_max = self.registers, self.options.registry_bytes_max
        found = server_accounts(self.options.memory_bytes_max, self.hall, self.waiting)
        found.append(MemoryAccount("registry", bytes_max, lambda: registers.held_bytes))
        found.append(MemoryAccount("sessions", registers.memory.bytes_max, lambda: registers.memory.taken_bytes))
        return found

    # --- what probes ask ---------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        out = MetricsText()
        out.one("connections", "gauge", "Connections open.", len(self.hall))
        out.one("connections_total", "counter", "Connections accepted.", self.meters.connections)
        refusals = sorted((code.value, count) for code, count in self.meters.refusals.items())
        codes = [({"code": code}, count) for code, count in refusals]
        out.family("refusals_total", "counter", "Requests refused.", codes)
        show(out, self.accounts())
        out.one("meta_routes_total", "counter", "Questions for routes answered.", self.routes.answered)
        out.one("meta_routes_waiting", "gauge", "Questions that wait for a change.", len(self.routes))
        out.one("meta_subjects", "gauge", "Subjects in the registry.", len(self.picture.subjects))
        expired, repaired = self.unused_routes.expired, self.audit.repaired
        out.one("meta_expired_subjects_total", "counter", "Routes of unused subjects removed.", expired)
        out.one("meta_repaired_routes_total", "counter", "Routes that lacked a group with messages.", repaired)
        refused = self.creation_rate.refused
        out.one("creations_refused_total", "counter", "Subjects not made: too many a second.", refused)
        out.one("meta_version", "gauge", "Of the picture: changes seen so far.", self.picture.version)
        out.one("meta_is_old", "gauge", "1: the registry cannot be reached.", int(self.keeper.is_old))
        views = sorted(self.picture.groups.items())
        out.family(
            "meta_group_has_master", "gauge", "1: somebody leads the group.",
            [({"group": name, "kind": view.kind}, int(view.master is not None)) for name, view in views],
        )  # fmt: skip
        out.family(
            "meta_group_copies", "gauge", "Copies of the group that live.",
            [({"group": name, "kind": view.kind}, len(view.living)) for name, view in views],
        )  # fmt: skip
        return HttpResponse(200, out.text(), CONTENT_TYPE)

    def _live_page(self) -> HttpResponse:
        return HttpResponse(200, "alive\n")

    def _ready_page(self) -> HttpResponse:
        """Whether to send clients here: one that has read the registry answers them, even when that is away."""
        if self._is_stopping or not self._doors.are_open:
            return HttpResponse(503, f"{'stopping' if self._is_stopping else 'starting'}\n")
        if self.waiting.is_exhausted:
            return EXHAUSTED
        why = self.keeper.why_old()
        return HttpResponse(200, f"ready, but {why}\n" if why else "ready\n")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when it cannot go on: then `stop` raises what happened."""
        ways = [self.keeper.failed()] + ([] if self._world.sessions is None else [self._world.sessions.failed()])
        ending = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ending:
                each.cancel()
        self.hall.cut_off()

    async def stop(self) -> None:
        """Answer what waits, say goodbye, let go of the registry."""
        self._is_stopping = True
        self._doors.close()
        self.hall.close("the meta server is stopping")
        if self._presence is not None:
            await self._presence.stop()
        await self._upkeep.stop()
        await self._founder.stop()
        await self.routes.stop()
        await self.registers.stop()
        for task in [*self._decisions]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        try:
            await self.keeper.stop()
        finally:
            await self.hall.deserted(self.options.drain_ms_max)
            self._doors.close_http()
            await self._registry.close()
