"""The parts that the two task queues share: a worker program beside the sender, and the measure of a handler without
work.

The sender sends for the task's seconds, with the worker at work; the clock stops when the server holds nothing any
more, not even what a worker has in hand. So sending, queueing, handling and acknowledging all count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from bench.peers.driving import Gate, Result, Task

URL_VARIABLE = "BENCH_PEER_URL"  # for modules that a worker program imports
START_S_MAX = 60.0
DRAIN_S_MAX = 120.0
STOP_S_MAX = 10.0
LOOK_S = 0.01

Send = Callable[[], object]
Left = Callable[[], int]


def url() -> str:
    return os.environ.get(URL_VARIABLE, "redis://127.0.0.1:6379")


def program(name: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), name)


@contextlib.contextmanager
def worker(command: Sequence[str]) -> Iterator[None]:
    """Stopped as its users would; with a group of its own, so that none of its children outlives it either way."""
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent, process_group=0)
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def handle(task: Task, gate: Gate, command: Sequence[str], send: Send, left: Left) -> Result:
    with worker(command):
        send()  # the first shows that the worker is there
        drain(left, START_S_MAX)
        _send_for(task.warm_s, send)
        drain(left, DRAIN_S_MAX)
        gate.open()
        sent = _send_for(task.seconds, send)
        drain(left, DRAIN_S_MAX)
        return gate.result(sent)


def _send_for(seconds: float, send: Send) -> int:
    sent = 0
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        for _ in range(20):
            send()
        sent += 20
    return sent


def drain(left: Left, seconds_max: float) -> None:
    deadline_s = time.monotonic() + seconds_max
    while left():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{left()} messages were not handled within {seconds_max:g} s")
        time.sleep(LOOK_S)
