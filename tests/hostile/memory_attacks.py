"""Ways to fill the memory of a broker with valid requests: each fills one account, over many names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from fairway.errors import Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever, Switch, Switched
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from tests.support.client import Client, Stream

HOST = "127.0.0.1"
LONG_NAME = 200  # characters: what a name may have
_LEASE_MS = 600_000  # an attacker takes the longest that serves it: what it holds does not come back by itself
_numbers = itertools.count(random.Random(os.getpid()).getrandbits(40) << 20)


async def _client(port: int) -> Client:
    return await Client.connect(RealNet(), RealClock(), HOST, port)


def _new_name(what: str) -> str:
    return f"{what}-{next(_numbers):x}".ljust(LONG_NAME, "x")


async def _fill(one: Client, subject: str, count: int, *, keys: bool = False) -> None:
    """So many small messages on the subject, with a key each that no other has."""
    stream = Stream(next(_numbers))
    for start in range(0, count, 4_000):
        some = range(start, min(start + 4_000, count))
        data = stream.batch([b"x"] * len(some), [f"key-{each}" for each in some] if keys else None)
        await one.produce(subject, data)


async def _join(one: Client, subject: str, group: str, consumer: str, **policies: object) -> None:
    stated = msgspec.msgpack.encode({"lease_ms": _LEASE_MS, **policies})
    await one.ask(m.Join(subject, group, consumer, 0, 0, policies=stated), m.Joined)


async def _until(seconds: float, step: Callable[[], Awaitable[object]], *, width: int = 16) -> None:
    """Step after step, several at a time. An attacker that is refused asks again at once: that is what attackers do."""
    end = time.monotonic() + seconds

    async def go_on() -> None:
        while time.monotonic() < end:
            try:
                await step()
            except Refused:
                await asyncio.sleep(0.001)

    await asyncio.gather(*(go_on() for _ in range(width)))


async def hold(one: Client, subject: str, *, lease_ms: int, messages: int) -> None:
    """A consumer that takes everything in lots of one message, and acks nothing."""
    await _fill(one, subject, messages)
    await _join(one, subject, "held", "greedy", lot_messages_max=1, lease_ms=lease_ms)
    arrived = 0
    while (got := await one.pull(subject, "held", "greedy", arrived=arrived)).lots:
        arrived = got.number


async def drain(one: Client, subject: str) -> None:
    """Another consumer of that group acks whatever it gets."""
    await _join(one, subject, "held", "good")
    while (got := await one.pull(subject, "held", "good", arrived=1 << 40)).lots:
        await one.settle(subject, "held", "good", got.lots, arrived=got.number)


async def keyed_groups(port: int, *, groups: int = 165, messages: int = 40_000, seconds: float = 3) -> None:
    """One connection pulls in many groups that are ordered by key, from a subject where each message has its own key,
    and acks nothing."""
    one = await _client(port)
    subject = "keyed"
    await _fill(one, subject, messages, keys=True)
    names = [_new_name("keyed") for _ in range(groups)]
    arrived = dict.fromkeys(names, 0)
    turn = itertools.cycle(names)
    for name in names:
        with contextlib.suppress(Refused):
            await _join(one, subject, name, "ann", order="key")

    async def pull() -> None:
        name = next(turn)
        arrived[name] = (await one.pull(subject, name, "ann", arrived=arrived[name])).number or arrived[name]

    await _until(seconds, pull)
    one.abort()


async def many_lots(port: int, *, groups: int = 30, messages: int = 20_000, seconds: float = 3) -> None:
    """One connection pulls in many groups whose lots have one message each, gives half of them back with a reason that
    nobody gave before, and acks nothing."""
    one = await _client(port)
    subject = "lots"
    await _fill(one, subject, messages)
    names = [_new_name("lots") for _ in range(groups)]
    arrived = dict.fromkeys(names, 0)
    turn = itertools.cycle(names)
    for name in names:
        with contextlib.suppress(Refused):
            await _join(one, subject, name, "ann", lot_messages_max=1, attempts_max=1_000)

    async def pull() -> None:
        name = next(turn)
        got = await one.pull(subject, name, "ann", arrived=arrived[name])
        arrived[name] = got.number or arrived[name]
        outcomes = [
            m.Settle(m.Settlement.RETRY, lot.first, lot.attempt, lot.spans, 1, _new_name("why"))
            for lot in got.lots[::2]
        ]
        if outcomes:
            await one.ask(m.SettleAll(subject, name, "ann", outcomes, got.number), m.Settled)

    await _until(seconds, pull)
    one.abort()


async def many_members(port: int, *, groups: int = 20, seconds: float = 3) -> None:
    """One connection joins the same few groups under one name after another, and pauses consumers that nobody knows."""
    one = await _client(port)
    names = [_new_name("members") for _ in range(groups)]
    turn = itertools.cycle(names)

    async def join() -> None:
        group = next(turn)
        await _join(one, "members", group, _new_name("consumer"))
        paused = Switch(Lever.PAUSE_CONSUMER, is_on=True, subject="members", group=group, consumer=_new_name("c"))
        await one.ask(paused, Switched)

    await _until(seconds, join)
    one.abort()


async def many_groups(port: int, *, connections: int = 4, seconds: float = 3) -> None:
    """Groups with the longest names, one after another, from several connections."""

    async def make() -> None:
        one = await _client(port)
        await _until(seconds, lambda: _join(one, "groups", _new_name("group"), _new_name("consumer")))
        one.abort()

    await asyncio.gather(*(make() for _ in range(connections)))


async def many_streams(port: int, *, connections: int = 4, seconds: float = 3) -> None:
    """Each batch is the first of a stream of its own, with a secret of its own."""

    async def send() -> None:
        one = await _client(port)

        async def step() -> None:
            stream = Stream(next(_numbers))
            produce = m.Produce("streams", secret=stream.producer_id.to_bytes(16, "little"))
            batches = [stream.batch([b"x"]) for _ in range(32)]
            await asyncio.gather(*(one.ask(produce, m.Produced, [data]) for data in batches))

        await _until(seconds, step)
        one.abort()

    await asyncio.gather(*(send() for _ in range(connections)))


async def many_subjects(port: int, *, connections: int = 4, seconds: float = 3) -> None:
    """One message each to subjects with the longest names."""

    async def send() -> None:
        one = await _client(port)
        await _until(seconds, lambda: one.produce(_new_name("subject"), Stream(next(_numbers)).batch([b"x"])))
        one.abort()

    await asyncio.gather(*(send() for _ in range(connections)))


MEMORY_ATTACKS: tuple[Callable[[int], Awaitable[None]], ...] = (
    keyed_groups,
    many_lots,
    many_members,
    many_groups,
    many_streams,
    many_subjects,
)
