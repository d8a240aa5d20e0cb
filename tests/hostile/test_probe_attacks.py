"""Clients that hold the connections for probes, and take each again that they lose: a probe still gets in, every
time."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from pathlib import Path

from fairway.serving.http import CONNECTIONS_MAX
from tests.unit.cli.test_broker import running

HOLDERS = CONNECTIONS_MAX + 6
PROBES = 30


class Holder(asyncio.Protocol):
    """Half a request, and nothing more."""

    def __init__(self) -> None:
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"GET /livez HT")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)


async def hold(port: int) -> None:
    """A connection, and another as soon as it is gone."""
    while True:
        with contextlib.suppress(OSError):
            transport, holder = await asyncio.get_running_loop().create_connection(Holder, "127.0.0.1", port)
            try:
                await asyncio.shield(holder.gone)
            finally:
                transport.abort()
        await asyncio.sleep(0.05)


async def probe_under_attack(port: int) -> list[int]:
    holders = [asyncio.create_task(hold(port)) for _ in range(HOLDERS)]
    await asyncio.sleep(0.5)
    statuses = [await asyncio.to_thread(status_of, f"http://127.0.0.1:{port}/livez") for _ in range(PROBES)]
    for each in holders:
        each.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    await asyncio.sleep(0.1)  # for the transports to close
    return statuses


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except OSError:
        return 0


def test_recycled_connections_lock_no_probe_out(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--http-port", "0") as (_, _, ready):
        found = re.search(r"http://127\.0\.0\.1:(\d+)", ready)
        assert found, ready
        assert asyncio.run(probe_under_attack(int(found[1]))) == [200] * PROBES
