"""A process that may have few descriptors: it says so and does not start, or serves as many as it can, or recovers."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fairway import limits
from fairway.errors import FairwayError, Unreachable
from fairway.runtime.process import Child
from tests.hostile.broker_attacks import client
from tests.support.client import Client, Stream
from tests.tidy.source import ROOT
from tests.unit.cli.running import READY_S
from tests.unit.cli.test_start_errors import ROLES, command

NEEDED = limits.SPARE_DESCRIPTORS + limits.CONNECTIONS_MIN
LAUNCHER = (
    "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)); "
    "os.execv(sys.executable, [sys.executable, '-m', 'fairway', *sys.argv[2:]])"
)


def limited(descriptors: int, *arguments: str) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, str(descriptors), *arguments]


@pytest.mark.parametrize("role", ROLES)
def test_a_server_with_too_few_descriptors_does_not_start_and_names_the_number(role: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for descriptors in (200, NEEDED - 1):
        ended = subprocess.run(
            limited(descriptors, *command(role, data), "--port", "0"),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert ended.returncode == 1, ended
        words = f"this process may have {descriptors} descriptors, and a server needs {NEEDED}"
        assert words in ended.stderr
        assert "ready" not in ended.stdout
        assert not data.exists(), "nothing was made"


def test_a_server_with_just_enough_descriptors_serves_so_many_and_tells_the_others(tmp_path: Path) -> None:
    async def story(port: int) -> None:
        served = [await client(port) for _ in range(limits.CONNECTIONS_MIN)]
        with pytest.raises(Unreachable, match=f"this broker has {limits.CONNECTIONS_MIN} connections"):
            await client(port)
        await served[-1].produce("orders", Stream(7).batch([b"one"]))
        for each in served:
            each.abort()
        await asyncio.sleep(0.1)

    process = subprocess.Popen(
        limited(NEEDED, "broker", "--data", str(tmp_path / "data"), "--port", "0"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
    )
    with process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found
            asyncio.run(story(int(found[1])))
        finally:
            process.kill()


async def served(port: int) -> Client | None:
    """A client that was answered, if it is."""
    try:
        async with asyncio.timeout(1):
            return await client(port)
    except (FairwayError, OSError, TimeoutError):
        return None


def test_a_server_that_runs_out_of_descriptors_says_so_and_recovers(tmp_path: Path) -> None:
    errors = tmp_path / "errors"

    def said(words: str) -> bool:
        return errors.exists() and words in errors.read_text(encoding="utf-8")

    async def until_said(words: str) -> None:
        async with asyncio.timeout(READY_S):
            while not said(words):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def story(pid: int, port: int) -> None:
        early = await served(port)
        assert early is not None
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        open_now = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 3, hard))
        crowd = [await served(port) for _ in range(8)]
        assert None in crowd, "there are no descriptors for all of them"
        await until_said("no descriptor is free")
        await early.produce("orders", Stream(7).batch([b"one"]))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        await until_said("descriptors are free again")
        async with asyncio.timeout(READY_S):
            while (late := await served(port)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await late.produce("orders", Stream(8).batch([b"two"]))
        for each in (early, late, *crowd):
            if each is not None:
                each.abort()
        await asyncio.sleep(0.1)

    arguments = ("broker", "--data", str(tmp_path / "data"), "--port", "0")
    with Child("fairway", *arguments, errors_to=errors) as child:
        found = re.search(r"127\.0\.0\.1:(\d+)", child.line(timeout_s=READY_S) or "")
        assert found
        asyncio.run(story(child.pid, int(found[1])))
        child.terminate()
        assert child.wait(timeout_s=READY_S) == 0
