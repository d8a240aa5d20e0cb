"""Delayed messages against real processes: `fairway up`, and a delay server that is elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import fairway
import fairway.aio
from fairway import limits
from fairway.client.core import ClientOptions
from fairway.runtime.process import Child
from tests.support.ports import free_port
from tests.unit.cli.running import up
from tests.unit.client.broker import READY_S, WAIT_S, Running, run_program

HASTY = ClientOptions(
    producer=fairway.ProducerOptions(delivery_timeout_ms=1_000), line=fairway.ReconnectOptions(backoff_most_ms=100)
)


class DelayServer:
    """`fairway delay serve` for a broker, that tests may kill and start again."""

    def __init__(self, data: Path, broker: Running) -> None:
        self._data = data
        self._broker = broker
        self.port = free_port()
        self.url = f"{broker.url}?delay=127.0.0.1:{self.port}"
        self._child: Child | None = None

    def start(self) -> None:
        flags = ("--data", str(self._data), "--port", str(self.port), "--broker", f"127.0.0.1:{self._broker.port}")
        self._child = Child("fairway", "delay", "serve", *flags)
        assert re.search(r"ready at", self._child.line(timeout_s=READY_S) or "")

    def kill(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `fairway up`."""
    with up(tmp_path_factory.mktemp("together") / "data", "--low-water-mib", "64") as (_, url):
        yield url


@pytest.fixture
def elsewhere(tmp_path: Path, broker: Running) -> Iterator[DelayServer]:
    server = DelayServer(tmp_path / "delay", broker)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def received(client: fairway.Client, subject: str) -> fairway.Message:
    with client.consumer(subject, group="hotel") as consumer:
        message = consumer.poll(WAIT_S)
        assert message is not None
        message.ack()
        return message


def stored(client: fairway.Client, subject: str) -> int:
    return sum(len(page.batch) for page in client.scan(subject))


# --- one process ------------------------------------------------------------------------------------------------------


def test_it_is_delivered_later_and_never_early(together: str, subject: str) -> None:
    with fairway.connect(together) as client:
        due_at = datetime.now(UTC) + timedelta(seconds=1)
        receipt = client.send(subject, b"pay", key="o-42", tags=("paid",), headers={"a": "b"}, at=due_at).result(WAIT_S)
        message = received(client, subject)
        assert message.appended_at >= due_at - timedelta(milliseconds=1)
        assert (message.id, message.key, message.tags) == (receipt.message_id, "o-42", ("paid",))
        assert (message.payload, message.headers) == (b"pay", {"a": "b"})


def test_the_largest_message_that_the_page_allows_is_delivered(together: str, subject: str) -> None:
    payload = bytes(range(256)) * (limits.DELAY_MESSAGE_BYTES_MAX // 256)
    with fairway.connect(together) as fw:
        fw.send(subject, payload, after=0.1).result(WAIT_S)
        with pytest.raises(fairway.Refused, match=r"a delayed message, and all of one batch .* has 66,060,288 bytes"):
            fw.send(subject, payload + bytes(4 * limits.KIB), after=0.1).result(WAIT_S)
        with fw.consumer(subject, group="g", prefetch_bytes=2 * len(payload)) as consumer:
            message = consumer.poll(WAIT_S)
            assert message is not None
            assert message.payload == payload
            message.ack()


def test_one_changes_ones_mind(together: str, subject: str) -> None:
    with fairway.connect(together) as client:
        receipt = client.send(subject, b"pay", key="o-42", after=timedelta(days=3)).result(WAIT_S)
        client.send_many(subject, [b"1", b"2"], keys=["o-43", "o-43"], after=[timedelta(days=4), 90]).result(WAIT_S)
        assert client.delayed.count(subject) == 3
        assert [each.key for each in client.delayed.list(subject)] == ["o-43", "o-42", "o-43"]
        assert client.delayed.cancel(receipt.id) == fairway.DelayedOutcome("cancelled", 1)
        assert client.delayed.reschedule(subject=subject, key="o-43", after=0.1) == fairway.DelayedOutcome(
            "rescheduled", 2
        )
        with client.consumer(subject, group="hotel") as consumer:
            assert {message.payload for message in (consumer.poll(120), consumer.poll(120)) if message} == {b"1", b"2"}
        assert client.delayed.cancel(receipt.id).fate == "cancelled"
        assert client.delayed.cancel(subject=subject, key="o-43").fate == "already_dispatched"


def test_on_a_loop_it_is_the_same(together: str, subject: str) -> None:
    async def story() -> None:
        async with fairway.aio.connect(together) as client:
            receipt = await client.send(subject, b"pay", after=timedelta(days=3))
            many = await client.send_many(subject, [b"1"] * 3_000, after=timedelta(days=3))
            assert sum(each.count for each in many) == 3_000
            assert await client.delayed.count(subject) == 3_001
            assert (await client.delayed.cancel(receipt.id)).fate == "cancelled"
            assert len([each async for each in client.delayed.list(subject)]) == 3_000
            await client.send(subject, b"soon", after=0.05)
            async with client.consumer(subject, group="hotel") as consumer:
                message = await consumer.poll(WAIT_S)
                assert message is not None
                assert message.payload == b"soon"

    asyncio.run(story())


# --- a broker alone ---------------------------------------------------------------------------------------------------


def test_a_broker_alone_refuses_them_and_says_what_to_do(client: fairway.Client, subject: str) -> None:
    delayed = client.send(subject, b"later", after=60)
    assert client.send(subject, b"now").result(WAIT_S).sequence == 0
    with pytest.raises(fairway.Refused) as refused:
        client.delayed.count()
    for error in (delayed.exception(WAIT_S), refused.value):
        assert isinstance(error, fairway.Refused)
        assert "fairway://HOST:PORT?delay=HOST:PORT" in error.sentence


# --- a delay server elsewhere -----------------------------------------------------------------------------------------


def test_delayed_messages_go_to_the_delay_server_and_from_there_to_the_broker(
    elsewhere: DelayServer, client: fairway.Client, subject: str
) -> None:
    with fairway.connect(elsewhere.url) as far:
        receipt = far.send(subject, b"pay", after=0.2).result(WAIT_S)
        assert far.send(subject, b"now").result(WAIT_S).sequence >= 0
        with client.consumer(subject, group="hotel") as consumer:
            messages = [consumer.poll(WAIT_S), consumer.poll(WAIT_S)]
        assert {message.payload for message in messages if message} == {b"pay", b"now"}
        assert receipt.message_id in [message.id for message in messages if message]
        cancelled = far.send(subject, b"never", after=3_600).result(WAIT_S)
        assert far.delayed.count(subject) == 1
        assert far.delayed.cancel(cancelled.id).fate == "cancelled"


def test_closing_waits_for_both(elsewhere: DelayServer, client: fairway.Client, subject: str) -> None:
    with fairway.connect(elsewhere.url) as far:
        for _ in range(1_000):
            far.send(subject, b"now")
            far.send(subject, b"later", after=3_600)
    assert stored(client, subject) == 1_000
    with fairway.connect(elsewhere.url) as far:
        far.send(subject, b"later", after=3_600)
        far.flush(WAIT_S)
        assert far.delayed.count(subject) == 1_001


def test_on_a_loop_closing_waits_for_both(elsewhere: DelayServer, client: fairway.Client, subject: str) -> None:
    async def story() -> int:
        async with fairway.aio.connect(elsewhere.url) as far:
            sent = [far.send_nowait(subject, b"now") for _ in range(1_000)]
            sent += [far.send_nowait(subject, b"later", after=3_600) for _ in range(1_000)]
            del sent  # `close` waits for them
        async with fairway.aio.connect(elsewhere.url) as far:
            await far.send(subject, b"later", after=3_600)
            await far.flush()
            return await far.delayed.count(subject)

    assert asyncio.run(story()) == 1_001
    assert stored(client, subject) == 1_000


def test_what_is_buffered_when_a_program_ends_is_scheduled(elsewhere: DelayServer, subject: str) -> None:
    source = (
        "import sys, fairway; c = fairway.connect(sys.argv[1])\n"
        "for n in range(2000): c.send(sys.argv[2], b'%d' % n, after=3600)"
    )
    done = run_program(source, elsewhere.url, subject)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with fairway.connect(elsewhere.url) as far:
        assert far.delayed.count(subject) == 2_000


FORKING = """
import os, sys, fairway
client = fairway.connect(sys.argv[1])
receipt = client.send(sys.argv[2], b"parent", after=3600).result(30)
pid = os.fork()
for number in range(100):
    last = client.send(sys.argv[2], b"either", after=3600)
born = last.result(30).message_id.producer_id
if pid == 0:
    assert born != receipt.message_id.producer_id
    client.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert born == receipt.message_id.producer_id
assert client.delayed.count(sys.argv[2]) == 201
client.close()
print("fine")
"""


def test_a_forked_child_has_lines_and_streams_of_its_own(elsewhere: DelayServer, subject: str) -> None:
    done = run_program(FORKING, elsewhere.url, subject)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_delay_server_that_comes_back_gets_what_waited_for_it(elsewhere: DelayServer, subject: str) -> None:
    with fairway.connect(elsewhere.url, patience=WAIT_S) as far:
        first = far.send(subject, b"1", after=3_600).result(WAIT_S)
        elsewhere.kill()
        pending = [far.send(subject, b"2", after=3_600) for _ in range(100)]
        assert far.send(subject, b"now").result(WAIT_S).sequence == 0  # the broker is another matter
        elsewhere.start()
        assert {each.result(WAIT_S).is_duplicate for each in pending} == {False}
        assert far.delayed.count(subject) == 101
        assert far.delayed.cancel(first.id).fate == "cancelled"


def test_a_delay_server_that_is_away_is_told_apart_from_the_broker(broker: Running, subject: str) -> None:
    url = f"{broker.url}?delay=127.0.0.1:{free_port()}"
    with fairway.connect(url, options=HASTY) as far:
        with pytest.raises(
            fairway.Unreachable,
            match=r"no delay server at .*fairway delay serve --data delay --broker HOST:PORT --port",
        ):
            far.delayed.count()
        delayed = far.send(subject, b"later", after=60)
        assert far.send(subject, b"now").result(WAIT_S).sequence == 0
        assert isinstance(delayed.exception(WAIT_S), fairway.NotSent)
        far.send(subject, b"later", after=60)
        with pytest.raises(ExceptionGroup) as group:
            far.flush()
        assert group.group_contains(fairway.NotSent)


def test_on_a_loop_a_delay_server_that_is_away_is_told_apart(broker: Running, subject: str) -> None:
    async def story() -> None:
        async with fairway.aio.connect(f"{broker.url}?delay=127.0.0.1:{free_port()}", options=HASTY) as far:
            with pytest.raises(fairway.Unreachable, match="no delay server"):
                await far.delayed.cancel(subject=subject, key="o-42")
            assert (await far.send(subject, b"now")).sequence == 0
            with pytest.raises(fairway.NotSent):
                await far.send(subject, b"later", after=60)

    asyncio.run(story())
