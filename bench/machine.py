"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

QUIET = "Measure on a machine without other work: beside some, only ratios of one run say something, and little."


def describe(data: Path) -> str:
    """Processor, cores, kernel, the file system that holds `data`, Python and loop."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_processor()}, {cores} cores, {platform.system()} {platform.release()}, {_file_system(data)}, "
        f"Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _file_system(data: Path) -> str:
    """The type of the innermost mount around the directory."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown file system"
    around = [(len(at), kind) for _, at, kind, *_ in mounts if data.resolve().is_relative_to(at)]
    return max(around, default=(0, "unknown file system"))[1]


def resident_bytes() -> int:
    """Memory that this process has in use now; 0 where the platform does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def queued_s() -> float:
    """How long this process's first thread has been ready to run and had no core; 0 where the platform does not say."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def descriptors() -> int:
    """Open descriptors of this process; 0 where the platform does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
