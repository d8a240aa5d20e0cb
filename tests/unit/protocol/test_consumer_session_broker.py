"""A consumer's session on a line to a whole broker, on virtual time."""

from __future__ import annotations

from typing import Any

from fairway.groups import GroupConfig, TagFilter
from fairway.protocol import messages as m
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from tests.support.lines import LoopLine
from tests.unit.broker.scene import BROKER, GROUP, PORT, SUBJECT, Scene, staged


class Shop:
    """A process with one consumer."""

    def __init__(self, scene: Scene, name: str, **options: Any) -> None:
        rng = scene.sim.rng.child(name)
        self.scene = scene
        self.wire = LoopLine(scene.sim.net.host(name), scene.clock, rng, BROKER, PORT)
        self.session = ConsumerSession(
            ConsumerOptions(SUBJECT, GROUP, name, **options), scene.clock, rng, on_change=self.wire.wake
        )
        self.wire.add(self.session, self.session.detach)

    async def take(self, count: int, seconds: float = 60) -> list[Message]:
        """Wait for so many messages."""
        taken: list[Message] = []
        for _ in range(round(seconds * 100)):
            taken += self.session.take_messages(count - len(taken))
            if len(taken) == count:
                return taken
            await self.scene.sleep(0.01)
        raise AssertionError(f"{len(taken)} of {count} messages within {seconds} s")

    async def confirmed(self, seconds: float = 60) -> None:
        """Wait until the broker has heard everything."""
        for _ in range(round(seconds * 100)):
            if not self.session.unconfirmed_count:
                return
            await self.scene.sleep(0.01)
        raise AssertionError(f"{self.session.unconfirmed_count} messages are not confirmed")

    async def end(self, seconds: float = 60) -> None:
        self.session.drain(self.scene.clock.monotonic_ns())
        for _ in range(round(seconds * 100)):
            if self.session.is_finished:
                break
            await self.scene.sleep(0.01)
        assert self.session.is_finished
        await self.wire.close()


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


@staged
async def test_messages_come_and_are_done_with(scene: Scene) -> None:
    await scene.send(b"a", b"b")
    shop = Shop(scene, "ann")
    messages = await shop.take(2)
    assert payloads(messages) == [b"a", b"b"]
    shop.session.ack(messages)
    await shop.confirmed()
    assert (await scene.describe()).in_flight == 0
    await shop.end()
    assert (await scene.describe()).consumers == []


@staged
async def test_a_handler_that_runs_for_an_hour_keeps_its_message(scene: Scene) -> None:
    await scene.send(b"a")
    ann, ben = Shop(scene, "ann", prefetch_messages=1), Shop(scene, "ben")
    await scene.sleep(1)
    held = [*ann.session.take_messages(), *ben.session.take_messages()]
    await scene.sleep(3_600)
    held[0].ack()
    await ann.confirmed()
    await ben.confirmed()
    assert ann.session.counts.settled + ben.session.counts.settled == 1
    assert ann.session.counts.stale + ben.session.counts.stale == 0
    await ann.end()
    await ben.end()


@staged
async def test_it_goes_on_after_the_broker_was_away(scene: Scene) -> None:
    await scene.send(b"a", b"b")
    shop = Shop(scene, "ann")
    [first] = await shop.take(1)
    await scene.restart()
    first.ack()
    [second] = await shop.take(1)
    await scene.send(b"c")
    third = await shop.take(1)
    assert payloads([second, *third]) == [b"b", b"c"]
    second.ack()
    shop.session.ack(third)
    await shop.confirmed()
    assert shop.session.counts.stale == 0
    assert shop.session.counts.joins == 2
    await shop.end()


@staged
async def test_it_goes_on_after_a_power_cut(scene: Scene) -> None:
    await scene.send(*(b"%d" % number for number in range(100)))
    shop = Shop(scene, "ann", prefetch_messages=10)
    done: list[bytes] = []
    for turn in range(10):
        messages = await shop.take(10)
        done += payloads(messages)
        shop.session.ack(messages[:5])
        if turn % 3 == 1:
            await scene.power_cut()
        shop.session.ack(messages[5:])
    await shop.confirmed()
    assert sorted(set(done)) == sorted(b"%d" % number for number in range(100))
    assert (await scene.describe()).oldest_unacked == 100
    await shop.end()


@staged
async def test_twice_the_consumers_share_the_work_at_once(scene: Scene) -> None:
    ann = Shop(scene, "ann", prefetch_messages=10)
    await scene.send(*(b"%d" % number for number in range(40)))
    first = await ann.take(10)
    ben = Shop(scene, "ben", prefetch_messages=10)
    second = await ben.take(10, seconds=1)
    assert payloads(first + second) == [b"%d" % number for number in range(20)]
    await ann.wire.close()
    await ben.wire.close()


@staged
async def test_what_one_hands_back_another_gets_at_once(scene: Scene) -> None:
    await scene.send(*(b"%d" % number for number in range(10)))
    ann = Shop(scene, "ann")
    [begun] = await ann.take(1)
    ben = Shop(scene, "ben")
    ann.session.drain(scene.clock.monotonic_ns())
    assert len(await ben.take(9, seconds=1)) == 9
    assert not ann.session.is_finished
    begun.ack()
    await ann.end()
    assert ann.session.counts.stale == 0
    await ben.wire.close()


@staged
async def test_a_connection_that_is_cut_again_and_again(scene: Scene) -> None:
    count = 200
    await scene.send(*(b"%d" % number for number in range(count)))
    shop = Shop(scene, "ann", prefetch_messages=20)
    done: list[int] = []
    for turn in range(count):
        [message] = await shop.take(1)
        done.append(message.sequence)
        message.ack()
        if turn % 7 == 0:
            shop.wire.cut()
    assert done == list(range(count))
    await shop.confirmed()
    assert (await scene.describe()).oldest_unacked == count
    await shop.end()


@staged
async def test_tags_and_redriven_messages(scene: Scene) -> None:
    await scene.configure(GroupConfig(tags=TagFilter(("paid",))))
    await scene.send_tagged((b"a", "paid"), (b"b", "open"), (b"c", "paid"))
    shop = Shop(scene, "ann")
    messages = await shop.take(2)
    assert payloads(messages) == [b"a", b"c"]
    messages[0].reject("broken")
    messages[1].ack()
    await shop.confirmed()
    assert (await scene.redrive()).count == 1
    [again] = await shop.take(1)
    assert (again.payload, again.subject, again.id) == (b"a", SUBJECT, messages[0].id)
    again.ack()
    await shop.confirmed()
    assert (await scene.describe()).inbox == 0
    await shop.end()


@staged
async def test_broadcast_reaches_everybody(scene: Scene) -> None:
    shops = [Shop(scene, name, is_broadcast=True, start=m.Whence.EARLIEST) for name in ("ann", "ben")]
    await scene.send(b"a", b"b")
    for shop in shops:
        messages = await shop.take(2)
        assert payloads(messages) == [b"a", b"b"]
        shop.session.ack(messages)
        await shop.end()
