"""The producer against the real broker, on a simulated net and disk: drops, restarts, power cuts; each message once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fairway.errors import NotSent, OutcomeUnknown, Refused, Unreachable
from fairway.protocol.line import Line
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.receipts import Pending, PendingBatch
from fairway.runtime.net import Net
from tests.unit.broker.scene import BROKER, PORT, SUBJECT, Scene

STEP_S = 0.002
STEPS = 600


class Wire(asyncio.Protocol):
    """Carries a line's bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        self.driver.line.feed(data, self.driver.now_ns)
        self.driver.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.driver.transport = None
        self.driver.line.lost("the connection ended", self.driver.now_ns)


class Driver:
    """The least that can own a line: looks every two milliseconds what is to be done."""

    def __init__(self, scene: Scene, net: Net) -> None:
        self.scene = scene
        self.net = net
        self.line = Line(scene.sim.rng.child("line"), now_ns=scene.clock.monotonic_ns())
        self.producing: ProducerSession[Pending, PendingBatch] = ProducerSession(
            scene.clock,
            scene.sim.rng.child("producer"),
            ProducerOptions(batch_messages_max=7, window=8, delivery_timeout_ms=20_000),
            run_later=self.line.run_later,
        )
        self.line.add(self.producing, self.now_ns)
        self.transport: asyncio.Transport | None = None

    @property
    def now_ns(self) -> int:
        return self.scene.clock.monotonic_ns()

    def pump(self) -> None:
        out = self.line.take(self.now_ns)
        if self.transport is not None:
            self.transport.writelines(out)
            if self.line.is_over():
                self.transport.close()

    async def step(self) -> None:
        due_ns = self.line.dial_due()
        if due_ns is not None and due_ns <= self.now_ns:
            await self._dial()
        self.pump()
        await asyncio.sleep(STEP_S)

    async def _dial(self) -> None:
        try:
            async with asyncio.timeout(1):
                transport, wire = await self.net.connect(lambda: Wire(self), BROKER, PORT)
        except (Unreachable, TimeoutError) as problem:
            self.line.unreachable(str(problem), self.now_ns)
            return
        if not wire.is_lost:
            self.transport = transport
            self.line.connected(self.now_ns)


async def story(scene: Scene) -> Counter[str]:
    """Send all the while, let everything go wrong now and then, and compare what is stored with what was told."""
    rng = scene.sim.rng.child("fate")
    driver = Driver(scene, scene.sim.net.host("producer"))
    sent: list[tuple[bytes, Pending]] = []
    for number in range(STEPS):
        for each in range(rng.below(4)):
            payload = b"%d.%d" % (number, each)
            sent.append((payload, driver.producing.add(SUBJECT, payload)))
        await driver.step()
        fate = rng.below(150)
        if fate < 3:
            scene.sim.net.drop("producer")
        elif fate == 3:
            await scene.restart()
        elif fate == 4:
            await scene.power_cut()
        elif fate == 5:
            await scene.kill()
    for _ in range(20_000):
        if not driver.producing.messages:
            break
        await driver.step()
    return await compare(scene, sent)


async def compare(scene: Scene, sent: list[tuple[bytes, Pending]]) -> Counter[str]:
    stored = await scene.scan()
    times = Counter(each.payload for each in stored)
    places = {each.sequence: each for each in stored}
    told: Counter[str] = Counter()
    last = -1
    for payload, pending in sent:
        error = pending.exception()
        told[type(error).__name__] += 1
        if error is None:
            receipt = pending.receipt()
            assert times[payload] == 1
            assert places[receipt.sequence].payload == payload
            assert receipt.id == str(places[receipt.sequence].id)
            assert receipt.sequence > last
            last = receipt.sequence
        else:
            assert isinstance(error, (NotSent, OutcomeUnknown, Refused)), error
            assert times[payload] <= isinstance(error, OutcomeUnknown)
    return told


@pytest.mark.parametrize("seed", range(6))
def test_everything_is_stored_once_in_order_whatever_happens_to_the_broker(seed: int) -> None:
    told: Counter[str] = Counter()

    async def play(scene: Scene) -> None:
        told.update(await story(scene))

    Scene(f"producing-{seed}").play(play)
    assert told["NoneType"] > 0.9 * told.total()
