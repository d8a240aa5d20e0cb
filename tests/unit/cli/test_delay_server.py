"""Delayed messages through real processes: inside `fairway up`, and with `fairway delay serve` beside a broker."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fairway
from fairway.cli.delay import parse_brokers
from fairway.errors import Misuse
from fairway.runtime.process import Child
from tests.unit.cli.running import Cli

READY_S = 60.0
NOBODY = Cli("fairway://127.0.0.1:1")


@contextmanager
def running(*arguments: str) -> Iterator[tuple[Child, str]]:
    """A server that is ready, and the line that says so."""
    with Child("fairway", *arguments, "--port", "0") as child:
        ready = child.line(timeout_s=READY_S)
        assert ready
        yield child, ready


def address_of(ready: str) -> str:
    found = re.search(r"127\.0\.0\.1:\d+", ready)
    assert found, ready
    return found[0]


def received(client: fairway.Client, count: int) -> list[bytes]:
    """So many messages, and that none follows."""
    found = []
    with client.consumer("orders", group="g") as consumer:
        for _ in range(count):
            message = consumer.poll(timeout=READY_S)
            assert message is not None
            found.append(bytes(message.payload))
            message.ack()
        assert consumer.poll(timeout=0.5) is None
    return found


def test_up_delivers_what_is_due_also_after_it_was_killed(tmp_path: Path) -> None:
    up = ("up", "--data", str(tmp_path / "data"), "--log-data", str(tmp_path / "fast"))
    with running(*up) as (child, ready), fairway.connect(f"fairway://{address_of(ready)}") as client:
        client.send("orders", b"first", after=0.2).result()
        client.send("orders", b"second", after=4).result()
        assert received(client, 1) == [b"first"]
        child.kill()
    with running(*up) as (child, ready), fairway.connect(f"fairway://{address_of(ready)}") as client:
        assert received(client, 1) == [b"second"]
        child.terminate()
        assert child.wait(timeout_s=READY_S) == 0
    assert (tmp_path / "data" / "delay" / "schedule").is_dir()
    assert (tmp_path / "fast" / "messages").is_dir()


def test_a_delay_server_of_its_own_serves_a_broker_elsewhere(tmp_path: Path) -> None:
    with running("broker", "--data", str(tmp_path / "broker")) as (_, ready):
        broker = address_of(ready)
        serve = ("delay", "serve", "--data", str(tmp_path / "delay"), "--broker", broker, "--http-port", "0")
        with running(*serve) as (server, said):
            with fairway.connect(f"fairway://{broker}?delay={address_of(said)}") as client:
                client.send("orders", b"later", after=0.5).result()
                client.send("orders", b"far", key="k", after=3_600).result()
                assert received(client, 1) == [b"later"]
                assert client.delayed.count(subject="orders") == 1
            pages = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert pages
            shown = urllib.request.urlopen(f"{pages[0]}/metrics", timeout=READY_S).read().decode()
            assert "\nfairway_delay_pending_messages 1\n" in shown
            assert f'fairway_delay_target_down{{target="{broker}"}} 0' in shown
            server.terminate()
            assert server.wait(timeout_s=READY_S) == 0


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    assert "holds files, but no Fairway data" in NOBODY.fails("up", "--data", str(tmp_path), status=1)
    assert [each.name for each in tmp_path.iterdir()] == ["photo.jpg"]


def test_broker_groups_are_read_as_people_write_them() -> None:
    [(name, places)] = parse_brokers("10.0.0.7:1,10.0.0.8").items()
    assert (name, [str(each) for each in places]) == ("10.0.0.7:1,10.0.0.8", ["10.0.0.7:1", "10.0.0.8:20880"])
    assert {name: str(places[0]) for name, places in parse_brokers("east=a:1  west=b:2").items()} == {
        "east": "a:1",
        "west": "b:2",
    }
    assert parse_brokers("fairway://a:1,b") == parse_brokers("a:1,b")
    assert parse_brokers("east=fairway://a:1") == parse_brokers("east=a:1")


def test_a_meta_server_is_no_broker_group() -> None:
    with pytest.raises(Misuse, match="names a meta server: give --registry meta://a:1 and --group NAME"):
        parse_brokers("meta://a:1")


@pytest.mark.parametrize("raw", [None, "", "  ", "a:1 b:2", "=a:1", "east=a:1 east=b:2", "a:0", "east="])
def test_broker_groups_that_cannot_be_are_refused_with_the_remedy(raw: str | None) -> None:
    with pytest.raises(Misuse):
        parse_brokers(raw)


def test_no_broker_is_usage(tmp_path: Path) -> None:
    assert "--broker HOST:PORT" in NOBODY.fails("delay", "serve", "--data", str(tmp_path), status=2)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--registry", "zookeeper://127.0.0.1:1"), "--group NAME"),
        (("--group", "d1"), "--registry URL"),
        (("--group", "d1", "--registry", "sqlite:meta"), "--registry meta://HOST:PORT"),
        (("--group", "d1", "--registry", "meta://127.0.0.1:1", "--broker", "127.0.0.1:2"), "leave out --broker"),
        (("--group", "d/1", "--registry", "meta://127.0.0.1:1"), "d/1"),
        (("--group", "d1", "--registry", "http://127.0.0.1:1"), "write meta://HOST:PORT, zookeeper://"),
    ],
)
def test_a_place_in_a_cluster_that_cannot_be_is_usage(flags: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    assert remedy in NOBODY.fails("delay", "serve", "--data", str(tmp_path), *flags, status=2)


def test_a_delay_server_joins_a_cluster_by_itself_and_finds_the_broker_groups(tmp_path: Path) -> None:
    with running("meta", "--registry", f"sqlite:{tmp_path / 'meta'}") as (_, said):
        meta = f"meta://{address_of(said)}"
        broker = ("broker", "--data", str(tmp_path / "g1"), "--registry", meta, "--group", "g1")
        delay = ("delay", "serve", "--data", str(tmp_path / "d1"), "--registry", meta, "--group", "d1")
        with running(*broker), running(*delay) as (server, _), fairway.connect(meta) as client:
            client.send("orders", b"later", after=0.5).result()
            client.send("orders", b"far", key="k", after=3_600).result()
            assert received(client, 1) == [b"later"]
            assert client.delayed.count(subject="orders") == 1
            misnamed = ("delay", "serve", "--data", str(tmp_path / "d2"), "--registry", meta, "--group", "g1")
            assert "g1 is a group of brokers" in NOBODY.fails(*misnamed, "--port", "0", status=1)
            server.terminate()
            assert server.wait(timeout_s=READY_S) == 0
        alone = ("delay", "serve", "--data", str(tmp_path / "d1"), "--broker", "127.0.0.1:1", "--port", "0")
        assert "start it with --registry and --group" in NOBODY.fails(*alone, status=2)
