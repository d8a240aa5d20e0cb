"""A broker on a bad disk, as a process: one that fails ends it with a sentence, one that is full stops produce alone.

The disk is a file system of its own in an image, where this user may mount one.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from fairway.errors import Code, Refused
from fairway.limits import DISK_LOW_WATER_BYTES, MIB
from tests.crash.power import NotAllowed, Rack, rack
from tests.hostile.broker_attacks import client
from tests.support.client import Client, ConnectionEnded, Stream
from tests.unit.cli.test_broker import running

IMAGE_BYTES = DISK_LOW_WATER_BYTES + 384 * MIB  # sparse: it takes what is written
PRODUCE_TRIES_MAX = 50


@pytest.fixture
def disk() -> Iterator[Rack]:
    try:
        with rack(IMAGE_BYTES) as mounted:
            yield mounted
    except NotAllowed as error:
        pytest.skip(str(error))


def test_a_disk_that_fails_ends_the_process_with_a_sentence(disk: Rack, capfd: pytest.CaptureFixture[str]) -> None:
    async def use(port: int) -> None:
        one = await client(port)
        stream = Stream(1)
        await one.produce("orders", stream.batch([b"safe"]))
        disk.cut()
        with pytest.raises(ConnectionEnded):  # and not an answer: nobody knows what is on disk
            await one.produce("orders", stream.batch([b"lost"]))

    with running(disk.root) as (child, port, _):
        asyncio.run(use(port))
        assert child.wait(timeout_s=30) == 1
    sentences = capfd.readouterr().err.strip().splitlines()
    assert len(sentences) == 1
    assert re.match(r"\S+Z fairway broker: ", sentences[0]), "the time, then the sentence"
    assert "Input/output error" in sentences[0]
    disk.restore()
    with running(disk.root) as (_, port, _):
        assert asyncio.run(_payloads(port)) == [b"safe"]


async def _payloads(port: int) -> list[bytes]:
    one = await client(port)
    await one.join("orders", "group", "ann")
    got = await one.pull("orders", "group", "ann")
    one.abort()
    return list(got.payloads.values())


def test_a_full_disk_stops_produce_while_acks_go_on(disk: Rack) -> None:
    filler = disk.mounted_at / "filler"

    def fill() -> None:
        room = shutil.disk_usage(disk.mounted_at).free
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room - DISK_LOW_WATER_BYTES // 2)

    with running(disk.root, "--http-port", "0") as (child, port, pages):
        asyncio.run(_until_full_and_back(port, fill, filler.unlink))
        with urllib.request.urlopen(f"{pages}/metrics") as answer:
            assert b'fairway_refusals_total{code="read_only"} ' in answer.read()
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout_s=30) == 0


async def _until_full_and_back(port: int, fill: Callable[[], None], empty: Callable[[], None]) -> None:
    one, stream = await client(port), Stream(2)
    await one.join("orders", "group", "ann")
    await one.produce("orders", stream.batch([b"x"] * 100))
    fill()
    refused = await _refusal(one, stream)
    assert refused.code is Code.READ_ONLY
    assert refused.retry_after_ms is not None
    stream.next -= 1  # what was refused was not stored
    arrived = await _ack_all(one)
    assert arrived >= 100 // 10
    empty()
    await one.produce("orders", stream.batch([b"y"]))
    got = await one.pull("orders", "group", "ann", arrived=arrived, wait_ms=5_000)
    assert list(got.payloads.values()) == [b"y"]
    one.abort()


async def _refusal(one: Client, stream: Stream) -> Refused:
    """Produce until it is refused: the broker looks at the disk after every sync."""
    for _ in range(PRODUCE_TRIES_MAX):
        try:
            await one.produce("orders", stream.batch([b"x"]))
        except Refused as refused:
            return refused
    raise AssertionError("a full disk took everything")


async def _ack_all(one: Client) -> int:
    """Ten at a time; the number of the last response."""
    arrived = 0
    while True:
        got = await one.pull("orders", "group", "ann", arrived=arrived, messages_max=10)
        if not got.lots:
            return arrived
        arrived = got.number
        settled = await one.settle("orders", "group", "ann", got.lots, arrived=arrived)
        assert settled.settled == len(got.payloads)
