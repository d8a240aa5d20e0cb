"""Delay server as a process of its own, with a port for delayed messages and questions about them.

The server speaks the same protocol as a broker, with the same sessions and bounds. It refuses requests that concern a
broker, and the refusal names the remedy. It answers DESCRIBE, so that tools can ask what they talk to. A server that
stands alone sends to the brokers named at its start. One copy of several answers as its `CopyStatus` says; once it
leads, it sends to the brokers that the meta servers name (`TargetFinder`).

`DelayCopy` is one copy of a group of delay servers. `fairway.replication.copy_lifecycle` runs its life. The two logs of
a copy are its master's: the scheduled messages, and the decisions about them. Its buckets are its own, made from these
logs by its engine.

A master sends due messages to the brokers that meta servers name. If meta servers keep the registry, its URL names
them. Otherwise the copy reads them from the registry, where they register, and notices new ones. While none is
registered, the copy still tries the ones it knew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fairway import limits
from fairway.delay import install, snapshot
from fairway.delay.dispatch.targets import TargetFinder, parse_place
from fairway.delay.engine import DelayOptions, Engine, recover_logs
from fairway.delay.install import Disks
from fairway.delay.service import Delay, DelayWorld
from fairway.delay.snapshot import SnapshotReceiver, Snapshots
from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.protocol import ConnectionOptions, RequestReceived
from fairway.protocol.admin_messages import BrokerState, Describe, Described
from fairway.protocol.messages import Produce
from fairway.registry import layout
from fairway.registry.port import RegistryError, SessionState
from fairway.replication import copies, leadership
from fairway.replication.copies import CopyOptions, CopyRuntime, CopyStatus, Face, families
from fairway.replication.copy_lifecycle import CopyLifecycle
from fairway.replication.follower import TooFarBehind
from fairway.replication.leader import QUESTIONS, Leader
from fairway.runtime.disk import Disk
from fairway.runtime.net import Address
from fairway.runtime.threads import JobRunner
from fairway.scheduling import Scheduler, SchedulerOptions
from fairway.serving.http import HttpResponse, ProbePages, show_store
from fairway.serving.memory_plan import server_accounts, show
from fairway.serving.metrics import CONTENT_TYPE, MetricsText
from fairway.serving.requests import DelayRequest, admit, concerns_delay, hand_to, key_of
from fairway.serving.session import ServerSession
from fairway.serving.session_manager import SessionManagerOptions, SocketServer, check_host
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.store import Store

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
    allow_remote: bool = False  # there is no authentication: the operator must mean to let others connect
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: not served
    waiting_bytes_max: int = 128 * limits.MIB  # of requests that are not answered yet
    memory_bytes_max: int = 0  # bound of the process, which the other bounds are parts of; 0: unknown
    request_ms_max: int = 30_000
    drain_ms_max: int = 5_000
    session_manager: SessionManagerOptions = field(default_factory=SessionManagerOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    delay: DelayOptions = field(default_factory=DelayOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)

    @property
    def connection(self) -> ConnectionOptions:
        return self.session_manager.connection


class DelayServer(SocketServer):
    """One delay server on one loop. `await DelayServer.start(...)`, then `await server.stop()`."""

    def __init__(
        self, world: DelayWorld, options: ServerOptions, delay: Delay, copy_status: CopyStatus | None = None
    ) -> None:
        clock, sessions = world.clock, options.session_manager
        scheduler = Scheduler(clock, asyncio.get_running_loop(), options.scheduler)
        super().__init__(clock, world.net, scheduler, sessions, options.waiting_bytes_max, "delay server")
        self.options = options
        self.delay = delay
        self.copy_status = copy_status  # if it is one copy of several
        self._world = world
        self._metas: tuple[Address, ...] = ()
        self._target_finder: TargetFinder | None = None
        self._snapshots: Snapshots | None = None

    @classmethod
    async def start(
        cls, world: DelayWorld, options: ServerOptions, brokers: Mapping[str, Sequence[Address]]
    ) -> DelayServer:
        """Recover, listen, connect to the brokers. The server takes and sends messages while it still loads its
        files."""
        delay = Delay.open(world, options.delay, options.connection.name)
        server = cls(world, options, delay)
        try:
            await server._listeners.open(options.host, options.port, options.http_port)
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
        copy_status: CopyStatus,
        adopt: DirectoryIdentity | None = None,
        *,
        jobs: JobRunner,
    ) -> DelayServer:
        """Start as a replica: recover the logs off the loop, then listen. `adopt`: the identity for a directory without
        one."""
        logs, schedule = world.log_disk or world.disk, None if world.log_disk is None else world.disk
        try:
            recovered = await jobs.run(partial(recover_logs, logs, schedule, world.rng, adopt))
        except BaseException:  # also a cancellation
            world.close()
            raise
        delay = Delay.open(world, options.delay, options.connection.name, recovered)
        server = cls(world, options, delay, copy_status)
        try:
            await server._listeners.open(options.host, options.port, options.http_port)
        except BaseException:  # also a cancellation
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
        """Use these meta servers from now on."""
        self._metas = tuple(metas)
        if self._target_finder is not None:
            self._target_finder.ask_at(metas)

    def begin_life(self) -> None:
        """This copy leads and everything in its logs is committed: send what is due to the brokers that meta servers
        name."""
        self.delay.lead()
        self._target_finder = TargetFinder(
            self._world.net,
            self._world.clock,
            self._world.rng,
            self._metas,
            name=self.options.connection.name,
            dispatch_sender=self.delay.dispatch_sender,
            on_change=self.delay.due_timer.poke,
        )
        self.delay.dispatch_sender.follow(self._target_finder)

    @property
    def disks(self) -> Disks:
        return Disks(self._world.log_disk or self._world.disk, self._world.disk)

    def _snapshots_of(self, leader: Leader) -> Snapshots:
        """The snapshots of this leader. A deposed copy begins again as another server."""
        if self._snapshots is None:
            later = asyncio.get_running_loop().call_later
            self._snapshots = Snapshots(
                self.delay.engine, self.disks, self.clock, later, leader.group, leader.epoch, leader.known
            )
        return self._snapshots

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Put a request into the mailbox of its actor. The session answers `Refused` and `Misuse`."""
        message = received.message
        if self.copy_status is not None and (leader := self.copy_status.admit(message)) is not None:
            who = self._snapshots_of(leader) if isinstance(message, snapshot.QUESTIONS) else leader
            copies.answer(who, self._request(session, received))
        elif concerns_delay(received):
            hand_to(self.scheduler, key_of(message), self._request(session, received), self.delay.request_handler)
        elif isinstance(message, Describe):
            session.respond(received.correlation, Described(self._state(), []))
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
            is_master=self.copy_status is None or self.copy_status.is_master,
            is_read_only=store.fault is not None or not store.has_room,
            started_ms=self._started_ms,
            connections=len(self.session_manager),
            now_ms=self.clock.wall_ms(),
            durability="sync",
            free_bytes=store.free_bytes(),
            connections_max=self.options.session_manager.connections_max,
            rotten_spans=len(store.rotten) + self.delay.request_handler.damaged,
        )

    # --- probes ------------------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        out = MetricsText()
        self.show_connections(out)
        self.meters.show_refusals(out)
        accounts = server_accounts(self.options.memory_bytes_max, self.session_manager, self.waiting)
        show(out, [*accounts, *self.delay.request_handler.memory_accounts()])
        store = self.delay.engine.store
        out.one("disk_free_bytes", "gauge", "Room left on the disk.", store.free_bytes())
        show_store(out, is_open=not store.is_closed)
        out.one("store_has_room", "gauge", "0: messages are refused, the disk is nearly full.", int(store.has_room))
        out.one("store_is_poisoned", "gauge", "1: the disk failed, nothing is answered.", int(store.fault is not None))
        if self._target_finder is not None:
            is_lost = self._target_finder.is_lost
            out.one("delay_meta_down", "gauge", "1: no meta server answers; what was known holds.", int(is_lost))
        if self.copy_status is not None:
            for each in families(self.copy_status, store):
                out.family(*each)
        self.delay.request_handler.show(out)
        return HttpResponse(200, out.text(), CONTENT_TYPE)

    def _fault(self) -> StorageFault | None:
        return self.delay.engine.fault

    def _readiness(self) -> str:
        """A server that still loads takes messages, and questions wait."""
        return "ready" if self.delay.engine.is_loaded else "ready, loading"

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when the server cannot go on. Then `stop` raises the reason."""
        await self.delay.failed()
        self.session_manager.cut_off()

    def failure(self) -> FairwayError:
        """The reason why the server cannot go on."""
        return self.delay.failure()

    async def come_to_rest(self) -> None:
        """Stop sending, before another copy leads; wait for outstanding answers."""
        await self.delay.come_to_rest(self.options.drain_ms_max)

    def fall_silent(self) -> None:
        """Accept no connections and no requests, send nothing more. Answers to durable requests still go out."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._target_finder is not None:
            self._target_finder.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._listeners.close()
        self.session_manager.close("the delay server is stopping")
        self.scheduler.close()
        if self.copy_status is not None:
            self.delay.fall_silent()

    def abandon(self) -> None:
        """Drop all connections and write nothing more: another copy leads, or this one begins again."""
        self.session_manager.cut_off()
        self.fall_silent()
        self._listeners.close_http()
        self.delay.abandon()

    async def stop(self) -> None:
        """Answer durable requests, wait for outstanding answers of brokers, release the directories. Raises the
        failure, if any."""
        self.fall_silent()
        try:
            await self.delay.stop(self.options.drain_ms_max)
        finally:
            await self.session_manager.deserted(self.options.drain_ms_max)
            self._listeners.close_http()


_READS = (Describe,)
_QUESTIONS = (*QUESTIONS, *snapshot.QUESTIONS)
_RETRY_S = 1.0
_TARGETS_SHOWN_MAX = 16
_FREE_BYTES_STEP = 64 << 20  # a metric that is reported only when it has changed by so much


class DelayCopy(CopyLifecycle[DelayServer]):
    """One copy. `await DelayCopy.start(...)`, then `await member.stop()`."""

    kind = leadership.DELAY

    def __init__(
        self,
        world: CopyRuntime,
        options: ServerOptions,
        membership: CopyOptions,
        metas: tuple[Address, ...] = (),
        open_schedule_disk: Callable[[], Disk] | None = None,
    ) -> None:
        """`metas`: the meta servers; empty: those that the registry names. With `open_schedule_disk`, the logs have the
        copy's disk for themselves, and the buckets are on the schedule disk."""
        face = Face(options.host, options.port, options.http_port, options.connection.name)
        copy_status = CopyStatus(membership.group, _READS, _QUESTIONS)
        super().__init__(world, membership, face, copy_status, ProbePages(world.net, lambda: copy_status.why))
        self._options = replace(options, http_port=None)  # the copy answers probes, also while it has no server
        self._metas = metas
        self._open_schedule_disk = open_schedule_disk
        self._looked = asyncio.Event()
        self._measured: tuple[int, int] = (0, 0)  # when, and how many messages there were

    @classmethod
    async def start(
        cls,
        world: CopyRuntime,
        options: ServerOptions,
        membership: CopyOptions,
        metas: tuple[Address, ...] = (),
        open_schedule_disk: Callable[[], Disk] | None = None,
    ) -> DelayCopy:
        """Open the directory, listen, and begin to take part. The copy becomes master or replica later."""
        member = cls(world, options, membership, metas, open_schedule_disk)
        await member.begin()
        return member

    async def begin(self) -> None:
        await super().begin()
        if not self._metas:
            self._world.registry.watch(layout.METAS, self._looked.set)
            self._begin("metas", self._look())

    async def stop(self) -> None:
        self._cancel("metas")
        await super().stop()

    # --- the server --------------------------------------------------------------------------------------------------

    async def _serve(self, disk: Disk, adopt: DirectoryIdentity | None) -> DelayServer:
        clock, net, rng = self._world.clock, self._world.net, self._world.rng
        if self._open_schedule_disk is None:
            world = DelayWorld(clock, disk, net, rng)
        else:
            world = DelayWorld(clock, self._open_schedule_disk(), net, rng, log_disk=disk)
        options = replace(self._options, port=self.face.port)
        server = await DelayServer.follow(world, options, self.copy_status, adopt, jobs=self._world.jobs)
        server.ask_at(self._metas)
        return server

    def _refill(self, server: DelayServer) -> SnapshotReceiver:
        return SnapshotReceiver(server.delay.engine, server.disks)

    def _begin_anew(self, remedy: TooFarBehind, adopt: DirectoryIdentity) -> list[str]:
        """Install the received snapshot. Messages that wait longest are in no log any more, so logs alone do not
        suffice."""
        logs = self._world.open_disk()
        schedule = logs if self._open_schedule_disk is None else self._open_schedule_disk()
        try:
            aside = install.install(logs, schedule, self._world.rng, adopt, remedy.epoch)
        finally:
            logs.close()
            schedule.close()
        return [f"set aside: {name}" for name in aside]

    def _load(self, server: DelayServer, now_ns: int) -> dict[str, float]:
        engine = server.delay.engine
        before_ns, before = self._measured
        self._measured = (now_ns, engine.scheduled_total)
        passed_s = max(now_ns - before_ns, 1) / 1e9
        free_bytes = server.store.free_bytes() // _FREE_BYTES_STEP * _FREE_BYTES_STEP
        return {
            "messages_per_s": max(round((engine.scheduled_total - before) / passed_s, 1), 0.0),
            "pending_messages": float(engine.rows.pending),
            "free_bytes": float(free_bytes),
            "rotten_spans": float(len(server.store.rotten) + server.delay.request_handler.damaged),
            **self._in_transit(engine),
        }

    def _in_transit(self, engine: Engine) -> dict[str, float]:
        """Messages that wait for a broker group, for the 16 groups with the most."""
        found = engine.in_transit() if self.copy_status.is_master else {}
        most = sorted(found, key=lambda name: (-found[name], name))[:_TARGETS_SHOWN_MAX]
        return {f"{layout.IN_TRANSIT}{name}": float(found[name]) for name in most}

    def _why_closed(self, server: DelayServer) -> str:
        return "" if server.store.has_room else "its disk is nearly full: make room"

    # --- meta servers ------------------------------------------------------------------------------------------------

    def _on_session(self, state: SessionState) -> None:
        super()._on_session(state)
        self._looked.set()

    async def _look(self) -> None:
        """Watch which meta servers are registered."""
        while True:
            self._looked.clear()
            try:
                names = await self._world.registry.children(layout.METAS)
            except RegistryError:
                await asyncio.sleep(_RETRY_S)
                continue
            self._metas = tuple(parse_place(name) for name in names) or self._metas
            if self.server is not None:
                self.server.ask_at(self._metas)
            await self._looked.wait()
