"""The cost of a sync here and now: small appends to a file, each followed by fdatasync, at a light pace."""

from __future__ import annotations

import os
import time
from pathlib import Path

APPEND_BYTES = 4_096
PACE_PER_S = 200  # back to back, a disk does better than when it has fallen idle in between


def sync_us(beside: Path, seconds: float) -> list[int]:
    """Times of the syncs, in microseconds, on the file system of `beside`."""
    path = beside / "syncs"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return [_one(fd) for _ in range(max(10, int(seconds * PACE_PER_S)))]
    finally:
        os.close(fd)
        path.unlink()


def _one(fd: int) -> int:
    os.write(fd, bytes(APPEND_BYTES))
    start_ns = time.perf_counter_ns()
    os.fdatasync(fd)
    took_us = (time.perf_counter_ns() - start_ns) // 1_000
    time.sleep(max(0.0, 1 / PACE_PER_S - took_us / 1e6))
    return took_us
