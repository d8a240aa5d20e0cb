"""A broker on virtual time, with a disk that can be cut off and clients that speak the protocol: a stage for stories.

    @staged
    async def test_something(scene: Scene) -> None:
        ann = await scene.worker("ann")
        await scene.send(b"a")
        got = await ann.pull()
        await ann.ack(got)

Minutes of retries and leases take no time. `restart` stops the broker cleanly and starts it again, `power_cut` does not
stop it cleanly.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fairway import batch
from fairway.batch.identity import SECRET_BYTES
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Code, Refused
from fairway.groups import GroupConfig
from fairway.groups.config import encode
from fairway.limits import KIB, MIB
from fairway.protocol import ConnectionOptions, ControlMessage
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import (
    Configure,
    Configured,
    Depth,
    Describe,
    Described,
    GroupDescription,
    Lever,
    Redrive,
    Redriven,
    Scan,
    Scanned,
    Seek,
    Sought,
    Switch,
    Switched,
    Weigh,
)
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage.store import StoreOptions
from tests.support.client import Client, Stream

BROKER = "broker"
PORT = 20880
SUBJECT = "orders"
GROUP = "billing"
STORE = StoreOptions(action_segment_bytes=64 * KIB, low_water_bytes=0)


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a consumer sees it."""

    sequence: int
    attempt: int
    payload: bytes
    key: str | None
    tags: list[str]
    headers: dict[str, str]
    id: batch.MessageId


class Handed:
    """The answer to a pull, opened."""

    def __init__(self, pulled: m.Pulled, batches: Sequence[bytes]) -> None:
        self.number = pulled.number
        self.lots = pulled.lots
        self.is_inbox = pulled.is_inbox
        firsts = [each.first_sequence for each in pulled.batches]
        stored = {
            first + index: (opened, index)
            for first, opened in zip(firsts, map(batch.decode, batches), strict=True)
            for index in range(len(opened))
        }
        self.messages = [
            _received(lot.attempt, sequence, *stored[sequence])
            for lot in pulled.lots
            for span in lot.spans
            for sequence in range(span.first, span.first + span.count)
        ]

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.messages]

    @property
    def texts(self) -> list[str]:
        return [each.payload.decode() for each in self.messages]

    @property
    def attempts(self) -> list[int]:
        return [each.attempt for each in self.messages]


def _received(attempt: int, sequence: int, opened: batch.Batch, index: int) -> Received:
    return Received(
        sequence,
        attempt,
        opened.payloads[index],
        opened.key(index),
        opened.tags(index),
        opened.headers(index),
        opened.id(index),
    )


def secret_of(name: str) -> bytes:
    """Of the session of the worker with this name."""
    return hashlib.sha256(name.encode()).digest()[:SECRET_BYTES]


class Worker:
    """A consumer on a connection of its own; it says what arrived, as consumers do.

    A worker with the name of another one is the same session on a new connection, unless it is given another secret."""

    def __init__(self, client: Client, name: str, group: str, subject: str, secret: bytes | None = None) -> None:
        self.client = client
        self.secret = secret_of(name) if secret is None else secret
        self.name = name
        self.group = group
        self.subject = subject
        self.arrived = 0

    @property
    def _place(self) -> tuple[str, str, str]:
        return self.subject, self.group, self.name

    async def join(
        self,
        *,
        version: int = 0,
        start: m.Whence = m.Whence.EARLIEST,
        is_broadcast: bool = False,
        policies: bytes | None = None,
    ) -> m.Joined:
        join = m.Join(*self._place, version, self.arrived, start, is_broadcast, policies, self.secret)
        return (await self.client.ask(join, m.Joined))[0]

    async def pull(
        self, *, most: int = 1_000, wait_s: float = 0, run_max: int = 1, extends_runs: bool = False
    ) -> Handed:
        pull = m.Pull(*self._place, most, 1 << 20, round(wait_s * 1_000), self.arrived, run_max, extends_runs)
        handed = Handed(*await self.client.ask(pull, m.Pulled))
        self.arrived = max(self.arrived, handed.number)
        return handed

    async def settle(
        self, kind: m.Settlement, handed: Handed, *, after_s: float | None = None, reason: str = ""
    ) -> m.Settled:
        after_ms = None if after_s is None else round(after_s * 1_000)
        outcomes = [
            m.Settle(kind, lot.first, lot.attempt, lot.spans, after_ms, reason, handed.is_inbox) for lot in handed.lots
        ]
        return await self.settle_all(outcomes)

    async def settle_all(self, outcomes: list[m.Settle]) -> m.Settled:
        return (await self.client.ask(m.SettleAll(*self._place, outcomes, self.arrived), m.Settled))[0]

    async def ack(self, handed: Handed) -> m.Settled:
        return await self.settle(m.Settlement.ACK, handed)

    async def reject(self, handed: Handed, reason: str = "") -> m.Settled:
        return await self.settle(m.Settlement.REJECT, handed, reason=reason)

    async def retry(self, handed: Handed, *, after_s: float | None = None, reason: str = "") -> m.Settled:
        return await self.settle(m.Settlement.RETRY, handed, after_s=after_s, reason=reason)

    async def heartbeat(self) -> m.Renewed:
        return (await self.client.ask(m.Heartbeat(*self._place, self.arrived), m.Renewed))[0]

    async def leave(self) -> None:
        await self.client.ask(m.Leave(*self._place, self.arrived), m.Done)

    async def drain(self) -> list[bytes]:
        """Pull and ack until nothing comes."""
        payloads: list[bytes] = []
        while (handed := await self.pull()).lots:
            payloads += handed.payloads
            await self.ack(handed)
        return payloads


class Scene:
    """One broker through as many lives as a story wants."""

    def __init__(self, seed: str, options: BrokerOptions | None = None, capacity_bytes: int = 4 * MIB) -> None:
        self.sim = Simulation(seed)
        self.clock = self.sim.clock
        self.disk = SimDisk(self.sim.rng.child("disk"), self.sim.loop.call_later, capacity_bytes=capacity_bytes)
        self.options = options or options_of()
        self.broker: Broker = None  # type: ignore[assignment]  # from `start` on
        self._control: Client | None = None
        self._stream = Stream(7)
        self._hosts = 0
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

    # --- lives

    async def start(self) -> None:
        world = BrokerWorld(self.clock, self.disk, self.sim.net.host(BROKER), self.sim.rng.child("broker"))
        self.broker = await Broker.start(world, self.options)

    async def stop(self) -> None:
        await self.broker.stop()
        self._forget(self.disk.crash_process)

    async def restart(self, options: BrokerOptions | None = None) -> None:
        self.options = options or self.options
        await self.stop()
        await self.start()

    async def power_cut(self) -> None:
        """No goodbye: what was not synced may be gone."""
        self._forget(self.disk.crash)
        await self.start()

    async def kill(self) -> None:
        """The process dies, what it had given to the disk stays."""
        self._forget(self.disk.crash_process)
        await self.start()

    def _forget(self, crash: Callable[[], SimDisk]) -> None:
        self.sim.net.crash(BROKER)
        self.broker.coordinator.close()
        self.disk = crash()
        self._control = None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # --- people

    async def connect(self, options: ConnectionOptions | None = None) -> Client:
        self._hosts += 1
        return await Client.connect(self.sim.net.host(f"client-{self._hosts}"), self.clock, BROKER, PORT, options)

    async def worker(
        self,
        name: str,
        *,
        group: str = GROUP,
        subject: str = SUBJECT,
        arrived: int = 0,
        is_joining: bool = True,
        secret: bytes | None = None,
    ) -> Worker:
        """`secret`: of its session, instead of the one that goes with the name; empty: it shows none."""
        worker = Worker(await self.connect(), name, group, subject, secret)
        worker.arrived = arrived
        if is_joining:
            await worker.join()
        return worker

    async def control(self) -> Client:
        """A connection for whoever produces and commands."""
        if self._control is None or self._control.is_gone:
            self._control = await self.connect()
        return self._control

    async def ask(self, message: ControlMessage, answer: type[Any]) -> Any:
        return (await (await self.control()).ask(message, answer))[0]

    async def send(self, *payloads: bytes, subject: str = SUBJECT, stream: Stream | None = None) -> m.Produced:
        return await (await self.control()).produce(subject, (stream or self._stream).batch(payloads))

    async def send_tagged(self, *tagged: tuple[bytes, str], subject: str = SUBJECT) -> None:
        """One batch per message: a payload and its tag."""
        for payload, tag in tagged:
            data = batch.encode(
                [payload],
                producer_id=self._stream.producer_id,
                first_sequence=self._stream.next,
                created_ms=self.clock.wall_ms(),
                tags=[[tag]],
            )
            self._stream.next += 1
            await (await self.control()).produce(subject, data)

    async def send_keyed(self, *texts: str, subject: str = SUBJECT) -> m.Produced:
        """One batch: "a1" is a message of key a, "-1" one without a key."""
        keys = [None if text[0] == "-" else text[0] for text in texts]
        data = batch.encode(
            [text.encode() for text in texts],
            producer_id=self._stream.producer_id,
            first_sequence=self._stream.next,
            created_ms=self.clock.wall_ms(),
            keys=keys,
        )
        self._stream.next += len(texts)
        return await (await self.control()).produce(subject, data)

    async def configure(
        self, config: GroupConfig, *, expected: int = 0, group: str = GROUP, subject: str = SUBJECT
    ) -> Configured:
        answer: Configured = await self.ask(Configure(subject, group, encode(config), expected), Configured)
        return answer

    async def switch(
        self,
        lever: Lever,
        *,
        is_on: bool,
        group: str = GROUP,
        consumer: str = "",
        subject: str = SUBJECT,
        key: str | None = None,
    ) -> Switched:
        answer: Switched = await self.ask(Switch(lever, is_on, subject, group, consumer, key), Switched)
        return answer

    async def seek(self, whence: m.Whence, value: int = 0, *, group: str = GROUP, subject: str = SUBJECT) -> Sought:
        answer: Sought = await self.ask(Seek(subject, group, whence, value), Sought)
        return answer

    async def weigh(self, weight: float, *, group: str = GROUP) -> None:
        await self.ask(Weigh(SUBJECT, group, weight), m.Done)

    async def redrive(
        self, ids: list[str] | None = None, *, rate: int = 0, group: str = GROUP, subject: str = SUBJECT
    ) -> Redriven:
        answer: Redriven = await self.ask(Redrive(subject, group, ids, rate), Redriven)
        return answer

    async def describe(self, *, group: str = GROUP, subject: str = SUBJECT) -> GroupDescription:
        answer: Described = await self.ask(Describe(Depth.CONSUMERS, subject, group), Described)
        [state] = answer.subjects[0].groups
        return state

    async def scan(self, subject: str = SUBJECT) -> list[Received]:
        """Everything that is in a subject."""
        scan = Scan(subject, m.Whence.EARLIEST, 0, None, 1 << 20)
        scanned, batches = await (await self.control()).ask(scan, Scanned)
        return [
            _received(0, attached.first_sequence + index, opened, index)
            for attached, opened in zip(scanned.batches, map(batch.decode, batches), strict=True)
            for index in range(len(opened))
        ]


def options_of(**changes: Any) -> BrokerOptions:
    settings: dict[str, Any] = {"host": BROKER, "port": PORT, "allow_remote": True, "store": STORE}
    return BrokerOptions(**settings | changes)


async def refused(asked: Coroutine[Any, Any, object]) -> Code:
    """The code with which a request is refused."""
    try:
        await asked
    except Refused as no:
        return no.code
    raise AssertionError("it was granted")


Story = Callable[[Scene], Coroutine[Any, Any, None]]


def staged(story: Story) -> Callable[[], None]:
    return staged_with(options_of())(story)


def staged_with(options: BrokerOptions) -> Callable[[Story], Callable[[], None]]:
    """The same on a broker with other options."""

    def decorate(story: Story) -> Callable[[], None]:
        def test() -> None:
            Scene(test.__name__, options).play(story)

        test.__name__ = story.__name__
        test.__doc__ = story.__doc__
        return test

    return decorate
