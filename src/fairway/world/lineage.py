"""Which copy of a program this is: a child that was forked must not go on with what its parent was doing."""

from __future__ import annotations

import os


class _Lineage:
    """How often the process has been forked on the way from the first one."""

    __slots__ = ("forks",)

    def __init__(self) -> None:
        self.forks = 0

    def fork(self) -> None:
        self.forks += 1


_lineage = _Lineage()


def forks() -> int:
    """Another number than before the fork. Cheap: it is asked with every message."""
    return _lineage.forks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lineage.fork)
