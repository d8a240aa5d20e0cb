"""Ways to be a bad client, each against a living broker. What they have in common: none may hurt anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fairway import batch
from fairway.errors import FairwayError, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Scan, Scanned
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from tests.hostile.memory_attacks import MEMORY_ATTACKS
from tests.support.client import Client, ConnectionEnded, Stream
from tests.support.raw import MIB, PING, Raw, beginning_of_a_frame

HOST = "127.0.0.1"
FRAME_BYTES = 66 * MIB
NAMES = ("../../etc/passwd", "..", ".", "a/b", "a\\b", "a\0b", "", " ", "x" * 201, "x" * 100_000, "ä", "inbox:a:b")

Attack = Callable[[int], Awaitable[None]]
LISTED = "listed"
GOOD = "good"  # how the subjects of clients begin that attacks go on beside
_BEFORE_GOOD = GOOD[:-1]  # in the order of names
_AGAIN_S = 0.1  # before an attack that failed begins again


class Breach(AssertionError):
    """The broker granted something that it must never grant, whatever else goes on."""


def allow_descriptors() -> None:
    """Two thousand connections need as many descriptors on this side too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert max(soft, hard) >= 4_000, "two thousand connections and more do not fit into this process's limit"


def give_way(pid: int, nice: int) -> None:
    """Set how much a process yields to others, from -20 to 19; where sessions share the processor, its session too."""
    for thread in Path(f"/proc/{pid}/task").iterdir():  # each has a value of its own; who writes the log has a thread
        os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


def resident_bytes(pid: int) -> int:
    """What a process has in memory now."""
    return _status_bytes(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most that a process has had in memory."""
    return _status_bytes(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Count the peak from now on, where the system allows it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1_024
    raise AssertionError(f"process {pid} is gone")


async def connect(port: int, *, greet: bool = True) -> Raw:
    return await Raw.connect(RealNet(), HOST, port, greet=greet)


async def client(port: int) -> Client:
    return await Client.connect(RealNet(), RealClock(), HOST, port)


async def _ended(raws: list[Raw], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.gather(*(raw.lost for raw in raws))


async def random_bytes(port: int) -> None:
    """Noise, before and after the handshake: every one of them is hung up on."""
    rng = random.Random(1)
    for is_greeted in (False, True):
        raws = [await connect(port, greet=is_greeted) for _ in range(50)]
        for raw in raws:
            raw.send(b"\xff\xff\xff\xff" + rng.randbytes(rng.randrange(64, 20_000)))
        await _ended(raws)


async def reconnect_storm(port: int, *, seconds: float = 2) -> None:
    """Come, say something rude, go, come again; wait for nothing."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        raws = await asyncio.gather(*(connect(port, greet=False) for _ in range(20)))
        for raw in raws:
            raw.send(b"\xff" * 64)
            raw.abort()


async def giant_lengths(port: int) -> None:
    """Headers that promise more than any frame may have are refused before anything else is read."""
    raws = [await connect(port) for _ in range(50)]
    for number, raw in enumerate(raws):
        head = bytearray(beginning_of_a_frame(FRAME_BYTES, 64))
        size = (1 << 32) - 8 if number % 2 else FRAME_BYTES + 8
        head[:4] = size.to_bytes(4, "little")
        raw.send(head)
    await _ended(raws)


async def half_frames(port: int, *, connections: int = 20, sent: int = 33 * MIB) -> None:
    """Half of the largest frame, on many connections, and then silence. The broker keeps what it has room for."""
    half = beginning_of_a_frame(FRAME_BYTES, sent)
    raws = []
    for _ in range(connections):
        raw = await connect(port)
        raw.send(half)
        raws.append(raw)
        await asyncio.wait_for(raw.sent(), 20)  # it must be taken, or refused
    await asyncio.sleep(0.2)
    assert sum(raw.is_lost for raw in raws) > connections // 2, "most of them had to make room"
    for raw in raws:
        raw.abort()


async def slow_senders(port: int, *, seconds: float = 3) -> None:
    """One byte at a time, of a frame that is sound so far."""
    raws = [await connect(port) for _ in range(100)]
    head = beginning_of_a_frame(MIB, 4_096)
    for at in range(int(seconds * 50)):
        for raw in raws:
            raw.send(head[at : at + 1])
        await asyncio.sleep(0.02)
    assert not any(raw.is_lost for raw in raws)
    for raw in raws:
        raw.abort()


async def flood_of_pings(port: int) -> None:
    """More questions than anybody has: hung up on."""
    raws = [await connect(port) for _ in range(20)]
    for raw in raws:
        raw.send(PING * 60_000)
    await _ended(raws)


async def flood_of_requests(port: int) -> None:
    """Far more than may be in flight, and their answers are not read: no longer listened to."""
    raws = [await connect(port) for _ in range(20)]
    for raw in raws:
        raw.stop_reading()
        raw.connection.requests_max = 1 << 30
        for _ in range(3_000):
            raw.ask(Describe(Depth.SUBJECTS))
    await asyncio.sleep(1.5)
    for raw in raws:
        raw.abort()


async def deaf_consumers(port: int) -> None:
    """A thousand large answers asked for at once, on several connections, and none read."""
    healthy = await client(port)
    stream = Stream(random.Random().getrandbits(63))
    for _ in range(4):
        await healthy.produce("large", stream.batch([random.Random(5).randbytes(900_000)]))
    raws = [await connect(port) for _ in range(20)]
    for raw in raws:
        raw.stop_reading()
        for _ in range(1_000):
            raw.ask(Scan("large", m.Whence.EARLIEST, 0, None, MIB))
    await asyncio.sleep(2)
    assert await _scanned(healthy)
    for raw in raws:
        raw.abort()
    healthy.abort()


async def _scanned(healthy: Client) -> bool:
    """Whether somebody who reads gets the same answer, at the latest when the others have been refused theirs."""
    for _ in range(100):
        try:
            scanned, _batches = await healthy.ask(Scan("large", m.Whence.EARLIEST, 0, None, MIB), Scanned)
        except Refused as refused:
            await asyncio.sleep((refused.retry_after_ms or 0) / 1_000)
        else:
            return bool(scanned.batches)
    return False


async def bad_names(port: int) -> None:
    """Every name that is none is refused, and the connection goes on."""
    one = await client(port)
    for name in NAMES:
        for asked in (
            one.produce(name, Stream(3).batch([b"a"])),
            one.join(name, "group", "consumer"),
            one.join("subject", name, "consumer"),
            one.join("subject", "group", name),
            one.pull(name, name, name),
            one.ask(Scan(name, m.Whence.EARLIEST, 0, None, 1), Scanned),
        ):
            try:
                await asked
            except Refused:
                continue
            raise Breach(f"{name!r} was taken for a name")
    one.abort()


async def bad_batches(port: int) -> None:
    """A batch with any one bit flipped, or cut short, is never stored."""
    rng = random.Random(2)
    sound = Stream(4).batch([b"a" * 100] * 10)
    for _ in range(60):
        bad = bytearray(sound)
        bad[rng.randrange(28, len(bad))] ^= 1 << rng.randrange(8)
        one = await client(port)
        try:
            await one.produce("orders", bytes(bad))
        except (Refused, ConnectionEnded, FairwayError):
            one.abort()
            continue
        raise Breach("a damaged batch was stored")


async def false_consumers(port: int, *, connections: int = 10, seconds: float = 2) -> None:
    """Act under the ids of consumers that are connected, which `describe` shows: none of it is granted."""
    secrets = (b"", bytes(range(16)), bytes(64))
    until = time.monotonic() + seconds

    async def one_of_them(number: int) -> None:
        one = await client(port)
        while time.monotonic() < until:
            seen, _ = await one.ask(Describe(Depth.CONSUMERS, after=_BEFORE_GOOD), Described)
            for place, lots in _connected_consumers(seen):
                asked = (
                    one.join(*place, arrived=number, secret=secrets[number % len(secrets)]),
                    one.pull(*place),
                    *(one.settle(*place, lots, kind=kind) for kind in m.Settlement),
                    one.ask(m.Heartbeat(*place, number), m.Renewed),
                    one.ask(m.Leave(*place, number), m.Done),
                )
                for each in asked:
                    try:
                        await each
                    except Refused:
                        continue
                    raise Breach(f"somebody acted as {place}")
        one.abort()

    await asyncio.gather(*map(one_of_them, range(connections)))


def _connected_consumers(seen: Described) -> list[tuple[tuple[str, str, str], list[m.WireLot]]]:
    """The places of good clients' consumers that have a connection, and all that their group has handed out. Consumers
    of other attacks renew no lease: their places fall free."""
    return [
        ((subject.name, group.name, consumer.name), [m.WireLot(0, 1, [m.SequenceRange(0, max(group.cursor, 1))])])
        for subject in seen.subjects
        if subject.name.startswith(GOOD)
        for group in subject.groups
        for consumer in group.consumers
        if consumer.address
    ]


async def new_names(port: int, *, seconds: float = 3) -> None:
    """Twenty connections ask for subjects that do not exist, each for another one every time, and are refused."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def ask_on() -> None:
        one = await client(port)
        rng = random.Random()
        while loop.time() < end:
            name = f"new-{rng.getrandbits(63):x}"
            with contextlib.suppress(Refused):
                await one.pull(name, "group", "ann")
            stream = Stream(rng.getrandbits(63))
            stream.batch([b"the first one, which is never sent"])
            with contextlib.suppress(Refused):
                await one.produce(name, stream.batch([b"x"]))
        one.abort()

    await asyncio.gather(*(ask_on() for _ in range(20)))


async def waiting_scans(port: int) -> None:
    """As many long polls as may be in flight, with as much in each as it may have, on several connections; then all
    hang up."""
    healthy = await client(port)
    await healthy.produce("quiet", Stream(random.Random().getrandbits(63)).batch([b"x"]))
    healthy.abort()
    raws = [await connect(port) for _ in range(20)]
    tags = ["x" * 128] * 16
    for raw in raws:
        for _ in range(1_000):
            raw.ask(Scan("quiet", m.Whence.LATEST, 0, None, MIB, wait_ms=60_000, tags=tags))
    await asyncio.sleep(1.5)
    for raw in raws:
        raw.abort()


async def large_batches(port: int, *, seconds: float = 3) -> None:
    """Twenty connections send valid batches of a few KB that hold 8 MiB each: to check one takes 10 ms."""
    end = time.monotonic() + seconds

    async def send_on(number: int) -> None:
        one = await client(port)
        producer_id, sent = random.Random().getrandbits(63), 0
        while time.monotonic() < end:
            data = batch.encode(
                [bytes(8 * MIB)], producer_id=producer_id, first_sequence=sent, created_ms=1, codec=batch.Codec.ZSTD
            )
            with contextlib.suppress(Refused):
                await one.produce(f"compressed-{number}", data)
                sent += 1
        one.abort()

    await asyncio.gather(*map(send_on, range(20)))


async def large_frames(port: int, *, senders: int = 12) -> None:
    """Each sends one of the largest frames, all at once: they are read one after the other, and all are answered."""
    payload = random.Random(6).randbytes(63 * MIB)
    raws = [await connect(port) for _ in range(senders)]
    for raw in raws:
        raw.ask(m.Produce("large-frames"), (Stream(random.Random().getrandbits(63)).batch([payload]),))
    async with asyncio.timeout(60):
        while not all(raw.answered or raw.is_lost for raw in raws):  # noqa: ASYNC110  a Raw does not say when
            await asyncio.sleep(0.1)
    assert sum(raw.answered for raw in raws) >= senders // 2, "most of them were read to their end"
    for raw in raws:
        raw.abort()


async def endless_lists(port: int, *, groups: int = 300, seconds: float = 3) -> None:
    """Ten connections list hundreds of groups, over and over."""
    one = await client(port)
    for number in range(groups):
        await one.join(LISTED, f"group-{number}", f"consumer-{random.Random().getrandbits(63):x}")
    end = time.monotonic() + seconds

    async def list_on() -> None:
        reader = await client(port)
        while time.monotonic() < end:
            with contextlib.suppress(Refused):
                await reader.ask(Describe(Depth.CONSUMERS, LISTED), Described)
        reader.abort()

    await asyncio.gather(*(list_on() for _ in range(10)))
    one.abort()


async def idle_connections(port: int, *, connections: int = 2_000) -> list[Raw]:
    """Well behaved, and very many."""
    raws: list[Raw] = []
    for _ in range(connections // 100):
        raws += await asyncio.gather(*(connect(port) for _ in range(100)))
    return raws


ATTACKS: tuple[Attack, ...] = (
    random_bytes,
    reconnect_storm,
    giant_lengths,
    slow_senders,
    flood_of_pings,
    flood_of_requests,
    bad_names,
    bad_batches,
    deaf_consumers,
    half_frames,
    false_consumers,
    new_names,
    waiting_scans,
    large_batches,
    large_frames,
    endless_lists,
    *MEMORY_ATTACKS,
)


def main(name: str, port: str, nice: str, *modes: str) -> None:
    """`python -m tests.hostile.broker_attacks NAME PORT NICE [together]`: one attack, over and over, until killed.

    The process may be a nice one, whatever its connections are: what it takes from the machine is not what it does to
    the broker. `together`: other attacks go on at the same time, so an attack that does not come to its end begins
    again; only a `Breach` ends it.
    """
    give_way(os.getpid(), int(nice))
    allow_descriptors()
    [attack] = [each for each in ATTACKS if each.__name__ == name]
    print("begun", flush=True)
    asyncio.run(_over_and_over(attack, int(port), is_alone="together" not in modes))


async def _over_and_over(attack: Attack, port: int, *, is_alone: bool) -> None:
    while True:
        try:
            await attack(port)
        except Breach:
            raise
        except (AssertionError, OSError, ConnectionEnded, FairwayError):  # a time-out is an OSError
            if is_alone:
                raise
            await asyncio.sleep(_AGAIN_S)
        print("again", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
