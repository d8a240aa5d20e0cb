"""The disk port, between the storage engine and a file system.

Names are relative to the disk's root and use `/`. Start-up and tools use the blocking calls. A running store uses the
calls with a `done` parameter: they return at once, and call `done(fault)` later, on the loop that owns the store.

A caller may rely on this:

- Commits to files of one directory are carried out in the order given; different directories go side by side.
- `commit` appends at the end of the file, then syncs. The first commit to a new file also syncs the directory that
  names it. When `done(None)` is called, the bytes survive a power cut.
- After `DiskFull` the file is as long as before that commit, even after a power cut. Commits to the file that were
  given before that `done` are refused too, because they would land in an unexpected place. After any other fault nobody
  knows what is on disk: the caller must stop. A failed sync may have dropped dirty pages, and a second one would lie.
- Parts stay unchanged until `done`; a `memoryview` among them is one of bytes.
- Reads end where completed commits end: a commit under way is not seen.
- `fetch` is `File.read` for bytes that may not be in memory. A few run at a time, in no order among each other. A file
  that is closed or removed meanwhile is still read. At most `FETCHES_MAX` may be under way.
- `publish` replaces a whole file: temporary file, sync, rename, sync of the directory. Readers see the old or the new.
- A crash during a `publish` leaves a file listed as `<name>.tmp`. Its name may only be removed.
- No OSError leaves a disk: every fault is a `StorageFault`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol, TypeAlias

from fairway.errors import FairwayError, Misuse, StorageFault

Part: TypeAlias = bytes | bytearray | memoryview
Completion: TypeAlias = Callable[[StorageFault | None], None]
ReadCompletion: TypeAlias = Callable[[bytes | StorageFault], None]

TEMPORARY = ".tmp"  # suffix of the file that `publish` writes first, beside the one that it replaces
LOCK_NAME = "lock"  # in the root: the disk's own, neither listed nor opened
READERS = 2  # fetches at a time: more would queue in the device, and hold back the syncs of others
FETCHES_MAX = 256  # given and not answered; callers queue their own fetches long before
_COMPONENT_BYTES_MAX = 255 - len(TEMPORARY)  # what common file systems allow, less room for the suffix


def checked(name: str, *, fresh: bool = False) -> str:
    """The name itself; `Misuse` if it leaves the root, or if a `fresh` one looks like a temporary file."""
    try:
        components = name.encode("utf-8", "surrogateescape").split(b"/")
    except UnicodeEncodeError as error:
        raise Misuse(f"bad file name {name!r}: it is not text") from error
    if any(component in (b"", b".", b"..") or b"\0" in component for component in components):
        raise Misuse(f"bad file name {name!r}: use a path relative to the data directory, such as 'log/0001'")
    if max(map(len, components)) > _COMPONENT_BYTES_MAX:
        raise Misuse(f"bad file name {name!r}: each part of it has at most {_COMPONENT_BYTES_MAX} bytes")
    if name == LOCK_NAME or (fresh and name.endswith(TEMPORARY)):
        raise Misuse(f"bad file name {name!r}: it belongs to the disk itself, choose another")
    return name


def parent(name: str) -> str:
    """The directory that holds the name; "" is the root."""
    return name.rpartition("/")[0]


def check_room_to_fetch(under_way: int) -> None:
    if under_way >= FETCHES_MAX:
        raise Misuse(f"{under_way} fetches are under way: wait for some of them before giving more")


def check_cut(name: str, size: int, file_size: int, *, is_growing: bool) -> None:
    if is_growing:
        raise Misuse(f"cannot cut {name} while commits to it are under way: wait for them")
    if not 0 <= size <= file_size:
        raise Misuse(f"cannot cut {name} of {file_size} bytes to {size}: a cut only shortens")


def check_repair(name: str, position: int, size: int, file_size: int, *, is_growing: bool) -> None:
    if not 0 <= position <= file_size:
        raise Misuse(f"cannot repair {name} of {file_size} bytes at {position}: a repair leaves no gap")
    if is_growing and position + size > file_size:
        raise Misuse(f"cannot repair {name} beyond its end while commits to it are under way: wait for them")


def readable(position: int, size: int, end: int) -> int:
    """How many of `size` bytes from `position` on lie before `end`."""
    if position < 0 or size < 0:
        raise Misuse(f"cannot read {size} bytes from position {position}: neither may be negative")
    return max(0, min(size, end - position))


class File(Protocol):
    """An open file."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes in the file, without commits that are under way."""

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes from `position`; fewer only where the file ends. May wait for the device."""

    def read_cached(self, position: int, size: int) -> bytes | None:
        """The part of that range that memory holds: all, a prefix, or None (nothing is cached, or `is_blind`)."""

    @property
    def is_blind(self) -> bool:
        """Whether the platform cannot tell what memory holds; known after the first `read_cached`."""

    def close(self) -> None: ...


def settles(future: asyncio.Future[None]) -> Callable[[FairwayError | None], None]:
    """The completion that settles a future: with None, or with the fault."""

    def done(fault: FairwayError | None) -> None:
        if future.done():
            return
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(fault)

    return done


class Disk(Protocol):
    """A directory tree with a lock."""

    def lock(self) -> None:
        """Own this root until `close` or the end of the process; `DirectoryLocked` if another process does."""

    def watch(self, moved: Callable[[StorageFault], None]) -> None:
        """Call `moved` once if the path of a locked root comes to lead elsewhere: the directory was moved, or its file
        system unmounted. Everything committed is in the directory that was locked."""

    def listing(self, directory: str) -> list[str]:
        """The names in a directory, sorted; empty where the directory is absent. "" is the root."""

    def open(self, name: str, *, create: bool = False) -> File:
        """Open for reading and committing. `create`: make the file and its directory if absent."""

    def truncate(self, file: File, size: int) -> None:
        """Cut the file and sync it; no commit to it may be under way. Reserved space is released."""

    def sync(self, file: File, position: int) -> None:
        """Write the file's bytes from `position` on again, then sync it and the directory that names it.

        For bytes that an earlier process left without a successful sync. A sync alone is not enough: if that process's
        sync failed, the kernel takes the pages for clean, shows them to every reader, and never writes them.
        """

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        """Replace or make a whole file, durably and atomically."""

    def remove(self, name: str) -> None:
        """Delete a file; absent is fine. The directory is synced."""

    def move(self, old: str, new: str) -> None:
        """Rename a file that nobody has open, and replace a file of the new name; absent is fine. Both directories are
        synced. A kill halfway leaves either name, or both."""

    def repair(self, file: File, position: int, data: bytes) -> None:
        """Write over the file from `position` on, or continue behind its end; then sync it and the directory that names
        it. A kill halfway leaves any part of the new bytes, so the old ones must be worthless."""

    def reserve(self, file: File, size: int) -> None:
        """Reserve space for the file to grow to `size` bytes; `DiskFull` if there is none. Its size stays."""

    def free_bytes(self) -> int:
        """Free space for everybody, without reservations."""

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        """Append the parts to the file; sync unless `sync` is False; then call `done`."""

    def fetch(self, file: File, position: int, size: int, done: ReadCompletion) -> None:
        """`file.read`, off the loop; then call `done` with the bytes or the fault. `Misuse` past the bound."""

    def publish_later(self, name: str, parts: Sequence[Part], done: Completion) -> None:
        """`publish`, off the loop."""

    def remove_later(self, name: str, done: Completion) -> None:
        """`remove`, off the loop."""

    def deliver(self) -> None:
        """Call `done` now for commits that are over already. Otherwise the loop's next turn calls it."""

    def close(self) -> None:
        """Finish the work given before, then release files and lock. `done` is not called for work still under way."""


def contents(disk: Disk, name: str) -> bytes:
    """The bytes of a whole file, without commits that are under way."""
    with closing(disk.open(name)) as file:
        return file.read(0, file.size)
