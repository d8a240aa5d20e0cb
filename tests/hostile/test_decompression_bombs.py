"""Readers under decompression bombs: stored batches of 2 KiB that hold 64 MiB each. Their memory stays bounded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway import batch, limits
from fairway.limits import MIB
from tests.hostile.broker_attacks import client
from tests.unit.cli.test_broker import running

BOMBS = 24  # 1.5 GiB in all, and twice that with the payloads beside the columns
MESSAGES = 4  # in each
PAYLOAD_BYTES = limits.BATCH_RAW_BYTES_MAX - 64
# One batch is decoded at a time: its columns, its payloads, the message that the program has not let go of yet, and
# the copy that is being printed. In all at most five times the largest batch.
GROWTH_BYTES_MAX = 400 * MIB
READERS = {
    "consume": ("consume", "{subject}", "--group", "g", "--count", "{count}"),
    "tail": ("tail", "{subject}", "--from", "earliest", "--count", "{count}"),
}


def bomb(first_sequence: int) -> bytes:
    """A batch of the largest raw length, which zstd makes very small."""
    payloads = [b"x" * (PAYLOAD_BYTES // MESSAGES)] * MESSAGES
    return batch.encode(payloads, producer_id=7, first_sequence=first_sequence, created_ms=1, codec=batch.Codec.ZSTD)


async def _fill(port: int) -> None:
    one = await client(port)
    assert len(bomb(0)) < 8 * limits.KIB
    for number in range(BOMBS):
        await one.produce("bombs", bomb(number * MESSAGES))
        await one.produce("small", batch.encode([b"x"], producer_id=8, first_sequence=number, created_ms=1))
    one.abort()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a broker that stores bombs."""
    with running(tmp_path_factory.mktemp("bombs") / "data") as (_, port, _):
        asyncio.run(_fill(port))
        yield port


def peak_bytes(port: int, reader: str, subject: str, count: int) -> int:
    """The most memory that a command had in use."""
    words = [word.format(subject=subject, count=count) for word in READERS[reader]]
    command = [sys.executable, "-m", "fairway", *words, "--url", f"fairway://127.0.0.1:{port}"]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _high_water_bytes(process.pid))
            time.sleep(0.02)
    assert process.returncode == 0
    return peak


def _high_water_bytes(pid: int) -> int:
    """The kernel's own mark, which never falls: between two looks nothing is missed but the last moment."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next((int(line.split()[1]) * 1_024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_decodes_bombs_within_its_budget(port: int, reader: str) -> None:
    rest = peak_bytes(port, reader, "small", BOMBS)
    peak = peak_bytes(port, reader, "bombs", BOMBS * MESSAGES)
    assert peak - rest < GROWTH_BYTES_MAX
