"""A stranger fills the registry of a meta server with sound requests: it stays below its ceiling, others register."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

from fairway.errors import Refused
from fairway.limits import MIB
from fairway.protocol.route_messages import Act, Register, Registered
from fairway.registry import layout
from fairway.registry.layout import RegisteredCopy
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.process import Child
from tests.hostile.broker_attacks import peak_bytes
from tests.support.accounts import figures
from tests.support.client import Client
from tests.unit.lookup.remote_form import connect

MEMORY_MIB = 512
LARGE = "x" * 60_000
READY = re.compile(r"fairway meta: ready at meta://127\.0\.0\.1:(\d+) and http://127\.0\.0\.1:(\d+), .*")


async def _session(one: Client) -> int:
    return (await one.ask(Register(Act.OPEN, 0, number=120_000), Registered))[0].number


async def _fill(port: int, seconds: float) -> list[Client]:
    """Each connection opens one session after another, and registers copies that say as much as they may; none of them
    hangs up."""
    end = time.monotonic() + seconds
    clients = [await Client.connect(RealNet(), RealClock(), "127.0.0.1", port) for _ in range(3)]

    async def go_on(one: Client) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(Refused):
                session = await _session(one)
                for number in range(8):
                    directory = f"{random.getrandbits(64):016x}"
                    value = layout.pack(RegisteredCopy(directory, "127.0.0.1", 7, why_read_only=LARGE))
                    place = layout.member_path(f"group-{number}", layout.place_name(directory, session))
                    created = Register(Act.CREATE, session, place, value, is_ephemeral=True)
                    await one.ask(created, Registered)
                    await one.ask(Register(Act.WATCH, session, place), Registered)

    await asyncio.gather(*map(go_on, clients))
    return clients


async def _story(port: int, pages: str) -> None:
    good = await connect(port, 60_000)
    strangers = await _fill(port, 6)
    held, bounds = await asyncio.to_thread(figures, pages)
    assert held["sessions"] > bounds["sessions"] // 2, "they fill it"
    assert held["sessions"] <= bounds["sessions"]
    assert held["registry"] <= bounds["registry"]
    newcomer = await connect(port, 60_000)
    for registry, directory in ((good, "00000000000000a1"), (newcomer, "00000000000000b2")):
        path = layout.member_path("good", layout.place_name(directory, registry.session_id))
        await registry.create(path, layout.pack(RegisteredCopy(directory, "127.0.0.1", 7)), is_ephemeral=True)
        await registry.close()
    for one in strangers:
        one.abort()


def test_a_meta_server_stays_below_its_ceiling_and_others_register(tmp_path: Path) -> None:
    options = ("--registry", f"sqlite:{tmp_path / 'registry'}", "--port", "0", "--http-port", "0")
    memory = ("--memory-mib", str(MEMORY_MIB), "--buffer-mib", "66")
    for is_filled in (False, True):
        with Child("fairway", "meta", *options, *memory) as child:
            ready = READY.fullmatch(child.line(timeout_s=60) or "")
            assert ready
            if not is_filled:
                asyncio.run(_story(int(ready[1]), f"http://127.0.0.1:{ready[2]}"))
            assert peak_bytes(child.pid) < MEMORY_MIB * MIB
            os.kill(child.pid, signal.SIGTERM)
            assert child.wait(timeout_s=30) == 0
