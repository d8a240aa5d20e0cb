"""The broker: opens a store, listens, hands requests to actors, and stops cleanly.

Everything runs on one loop. A request goes from its session into the mailbox of an actor: PRODUCE into its subject's,
what concerns a group into the group's, SCAN into one of a few for scans (with a low weight), the rest into one for all
commands. So no path escapes the account.

Stopping: accept nobody, take no new requests, answer what is durable, checkpoint, let go of the directory. A store that
fails is another matter: nobody is told anything any more, and `failed` returns, so that the process can end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from fairway import limits
from fairway.batch.arrays import numpy_or_none
from fairway.broker.batch_checks import BatchChecks
from fairway.broker.connection_leases import ConnectionLeases
from fairway.broker.consuming import ConsumeProcessor
from fairway.broker.dead_letter import DeadLetterWriter
from fairway.broker.desk import GroupCoordinator
from fairway.broker.fetching import ColdReads
from fairway.broker.groups import Groups
from fairway.broker.housekeeping import BrokerMaintenance
from fairway.broker.inbox import Inboxes
from fairway.broker.inbox_produce import InboxProduceProcessor
from fairway.broker.metrics import Metrics
from fairway.broker.naming import NameTable
from fairway.broker.produce import NewNames, ProduceProcessor
from fairway.broker.reading import MessageReader
from fairway.broker.retracing import KEY as RETRACING
from fairway.broker.retracing import WATCHED, RetraceProcessor
from fairway.broker.scan import SCAN_WEIGHT, ScanProcessor
from fairway.broker.steering import AdminProcessor
from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.names import Subject
from fairway.protocol import ConnectionOptions, ControlMessage, RequestReceived
from fairway.protocol.admin import BrokerState, Configure, Lever, Scan, Switch
from fairway.protocol.handshake import INBOX
from fairway.protocol.messages import Heartbeat, Join, Leave, Produce, Pull, SettleAll
from fairway.protocol.routing import Route
from fairway.protocol.tracing import Index, Names, Retrace
from fairway.replication import standing as copies
from fairway.replication.standing import CopyStatus
from fairway.scheduling import Processor, RunOrder, Scheduler, SchedulerOptions
from fairway.serving.alone import OF_META, StandaloneRoutes
from fairway.serving.budget import Allowance
from fairway.serving.creation_rate import CreationRate
from fairway.serving.delaying import NO_DESK, DelayPort, concerns_delay, key_of
from fairway.serving.doors import Listeners, check_host
from fairway.serving.exposition import CONTENT_TYPE
from fairway.serving.hall import SessionManager, SessionManagerOptions
from fairway.serving.http import EXHAUSTED, HttpListener, HttpResponse
from fairway.serving.meters import ServerCounters, SyncWatch
from fairway.serving.requests import MessageT, Requester, ServedRequest, admit, hand_to
from fairway.serving.session import ServerSession
from fairway.serving.subject_order import SubjectIndex
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability
from fairway.storage.opening import RecoveredStore, recover
from fairway.storage.store import Store, StoreOptions
from fairway.world.clock import Clock
from fairway.world.disk import READERS, Disk
from fairway.world.job_runner import JobRunner
from fairway.world.net import Net
from fairway.world.rng import Rng
from fairway.world.work_pool import WorkPool

_MS_NS = 1_000_000
_SCAN_LANES = 64  # actors for scans: one subject's scans share one, and weights are kept for so many keys, not for all
_OF_MEMBERS = (Pull, SettleAll, Heartbeat, Leave)  # a union written where it is asked costs 1 µs
_READS = (Pull, Scan)
_WAITS = (Pull, Scan, Retrace, Route)
_RETRACES = (Retrace, Index, Names)
_INBOXES = "inbox:"  # how their names begin
_FRAME_SPARE_BYTES = 64 * limits.KIB  # of an answer's frame, for what is not batches


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What an operator may set."""

    host: str = "127.0.0.1"
    port: int = 20880
    allow_remote: bool = False  # there is no authentication yet: an address that others can reach must be meant
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: they are not served
    connections_max: int = limits.CONNECTIONS_MAX
    partial_bytes_max: int = 128 * limits.MIB  # of frames that have not come whole, on all connections
    waiting_bytes_max: int = 128 * limits.MIB  # of requests that are not answered yet
    unsent_bytes_max: int = 128 * limits.MIB  # of answers to clients that read slower than they ask
    memory_bytes_max: int = 0  # of the process, which the bounds below are parts of; 0: nobody has said
    groups_bytes_max: int = limits.GROUPS_BYTES_MAX  # of groups, their members and what these have in hand
    response_bytes_max: int = limits.MIB  # of batches in one answer, whatever was asked for; the first one always comes
    request_ms_max: int = 30_000  # an answer later than this is not worth working for
    wait_ms_max: int = 60_000  # of a long poll
    drain_ms_max: int = 5_000
    housekeeping_ms: int = 60_000  # between two looks at groups that nobody uses, and at what retention may take
    sync_every_ms: int = 100  # where durability is `memory`: what a power cut may take, apart from the sync itself
    leases_end_with_connections: bool = False  # for a net in memory, which reports the end of a connection at once
    fetches_at_once: int = READERS  # cold reads; 0 makes the loop wait for the device, for comparison
    store: StoreOptions = field(default_factory=StoreOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)
        self.hall()

    def hall(self) -> SessionManagerOptions:
        """What concerns connections."""
        connection = replace(self.connection, features=(*self.connection.features, INBOX))
        return SessionManagerOptions(self.connections_max, self.partial_bytes_max, self.unsent_bytes_max, connection)


@dataclass(frozen=True, slots=True)
class BrokerWorld:
    """The world as the broker sees it."""

    clock: Clock
    disk: Disk
    net: Net
    rng: Rng
    pool: WorkPool | None = None  # decompresses large batches; None: the loop does


class Broker:
    """One broker on one loop. `await Broker.start(...)`, then `await broker.stop()`."""

    def __init__(
        self,
        world: BrokerWorld,
        options: BrokerOptions,
        store: Store,
        groups: Groups,
        order: RunOrder | None = None,
        delay: DelayPort | None = None,
        standing: CopyStatus | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.clock = clock = world.clock
        self.standing = standing  # of one copy of several
        self.store = store
        self.options = options
        self.delay = delay
        self.scheduler = Scheduler(world.clock, loop, options.scheduler, order, self._start_commits)
        self.desk = GroupCoordinator(groups, store, self.scheduler, clock, loop.call_later, options.groups_bytes_max)
        self.desk.undertaker = self.undertaker = DeadLetterWriter(self.desk)
        self.housekeeper = BrokerMaintenance(self.desk, options.housekeeping_ms)
        self.meters = ServerCounters()
        self.waiting: Allowance[Requester] = Allowance(options.waiting_bytes_max, "wait in this broker's requests")
        self.hall = SessionManager(world.clock, options.hall(), self.meters, self.scheduler, self.waiting, self.handle)
        self.sync_watches = {
            "messages": store.messages.log.flusher.watch(SyncWatch(world.clock)),
            "actions": store.actions.log.flusher.watch(SyncWatch(world.clock)),
        }
        self.pages = {"/metrics": self._metrics_page, "/livez": self._live_page, "/readyz": self._ready_page}
        self._doors = Listeners(world.net, self.hall, HttpListener(self.pages))
        self.metrics = Metrics(self)
        self._started_ms = world.clock.wall_ms()
        self._is_stopping = False
        self._failed = asyncio.Event()
        self._sync_timer: asyncio.TimerHandle | None = None
        store.on_fault = self._on_fault
        self.on_committed = self.desk.watches.release_all
        for lane in range(_SCAN_LANES):
            self.scheduler.set_weight(("scan", lane), SCAN_WEIGHT)
        self.scheduler.set_weight(RETRACING, SCAN_WEIGHT)
        store.on_actions = partial(self.desk.watches.release, WATCHED)
        self.checks = BatchChecks(self.scheduler, world.clock, world.pool)
        self.produce = ProduceProcessor(store, self.checks, self._is_read_only, self.desk.wake_subject)
        self.creation_rate = CreationRate(world.clock)
        self._new_names = NewNames(self.produce, store.messages.views.subjects, self.creation_rate)
        self.scheduler.set_weight(NewNames.KEY, limits.NEW_NAMES_WEIGHT)
        self.fetches = (
            ColdReads(self.scheduler, world.clock, loop.call_later, options.fetches_at_once)
            if options.fetches_at_once
            else None
        )
        reader = MessageReader(store.messages, self.fetches)
        self._inboxes = Inboxes(self.desk)
        self._inbox_produce = InboxProduceProcessor(self.desk, self._inboxes, self.produce)
        names = NameTable(groups)
        self._leases = leases = ConnectionLeases(self.desk) if options.leases_end_with_connections else None
        self.consume = ConsumeProcessor(self.desk, self._inboxes, reader, world.rng, names, leases, standing)
        self.hall.on_closed = self._session_closed
        self._scan = ScanProcessor(self.desk, reader)
        self._retrace = RetraceProcessor(self.desk, reader, self.fetches, names)
        subjects = SubjectIndex(store.messages.views.subjects)
        self.steer = AdminProcessor(self.desk, self._inboxes, subjects, self._state)
        self._lone = StandaloneRoutes(
            self.scheduler,
            self._state,
            subjects,
            lambda: f"{options.host}:{self.port}",
            has_delay=delay is not None,
            is_alone=standing is None,
        )

    def _start_commits(self) -> None:
        self.store.messages.log.flusher.start_round()
        self.store.actions.log.flusher.start_round()

    @classmethod
    async def start(
        cls,
        world: BrokerWorld,
        options: BrokerOptions,
        order: RunOrder | None = None,
        *,
        delay: DelayPort | None = None,
    ) -> Broker:
        """Recover the store, bring the groups back to life, listen. `delay` takes delayed messages."""
        groups = Groups()
        store = _open_store(world, options, groups)
        broker = cls(world, options, store, groups, order, delay)
        try:
            broker.begin_life()
            if options.store.durability is Durability.MEMORY:
                broker._sync_by_and_by()
            await broker._doors.open(options.host, options.port, options.http_port)
        except FairwayError:
            await broker.stop()
            raise
        return broker

    @classmethod
    async def follow(
        cls,
        world: BrokerWorld,
        options: BrokerOptions,
        standing: CopyStatus,
        adopt: DirectoryIdentity | None = None,
        order: RunOrder | None = None,
        *,
        jobs: JobRunner,
    ) -> Broker:
        """One copy of several, which does not lead: recover the store beside the loop, listen. `adopt`: the logs that
        it is to have, if it has none."""
        groups = Groups()
        try:
            opened = await jobs.run(partial(recover, world.disk, world.rng, groups, adopt))
        except BaseException:  # also where it is called off
            world.disk.close()
            raise
        store = _open_store(world, options, groups, opened)
        broker = cls(world, options, store, groups, order, standing=standing)
        try:
            await broker._doors.open(options.host, options.port, options.http_port)
        except BaseException:  # also where it is called off
            broker.abandon()
            raise
        return broker

    def begin_life(self) -> None:
        """Everything in the logs is committed: bring the groups to life."""
        self.steer.removal.drop_orphans()
        self.desk.begin_life(is_lazy=self.options.store.durability is Durability.MEMORY)
        self.housekeeper.start()

    def wake_switched(self, subject: Subject) -> None:
        """A group of it was switched off or on, on all brokers: pulls that wait look again."""
        state = self.store.messages.views.subjects.find(subject)
        if state is not None:
            self.desk.wake_subject(state.id)

    @property
    def port(self) -> int:
        return self._doors.port

    @property
    def url(self) -> str:
        return f"fairway://{_bracketed(self.options.host)}:{self.port}"

    @property
    def http_url(self) -> str | None:
        port = self._doors.http_port
        return None if port is None else f"http://{_bracketed(self.options.host)}:{port}"

    def _sync_by_and_by(self) -> None:
        """Durability `memory`: every so often."""
        self.store.sync()
        later_s = self.options.sync_every_ms / 1_000
        self._sync_timer = asyncio.get_running_loop().call_later(later_s, self._sync_by_and_by)

    # --- what probes ask ---------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        return HttpResponse(200, self.metrics.page(), CONTENT_TYPE)

    def _live_page(self) -> HttpResponse:
        """Whether a restart would help: it does when the disk has failed us."""
        return HttpResponse(200, "alive\n") if self.store.fault is None else HttpResponse(503, f"{self.store.fault}\n")

    def _ready_page(self) -> HttpResponse:
        """Whether to send clients here."""
        if self.store.fault is not None:
            return HttpResponse(503, f"{self.store.fault}\n")
        if self._is_stopping or not self._doors.are_open:
            return HttpResponse(503, "stopping\n" if self._is_stopping else "starting\n")
        return EXHAUSTED if self.waiting.is_exhausted else HttpResponse(200, "ready\n")

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Put a request into the mailbox of its actor; `Refused` and `Misuse` are answered by the session."""
        message = received.message
        if self.standing is not None and (leader := self.standing.admit(message)) is not None:
            copies.answer(leader, self._request(session, received, received.message))
        elif concerns_delay(received):
            if self.delay is None:
                raise NO_DESK
            self._dispatch(key_of(message), self._request(session, received, received.message), self.delay)
        elif isinstance(message, Produce):
            if message.subject.startswith(_INBOXES) and INBOX in session.features:
                host = self._inbox_produce.host_of(message)
                self._inbox_produce.begin(self._request(session, received, message), host)
            else:
                subject = Subject.parse(message.subject)  # a name that is none must not become an actor's
                producing = self._request(session, received, message)
                if self._new_names.is_new(subject):
                    self._dispatch(NewNames.KEY, producing, self._new_names)
                    self._new_names.add(producing)
                else:
                    self._dispatch(("produce", subject), producing, self.produce)
        elif isinstance(message, Join):
            self._join(session, received, message)
        elif isinstance(message, _OF_MEMBERS):
            host = self.desk.host(message.subject, message.group)
            bounded: ControlMessage = self._bounded(session, message)
            wait_ms_max = self.consume.lease_ms(host) // 2
            self._dispatch(host.key, self._request(session, received, bounded, wait_ms_max), self.consume)
        elif isinstance(message, Scan):
            lane = self.desk.subject(message.subject).id % _SCAN_LANES
            scan = self._bounded(session, message)
            scanning = self._request(session, received, scan, self.options.wait_ms_max)
            self._dispatch(("scan", lane), scanning, self._scan)
        elif isinstance(message, _RETRACES):
            retracing = self._request(session, received, received.message, self.options.wait_ms_max)
            self._dispatch(RETRACING, retracing, self._retrace)
        elif isinstance(message, Configure | Switch) and self._may_name(message):
            named = Subject.parse(message.subject)
            request = self._request(session, received, received.message)
            self._once_named(named, request, lambda: (("steer",), self.steer))
        elif isinstance(message, OF_META):
            key = self._lone.key_of(message)
            asked = self._request(session, received, received.message, self.options.wait_ms_max)
            self._dispatch(key, asked, self._lone)
        else:
            self._dispatch(("steer",), self._request(session, received, received.message), self.steer)

    @staticmethod
    def _may_name(message: Configure | Switch) -> bool:
        """Whether it makes its subject where there is none."""
        return message.expected_version == 0 if isinstance(message, Configure) else message.lever is Lever.READ_ONLY

    def _dispatch(
        self, key: Hashable, request: ServedRequest[MessageT], processor: Processor[ServedRequest[MessageT]]
    ) -> None:
        hand_to(self.scheduler, key, request, processor)

    def _bounded(self, session: ServerSession, message: MessageT) -> MessageT:
        """The same, asking for no more batches than one answer may carry."""
        if not isinstance(message, _READS) or (isinstance(message, Scan) and message.is_dry):
            return message
        bytes_max = min(self.options.response_bytes_max, session.frame_bytes_max - _FRAME_SPARE_BYTES)
        if message.bytes_max <= bytes_max:
            return message
        return msgspec.structs.replace(message, bytes_max=max(bytes_max, 1))

    def _join(self, session: ServerSession, received: RequestReceived, message: Join) -> None:
        subject = Subject.parse_joinable(message.subject)
        request = self._request(session, received, received.message)
        self._once_named(subject, request, lambda: (self.consume.open_group(message, session).key, self.consume))

    def _once_named(
        self,
        subject: Subject,
        request: ServedRequest[ControlMessage],
        place: Callable[[], tuple[Hashable, Processor[ServedRequest[ControlMessage]]]],
    ) -> None:
        """A subject that is new is committed before any action speaks of its number: a torn tail would give that number
        to another."""
        log = self.store.messages.log

        def go_on(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                key, processor = place()
                self.scheduler.dispatch(key, request, processor)
            except FairwayError as error:
                request.fail(error)

        try:
            is_new = self.store.messages.views.subjects.find(subject) is None
            if is_new:
                self.creation_rate.check(request.session)
            born_at = self.store.ensure_subject(subject).born_at
            if is_new:
                self.creation_rate.note(request.session)
        except FairwayError as error:
            request.fail(error)
            return
        log.flusher.when_durable(log.end if born_at >= log.committed_end else 0, go_on)

    def _request(
        self, session: ServerSession, received: RequestReceived, message: MessageT, wait_ms_max: int = 0
    ) -> ServedRequest[MessageT]:
        """A pull waits for half a lease at most: who waits says nothing, and must not lose its place by that.

        Where there is no room for one more that waits, it is answered at once, with what is there: so nobody can keep
        consumers from their messages by filling the room."""
        now_ns = self.clock.monotonic_ns()
        wait_ms = min(message.wait_ms, self.options.wait_ms_max, wait_ms_max) if isinstance(message, _WAITS) else 0

        def admitted(wait_ms: int) -> ServedRequest[MessageT]:
            return admit(
                session,
                received,
                message,
                self.waiting,
                deadline_ns=now_ns + (wait_ms + self.options.request_ms_max) * _MS_NS,
                wait_until_ns=now_ns + wait_ms * _MS_NS if wait_ms else 0,
                received_ns=now_ns,
            )

        try:
            return admitted(wait_ms)
        except Refused as refused:
            if not wait_ms or refused.code is not Code.BUSY:
                raise
        return admitted(0)

    def _session_closed(self, session: ServerSession) -> None:
        self.desk.memory.forget_payer(session)
        if self._leases is not None:
            self._leases.lost(session)

    def _is_read_only(self, subject: Subject) -> bool:
        state = self.store.messages.views.subjects.find(subject)
        return state is not None and state.id in self.desk.groups.read_only

    def _state(self) -> BrokerState:
        log = self.store.messages.log
        return BrokerState(
            self.options.connection.name,
            log.log_id,
            log.epoch,
            is_master=self.standing is None or self.standing.is_master,
            is_read_only=self.store.fault is not None or not self.store.has_room,
            started_ms=self._started_ms,
            connections=len(self.hall),
            now_ms=self.clock.wall_ms(),
            durability=self.options.store.durability.value,
            free_bytes=self.store.free_bytes(),
            connections_max=self.options.connections_max,
            rotten_spans=len(self.store.rotten) + (0 if self.delay is None else self.delay.damaged),
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_fault(self, _fault: StorageFault) -> None:
        """The store is poisoned: what is on disk is unknown, so nobody is answered any more, nor let in."""
        self._doors.close()
        self.hall.cut_off()
        self._failed.set()

    async def failed(self) -> None:
        """Return when the store has failed: then `stop` raises what happened."""
        await self._failed.wait()

    def failure(self) -> FairwayError:
        """What that is."""
        return self.store.fault or StorageFault("the store has failed")

    async def come_to_rest(self) -> None:
        """Nothing is begun that has to come to its end before another copy leads."""

    def fall_silent(self) -> None:
        """Accept nobody, take no requests, let no timer ring: what is durable is still answered."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        self._doors.close()
        self.hall.close("the broker is stopping")
        self.scheduler.close()
        self.desk.close()

    def abandon(self) -> None:
        """Not a word more to anybody, and no checkpoint: another copy leads, or this one begins again as another."""
        self.hall.cut_off()
        self.fall_silent()
        self._doors.close_http()
        self.store.abandon()

    async def stop(self) -> None:
        """Answer what is durable, checkpoint, let go. Raises the fault of the store, if it has one."""
        self.fall_silent()
        try:
            await self.store.close()
        finally:
            await self.hall.deserted(self.options.drain_ms_max)
            self._doors.close_http()
        if self.store.fault is not None:
            raise self.store.fault


def _open_store(
    world: BrokerWorld, options: BrokerOptions, groups: Groups, opened: RecoveredStore | None = None
) -> Store:
    """`opened`: what was recovered beforehand, for one copy of several."""
    numpy_or_none()  # importing it takes a tenth of a second: now, not when somebody's first large batch comes
    try:
        return Store.open(
            world.disk,
            world.clock,
            world.rng,
            defer=asyncio.get_running_loop().call_soon,
            options=options.store,
            action_view=groups,
            names=groups.names,
            follows=opened is not None,
            opened=opened,
        )
    except FairwayError:
        world.disk.close()
        raise


def _bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host
