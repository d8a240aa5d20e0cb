"""A broker in memory, its clock, and its clients; and a store in memory for `fairway.ExpiringInbox`.

The broker is the same code that `fairway up` runs, on the simulated disk and net of `fairway.simulation`. So
retries, leases, dead letters, delayed messages and restarts are those of production, and the same seed gives the same
run.

`MemoryLink` takes the place of the threaded link under a blocking client. There is one thread, so the lock is empty,
and a wait runs the simulated loop: virtual time passes.

`MemoryDelay` is the delay server, the same code that `fairway up` runs. It starts with the first delayed message: a
test without delayed messages does not pay for the server's look at its files every hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

from fairway.broker.consume import LEASE_MS
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.client.aio.client import AioClient
from fairway.client.core import ClientOptions, Goal
from fairway.client.idempotence import ClaimState
from fairway.client.sync.client import Client
from fairway.client.url import BrokerAddress
from fairway.delay.engine import DelayOptions
from fairway.delay.service import Delay, DelayWorld
from fairway.errors import FairwayError, Misuse
from fairway.limits import KIB, MIB
from fairway.protocol import ConnectionOptions
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.loop_link import LoopLink
from fairway.scheduling import SchedulerOptions
from fairway.serving.memory_plan import MemoryAccount
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage.store import StoreOptions

if TYPE_CHECKING:
    from fairway.client.app import App, Listener
    from fairway.client.sync.consumer import Consumer
    from fairway.protocol.delivery import Message
    from fairway.protocol.line import Line
    from fairway.runtime.net import Net
    from fairway.runtime.threaded_link import Link
    from fairway.scheduling import Actor, Expiry, TurnResult
    from fairway.serving.metrics import MetricsText
    from fairway.serving.requests import DelayRequest


FOR_EVER_S = 600.0  # virtual; longer than any lease, backoff or heartbeat that could end a wait by itself


class StillWaiting(FairwayError):
    """A wait without a timeout that no event of the test will ever end."""


class MemoryLink:
    """A link of `fairway.Client` on a simulated loop."""

    in_reader = False
    is_orphan = False

    def __init__(
        self, world: Simulation, line: Line, addresses: Sequence[BrokerAddress], net: Net, clock: Clock
    ) -> None:
        self._world = world

        async def made() -> LoopLink:
            return LoopLink(line, addresses, net, clock)

        self._inner = world.run(made())
        self.lock: AbstractContextManager[None] = nullcontext()

    def start(self) -> None:
        """Do nothing: the link runs whenever a call waits."""

    def check(self) -> None:
        self._inner.check()

    def new_waiters(self) -> MemoryLink:
        """The link itself: it looks at what is waited for after every change."""
        return self

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let virtual time pass until `is_ready()`, or until the timeout has passed."""
        limit_s = FOR_EVER_S if timeout_s is None else timeout_s
        is_so = self._world.run(self._inner.wait(is_ready, limit_s))
        if timeout_s is None and not is_so:
            raise StillWaiting(f"nothing came in {FOR_EVER_S:g} virtual seconds: give a timeout, or advance the clock")
        return is_so

    def wait_told(self, register: Callable[[Callable[[], None]], None], timeout_s: float | None = None) -> bool:
        """Wait until the callback given to `register` is called, or until the timeout has passed."""
        told: list[bool] = []
        register(lambda: told.append(True))
        return self.wait(lambda: bool(told), timeout_s)

    def announce(self) -> None:
        """Do nothing: no other thread waits."""

    def pump(self) -> None:
        self._world.run(self._pump())

    pump_soon = pump

    async def _pump(self) -> None:
        self._inner.pump()

    def stir(self) -> None:
        self._inner.stir()

    def close(self, timeout_s: float) -> None:
        self._world.run(self._inner.close(timeout_s))


class MemoryDelay:
    """The delay server beside one run of a broker."""

    def __init__(
        self, world: DelayWorld, broker: BrokerAddress, options: DelayOptions | None, *, is_needed: bool
    ) -> None:
        """`is_needed`: the run before had started a delay server, so this one starts at once."""
        self._world = world
        self._broker = broker
        self._options = options
        self._delay: Delay | None = None
        if is_needed:
            self._started()

    @property
    def is_started(self) -> bool:
        return self._delay is not None

    def _started(self) -> Delay:
        if self._delay is None:
            self._delay = Delay.open(self._world, self._options, name="fairway in memory")
            self._delay.reach_here(self._broker)
        return self._delay

    # --- requests ----------------------------------------------------------------------------------------------------

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult:
        return self._started().request_handler.process(request, actor)

    def expire(self, request: DelayRequest, expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: DelayRequest, error: Exception) -> None:
        request.fail(error)

    def show(self, out: MetricsText) -> None:
        if self._delay is not None:
            self._delay.request_handler.show(out)

    def memory_accounts(self) -> list[MemoryAccount]:
        return [] if self._delay is None else self._delay.request_handler.memory_accounts()

    @property
    def damaged(self) -> int:
        return 0 if self._delay is None else self._delay.request_handler.damaged

    # --- ending ------------------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Look at the clock again: the test has set it."""
        if self._delay is not None:
            self._delay.due_timer.poke()

    async def stop(self) -> None:
        if self._delay is not None:
            await self._delay.stop()

    def die(self) -> None:
        """Stop as `kill -9` would: nothing more is written or sent."""
        if self._delay is not None:
            self._delay.due_timer.stop()
            self._delay.request_handler.close()
            self._delay.dispatch_sender.abort()


T = TypeVar("T")

HOST = "memory"
PORT = 20880
URL = f"fairway://{HOST}:{PORT}"
QUIET_S = 0.25  # virtual; if no message has come for so long, none is on its way
_STORE = StoreOptions(action_segment_bytes=256 * KIB, low_water_bytes=0)

# A connection in memory reports its end at once. So there are no heartbeats, no consumer renews its lease, and a pull
# waits until there are messages. The broker does its regular work once a day, the delay server every hour.
_LONGEST_MS = LEASE_MS // 2
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_SCHEDULER = SchedulerOptions(idle_ns_max=_DAY_MS * 1_000_000)
_CONNECTION = ConnectionOptions(has_heartbeat=False)


class VirtualClock:
    """The time in a test. It passes while a call waits, and by `advance`."""

    def __init__(self, world: Simulation, on_jump: Callable[[], None]) -> None:
        self._world = world
        self._on_jump = on_jump

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._world.clock.wall_ms() / 1_000, UTC)

    def advance(
        self, seconds: float = 0, *, milliseconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Let time pass, and let due events happen meanwhile. Time without due events costs nothing."""
        span = timedelta(seconds=seconds, milliseconds=milliseconds, minutes=minutes, hours=hours, days=days)
        self._world.run(asyncio.sleep(span.total_seconds()))

    def jump(self, seconds: float) -> None:
        """Move the wall clock alone, forward or back, as an administrator or NTP would."""
        self._world.clock.jump(seconds * 1_000)
        self._on_jump()


class MemoryBroker:
    """A broker for one test. `close`, or leaving its `with`, ends the broker and its clients."""

    url = URL

    def __init__(self, seed: int | str = 0, *, delay: DelayOptions | None = None) -> None:
        """`delay`: the options of the delay server, for tests of its bounds."""
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
        """Ignore the errors of tasks that a killed broker has left: they are no failure of the test."""
        if not isinstance(context.get("exception"), SimulatedPowerCut):
            self._world.loop.default_exception_handler(context)

    def _look_at_clock(self) -> None:
        """Let the delay server look at the clock: a real one does so every minute, this one after a jump."""
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
        """A client like that of `fairway.connect`. The broker closes it at its own end."""
        _check_no_spool(options)
        self._hosts += 1
        client = _MemoryClient(self._world, f"client-{self._hosts}", options)
        self._clients.append(client)
        client.wait_connected(10)
        return client

    def aio_connect(self, options: ClientOptions | None = None) -> AioClient:
        """A client like that of `fairway.aio.connect`, for coroutines under `run`."""
        _check_no_spool(options)
        self._hosts += 1
        name = f"client-{self._hosts}"
        world = self._world
        return AioClient(URL, 10, _quiet(options), world.net.host(name), world.clock, world.rng.child(name))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the broker's own loop, where `asyncio.sleep` takes virtual time, too."""
        return self._world.run(main)

    def handle(self, app: App) -> int:
        """Let an app's handlers handle all messages that wait for them now; returns how many.

        Handlers run one after the other in this thread, and `async def` handlers on the broker's loop.
        """
        served = self._served.get(id(app))
        if served is None:
            client = self.connect()
            served = [(each, client.consumer(**each.settings)) for each in app.listeners]
            self._served[id(app)] = served
        handled = 0
        before = -1
        while handled > before:
            before = handled
            for listener, consumer in served:
                messages: list[Message] = consumer.take(listener.batch_max or 1, QUIET_S)
                if messages and listener.is_async:
                    self.run(app.handle_async(listener, messages))
                elif messages:
                    app.handle(listener, messages)
                handled += len(messages)
        for _, consumer in served:
            consumer.flush()
        return handled

    # --- restarts ----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Stop the broker cleanly and start it again; clients connect again by themselves."""
        self._world.run(self._stop())
        self._begin_again()

    def kill(self) -> None:
        """Kill the broker as `kill -9` would, and start it again: no confirmed message is lost."""
        if self._delay is not None:
            self._delay.die()
        self._begin_again()

    def _begin_again(self) -> None:
        self._world.net.crash(HOST)
        self._broker.coordinator.close()
        self._disk = self._disk.crash_process()
        self._delay_disk = self._delay_disk.crash_process()
        self._broker = self._world.run(self._start())

    async def _stop(self) -> None:
        """Stop the delay server first: the messages that it has on their way may still arrive."""
        try:
            if self._delay is not None:
                await self._delay.stop()
        finally:
            await self._broker.stop()

    # --- ending ------------------------------------------------------------------------------------------------------

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
    """`fairway.Client` on a `MemoryLink`."""

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
    """The same options without heartbeats."""
    given = options or ClientOptions()
    hello = replace(given.line.hello, has_heartbeat=False)
    return replace(given, line=replace(given.line, hello=hello))


def _small(options: DelayOptions) -> DelayOptions:
    """The same options, sized for a disk and a net in memory."""
    return replace(
        options,
        has_heartbeat=False,
        housekeeping_ms=_HOUR_MS,
        store=replace(options.store, segment_bytes=MIB, action_segment_bytes=256 * KIB, low_water_bytes=0),
    )


class _ExpiringEntry(NamedTuple):
    holder: str | None  # None: done
    until_ns: int


class MemoryStore:
    """An `ExpiringStore` for handlers that are plain functions. Several inboxes may share a store, as with Redis."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._entries: dict[str, _ExpiringEntry] = {}

    def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        now_ns = self._clock.monotonic_ns()
        mine = _ExpiringEntry(holder, now_ns + hold_ms * 1_000_000)
        found = self._entries.setdefault(key, mine)  # atomic among threads
        if found is mine:
            return ClaimState.MINE
        if found.until_ns <= now_ns:
            self._remove(key, found)
            return self.claim(key, holder, hold_ms)
        return ClaimState.DONE if found.holder is None else ClaimState.BUSY

    def finish(self, key: str, keep_ms: int) -> None:
        self._entries[key] = _ExpiringEntry(None, self._clock.monotonic_ns() + keep_ms * 1_000_000)

    def drop(self, key: str, holder: str) -> None:
        found = self._entries.get(key)
        if found is not None and found.holder == holder:
            self._remove(key, found)

    def _remove(self, key: str, entry: _ExpiringEntry) -> None:
        if self._entries.get(key) is entry:
            self._entries.pop(key, None)


class AsyncMemoryStore:
    """An `AsyncExpiringStore`, for `async def` handlers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._store = MemoryStore(clock)

    async def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        return self._store.claim(key, holder, hold_ms)

    async def finish(self, key: str, keep_ms: int) -> None:
        self._store.finish(key, keep_ms)

    async def drop(self, key: str, holder: str) -> None:
        self._store.drop(key, holder)
