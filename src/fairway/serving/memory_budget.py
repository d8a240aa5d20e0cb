"""Bounds on memory that many holders share: bytes of waiting requests, bytes that connections hold.

A caller asks an `Allowance` before it takes bytes, and the allowance may refuse with BUSY. A `Budget` is informed
afterwards, because no caller asks before bytes arrive or an answer piles up. Past its bound the budget evicts the
holder that has held on longest. So clients that fill the broker's memory and sit on it lose their place to clients that
move on, and never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from fairway import limits
from fairway.errors import Code, Refused, invariant

HolderT = TypeVar("HolderT")

_RELIEF = 0.75  # of the bound, after an eviction: each eviction looks at all holders, so the next must be some way off
_RETRY_AFTER_MS = 50  # a few group commits
_URGENT_SHARE = 8  # an eighth of an allowance is for heartbeats, settlements and small sends
# half of it is closed to long polls: otherwise a dozen clients that wait would leave no room for batches
_PATIENT_SHARE = 2


class Allowance(Generic[HolderT]):
    """Bytes that holders, such as connections, take with leave and give back.

    A holder may have as much as is left beside it. Alone it gets one half of all, with one other holder a third each.
    However many there are, something is left for a holder that asks for little. One part is reserved for urgent
    requests: small, and answered at once. Another part is closed to patient requests: long polls, which clients can
    hold for as long as they like.
    """

    def __init__(self, bytes_max: int, what: str) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0
        self._what = what
        self._held: dict[HolderT, int] = {}

    def take(self, holder: HolderT, size: int, *, is_urgent: bool = False, is_patient: bool = False) -> None:
        """Take bytes; `Refused` past a bound. The first holder may always take, however much."""
        kept = 0 if is_urgent else self.bytes_max // (_PATIENT_SHARE if is_patient else _URGENT_SHARE)
        left = self.bytes_max - self.taken_bytes - kept
        held = self._held.get(holder, 0)
        if self.taken_bytes and held + size > left:
            raise Refused(Code.BUSY, f"too many bytes {self._what}", retry_after_ms=_RETRY_AFTER_MS)
        self._held[holder] = held + size
        self.taken_bytes += size

    def give_back(self, holder: HolderT, size: int) -> None:
        """Give bytes back. Does nothing for a holder that was forgotten meanwhile."""
        held = self._held.get(holder)
        if held is None:
            return
        invariant(size <= held, "no more is given back than was taken")
        self.taken_bytes -= size
        if held == size:
            del self._held[holder]
        else:
            self._held[holder] = held - size

    def forget(self, holder: HolderT) -> None:
        """Give back everything of a holder that is gone."""
        self.taken_bytes -= self._held.pop(holder, 0)

    @property
    def is_exhausted(self) -> bool:
        """Whether there is no room for urgent requests, either."""
        return self.taken_bytes + limits.URGENT_BYTES_MAX > self.bytes_max


class Budget(Generic[HolderT]):
    """Bytes that holders have. `weigh` returns how much a holder has now; `evict` makes it let go."""

    def __init__(self, bytes_max: int, weigh: Callable[[HolderT], int], evict: Callable[[HolderT], None]) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0
        self.evictions = 0
        self._weigh = weigh
        self._evict = evict
        self._held: dict[HolderT, int] = {}  # the holder that has held on longest comes first

    def note(self, holder: HolderT, *, anew: bool = False) -> None:
        """Weigh the holder again. `anew`: it has other bytes than before."""
        size = self._weigh(holder)
        self._set(holder, size, anew=anew)
        if size and self.taken_bytes > self.bytes_max:
            self._relieve()

    def forget(self, holder: HolderT) -> None:
        self._set(holder, 0, anew=True)

    def set_bound(self, bytes_max: int) -> None:
        """Change the bound."""
        self.bytes_max = bytes_max
        if self.taken_bytes > bytes_max:
            self._relieve()

    def _set(self, holder: HolderT, size: int, *, anew: bool) -> None:
        had = self._held.get(holder, 0)
        if anew or not size:
            self._held.pop(holder, None)
        if size:
            self._held[holder] = size
        self.taken_bytes += size - had

    def _relieve(self) -> None:
        """Weigh all holders again, since answers leave without a call; then evict the first ones until there is
        room."""
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
