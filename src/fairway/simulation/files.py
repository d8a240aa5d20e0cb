"""Files of the simulated disk: as processes see them, as the platter has them, and what a power cut leaves.

    write, cut          → `cached` at once; `unsynced` until a sync brings it into `durable`
    create, rename,
    unlink              → `entries` at once; `unsynced` until a sync of that directory brings them into `durable`

At a power cut, the seed draws for each unsynced sector and each unsynced directory operation whether it is kept or
lost. A file's size is metadata of its own: it may be ahead of the data (the gap reads as zeros) or behind it (the data
is cut).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fairway.errors import Misuse, NoSuchFile, StorageFault
from fairway.runtime.rng import Rng

SECTOR_BYTES = 512  # a device writes a sector whole or not at all


@dataclass(frozen=True, slots=True)
class Write:
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    size: int


def apply(content: bytearray, change: Write | Cut) -> None:
    if isinstance(change, Cut):
        del content[change.size :]
        return
    end = change.position + len(change.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[change.position : end] = change.data


class Inode:
    """The contents of a file, cached and durable."""

    def __init__(self, content: bytes | bytearray = b"") -> None:
        self.cached = bytearray(content)
        self.durable = bytearray(content)
        self.unsynced: list[Write | Cut] = []
        self.reserved = 0

    @property
    def room(self) -> int:
        """Bytes of the disk's capacity that the file uses."""
        return max(len(self.cached), self.reserved)

    def change(self, change: Write | Cut) -> None:
        apply(self.cached, change)
        self.unsynced.append(change)

    def sync(self) -> None:
        for change in self.unsynced:
            apply(self.durable, change)
        self.unsynced.clear()

    def lose_dirt(self) -> None:
        """A failed sync: the pages count as clean from now on, and never reach the platter. A cut is no page: it stays
        in the file system's journal, and the next sync makes it durable."""
        self.unsynced = [change for change in self.unsynced if isinstance(change, Cut)]

    def after_power_cut(self, rng: Rng) -> Inode:
        if not self.unsynced:
            return Inode(self.durable)
        newest, size = self._draw_size(rng)
        content = bytearray(self.durable)
        chance = draw_chance(rng)
        for index, change in enumerate(self.unsynced):
            if isinstance(change, Cut):
                if index <= newest:
                    apply(content, change)
                continue
            for piece in sectors(change):
                if rng.uniform() < chance:
                    apply(content, piece)
            apply(content, _end_of(change, chance, rng))
        content.extend(bytes(max(0, size - len(content))))
        return Inode(content[:size])

    def _draw_size(self, rng: Rng) -> tuple[int, int]:
        """The size in the metadata, and the newest change that it includes (-1: none)."""
        sizes = [len(self.durable)]
        for change in self.unsynced:
            end = change.size if isinstance(change, Cut) else change.position + len(change.data)
            sizes.append(end if isinstance(change, Cut) else max(sizes[-1], end))
        known = (0, len(self.unsynced), rng.below(len(self.unsynced) + 1))[rng.below(3)]
        if known == len(self.unsynced) or isinstance(self.unsynced[known], Cut):
            return known - 1, sizes[known]
        return known - 1, sizes[known] + rng.below(sizes[known + 1] - sizes[known] + 1)


def sectors(write: Write) -> Iterator[Write]:
    """The whole sectors of a write, without its last one, which can tear."""
    position, end = write.position, write.position + len(write.data)
    while True:
        edge = (position // SECTOR_BYTES + 1) * SECTOR_BYTES
        if edge >= end:
            return
        yield Write(position, write.data[position - write.position : edge - write.position])
        position = edge


def _end_of(write: Write, chance: float, rng: Rng) -> Write:
    """The surviving part of a write's last sector: all, nothing, or its first bytes up to a tear."""
    end = write.position + len(write.data)
    first = max(write.position, (end - 1) // SECTOR_BYTES * SECTOR_BYTES)
    whole = end - first
    kept = whole if rng.uniform() < chance else (0, rng.below(whole + 1))[rng.below(2)]
    return Write(first, write.data[first - write.position : first - write.position + kept])


def draw_chance(rng: Rng) -> float:
    """The chance that a piece survives: nothing, everything and all between are each worth a try."""
    return (0.0, 1.0, rng.uniform(), rng.uniform())[rng.below(4)]


class Directory:
    """Names, and the files and directories that they lead to."""

    def __init__(self) -> None:
        self.entries: dict[str, Inode | Directory] = {}
        self.durable: dict[str, Inode | Directory] = {}
        self.unsynced: list[dict[str, Inode | Directory | None]] = []  # one operation each; None removes the name

    def change(self, operation: dict[str, Inode | Directory | None]) -> None:
        _rename(self.entries, operation)
        self.unsynced.append(operation)

    def sync(self) -> None:
        for operation in self.unsynced:
            _rename(self.durable, operation)
        self.unsynced.clear()

    def after_power_cut(self, rng: Rng) -> Directory:
        survivors = dict(self.durable)
        chance = draw_chance(rng)
        for operation in self.unsynced:
            if rng.uniform() < chance:
                _rename(survivors, operation)
        left = Directory()
        for name, node in survivors.items():
            left.entries[name] = node.after_power_cut(rng)
        left.durable = dict(left.entries)
        return left

    def inodes(self) -> Iterator[Inode]:
        for node in self.entries.values():
            if isinstance(node, Inode):
                yield node
            else:
                yield from node.inodes()


def _rename(entries: dict[str, Inode | Directory], operation: dict[str, Inode | Directory | None]) -> None:
    for name, node in operation.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Countdown:
    """A fault planned for the n-th time from now."""

    def __init__(self) -> None:
        self._left = 0

    def plan(self, nth: int) -> None:
        """1 is the next time; 0 cancels the plan."""
        if nth < 0:
            raise Misuse(f"a fault cannot strike the {nth}-th time from now: 1 is the next time, 0 is never")
        self._left = nth

    def strikes(self) -> bool:
        struck = self._left == 1
        self._left = max(0, self._left - 1)
        return struck


class Volume:
    """A tree of files with a bounded capacity and one lock: the part of a disk that outlives a process."""

    def __init__(self, capacity_bytes: int, root: Directory | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.root = root if root is not None else Directory()
        self.owner: object | None = None  # the holder of the lock

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - sum(inode.room for inode in self.root.inodes()))

    def after_power_cut(self, rng: Rng) -> Volume:
        return Volume(self.capacity_bytes, self.root.after_power_cut(rng))

    def directory(self, path: str) -> Directory | None:
        """The directory at that path; None if there is none."""
        node: Directory = self.root
        for name in path.split("/") if path else ():
            below = node.entries.get(name)
            if below is None:
                return None
            if isinstance(below, Inode):
                raise StorageFault(f"cannot look into {path}: Not a directory; choose another name")
            node = below
        return node

    def find(self, path: str) -> Inode | None:
        """The file at that path; None if there is none."""
        above, _, name = path.rpartition("/")
        directory = self.directory(above)
        node = directory.entries.get(name) if directory is not None else None
        if isinstance(node, Directory):
            raise StorageFault(f"cannot open {path}: Is a directory; choose another name")
        return node

    def file(self, path: str) -> Inode:
        found = self.find(path)
        if found is None:
            raise NoSuchFile(f"cannot open {path}: No such file or directory; check the name, or restore the file")
        return found
