"""The delay server as its own process: a port for delayed messages and questions about them, and nothing else.

The same protocol as a broker's, the same sessions and bounds. What concerns a broker is refused with the remedy;
DESCRIBE says who this is, so that tools which ask first are answered. It sends to the brokers that it was told of. As
one copy of several (`member`) it answers as its standing says, and once it leads it sends to the brokers that meta
servers name (`wayfinding`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fairway import limits
from fairway.delay import snapshot
from fairway.delay.arriving import Disks
from fairway.delay.engine import recover_logs
from fairway.delay.options import DelayOptions
from fairway.delay.service import Delay, DelayWorld
from fairway.delay.snapshot import Snapshots
from fairway.delay.wayfinding import TargetFinder
from fairway.errors import Code, FairwayError, Refused
from fairway.protocol import ConnectionOptions, RequestReceived
from fairway.protocol.admin import BrokerState, Describe, Described
from fairway.protocol.messages import Produce
from fairway.replication import standing as copies
from fairway.replication.figures import families
from fairway.replication.leader import Leader
from fairway.replication.standing import CopyStatus
from fairway.scheduling import Actor, Expiry, Scheduler, SchedulerOptions, TurnResult
from fairway.serving.budget import Allowance
from fairway.serving.delaying import DelayRequest, concerns_delay, key_of
from fairway.serving.doors import Listeners, check_host
from fairway.serving.exposition import CONTENT_TYPE, MetricsText
from fairway.serving.hall import SessionManager, SessionManagerOptions
from fairway.serving.http import EXHAUSTED, HttpListener, HttpResponse
from fairway.serving.memory import server_accounts, show
from fairway.serving.meters import ServerCounters
from fairway.serving.probe_pages import show_store
from fairway.serving.requests import Requester, admit, hand_to
from fairway.serving.session import ServerSession
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.store import Store
from fairway.world.dialing import Address
from fairway.world.job_runner import JobRunner

_MS_NS = 1_000_000
_NOT_DELAYED = Refused(
    Code.BAD_REQUEST,
    "a delay server takes only messages with a due time: send those without to a broker, fairway://BROKER?delay=HERE",
)
_NOT_A_BROKER = Refused(Code.UNSUPPORTED, "this is a delay server, which has no groups and no subjects: ask a broker")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What an operator may set."""

    host: str = "127.0.0.1"
    port: int = 20881
    allow_remote: bool = False  # there is no authentication yet: an address that others can reach must be meant
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: they are not served
    waiting_bytes_max: int = 128 * limits.MIB  # of requests that are not answered yet
    memory_bytes_max: int = 0  # of the process, which the other bounds are parts of; 0: nobody has said
    request_ms_max: int = 30_000
    drain_ms_max: int = 5_000
    hall: SessionManagerOptions = field(default_factory=SessionManagerOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    delay: DelayOptions = field(default_factory=DelayOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)

    @property
    def connection(self) -> ConnectionOptions:
        return self.hall.connection


class DelayServer:
    """One delay server on one loop. `await DelayServer.start(...)`, then `await server.stop()`."""

    def __init__(
        self, world: DelayWorld, options: ServerOptions, delay: Delay, standing: CopyStatus | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.clock = world.clock
        self.options = options
        self.delay = delay
        self.standing = standing  # of one copy of several
        self.scheduler = Scheduler(world.clock, loop, options.scheduler)
        self.meters = ServerCounters()
        self.waiting: Allowance[Requester] = Allowance(
            options.waiting_bytes_max, "wait in this delay server's requests"
        )
        self.hall = SessionManager(world.clock, options.hall, self.meters, self.scheduler, self.waiting, self.handle)
        self.pages = {"/metrics": self._metrics_page, "/livez": self._live_page, "/readyz": self._ready_page}
        self._doors = Listeners(world.net, self.hall, HttpListener(self.pages))
        self._describer = _Describer(self._state)
        self._started_ms = world.clock.wall_ms()
        self._world = world
        self._metas: tuple[Address, ...] = ()
        self._wayfinder: TargetFinder | None = None
        self._snapshots: Snapshots | None = None
        self._is_stopping = False

    @classmethod
    async def start(
        cls, world: DelayWorld, options: ServerOptions, brokers: Mapping[str, Sequence[Address]]
    ) -> DelayServer:
        """Recover, listen, dial the brokers. Messages are taken at once, and sent while the rest is still read."""
        delay = Delay.open(world, options.delay, options.connection.name)
        server = cls(world, options, delay)
        try:
            await server._doors.open(options.host, options.port, options.http_port)
        except FairwayError:
            await server.stop()
            raise
        delay.reach(brokers)
        return server

    @classmethod
    async def follow(
        cls,
        world: DelayWorld,
        options: ServerOptions,
        standing: CopyStatus,
        adopt: DirectoryIdentity | None = None,
        *,
        jobs: JobRunner,
    ) -> DelayServer:
        """One copy of several, which does not lead: recover the logs beside the loop, listen. `adopt`: the logs that it
        is to have, if it has none."""
        logs, schedule = world.log_disk or world.disk, None if world.log_disk is None else world.disk
        try:
            recovered = await jobs.run(partial(recover_logs, logs, schedule, world.rng, adopt))
        except BaseException:  # also where it is called off
            world.close()
            raise
        delay = Delay.follow(world, options.delay, options.connection.name, recovered)
        server = cls(world, options, delay, standing)
        try:
            await server._doors.open(options.host, options.port, options.http_port)
        except BaseException:  # also where it is called off
            server.abandon()
            raise
        return server

    # --- as one copy of several --------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        return self.delay.engine.store

    def on_committed(self) -> None:
        """More may be committed."""
        self.delay.engine.on_committed()

    def ask_at(self, metas: Sequence[Address]) -> None:
        """The meta servers that there are."""
        self._metas = tuple(metas)
        if self._wayfinder is not None:
            self._wayfinder.ask_at(metas)

    def begin_life(self) -> None:
        """It leads, and everything in its logs is committed: send what is due, wherever meta servers say."""
        self.delay.lead()
        self._wayfinder = TargetFinder(
            self._world.net,
            self._world.clock,
            self._world.rng,
            self._metas,
            name=self.options.connection.name,
            courier=self.delay.courier,
            on_change=self.delay.clockwork.poke,
        )
        self.delay.courier.follow(self._wayfinder)

    @property
    def disks(self) -> Disks:
        return Disks(self._world.log_disk or self._world.disk, self._world.disk)

    def _snapshots_of(self, leader: Leader) -> Snapshots:
        """Of this reign: a copy that is deposed begins again as another server."""
        if self._snapshots is None:
            later = asyncio.get_running_loop().call_later
            self._snapshots = Snapshots(
                self.delay.engine, self.disks, self.clock, later, leader.group, leader.epoch, leader.known
            )
        return self._snapshots

    @property
    def port(self) -> int:
        return self._doors.port

    @property
    def http_port(self) -> int | None:
        return self._doors.http_port

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Put a request into the mailbox of its actor; `Refused` and `Misuse` are answered by the session."""
        message = received.message
        if self.standing is not None and (leader := self.standing.admit(message)) is not None:
            who = self._snapshots_of(leader) if isinstance(message, snapshot.QUESTIONS) else leader
            copies.answer(who, self._request(session, received))
        elif concerns_delay(received):
            hand_to(self.scheduler, key_of(message), self._request(session, received), self.delay.desk)
        elif isinstance(message, Describe):
            hand_to(self.scheduler, ("describe",), self._request(session, received), self._describer)
        else:
            raise _NOT_DELAYED if isinstance(message, Produce) else _NOT_A_BROKER

    def _request(self, session: ServerSession, received: RequestReceived) -> DelayRequest:
        deadline_ns = self.clock.monotonic_ns() + self.options.request_ms_max * _MS_NS
        return admit(session, received, received.message, self.waiting, deadline_ns=deadline_ns)

    def _state(self) -> BrokerState:
        store = self.delay.engine.store
        return BrokerState(
            self.options.connection.name,
            store.messages.log.log_id,
            store.messages.log.epoch,
            is_master=self.standing is None or self.standing.is_master,
            is_read_only=store.fault is not None or not store.has_room,
            started_ms=self._started_ms,
            connections=len(self.hall),
            now_ms=self.clock.wall_ms(),
            durability="sync",
            free_bytes=store.free_bytes(),
            connections_max=self.options.hall.connections_max,
            rotten_spans=len(store.rotten) + self.delay.desk.damaged,
        )

    # --- what probes ask ---------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        out = MetricsText()
        out.one("connections", "gauge", "Connections open.", len(self.hall))
        out.one("connections_total", "counter", "Connections accepted.", self.meters.connections)
        refusals = sorted((code.value, count) for code, count in self.meters.refusals.items())
        codes = [({"code": code}, count) for code, count in refusals]
        out.family("refusals_total", "counter", "Requests refused.", codes)
        accounts = server_accounts(self.options.memory_bytes_max, self.hall, self.waiting)
        show(out, [*accounts, *self.delay.desk.memory_accounts()])
        store = self.delay.engine.store
        out.one("disk_free_bytes", "gauge", "Room left on the disk.", store.free_bytes())
        show_store(out, is_open=not store.is_closed)
        out.one("store_has_room", "gauge", "0: messages are refused, the disk is nearly full.", int(store.has_room))
        out.one("store_is_poisoned", "gauge", "1: the disk failed, nothing is answered.", int(store.fault is not None))
        if self._wayfinder is not None:
            is_lost = self._wayfinder.is_lost
            out.one("delay_meta_down", "gauge", "1: no meta server answers; what was known holds.", int(is_lost))
        if self.standing is not None:
            for each in families(self.standing, store):
                out.family(*each)
        self.delay.desk.show(out)
        return HttpResponse(200, out.text(), CONTENT_TYPE)

    def _live_page(self) -> HttpResponse:
        """Whether a restart would help: it does when the disk has failed us."""
        fault = self.delay.engine.fault
        return HttpResponse(200, "alive\n") if fault is None else HttpResponse(503, f"{fault}\n")

    def _ready_page(self) -> HttpResponse:
        """Whether to send clients here; one that still reads its files takes messages, and questions wait."""
        fault = self.delay.engine.fault
        if fault is not None or self._is_stopping or not self._doors.are_open:
            return HttpResponse(503, f"{fault or ('stopping' if self._is_stopping else 'starting')}\n")
        if self.waiting.is_exhausted:
            return EXHAUSTED
        return HttpResponse(200, "ready\n" if self.delay.engine.is_loaded else "ready, loading\n")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when it cannot go on: then `stop` raises what happened."""
        await self.delay.failed()
        self.hall.cut_off()

    def failure(self) -> FairwayError:
        """What that is."""
        return self.delay.failure()

    async def come_to_rest(self) -> None:
        """Before another copy leads: no further message goes out, and what is on its way may arrive."""
        await self.delay.come_to_rest(self.options.drain_ms_max)

    def fall_silent(self) -> None:
        """Accept nobody, take no requests, send nothing more: what is durable is still answered."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._wayfinder is not None:
            self._wayfinder.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._doors.close()
        self.hall.close("the delay server is stopping")
        self.scheduler.close()
        if self.standing is not None:
            self.delay.fall_silent()

    def abandon(self) -> None:
        """Not a word more to anybody, and nothing more is written: another copy leads, or this one begins again."""
        self.hall.cut_off()
        self.fall_silent()
        self._doors.close_http()
        self.delay.abandon()

    async def stop(self) -> None:
        """Answer what is durable, let what is on its way arrive, let go. Raises what ended it, if that did."""
        self.fall_silent()
        try:
            await self.delay.stop(self.options.drain_ms_max)
        finally:
            await self.hall.deserted(self.options.drain_ms_max)
            self._doors.close_http()


class _Describer:
    """Answers DESCRIBE: who this is, and that it has no subjects."""

    def __init__(self, state: Callable[[], BrokerState]) -> None:
        self._state = state

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult:
        del actor
        request.respond(Described(self._state(), []))
        return TurnResult.DONE

    def expire(self, request: DelayRequest, expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: DelayRequest, error: Exception) -> None:
        request.fail(error)
