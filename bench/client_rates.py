"""The Python client against a local broker: send, send_many, consume + ack one by one and in lists; who burns the CPU.

`python -m bench.client_rates [--messages N] [--rounds N] [--durability sync|memory] [--profile PHASE]`. Ratios are to
`send`, one call per message; the CPU time is per message, of the client's process and of the broker's. `singles` may
not be batched: each is a request of its own, as many in flight as sixteen subjects allow; they are a tenth of N.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import fairway
import fairway.aio
from bench.kernel_counters import cpu_s
from bench.machine import describe
from fairway.runtime.process import Child

PAYLOAD = bytes(100)
SUBJECTS = 16  # of singles: a stream has 64 requests in flight at most, and is of one subject
SINGLES = ("singles", "aio singles")
ONE_PER_REQUEST = fairway.ClientOptions(producer=fairway.ProducerOptions(batch_messages_max=1, linger_ms=0, window=64))
READY = re.compile(r"fairway broker: ready at (fairway://[\d.:]+), data in .+")


@contextmanager
def broker(durability: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a broker of its own."""
    with tempfile.TemporaryDirectory() as data:
        options = ("broker", "--data", data, "--port", "0", "--durability", durability)
        with Child("fairway", *options) as child:
            found = READY.fullmatch(child.line(timeout_s=60) or "")
            if found is None:
                raise RuntimeError("the broker did not start")
            yield found[1], child.pid


def send(url: str, subject: str, count: int) -> None:
    with fairway.connect(url) as client:
        for _ in range(count):
            client.send(subject, PAYLOAD)


def send_many(url: str, subject: str, count: int) -> None:
    payloads = [PAYLOAD] * 10_000
    with fairway.connect(url) as client:
        for _ in range(count // len(payloads)):
            client.send_many(subject, payloads)


def send_singles(url: str, subject: str, count: int) -> None:
    with fairway.connect(url, options=ONE_PER_REQUEST) as client:
        for number in range(count):
            client.send(f"{subject}.{number % SUBJECTS}", PAYLOAD)


def consume(url: str, subject: str, count: int) -> None:
    with fairway.connect(url) as client, client.consumer(subject, group="one-by-one") as consumer:
        for message in islice(consumer, count):
            message.ack()


def consume_lists(url: str, subject: str, count: int) -> None:
    with fairway.connect(url) as client, client.consumer(subject, group="lists") as consumer:
        left = count
        while left:
            messages = consumer.take(min(left, 1_000))
            consumer.ack(messages)
            left -= len(messages)


def aio_send(url: str, subject: str, count: int) -> None:
    async def run() -> None:
        async with fairway.aio.connect(url) as client:
            for _ in range(count // 1_000):
                pendings = [client.send(subject, PAYLOAD) for _ in range(1_000)]
                await asyncio.sleep(0)
                del pendings  # `close` waits for them

    asyncio.run(run())


def aio_send_singles(url: str, subject: str, count: int) -> None:
    async def run() -> None:
        async with fairway.aio.connect(url, options=ONE_PER_REQUEST) as client:
            for first in range(0, count, 1_000):
                numbers = range(first, min(first + 1_000, count))
                await asyncio.gather(*(client.send(f"{subject}.{number % SUBJECTS}", PAYLOAD) for number in numbers))

    asyncio.run(run())


def aio_consume(url: str, subject: str, count: int) -> None:
    async def run() -> None:
        async with fairway.aio.connect(url) as client, client.consumer(subject, group="aio") as consumer:
            left = count
            async for message in consumer:
                message.ack()
                left -= 1
                if not left:
                    break

    asyncio.run(run())


PHASES: dict[str, Callable[[str, str, int], None]] = {
    "send": send,
    "singles": send_singles,
    "send_many": send_many,
    "consume": consume,
    "consume lists": consume_lists,
    "aio send": aio_send,
    "aio singles": aio_send_singles,
    "aio consume": aio_consume,
}


def measure(phase: str, url: str, pid: int, subject: str, count: int) -> tuple[float, float, float]:
    """Messages per second, and µs of CPU per message of client and broker."""
    count = max(count // 10, 1) if phase in SINGLES else count
    began_s, client_s, broker_s = time.perf_counter(), time.process_time(), cpu_s(pid)
    PHASES[phase](url, subject, count)
    took_s = time.perf_counter() - began_s
    each = 1e6 / count
    return count / took_s, (time.process_time() - client_s) * each, (cpu_s(pid) - broker_s) * each


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--durability", default="sync", choices=["sync", "memory"])
    parser.add_argument("--profile", choices=list(PHASES), help="profile this phase in one round, and nothing else")
    chosen = parser.parse_args(argv)
    print(f"{describe(Path(tempfile.gettempdir()))}; durability {chosen.durability}; 100-byte payloads")
    results: dict[str, list[tuple[float, float, float]]] = {phase: [] for phase in PHASES}
    with broker(chosen.durability) as (url, pid):
        for warm_up in PHASES.values():  # for what is imported when it is first needed
            warm_up(url, "warm-up", 10_000)
        for number in range(1 if chosen.profile else chosen.rounds):
            subject = f"orders-{number}"
            if chosen.profile:
                _profile(chosen.profile, url, pid, subject, chosen.messages)
                return 0
            for phase in PHASES:
                results[phase].append(measure(phase, url, pid, subject, chosen.messages))
    base = statistics.median(rate for rate, _, _ in results["send"])
    for phase, rounds in results.items():
        rate, client_us, broker_us = (statistics.median(column) for column in zip(*rounds, strict=True))
        rates = [each[0] for each in rounds]
        print(
            f"  {phase:14} {rate:12,.0f} messages/s  ({min(rates):,.0f} - {max(rates):,.0f})  {rate / base:6.2f} x send"
            f"  client {client_us:.2f} µs, broker {broker_us:.2f} µs each"
        )
    return 0


def _profile(phase: str, url: str, pid: int, subject: str, count: int) -> None:
    if "send" not in phase:
        send_many(url, subject, count)
    profile = cProfile.Profile()
    profile.enable()
    rate, _, _ = measure(phase, url, pid, subject, count)
    profile.disable()
    print(f"  {phase}: {rate:,.0f} messages/s under the profiler, in the caller's thread")
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
