"""Where a client is told to go."""

from __future__ import annotations

import pytest

from fairway.client import url
from fairway.client.url import BrokerAddress
from fairway.errors import Misuse


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("fairway://127.0.0.1:20880", [("127.0.0.1", 20880)]),
        ("fairway://queue.example", [("queue.example", 20880)]),
        ("fairway://a:1,b:2,c", [("a", 1), ("b", 2), ("c", 20880)]),
        ("fairway://[::1]:7,[fe80::1]", [("::1", 7), ("fe80::1", 20880)]),
        ("fairway://a:1/", [("a", 1)]),
    ],
)
def test_every_form_is_read(text: str, addresses: list[tuple[str, int]]) -> None:
    assert list(url.parse(text).brokers) == addresses
    assert not url.parse(text).delay


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("fairway://a:1?delay=b:2", [("b", 2)]),
        ("fairway://a:1,c:3/?delay=b:2,d", [("b", 2), ("d", 20880)]),
        ("fairway://a:1?delay=[::1]:7", [("::1", 7)]),
    ],
)
def test_a_delay_server_may_be_elsewhere(text: str, addresses: list[tuple[str, int]]) -> None:
    assert list(url.parse(text).delay) == addresses
    assert url.parse(text).brokers[0] == ("a", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:20880", "write fairway://HOST:PORT"),
        ("amqp://a:1", "write fairway://HOST:PORT"),
        ("fairway://", "no host"),
        ("fairway://a,", "no host"),
        ("fairway://:20880", "no host"),
        ("fairway://a:0", "1 to 65535"),
        ("fairway://a:65536", "1 to 65535"),
        ("fairway://a:http", "1 to 65535"),
        ("fairway://::1:20880", "brackets"),
        ("fairway://[::1", "brackets"),
        ("fairway://[::1]7", "brackets"),
        ("fairway://a:1?", r"\?delay=HOST:PORT"),
        ("fairway://a:1?delay", r"\?delay=HOST:PORT"),
        ("fairway://a:1?delay=", "no host"),
        ("fairway://a:1?timeout=3", r"\?delay=HOST:PORT"),
        ("fairway://a:1?delay=b:2&delay=c:3", r"\?delay=HOST:PORT"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(Misuse, match=said.replace("[", r"\[")):
        url.parse(text)


def test_an_address_is_written_as_it_is_read() -> None:
    for text in ("a:1", "[::1]:20880"):
        assert str(BrokerAddress.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("meta://a:1", [("a", 1)]),
        ("meta://a,[::1]:7/", [("a", 20882), ("::1", 7)]),
    ],
)
def test_a_cluster_is_named_by_its_meta_servers(text: str, addresses: list[tuple[str, int]]) -> None:
    assert list(url.parse_any(text).meta) == addresses
    assert not url.parse_any(text).brokers
    assert url.parse_any("fairway://a:1") == url.parse("fairway://a:1")


@pytest.mark.parametrize(
    ("text", "said"),
    [("meta://", "no host"), ("meta://a:0", "1 to 65535"), ("meta://a?delay=b:1", "knows the delay servers")],
)
def test_what_is_wrong_with_a_cluster_is_named(text: str, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        url.parse_any(text)


def test_a_cluster_where_one_broker_group_is_meant_is_named() -> None:
    with pytest.raises(Misuse, match="this goes to one broker group"):
        url.parse("meta://a:1")
