"""A disk that takes no more writes: the process ends with a sentence, and not with status 0.

The kernel refuses every write of a process to a file beyond its limit of file sizes: at 0 that is as good as a dead
disk. What the process says goes to a pipe, which has no such limit."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fairway
from tests.unit.cli.running import spawn

END_S = 30.0
SENTENCE = re.compile(r"^\S+Z fairway up: cannot write .*; stop, check the device", re.MULTILINE)


@contextmanager
def up(data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with spawn("", "up", "--data", str(data), "--port", "0") as process:
        assert process.stdout is not None
        ready = re.search(r"ready at (fairway://[\d.]+:\d+)", process.stdout.readline())
        assert ready
        yield process, ready[1]


def kill_disk(process: subprocess.Popen[str]) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))


def ended(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 1, said
    assert SENTENCE.search(said), said


@pytest.mark.parametrize("after", [None, 5_000])
def test_up_ends_when_its_disk_dies(tmp_path: Path, after: int | None) -> None:
    with up(tmp_path / "data") as (process, url):
        client = fairway.connect(url)
        client.send("order.remind", b"far", after=5_000).result()
        client.send("order.remind", b"now").result()
        kill_disk(process)
        sending = client.send("order.remind", b"more", after=after)
        ended(process)
        with pytest.raises(ExceptionGroup, match="sent and not stored"):
            client.close(timeout=0.1)
        assert isinstance(sending.exception(), fairway.OutcomeUnknown | fairway.NotSent), "nobody has said it is stored"


def test_up_ends_by_sigterm_although_its_disk_is_dead(tmp_path: Path) -> None:
    with up(tmp_path / "data") as (process, url):
        with fairway.connect(url) as client:
            client.send("order.remind", b"far", after=5_000).result()
        kill_disk(process)
        process.terminate()
        ended(process)
