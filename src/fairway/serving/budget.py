"""Bounds on memory that many share: what requests wait with, what connections hold.

Two kinds. An `Allowance` is asked before anything is taken, and says BUSY. A `Budget` is told afterwards, because
nobody asks before bytes arrive or an answer piles up; past its bound whoever has held on longest lets go. So clients
that fill the broker's memory and sit on it lose their place to those that move on, and never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from fairway.errors import Code, Refused, invariant

HolderT = TypeVar("HolderT")

_RELIEF = 0.75  # of the bound, after an eviction: each looks at all holders, so there must be some way to the next one
_RETRY_AFTER_MS = 50  # a few group commits


class Allowance:
    """Bytes that are taken with leave and given back."""

    def __init__(self, bytes_max: int, what: str) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0
        self._what = what

    def take(self, size: int) -> None:
        """`Refused` where the bound would be passed. One may always be there, however large."""
        if self.taken_bytes and self.taken_bytes + size > self.bytes_max:
            raise Refused(Code.BUSY, f"too many bytes {self._what}", retry_after_ms=_RETRY_AFTER_MS)
        self.taken_bytes += size

    def give_back(self, size: int) -> None:
        invariant(size <= self.taken_bytes, "no more is given back than was taken")
        self.taken_bytes -= size


class Budget(Generic[HolderT]):
    """Bytes that holders have. `weigh` says how much one has now, `evict` makes it let go."""

    def __init__(self, bytes_max: int, weigh: Callable[[HolderT], int], evict: Callable[[HolderT], None]) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0
        self.evictions = 0
        self._weigh = weigh
        self._evict = evict
        self._held: dict[HolderT, int] = {}  # whoever has held on longest comes first

    def note(self, holder: HolderT, *, anew: bool = False) -> None:
        """Its weight has changed; `anew`: what it has now is other than what it had."""
        size = self._weigh(holder)
        self._set(holder, size, anew=anew)
        if size and self.taken_bytes > self.bytes_max:
            self._relieve()

    def forget(self, holder: HolderT) -> None:
        self._set(holder, 0, anew=True)

    def _set(self, holder: HolderT, size: int, *, anew: bool) -> None:
        had = self._held.get(holder, 0)
        if anew or not size:
            self._held.pop(holder, None)
        if size:
            self._held[holder] = size
        self.taken_bytes += size - had

    def _relieve(self) -> None:
        """Weigh again, since answers leave without a word; then let the first ones go until there is room."""
        for holder in list(self._held):
            self._set(holder, self._weigh(holder), anew=False)
        if self.taken_bytes <= self.bytes_max:
            return
        for holder in list(self._held):
            if self.taken_bytes <= self.bytes_max * _RELIEF:
                return
            self.evictions += 1
            self.forget(holder)
            self._evict(holder)
