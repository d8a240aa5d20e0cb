"""Deleting files one after another, off the loop: a crash leaves the later ones, never an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fairway.errors import StorageFault
from fairway.world.disk import Disk


def remove_in_order(disk: Disk, names: Sequence[str], ended: Callable[[StorageFault | None], None]) -> None:
    """Call `ended(None)` when all are gone. After a fault the rest stays: an older checkpoint may still speak of it."""
    if not names:
        ended(None)
        return

    def removed(fault: StorageFault | None) -> None:
        if fault is not None:
            ended(fault)
        else:
            remove_in_order(disk, names[1:], ended)

    disk.remove_later(names[0], removed)
