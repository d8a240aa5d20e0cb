"""A busy scenario whose trace hash must depend on the seed alone: tasks, timers, connections, every fault of the net.

`python -m tests.simulation.busy SEED` prints the hash, so that processes with other hash seeds can be compared. With
`--planted` the scenario does what product code must not (it iterates a set), which the hash has to show.
"""

from __future__ import annotations

import asyncio
import sys

from fairway.errors import Unreachable
from fairway.simulation import Simulation, simulate
from fairway.simulation.wire import Conditions

CLIENTS = ("alice", "bob", "carol", "dave")
PORT = 9_000


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Caller(asyncio.Protocol):
    def __init__(self) -> None:
        self.got = bytearray()
        self.lost = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def call_again_and_again(world: Simulation, name: str, echoed: asyncio.Queue[int]) -> None:
    """Dial, send, hang up or be cut off, dial again."""
    for turn in range(10):
        try:
            transport, caller = await world.net.host(name).connect(Caller, "server", PORT)
        except Unreachable:
            await asyncio.sleep(1)
            continue
        transport.write(name.encode() * (100 * turn + 1))
        try:
            await asyncio.wait_for(caller.lost.wait(), timeout=0.5)
        except TimeoutError:
            transport.close()
        await echoed.put(len(caller.got))


async def make_trouble(world: Simulation) -> None:
    rng = world.rng.child("trouble")
    for _ in range(8):
        await asyncio.sleep(rng.below(1_000) / 1_000)
        victim = CLIENTS[rng.below(len(CLIENTS))]
        match rng.below(3):
            case 0:
                world.net.drop(victim)
            case 1:
                world.net.partition(victim, "server", one_way=bool(rng.below(2)))
                await asyncio.sleep(rng.below(300) / 1_000)
                world.net.heal(victim, "server")
            case _:
                world.net.crash("server")
                await asyncio.sleep(0.1)
                await world.net.host("server").listen(Echo, "", PORT)


async def count(echoed: asyncio.Queue[int]) -> int:
    total = 0
    while True:
        try:
            async with asyncio.timeout(300):
                total += await echoed.get()
        except TimeoutError:
            return total


async def tick(world: Simulation, name: str) -> None:
    for number in range(20):
        await asyncio.sleep(0.25)
        world.loop.note(f"{name} {number}")


async def scenario(world: Simulation, *, planted: bool = False) -> int:
    await world.net.host("server").listen(Echo, "", PORT)
    for name in CLIENTS:
        world.net.host(name)
    echoed: asyncio.Queue[int] = asyncio.Queue(maxsize=3)
    tickers = {f"ticker-{number}" for number in range(20)}
    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count(echoed))
        group.create_task(make_trouble(world))
        for name in CLIENTS:
            group.create_task(call_again_and_again(world, name, echoed))
        for name in tickers if planted else sorted(tickers):
            group.create_task(tick(world, name))
    return counting.result()


def run(seed: int, *, planted: bool = False) -> tuple[int, str]:
    """The bytes that were echoed, and the trace hash."""
    return simulate(lambda world: scenario(world, planted=planted), seed, conditions=Conditions(drop_chance=0.002))


if __name__ == "__main__":
    sys.stdout.write(run(int(sys.argv[1]), planted="--planted" in sys.argv)[1])
