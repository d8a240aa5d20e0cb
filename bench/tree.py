"""CPU time and memory of this process and all that it has started, children that have ended included."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Tree:
    """Looks at the processes anew with every question; remembers the most memory that it saw."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def cpu_s(self) -> float:
        """User and system time of all of them."""
        processes = _processes()
        family = {os.getpid()}
        grown = True
        while grown:
            born = {pid for pid, (parent, _, _) in processes.items() if parent in family} - family
            family |= born
            grown = bool(born)
        mine = [processes[pid] for pid in family if pid in processes]
        self.peak_bytes = max(self.peak_bytes, sum(pages for _, _, pages in mine) * _PAGE)
        return sum(ticks for _, ticks, _ in mine) / _TICKS


def _processes() -> dict[int, tuple[int, int, int]]:
    """Parent, ticks and resident pages of every process there is."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            found[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])), int(fields[21]))
    return found
