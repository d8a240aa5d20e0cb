"""Memory accounts: what clients make a server hold, by kind, each with a bound in bytes.

A server has one account for each kind of thing that requests can pile up: parts of frames, requests that wait, state of
groups, dedupe windows, names. The bounds add up to the ceiling of the process (`memory_plan`). An account holds an
estimate: counts of items, times the bytes of one item (`limits`, measured). `fairway_memory_bytes` shows all of them.

Most accounts are read where the things are (`MemoryAccount`). `SharedMemory` is one that many holders share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from fairway import limits
from fairway.serving.budget import Allowance
from fairway.serving.exposition import MetricsText
from fairway.serving.hall import SessionManager
from fairway.serving.requests import Requester
from fairway.storage.store import Store
from fairway.world.service import resident_bytes

_KEPT_SHARE = 8  # an eighth is kept for small things without which nobody can begin, such as a new group or member

HolderT = TypeVar("HolderT")
PayerT = TypeVar("PayerT")


class MemoryAccount(NamedTuple):
    """One kind of thing: its name, its bound, and how much there is now."""

    what: str
    bytes_max: int
    held_bytes: Callable[[], int]

    @property
    def is_full(self) -> bool:
        return self.held_bytes() >= self.bytes_max


def server_accounts(ceiling_bytes: int, hall: SessionManager, waiting: Allowance[Requester]) -> list[MemoryAccount]:
    """Those that every server has: the process with its ceiling, connections, and what these hold."""
    return [
        MemoryAccount("process", ceiling_bytes, resident_bytes),
        MemoryAccount(
            "connections", hall.connections_max * limits.CONNECTION_BYTES, lambda: len(hall) * limits.CONNECTION_BYTES
        ),
        MemoryAccount("partial", hall.incoming.bytes_max, lambda: hall.incoming.taken_bytes),
        MemoryAccount("waiting", waiting.bytes_max, lambda: waiting.taken_bytes),
        MemoryAccount("unsent", hall.outgoing.bytes_max, lambda: hall.outgoing.taken_bytes),
    ]


def store_accounts(store: Store, prefix: str = "") -> list[MemoryAccount]:
    """Those of every data directory; `prefix` tells the delay server's from a broker's in one process."""
    messages = store.messages
    subjects, dedupe, flusher = messages.views.subjects, messages.views.dedupe, messages.log.flusher
    return [
        MemoryAccount(f"{prefix}unsynced", limits.UNSYNCED_BYTES_MAX, lambda: flusher.unsynced_bytes),
        MemoryAccount(f"{prefix}streams", dedupe.bytes_max or 0, lambda: dedupe.held_bytes),
        MemoryAccount(
            f"{prefix}names", messages.subjects_max * limits.SUBJECT_BYTES, lambda: len(subjects) * limits.SUBJECT_BYTES
        ),
    ]


def show(out: MetricsText, accounts: Iterable[MemoryAccount]) -> None:
    """As figures of a /metrics page."""
    known = list(accounts)
    held = [({"what": each.what}, each.held_bytes()) for each in known]
    out.family("memory_bytes", "gauge", "Memory that clients make the server hold, by kind; an estimate.", held)
    bounds = [({"what": each.what}, each.bytes_max) for each in known if each.bytes_max]
    out.family("memory_bytes_max", "gauge", "The bound of each kind; of process: the ceiling.", bounds)


class _Held(Generic[PayerT]):
    """What one holder has, and who is charged for it."""

    __slots__ = ("payer", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.payer: PayerT | None = None


class _Paid(Generic[HolderT]):
    """What one payer is charged for."""

    __slots__ = ("holders", "size")

    def __init__(self) -> None:
        self.size = 0
        self.holders: dict[HolderT, None] = {}


class SharedMemory(Generic[HolderT, PayerT]):
    """Bytes that holders (groups) have, and payers (connections) are charged for.

    A holder may have as much as is left beside it, and so may a payer with all holders that it is charged for: many
    groups of one connection get no more than one group. Besides, each holder has a reserve, which counts from its
    beginning. Whoever decides lets a holder that has little grow by little, whatever this account says: the reserve is
    for that, and so nobody can keep others from going on in small steps.

    A holder is charged to the payer by whom it grew last. When the payer is gone nobody is charged, and the holder
    still counts as one.
    """

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0  # reserves included
        self._reserve_bytes = reserve_bytes
        self._kept_bytes = bytes_max // _KEPT_SHARE
        self._holders: dict[HolderT, _Held[PayerT]] = {}
        self._payers: dict[PayerT, _Paid[HolderT]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def has_room_for_another(self, size: int, payer: PayerT | None = None) -> bool:
        """Whether one more holder can begin with so much: what is kept is for that, too."""
        paid = self._payers.get(payer) if payer is not None else None
        has = 0 if paid is None else paid.size
        return has + size + self._reserve_bytes <= self.bytes_max - self.taken_bytes

    def note(self, holder: HolderT, size: int) -> None:
        """A holder has so much now: it counts, whether or not there was room."""
        held = self._holders.get(holder)
        if held is None:
            self._holders[holder] = _Held(size)
            self.taken_bytes += size + self._reserve_bytes
            return
        grown = size - held.size
        if grown:
            self.taken_bytes += grown
            held.size = size
            if held.payer is not None:
                self._payers[held.payer].size += grown

    def charge(self, holder: HolderT, payer: PayerT) -> None:
        """The holder is about to grow by this payer, who is charged for all that it has."""
        held = self._holders.get(holder)
        if held is None or held.payer is payer:
            return
        self._discharge(holder, held)
        held.payer = payer
        paid = self._payers.setdefault(payer, _Paid())
        paid.size += held.size + self._reserve_bytes
        paid.holders[holder] = None

    def room(self, holder: HolderT, payer: PayerT | None = None, *, is_small: bool = False) -> int:
        """By how much a holder may grow. `is_small`: in what is kept, too."""
        left = self.bytes_max - self.taken_bytes - (0 if is_small else self._kept_bytes)
        held = self._holders.get(holder)
        has = 0 if held is None else held.size
        paid = self._payers.get(payer) if payer is not None else None
        if paid is not None:
            has = paid.size if held is not None and held.payer is payer else paid.size + has
        return max(left - has, 0)

    def forget(self, holder: HolderT) -> None:
        """The holder is gone."""
        held = self._holders.pop(holder, None)
        if held is not None:
            self.taken_bytes -= held.size + self._reserve_bytes
            self._discharge(holder, held)

    def forget_payer(self, payer: PayerT) -> None:
        """The payer is gone: its holders stay, and count as one each."""
        paid = self._payers.pop(payer, None)
        if paid is not None:
            for holder in paid.holders:
                self._holders[holder].payer = None

    def _discharge(self, holder: HolderT, held: _Held[PayerT]) -> None:
        if held.payer is None:
            return
        paid = self._payers[held.payer]
        paid.size -= held.size + self._reserve_bytes
        del paid.holders[holder]
        if not paid.holders:
            del self._payers[held.payer]
