"""What the kernel counts for other processes: CPU time, context switches, write calls. Zero where it does not say.

The drivers of `bench/peers` import this module in an environment of their own: it needs the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULED = 2  # of the clocks that a process has, the one that counts the time on a processor


def cpu_s(pid: int) -> float:
    """Processor time of a process, of all its threads, ended threads included, to the nanosecond."""
    if not (_PROC / str(pid)).exists():  # the clock of another process is Linux's own, and so is this directory
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return 0.0


def family(pids: Iterable[int]) -> list[int]:
    """These processes and everything that they have started and that still runs."""
    found = list(dict.fromkeys(pids))
    for pid in found:  # grows while it is read
        found.extend(child for child in _children(pid) if child not in found)
    return found


def family_cpu_s(pids: Iterable[int]) -> float:
    return sum(map(cpu_s, family(pids)))


def _children(pid: int) -> list[int]:
    found = []
    for thread in _threads(pid):
        found += _read(thread / "children").split()
    return [int(child) for child in found]


def _threads(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended, or this kernel has no such file
        return ""


@dataclass(frozen=True, slots=True)
class Counters:
    """What one process has done so far, or between two looks."""

    cpu_s: float = 0.0
    voluntary_switches: float = 0.0  # a thread waited: each is a wake-up later
    involuntary_switches: float = 0.0  # a thread was told to make room
    write_calls: float = 0.0  # `write` and its kin, on files, pipes and sockets; a `send` does not count
    written_bytes: float = 0.0  # by these calls
    device_bytes: float = 0.0  # pages that went, or will go, to a disk

    @classmethod
    def of(cls, pid: int) -> Counters:
        switches = [_numbers(thread / "status") for thread in _threads(pid)]
        written = _numbers(_PROC / str(pid) / "io")
        return cls(
            cpu_s(pid),
            sum(each.get("voluntary_ctxt_switches", 0) for each in switches),
            sum(each.get("nonvoluntary_ctxt_switches", 0) for each in switches),
            written.get("syscw", 0),
            written.get("wchar", 0),
            written.get("write_bytes", 0),
        )

    def since(self, before: Counters, per: float = 1.0) -> Counters:
        """The difference, for each of so many."""
        names = [field.name for field in fields(self)]
        return Counters(*((getattr(self, name) - getattr(before, name)) / per for name in names))


def _numbers(path: Path) -> dict[str, int]:
    """The lines `name: number` of a file of the kernel."""
    pairs = (line.partition(":") for line in _read(path).splitlines())
    return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}
