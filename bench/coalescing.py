"""Coalescing: work saved on a highly repetitive stream, and what it costs where nothing repeats.

    python -m bench.coalescing            tables
    python -m bench.coalescing --json     the same figures for a program

The handler refreshes a cache entry. It asks a server in another process for 2 KB of JSON over a loopback connection,
decodes it, changes it, and sends it to be stored, as with a database and a cache next door.

Repetitive: eight threads take keys from one queue; the keys are drawn from a bell curve, as when everybody looks at the
same few things, and the server takes 2 ms for the query. With and without a coordinator by turns; the ratios are
medians over the rounds. Without repetition: every key once, and a server that takes 0.2 ms, about what a database needs
for one row; all that a coordinator can do here is cost. One thread handles requests plainly and with a coordinator by
turns, so that whatever disturbs the machine disturbs both, and the medians of single requests are compared.
"""

from __future__ import annotations

import json
import queue
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import fairway
from bench.presenting import Rows, present
from fairway.runtime.process import Child

ROUNDS = 15
THREADS = 8
REPEATED_REQUESTS, UNIQUE_REQUESTS = 400, 400
SPREADS_KEYS = (0.6, 1.5, 4.0)  # standard deviations: about 3, 8 and 20 keys
THINKING_S = {b"slow": 0.002, b"fast": 0.0002}
ENTRY = json.dumps({"prices": list(range(200)), "names": {f"room-{number}": "x" * 20 for number in range(30)}}).encode()


# --- the other side --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers a short line with an entry, and an entry with a short line; in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = connection.makefile("rb")
    while line := reader.readline():
        time.sleep(THINKING_S.get(line[:4], 0))
        connection.sendall(b"stored\n" if len(line) > 16 else ENTRY + b"\n")


class Cache:
    """One thread's connection to it."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._connection.makefile("rb")

    def refresh(self, key: int, speed: bytes = b"fast") -> None:
        self._connection.sendall(b"%b %7d\n" % (speed, key))
        entry = json.loads(self._reader.readline())
        entry["key"] = key
        self._connection.sendall(json.dumps(entry).encode() + b"\n")
        self._reader.readline()

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


# --- a stream that repeats -------------------------------------------------------------------------------------------


class Crew:
    """Threads that handle a stream of keys together."""

    def __init__(self, port: int) -> None:
        self._caches = [Cache(port) for _ in range(THREADS)]

    def run(self, keys: Sequence[int], coordinator: fairway.QueueCoordinator[int] | None) -> tuple[float, int]:
        """Seconds, and how often the handler was called."""
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        handled: list[int] = []
        for key in [*keys, *[None] * THREADS]:
            waiting.put(key)

        def work(cache: Cache) -> None:
            def handle(key: int) -> None:
                handled.append(key)
                cache.refresh(key, b"slow")

            merged = handle if coordinator is None else coordinator.coalesced(lambda key: key)(handle)
            while (key := waiting.get()) is not None:
                merged(key)

        threads = [threading.Thread(target=work, args=(cache,)) for cache in self._caches]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started, len(handled)

    def close(self) -> None:
        for cache in self._caches:
            cache.close()


def measure_repeated(port: int, spread_keys: float, rounds: int, rng: random.Random) -> dict[str, Any]:
    crew = Crew(port)
    times: list[float] = []
    shares: list[float] = []
    for number in range(rounds):
        keys = [round(rng.gauss(0, spread_keys)) for _ in range(REPEATED_REQUESTS)]
        coordinator: fairway.QueueCoordinator[int] = fairway.QueueCoordinator()
        order = (None, coordinator) if number % 2 else (coordinator, None)
        found = {each is None: crew.run(keys, each) for each in order}
        times.append(found[True][0] / found[False][0])
        shares.append(found[False][1] / found[True][1])
    crew.close()
    return {
        "stream": f"bell curve, {spread_keys:g} keys wide",
        "saved_share": round(1 - statistics.median(shares), 3),
        "times_faster": round(statistics.median(times), 2),
    }


# --- a stream that does not ------------------------------------------------------------------------------------------


def measure_unique(port: int, rounds: int) -> dict[str, Any]:
    cache = Cache(port)
    coordinator: fairway.QueueCoordinator[int] = fairway.QueueCoordinator()
    merged = coordinator.coalesced(lambda key: key)(cache.refresh)
    ways: tuple[Callable[[int], object], ...] = (cache.refresh, merged)
    samples_ns: tuple[list[int], list[int]] = ([], [])
    for key in range(rounds * UNIQUE_REQUESTS):
        first = key % 2
        for way in (first, 1 - first):
            started_ns = time.perf_counter_ns()
            ways[way](key)
            samples_ns[way].append(time.perf_counter_ns() - started_ns)
    cache.close()
    plain_us, merged_us = (statistics.median(samples) / 1e3 for samples in samples_ns)
    return {
        "stream": "every key once",
        "handler_us": round(plain_us, 1),
        "merged_us": round(merged_us, 1),
        "cost_share": round(merged_us / plain_us - 1, 4),
        "turn_us": round(turn_us(rounds), 2),
    }


def turn_us(rounds: int) -> float:
    """The cost of a turn by itself, in processor time, which no neighbour can take."""
    coordinator: fairway.QueueCoordinator[int] = fairway.QueueCoordinator()
    samples = []
    for _ in range(rounds):
        started = time.thread_time()
        for key in range(5_000):
            with coordinator.acquire(key) as turn:
                _ = turn.is_mine
        samples.append((time.thread_time() - started) / 5_000 * 1e6)
    return statistics.median(samples)


# --- all of it -------------------------------------------------------------------------------------------------------


def measure(rounds: int) -> Rows:
    rng = random.Random(7)
    with Child("bench.coalescing", "--serve") as child:
        port = int(child.line(timeout_s=30) or 0)
        rows = [measure_repeated(port, spread_keys, rounds, rng) for spread_keys in SPREADS_KEYS]
        return [*rows, measure_unique(port, rounds)]


def show(rows: Rows) -> None:
    *repeated, unique = rows
    table = Table("stream", "work saved", "times faster", title=f"{THREADS} threads, a handler that waits 2 ms")
    for row in repeated:
        table.add_row(row["stream"], f"{row['saved_share']:.1%}", f"{row['times_faster']:.2f}")
    Console().print(table)
    print(
        f"{unique['stream']}: {unique['handler_us']:.1f} µs plain, {unique['merged_us']:.1f} µs with a coordinator: "
        f"{unique['cost_share']:+.1%} (a turn alone: {unique['turn_us']:.2f} µs of processor time)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if list(arguments) == ["--serve"]:
        serve()
    return present(argv, "coalescing: what is saved, and what it costs", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
