"""A data directory that is moved, unmounted or replaced under a running server: nothing is acknowledged elsewhere, and
the server ends with a sentence. The servers are real processes, and so is the move."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fairway
from fairway.errors import FairwayError
from fairway.runtime.process import Child
from tests.unit.cli.running import READY_S, up

SENTENCE = "is no longer the directory that this process locked"
MESSAGES = 200
SENT_MAX = 20_000


@contextmanager
def _meta(data: Path, errors: Path) -> Iterator[Child]:
    with Child("fairway", "meta", "--registry", f"sqlite:{data}", "--port", "0", errors_to=errors) as child:
        assert "ready at" in (child.line(timeout_s=READY_S) or "")
        yield child


@contextmanager
def _server(verb: str, data: Path, errors: Path) -> Iterator[tuple[Child, str]]:
    arguments = (verb, "--data", str(data), "--port", "0", "--low-water-mib", "64")
    with Child("fairway", *arguments, errors_to=errors) as child:
        ready = re.search(r"ready at (fairway://[\d.]+:\d+)", child.line(timeout_s=READY_S) or "")
        assert ready
        yield child, ready[1]


def _send(url: str, first: int) -> int:
    """Send until the broker is gone; how many messages were acknowledged."""
    acknowledged = 0
    client = fairway.connect(url)
    try:
        with contextlib.suppress(FairwayError, TimeoutError):
            while acknowledged < SENT_MAX:
                client.send("orders", b"%d" % (first + acknowledged)).result(timeout=3)
                acknowledged += 1
    finally:
        client.abandon()
    return acknowledged


def _read_all(data: Path) -> list[int]:
    """What a broker on that directory has in `orders`."""
    with up(data, "--low-water-mib", "64") as (_, url), fairway.connect(url) as client:
        return sorted(int(payload) for page in client.scan("orders") for payload in page.batch.payloads)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_broker_acknowledges_nothing_into_another_directory(tmp_path: Path, is_replaced: bool) -> None:
    data, moved, errors = tmp_path / "data", tmp_path / "moved", tmp_path / "errors"
    with _server("broker", data, errors) as (child, url):
        with fairway.connect(url) as client:
            for number in range(MESSAGES):
                client.send("orders", b"%d" % number).result(timeout=30)
        data.rename(moved)
        if is_replaced:
            data.mkdir()
        acknowledged = MESSAGES + _send(url, MESSAGES)
        assert child.wait(timeout_s=30) == 1
    assert SENTENCE in errors.read_text(), errors.read_text()
    assert str(data) in errors.read_text()
    assert not data.exists() or not list(data.iterdir()), "nothing was made again where the directory had been"
    assert _read_all(moved)[:acknowledged] == list(range(acknowledged))


@pytest.mark.parametrize("what", [".", "delay", "messages", "delay/schedule"])
def test_a_server_that_is_idle_notices_too(tmp_path: Path, what: str) -> None:
    data, errors = tmp_path / "data", tmp_path / "errors"
    with _server("up", data, errors) as (child, url):
        with fairway.connect(url) as client:
            client.send("orders", b"1", after=3_600).result(timeout=30)
            client.send("orders", b"2").result(timeout=30)
        (data / what).resolve().rename(tmp_path / "moved")
        assert child.wait(timeout_s=30) == 1
    assert SENTENCE in errors.read_text(), errors.read_text()


def test_a_meta_server_ends_when_its_registry_is_moved(tmp_path: Path) -> None:
    data, errors = tmp_path / "registry", tmp_path / "errors"
    with _meta(data, errors) as child:
        data.rename(tmp_path / "moved")
        assert child.wait(timeout_s=30) == 1
    assert SENTENCE in errors.read_text(), errors.read_text()
    assert not data.exists()
