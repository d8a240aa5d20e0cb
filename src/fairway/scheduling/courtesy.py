"""Who gives way: while those are at work who ask for a little at a time, those wait who send too much at a time."""

from __future__ import annotations

from typing import Final

COURTESY_NS: Final = 5_000_000  # for those who are about to ask again, or who wait for a sync in the loop's next turns


class Courtesy:
    """What the places where somebody may have to give way know of the others."""

    __slots__ = ("polite_ns",)

    def __init__(self) -> None:
        self.polite_ns = -COURTESY_NS  # when somebody who is not hasty last asked for something, or had a slice

    def is_due(self, now_ns: int) -> bool:
        """Whether others are at work."""
        return now_ns - self.polite_ns < COURTESY_NS
