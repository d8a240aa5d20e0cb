"""The delayed load, the same for everyone: at a steady rate, each message due two seconds after it is sent.

So as many come due as are scheduled, at the same time. A payload says in its first bytes when its message is due, by
the wall clock of the machine, in microseconds.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

from bench.peers.driving import PAYLOAD, Task

LEAD_S = 2
TICK_S = 0.01
IDLE_S_MAX = 20.0
FAR_S = 3_600  # where only the rate of scheduling is of interest

_DUE = struct.Struct("<Q")


def payload_of(due_us: int) -> bytes:
    return _DUE.pack(due_us) + PAYLOAD[_DUE.size :]


def due_us_of(payload: bytes) -> int:
    found: int = _DUE.unpack_from(payload)[0]
    return found


def now_us() -> int:
    return time.time_ns() // 1_000


def count_of(task: Task) -> int:
    return ticks_of(task) * each_of(task)


def ticks_of(task: Task) -> int:
    return max(1, round(task.seconds / TICK_S))


def each_of(task: Task) -> int:
    """Messages in a tick."""
    return max(1, round(task.rate_per_s * TICK_S))


def ticks(task: Task) -> Iterator[tuple[float, list[int]]]:
    """When to send (`time.monotonic`), and the due times of what is sent then, spread over the tick."""
    start_s = time.monotonic() + 0.05
    start_us = now_us() + 50_000
    each = each_of(task)
    step_us = TICK_S * 1e6 / each
    for tick in range(ticks_of(task)):
        base_us = start_us + tick * TICK_S * 1e6 + LEAD_S * 1e6
        yield start_s + tick * TICK_S, [round(base_us + place * step_us) for place in range(each)]
