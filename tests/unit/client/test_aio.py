"""The client on a loop against a real broker: the same names, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import fairway
import fairway.aio
from fairway.client.core import ClientOptions
from fairway.groups import GroupConfig
from tests.support.ports import free_port
from tests.unit.client.broker import WAIT_S, Running, running
from tests.unit.client.test_trouble import answering
from tests.unit.runtime.loops import LOOPS, loops_of

Story = Callable[[fairway.aio.Client, str], Coroutine[Any, Any, None]]
SMALL = ClientOptions(producer=fairway.ProducerOptions(buffer_messages_max=100, batch_messages_max=10))


@pytest.fixture(autouse=True, params=LOOPS)
def each_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test, on asyncio's loop and on uvloop's: their timers differ."""
    with loops_of(request.param):
        yield


def play(story: Story, broker: Running, subject: str, options: ClientOptions | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(2 * WAIT_S), fairway.aio.connect(broker.url, options=options) as client:
            await story(client, subject)

    asyncio.run(run())


async def drained(consumer: fairway.aio.Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    async for message in consumer:
        found.append(message.payload)
        message.ack()
        if len(found) == count:
            break
    return found


def test_awaiting_a_send_gives_its_receipt(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        receipt = await client.send(subject, b"paid", key="o-42", tags=("paid",), headers={"source": "pos"})
        async with client.consumer(subject, group="hotel") as consumer:
            message = await consumer.poll(WAIT_S)
            assert message is not None
            assert (message.payload, message.key, message.tags) == (b"paid", "o-42", ("paid",))
            assert (message.headers, message.sequence) == ({"source": "pos"}, receipt.sequence)
            message.ack()

    play(story, broker, subject)


def test_sends_between_two_awaits_are_one_batch(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        pendings = [client.send_nowait(subject, b"%d" % number) for number in range(1_000)]
        receipts = await asyncio.gather(*pendings)
        assert [receipt.sequence for receipt in receipts] == list(range(1_000))
        assert len({id(pending.batch) for pending in pendings}) == 1
        assert all(pending.done() and pending.result() for pending in pendings)
        receipts_many = await client.send_many(subject, [b"x"] * 10_000)
        assert sum(receipt.count for receipt in receipts_many) == 10_000
        async with client.consumer(subject, group="hotel") as consumer:
            assert (await drained(consumer, 11_000))[:1_000] == [b"%d" % number for number in range(1_000)]

    play(story, broker, subject)


def test_a_cancelled_wait_takes_nothing_from_the_others(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        pending = client.send_nowait(subject, b"a")

        async def wait() -> fairway.Receipt:
            return await pending

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).sequence == 0
        with pytest.raises(asyncio.CancelledError):
            await first
        async with client.consumer(subject, group="hotel") as consumer:
            assert await drained(consumer, 1) == [b"a"]
            polling = asyncio.create_task(consumer.poll())
            await asyncio.sleep(0.01)
            polling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await polling
            await client.send(subject, b"b")
            assert await drained(consumer, 1) == [b"b"]

    play(story, broker, subject)


def test_a_full_buffer_makes_send_wait_and_send_nowait_raise(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        pendings = [client.send_nowait(subject, b"%d" % number) for number in range(100)]
        with pytest.raises(fairway.BufferFull):
            pendings.append(client.send_nowait(subject, b"one too many"))
        assert (await client.send(subject, b"waits")).sequence == 100
        receipts = await asyncio.gather(*(client.send(subject, b"x") for _ in range(2_000)))
        assert len({receipt.sequence for receipt in receipts}) == 2_000
        assert sum(receipt.count for receipt in await client.send_many(subject, [b"y"] * 20_000)) == 20_000

    play(story, broker, subject, SMALL)


def test_a_send_that_waits_for_room_and_is_never_awaited_is_told(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        pendings: list[object] = [client.send_nowait(subject, b"a") for _ in range(100)]
        pendings.append(client.send(subject, b"dropped"))
        with pytest.warns(RuntimeWarning, match="never awaited"):
            pendings.clear()

    play(story, broker, subject, SMALL)


def test_retry_and_hand_back(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        await client.send_many(subject, [b"a", b"b"])
        async with client.consumer(subject, group="hotel") as consumer:
            messages = await consumer.take(10, WAIT_S)
            messages[0].retry(after=0)
            again = await consumer.poll(WAIT_S)
            assert again is not None
            assert (again.payload, again.attempt) == (b"a", 2)
            again.ack()
            assert await consumer.flush()
        async with client.consumer(subject, group="hotel") as consumer:
            assert await drained(consumer, 1) == [b"b"]
            assert await consumer.take(10, 0.05) == []

    play(story, broker, subject)


def test_looking_and_steering(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        await client.send_many(subject, [b"%d" % number for number in range(10)])
        async with client.consumer(subject, group="hotel") as consumer:
            await drained(consumer, 10)
            assert await consumer.flush()
            assert (await client.seek(subject, "hotel", 8)).sequence == 8
            assert await drained(consumer, 2) == [b"8", b"9"]
            await client.pause(subject, "hotel")
            assert (await client.describe(subject, "hotel")).subjects[0].groups[0].is_paused
            await client.resume(subject, "hotel")
            await client.weight(subject, "hotel", 3)
        assert [len(page.batch) async for page in client.scan(subject)] == [10]
        with pytest.raises(fairway.Refused):
            await client.seek(subject, "nobody", "latest")

    play(story, broker, subject)


def test_a_callback_is_told_and_one_that_fails_is_reported(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        told = asyncio.Event()
        client.send_nowait(subject, b"a").add_done_callback(lambda _: 1 / 0)
        client.send_nowait(subject, b"b").add_done_callback(lambda _: told.set())
        await told.wait()
        assert isinstance(reported[0]["exception"], ZeroDivisionError)

    play(story, broker, subject)


def test_nobody_there() -> None:
    async def run() -> None:
        with pytest.raises(fairway.Unreachable, match="Is it running"):
            await fairway.aio.connect(f"fairway://127.0.0.1:{free_port()}").open()
        with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4) as port:
            connecting = fairway.aio.connect(f"fairway://127.0.0.1:{port}")
            with pytest.raises(fairway.Unreachable, match="no broker at"):
                await connecting.open()

    asyncio.run(run())


def test_a_restart_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        async with client.consumer(subject, group="hotel") as consumer:
            await client.send(subject, b"before")
            own.kill()
            sending = [asyncio.ensure_future(client.send(subject, b"%d" % number)) for number in range(100)]
            await asyncio.sleep(0.2)
            own.start()
            assert [(await each).sequence for each in sending] == list(range(1, 101))
            assert set(await drained(consumer, 101)) == {b"before", *(b"%d" % number for number in range(100))}

    with running(tmp_path / "data") as own:
        play(story, own, "orders")


def test_a_client_that_was_awaited_can_be_entered(broker: Running, subject: str) -> None:
    async def run() -> None:
        async with await fairway.aio.connect(broker.url) as client:
            await client.send(subject, b"a")
            with pytest.raises(fairway.Misuse, match="once"):
                await client.open()
        with pytest.raises(fairway.Misuse, match="once"):
            async with client:
                raise AssertionError("it was closed")

    asyncio.run(run())


def test_the_same_configuration_may_be_asked_for_at_every_start(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        config = GroupConfig(lease_ms=20_000)
        for _ in range(3):
            assert (await client.configure(subject, "hotel", config, expected_version=0)).version == 1
        with pytest.raises(fairway.Refused, match="expected_version=1"):
            await client.configure(subject, "hotel", GroupConfig(lease_ms=21_000), expected_version=0)
        newer = GroupConfig(version=2, lease_ms=21_000)
        assert (await client.configure(subject, "hotel", newer, expected_version=1)).version == 2
        again = GroupConfig(lease_ms=21_000)
        assert (await client.configure(subject, "hotel", again, expected_version=0)).version == 2

    play(story, broker, subject)


def test_one_tag_as_text_is_refused_with_the_remedy(broker: Running, subject: str) -> None:
    async def story(client: fairway.aio.Client, subject: str) -> None:
        with pytest.raises(TypeError, match=r"write tags=\['paid'\]"):
            await client.send(subject, b"a", tags="paid")

    play(story, broker, subject)


def test_what_nobody_looked_at_is_raised_at_the_end(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        client = await fairway.aio.connect(url)
        await client.send("orders", b"a")
        own.kill()
        pending = client.send_nowait("orders", b"b")
        with pytest.raises(ExceptionGroup, match="nobody looked"):
            await client.close(0.1)
        with pytest.raises((fairway.NotSent, fairway.OutcomeUnknown)):
            await pending
        with pytest.raises(fairway.Misuse, match="not open"):
            await client.send_nowait("orders", b"c")

    with running(tmp_path / "data") as own:
        asyncio.run(run(own.url))
