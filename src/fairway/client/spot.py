"""Where the messages of one subject go, of all the broker groups that take them.

By turns, so that every group gets as many; but not message by message: as long as a batch is being filled for one group
it stays with that one, or batches would be half as full. A group that does not take messages now (it is not connected,
or what it was sent came back) is passed over as long as another one takes them. In an ordered subject the messages of a
key go to one group, the same from whichever client, and wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from fairway.client.ways import WayT
from fairway.lookup.homes import home
from fairway.protocol.routing import SubjectRoute


class Partitioner(Generic[WayT]):
    """Of one subject; of those of its messages that are due later, or of the others."""

    __slots__ = ("_at", "_names", "_ways", "is_due", "is_ordered", "subject", "way", "why")

    def __init__(self, subject: str, way: WayT, *, is_due: bool) -> None:
        self.subject = subject
        self.is_due = is_due
        self.is_ordered = False
        self.way = way  # where a message without a key goes now
        self.why = ""  # why nowhere
        self._names: tuple[str, ...] = ()
        self._ways: tuple[WayT, ...] = ()
        self._at = -1

    @property
    def ways(self) -> tuple[WayT, ...]:
        """All that take messages of it; none: nobody knows one."""
        return self._ways

    @property
    def names(self) -> tuple[str, ...]:
        """Of the groups that these lead to."""
        return self._names

    def place(self, route: SubjectRoute, ways: Sequence[WayT], nowhere: WayT) -> None:
        """These take messages of it, from now on. Who was nowhere stays there: what is there goes first."""
        self.is_ordered = route.is_ordered
        self.why = route.why
        self._names, self._ways = tuple(route.writable), tuple(ways)
        if not ways:
            self.way = nowhere
        elif self.way not in (nowhere, *ways):
            self.turn()

    def pick(self, key: str | None) -> WayT:
        """For one more message."""
        if len(self._ways) < 2:
            return self.way
        if self.is_ordered and key is not None:
            return self._ways[home(key, self._names)]
        way = self.way
        if way.producing.is_filling(self.subject, self.is_due) and way.core.line.is_open:
            return way
        return self.turn()

    def turn(self) -> WayT:
        """The next one, from now on."""
        if self._ways:
            self.way = self.next_way()
        return self.way

    def next_way(self, key: str | None = None) -> WayT:
        """The next one that takes messages; if none does, the next one. A key of an ordered subject has its own."""
        if self.is_ordered and key is not None:
            return self._ways[home(key, self._names)]
        count = len(self._ways)
        turns = [(self._at + step) % count for step in range(1, count + 1)]
        self._at = next((at for at in turns if self._takes(self._ways[at])), turns[0])
        return self._ways[self._at]

    def another(self, way: WayT) -> WayT | None:
        """One that takes what this one does not; None where there is none, or where a key has its place."""
        if self.is_ordered:
            return None
        return next((each for each in self._ways if each is not way and self._takes(each)), None)

    def _takes(self, way: WayT) -> bool:
        producing = way.producing
        return (
            way.core.line.is_open
            and producing.is_flowing(self.subject, is_due=self.is_due)
            and producing.room_for(1, 0)
        )

    def shares(self, keys: Iterable[str | None]) -> dict[WayT, list[int]]:
        """Which of many messages go where, by their places in the list; their order is kept."""
        found: dict[WayT, list[int]] = {}
        for index, key in enumerate(keys):
            way = self.way if key is None else self._ways[home(key, self._names)]
            found.setdefault(way, []).append(index)
        return found
