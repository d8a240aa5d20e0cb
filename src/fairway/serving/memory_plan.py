"""How the memory of a server is divided: its ceiling, the parts that are always the same, and the budgets that share
what is left.

    ceiling (--memory-mib)
      = an eighth for what the allocator keeps: pages that are only partly in use
      + fixed parts: the process itself, three times --buffer-mib, appends that are not synced, one batch that is
        checked, indexes, caches; rows of pending messages in a delay server
      + budgets that grow with what clients do: groups, dedupe windows, names, connections, registry nodes

What is left after the fixed parts is divided between the budgets by constant shares. A checkpoint pictures groups,
dedupe windows and names in memory while it is written, so a budget gets less than its share: the rest is for the
picture. A ceiling that leaves less than `limits.BUDGETS_BYTES_MIN` for all budgets is refused, with what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fairway import limits
from fairway.errors import Misuse

_ALLOCATOR_SHARE = 8  # an eighth is kept back for pages that are only partly in use
_MIB = limits.MIB


class _Share(NamedTuple):
    """Of what is left: so many parts."""

    parts: int
    of_picture: float = 1.0  # what the items take with their picture in a checkpoint, as a multiple of the budget


# Sorted pairs of the largest group are half of what it holds; what is packed is a tenth of it, twice.
_GROUPS = _Share(40, 1.5)
# The windows as they are, in one piece, and that piece in the checkpoint.
_STREAMS = _Share(30, 3.0)
_NAMES = _Share(20, 2.0)
_DELAY_SHARE = 4  # a delay server beside a broker has a quarter of dedupe windows and names
_CONNECTIONS = _Share(10)
# The tree, its checksums, the file's cache, and what the meta server makes of it for its clients.
_REGISTRY = _Share(60, 3.0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each budget may have. A budget that the server does not have is 0."""

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
    """The fixed parts of one kind of server, as they follow from its settings."""

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
        """The least ceiling that these parts fit under."""
        return _ceiling_of(self.fixed_bytes + limits.BUDGETS_BYTES_MIN)

    def left(self, memory_mib: int) -> int:
        """What budgets share under this ceiling; `Misuse` where that is too little, with what would fit."""
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
        """What else would fit, if anything does."""
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
    """Of a broker; with `pending_max`, of a broker and a delay server in one process."""
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
    """Of a delay server alone."""
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
    """Of a meta server."""
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
    """A name that ends with a number is kept apart from the one that follows."""
    return ": " if what[-1].isdigit() else " "
