"""The client without a loop when things go wrong: nobody there, a broker that goes and comes, a full buffer, a fork."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairway
from fairway.client.core import ClientOptions
from tests.support.ports import free_port
from tests.unit.client.broker import WAIT_S, Running, run_program, running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Running]:
    """A broker for one test, which may do with it what it likes."""
    with running(tmp_path / "data") as started:
        yield started


@contextlib.contextmanager
def answering(said: bytes) -> Iterator[int]:
    """Somebody who accepts, says this, and listens to nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.sendall(said)

        connections: list[socket.socket] = []
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        for connection in connections:
            connection.close()


# --- nobody there -----------------------------------------------------------------------------------------------------


def test_a_wrong_port_is_unreachable_and_the_remedy_is_named() -> None:
    with pytest.raises(fairway.Unreachable, match=r"no broker at fairway://127\.0\.0\.1:\d+: .*refused.*Is it running"):
        fairway.connect(f"fairway://127.0.0.1:{free_port()}")


def test_the_first_address_that_answers_is_taken(broker: Running, subject: str) -> None:
    with fairway.connect(f"fairway://127.0.0.1:{free_port()},127.0.0.1:{broker.port}") as client:
        assert client.send(subject, b"a").result(WAIT_S).sequence == 0


def test_a_host_that_does_not_exist_is_unreachable() -> None:
    with pytest.raises(fairway.Unreachable, match=r"no-such-host\.invalid"):
        fairway.connect("fairway://no-such-host.invalid:20880")


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, bytes(64), b"\xff" * 1_000])
def test_a_server_that_speaks_something_else_is_named(said: bytes) -> None:
    with answering(said) as port, pytest.raises(fairway.Unreachable, match="no broker at"):
        fairway.connect(f"fairway://127.0.0.1:{port}")


def test_patience_waits_for_a_broker_that_starts_late(tmp_path: Path) -> None:
    broker = Running(tmp_path / "data")
    broker.port = free_port()
    starting = threading.Timer(0.3, broker.start)
    starting.start()
    try:
        with fairway.connect(f"fairway://127.0.0.1:{broker.port}", patience=WAIT_S) as client:
            assert client.send("orders", b"a").result(WAIT_S).sequence == 0
    finally:
        starting.join()
        broker.kill()


# --- a broker that goes and comes back --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_in_the_middle_loses_and_repeats_nothing(own: Running, is_killed: bool) -> None:
    with fairway.connect(own.url) as client, client.consumer("orders", group="hotel") as consumer:
        pendings: list[fairway.Pending] = []
        for change in (None, own.kill if is_killed else own.stop, own.start):
            pendings += [client.send("orders", b"%d" % (len(pendings) + number)) for number in range(1_000)]
            if change is not None:
                change()
        receipts = [pending.result(WAIT_S) for pending in pendings]
        assert [receipt.sequence for receipt in receipts] == list(range(3_000))
        seen: set[bytes] = set()
        while len(seen) < 3_000:
            messages = consumer.take(1_000, WAIT_S)
            assert messages
            seen.update(message.payload for message in messages)
            consumer.ack(messages)
        assert consumer.flush(WAIT_S)
    with fairway.connect(own.url) as client, client.consumer("orders", group="hotel") as consumer:
        assert consumer.poll(0.2) is None
        assert _stored(client, "orders") == 3_000


def _stored(client: fairway.Client, subject: str) -> int:
    return sum(len(page.batch) for page in client.scan(subject))


def test_a_consumer_takes_again_after_the_broker_returns(own: Running) -> None:
    with fairway.connect(own.url) as client, client.consumer("orders", group="hotel") as consumer:
        client.send("orders", b"before").result(WAIT_S)
        first = consumer.poll(WAIT_S)
        assert first is not None
        own.kill()
        assert consumer.poll(0.3) is None
        first.ack()  # while nobody is there: it is said as soon as there is
        own.start()
        client.send("orders", b"after").result(WAIT_S)
        second = consumer.poll(WAIT_S)
        assert second is not None
        assert second.payload == b"after"
        second.ack()
        assert consumer.flush(WAIT_S)
        state = client.describe("orders", "hotel").subjects[0].groups[0]
        assert (state.in_flight, state.retrying, state.lag) == (0, 0, 0)


def test_a_question_waits_for_the_broker_and_gives_up_in_time(own: Running) -> None:
    with fairway.connect(own.url) as client:
        own.kill()
        with pytest.raises(TimeoutError, match="no answer to Describe"):
            client._answer(fairway.client.commands.describe(), timeout=0.3)
        own.start()
        assert client.describe().broker.is_master


# --- full -------------------------------------------------------------------------------------------------------------


SMALL = ClientOptions(producer=fairway.ProducerOptions(buffer_messages_max=100, batch_messages_max=10))


def test_a_full_buffer_raises_waits_and_gives_up(own: Running) -> None:
    with fairway.connect(own.url, options=SMALL) as client:
        own.suspend()
        pendings = [client.send_nowait("orders", b"%d" % number) for number in range(100)]
        with pytest.raises(fairway.BufferFull):
            client.send_nowait("orders", b"one too many")
        with pytest.raises(fairway.BufferFull):
            client.send("orders", b"one too many", timeout=0.1)
        with pytest.raises(fairway.BufferFull):
            client.send_many("orders", [b"one too many"], timeout=0.1)
        resumed = threading.Timer(0.3, own.go_on)
        resumed.start()
        pendings.append(client.send("orders", b"waits", timeout=WAIT_S))
        assert [pending.result(WAIT_S).sequence for pending in pendings] == list(range(101))
        resumed.join()


def test_more_than_the_buffer_holds_goes_through_it(broker: Running, subject: str) -> None:
    with fairway.connect(broker.url, options=SMALL) as client:
        pendings = [client.send(subject, b"%d" % number, timeout=WAIT_S) for number in range(5_000)]
        client.flush(WAIT_S)
        assert [pending.result().sequence for pending in pendings] == list(range(5_000))
        client.send_many(subject, [b"x"] * 50_000, timeout=WAIT_S).result(WAIT_S)


def test_a_broker_that_stops_reading_stops_nobody_from_reading(own: Running) -> None:
    """More than the sockets hold is written and not read, and the answers still come when it goes on."""
    options = ClientOptions(producer=fairway.ProducerOptions(buffer_bytes_max=1 << 28))
    with fairway.connect(own.url, options=options) as client:
        own.suspend()
        pendings = [client.send_many("orders", [bytes(100_000)] * 100) for _ in range(10)]
        own.go_on()
        assert sum(receipt.count for each in pendings for receipt in each.result(WAIT_S)) == 1_000


# --- failures ---------------------------------------------------------------------------------------------------------


def test_what_nobody_looked_at_is_raised_at_the_end(own: Running) -> None:
    client = fairway.connect(own.url)
    client.send("orders", b"a").result(WAIT_S)
    own.kill()
    seen, unseen = client.send("seen", b"b"), client.send("unseen", b"c")
    with pytest.raises(TimeoutError, match="may still come"):
        seen.result(0.1)
    with pytest.raises(ExceptionGroup, match="nobody looked") as raised:
        client.close(0.2)
    assert all(isinstance(error, fairway.NotSent | fairway.OutcomeUnknown) for error in raised.value.exceptions)
    assert isinstance(unseen.exception(0), fairway.NotSent | fairway.OutcomeUnknown)


HASTY = ClientOptions(producer=fairway.ProducerOptions(delivery_timeout_ms=200))


def test_a_failure_that_was_seen_is_not_raised_again(broker: Running, client: fairway.Client, subject: str) -> None:
    client.send(subject, b"a").result(WAIT_S)
    client.read_only(subject, True)
    with fairway.connect(broker.url, options=HASTY) as other:
        error = other.send(subject, b"b").exception(WAIT_S)
        assert isinstance(error, fairway.NotSent)
    other = fairway.connect(broker.url, options=HASTY)
    other.send(subject, b"b")
    with pytest.raises(ExceptionGroup, match="nobody looked"):
        other.flush(WAIT_S)
    other.send(subject, b"c")
    with pytest.raises(ExceptionGroup, match="nobody looked"):
        other.close(WAIT_S)
    client.read_only(subject, False)


def test_an_error_in_the_with_block_is_what_is_raised(own: Running) -> None:
    def fail() -> None:
        with fairway.connect(own.url) as client:
            own.kill()
            client.send("orders", b"a")
            client._producing.give_up("for the test")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail()
    assert any("was not stored" in note for note in raised.value.__notes__)


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_wait_leaves_the_client_usable(client: fairway.Client, subject: str) -> None:
    with client.consumer(subject, group="hotel") as consumer:
        for wait in (consumer.poll, lambda: client._link.wait(lambda: False)):
            interrupting = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            interrupting.join()
        client.send(subject, b"a").result(WAIT_S)
        message = consumer.poll(WAIT_S)
        assert message is not None
        message.ack()


# --- other processes --------------------------------------------------------------------------------------------------

FORKING = """
import os, sys, fairway
client = fairway.connect(sys.argv[1])
consumer = client.consumer("forked", group="hotel")
pending = client.send("forked", b"parent")
pid = os.fork()
for number in range(100):
    last = client.send("forked", b"child" if pid == 0 else b"parent")
last.result(30)
if pid == 0:
    try:
        consumer.poll(0)
    except fairway.Misuse as error:
        assert "forked" in str(error), error
    else:
        raise AssertionError("the parent's consumer works in the child")
    client.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
pending.result(30)
seen = [message.payload for message in consumer.take(1000, 30)]
while len(seen) < 201:
    seen += [message.payload for message in consumer.take(1000, 30)]
assert (seen.count(b"child"), seen.count(b"parent")) == (100, 101), len(seen)
streams = {page.batch.header.producer_id for page in client.scan("forked")}
assert len(streams) == 2, streams
client.close()
print("fine")
"""


def test_a_forked_child_has_a_connection_and_a_stream_of_its_own(broker: Running) -> None:
    done = run_program(FORKING, broker.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_what_is_buffered_when_a_program_ends_is_stored(broker: Running, client: fairway.Client, subject: str) -> None:
    source = (
        "import sys, fairway; c = fairway.connect(sys.argv[1]); c.consumer(sys.argv[2], 'g')\n"
        "for n in range(2000): c.send(sys.argv[2], b'%d' % n)"
    )
    done = run_program(source, broker.url, subject)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert _stored(client, subject) == 2_000


POOLED = """
import sys, multiprocessing, fairway
client = fairway.connect(sys.argv[1])
def work(number):
    for _ in range(100):
        client.send(sys.argv[2], b"%d" % number)
context = multiprocessing.get_context("fork")
workers = [context.Process(target=work, args=[number]) for number in range(3)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert [worker.exitcode for worker in workers] == [0, 0, 0]
"""


def test_a_worker_of_multiprocessing_stores_what_it_sent(broker: Running, client: fairway.Client, subject: str) -> None:
    done = run_program(POOLED, broker.url, subject)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert _stored(client, subject) == 300


def test_what_cannot_be_stored_when_a_program_ends_is_told_loudly() -> None:
    with answering(b"") as port:
        source = (
            "import sys, fairway, fairway.client.sync.client as sync\n"
            "sync.EXIT_S = 0.2\n"
            f"c = sync.Client('fairway://127.0.0.1:{port}')\n"
            "c.send('orders', b'a')"
        )
        began = time.monotonic()
        done = run_program(source)
    assert "NotSent" in done.stderr
    assert "nobody looked" in done.stderr
    assert time.monotonic() - began < 60
