"""One connection, and what many of them hold: bounded both ways, on virtual time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from fairway.broker.server import BrokerOptions
from fairway.errors import Code, Misuse, Refused, Unreachable
from fairway.limits import FRAME_BYTES_MAX, KIB, MIB
from fairway.protocol import ConnectionOptions, ControlMessage, RequestReceived, Why, codec
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Scan, Scanned
from fairway.runtime.buffers import LazyBuffer
from fairway.scheduling import SchedulerOptions
from fairway.serving.read_limits import ReadThrottle
from fairway.serving.session import ServerSession
from fairway.simulation.disk import SimDisk
from tests.support.client import ConnectionEnded, Stream
from tests.support.raw import PING, Raw, beginning_of_a_frame
from tests.unit.broker.scene import BROKER, PORT, Scene, options_of, staged, staged_with

SMALL_FRAMES = ConnectionOptions(frame_bytes_max=MIB)
TIGHT = options_of(
    connection=SMALL_FRAMES, partial_bytes_max=2 * MIB, unsent_bytes_max=2 * MIB, waiting_bytes_max=2 * MIB
)


ALONE = 3  # references to a piece that only the test has: its list, the loop's variable, the count's argument


async def raw(scene: Scene, name: str = "rude", *, greet: bool = True) -> Raw:
    return await Raw.connect(scene.sim.net.host(name), BROKER, PORT, greet=greet)


def large_disk(scene: Scene) -> None:
    scene.disk = SimDisk(scene.sim.rng.child("large"), scene.sim.loop.call_later)


@staged_with(TIGHT)
async def test_halves_of_frames_have_a_budget_and_the_oldest_is_told_to_come_back(scene: Scene) -> None:
    half = beginning_of_a_frame(MIB, MIB - 8)
    rude = [await raw(scene, f"rude-{number}") for number in range(6)]
    for each in rude:
        each.send(half)
        await asyncio.sleep(1)
        assert scene.broker.session_manager.incoming.taken_bytes <= 2 * MIB
    assert [each.is_lost for each in rude] == [True, True, True, True, False, False]
    closed = rude[0].connection.closed
    assert closed is not None
    assert (closed.why, closed.code, closed.retry_after_ms) == (Why.ACCUSED, Code.BUSY, 1_000)
    assert "only a part has come" in closed.sentence
    await scene.send(b"healthy")
    for each in rude:
        each.abort()
    await asyncio.sleep(1)
    assert scene.broker.session_manager.incoming.taken_bytes == 0


@staged
async def test_what_a_lost_client_leaves_behind_is_freed_a_little_in_each_turn_of_the_loop(scene: Scene) -> None:
    session_manager = scene.broker.session_manager
    pieces = [bytes(1_000) for _ in range(64)]
    session_manager.discard(list(pieces))
    left = [sum(sys.getrefcount(piece) > ALONE for piece in pieces)]
    while left[-1]:
        await asyncio.sleep(0)
        left.append(sum(sys.getrefcount(piece) > ALONE for piece in pieces))
    assert left[:3] == [64, 62, 60]


class _CountedBuffer(LazyBuffer):
    """One that knows how many parts of it were freed."""

    steps = 0

    def free_some(self) -> bool:
        self.steps += 1
        return super().free_some()


@staged
async def test_the_buffer_of_a_large_frame_is_freed_a_little_in_each_turn_of_the_loop(scene: Scene) -> None:
    session_manager = scene.broker.session_manager
    buffer = _CountedBuffer(8 * MIB)
    buffer[:] = b"x" * (8 * MIB)
    session_manager.discard_buffer(buffer)
    freed = [buffer.steps]
    while sys.getrefcount(buffer) > ALONE - 1:  # no loop's variable here
        await asyncio.sleep(0)
        freed.append(buffer.steps)
    assert freed[-1] == 9, "eight parts, and one look at what is left"
    assert max(later - earlier for earlier, later in pairwise(freed)) == 1
    assert not any(buffer)


@staged
async def test_turns_are_left_free_after_a_chunk_of_a_large_frame_and_after_no_other(scene: Scene) -> None:
    class Counted(ReadThrottle[ServerSession]):
        rests = 0

        def rest(self) -> None:
            self.rests += 1
            super().rest()

    session_manager, loop = scene.broker.session_manager, asyncio.get_running_loop()
    counted = session_manager.read_throttle = Counted(
        session_manager.clock, loop.call_soon, ServerSession.go_on, lambda each: each.account.end_ns
    )
    sessions: list[ServerSession] = []
    handle = session_manager.handle

    def note(session: ServerSession, received: RequestReceived) -> None:
        sessions.append(session)
        handle(session, received)

    session_manager.handle = note
    client = await raw(scene)
    client.ask(m.Produce("small"), (Stream(5).batch([b"first"]),))
    await asyncio.sleep(1)
    batch = Stream(6).batch([b"x" * 1_000])
    for _ in range(100):
        client.connection.request(m.Produce("small"), [batch])
    sessions[0].data_received(b"".join(client.connection.take()))  # in one chunk, as a large buffer of a socket has it
    await asyncio.sleep(1)
    assert (client.answered, counted.rests) == (101, 0)
    sessions[0].data_received(beginning_of_a_frame(MIB, 100 * KIB))
    assert counted.rests == 1
    await asyncio.sleep(1)
    client.abort()


@staged_with(TIGHT)
async def test_a_client_that_finishes_its_frames_is_not_the_oldest(scene: Scene) -> None:
    half = beginning_of_a_frame(MIB, MIB - 8)
    busy = await raw(scene, "busy")
    busy.send(PING[:16])
    await asyncio.sleep(1)
    for number in range(4):
        busy.send(PING[16:] + PING[:16])  # always in the middle of a frame, and never of the same
        await asyncio.sleep(1)
        (await raw(scene, f"rude-{number}")).send(half)
        await asyncio.sleep(1)
    assert not busy.is_lost
    assert scene.broker.session_manager.incoming.evictions == 2


@staged
async def test_one_byte_at_a_time_is_slow_but_no_offence(scene: Scene) -> None:
    slow = await raw(scene, "slow")
    for _ in range(3):
        for at in range(len(PING)):
            slow.send(PING[at : at + 1])
            await asyncio.sleep(1)
    await asyncio.sleep(1)
    assert not slow.is_lost
    assert slow.received > 3 * len(PING)


@staged
async def test_a_handshake_that_does_not_come_ends_the_connection(scene: Scene) -> None:
    silent = await raw(scene, "silent", greet=False)
    trickling = await raw(scene, "trickling", greet=False)
    for part in b"".join(bytes(each) for each in trickling.connection.take())[:12]:
        trickling.send(bytes([part]))
        await asyncio.sleep(1)
    assert silent.is_lost
    assert trickling.is_lost


@staged_with(TIGHT)
async def test_a_flood_of_pings_is_hung_up_on(scene: Scene) -> None:
    flood = await raw(scene, "flood")
    flood.send(PING * 2_048)
    await asyncio.wait_for(flood.lost, 10)
    assert flood.received < 200 * len(PING)


@staged
async def test_whoever_broke_the_rules_is_told_at_once_and_let_go_later(scene: Scene) -> None:
    rude = await raw(scene)
    rude.send(bytes(64))
    await asyncio.sleep(0.5)
    assert rude.connection.closed is not None
    assert rude.connection.closed.code is Code.PROTOCOL_ERROR
    assert (rude.is_lost, len(scene.broker.session_manager)) == (False, 1)
    await asyncio.sleep(1)
    assert (rude.is_lost, len(scene.broker.session_manager)) == (True, 0)


@staged
async def test_whoever_does_penance_does_not_hold_up_the_end(scene: Scene) -> None:
    rude = await raw(scene)
    rude.send(bytes(64))
    await asyncio.sleep(0.1)
    begun = scene.clock.monotonic_ns()
    await scene.restart()
    assert scene.clock.monotonic_ns() - begun < 500_000_000
    assert rude.is_lost


@staged
async def test_many_requests_at_once_are_all_answered_and_a_lone_one_does_not_wait_for_them(scene: Scene) -> None:
    await scene.send(b"a")
    many = await raw(scene, "many")
    for _ in range(1_000):
        many.connection.request(Describe(Depth.SUBJECTS))
    parts = many.connection.take()
    lone = await scene.connect()
    many.send(*parts)
    await lone.ask(Describe(Depth.SUBJECTS), Described)
    await asyncio.sleep(5)
    assert many.answered == 1_000
    assert not many.is_lost


@staged
async def test_whoever_is_refused_outright_rests_before_it_is_read_again(scene: Scene) -> None:
    """What is refused shares one account, over all connections: a good one is read meanwhile."""
    bad = [await raw(scene, f"bad {number}") for number in range(5)]
    good = await scene.connect()
    for one in bad:
        for _ in range(200):
            one.connection.request(m.Pull("nowhere", "group", "ann", 10, MIB, 0, 0))
        one.send(*one.connection.take())
    for _ in range(20):
        await good.ask(Describe(Depth.SUBJECTS), Described)
    await asyncio.sleep(10)
    assert [one.answered for one in bad] == [200] * 5


async def heartbeats_s(scene: Scene, one: Raw) -> float:
    """How long a hundred of them take that are sent at once."""
    begun_ns, answered = scene.clock.monotonic_ns(), one.answered
    for _ in range(100):
        one.connection.request(m.Heartbeat("orders", "group", "ann", 0))
    one.send(*one.connection.take())
    while one.answered < answered + 100:  # noqa: ASYNC110  a Raw does not say when
        await asyncio.sleep(0.0001)
    return (scene.clock.monotonic_ns() - begun_ns) / 1e9


@staged
async def test_whoever_acts_for_somebody_elses_consumer_rests_before_it_is_read_again(scene: Scene) -> None:
    """Strangers share one account: the second one rests for what the first has cost. The consumer does not rest."""
    await scene.send(b"x")
    own, first, second = [await raw(scene, name) for name in ("own", "first", "second")]
    own.ask(m.Join("orders", "group", "ann", 0, 0))
    await asyncio.sleep(1)
    own_s = await heartbeats_s(scene, own)
    assert not scene.broker.meters.refusals
    strangers_s = await asyncio.gather(*(heartbeats_s(scene, each) for each in (first, second, own)))
    assert scene.broker.meters.refusals == {Code.FENCED: 200}
    assert min(strangers_s[:2]) > own_s + 0.002
    assert max(strangers_s[:2]) > own_s + 0.01
    assert strangers_s[2] < own_s + 0.002


@staged
async def test_the_order_of_ones_own_requests_is_kept_however_many_come_at_once(scene: Scene) -> None:
    """Of one stream, so that one out of order would be refused."""
    producer = await raw(scene, "producer")
    stream = Stream(3)
    for count in (1, 3, 200, 2, 1, 90):
        for _ in range(count):
            producer.connection.request(m.Produce("orders"), [stream.batch([b"x"])])
        producer.send(*producer.connection.take())
        await asyncio.sleep(0.01)
    await asyncio.sleep(10)
    assert producer.answered == 297
    assert not scene.broker.meters.refusals
    assert scene.broker.produce.messages == 297


@staged
async def test_a_flood_of_what_is_refused_as_busy_is_heard_again_when_it_may_come_back(scene: Scene) -> None:
    """A thousand at once are more than an actor takes: some are refused, all are answered, none at once. They go to two
    subjects by turns: those in a row to one subject would be one request of its actor."""
    options = replace(
        scene.options,
        scheduler=SchedulerOptions(mailbox_requests_max=8),
        connection=ConnectionOptions(requests_max=2_000),
    )
    await scene.restart(options)
    scene.disk.stall(0.2)
    flood = await raw(scene, "flood")
    streams = {"orders": Stream(3), "refunds": Stream(4)}
    for _ in range(100):
        for subject, stream in streams.items():
            flood.connection.request(m.Produce(subject), [stream.batch([b"x"])])
    flood.send(*flood.connection.take())
    await asyncio.sleep(0.2)
    assert flood.answered < 200
    await asyncio.sleep(10)
    assert flood.answered == 200
    assert scene.broker.meters.refusals[Code.BUSY] > 0


@staged
async def test_who_does_not_read_large_answers_gets_no_more_of_them(scene: Scene) -> None:
    stream = Stream(1)
    for _ in range(2):
        await scene.send(bytes(900 * KIB), stream=stream)
    deaf = await raw(scene, "deaf")
    deaf.stop_reading()
    for _ in range(100):
        deaf.ask(Scan("orders", m.Whence.EARLIEST, 0, None, MIB))
    await asyncio.sleep(5)
    assert scene.broker.session_manager.outgoing.taken_bytes < 7 * MIB
    transport = deaf.transport
    assert transport is not None
    transport.resume_reading()
    await asyncio.sleep(5)
    assert deaf.answered == 100
    assert scene.broker.meters.refusals[Code.BUSY] > 80


@staged_with(TIGHT)
async def test_a_flood_of_requests_whose_answers_are_not_read_is_paused_then_dropped(scene: Scene) -> None:
    flood = await raw(scene, "flood")
    flood.stop_reading()
    flood.connection.requests_max = 1 << 30
    for _ in range(20_000):
        flood.ask(Describe(Depth.SUBJECTS))
    await asyncio.sleep(5)
    assert scene.broker.session_manager.outgoing.taken_bytes < MIB
    assert len(scene.broker.session_manager) == 1
    await asyncio.sleep(40)  # three heartbeats
    assert len(scene.broker.session_manager) == 0


@staged_with(options_of(connection=ConnectionOptions(requests_max=4)))
async def test_more_requests_than_may_be_in_flight_wait_in_the_socket(scene: Scene) -> None:
    worker = await scene.worker("ann")
    worker.client._connection.requests_max = 1_000
    polls = [asyncio.create_task(worker.pull(wait_s=2)) for _ in range(4)]
    await asyncio.sleep(0.1)
    late = [asyncio.create_task(worker.pull(wait_s=2)) for _ in range(4)]
    await asyncio.gather(*polls, *late)
    assert scene.broker.meters.pulls == 8
    assert not scene.broker.meters.refusals


@staged_with(options_of(connection=ConnectionOptions(heartbeat_ms=1_000)))
async def test_a_slow_reader_that_moves_is_not_taken_for_dead(scene: Scene) -> None:
    stream = Stream(1)
    for _ in range(4):
        await scene.send(bytes(512 * KIB), stream=stream)
    slow = await raw(scene, "slow")
    for _ in range(2):
        slow.ask(Scan("orders", m.Whence.EARLIEST, 0, None, 1))
    slow.stop_reading()
    await asyncio.sleep(0.5)
    transport = slow.transport
    assert transport is not None
    for _ in range(8):  # a sip a second: slower than the heartbeat, and never silent
        transport.resume_reading()
        await asyncio.sleep(0.001)
        transport.pause_reading()
        await asyncio.sleep(0.9)
        assert slow.answered < 2
    transport.resume_reading()
    await asyncio.sleep(1)
    assert (slow.is_lost, slow.answered) == (False, 2)


@staged_with(TIGHT)
async def test_a_consumer_that_never_reads_is_cut_off_and_holds_up_nobody(scene: Scene) -> None:
    stream = Stream(1)
    for _ in range(3):
        await scene.send(bytes(700 * KIB), stream=stream)
    deaf = await raw(scene, "deaf")
    deaf.stop_reading()
    for _ in range(20):
        deaf.ask(Scan("orders", m.Whence.EARLIEST, 0, None, 1))
    healthy = await scene.worker("ann")
    assert len((await healthy.pull()).payloads) == 1
    await asyncio.sleep(2)
    assert scene.broker.session_manager.outgoing.taken_bytes <= 2 * MIB
    await asyncio.sleep(60)
    assert scene.broker.session_manager.outgoing.taken_bytes == 0
    assert len(scene.broker.session_manager) <= 2


@staged_with(TIGHT)
async def test_requests_that_wait_have_an_allowance(scene: Scene) -> None:
    clients = [await scene.connect() for _ in range(5)]
    scene.disk.stall(5)
    data = [Stream(number).batch([bytes(600 * KIB)]) for number in range(9, 14)]
    sent = (client.produce("orders", each) for client, each in zip(clients, data, strict=True))
    answers = await asyncio.gather(*sent, return_exceptions=True)
    codes = [each.code for each in answers if isinstance(each, Refused)]
    assert Code.BUSY in codes
    assert scene.broker.waiting.taken_bytes == 0
    assert sum(isinstance(each, m.Produced) for each in answers) >= 1


@staged
async def test_whatever_becomes_of_a_request_its_allowance_is_free_again(scene: Scene) -> None:
    await scene.worker("ann")
    client = await scene.connect()
    with pytest.raises(Refused, match="BAD_NAME"):
        await client.produce("../../etc", Stream(1).batch([b"a"]))
    with pytest.raises(Refused, match="NO_SUCH_GROUP"):
        await client.pull("orders", "nobody", "x")
    bad = bytearray(Stream(2).batch([b"abcdefgh"]))
    bad[-1] ^= 1
    with pytest.raises(ConnectionEnded):
        await client.produce("orders", bytes(bad))
    waiting = await scene.worker("ben")
    poll = asyncio.create_task(waiting.pull(wait_s=1))
    gone = await scene.worker("cid")
    lost = asyncio.create_task(gone.pull(wait_s=1))
    await asyncio.sleep(0.1)
    assert scene.broker.waiting.taken_bytes > 0
    gone.client.abort()
    with pytest.raises(ConnectionEnded):
        await lost
    await poll
    await asyncio.sleep(2)
    assert scene.broker.waiting.taken_bytes == 0


@staged
async def test_what_a_request_that_waits_holds_is_free_when_its_client_is_gone(scene: Scene) -> None:
    await scene.send(b"a")
    polls = await raw(scene, "polls")
    for _ in range(500):
        polls.ask(Scan("orders", m.Whence.LATEST, 0, None, MIB, wait_ms=60_000))
    await asyncio.sleep(2)
    assert scene.broker.waiting.taken_bytes > 500 * KIB
    transport = polls.transport
    assert transport is not None
    transport.abort()
    await asyncio.sleep(0.1)
    assert scene.broker.waiting.taken_bytes == 0


@staged
async def test_a_field_that_nobody_knows_is_bounded(scene: Scene) -> None:
    """Of a later version, or of somebody who wants to fill the broker's memory."""
    await scene.send(b"a")
    client = await scene.connect()

    class LaterScan(Scan, frozen=True):
        later: str = ""

    with monkeypatched_verb(LaterScan, Scan):
        scanned, _ = await client.ask(LaterScan("orders", m.Whence.EARLIEST, 0, None, MIB, later="x" * 8_000), Scanned)
        assert scanned.next_sequence == 1
        with pytest.raises(Refused, match=r"SCAN of 20.* bytes beside its batches: at most 16384 are allowed"):
            await client.ask(LaterScan("orders", m.Whence.EARLIEST, 0, None, MIB, later="x" * 20_000), Scanned)


@contextmanager
def monkeypatched_verb(later: type[ControlMessage], known: type[ControlMessage]) -> Iterator[None]:
    """A message of a later version goes out under the verb that it has today."""
    codec.REQUESTS[later] = codec.REQUESTS[known]
    try:
        yield
    finally:
        del codec.REQUESTS[later]


@staged
async def test_an_answer_that_the_client_cannot_take_is_refused(scene: Scene) -> None:
    await scene.send(bytes(64 * KIB))
    narrow = Raw()
    net = scene.sim.net.host("narrow")
    narrow.connection = type(narrow.connection)(narrow.connection.role, 0, ConnectionOptions(frame_bytes_max=16 * KIB))
    narrow.transport, _ = await net.connect(lambda: narrow, BROKER, PORT)
    narrow.send(*narrow.connection.take())
    await narrow.greeted
    narrow.ask(Scan("orders", m.Whence.EARLIEST, 0, None, 1 << 20))
    await asyncio.sleep(1)
    assert not narrow.is_lost
    assert scene.broker.meters.refusals[Code.TOO_LARGE] == 1


@staged_with(options_of(response_bytes_max=2 * KIB))
async def test_an_answer_holds_no_more_than_it_may_whatever_was_asked_for(scene: Scene) -> None:
    stream = Stream(1)
    for _ in range(5):
        await scene.send(bytes(KIB), stream=stream)
    client = await scene.connect()
    scanned, batches = await client.ask(Scan("orders", m.Whence.EARLIEST, 0, None, 1 << 40), Scanned)
    assert len(batches) == 1
    assert scanned.next_sequence == 1


@staged_with(options_of(connections_max=2))
async def test_a_connection_too_many_is_told_so(scene: Scene) -> None:
    first = await scene.connect()
    await scene.connect()
    with pytest.raises(Unreachable, match="2 connections and takes no more"):
        await scene.connect()
    first.close()
    await asyncio.sleep(1)
    await scene.connect()


@staged_with(options_of(connections_max=1))
async def test_a_crowd_at_the_door_is_cut_off_without_a_word(scene: Scene) -> None:
    crowd = [await raw(scene, f"rude-{number}", greet=False) for number in range(140)]
    await asyncio.sleep(1)
    assert sum(each.is_lost for each in crowd) == 140 - 129
    assert len(scene.broker.session_manager) == 129


@staged
async def test_random_bytes_are_answered_with_a_goodbye(scene: Scene) -> None:
    for number, nonsense in enumerate((b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(64), b"\xff" * 64)):
        rude = await raw(scene, f"rude-{number}")
        rude.send(nonsense)
        await asyncio.wait_for(rude.lost, 10)
        assert rude.connection.closed is not None
        assert rude.connection.closed.code is Code.PROTOCOL_ERROR


def test_budgets_hold_at_least_one_frame() -> None:
    with pytest.raises(Misuse, match="room for one frame"):
        BrokerOptions(partial_bytes_max=FRAME_BYTES_MAX - 1)


def test_only_loopback_unless_told_so() -> None:
    with pytest.raises(Misuse, match="--allow-remote"):
        BrokerOptions(host="0.0.0.0")
    BrokerOptions(host="0.0.0.0", allow_remote=True)
    BrokerOptions(host="::1")
