"""A client of a cluster on a loop: what the one with threads does, awaited."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

import fairway
import fairway.aio
from fairway.client.core import ClientOptions
from fairway.errors import Misuse
from fairway.protocol.route_messages import SubjectRoute
from tests.support.ports import free_port
from tests.support.stub_server import Follower, group
from tests.unit.client.broker import WAIT_S
from tests.unit.client.cluster import Cluster, fill, stored
from tests.unit.runtime.loops import LOOPS, loops_of

T = TypeVar("T")


@pytest.fixture(autouse=True, params=LOOPS)
def each_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test, on asyncio's loop and on uvloop's: their timers differ."""
    with loops_of(request.param):
        yield


def run(url: str, story: Callable[[fairway.aio.Client], Awaitable[T]], options: ClientOptions | None = None) -> T:
    async def main() -> T:
        async with asyncio.timeout(2 * WAIT_S), fairway.aio.connect(url, options=options) as client:
            return await story(client)

    return asyncio.run(main())


def test_messages_are_spread_over_the_groups(cluster: Cluster, subject: str) -> None:
    async def story(client: fairway.aio.Client) -> None:
        for number in range(20):
            await client.send(subject, b"%d" % number)
        await asyncio.gather(*(client.send(subject, b"%d" % number) for number in range(20, 40)))
        for _ in range(4):
            await client.send_many(subject, [b"40"] * 10)

    run(cluster.url, story)
    found = {name: stored(broker, subject) for name, broker in cluster.brokers.items()}
    assert sum(map(len, found.values())) == 80
    assert all(len(payloads) >= 16 for payloads in found.values())


def test_what_is_sent_before_anybody_knows_where_to_arrives_in_order(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["b"], ["b"]))

    async def story(client: fairway.aio.Client) -> list[int]:
        cluster.meta.is_mute = True
        pendings = [client.send_nowait(subject, b"%d" % number) for number in range(50)]
        waits = [client.send(subject, b"%d" % number, key=f"k{number}") for number in range(50, 60)]
        await asyncio.sleep(0)
        cluster.meta.is_mute = False
        cluster.meta.tell()
        receipts = [await pending for pending in pendings] + [await wait for wait in waits]
        return [receipt.sequence for receipt in receipts]

    assert run(cluster.url, story) == list(range(60))


def test_keys_of_an_ordered_subject_have_their_group(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"], is_ordered=True))
    keys = [f"k{number % 10}" for number in range(100)]

    async def story(client: fairway.aio.Client) -> None:
        await client.send_many(subject, [key.encode() for key in keys], keys=keys)
        await asyncio.gather(*(client.send(subject, key.encode(), key=key) for key in keys))

    run(cluster.url, story)
    found = [set(stored(broker, subject)) for broker in cluster.brokers.values()]
    assert not found[0] & found[1]
    assert all(found)


def test_what_a_group_does_not_take_goes_to_another(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.brokers["a"].url) as direct:
        direct.read_only(subject, True)

    async def story(client: fairway.aio.Client) -> None:
        for number in range(10):
            await client.send(subject, b"%d" % number)

    run(cluster.url, story)
    assert len(stored(cluster.brokers["b"], subject)) == 10


def test_a_new_master_is_dialed_as_soon_as_it_is_known(cluster: Cluster, subject: str) -> None:
    with Follower() as follower:
        follower.retry_after_ms = 60_000
        cluster.meta.tell(SubjectRoute(subject, ["c"], ["c"]), group("c", follower.port))

        async def story(client: fairway.aio.Client) -> int:
            pending = client.send_nowait(subject, b"a")
            assert await asyncio.to_thread(follower.asked.wait, WAIT_S)
            cluster.meta.tell(group("c", cluster.brokers["a"].port, epoch=2))
            return (await pending).sequence

        assert run(cluster.url, story) == 0


def test_a_consumer_takes_from_all_groups(cluster: Cluster, subject: str) -> None:
    fill(cluster, subject, 300)

    async def story(client: fairway.aio.Client) -> Counter[str]:
        found: Counter[str] = Counter()
        async with client.consumer(subject, "g") as consumer:
            async for message in consumer:
                found[message.broker_group] += 1
                message.ack()
                if found.total() == 600:
                    break
            assert await consumer.flush(WAIT_S)
            assert consumer.counts.settled == 600
        return found

    assert run(cluster.url, story) == {"a": 300, "b": 300}


def test_a_group_that_a_subject_gains_is_joined(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))

    async def story(client: fairway.aio.Client) -> str:
        async with client.consumer(subject, "g") as consumer:
            assert await consumer.poll(0.05) is None
            fill(cluster, subject, 1)
            names = set()
            for _ in range(2):
                message = await consumer.poll(WAIT_S)
                assert message is not None
                names.add(message.broker_group)
                message.ack()
            consumer.pause()
            assert not consumer.rest()
            consumer.resume()
            return "".join(sorted(names))

    assert run(cluster.url, story) == "ab"


def test_questions_are_asked_of_all(cluster: Cluster, subject: str) -> None:
    fill(cluster, subject, 5)

    async def story(client: fairway.aio.Client) -> None:
        async with client.consumer(subject, "g") as consumer:
            for _ in range(10):
                message = await consumer.poll(WAIT_S)
                assert message is not None
                message.ack()
        [state] = (await client.describe(subject)).subjects
        assert (state.committed_end, state.groups[0].lag) == (10, 0)
        assert (await client.seek(subject, "g", "earliest")).was == 10
        assert len([payload async for page in client.scan(subject) for payload in page.batch.payloads]) == 10
        with pytest.raises(Misuse, match="a place in one broker group"):
            await client.seek(subject, "g", 3)
        with pytest.raises(fairway.Refused, match="no delay server"):
            await client.delayed.count()
        with pytest.raises(fairway.Refused, match="no delay server"):
            await anext(client.delayed.list())

    run(cluster.url, story)


def test_no_meta_server_is_unreachable() -> None:
    async def story(client: fairway.aio.Client) -> None:
        raise AssertionError("it must not come so far")

    with pytest.raises(fairway.Unreachable, match="no meta server at meta://"):
        run(f"meta://127.0.0.1:{free_port()}", story)


def test_async_handlers_of_an_app_listen_to_all_groups(cluster: Cluster, subject: str) -> None:
    fill(cluster, subject, 5)
    app = fairway.App(cluster.url)
    seen: set[tuple[str, int]] = set()

    @app.listener(subject, group="g", concurrency=2)
    async def on_message(message: fairway.Message) -> None:
        seen.add((message.broker_group, message.sequence))
        if len(seen) == 10:
            signal.raise_signal(signal.SIGTERM)

    app.run()
    assert len(seen) == 10
