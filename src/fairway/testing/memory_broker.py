"""A broker in memory, its clock, and clients of it.

The broker is the one that `fairway up` runs, on the disk and the net of `fairway.world`'s simulation; so retries,
leases, dead letters, delayed messages and restarts are those of production, and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from fairway.broker.connection_leases import LEASE_MS
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.client.aio_face import AioClient
from fairway.client.core import ClientOptions, Goal
from fairway.client.sync import Client
from fairway.client.url import BrokerAddress
from fairway.delay.options import DelayOptions
from fairway.delay.service import DelayWorld
from fairway.errors import Misuse
from fairway.limits import KIB, MIB
from fairway.protocol import ConnectionOptions
from fairway.scheduling import SchedulerOptions
from fairway.storage.store import StoreOptions
from fairway.testing.memory_delay import MemoryDelay
from fairway.testing.memory_link import MemoryLink
from fairway.world.sim_disk import SimDisk, SimulatedPowerCut
from fairway.world.simulation import Simulation

if TYPE_CHECKING:
    from fairway.client.app import App, Listener
    from fairway.client.consumer import Consumer
    from fairway.protocol.delivery import Message
    from fairway.protocol.line import Line
    from fairway.world.link import Link

T = TypeVar("T")

HOST = "memory"
PORT = 20880
URL = f"fairway://{HOST}:{PORT}"
QUIET_S = 0.25  # virtual: when nothing has come for so long, nothing is on its way
_STORE = StoreOptions(action_segment_bytes=256 * KIB, low_water_bytes=0)

# A connection in memory reports its end at once. So nobody pings, no consumer renews its lease, and a pull waits until
# there is something to hand out. What is done every so often is done once a day, and by the delay server every hour.
_LONGEST_MS = LEASE_MS // 2
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_SCHEDULER = SchedulerOptions(idle_ns_max=_DAY_MS * 1_000_000)
_CONNECTION = ConnectionOptions(has_heartbeat=False)


class VirtualClock:
    """The time in a test. It passes while somebody waits, and when told to."""

    def __init__(self, world: Simulation, on_jump: Callable[[], None]) -> None:
        self._world = world
        self._on_jump = on_jump

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._world.clock.wall_ms() / 1_000, UTC)

    def advance(
        self, seconds: float = 0, *, milliseconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Let time pass, and everything happen that is due meanwhile. Time in which nothing is due costs nothing."""
        span = timedelta(seconds=seconds, milliseconds=milliseconds, minutes=minutes, hours=hours, days=days)
        self._world.run(asyncio.sleep(span.total_seconds()))

    def jump(self, seconds: float) -> None:
        """Move the wall clock alone, forward or back, as an administrator or NTP would."""
        self._world.clock.jump(seconds * 1_000)
        self._on_jump()


class MemoryBroker:
    """A broker for one test. Leave its `with`, or `close` it, to end it and its clients."""

    url = URL

    def __init__(self, seed: int | str = 0, *, delay: DelayOptions | None = None) -> None:
        """`delay`: bounds for delayed messages, where a test is about those."""
        self._world = Simulation(seed, steps_max=None)
        self._world.loop.set_exception_handler(self._unhandled)
        self._disk = SimDisk(self._world.rng.child("disk"), self._world.loop.call_later)
        self._delay_disk = SimDisk(self._world.rng.child("delay-disk"), self._world.loop.call_later)
        self._delay_options = _small(delay or DelayOptions())
        self._delay: MemoryDelay | None = None
        self.clock = VirtualClock(self._world, self._look_at_clock)
        self._clients: list[Client] = []
        self._hosts = 0
        self._lives = 0
        self._served: dict[int, list[tuple[Listener, Consumer]]] = {}
        self._broker = self._world.run(self._start())

    def _unhandled(self, _loop: object, context: dict[str, Any]) -> None:
        """What a broker that was killed had still meant to do is no failure of the test."""
        if not isinstance(context.get("exception"), SimulatedPowerCut):
            self._world.loop.default_exception_handler(context)

    def _look_at_clock(self) -> None:
        """A real delay server looks at its clock every minute, and this one when the clock was moved."""
        if self._delay is not None:
            self._delay.poke()

    async def _start(self) -> Broker:
        self._lives += 1
        rng = self._world.rng.child(f"broker-{self._lives}")
        net = self._world.net.host(HOST)
        world = BrokerWorld(self._world.clock, self._disk, net, rng)
        self._delay = MemoryDelay(
            DelayWorld(self._world.clock, self._delay_disk, net, rng.child("delay")),
            BrokerAddress(HOST, PORT),
            self._delay_options,
            is_needed=self._delay is not None and self._delay.is_started,
        )
        options = BrokerOptions(
            host=HOST,
            port=PORT,
            allow_remote=True,
            wait_ms_max=_LONGEST_MS,
            housekeeping_ms=_DAY_MS,
            leases_end_with_connections=True,
            store=_STORE,
            scheduler=_SCHEDULER,
            connection=_CONNECTION,
        )
        return await Broker.start(world, options, delay=self._delay)

    # --- clients -----------------------------------------------------------------------------------------------------

    def connect(self, options: ClientOptions | None = None) -> Client:
        """A client like that of `fairway.connect`; it is closed with the broker."""
        _check_no_spool(options)
        self._hosts += 1
        client = _MemoryClient(self._world, f"client-{self._hosts}", options)
        self._clients.append(client)
        client.wait_connected(10)
        return client

    def aio_connect(self, options: ClientOptions | None = None) -> AioClient:
        """A client like that of `fairway.aio.connect`, for code that `run` runs."""
        _check_no_spool(options)
        self._hosts += 1
        name = f"client-{self._hosts}"
        world = self._world
        return AioClient(URL, 10, _quiet(options), world.net.host(name), world.clock, world.rng.child(name))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the broker's own loop, where `asyncio.sleep` is virtual, too."""
        return self._world.run(main)

    def handle(self, app: App) -> int:
        """Have an app's handlers handle everything that is there for them now; how many messages that was.

        Handlers run one after the other in this thread, `async def` ones on the broker's loop.
        """
        served = self._served.get(id(app))
        if served is None:
            client = self.connect()
            served = [(each, each.join(client)) for each in app.listeners]
            self._served[id(app)] = served
        handled = 0
        while messages := sum(self._handle_some(app, *each) for each in served):
            handled += messages
        for _, consumer in served:
            consumer.flush()
        return handled

    def _handle_some(self, app: App, listener: Listener, consumer: Consumer) -> int:
        messages: list[Message] = consumer.take(listener.batch_max or 1, QUIET_S)
        if messages and listener.is_async:
            self.run(app.handle_async(listener, messages))
        elif messages:
            app.handle(listener, messages)
        return len(messages)

    # --- trouble -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Stop the broker cleanly and start it again; clients find it by themselves."""
        self._world.run(self._stop())
        self._begin_again()

    def kill(self) -> None:
        """`kill -9`, and start it again: nothing that was confirmed is lost."""
        if self._delay is not None:
            self._delay.die()
        self._begin_again()

    def _begin_again(self) -> None:
        self._world.net.crash(HOST)
        self._broker.desk.close()
        self._disk = self._disk.crash_process()
        self._delay_disk = self._delay_disk.crash_process()
        self._broker = self._world.run(self._start())

    async def _stop(self) -> None:
        """The delay server first: what it has on its way may still arrive."""
        try:
            if self._delay is not None:
                await self._delay.stop()
        finally:
            await self._broker.stop()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        clients, self._clients = self._clients, []
        try:
            for client in clients:
                client.close()
        finally:
            self._world.run(self._stop())
            self._world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as another:
            if error is None:
                raise
            error.add_note(f"and while the broker in memory was closed, {type(another).__name__}: {another}")


class _MemoryClient(Client):
    """`fairway.Client` on a link of its own kind."""

    def __init__(self, world: Simulation, name: str, options: ClientOptions | None) -> None:
        self._world = world
        self._name = name
        super().__init__(URL, _quiet(options), clock=world.clock, rng=world.rng.child(name))

    def _new_link(self, line: Line, goal: Goal) -> Link:
        net = self._world.net.host(self._name)
        return cast("Link", MemoryLink(self._world, line, goal.addresses, net, self._clock))


def _check_no_spool(options: ClientOptions | None) -> None:
    if options is not None and options.spool is not None:
        raise Misuse("a spool is on a real disk, and this broker's time is not real: test it with `fairway up`")


def _quiet(options: ClientOptions | None) -> ClientOptions:
    """The same on a connection that needs no heartbeat."""
    given = options or ClientOptions()
    hello = replace(given.line.hello, has_heartbeat=False)
    return replace(given, line=replace(given.line, hello=hello))


def _small(options: DelayOptions) -> DelayOptions:
    """The same on a disk and a net that are memory."""
    return replace(
        options,
        has_heartbeat=False,
        housekeeping_ms=_HOUR_MS,
        store=replace(options.store, segment_bytes=MIB, action_segment_bytes=256 * KIB, low_water_bytes=0),
    )
