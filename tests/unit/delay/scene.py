"""Brokers and a delay server on virtual time, each on a host and a disk of its own: a stage for stories.

    @staged()
    async def test_something(scene: Scene) -> None:
        await scene.schedule([b"a"], after_s=60)
        await scene.sleep(61)
        assert await scene.payloads() == [b"a"]

With `@staged(is_embedded=True)` the delay server is behind the broker's port, as in `fairway up`; otherwise it has its
own. Months take no time. Every story ends with a clean stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fairway import batch
from fairway.batch import MessageId
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.delay.engine import DelayOptions
from fairway.delay.server import DelayServer, ServerOptions
from fairway.delay.service import Delay, DelayWorld
from fairway.errors import Refused
from fairway.limits import KIB, MIB
from fairway.protocol import ControlMessage
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever, Scan, Scanned, Switch, Switched
from fairway.protocol.delay_messages import Cancel, Decided, Reschedule
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage.store import StoreOptions
from tests.support.client import Client
from tests.unit.delay.helpers import OPTIONS

PORT = 20880
SUBJECT = "orders"
STORE = StoreOptions(action_segment_bytes=64 * KIB, low_water_bytes=0)


@dataclass(frozen=True, slots=True)
class Stored:
    """One message as a broker has it."""

    payload: bytes
    id: MessageId
    appended_ms: int


class Machine:
    """A host with a disk, on which a server dies and lives."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.name = name
        self.disk = SimDisk(sim.rng.child(f"disk of {name}"), sim.loop.call_later, capacity_bytes=16 * MIB)
        self.broker: Broker | None = None


class Scene:
    """A delay server, and brokers by name."""

    def __init__(self, seed: str | int, brokers: tuple[str, ...], is_embedded: bool, options: DelayOptions) -> None:
        self.sim = Simulation(seed, steps_max=50_000_000)
        self.clock = self.sim.clock
        self.is_embedded = is_embedded
        self.options = options
        self.machines = {name: Machine(self.sim, name) for name in brokers}
        self.disk = Machine(self.sim, "delay").disk
        self.server: DelayServer | None = None
        self.delay: Delay = None  # type: ignore[assignment]  # from `start` on
        self.early: list[tuple[bytes, int]] = []
        self._clients: dict[str, Client] = {}
        self._hosts = 0
        self._lives = 0
        self._next = 0
        self.sim.loop.set_exception_handler(self._unhandled)

    def _unhandled(self, _loop: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), SimulatedPowerCut):  # what a dead process had still meant to do
            self.sim.loop.default_exception_handler(context)

    def play(self, story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        with self.sim:
            self.sim.run(self._play(story))

    async def _play(self, story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        await self.start()
        await story(self)
        await self.stop()

    # --- lives -------------------------------------------------------------------------------------------------------

    @property
    def _delay_host(self) -> str:
        return next(iter(self.machines)) if self.is_embedded else "delay"

    async def start(self) -> None:
        if not self.is_embedded:
            for name in self.machines:
                await self.start_broker(name)
        await self.start_delay()

    async def start_broker(self, name: str, delay: Delay | None = None) -> None:
        machine = self.machines[name]
        options = BrokerOptions(host=name, port=PORT, allow_remote=True, store=STORE)
        world = BrokerWorld(self.clock, machine.disk, self.sim.net.host(name), self.sim.rng.child(f"{name} broker"))
        machine.broker = await Broker.start(world, options, delay=None if delay is None else delay.request_handler)

    async def start_delay(self) -> None:
        self._lives += 1
        host = self._delay_host
        rng = self.sim.rng.child(f"delay {self._lives}")
        world = DelayWorld(self.clock, self.disk, self.sim.net.host(host), rng)
        if self.is_embedded:
            self.delay = Delay.open(world, self.options)
            await self.start_broker(host, self.delay)
            self.delay.reach_here((host, PORT))
        else:
            options = ServerOptions(host=host, port=PORT, allow_remote=True, delay=self.options)
            brokers = {name: [(name, PORT)] for name in self.machines}
            self.server = await DelayServer.start(world, options, brokers)
            self.delay = self.server.delay

    async def stop(self) -> None:
        await (self.delay.stop() if self.server is None else self.server.stop())
        for machine in self.machines.values():
            if machine.broker is not None:
                await machine.broker.stop()

    async def restart_delay(self) -> None:
        """A clean end, and another life."""
        await self.server.stop() if self.server else None
        self._bury(self.disk.crash_process)
        await self.start_delay()

    def kill_delay(self, *, is_power_cut: bool = False) -> None:
        """No goodbye; whatever it had still meant to do is left undone."""
        self.delay.due_timer.stop()
        self.delay.request_handler.close()
        self.delay.dispatch_sender.abort()
        self._bury(self.disk.crash if is_power_cut else self.disk.crash_process)

    def _bury(self, crash: Callable[[], SimDisk]) -> None:
        if not self.is_embedded:
            self.sim.net.crash("delay")
        self._clients.pop("delay", None)
        self.disk = crash()

    def kill_broker(self, name: str, *, is_power_cut: bool = False) -> None:
        machine = self.machines[name]
        assert machine.broker is not None
        self.sim.net.crash(name)
        machine.broker.coordinator.close()
        machine.broker = None
        machine.disk = machine.disk.crash() if is_power_cut else machine.disk.crash_process()
        self._clients.pop(name, None)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # --- people ------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    async def client(self, host: str | None = None) -> Client:
        """A connection to a broker, or to whoever takes delayed messages."""
        host = host or self._delay_host
        known = self._clients.get(host)
        if known is None or known.is_gone:
            self._hosts += 1
            net = self.sim.net.host(f"client-{self._hosts}")
            known = self._clients[host] = await Client.connect(net, self.clock, host, PORT)
        return known

    async def ask(self, message: ControlMessage, answer: type[Any], host: str | None = None) -> Any:
        return (await (await self.client(host)).ask(message, answer))[0]

    def batch_of(
        self, payloads: list[bytes], due_ms: list[int] | int, keys: list[str | None] | None = None
    ) -> tuple[bytes, list[MessageId]]:
        """The next batch of a stream of its own, and the ids of its messages."""
        self._next += 1
        dues = due_ms if isinstance(due_ms, list) else [due_ms] * len(payloads)
        data = batch.encode(
            payloads, producer_id=self._next, first_sequence=0, created_ms=self.now_ms, due_ms=dues, keys=keys
        )
        return data, [MessageId(self._next, index) for index in range(len(payloads))]

    async def schedule(
        self,
        payloads: list[bytes],
        *,
        after_s: float = 0,
        subject: str = SUBJECT,
        keys: list[str | None] | None = None,
    ) -> list[MessageId]:
        data, ids = self.batch_of(payloads, self.now_ms + round(after_s * 1_000), keys)
        await (await self.client()).produce(subject, data)
        return ids

    async def cancel(self, message_id: MessageId, subject: str = "") -> Decided:
        decided: Decided = await self.ask(Cancel(subject, str(message_id), None), Decided)
        return decided

    async def reschedule(self, message_id: MessageId, after_s: float) -> Decided:
        due_ms = self.now_ms + round(after_s * 1_000)
        decided: Decided = await self.ask(Reschedule("", str(message_id), None, due_ms), Decided)
        return decided

    async def read_only(self, name: str, *, is_on: bool, subject: str = SUBJECT) -> None:
        await self.ask(Switch(Lever.READ_ONLY, is_on, subject), Switched, name)

    async def stored(self, subject: str = SUBJECT, host: str | None = None) -> list[Stored]:
        """Everything that the brokers have of a subject."""
        found: list[Stored] = []
        for name in [host] if host else self.machines:
            if self.machines[name].broker is not None:
                found += await self._stored(name, subject)
        return found

    async def _stored(self, name: str, subject: str) -> list[Stored]:
        found: list[Stored] = []
        at = 0
        for _ in range(10_000):
            scan = Scan(subject, m.Whence.SEQUENCE, at, None, 1 << 20)
            try:
                scanned, batches = await (await self.client(name)).ask(scan, Scanned)
            except Refused:
                return found
            for attached, opened in zip(scanned.batches, map(batch.decode, batches), strict=True):
                pairs = zip(opened.payloads, opened.ids(), strict=True)
                found += [Stored(payload, each, attached.appended_ms) for payload, each in pairs]
            at = scanned.next_sequence
            if not scanned.batches or at >= scanned.committed_end:
                return found
        raise AssertionError("a scan ends")

    async def payloads(self, subject: str = SUBJECT, host: str | None = None) -> list[bytes]:
        return [each.payload for each in await self.stored(subject, host)]


Story = Callable[[Scene], Coroutine[Any, Any, None]]


def staged(
    *brokers: str, is_embedded: bool = False, options: DelayOptions = OPTIONS
) -> Callable[[Story], Callable[[], None]]:
    def decorate(story: Story) -> Callable[[], None]:
        def test() -> None:
            Scene(test.__name__, brokers or ("east",), is_embedded, options).play(story)

        test.__name__ = story.__name__
        test.__doc__ = story.__doc__
        return test

    return decorate
