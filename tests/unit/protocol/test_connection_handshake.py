"""The handshake: the highest common version, common features, and a clear word where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairway import limits
from fairway.errors import Code, Misuse, Refused
from fairway.protocol import (
    Connection,
    ConnectionOptions,
    ConnectionState,
    HandshakeDone,
    RefusalSent,
    Role,
    Why,
    codec,
    frames,
    messages,
)
from fairway.protocol.connection_states import Closed
from tests.unit.protocol.feeding import JUNK, WAYS, Pair, joined

Way = Callable[[bytes], list[bytes]]


def greet(
    client: ConnectionOptions | None = None,
    server: ConnectionOptions | None = None,
    way: Way = WAYS[0],
    junk: bytes = b"",
) -> tuple[Pair, HandshakeDone, HandshakeDone]:
    pair = Pair(client, server)
    [at_server] = pair.to_server(junk, way)
    [at_client] = pair.to_client(junk, way)
    assert isinstance(at_server, HandshakeDone)
    assert isinstance(at_client, HandshakeDone)
    return pair, at_server, at_client


@pytest.mark.parametrize("way", WAYS)
def test_both_sides_agree(way: Way) -> None:
    client = ConnectionOptions(name="client 1", features=("b", "a", "c"), frame_bytes_max=1 << 20)
    server = ConnectionOptions(
        name="server 2", features=("a", "b", "d"), frame_bytes_max=1 << 21, heartbeat_ms=500, requests_max=3
    )
    pair, at_server, at_client = greet(client, server, way)
    assert at_server == HandshakeDone(1, ("b", "a"), "client 1", 1 << 20, 500, 3)
    assert at_client == HandshakeDone(1, ("b", "a"), "server 2", 1 << 21, 500, 3)
    assert (pair.client.room, pair.client.peer_frame_bytes_max) == (3, 1 << 21)


def test_junk_behind_the_handshake_breaks_the_connection_after_it() -> None:
    pair, _, _ = greet(junk=JUNK)
    assert pair.server.closed is not None
    assert pair.server.closed.why is Why.BROKEN
    assert pair.client.closed is not None
    assert pair.client.closed.why is Why.ACCUSED, "the server's last word came before the junk"


VERSIONS = [
    ((1, 1), (1, 1), 1),
    ((1, 3), (2, 5), 3),
    ((2, 5), (1, 3), 3),
    ((1, 9), (4, 4), 4),
    ((4, 4), (1, 9), 4),
    ((1, 2), (3, 4), None),
    ((3, 4), (1, 2), None),
]


@pytest.mark.parametrize(("client", "server", "version"), VERSIONS)
def test_the_highest_common_version(client: tuple[int, int], server: tuple[int, int], version: int | None) -> None:
    pair = Pair(
        ConnectionOptions(version_min=client[0], version_max=client[1]),
        ConnectionOptions(version_min=server[0], version_max=server[1]),
    )
    pair.to_server()
    events = pair.to_client()
    if version is not None:
        assert [event.version for event in events if isinstance(event, HandshakeDone)] == [version]
        return
    assert events == []
    expected = f"this server speaks {server[0]} to {server[1]}, the client {client[0]} to {client[1]}"
    for connection in (pair.client, pair.server):
        assert connection.closed is not None
        assert (connection.closed.why, connection.closed.code) == (Why.TURNED_AWAY, Code.UNSUPPORTED)
        assert expected in connection.closed.sentence


@pytest.mark.parametrize(
    "hello",
    [
        messages.Hello(2, 1, [], "", 1 << 20),
        messages.Hello(1, 1, [], "", limits.HELLO_FRAME_BYTES_MAX - 1),
        messages.Hello(1, 1, ["f"] * (limits.FEATURES_MAX + 1), "", 1 << 20),
    ],
    ids=["no range of versions", "no room", "too many features"],
)
def test_a_hello_that_makes_no_sense_is_refused(hello: messages.Hello) -> None:
    server = Connection(Role.SERVER, 0)
    server.feed(joined(frames.write(1, 0, 0, 0, codec.encode(hello))), 0)
    assert server.closed is not None
    assert (server.closed.why, server.closed.code) == (Why.TURNED_AWAY, Code.BAD_REQUEST)
    assert joined(server.take())[6] == frames.RESPONSE | frames.REFUSED


@pytest.mark.parametrize(
    "welcome",
    [
        messages.Welcome(2, [], "", 1 << 20, 10_000, 10),
        messages.Welcome(1, ["unheard of"], "", 1 << 20, 10_000, 10),
        messages.Welcome(1, [], "", 100, 10_000, 10),
        messages.Welcome(1, [], "", 1 << 20, 10_000, 0),
        messages.Welcome(1, [], "", 1 << 20, 0, 10),
        messages.Welcome(1, [], "", 1 << 20, 1 << 40, 10),
    ],
    ids=["version", "features", "no room for frames", "no requests", "no heartbeat", "no heartbeat in years"],
)
def test_a_welcome_that_was_not_asked_for_breaks_the_connection(welcome: messages.Welcome) -> None:
    client = Connection(Role.CLIENT, 0)
    client.take()
    assert client.feed(joined(frames.write(1, 1, 0, 0, codec.encode(welcome))), 0) == []
    assert client.closed is not None
    assert client.closed.why is Why.BROKEN
    assert len(client.take()) == 1


def test_a_full_server_turns_clients_away_with_a_time_to_come_back() -> None:
    pair = Pair()
    pair.server.turn_away(Refused(Code.TOO_MANY_CONNECTIONS, "10,000 are here", retry_after_ms=1_000))
    assert pair.to_server() == [RefusalSent(0, Code.TOO_MANY_CONNECTIONS)]
    assert pair.to_client() == []
    assert (
        pair.client.closed
        == pair.server.closed
        == Closed(Why.TURNED_AWAY, "10,000 are here", code=Code.TOO_MANY_CONNECTIONS, retry_after_ms=1_000)
    )


def test_turning_away_is_for_servers_before_the_handshake() -> None:
    pair, _, _ = greet()
    for connection in (pair.server, Connection(Role.CLIENT, 0)):
        with pytest.raises(Misuse, match="only a server can turn somebody away"):
            connection.turn_away(Refused(Code.BUSY, ""))


@pytest.mark.parametrize("role", Role)
def test_a_handshake_that_is_not_finished_ends(role: Role) -> None:
    connection = Connection(role, 1_000, ConnectionOptions(handshake_ms=50))
    assert connection.next_deadline() == 1_000 + 50_000_000
    connection.on_time(50_000_999)
    assert connection.state is ConnectionState.GREETING
    connection.on_time(50_001_000)
    assert connection.closed is not None
    assert connection.closed.why is Why.SILENT


@pytest.mark.parametrize("role", Role)
def test_a_slow_sender_does_not_prolong_the_handshake(role: Role) -> None:
    connection = Connection(role, 0, ConnectionOptions(handshake_ms=50))
    for now_ms in range(50):
        connection.feed(b"\x40" if now_ms == 0 else b"\x00" if now_ms < 4 else b"", now_ms * 1_000_000)
    assert connection.next_deadline() == 50_000_000


def test_an_http_request_is_told_that_it_is_wrong() -> None:
    server = Connection(Role.SERVER, 0)
    assert server.feed(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", 0) == []
    assert server.closed is not None
    assert "bytes: at most 4096 are allowed here" in server.closed.sentence


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame_bytes_max": 100},
        {"frame_bytes_max": limits.FRAME_BYTES_MAX + 1},
        {"heartbeat_ms": 1},
        {"requests_max": 0},
        {"version_min": 2, "version_max": 1},
        {"version_max": 256},
    ],
    ids=str,
)
def test_options_that_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        ConnectionOptions(**wrong)  # type: ignore[arg-type]


def test_names_and_features_fit_into_the_first_frame() -> None:
    for wrong in (
        {"features": tuple(map(str, range(limits.FEATURES_MAX + 1)))},
        {"features": ("f" * 33,)},
        {"name": "n" * 201},
    ):
        with pytest.raises(Misuse, match="at most"):
            ConnectionOptions(**wrong)
    features = tuple(f"{number:032}" for number in range(limits.FEATURES_MAX))
    largest = ConnectionOptions(name="\N{SAILBOAT}" * 200, features=features)
    _, at_server, _ = greet(largest, largest)
    assert at_server.features == features


def test_a_feature_that_is_offered_twice_counts_once() -> None:
    _, at_server, _ = greet(ConnectionOptions(features=("a", "a")), ConnectionOptions(features=("a",)))
    assert at_server.features == ("a",)
