"""What simulated histories have found in the broker, or in the model of it, each told once more as a short story."""

from __future__ import annotations

import asyncio

import pytest

from fairway import batch
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Seek, Sought
from fairway.protocol.messages import Whence
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation, simulate
from fairway.simulation.disk import SimDisk
from tests.simulation import broker_history
from tests.simulation.broker_clients import BROKER, PORT
from tests.simulation.broker_truth import Holder, Owner, Promise, Truth
from tests.support.client import Client, Stream

SLOW = 2_000.0  # a sync takes from 40 ms to a second


async def started(world: Simulation, disk: SimDisk) -> Broker:
    options = BrokerOptions(host=BROKER, port=PORT, allow_remote=True)
    return await Broker.start(BrokerWorld(world.clock, disk, world.net.host(BROKER), SeededRng("broker")), options)


async def connected(world: Simulation, name: str) -> Client:
    return await Client.connect(world.net.host(name), world.clock, BROKER, PORT)


def test_an_ack_that_is_repeated_is_answered_no_sooner_than_the_first() -> None:
    """A consumer acks, loses the connection and acks again. By then nothing is left to settle, and that was answered at
    once. The power went before the first ack was on disk. The broker took the consumer to hold the messages still,
    while the consumer had been told that it does not. Nobody ever got them again."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        await client.join("orders", "hotel", "c")
        await client.produce("orders", Stream(1).batch([b"a", b"b"]))
        delivery = await client.pull("orders", "hotel", "c")
        await asyncio.sleep(0.1)
        disk.slowness = SLOW
        first = asyncio.ensure_future(client.settle("orders", "hotel", "c", delivery.lots, arrived=delivery.number))
        await asyncio.sleep(0.005)
        again = await client.settle("orders", "hotel", "c", delivery.lots, arrived=delivery.number)
        assert again.stale == 2
        log = broker.store.actions.log
        assert log.committed_end == log.end
        assert (await first).settled == 2
        await broker.stop()

    simulate(story, seed=1)


def test_that_a_place_is_taken_is_said_no_sooner_than_it_is_durable() -> None:
    """Rows of an outbox travel as one batch, and a relay sends one of them by itself. It takes a conflict for a receipt
    and deletes the row: if the power went before the batch was on disk, the message would be nowhere."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client, relay = await connected(world, "sender"), await connected(world, "relay")
        await client.produce("orders", batch.encode([b"a"], producer_id=1, first_sequence=0, created_ms=1))
        disk.slowness = SLOW
        bundle = batch.encode([b"b", b"c", b"d"], producer_id=1, first_sequence=1, created_ms=1)
        first = asyncio.ensure_future(client.produce("orders", bundle))
        await asyncio.sleep(0.005)
        with pytest.raises(Refused) as refused:
            await relay.produce("orders", batch.encode([b"c"], producer_id=1, first_sequence=2, created_ms=1))
        assert refused.value.code is Code.SEQUENCE_CONFLICT
        log = broker.store.messages.log
        assert log.committed_end == log.end
        assert (await first).count == 3
        await broker.stop()

    simulate(story, seed=1)


def test_a_membership_that_is_confirmed_again_is_durable() -> None:
    """JOIN, and JOIN once more from a new connection: the second changes nothing, but the first may not be on disk."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        await client.produce("orders", Stream(1).batch([b"a"]))
        disk.slowness = SLOW
        secret = bytes(range(16))
        first = asyncio.ensure_future(client.join("orders", "hotel", "c", secret=secret))
        await asyncio.sleep(0.005)
        await (await connected(world, "consumer")).join("orders", "hotel", "c", secret=secret)
        log = broker.store.actions.log
        assert log.committed_end == log.end
        await first
        await broker.stop()

    simulate(story, seed=1)


def test_who_waits_for_longer_than_a_lease_keeps_its_place() -> None:
    """A consumer with nothing to handle sent no heartbeats, as the protocol allows, and one long poll after the other.
    Each outlasted the lease, so it was expired while it waited, and refused when a message came."""

    async def story(world: Simulation) -> None:
        broker = await started(world, SimDisk(world.rng.child("disk"), world.loop.call_later))
        client = await connected(world, "consumer")
        lease_ms = (await client.join("orders", "hotel", "c")).lease_ms
        for _ in range(5):
            assert not (await client.pull("orders", "hotel", "c", wait_ms=10 * lease_ms)).lots
        await client.produce("orders", Stream(1).batch([b"a"]))
        assert (await client.pull("orders", "hotel", "c")).payloads == {0: b"a"}
        await broker.stop()

    simulate(story, seed=1)


def test_who_is_told_that_it_is_no_member_is_none_after_a_crash_either() -> None:
    """A lease ended, and the consumer was told so before that was on disk. It forgot what it held; the power went, the
    broker took it to be a member still, and the consumer came back as one that had everything. Nobody got it again."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        lease_ms = (await client.join("orders", "hotel", "c")).lease_ms
        await client.produce("orders", Stream(1).batch([b"a"]))
        await client.pull("orders", "hotel", "c")
        await asyncio.sleep(lease_ms / 1_000 - 0.01)
        disk.slowness = SLOW
        await asyncio.sleep(0.02)
        log = broker.store.actions.log
        assert log.committed_end < log.end
        with pytest.raises(Refused, match="NOT_A_MEMBER"):
            await client.pull("orders", "hotel", "c", arrived=1)
        assert log.committed_end == log.end
        await broker.stop()

    simulate(story, seed=1)


def test_an_answer_that_a_seek_overtakes_says_nothing_about_what_holds_since() -> None:
    """One consumer pulls, and its answer is held up. Somebody moves the cursor back, another consumer is given the same
    message and acks it, and only then does the answer come. That was taken for a handout after the ack."""
    truth, owner, late, prompt = a_group_of_two()
    truth.note_seeking(owner, 0)
    truth.note_sought(owner, 0, 20)
    truth.note_delivery(owner, prompt, {0: b"a"}, asked_ns=30, now_ns=40)
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=10, now_ns=50)
    truth.note_acking(owner, [0])
    truth.note_acked(owner, [0])
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=10, now_ns=60)
    assert not truth.breaches
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=61, now_ns=70)
    assert {breach.promise for breach in truth.breaches} == {Promise.ACKED_AGAIN, Promise.DUPLICATE}


def test_an_answer_that_a_seek_overtakes_leaves_the_message_with_whoever_has_it_since() -> None:
    truth, owner, late, prompt = a_group_of_two()
    truth.note_seeking(owner, 0)
    truth.note_sought(owner, 0, 20)
    truth.note_delivery(owner, prompt, {0: b"a"}, asked_ns=30, now_ns=40)
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=10, now_ns=50)
    truth.note_asked(owner, late, [0], "release")  # which is stale
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=61, now_ns=70)
    assert [breach.promise for breach in truth.breaches] == [Promise.DUPLICATE]


def test_a_seek_does_not_excuse_what_was_acked_before_it_and_lies_below() -> None:
    truth, owner, late, prompt = a_group_of_two()
    truth.note_delivery(owner, prompt, {0: b"a"}, asked_ns=1, now_ns=2)
    truth.note_acking(owner, [0])
    truth.note_acked(owner, [0])
    truth.note_seeking(owner, 1)
    truth.note_sought(owner, 1, 20)
    truth.note_delivery(owner, late, {0: b"a"}, asked_ns=10, now_ns=50)
    assert [breach.promise for breach in truth.breaches] == [Promise.ACKED_AGAIN]


def test_an_answer_that_outlasts_its_lease_says_nothing_about_what_holds_since() -> None:
    """One consumer pulls, and the net holds up its answer until its lease has ended. Another is given the same message
    and acks it, and only then does the answer come. That was taken for a handout after the ack (seed 960081)."""
    truth, owner, late, prompt = a_group_of_two()
    lease_ns = owner.lease_ns
    truth.note_contact(owner, prompt, asked_ns=lease_ns, now_ns=lease_ns + 20)
    deliver(truth, owner, prompt, asked_ns=lease_ns, now_ns=lease_ns + 20, attempt=2)
    deliver(truth, owner, late, asked_ns=10, now_ns=lease_ns + 30, attempt=1)
    truth.note_acking(owner, [0])
    truth.note_acked(owner, [0])
    deliver(truth, owner, late, asked_ns=10, now_ns=lease_ns + 40, attempt=1)
    assert not truth.breaches
    assert truth.reasons["overtaken"] == 2
    deliver(truth, owner, late, asked_ns=lease_ns + 50, now_ns=lease_ns + 60, attempt=1)
    assert {breach.promise for breach in truth.breaches} == {Promise.ACKED_AGAIN, Promise.DUPLICATE}


def test_a_pull_that_waited_for_a_lease_is_no_excuse_for_what_was_acked_meanwhile() -> None:
    truth, owner, waiting, prompt = a_group_of_two()
    lease_ns = owner.lease_ns
    truth.note_contact(owner, prompt, asked_ns=lease_ns, now_ns=lease_ns + 20)
    deliver(truth, owner, prompt, asked_ns=lease_ns, now_ns=lease_ns + 20, attempt=1)
    truth.note_acking(owner, [0])
    truth.note_acked(owner, [0])
    deliver(truth, owner, waiting, asked_ns=10, now_ns=lease_ns + 40, attempt=2)
    assert {breach.promise for breach in truth.breaches} == {Promise.ACKED_AGAIN, Promise.DUPLICATE}


def test_an_answer_from_before_a_crash_says_nothing_about_what_holds_since() -> None:
    """The crash took the PULL with it, so that the next life handed the message out for the first time, as it knew."""
    truth, owner, late, prompt = a_group_of_two()
    truth.note_crash(20)
    deliver(truth, owner, prompt, asked_ns=30, now_ns=40, attempt=1)
    truth.note_acking(owner, [0])
    truth.note_acked(owner, [0])
    deliver(truth, owner, late, asked_ns=10, now_ns=50, attempt=1)
    assert not truth.breaches
    deliver(truth, owner, late, asked_ns=21, now_ns=60, attempt=1)
    assert {breach.promise for breach in truth.breaches} == {Promise.ACKED_AGAIN, Promise.DUPLICATE}


def test_a_cursor_stands_at_the_end_at_most_and_misses_nothing_that_comes() -> None:
    """One that was beyond it passed over what came until then, and the broker was blamed for waking nobody (seed
    960578)."""

    async def story(world: Simulation) -> None:
        broker = await started(world, SimDisk(world.rng.child("disk"), world.loop.call_later))
        client = await connected(world, "consumer")
        await client.join("orders", "hotel", "c")
        stream = Stream(1)
        await client.produce("orders", stream.batch([b"a"]))
        with pytest.raises(Refused, match="no sequence 3 in orders, which ends at 1 here: seek to 1"):
            await client.ask(Seek("orders", "hotel", Whence.SEQUENCE, 3), Sought)
        assert (await client.ask(Seek("orders", "hotel", Whence.SEQUENCE, 1), Sought))[0].sequence == 1
        waiting = asyncio.ensure_future(client.pull("orders", "hotel", "c", wait_ms=1_000))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.produce("orders", stream.batch([b"b", b"c"]))
        assert (await waiting).payloads == {1: b"b", 2: b"c"}
        await broker.stop()

    simulate(story, seed=1)


@pytest.mark.parametrize("seed", [960_081, 960_578])
def test_what_the_model_once_held_against_the_broker_is_not_held_against_it(seed: int) -> None:
    assert not broker_history.run(seed).breaches


def deliver(truth: Truth, owner: Owner, holder: Holder, *, asked_ns: int, now_ns: int, attempt: int) -> None:
    holder.attempts = {0: attempt}
    truth.note_delivery(owner, holder, {0: b"a"}, asked_ns=asked_ns, now_ns=now_ns)


def a_group_of_two() -> tuple[Truth, Owner, Holder, Holder]:
    truth = Truth()
    truth.note_sent("orders", [b"a"], 0)
    truth.note_receipt("orders", 0, [b"a"])
    return truth, truth.owner("hotel", "orders", 1_000), Holder("late"), Holder("prompt")


def test_an_ack_from_before_a_seek_is_not_taken_for_that_of_the_handout_behind_it() -> None:
    """A consumer waits for more while it acks what it has. Somebody moves the cursor back, the pull that waits gets the
    same messages under the same name, and the ack arrives: it settled what the consumer had not even seen."""

    async def story(world: Simulation) -> None:
        broker = await started(world, SimDisk(world.rng.child("disk"), world.loop.call_later))
        client = await connected(world, "consumer")
        await client.join("orders", "hotel", "c")
        await client.produce("orders", Stream(1).batch([b"a", b"b"]))
        first = await client.pull("orders", "hotel", "c")
        pull = client.pull("orders", "hotel", "c", arrived=first.number, wait_ms=1_000)
        waiting = asyncio.ensure_future(pull)
        await asyncio.sleep(0.1)
        seek = Seek("orders", "hotel", Whence.SEQUENCE, 0)
        await (await connected(world, "operator")).ask(seek, Sought)
        late = await client.settle("orders", "hotel", "c", first.lots, arrived=first.number)
        assert (late.settled, late.stale) == (0, 2)
        again = await waiting
        assert again.lots == first.lots
        assert (await client.settle("orders", "hotel", "c", again.lots, arrived=again.number)).settled == 2
        await broker.stop()

    simulate(story, seed=1)
