"""Requests and answers on one connection: matched, bounded, refused without harm, ended where rules are broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairway import limits
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError
from fairway.protocol import (
    Connection,
    ConnectionOptions,
    RefusalReceived,
    RefusalSent,
    RequestReceived,
    ResponseReceived,
    Role,
    Verb,
    Why,
    admin_messages,
    messages,
)
from tests.unit.protocol.feeding import BATCH, BIG_BATCH, JUNK, WAYS, Pair, frame, opened, plain

Way = Callable[[bytes], list[bytes]]

PRODUCE = messages.Produce("order.changed")
PRODUCED = messages.Produced(1, 1, 5, False, 1)
LEAVE = messages.Leave("s", "g", "c", 0)
BUSY = Refused(Code.BUSY, "later", retry_after_ms=5)


def ask(pair: Pair) -> int:
    """A request that has reached the server."""
    correlation = pair.client.request(PRODUCE, [BATCH])
    [event] = pair.to_server()
    assert isinstance(event, RequestReceived)
    assert event.correlation == correlation
    return correlation


def sentence(connection: Connection) -> str:
    assert connection.closed is not None
    assert connection.closed.why is Why.BROKEN
    return connection.closed.sentence


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("junk", [b"", JUNK], ids=["alone", "with junk"])
def test_a_request_and_its_answer(way: Way, junk: bytes) -> None:
    pair = opened()
    correlation = pair.client.request(PRODUCE, [BIG_BATCH])
    [asked] = pair.to_server(way=way)
    assert isinstance(asked, RequestReceived)
    assert (asked.correlation, asked.verb, asked.message) == (correlation, Verb.PRODUCE, PRODUCE)
    assert list(map(plain, asked.attachments)) == [BIG_BATCH]
    assert (pair.client.in_flight, pair.server.in_flight) == (1, 1)
    assert pair.server.respond(correlation, PRODUCED)
    [answered] = pair.to_client(junk, way)
    assert answered == ResponseReceived(correlation, PRODUCED, ())
    assert (pair.client.in_flight, pair.server.in_flight) == (0, 0)
    assert (pair.client.closed is not None) == bool(junk)


def test_answers_come_in_any_order() -> None:
    pair = opened()
    asked = [ask(pair) for _ in range(3)]
    assert asked == [1, 2, 3]
    pair.server.respond(3, PRODUCED)
    pair.server.refuse(1, BUSY)
    pair.server.respond(2, PRODUCED)
    events = pair.to_client()
    assert [event.correlation for event in events if not isinstance(event, tuple)] == [3, 1, 2]  # type: ignore[union-attr]
    refusal = events[1]
    assert isinstance(refusal, RefusalReceived)
    assert (refusal.refused.code, refusal.refused.sentence, refusal.refused.retry_after_ms) == (Code.BUSY, "later", 5)
    assert pair.client.is_open


def test_pulled_batches_arrive() -> None:
    pair = opened()
    pull = pair.client.request(messages.Pull("s", "g", "c", 10, 1 << 20, 0, 0))
    pair.to_server()
    pulled = messages.Pulled(1, [], [messages.AttachedBatch(5, 1), messages.AttachedBatch(6, 1)])
    pair.server.respond(pull, pulled, [BATCH, memoryview(BIG_BATCH)])
    [event] = pair.to_client()
    assert isinstance(event, ResponseReceived)
    assert event.message == pulled
    assert list(map(plain, event.attachments)) == [BATCH, BIG_BATCH]


def test_beyond_the_bound_a_server_refuses_and_lives() -> None:
    pair = opened(server=ConnectionOptions(requests_max=2))
    asked = [ask(pair), ask(pair)]
    assert pair.client.room == 0
    with pytest.raises(Misuse, match="2 requests are in flight"):
        pair.client.request(LEAVE)
    assert pair.server.feed(frame(b"\x94\xa1s\xa1g\xa1c\x00", verb=21, correlation=3), 0) == [RefusalSent(3, Code.BUSY)]
    [refusal] = _answers(pair, 3)
    assert refusal.refused.code is Code.BUSY
    assert refusal.refused.retry_after_ms == 50
    pair.server.respond(asked[0], PRODUCED)
    pair.to_client()
    assert pair.client.room == 1


def test_no_more_frames_are_read_than_the_owner_wants_and_none_is_lost() -> None:
    pair = opened()
    asked = [pair.client.request(PRODUCE, [BATCH]) for _ in range(5)]
    data = b"".join(pair.client.take())
    seen = [pair.server.feed(data[:-8], 0, frames_max=2)]
    while pair.server.has_unread:
        seen.append(pair.server.feed(b"", 0, frames_max=2))
    assert pair.server.buffered_bytes > 0
    seen.append(pair.server.feed(data[-8:], 0, frames_max=2))
    assert [len(events) for events in seen] == [2, 2, 0, 1]
    assert [event.correlation for events in seen for event in events if isinstance(event, RequestReceived)] == asked
    assert pair.server.buffered_bytes == 0


def test_bytes_may_be_taken_in_and_read_later() -> None:
    pair = opened()
    pair.client.request(PRODUCE, [BATCH])
    assert pair.server.feed(b"".join(pair.client.take()), 0, frames_max=0) == []
    assert pair.server.has_unread
    pair.client.request(PRODUCE, [BATCH])
    assert len(pair.server.feed(b"".join(pair.client.take()), 0)) == 2
    assert not pair.server.has_unread


def _answers(pair: Pair, correlation: int, verb: int = 21) -> list[RefusalReceived]:
    """What the server wrote to a request that the client's core did not make."""
    pair.client._in_flight[correlation] = verb
    return [event for event in pair.to_client() if isinstance(event, RefusalReceived)]


def test_an_unknown_verb_is_refused_and_the_connection_kept() -> None:
    pair = opened()
    unknown = frame(b"\x91\x01", verb=1_000, correlation=9, attachments=BATCH)
    assert pair.server.feed(unknown, 0) == [RefusalSent(9, Code.UNSUPPORTED)]
    [refusal] = _answers(pair, 9, verb=1_000)
    assert refusal.refused.code is Code.UNSUPPORTED
    assert pair.server.is_open


SERVER_HEARS: dict[str, tuple[bytes, str]] = {
    "correlation 0": (frame(b"\x91\xa1s", correlation=0, attachments=BATCH), "correlation id 0, which is not free"),
    "correlation in use": (frame(b"\x91\xa1s", attachments=BATCH), "correlation id 1, which is not free"),
    "no batch": (frame(b"\x91\xa1s", correlation=2), "a Produce with 0 batches: 1 belong"),
    "two batches": (frame(b"\x91\xa1s", correlation=2, attachments=BATCH * 2), "a Produce with 2 batches: 1 belong"),
    "batch for a pull": (
        frame(b"\x97\xa1s\xa1g\xa1c\1\1\1\1", verb=18, correlation=2, attachments=BATCH),
        "a Pull with 1 batches: 0 belong",
    ),
    "bad control": (frame(b"\x91\x01", correlation=2, attachments=BATCH), "control message of verb 16 cannot be read"),
    "own verb that nobody knows": (frame(verb=15, correlation=0), "a frame of verb 15"),
    "verb 0": (frame(verb=0, correlation=0), "a frame of verb 0"),
    "answered goodbye": (frame(b"\x91\xa1s", verb=3, flags=1, correlation=0), "a frame of verb 3"),
    "ping with a correlation": (frame(verb=2, correlation=7), "correlation id 7"),
    "ping with a batch": (frame(verb=2, correlation=0, attachments=BATCH), "1 attachments"),
    "ping of another type": (frame(b"\xc0", verb=2, correlation=0), "control message of verb 2 cannot be read"),
    "refused ping": (frame(verb=2, flags=3, correlation=0), "PONG cannot be refused"),
    "pong without a ping": (frame(verb=2, flags=1, correlation=0), "an answer to a PING that nobody sent"),
    "goodbye of another type": (frame(b"\xc0", verb=3, correlation=0), "control message of verb 3 cannot be read"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("junk", [b"", JUNK], ids=["alone", "with junk"])
@pytest.mark.parametrize("name", SERVER_HEARS)
def test_a_client_that_breaks_the_rules_is_told_and_left(name: str, way: Way, junk: bytes) -> None:
    pair = opened()
    assert ask(pair) == 1
    data, expected = SERVER_HEARS[name]
    for chunk in way(data + junk):
        assert pair.server.feed(chunk, 0) == []
    assert expected in sentence(pair.server)
    assert pair.server.closed is not None
    assert pair.server.closed.unanswered == (1,)
    assert isinstance(pair.server.closed.error, RemoteProtocolError)
    pair.to_client()
    assert pair.client.closed is not None
    assert (pair.client.closed.why, pair.client.closed.code) == (Why.ACCUSED, Code.PROTOCOL_ERROR)
    assert expected in pair.client.closed.sentence
    assert pair.client.closed.unanswered == (1,)


PRODUCED_BYTES = b"\x95\1\1\1\xc2\1"
CLIENT_HEARS: dict[str, tuple[bytes, str]] = {
    "unknown correlation": (frame(PRODUCED_BYTES, flags=1, correlation=2), "nobody asked"),
    "correlation 0": (frame(PRODUCED_BYTES, flags=1, correlation=0), "nobody asked"),
    "repeated answer": (frame(PRODUCED_BYTES, flags=1) * 2, "nobody asked"),
    "other verb": (frame(b"\x91\1", verb=19, flags=1), "nobody asked"),
    "unknown verb": (frame(b"\x91\1", verb=1_000, flags=1), "nobody asked"),
    "other answer": (frame(b"\x91\xa1s", flags=1), "control message of verb 16 cannot be read"),
    "bad refusal": (frame(b"\x91\xa1s", flags=3), "control message of verb 16 cannot be read"),
    "refusal with a batch": (frame(b"\x92\xa1s\xa1s", flags=3, attachments=BATCH), "a refusal with attachments"),
    "answer with a batch": (frame(PRODUCED_BYTES, flags=1, attachments=BATCH), "a Produced with 1 batches: 0 belong"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("junk", [b"", JUNK], ids=["alone", "with junk"])
@pytest.mark.parametrize("name", CLIENT_HEARS)
def test_a_server_that_breaks_the_rules_is_told_and_left(name: str, way: Way, junk: bytes) -> None:
    pair = opened()
    ask(pair)
    data, expected = CLIENT_HEARS[name]
    for chunk in way(data + junk):
        pair.client.feed(chunk, 0)
    assert expected in sentence(pair.client)
    pair.to_server()
    assert pair.server.closed is not None
    assert pair.server.closed.why is Why.ACCUSED


def test_our_own_mistakes_are_misuse_and_harm_nothing() -> None:
    pair = opened()
    correlation = ask(pair)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: pair.client.request(PRODUCE), "a Produce with 0 batches: 1 belong"),
        (lambda: pair.client.request(PRODUCE, [b"123"]), "a multiple of 8"),
        (lambda: pair.client.request(PRODUCED), "a client does not ask with a Produced"),
        (lambda: pair.client.request(messages.Ping()), "a client does not ask with a Ping"),
        (lambda: pair.client.request(messages.Leave("s", "g", "c", 2**64)), "cannot be written"),
        (lambda: pair.client.respond(correlation, PRODUCED), "waits for an answer of this client"),
        (lambda: pair.server.request(LEAVE), "a server does not ask"),
        (lambda: pair.server.respond(correlation, messages.Done()), "a Done does not answer PRODUCE"),
        (lambda: pair.server.respond(correlation + 1, PRODUCED), "no request with correlation id 2"),
        (lambda: pair.server.refuse(correlation + 1, BUSY), "no request with correlation id 2"),
    ]
    for call, expected in wrong:
        with pytest.raises(Misuse, match=expected):
            call()
    assert pair.client.take() == []
    assert pair.server.take() == []
    assert pair.client.in_flight == pair.server.in_flight == 1
    assert pair.server.respond(correlation, PRODUCED)
    with pytest.raises(Misuse, match="no request with correlation id 1"):
        pair.server.respond(correlation, PRODUCED)
    assert len(pair.to_client()) == 1


def test_a_frame_that_the_other_side_does_not_take_is_not_sent() -> None:
    pair = opened(client=ConnectionOptions(frame_bytes_max=limits.HELLO_FRAME_BYTES_MAX))
    scan = pair.client.request(admin_messages.Scan("s", messages.Whence.EARLIEST, 0, None, 1 << 20))
    pair.to_server()
    scanned = admin_messages.Scanned([messages.AttachedBatch(0, 1)], 1, 0, 1, 1, 1)
    with pytest.raises(Misuse, match="the other side takes at most 4096"):
        pair.server.respond(scan, scanned, [BIG_BATCH])
    assert pair.server.refuse(scan, Refused(Code.TOO_LARGE, "the batch is larger than you take"))


def test_the_owner_may_find_the_mistake() -> None:
    pair = opened()
    ask(pair)
    pair.server.fail(RemoteProtocolError("batch with a wrong checksum"))
    pair.server.fail(RemoteProtocolError("and again"))
    pair.to_client()
    assert sentence(pair.server) == "batch with a wrong checksum"
    assert pair.client.closed is not None
    assert pair.client.closed.sentence == "batch with a wrong checksum"


@pytest.mark.parametrize("role", Role)
def test_after_the_end_nothing_happens(role: Role) -> None:
    pair = opened()
    correlation = ask(pair)
    us = pair.client if role is Role.CLIENT else pair.server
    us.lost()
    assert us.closed is not None
    assert (us.closed.why, us.closed.unanswered) == (Why.LOST, (correlation,))
    ended = us.closed
    assert us.feed(JUNK, 0) == []
    us.lost()
    us.on_time(1 << 62)
    us.drain("bye")
    us.fail(RemoteProtocolError("too late"))
    assert us.respond(correlation, PRODUCED) is False
    assert us.refuse(correlation, BUSY) is False
    assert us.take() == []
    assert us.closed is ended
    assert us.next_deadline() is None
    assert us.room == 0
    with pytest.raises(Misuse):
        us.request(LEAVE)


def test_what_is_buffered_is_known() -> None:
    pair = opened()
    pair.server.feed(frame(b"\x91\xa1s", attachments=BIG_BATCH)[:1_000], 0)
    assert pair.server.buffered_bytes == 1_000
    pair.server.lost()
    assert pair.server.closed is not None
    assert pair.server.closed.sentence == "the connection was cut in the middle of a frame"
    assert pair.server.buffered_bytes == 0
    assert sum(map(len, pair.server.take_debris())) == 1_000  # the owner frees it when there is time
    assert not pair.server.take_debris()


def test_the_end_lets_go_of_what_had_arrived() -> None:
    pair = opened()
    pair.server.feed(frame(b"\x91\xa1s", attachments=BIG_BATCH, crc=1)[:50_000], 0)
    assert pair.server.buffered_bytes == 50_000
    pair.server.feed(frame(b"\x91\xa1s", attachments=BIG_BATCH, crc=1)[50_000:], 0)
    assert "wrong checksum" in sentence(pair.server)
    assert pair.server.buffered_bytes == 0
    assert pair.server.closed is not None
    assert pair.server.closed.error is not None
    assert pair.server.closed.error.__traceback__ is None
