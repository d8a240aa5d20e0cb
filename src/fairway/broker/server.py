"""The broker process: opens a store, listens, hands requests to actors, and stops cleanly.

Everything runs on one event loop. A session passes each request to `Broker.handle`, which puts it into the mailbox of
an actor. A PRODUCE goes to the actor of its subject. A request of a group goes to the actor of the group. A SCAN goes
to one of 64 low-weight actors. A PRODUCE to a new subject goes to one actor for all new names. Trace requests share an
actor, and so do the remaining commands. So the scheduler charges every request to an actor. Requests of replicas are
the exception: the broker answers them at once (`fairway.replication.copies`).

To stop, the broker closes its listeners, takes no new requests, answers what is durable, writes a checkpoint and lets
go of the directory. After a fault of the store the broker answers nobody any more, and `failed` returns, so that the
process can end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from fairway import limits
from fairway.batch.layout import HEADER_BYTES, is_delayed, numpy_or_none, raw_length
from fairway.broker.admin import AdminProcessor
from fairway.broker.cold_reads import ColdReads
from fairway.broker.consume import ConnectionLeases, ConsumeProcessor
from fairway.broker.dead_letters import DeadLetterWriter
from fairway.broker.descriptions import SubjectIndex
from fairway.broker.group_coordinator import GroupCoordinator, IsOff
from fairway.broker.groups import Groups
from fairway.broker.inbox import Inboxes, InboxProduceProcessor
from fairway.broker.maintenance import BrokerMaintenance
from fairway.broker.message_reader import MessageReader
from fairway.broker.metrics import Metrics
from fairway.broker.produce import BatchChecks, NewNames, ProduceProcessor
from fairway.broker.scan import RETRACE_KEY, SCAN_WEIGHT, WATCHED, NameTable, RetraceProcessor, ScanProcessor
from fairway.broker.standalone_routes import OF_META, StandaloneRoutes
from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.names import Subject
from fairway.protocol import BatchesReceived, ConnectionOptions, ControlMessage, RequestReceived
from fairway.protocol.admin_messages import BrokerState, Configure, Index, Lever, Names, Retrace, Scan, Switch
from fairway.protocol.connection_states import INBOX
from fairway.protocol.frames import VIEW_FROM_BYTES
from fairway.protocol.messages import Heartbeat, Join, Leave, Produce, Pull, SettleAll
from fairway.protocol.route_messages import Route
from fairway.replication import copies
from fairway.replication.copies import CopyStatus
from fairway.runtime.clock import Clock
from fairway.runtime.disk import READERS, Disk
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng
from fairway.runtime.threads import JobRunner, WorkPool
from fairway.scheduling import Processor, Scheduler, SchedulerOptions, VirtualTime
from fairway.serving.http import HttpResponse
from fairway.serving.metrics import CONTENT_TYPE, SyncWatch
from fairway.serving.rates import CreationRate
from fairway.serving.requests import (
    NO_DELAY_PORT,
    DelayPort,
    MessageT,
    ProduceRequest,
    ServedRequest,
    admit,
    admit_batches,
    concerns_delay,
    hand_to,
    key_of,
)
from fairway.serving.session import ServerSession
from fairway.serving.session_manager import SessionManagerOptions, SocketServer, check_host
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Durability
from fairway.storage.open_store import RecoveredStore, recover
from fairway.storage.store import Store, StoreOptions

_MS_NS = 1_000_000
# actors for scans: the scans of a subject share one, so that the scheduler keeps weights for 64 keys, not for all
_SCAN_LANES = 64
_OF_MEMBERS = (Pull, SettleAll, Heartbeat, Leave)  # a union written where it is needed costs 1 µs
_READS = (Pull, Scan)
_WAITS = (Pull, Scan, Retrace, Route)
_RETRACES = (Retrace, Index, Names)
_INBOXES = "inbox:"  # the prefix of the subjects of inboxes
_FRAME_SPARE_BYTES = 64 * limits.KIB  # room in an answer's frame for everything but the batches


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """The options of a broker that an operator may set."""

    host: str = "127.0.0.1"
    port: int = 20880
    allow_remote: bool = False  # there is no authentication yet, so an address that others can reach needs this flag
    http_port: int | None = None  # for /metrics, /livez and /readyz; None: the broker does not serve them
    connections_max: int = limits.CONNECTIONS_MAX
    partial_bytes_max: int = 128 * limits.MIB  # of frames that have arrived in part, on all connections
    waiting_bytes_max: int = 128 * limits.MIB  # of requests that are not answered yet
    unsent_bytes_max: int = 128 * limits.MIB  # of answers to clients that read slower than they ask
    memory_bytes_max: int = 0  # of the process; the bounds below are parts of it; 0: not set
    groups_bytes_max: int = limits.GROUPS_BYTES_MAX  # of groups, their members and the members' lots
    # of batches in one answer, whatever the client asks for; the first batch always goes out
    response_bytes_max: int = limits.MIB
    request_ms_max: int = 30_000  # how long a request may take, beside the time of its long poll
    wait_ms_max: int = 60_000  # of a long poll
    drain_ms_max: int = 5_000
    housekeeping_ms: int = 60_000  # between two rounds of `BrokerMaintenance`
    # with durability `memory`, between two syncs: a power cut may take so much, and the time of the sync itself
    sync_every_ms: int = 100
    leases_end_with_connections: bool = False  # for a net in memory, which reports the end of a connection at once
    fetches_at_once: int = READERS  # cold reads; 0 makes the loop wait for the device, for comparison
    store: StoreOptions = field(default_factory=StoreOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)
        self.session_manager()

    def session_manager(self) -> SessionManagerOptions:
        """The part of these options that concerns connections."""
        connection = replace(self.connection, features=(*self.connection.features, INBOX))
        return SessionManagerOptions(self.connections_max, self.partial_bytes_max, self.unsent_bytes_max, connection)


@dataclass(frozen=True, slots=True)
class BrokerWorld:
    """The clock, disk, net and randomness that the broker uses."""

    clock: Clock
    disk: Disk
    net: Net
    rng: Rng
    pool: WorkPool | None = None  # decompresses large batches; None: the loop does


class Broker(SocketServer):
    """One broker on one loop. `await Broker.start(...)`, then `await broker.stop()`."""

    def __init__(
        self,
        world: BrokerWorld,
        options: BrokerOptions,
        store: Store,
        groups: Groups,
        order: VirtualTime | None = None,
        delay: DelayPort | None = None,
        copy_status: CopyStatus | None = None,
        is_off: IsOff | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        clock = world.clock
        scheduler = Scheduler(clock, loop, options.scheduler, order, self._commit_turn)
        super().__init__(clock, world.net, scheduler, options.session_manager(), options.waiting_bytes_max, "broker")
        self._disk = world.disk
        self.copy_status = copy_status  # of one copy of several; None: the broker is alone
        self.store = store
        self.options = options
        self.delay = delay
        self.coordinator = GroupCoordinator(
            groups, store, scheduler, clock, loop.call_later, options.groups_bytes_max, DeadLetterWriter, is_off
        )
        self.maintenance = BrokerMaintenance(self.coordinator, options.housekeeping_ms)
        self.sync_watches = {
            "messages": store.messages.log.flusher.watch(SyncWatch(world.clock)),
            "actions": store.actions.log.flusher.watch(SyncWatch(world.clock)),
        }
        store.actions.log.flusher.keep_open(loop.call_later)
        self.metrics = Metrics(self)
        self._failed = asyncio.Event()
        self._sync_timer: asyncio.TimerHandle | None = None
        store.on_fault = self._on_fault
        self.on_committed = self.coordinator.watches.release_all
        for key in (*(("scan", lane) for lane in range(_SCAN_LANES)), RETRACE_KEY):
            self.scheduler.set_weight(key, SCAN_WEIGHT)
        store.on_actions = partial(self.coordinator.watches.release, WATCHED)
        self.checks = BatchChecks(self.scheduler, world.clock, world.pool)
        self.produce = ProduceProcessor(store, self.checks, groups, self.coordinator.wake_subject)
        self.creation_rate = CreationRate(world.clock)
        self._new_names = NewNames(self.produce, store.messages.views.subjects, self.creation_rate)
        self.scheduler.set_weight(NewNames.KEY, limits.NEW_NAMES_WEIGHT)
        self.fetches = self._cold_reads()
        reader = MessageReader(store.messages, self.fetches)
        self._inboxes = Inboxes(self.coordinator)
        self._inbox_produce = InboxProduceProcessor(self.coordinator, self._inboxes, self.produce)
        names = NameTable(groups)
        self._leases = leases = ConnectionLeases(self.coordinator) if options.leases_end_with_connections else None
        self.consume = ConsumeProcessor(self.coordinator, self._inboxes, reader, world.rng, names, leases, copy_status)
        self._scan = ScanProcessor(self.coordinator, reader)
        self._retrace = RetraceProcessor(self.coordinator, reader, self.fetches, names)
        subjects = SubjectIndex(store.messages.views.subjects)
        self.admin = AdminProcessor(self.coordinator, self._inboxes, subjects, self._state)
        self._standalone_routes = StandaloneRoutes(
            self.scheduler,
            self._state,
            subjects,
            lambda: f"{options.host}:{self.port}",
            has_delay=delay is not None,
            is_alone=copy_status is None,
        )

    def _cold_reads(self) -> ColdReads | None:
        at_once = self.options.fetches_at_once
        call_later = asyncio.get_running_loop().call_later
        return ColdReads(self.scheduler, self.clock, call_later, at_once) if at_once else None

    def _commit_turn(self) -> None:
        """Sync the appends of this turn of the loop. The broker answers in the same turn what is durable by then."""
        self.store.messages.log.flusher.start_round()
        self.store.actions.log.flusher.start_round()
        self._disk.deliver()

    @classmethod
    async def start(
        cls,
        world: BrokerWorld,
        options: BrokerOptions,
        order: VirtualTime | None = None,
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
            await broker._listeners.open(options.host, options.port, options.http_port)
        except FairwayError:
            await broker.stop()
            raise
        return broker

    @classmethod
    async def follow(
        cls,
        world: BrokerWorld,
        options: BrokerOptions,
        copy_status: CopyStatus,
        adopt: DirectoryIdentity | None = None,
        *,
        jobs: JobRunner,
        is_off: IsOff | None = None,
    ) -> Broker:
        """Start one copy of several, which does not lead: recover the store beside the loop, then listen. `adopt` names
        the logs for a directory that has none."""
        groups = Groups()
        try:
            opened = await jobs.run(partial(recover, world.disk, world.rng, groups, adopt))
        except BaseException:  # also when the task is cancelled
            world.disk.close()
            raise
        store = _open_store(world, options, groups, opened)
        broker = cls(world, options, store, groups, copy_status=copy_status, is_off=is_off)
        try:
            await broker._listeners.open(options.host, options.port, options.http_port)
        except BaseException:  # also when the task is cancelled
            broker.abandon()
            raise
        return broker

    def begin_life(self) -> None:
        """Bring the groups to life. Everything in the logs is committed by now."""
        self.admin.removal.drop_orphans()
        self.coordinator.begin_life(is_lazy=self.options.store.durability is Durability.MEMORY)
        self.maintenance.start()

    def wake_switched(self, subject: Subject) -> None:
        """Wake the waiting pulls of a subject after an operator has switched a group of it off or on, on all
        brokers."""
        state = self.store.messages.views.subjects.find(subject)
        if state is not None:
            self.coordinator.wake_subject(state.id)

    @property
    def url(self) -> str:
        return f"fairway://{_bracketed(self.options.host)}:{self.port}"

    @property
    def http_url(self) -> str | None:
        port = self._listeners.http_port
        return None if port is None else f"http://{_bracketed(self.options.host)}:{port}"

    def _sync_by_and_by(self) -> None:
        """Sync now, and again every `sync_every_ms`: for durability `memory`."""
        self.store.sync()
        later_s = self.options.sync_every_ms / 1_000
        self._sync_timer = asyncio.get_running_loop().call_later(later_s, self._sync_by_and_by)

    # --- pages for probes --------------------------------------------------------------------------------------------

    def _metrics_page(self) -> HttpResponse:
        return HttpResponse(200, self.metrics.page(), CONTENT_TYPE)

    def _fault(self) -> StorageFault | None:
        return self.store.fault

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: ServerSession, received: RequestReceived) -> None:
        """Put a request into the mailbox of its actor. The session answers the `Refused` and `Misuse` that this
        raises."""
        message = received.message
        if self.copy_status is not None and (leader := self.copy_status.admit(message)) is not None:
            copies.answer(leader, self._request(session, received, received.message))
        elif concerns_delay(received):
            if self.delay is None:
                raise NO_DELAY_PORT
            hand_to(self.scheduler, key_of(message), self._request(session, received, received.message), self.delay)
        elif isinstance(message, Produce):
            if message.subject.startswith(_INBOXES) and INBOX in session.features:
                host = self._inbox_produce.host_of(message)
                self._inbox_produce.begin(self._produce_request(session, received.batches(message)), host)
            else:
                subject = Subject.parse(message.subject)  # parsed first: an invalid name must not become an actor's
                producing = self._produce_request(session, received.batches(message))
                if self._new_names.is_new(subject):
                    hand_to(self.scheduler, NewNames.KEY, producing, self._new_names)
                    self._new_names.add(producing)
                else:
                    hand_to(self.scheduler, ("produce", subject), producing, self.produce)
        elif isinstance(message, Join):
            self._join(session, received, message)
        elif isinstance(message, _OF_MEMBERS):
            host = self.coordinator.host(message.subject, message.group)
            bounded: ControlMessage = self._bounded(session, message)
            wait_ms_max = self.consume.lease_ms(host) // 2
            hand_to(self.scheduler, host.key, self._request(session, received, bounded, wait_ms_max), self.consume)
        elif isinstance(message, Scan):
            lane = self.coordinator.subject(message.subject).id % _SCAN_LANES
            scan = self._bounded(session, message)
            scanning = self._request(session, received, scan, self.options.wait_ms_max)
            hand_to(self.scheduler, ("scan", lane), scanning, self._scan)
        elif isinstance(message, _RETRACES):
            retracing = self._request(session, received, received.message, self.options.wait_ms_max)
            hand_to(self.scheduler, RETRACE_KEY, retracing, self._retrace)
        elif isinstance(message, Configure | Switch) and self._may_name(message):
            named = Subject.parse(message.subject)
            request = self._request(session, received, received.message)
            self._once_named(named, request, lambda: (("admin",), self.admin))
        elif isinstance(message, OF_META):
            key = self._standalone_routes.key_of(message)
            asked = self._request(session, received, received.message, self.options.wait_ms_max)
            hand_to(self.scheduler, key, asked, self._standalone_routes)
        else:
            hand_to(self.scheduler, ("admin",), self._request(session, received, received.message), self.admin)

    def _handle_together(self, session: ServerSession, received: BatchesReceived) -> bool:
        """Small batches to a subject that exists are one unit of work for its actor."""
        message = received.message
        state = self.store.messages.views.subjects.find(Subject(message.subject))
        if state is None or state.name.is_internal or self._new_names.is_new(state.name):
            return False
        raw_bytes = 0  # to be checked on the loop, in one go
        for data in received.batches:
            if not HEADER_BYTES <= len(data) < VIEW_FROM_BYTES or is_delayed(data):
                return False
            raw_bytes += raw_length(data)
        if raw_bytes > limits.CHECK_ON_LOOP_BYTES_MAX:
            return False
        if self.copy_status is not None:
            self.copy_status.admit(message)
        hand_to(self.scheduler, ("produce", state.name), self._produce_request(session, received), self.produce)
        return True

    def _produce_request(self, session: ServerSession, received: BatchesReceived) -> ProduceRequest:
        now_ns = self.clock.monotonic_ns()
        deadline_ns = now_ns + self.options.request_ms_max * _MS_NS
        return admit_batches(session, received, self.waiting, deadline_ns=deadline_ns, received_ns=now_ns)

    @staticmethod
    def _may_name(message: Configure | Switch) -> bool:
        """Whether the request creates its subject if the subject does not exist."""
        return message.expected_version == 0 if isinstance(message, Configure) else message.lever is Lever.READ_ONLY

    def _bounded(self, session: ServerSession, message: MessageT) -> MessageT:
        """The message with `bytes_max` cut to what one answer may carry."""
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
        """Dispatch the request once its subject is committed. Otherwise the action log could name the number of a new
        subject whose record a torn tail loses; recovery would give that number to another subject."""
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
        """Admit the request and charge it to the memory for waiting requests.

        A pull waits for half a lease at most: a waiting consumer sends no heartbeats, and must not lose its lease by
        that. Where there is no memory for one more waiting request, the broker admits it without a wait. So nobody can
        keep consumers from their messages by filling the memory.
        """
        now_ns = self.clock.monotonic_ns()
        wait_ms = min(message.wait_ms, self.options.wait_ms_max, wait_ms_max) if isinstance(message, _WAITS) else 0
        while True:
            try:
                return admit(
                    session,
                    received,
                    message,
                    self.waiting,
                    deadline_ns=now_ns + (wait_ms + self.options.request_ms_max) * _MS_NS,
                    wait_until_ns=now_ns + wait_ms * _MS_NS if wait_ms else 0,
                    received_ns=now_ns,
                )
            except Refused as refused:
                if not wait_ms or refused.code is not Code.BUSY:
                    raise
            wait_ms = 0

    def _on_closed(self, session: ServerSession) -> None:
        self.coordinator.memory.forget_payer(session)
        if self._leases is not None:
            self._leases.lost(session)

    def _state(self) -> BrokerState:
        log = self.store.messages.log
        return BrokerState(
            self.options.connection.name,
            log.log_id,
            log.epoch,
            is_master=self.copy_status is None or self.copy_status.is_master,
            is_read_only=self.store.fault is not None or not self.store.has_room,
            started_ms=self._started_ms,
            connections=len(self.session_manager),
            now_ms=self.clock.wall_ms(),
            durability=self.options.store.durability.value,
            free_bytes=self.store.free_bytes(),
            connections_max=self.options.connections_max,
            rotten_spans=len(self.store.rotten) + (0 if self.delay is None else self.delay.damaged),
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_fault(self, _fault: StorageFault) -> None:
        """Close all connections after a fault of the store: the broker does not know what is on the disk, so it answers
        nobody."""
        self._listeners.close()
        self.session_manager.cut_off()
        self._failed.set()

    async def failed(self) -> None:
        """Return when the store has failed. After that, `stop` raises the fault."""
        await self._failed.wait()

    def failure(self) -> FairwayError:
        """The fault of the store."""
        return self.store.fault or StorageFault("the store has failed")

    async def come_to_rest(self) -> None:
        """Do nothing: a broker has no work that must end before another copy leads."""

    def fall_silent(self) -> None:
        """Accept no connections, take no requests, stop all timers. The broker still answers what is durable."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        self._listeners.close()
        self.session_manager.close("the broker is stopping")
        self.scheduler.close()
        self.coordinator.close()

    def abandon(self) -> None:
        """Close everything without another answer and without a checkpoint: another copy leads, or this copy starts
        again."""
        self.session_manager.cut_off()
        self.fall_silent()
        self._listeners.close_http()
        self.store.abandon()

    async def stop(self) -> None:
        """Answer what is durable, write a checkpoint, let go of the directory. Raises the fault of the store, if it has
        one."""
        self.fall_silent()
        try:
            await self.store.close()
        finally:
            await self.session_manager.deserted(self.options.drain_ms_max)
            self._listeners.close_http()
        if self.store.fault is not None:
            raise self.store.fault


def _open_store(
    world: BrokerWorld, options: BrokerOptions, groups: Groups, opened: RecoveredStore | None = None
) -> Store:
    """Open the store. `opened` is a store that was recovered beforehand, for one copy of several."""
    numpy_or_none()  # the import takes a tenth of a second: do it now, not at the first large batch
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
    """The host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
