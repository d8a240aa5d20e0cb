"""`fairway broker` as a process: ready, used, stopped; and every way in which it does not start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.process import Child
from tests.support.client import Client, Stream
from tests.tidy.source import ROOT
from tests.unit.cli.directories import make, tree

READY_S = 60.0
READY = re.compile(
    r"fairway broker: ready at fairway://127\.0\.0\.1:(\d+)(?: and (http://127\.0\.0\.1:\d+))?, data in .+"
)


@contextmanager
def running(data: Path, *options: str) -> Iterator[tuple[Child, int, str]]:
    """A broker that is ready: the process, its port, its pages."""
    with Child("fairway", "broker", "--data", str(data), "--port", "0", *options) as child:
        ready = READY.fullmatch(child.line(timeout_s=READY_S) or "")
        assert ready
        yield child, int(ready[1]), ready[2] or ""


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fairway", "broker", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
    )


async def _produce(port: int, first: int) -> None:
    client = await Client.connect(RealNet(), RealClock(), "127.0.0.1", port)
    stream = Stream(1)
    stream.next = first
    await client.produce("orders", stream.batch([b"a", b"b"]))
    client.close()
    async with asyncio.timeout(30):
        while not client.is_gone:  # noqa: ASYNC110  else the transport outlives its loop, and a later test is blamed
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("durability", ["sync", "memory"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_a_signal_stops_it_cleanly(tmp_path: Path, number: int, durability: str) -> None:
    for life in range(2):
        with running(tmp_path / "data", "--http-port", "0", "--durability", durability) as (child, port, pages):
            asyncio.run(_produce(port, first=2 * life))
            with urllib.request.urlopen(f"{pages}/readyz") as answer:
                assert answer.read() == b"ready\n"
            with urllib.request.urlopen(f"{pages}/metrics") as answer:
                assert b"fairway_produced_messages_total 2\n" in answer.read()
            os.kill(child.pid, number)
            assert child.wait(timeout_s=30) == 0
    assert list((tmp_path / "data" / "checkpoints").iterdir())


def test_a_connected_client_does_not_keep_it_from_stopping(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (child, port, _), socket.create_connection(("127.0.0.1", port)):
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout_s=30) == 0


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (child, _, _):
        second = run("--data", str(tmp_path / "data"), "--port", "0")
        assert (second.returncode, second.stdout) == (1, "")
        assert f"process {child.pid} is using it" in second.stderr
        assert second.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_refused_and_the_directory_left_in_order(tmp_path: Path) -> None:
    with running(tmp_path / "one") as (_, port, _):
        second = run("--data", str(tmp_path / "two"), "--port", str(port))
    assert second.returncode == 1
    assert second.stderr.startswith(f"fairway broker: cannot listen on 127.0.0.1:{port}: ")
    with running(tmp_path / "two"):
        pass


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    before = tree(tmp_path)
    done = run("--data", str(tmp_path / "photos"), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("fairway broker: ")
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "data", batches=1)
    (tmp_path / "data").chmod(0o500)
    done = run("--data", str(tmp_path / "data"), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("fairway broker: ")


def test_an_address_that_others_reach_must_be_meant(tmp_path: Path) -> None:
    done = run("--data", str(tmp_path / "data"), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--allow-remote" in done.stderr
    assert not (tmp_path / "data").exists()


def test_the_data_directory_must_be_named() -> None:
    done = run()
    assert done.returncode == 2
    assert "--data DIR" in done.stderr
