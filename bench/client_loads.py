"""Loads through the public client, each in a process of its own: small senders, admin calls, a flooder, batches.

Small loads are measured while they work: `measure` blocks, and returns how long each call took. Large loads `begin` and
`end`, yield the cores to others unless told otherwise, and say what they did when, on the clock of `time.perf_counter`.
So a rate can be taken over just the time in which a small load was measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count, cycle
from multiprocessing.connection import Connection as Pipe
from typing import Any

import fairway
from bench.loads import YIELDING, Arrival
from bench.processes import Child
from fairway.protocol.admin_messages import Depth

PAYLOAD = bytes(100)
MANY = 4_096
HANDFUL = 1_000
ANSWER_S = 60.0

Samples = dict[str, list[float]]


class SmallLoad(Child):
    """Works at a steady pace."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        super().__init__(target, *args)
        self.hear()

    def measure(self, seconds: float) -> Samples:
        """How long each call took, in milliseconds, by its name."""
        found: Samples = self.ask("work", seconds)
        return found


class BigLoad(Child):
    """Works as fast as it can."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        super().__init__(target, *args)
        self.hear()

    def begin(self, seconds: float) -> None:
        self.tell("work", seconds)

    def end(self) -> list[Arrival]:
        """What was done, and when. Comes when the load has ended."""
        found: list[Arrival] = self.hear()
        return found


def _serve(pipe: Pipe, work: Callable[[float], Any]) -> None:
    """Work whenever the parent says so, until it says `stop` or is gone."""
    work(0.1)  # connects, and imports what is imported when it is first needed
    pipe.send("ready")
    try:
        while (command := pipe.recv())[0] != "stop":
            pipe.send(work(command[1]))
    except EOFError:
        return


# --- small -----------------------------------------------------------------------------------------------------------


def small_senders(url: str, subjects: tuple[str, ...], per_s: int) -> SmallLoad:
    """A client for each subject, which sends so many single messages a second; timed from when each was due."""
    return SmallLoad(_small_senders, url, subjects, per_s)


def _small_senders(url: str, subjects: tuple[str, ...], per_s: int, pipe: Pipe) -> None:
    clients = [fairway.connect(url, patience=ANSWER_S) for _ in subjects]

    def stop_watch(due_s: float, took_ms: list[float]) -> Callable[[object], None]:
        return lambda _: took_ms.append((time.perf_counter() - due_s) * 1e3)

    def work(seconds: float) -> Samples:
        took_ms: list[float] = []
        began_s = time.perf_counter()
        turns = cycle(zip(clients, subjects, strict=True))
        for number in range(round(seconds * per_s * len(subjects))):
            due_s = began_s + number / (per_s * len(subjects))
            time.sleep(max(0.0, due_s - time.perf_counter()))
            client, subject = next(turns)
            client.send(subject, PAYLOAD).add_done_callback(stop_watch(due_s, took_ms))
        for client in clients:
            client.flush(ANSWER_S)
        return {"send": took_ms}

    _serve(pipe, work)
    for client in clients:
        client.close()


def admin_calls(url: str, subject: str, group: str, per_s: int) -> SmallLoad:
    """Describes a group with its consumers, and lists the subjects, by turns."""
    return SmallLoad(_admin_calls, url, subject, group, per_s)


def _admin_calls(url: str, subject: str, group: str, per_s: int, pipe: Pipe) -> None:
    with fairway.connect(url, patience=ANSWER_S) as client:
        calls: dict[str, Callable[[], object]] = {
            "describe": lambda: client.describe(subject, group, depth=Depth.CONSUMERS),
            "list": lambda: client.describe(depth=Depth.SUBJECTS),
        }

        def work(seconds: float) -> Samples:
            took_ms: Samples = {name: [] for name in calls}
            until_s = time.perf_counter() + seconds
            for name in cycle(calls):
                began_s = time.perf_counter()
                if began_s > until_s:
                    return took_ms
                calls[name]()
                took_ms[name].append((time.perf_counter() - began_s) * 1e3)
                time.sleep(max(0.0, began_s + 1 / per_s - time.perf_counter()))
            raise AssertionError("a cycle has no end")

        _serve(pipe, work)


# --- large -----------------------------------------------------------------------------------------------------------


def flooder(url: str, subject: str, *, gives_way: bool = True) -> BigLoad:
    """`send_many` as fast as the client's buffer has room. What counts is what has a receipt."""
    return BigLoad(_flooder, url, subject, gives_way)


def _flooder(url: str, subject: str, gives_way: bool, pipe: Pipe) -> None:
    os.nice(YIELDING if gives_way else 0)
    payloads = [PAYLOAD] * MANY
    with fairway.connect(url, patience=ANSWER_S) as client:

        def work(seconds: float) -> list[Arrival]:
            stored: list[Arrival] = []
            until_s = time.perf_counter() + seconds
            while time.perf_counter() < until_s:
                for batch in client.send_many(subject, payloads).batches:
                    batch.add_done_callback(lambda done: stored.append(Arrival(time.perf_counter(), 0, done.count)))
            client.flush(ANSWER_S)
            return stored

        _serve(pipe, work)


def batch_consumer(url: str, subject: str, messages: int, *, gives_way: bool = True) -> BigLoad:
    """Takes and acks a backlog of so many messages, from the first on; then again, as another group."""
    return BigLoad(_batch_consumer, url, subject, messages, gives_way)


def _batch_consumer(url: str, subject: str, messages: int, gives_way: bool, pipe: Pipe) -> None:
    os.nice(YIELDING if gives_way else 0)
    groups = count()
    with fairway.connect(url, patience=ANSWER_S) as client:

        def work(seconds: float) -> list[Arrival]:
            taken: list[Arrival] = []
            until_s = time.perf_counter() + seconds
            while time.perf_counter() < until_s:
                with client.consumer(subject, group=f"batches-{next(groups)}") as consumer:
                    left = messages
                    while left > 0 and time.perf_counter() < until_s:
                        found = consumer.take(HANDFUL, timeout=max(until_s - time.perf_counter(), 0.0))
                        consumer.ack(found)
                        taken.append(Arrival(time.perf_counter(), 0, len(found)))
                        left -= len(found)
            return taken

        _serve(pipe, work)
