"""The delay server as its own process: a port for delayed messages and questions about them, and nothing else.

The same protocol as a broker's, the same sessions and bounds. What concerns a broker is refused with the remedy;
DESCRIBE says who this is, so that tools which ask first are answered. It sends to the brokers that it was told of, or,
as part of a cluster, to those that meta servers name (`joining`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fairway import limits
from fairway.delay.joining import Face, Joined, Joining
from fairway.delay.options import DelayOptions
from fairway.delay.service import Delay, DelayWorld
from fairway.errors import Code, FairwayError, Refused
from fairway.protocol import Options, RequestReceived
from fairway.protocol.admin import BrokerState, Describe, Described
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, Scheduler, SchedulerOptions, Verdict
from fairway.serving.budget import Allowance
from fairway.serving.delaying import Asked, concerns_delay, key_of
from fairway.serving.doors import Doors, check_host
from fairway.serving.exposition import CONTENT_TYPE, Exposition
from fairway.serving.hall import Hall, HallOptions
from fairway.serving.http import HttpDoor, Page
from fairway.serving.meters import Meters
from fairway.serving.requests import admit, hand_to
from fairway.serving.session import Session
from fairway.world.dialing import Address

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
    request_ms_max: int = 30_000
    drain_ms_max: int = 5_000
    hall: HallOptions = field(default_factory=HallOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    delay: DelayOptions = field(default_factory=DelayOptions)

    def __post_init__(self) -> None:
        check_host(self.host, allow_remote=self.allow_remote)

    @property
    def connection(self) -> Options:
        return self.hall.connection


class DelayServer:
    """One delay server on one loop. `await DelayServer.start(...)`, then `await server.stop()`."""

    def __init__(self, world: DelayWorld, options: ServerOptions, delay: Delay) -> None:
        loop = asyncio.get_running_loop()
        self.clock = world.clock
        self.options = options
        self.delay = delay
        self.scheduler = Scheduler(world.clock, loop, options.scheduler)
        self.meters = Meters()
        self.hall = Hall(world.clock, options.hall, self.meters, self.scheduler.courtesy, self.handle)
        self.waiting = Allowance(options.waiting_bytes_max, "wait in this delay server's requests")
        pages = {"/metrics": self._metrics_page, "/livez": self._live_page, "/readyz": self._ready_page}
        self._doors = Doors(world.net, self.hall, HttpDoor(pages))
        self._describer = _Describer(self._state)
        self._started_ms = world.clock.wall_ms()
        self._joined: Joined | None = None
        self._is_stopping = False

    @classmethod
    async def start(
        cls,
        world: DelayWorld,
        options: ServerOptions,
        brokers: Mapping[str, Sequence[Address]],
        joining: Joining | None = None,
        remark: Callable[[str], None] = lambda _: None,
    ) -> DelayServer:
        """Recover, listen, dial the brokers. Messages are taken at once, and sent while the rest is still read.

        Who joins a cluster has `joining` in the place of brokers; `remark` is then told what people should know.
        """
        delay = Delay.open(world, options.delay, options.connection.name)
        server = cls(world, options, delay)
        try:
            if joining is not None:
                await server._join(world, joining)
            await server._doors.open(options.host, options.port, options.http_port)
        except FairwayError:
            await server.stop()
            raise
        if server._joined is not None:
            server._joined.appear(server._face(), remark)
        delay.reach(brokers)
        return server

    async def _join(self, world: DelayWorld, joining: Joining) -> None:
        """Before it listens: who has no place in the cluster takes no messages."""
        try:
            joining.check(self.options.host)
            self._joined = await Joined.begin(joining, world, self.delay, self.options.connection.name)
        except FairwayError:
            await joining.registry.close()
            raise

    def _face(self) -> Face:
        return Face((self.options.host, self.port), self.http_port, self.options.connection.name)

    @property
    def port(self) -> int:
        return self._doors.port

    @property
    def http_port(self) -> int | None:
        return self._doors.http_port

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, session: Session, received: RequestReceived) -> None:
        """Put a request into the mailbox of its actor; `Refused` and `Misuse` are answered by the session."""
        message = received.message
        if concerns_delay(received):
            hand_to(self.scheduler, key_of(message), self._request(session, received), self.delay.desk)
        elif isinstance(message, Describe):
            hand_to(self.scheduler, ("describe",), self._request(session, received), self._describer)
        else:
            raise _NOT_DELAYED if isinstance(message, Produce) else _NOT_A_BROKER

    def _request(self, session: Session, received: RequestReceived) -> Asked:
        deadline_ns = self.clock.monotonic_ns() + self.options.request_ms_max * _MS_NS
        return admit(session, received, received.message, self.waiting, deadline_ns=deadline_ns)

    def _state(self) -> BrokerState:
        store = self.delay.engine.store
        return BrokerState(
            self.options.connection.name,
            store.messages.log.log_id,
            store.messages.log.epoch,
            is_master=True,
            is_read_only=store.fault is not None or not store.has_room,
            started_ms=self._started_ms,
            connections=len(self.hall),
            now_ms=self.clock.wall_ms(),
            durability="sync",
            free_bytes=store.free_bytes(),
            connections_max=self.options.hall.connections_max,
        )

    # --- what probes ask ---------------------------------------------------------------------------------------------

    def _metrics_page(self) -> Page:
        out = Exposition()
        out.one("connections", "gauge", "Connections open.", len(self.hall))
        out.one("connections_total", "counter", "Connections accepted.", self.meters.connections)
        refusals = sorted((code.value, count) for code, count in self.meters.refusals.items())
        codes = [({"code": code}, count) for code, count in refusals]
        out.family("refusals_total", "counter", "Requests refused.", codes)
        store = self.delay.engine.store
        out.one("disk_free_bytes", "gauge", "Room left on the disk.", store.free_bytes())
        out.one("store_has_room", "gauge", "0: messages are refused, the disk is nearly full.", int(store.has_room))
        out.one("store_is_poisoned", "gauge", "1: the disk failed, nothing is answered.", int(store.fault is not None))
        if self._joined is not None:
            is_lost = self._joined.wayfinder.is_lost
            out.one("delay_meta_down", "gauge", "1: no meta server answers; what was known holds.", int(is_lost))
        self.delay.desk.show(out)
        return Page(200, out.text(), CONTENT_TYPE)

    def _live_page(self) -> Page:
        """Whether a restart would help: it does when the disk has failed us."""
        fault = self.delay.engine.fault
        return Page(200, "alive\n") if fault is None else Page(503, f"{fault}\n")

    def _ready_page(self) -> Page:
        """Whether to send clients here; one that still reads its files takes messages, and questions wait."""
        fault = self.delay.engine.fault
        if fault is not None or self._is_stopping or not self._doors.are_open:
            return Page(503, f"{fault or ('stopping' if self._is_stopping else 'starting')}\n")
        return Page(200, "ready\n" if self.delay.engine.is_loaded else "ready, loading\n")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when it cannot go on: then `stop` raises what happened."""
        ways = [self.delay.failed()]
        if self._joined is not None:
            ways.append(self._joined.membership.failed())
        ending = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ending:
                each.cancel()
        self.hall.cut_off()

    async def stop(self) -> None:
        """Answer what is durable, let what is on its way arrive, let go. Raises what ended it, if that did."""
        self._is_stopping = True
        try:
            if self._joined is not None:
                await self._joined.leave()
        finally:
            self._doors.close()
            self.hall.close("the delay server is stopping")
            self.scheduler.close()
            try:
                await self.delay.stop(self.options.drain_ms_max)
            finally:
                await self.hall.deserted(self.options.drain_ms_max)
                self._doors.close_http()
                if self._joined is not None:
                    await self._joined.close()


class _Describer:
    """Answers DESCRIBE: who this is, and that it has no subjects."""

    def __init__(self, state: Callable[[], BrokerState]) -> None:
        self._state = state

    def process(self, request: Asked, actor: Actor) -> Verdict:
        del actor
        request.respond(Described(self._state(), []))
        return Verdict.DONE

    def expire(self, request: Asked, expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: Asked, error: Exception) -> None:
        request.fail(error)
