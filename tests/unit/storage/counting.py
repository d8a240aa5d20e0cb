"""A disk that counts what is read through it, and what is left open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fairway.errors import StorageFault
from fairway.runtime.disk import Completion, Disk, File, Part, ReadCompletion


class CountedFile:
    """A file of the disk below, and how much was read of it."""

    def __init__(self, below: File, disk: CountingDisk) -> None:
        self.below = below
        self._disk = disk

    @property
    def name(self) -> str:
        return self.below.name

    @property
    def size(self) -> int:
        return self.below.size

    def read(self, position: int, size: int) -> bytes:
        data = self.below.read(position, size)
        self._disk.count(self.name, position, len(data))
        return data

    def read_cached(self, position: int, size: int) -> bytes | None:
        return self.below.read_cached(position, size)

    @property
    def is_blind(self) -> bool:
        return self.below.is_blind

    def close(self) -> None:
        self._disk.open_files -= 1
        self.below.close()


class CountingDisk:
    """The `Disk` port over another one. `reads` has (position, size) of each read, by file."""

    def __init__(self, below: Disk) -> None:
        self._below = below
        self.reads: dict[str, list[tuple[int, int]]] = {}
        self.open_files = 0

    def count(self, name: str, position: int, size: int) -> None:
        self.reads.setdefault(name, []).append((position, size))

    def read_bytes(self, name: str) -> int:
        return sum(size for _, size in self.reads.get(name, []))

    def lock(self) -> None:
        self._below.lock()

    def watch(self, moved: Callable[[StorageFault], None]) -> None:
        self._below.watch(moved)

    def listing(self, directory: str) -> list[str]:
        return self._below.listing(directory)

    def open(self, name: str, *, create: bool = False) -> File:
        file = CountedFile(self._below.open(name, create=create), self)
        self.open_files += 1
        return file

    def truncate(self, file: File, size: int) -> None:
        self._below.truncate(_below(file), size)

    def sync(self, file: File, position: int) -> None:
        self._below.sync(_below(file), position)

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        self._below.publish(name, parts)

    def remove(self, name: str) -> None:
        self._below.remove(name)

    def move(self, old: str, new: str) -> None:
        self._below.move(old, new)

    def repair(self, file: File, position: int, data: bytes) -> None:
        self._below.repair(_below(file), position, data)

    def reserve(self, file: File, size: int) -> None:
        self._below.reserve(_below(file), size)

    def free_bytes(self) -> int:
        return self._below.free_bytes()

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        self._below.commit(_below(file), parts, done, sync=sync)

    def fetch(self, file: File, position: int, size: int, done: ReadCompletion) -> None:
        self._below.fetch(_below(file), position, size, done)

    def publish_later(self, name: str, parts: Sequence[Part], done: Completion) -> None:
        self._below.publish_later(name, parts, done)

    def remove_later(self, name: str, done: Completion) -> None:
        self._below.remove_later(name, done)

    def deliver(self) -> None:
        self._below.deliver()

    def close(self) -> None:
        self._below.close()


def _below(file: File) -> File:
    assert isinstance(file, CountedFile)
    return file.below
