"""Divides the memory of a server: its ceiling, the fixed parts, and the budgets that share the rest.

    ceiling (--memory-mib)
      = an eighth for the allocator: pages that are only partly in use
      + fixed parts: the process itself, three times --buffer-mib, appends that are not synced, one batch that is
        checked, indexes, caches; rows of pending messages in a delay server
      + budgets that grow with what clients do: groups, dedupe windows, names, connections, registry nodes

Constant shares divide the rest after the fixed parts between the budgets. A checkpoint holds a snapshot of groups,
dedupe windows and names in memory while it is written. So these budgets get less than their shares, to leave room for
the snapshot. The plan refuses a ceiling that leaves less than `limits.BUDGETS_BYTES_MIN` for all budgets, and names a
ceiling that fits.

A `MemoryAccount` is one kind of thing that clients make a server hold, with a bound in bytes: parts of frames, waiting
requests, state of groups, dedupe windows, names. The bounds add up to the ceiling of the process. An account holds an
estimate: counts of items, times the bytes of one item (`limits`, measured). `fairway_memory_bytes` shows all accounts.
`SharedMemory` is the memory that many groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fairway import limits
from fairway.errors import Misuse
from fairway.runtime.service import resident_bytes
from fairway.serving.memory_budget import Allowance
from fairway.serving.metrics import MetricsText
from fairway.serving.requests import Requester
from fairway.serving.session_manager import SessionManager
from fairway.storage.store import Store

_KEPT_SHARE = 8  # an eighth is kept for the small first steps, such as a new group or member

HolderT = TypeVar("HolderT")
PayerT = TypeVar("PayerT")


class MemoryAccount(NamedTuple):
    """One kind of thing: its name, its bound, and its bytes now."""

    what: str
    bytes_max: int
    held_bytes: Callable[[], int]

    @property
    def is_full(self) -> bool:
        return self.held_bytes() >= self.bytes_max


def server_accounts(
    ceiling_bytes: int, session_manager: SessionManager, waiting: Allowance[Requester]
) -> list[MemoryAccount]:
    """The accounts of every server: the process with its ceiling, connections, and what these hold."""
    return [
        MemoryAccount("process", ceiling_bytes, resident_bytes),
        MemoryAccount(
            "connections",
            session_manager.connections_max * limits.CONNECTION_BYTES,
            lambda: len(session_manager) * limits.CONNECTION_BYTES,
        ),
        MemoryAccount("partial", session_manager.incoming.bytes_max, lambda: session_manager.incoming.taken_bytes),
        MemoryAccount("waiting", waiting.bytes_max, lambda: waiting.taken_bytes),
        MemoryAccount("unsent", session_manager.outgoing.bytes_max, lambda: session_manager.outgoing.taken_bytes),
    ]


def store_accounts(store: Store, prefix: str = "") -> list[MemoryAccount]:
    """The accounts of every data directory. `prefix` marks those of a delay server in the process of a broker."""
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
    """Write the accounts as figures of a /metrics page."""
    known = list(accounts)
    held = [({"what": each.what}, each.held_bytes()) for each in known]
    out.family("memory_bytes", "gauge", "Memory that clients make the server hold, by kind; an estimate.", held)
    bounds = [({"what": each.what}, each.bytes_max) for each in known if each.bytes_max]
    out.family("memory_bytes_max", "gauge", "The bound of each kind; of process: the ceiling.", bounds)


class _Held(Generic[PayerT]):
    """The bytes of one holder, and the payer that is charged for them."""

    __slots__ = ("payer", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.payer: PayerT | None = None


class _Paid(Generic[HolderT]):
    """The bytes that one payer is charged for."""

    __slots__ = ("holders", "size")

    def __init__(self) -> None:
        self.size = 0
        self.holders: dict[HolderT, None] = {}


class SharedMemory(Generic[HolderT, PayerT]):
    """Bytes that holders (groups) have, and payers (connections) are charged for.

    A holder may have as much as is left beside it. So may a payer with all the holders that it is charged for: many
    groups of one connection get no more than one group. Each holder also has a reserve, which counts from its
    beginning. The caller lets a holder that has little grow by little, whatever this account says. The reserve is for
    that, and so no client can keep others from going on in small steps.

    A holder is charged to the payer that last made it grow. When that payer is gone, no payer is charged, and the
    holder still counts.
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
        """Whether one more holder can begin with so much. It may use the kept part."""
        paid = self._payers.get(payer) if payer is not None else None
        has = 0 if paid is None else paid.size
        return has + size + self._reserve_bytes <= self.bytes_max - self.taken_bytes

    def note(self, holder: HolderT, size: int) -> None:
        """Set the bytes of a holder: they count, whether or not there was room."""
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
        """Charge the payer for all bytes of the holder, which the payer is about to make grow."""
        held = self._holders.get(holder)
        if held is None or held.payer is payer:
            return
        self._discharge(holder, held)
        held.payer = payer
        paid = self._payers.setdefault(payer, _Paid())
        paid.size += held.size + self._reserve_bytes
        paid.holders[holder] = None

    def room(self, holder: HolderT, payer: PayerT | None = None, *, is_small: bool = False) -> int:
        """By how much a holder may grow. `is_small`: it may use the kept part, too."""
        left = self.bytes_max - self.taken_bytes - (0 if is_small else self._kept_bytes)
        held = self._holders.get(holder)
        has = 0 if held is None else held.size
        paid = self._payers.get(payer) if payer is not None else None
        if paid is not None:
            has = paid.size if held is not None and held.payer is payer else paid.size + has
        return max(left - has, 0)

    def forget(self, holder: HolderT) -> None:
        """Forget a holder that is gone."""
        held = self._holders.pop(holder, None)
        if held is not None:
            self.taken_bytes -= held.size + self._reserve_bytes
            self._discharge(holder, held)

    def forget_payer(self, payer: PayerT) -> None:
        """Forget a payer that is gone. Its holders stay, without a payer."""
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


_ALLOCATOR_SHARE = 8  # an eighth is for pages that are only partly in use
_MIB = limits.MIB


class _Share(NamedTuple):
    """A share of the rest, in parts."""

    parts: int
    of_picture: float = 1.0  # the bytes of the items with their snapshot in a checkpoint, as a multiple of the budget


# Sorted pairs of the largest group take half of its bytes; the packed form takes a tenth, twice.
_GROUPS = _Share(40, 1.5)
# The windows themselves, packed in one piece, and that piece in the checkpoint.
_STREAMS = _Share(30, 3.0)
_NAMES = _Share(20, 2.0)
_DELAY_SHARE = 4  # a delay server beside a broker has a quarter of dedupe windows and names
_CONNECTIONS = _Share(10)
# The tree, its checksums, the file's cache, and the route tables that the meta server derives for its clients.
_REGISTRY = _Share(60, 3.0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each budget. A budget that the server does not have is 0."""

    ceiling_bytes: int
    fixed_bytes: int
    groups_bytes: int = 0
    streams_bytes: int = 0
    names_bytes: int = 0
    registry_bytes: int = 0
    connections_max: int = 0
    delay_streams_bytes: int = 0  # of the delay server in the same process
    delay_names_bytes: int = 0

    @property
    def subjects_max(self) -> int:
        return self.names_bytes // limits.SUBJECT_BYTES

    @property
    def delay_subjects_max(self) -> int:
        return self.delay_names_bytes // limits.SUBJECT_BYTES


class MemoryNeeds(NamedTuple):
    """The fixed parts of one kind of server, from its settings."""

    buffer_mib: int
    has_broker: bool = False
    pending_max: int | None = None  # of a delay server

    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        found = {"the process": limits.PROCESS_BYTES, f"3 x --buffer-mib {self.buffer_mib}": 3 * self.buffer_mib * _MIB}
        stores = self.has_broker + (self.pending_max is not None)
        if stores:
            found["appends"] = stores * (limits.UNSYNCED_BYTES_MAX + limits.FRAME_BYTES_MAX)
            found["a batch that is checked"] = limits.BATCH_RAW_BYTES_MAX
        if self.has_broker:
            found["indexes"] = 2 * limits.SEGMENT_INDEX_BYTES + limits.INDEX_CACHE_BYTES
            found["caches"] = limits.KEY_WINDOWS_BYTES_MAX + limits.FETCHES_BYTES
        if not stores:
            found["changes that meta clients follow"] = limits.FEEDS_BYTES
        if self.pending_max is not None:
            rows = self.pending_max + limits.DELAY_REMEMBERED_MAX
            found[f"--pending-max {self.pending_max}"] = rows * limits.DELAY_ROW_BYTES
            found["delayed messages on their way"] = limits.DELAY_UNMOVED_BYTES_MAX + limits.DELAY_OUTSTANDING_BYTES_MAX
        return found

    @property
    def fixed_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def smallest_mib(self) -> int:
        """The least ceiling that fits these parts."""
        return _ceiling_of(self.fixed_bytes + limits.BUDGETS_BYTES_MIN)

    def left(self, memory_mib: int) -> int:
        """The bytes that budgets share under this ceiling; `Misuse` where that is too little, with a ceiling that
        fits."""
        left = memory_mib * _MIB * (_ALLOCATOR_SHARE - 1) // _ALLOCATOR_SHARE - self.fixed_bytes
        if left >= limits.BUDGETS_BYTES_MIN:
            return left
        parts = ", ".join(f"{what}{_between(what)}{_mib(size)}" for what, size in self.parts().items())
        least = limits.BUDGETS_BYTES_MIN
        raise Misuse(
            f"--memory-mib {memory_mib} is too little: in MiB there are {parts}, budgets for what clients make the "
            f"server hold {_mib(least)}, and an eighth of all for the allocator. Give --memory-mib "
            f"{self.smallest_mib}{self._smaller(memory_mib)}"
        )

    def _smaller(self, memory_mib: int) -> str:
        """Other settings that would fit, if any."""
        ways = []
        over = _up(self.smallest_mib - memory_mib, _ALLOCATOR_SHARE, _ALLOCATOR_SHARE - 1) + 1
        buffer_mib = self.buffer_mib - -(-over // 3)
        if buffer_mib * _MIB >= limits.FRAME_BYTES_MAX:
            ways.append(f"--buffer-mib {buffer_mib}")
        if self.pending_max is not None:
            pending_max = self.pending_max - -(-over * _MIB // limits.DELAY_ROW_BYTES)
            if pending_max > 0:
                ways.append(f"--pending-max {pending_max}")
        return "".join(f", or {way}" for way in ways)


def broker_plan(memory_mib: int, buffer_mib: int, pending_max: int | None = None) -> MemoryPlan:
    """The plan of a broker; with `pending_max`, of a broker and a delay server in one process."""
    needs = MemoryNeeds(buffer_mib, has_broker=True, pending_max=pending_max)
    left = needs.left(memory_mib)
    groups, streams, names, connections = _divided(left, _GROUPS, _STREAMS, _NAMES, _CONNECTIONS)
    has_delay = pending_max is not None
    delay_streams, delay_names = (streams // _DELAY_SHARE, names // _DELAY_SHARE) if has_delay else (0, 0)
    return MemoryPlan(
        memory_mib * _MIB,
        needs.fixed_bytes,
        groups_bytes=groups,
        streams_bytes=streams - delay_streams,
        names_bytes=names - delay_names,
        connections_max=connections // limits.CONNECTION_BYTES,
        delay_streams_bytes=delay_streams,
        delay_names_bytes=delay_names,
    )


def delay_plan(memory_mib: int, buffer_mib: int, pending_max: int) -> MemoryPlan:
    """The plan of a delay server alone."""
    needs = MemoryNeeds(buffer_mib, pending_max=pending_max)
    streams, names, connections = _divided(needs.left(memory_mib), _STREAMS, _NAMES, _CONNECTIONS)
    return MemoryPlan(
        memory_mib * _MIB,
        needs.fixed_bytes,
        delay_streams_bytes=streams,
        delay_names_bytes=names,
        connections_max=connections // limits.CONNECTION_BYTES,
    )


def meta_plan(memory_mib: int, buffer_mib: int) -> MemoryPlan:
    """The plan of a meta server."""
    needs = MemoryNeeds(buffer_mib)
    registry, connections = _divided(needs.left(memory_mib), _REGISTRY, _CONNECTIONS)
    return MemoryPlan(
        memory_mib * _MIB,
        needs.fixed_bytes,
        registry_bytes=registry,
        connections_max=connections // limits.CONNECTION_BYTES,
    )


def _divided(left: int, *shares: _Share) -> list[int]:
    parts = sum(each.parts for each in shares)
    return [int(left * each.parts / parts / each.of_picture) for each in shares]


def _ceiling_of(size: int) -> int:
    """In MiB, the allocator's eighth included."""
    return -(-_up(size, _ALLOCATOR_SHARE - 1, _ALLOCATOR_SHARE) // _MIB)


def _up(value: int, by: int, times: int) -> int:
    """value * times / by, rounded up."""
    return -(-value * times // by)


def _mib(size: int) -> int:
    return -(-size // _MIB)


def _between(what: str) -> str:
    """A colon after a name that ends with a number, which would run into the number that follows."""
    return ": " if what[-1].isdigit() else " "
