"""PRODUCE requests in a row to one subject are served together, and each is stored, refused and answered by itself."""

from __future__ import annotations

import asyncio
import random

import pytest

from fairway import batch, limits
from fairway.errors import Code
from fairway.protocol import RefusalReceived, ResponseReceived
from fairway.protocol import messages as m
from tests.support.raw import Raw
from tests.unit.broker.scene import BROKER, PORT, SUBJECT, Scene, options_of, staged

LARGE = b"x" * (limits.CHECK_ON_LOOP_BYTES_MAX + 1)
SECRET = bytes(range(16))
Asked = tuple[m.Produce, bytes]


class Recorder(Raw):
    """Keeps the answer to each request."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, tuple[object, ...]] = {}

    def data_received(self, data: bytes) -> None:
        for event in self.connection.feed(data, 0):
            if isinstance(event, ResponseReceived):
                assert isinstance(event.message, m.Produced)
                told = event.message
                self.answers[event.correlation] = (told.first_sequence, told.count, told.is_duplicate)
            elif isinstance(event, RefusalReceived):
                self.answers[event.correlation] = (event.refused.code, event.refused.stored is not None)
            elif not self.greeted.done():
                self.greeted.set_result(None)


def batch_of(
    producer_id: int, first: int, payloads: list[bytes], *, due_ms: int = 0, codec: batch.Codec = batch.Codec.NONE
) -> bytes:
    due = [due_ms] * len(payloads) if due_ms else None
    return batch.encode(payloads, producer_id=producer_id, first_sequence=first, created_ms=1, codec=codec, due_ms=due)


def story_of(seed: int) -> list[Asked]:
    """Mostly the next batch of a stream; now and then one that is sent again, leaves a gap, conflicts, is large before
    compression, is delayed, or goes to another subject."""
    rng = random.Random(seed)
    at = dict.fromkeys((5, 6), 0)
    asked: list[Asked] = []
    for _ in range(60):
        producer_id = rng.choice((5, 5, 5, 6))
        subject = SUBJECT if producer_id == 5 else "other"
        kind = rng.choice(("next",) * 12 + ("again", "gap", "conflict", "large", "delayed", "secret"))
        first, payloads = at[producer_id], [rng.randbytes(20)] * rng.randint(1, 3)
        secret = SECRET if kind == "secret" else b""
        if kind == "again" and asked:
            asked.append(rng.choice(asked))
            continue
        if kind == "gap":
            data = batch_of(producer_id, first + 7, payloads)
        elif kind == "conflict" and first:
            data = batch_of(producer_id, first - 1, [b"another"])
        elif kind == "delayed":
            data = batch_of(producer_id, first, payloads, due_ms=1 << 40)
        else:
            payloads = [LARGE] if kind == "large" else payloads
            data = batch_of(
                producer_id, first, payloads, codec=batch.Codec.ZSTD if kind == "large" else batch.Codec.NONE
            )
            at[producer_id] += len(payloads)
        asked.append((m.Produce(subject, secret=secret), data))
    return asked


def answers_to(asked: list[Asked], seed: int, *, at_once: bool) -> tuple[list[object], list[bytes]]:
    """The answers in the order of the requests, and what is stored under SUBJECT then."""
    answers: list[object] = []
    stored: list[bytes] = []

    async def story(scene: Scene) -> None:
        client = await Recorder.connect(scene.sim.net.host("sender"), BROKER, PORT)
        for message, data in asked:
            client.connection.request(message, [data])
            if not at_once:
                client.send(*client.connection.take())
                await asyncio.sleep(5)
        client.send(*client.connection.take())
        await asyncio.sleep(20)
        answers.extend(client.answers[correlation] for correlation in sorted(client.answers))
        stored.extend(each.payload for each in await scene.scan())

    Scene(f"together-{seed}", options_of(), capacity_bytes=64 * limits.MIB).play(story)
    return answers, stored


@pytest.mark.parametrize("seed", range(12))
def test_requests_in_a_row_are_answered_as_they_would_be_one_by_one(seed: int) -> None:
    asked = story_of(seed)
    together, one_by_one = answers_to(asked, seed, at_once=True), answers_to(asked, seed, at_once=False)
    assert len(together[0]) == len(asked)
    assert together == one_by_one


@staged
async def test_a_row_is_one_unit_of_work(scene: Scene) -> None:
    client = await Recorder.connect(scene.sim.net.host("sender"), BROKER, PORT)
    client.ask(m.Produce(SUBJECT), (batch_of(5, 0, [b"0"]),))
    await asyncio.sleep(1)
    done = scene.broker.scheduler.tally.done
    for number in range(1, 161):
        client.connection.request(m.Produce(SUBJECT), [batch_of(5, number, [b"x"])])
    client.send(*client.connection.take())
    await asyncio.sleep(5)
    assert len(client.answers) == 161
    assert scene.broker.produce.messages == 161
    assert scene.broker.scheduler.tally.done - done < 80


@staged
async def test_a_row_that_takes_long_to_decompress_goes_one_by_one(scene: Scene) -> None:
    client = await Recorder.connect(scene.sim.net.host("sender"), BROKER, PORT)
    client.ask(m.Produce(SUBJECT), (batch_of(5, 0, [b"0"]),))
    await asyncio.sleep(1)
    done = scene.broker.scheduler.tally.done
    for number in range(1, 33):
        data = batch_of(5, number, [bytes(200 * limits.KIB)], codec=batch.Codec.ZSTD)
        assert len(data) < limits.KIB
        client.connection.request(m.Produce(SUBJECT), [data])
    client.send(*client.connection.take())
    await asyncio.sleep(5)
    assert len(client.answers) == 33
    assert scene.broker.scheduler.tally.done - done == 32


@staged
async def test_a_full_disk_refuses_each_of_a_row_and_stores_none(scene: Scene) -> None:
    client = await Recorder.connect(scene.sim.net.host("sender"), BROKER, PORT)
    client.ask(m.Produce(SUBJECT), (batch_of(5, 0, [b"0"]),))
    await asyncio.sleep(1)
    volume = scene.disk._volume
    volume.capacity_bytes -= volume.free_bytes
    for number in range(1, 9):
        client.connection.request(m.Produce(SUBJECT), [batch_of(5, number, [b"x" * 100])])
    client.send(*client.connection.take())
    await asyncio.sleep(5)
    refused = [client.answers[correlation] for correlation in range(2, 10)]
    assert [told[0] for told in refused] == [Code.READ_ONLY] * 8
    assert [each.payload for each in await scene.scan()] == [b"0"]


def test_who_sends_much_is_read_no_further_than_what_is_on_its_way_into_the_log() -> None:
    """So whoever comes next waits for little of it."""
    most = 0

    async def story(scene: Scene) -> None:
        nonlocal most
        flooder = await Recorder.connect(scene.sim.net.host("flooder"), BROKER, PORT)
        small = await Recorder.connect(scene.sim.net.host("small"), BROKER, PORT)
        small.ask(m.Produce("small"), (batch_of(6, 0, [b"0"]),))
        flooder.ask(m.Produce(SUBJECT), (batch_of(5, 0, [b"0"]),))
        await asyncio.sleep(1)
        for number in range(1, 41):
            flooder.connection.request(m.Produce(SUBJECT), [batch_of(5, number, [bytes(300 * limits.KIB)])])
        scene.disk.stall(1)  # the next commit takes its time
        flooder.send(*flooder.connection.take())
        await asyncio.sleep(0.5)
        small.ask(m.Produce("small"), (batch_of(6, 1, [b"1"]),))
        while len(small.answers) < 2:
            most = max(most, scene.broker.store.messages.log.flusher.uncommitted_bytes)
            await asyncio.sleep(0.001)
        assert len(flooder.answers) < 41
        await asyncio.sleep(10)
        assert len(flooder.answers) == 41

    Scene("flooder", options_of(), capacity_bytes=64 * limits.MIB).play(story)
    assert most < 2 * limits.MIB
