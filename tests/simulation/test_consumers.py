"""Consumers on lines to a whole broker, through cut connections, power cuts and silences, replayable from a seed."""

from __future__ import annotations

from functools import partial

import pytest

from fairway.errors import FairwayError
from fairway.groups import Backoff, GroupConfig
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.runtime.rng import SeededRng
from tests.support.lines import LoopLine
from tests.unit.broker.scene import BROKER, GROUP, PORT, SUBJECT, Scene

TURNS = 120
LEASE_S = 2


class Shop:
    """A consumer, and a memory of what must not happen to it."""

    def __init__(self, scene: Scene, name: str) -> None:
        rng = scene.sim.rng.child(name)
        self.wire = LoopLine(scene.sim.net.host(name), scene.clock, rng, BROKER, PORT)
        options = ConsumerOptions(SUBJECT, GROUP, name, prefetch_messages=1 + rng.below(30))
        self.session = ConsumerSession(
            *(options, scene.clock, rng), on_messages=self.take, on_change=self.wire.wake, call=self.wire.line.call
        )
        self.wire.add(self.session, self.session.detach, is_on_call=True)
        self.held: dict[object, Message] = {}
        self.confirmed: set[object] = set()
        self.seen: set[bytes] = set()

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            assert message.id not in self.held, "handed out twice while held"
            assert message.id not in self.confirmed, "handed out after its ack was confirmed"
            self.held[message.id] = message
            self.seen.add(message.payload)

    def settle(self, rng: SeededRng, most: int) -> None:
        for key in list(self.held)[:most]:
            message = self.held.pop(key)
            match rng.below(10):
                case 0:
                    message.retry(after=rng.uniform())
                case 1:
                    message.release()
                case _:
                    message.ack()
                    self.session.when_settled([message], partial(self._told, key))

    def _told(self, key: object, error: FairwayError | None) -> None:
        if error is None:
            self.confirmed.add(key)


async def trouble(scene: Scene, shops: list[Shop], rng: SeededRng, turn: int) -> None:
    """One thing that happens, most of the time something harmless."""
    shop = shops[rng.below(len(shops))]
    match rng.below(12):
        case 0:
            shop.wire.cut()
        case 1 if turn % 3 == 0:
            await scene.power_cut()
        case 2 if turn % 3 == 0:
            await scene.kill()
        case 3:
            scene.sim.net.partition(BROKER, shop.session.consumer)
            await scene.sleep(rng.uniform() * 2 * LEASE_S)
            scene.sim.net.heal(BROKER, shop.session.consumer)
        case _:
            await scene.sleep(rng.uniform() / 10)


async def story(scene: Scene, rng: SeededRng) -> None:
    backoff = Backoff(first_ms=100, cap_ms=1_000)
    await scene.configure(
        GroupConfig(lease_ms=LEASE_S * 1_000, attempts_max=1_000, backoff=backoff, lot_messages_max=7)
    )
    shops = [Shop(scene, name) for name in ("ann", "ben", "cid")]
    sent: set[bytes] = set()
    for turn in range(TURNS):
        if rng.below(2):
            payloads = [b"%d.%d" % (turn, number) for number in range(1 + rng.below(20))]
            await scene.send(*payloads)
            sent.update(payloads)
        await trouble(scene, shops, rng, turn)
        shops[rng.below(3)].settle(rng, rng.below(30))
    for _ in range(1_000):
        for shop in shops:
            shop.settle(SeededRng(1), 1_000)
        await scene.sleep(0.1)
        state = await scene.describe()
        if state.oldest_unacked == state.cursor and not state.lag:
            break
    assert set().union(*(shop.seen for shop in shops)) == sent
    for shop in shops:
        assert shop.session.error is None
        shop.session.drain(scene.clock.monotonic_ns())
    await scene.sleep(5)
    assert [shop.session.is_finished for shop in shops] == [True] * 3
    state = await scene.describe()
    left = (state.lag, state.in_flight, state.returned, state.retrying)
    assert left == (0, 0, 0, 0), f"{left} is left, {state}"
    for shop in shops:
        await shop.wire.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_everything_is_handed_out_and_done_with(seed: int) -> None:
    rng = SeededRng(f"consumers/{seed}")
    Scene(f"consumers/{seed}").play(lambda scene: story(scene, rng))
