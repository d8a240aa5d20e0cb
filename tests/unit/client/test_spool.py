"""The spool through the public clients: when it is used, what it promises, what it does when it is full or damaged."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairway
import fairway.aio
from fairway.client.spool.journal import Journal
from fairway.client.spool.spool import SpoolOptions, SpoolThread
from fairway.client.spool.spool_directory import survey
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng
from fairway.runtime.shared_directory import SharedDirectory
from tests.support.ports import free_port
from tests.unit.client.broker import WAIT_S, Running, run_program

BRISK = fairway.ReconnectOptions(backoff_first_ms=10, backoff_most_ms=50)


@pytest.fixture
def absent(tmp_path: Path) -> Iterator[Running]:
    """One that is not there yet."""
    broker = Running(tmp_path / "data")
    broker.port = free_port()
    broker.url = f"fairway://127.0.0.1:{broker.port}"
    try:
        yield broker
    finally:
        broker.kill()


def options(
    spool: Path, *, when_full: str = "block", buffer: int = 1_000_000, **settings: int
) -> fairway.ClientOptions:
    chosen = {"after_ms": 50, "adopt_ms": 50, **settings}
    return fairway.ClientOptions(
        producer=fairway.ProducerOptions(when_full=when_full, buffer_messages_max=buffer),  # type: ignore[arg-type]
        line=BRISK,
        spool=fairway.SpoolOptions(str(spool), **chosen),  # type: ignore[arg-type]
    )


def payloads(client: fairway.Client, subject: str) -> list[bytes]:
    return [bytes(each) for page in client.scan(subject) for each in page.batch.payloads]


def left_in(spool: Path) -> list[str]:
    return sorted(each.name for each in spool.iterdir())


# --- absence ----------------------------------------------------------------------------------------------------------


def test_without_a_broker_messages_wait_on_disk_and_go_out_in_order(absent: Running, tmp_path: Path) -> None:
    with fairway.connect(absent.url, options=options(tmp_path / "spool")) as client:
        receipts = [client.send("orders", b"%d" % number).result(WAIT_S) for number in range(3)]
        assert all(isinstance(receipt, fairway.SpoolReceipt) for receipt in receipts)
        assert client.spool is not None
        assert client.spool.is_in_use
        assert client.spool.messages == 3
        absent.start()
        assert client.wait_drained(WAIT_S)
        last = client.send("orders", b"3").result(WAIT_S)
        assert type(last) is fairway.Receipt
        assert payloads(client, "orders") == [b"0", b"1", b"2", b"3"]
        with client.consumer("orders", group="hotel") as consumer:
            first = [message.id for message in consumer.take(3, WAIT_S)]
            assert first == [receipt.message_id for receipt in receipts]
    assert left_in(tmp_path / "spool") == ["lock"]


def test_a_receipt_from_the_spool_has_no_sequence_and_says_so(absent: Running, tmp_path: Path) -> None:
    with fairway.connect(absent.url, options=options(tmp_path / "spool")) as client:
        receipt = client.send("orders", b"a").result(WAIT_S)
        with pytest.raises(fairway.Misuse, match=r"in the spool .*not yet at the broker.*no sequence.*SpoolReceipt"):
            _ = receipt.sequence
        [batch] = client.send_many("orders", [b"b", b"c"]).result(WAIT_S)
        assert isinstance(batch, fairway.SpoolBatchReceipt)
        with pytest.raises(fairway.Misuse, match="no sequence"):
            _ = batch.first_sequence


def test_the_same_on_a_loop(absent: Running, tmp_path: Path) -> None:
    async def main() -> None:
        async with fairway.aio.connect(absent.url, options=options(tmp_path / "spool")) as client:
            receipts = await asyncio.gather(*(client.send("orders", b"%d" % number) for number in range(50)))
            assert all(isinstance(receipt, fairway.SpoolReceipt) for receipt in receipts)
            absent.start()
            assert await client.wait_drained(WAIT_S)
            assert type(await client.send("orders", b"50")) is fairway.Receipt
            found = [bytes(each) async for page in client.scan("orders") for each in page.batch.payloads]
            assert found == [b"%d" % number for number in range(51)]

    asyncio.run(main())


def test_delayed_messages_are_spooled_too(absent: Running, tmp_path: Path) -> None:
    with fairway.connect(absent.url, options=options(tmp_path / "spool")) as client:
        assert isinstance(client.send("orders", b"later", after=3_600).result(WAIT_S), fairway.SpoolReceipt)


def test_with_a_delay_server_elsewhere_delayed_messages_are_not_spooled(
    broker: Running, subject: str, tmp_path: Path
) -> None:
    url = f"{broker.url}?delay=127.0.0.1:{free_port()}"
    with fairway.connect(url, options=options(tmp_path / "spool", after_ms=1)) as client:
        pending = client.send(subject, b"later", after=3_600)
        with pytest.raises(TimeoutError):
            pending.result(0.3)
        client.abandon()
        with pytest.raises(fairway.NotSent):
            pending.result(WAIT_S)


# --- time and count ---------------------------------------------------------------------------------------------------


def test_a_broker_that_does_not_answer_is_not_waited_for_and_nothing_is_stored_twice(
    broker: Running, subject: str, tmp_path: Path
) -> None:
    with fairway.connect(broker.url, options=options(tmp_path / "spool")) as client:
        first = client.send(subject, b"0").result(WAIT_S)
        assert type(first) is fairway.Receipt
        broker.suspend()
        try:
            receipts = [client.send(subject, b"%d" % number) for number in range(1, 40)]
            assert isinstance(receipts[0].result(WAIT_S), fairway.SpoolReceipt), "it was under way, and may be stored"
        finally:
            broker.go_on()
        assert client.wait_drained(WAIT_S)
        assert payloads(client, subject) == [b"%d" % number for number in range(40)]


def test_too_many_that_wait_go_to_the_spool(broker: Running, subject: str, tmp_path: Path) -> None:
    chosen = options(tmp_path / "spool", after_ms=3_600_000, buffer_messages=100)
    with fairway.connect(broker.url, options=chosen) as client:
        client.send(subject, b"first").result(WAIT_S)
        broker.suspend()
        try:
            pendings = [client.send(subject, b"%d" % number) for number in range(2_000)]
            assert isinstance(pendings[-1].result(WAIT_S), fairway.SpoolReceipt)
        finally:
            broker.go_on()
        assert client.wait_drained(WAIT_S)
        assert payloads(client, subject) == [b"first", *(b"%d" % number for number in range(2_000))]


# --- a full buffer ----------------------------------------------------------------------------------------------------


def small(when_full: str, block_ms: int = 60_000) -> fairway.ClientOptions:
    producer = fairway.ProducerOptions(buffer_messages_max=10, when_full=when_full, block_ms=block_ms)  # type: ignore[arg-type]
    return fairway.ClientOptions(producer=producer, line=BRISK)


@pytest.mark.parametrize("when_full", ["block", "raise"])
def test_a_full_buffer_raises_at_once_or_after_its_deadline(broker: Running, subject: str, when_full: str) -> None:
    with fairway.connect(broker.url, options=small(when_full, block_ms=30)) as client:
        broker.suspend()
        try:
            for number in range(10):
                client.send(subject, b"%d" % number)
            with pytest.raises(fairway.BufferFull, match=r"10 messages of 10 bytes.*buffer of 10 messages.*larger"):
                client.send(subject, b"one too many")
        finally:
            broker.go_on()


def test_a_full_buffer_blocks_until_there_is_room(broker: Running, subject: str) -> None:
    with fairway.connect(broker.url, options=small("block")) as client:
        pendings = [client.send(subject, b"%d" % number) for number in range(200)]
        assert [pending.result(WAIT_S).sequence for pending in pendings] == list(range(200))


@pytest.mark.parametrize("when_full", ["block", "raise"])
def test_the_same_choice_on_a_loop(broker: Running, subject: str, when_full: str) -> None:
    async def main() -> None:
        async with fairway.aio.connect(broker.url, options=small(when_full, block_ms=30)) as client:
            broker.suspend()
            try:
                waiting = [client.send_nowait(subject, b"%d" % number) for number in range(10)]
                with pytest.raises(fairway.BufferFull):
                    await client.send(subject, b"one too many")
            finally:
                broker.go_on()
            assert len([await each for each in waiting]) == 10

    asyncio.run(main())


def test_a_full_buffer_spools(broker: Running, subject: str, tmp_path: Path) -> None:
    chosen = options(tmp_path / "spool", when_full="spool", buffer=50, after_ms=3_600_000, buffer_messages=1_000_000)
    with fairway.connect(broker.url, options=chosen) as client:
        client.send(subject, b"first").result(WAIT_S)
        broker.suspend()
        try:
            pendings = [client.send(subject, b"%d" % number) for number in range(500)]
            assert isinstance(pendings[0].result(WAIT_S), fairway.SpoolReceipt)
        finally:
            broker.go_on()
        assert client.wait_drained(WAIT_S)
        client.flush(WAIT_S)
        assert payloads(client, subject) == [b"first", *(b"%d" % number for number in range(500))]


def test_to_spool_without_a_spool_is_refused(broker: Running) -> None:
    with pytest.raises(fairway.Misuse, match="needs a spool"):
        fairway.connect(broker.url, options=small("spool"))


def test_a_full_spool_fills_the_buffer_and_then_the_choice_holds(absent: Running, tmp_path: Path) -> None:
    chosen = options(tmp_path / "spool", when_full="raise", buffer=20, bytes_max=4_000)
    with fairway.connect(absent.url, options=chosen) as client:
        pendings = [client.send("orders", b"%d" % number) for number in range(5)]
        assert isinstance(pendings[0].result(WAIT_S), fairway.SpoolReceipt)
        big = [client.send("orders", bytes(1_000)) for _ in range(20)]  # no room for all of these, which wait
        with pytest.raises(fairway.BufferFull, match=r"the spool .* is full: \d+ messages of .*bytes of 4000"):
            deque(client.send("orders", b"x") for _ in range(20))
        assert not big[-1].done()
        absent.start()
        client.flush(WAIT_S)
        assert client.wait_drained(WAIT_S)
        stored = payloads(client, "orders")
        assert stored[:5] == [b"0", b"1", b"2", b"3", b"4"]
        assert stored.count(bytes(1_000)) == 20


# --- lives ------------------------------------------------------------------------------------------------------------

DIES = """
import os, sys, fairway
client = fairway.connect(sys.argv[1], spool=fairway.SpoolOptions(sys.argv[2], after_ms=10))
receipts = [client.send(sys.argv[3], b"%d" % number) for number in range(100)]
assert isinstance(receipts[-1].result(30), fairway.SpoolReceipt)
os._exit(9)
"""


def test_the_next_process_sends_what_a_dead_one_left_before_its_own(absent: Running, tmp_path: Path) -> None:
    assert run_program(DIES, absent.url, str(tmp_path / "spool"), "orders").returncode == 9
    absent.start()
    with fairway.connect(absent.url, options=options(tmp_path / "spool")) as client:
        client.send("orders", b"mine").result(WAIT_S)
        assert client.wait_drained(WAIT_S)
        assert payloads(client, "orders") == [*(b"%d" % number for number in range(100)), b"mine"]
    assert left_in(tmp_path / "spool") == ["lock"]


def test_a_living_process_takes_over_from_one_that_dies_later(broker: Running, subject: str, tmp_path: Path) -> None:
    nobody = f"fairway://127.0.0.1:{free_port()}"
    with fairway.connect(broker.url, options=options(tmp_path / "spool")) as client:
        client.send(subject, b"before").result(WAIT_S)
        assert run_program(DIES, nobody, str(tmp_path / "spool"), subject).returncode == 9
        with client.consumer(subject, group="hotel") as consumer:
            seen: list[bytes] = []
            while len(seen) < 101:
                messages = consumer.take(101, WAIT_S)
                assert messages
                seen += [message.payload for message in messages]
                consumer.ack(messages)
    assert seen == [b"before", *(b"%d" % number for number in range(100))]


def test_a_program_that_ends_without_closing_leaves_nothing_unsaid(absent: Running, tmp_path: Path) -> None:
    program = """
import sys, fairway
client = fairway.connect(sys.argv[1], spool=fairway.SpoolOptions(sys.argv[2], after_ms=10))
client.send("orders", b"a")
"""
    done = run_program(program, absent.url, str(tmp_path / "spool"))
    assert done.returncode == 0, done.stderr
    assert survey(str(tmp_path / "spool"), RealClock()).messages == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_journal_of_its_own(absent: Running, tmp_path: Path) -> None:
    program = """
import os, sys, fairway
client = fairway.connect(sys.argv[1], spool=fairway.SpoolOptions(sys.argv[2], after_ms=10))
client.send("orders", b"parent").result(30)
child = os.fork()
if child == 0:
    client.send("orders", b"child").result(30)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
client.send("orders", b"parent").result(30)
os._exit(0)
"""
    done = run_program(program, absent.url, str(tmp_path / "spool"))
    assert done.returncode == 0, done.stderr
    assert survey(str(tmp_path / "spool"), RealClock()).messages == 3
    absent.start()
    with fairway.connect(absent.url, options=options(tmp_path / "spool")) as client:
        assert client.wait_drained(WAIT_S)
        assert sorted(payloads(client, "orders")) == [b"child", b"parent", b"parent"]


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_used_is_named_at_once(broker: Running, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(fairway.FairwayError, match=r"file/spool"):
        fairway.connect(broker.url, spool=str(tmp_path / "file" / "spool"))


@pytest.mark.parametrize(
    ("spool", "sentence"),
    [("", "needs a directory"), (7, "name of a directory")],
)
def test_a_bad_spool_is_refused(broker: Running, spool: object, sentence: str) -> None:
    with pytest.raises(fairway.Misuse, match=sentence):
        fairway.connect(broker.url, spool=spool)  # type: ignore[arg-type]


def test_without_a_spool_there_is_none(client: fairway.Client) -> None:
    assert client.spool is None
    assert client.wait_drained(0)


def test_a_journal_that_ends_while_its_client_closes_is_removed_once(tmp_path: Path) -> None:
    """Its last note completes on the disk's thread: then it is among the finished, and was among the client's."""
    clock, shared_directory = RealClock(), SharedDirectory(tmp_path / "spool")
    number, disk = shared_directory.make(RealRng())
    journal = Journal(disk, number, clock)
    keeper = SpoolThread(SpoolOptions(str(tmp_path / "spool")), shared_directory, clock, lambda *_: None)
    journals = [journal]

    def asked() -> list[Journal]:
        keeper.finished(journal)
        return journals

    keeper.stop(asked)
    assert shared_directory.names() == []
