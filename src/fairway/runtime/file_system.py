"""The machine's file system: one open file, a directory held open, and errors turned into faults.

`RealDisk` decides when and on which thread; this module does the work. All input and output of a `RealFile` is
positioned (pread, pwritev), so readers and the one writer share a descriptor without sharing an offset.

A `HeldDirectory` is held open, so that its path cannot come to mean another directory. Every call that uses a path
looks it up again. If the directory is moved, or its file system is unmounted, the path leads to nothing, or to another
directory. A program that continues there loses what it wrote before. So the owner of a directory holds a descriptor of
it, and of each directory below that it uses. All later calls begin at these descriptors and reach the directory that
was locked, wherever it is now. `check` notices that a path leads elsewhere. Before `hold`, and for readers that never
lock, names are plain paths.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fairway import limits
from fairway.errors import DirectoryMoved, DiskFull, Misuse, NoSuchFile, ReadOnlyDisk, StorageFault, invariant
from fairway.runtime.disk import Part, readable

_PARTS_MAX = max(os.sysconf("SC_IOV_MAX"), 16)  # parts per pwritev; -1 means "unknown", 16 is what POSIX promises
_SCRATCH_BYTES = 1 << 20  # per reading thread: reading into fresh memory this large is 6 times slower than a warm copy
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_DSYNC: int | None = getattr(os, "RWF_DSYNC", None) if sys.platform == "linux" else None
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE

ROOM_REMEDY = "free some room on that file system or move the data directory to a larger one"
_RIGHTS = "mount the file system writable and let this user write there"
_ABSENT = "check that the data directory is the right one, and restore the file if it is"
_LINK = "remove the link, or put in its place the file or directory that it leads to"
_NO_FILE = "move it away: it is none of Fairway's"
_DEVICE = "stop, check the device and the kernel's log, then start again"
_KINDS: dict[int, tuple[type[StorageFault], str]] = {
    errno.ENOSPC: (DiskFull, ROOM_REMEDY),
    errno.EDQUOT: (DiskFull, ROOM_REMEDY),
    errno.EROFS: (ReadOnlyDisk, _RIGHTS),
    errno.EACCES: (ReadOnlyDisk, _RIGHTS),
    errno.EPERM: (ReadOnlyDisk, _RIGHTS),
    errno.ENOENT: (NoSuchFile, _ABSENT),
    errno.EISDIR: (StorageFault, _NO_FILE),
    errno.ENOTDIR: (StorageFault, _NO_FILE),
    errno.EEXIST: (StorageFault, _NO_FILE),
}
_REFUSED_LINK = (errno.ELOOP, errno.ENOTDIR)  # from O_NOFOLLOW alone, and from O_NOFOLLOW with O_DIRECTORY
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


def fault(error: OSError, attempted: str, path: str) -> StorageFault:
    """The error in our own words: the file, what was attempted, the reason, the remedy."""
    if error.errno in _REFUSED_LINK and os.path.islink(path):
        return StorageFault(f"cannot {attempted} {path}: it is a symbolic link, and Fairway follows none; {_LINK}")
    kind, remedy = _KINDS.get(error.errno or 0, (StorageFault, _DEVICE))
    return kind(f"cannot {attempted} {path}: {error.strerror or error}; {remedy}")


@contextmanager
def faults(attempted: str, path: str) -> Iterator[None]:
    """Turn every OSError into a fault."""
    try:
        yield
    except OSError as error:
        raise fault(error, attempted, path) from error


def open_private(path: str, name: str, flags: int, *, dir_fd: int | None = None) -> int:
    """The descriptor of a regular file, relative to `dir_fd`; a new file is for this user alone. Errors name `path`.

    Anybody who can write to the directory could plant a link, and have this process overwrite or read a file elsewhere.
    A planted pipe would block the open.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with faults("create" if flags & os.O_CREAT else "open", path):
        fd = os.open(name, flags, limits.FILE_MODE, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageFault(f"cannot open {path}: it is no regular file; {_NO_FILE}")
    return fd


if sys.platform == "darwin":

    def _full_sync(fd: int) -> None:
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # on macOS, fsync alone stops at the drive's cache
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.fsync(fd)

    _sync_data, _sync_all = _full_sync, _full_sync
else:
    _sync_data, _sync_all = os.fdatasync, os.fsync


@contextmanager
def _sync_faults(path: str) -> Iterator[None]:
    """A failed sync is never `DiskFull` or another kind: dirty pages may be gone, and nothing can be undone."""
    try:
        yield
    except OSError as error:
        raise StorageFault(f"cannot sync {path}: {error.strerror or error}; {_DEVICE}") from error


def sync_data(fd: int, path: str) -> None:
    """Sync a file's bytes."""
    with _sync_faults(path):
        _sync_data(fd)


def sync_directory(path: str) -> None:
    """Sync a directory's entries."""
    with faults("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_descriptor(fd, path)
    finally:
        os.close(fd)


def sync_descriptor(fd: int, path: str) -> None:
    """Sync the entries of an open directory."""
    with _sync_faults(path):
        os.fsync(fd)


def write_all(fd: int, parts: Sequence[Part], position: int) -> int:
    """Write all parts from `position` on, in as many calls as the kernel needs; return where they end."""
    for first in range(0, len(parts), _PARTS_MAX):
        position = _write_some(fd, parts[first : first + _PARTS_MAX], position)
    return position


def _write_some(fd: int, parts: Sequence[Part], position: int) -> int:
    size = sum(map(len, parts))
    written = os.pwritev(fd, parts, position) if size else 0
    invariant(written <= size, "parts must be bytes: a memoryview of wider items was given")
    if written < size:  # rare: a signal, a full disk, more than 2 GiB
        rest = memoryview(b"".join(parts))
        while written < size:
            written += os.pwritev(fd, [rest[written:]], position + written)
    return position + size


def _read_all(fd: int, position: int, wanted: int) -> bytes:
    data = os.pread(fd, wanted, position)
    while 0 < len(data) < wanted:  # a signal, or more than 2 GiB
        more = os.pread(fd, wanted - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's fallocate; None where the C library has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)  # musl has 64 bits in the latter
    if found is None:
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found.restype = ctypes.c_int
    function: Callable[[int, int, int, int], int] = found
    return function


_fallocate = _find_fallocate()


class _Scratch(threading.local):
    """One warm buffer per reading thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_SCRATCH_BYTES))


_scratch = _Scratch()


class RealFile:
    """A file and its descriptor.

    Threads: any thread may read at any time, even while another closes: the descriptor outlives its last user. One
    thread at a time may write or cut: the directory's writer, or the owner while no commit is under way. `generation`,
    `opens` and `close` belong to the owner's thread.
    """

    def __init__(self, name: str, path: str, fd: int, *, writable: bool, forget: Callable[[RealFile], None]) -> None:
        self._name = name
        self._fd = fd
        with faults("look at", path):
            self._size = os.fstat(fd).st_size
        self._forget = forget
        self._guard = threading.Lock()
        self._users = 1  # the disk itself, until the last close
        self._given = 0  # commits; only the owner's thread counts here
        self._carried_out = 0  # commits; only the writer counts here
        self._reserved_size = 0
        self._can_dsync = True
        self._refused_generation = -1
        self.is_blind = _NOWAIT is None
        self._fault: Exception | None = None
        self.path = path
        self.writable = writable
        self.opens = 1
        self.named = False  # whether this process has synced the file's directory
        self.generation = 0

    def __repr__(self) -> str:
        return f"<RealFile {self._name} {self._size}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return self._size

    @property
    def under_way(self) -> bool:
        """Whether commits were given and not yet carried out."""
        return self._given != self._carried_out

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, position: int, size: int) -> bytes:
        return self.reading(position, size)()

    def reading(self, position: int, size: int) -> Callable[[], bytes]:
        """A read to carry out exactly once, on any thread; until then the descriptor stays open."""
        wanted = readable(position, size, self._size)
        fd = self._enter()

        def carry_out() -> bytes:
            try:
                return _read_all(fd, position, wanted)
            except OSError as error:
                raise fault(error, "read", self.path) from error
            finally:
                self._leave()

        return carry_out

    def read_cached(self, position: int, size: int) -> bytes | None:
        wanted = readable(position, size, self._size)
        if _NOWAIT is None or self.is_blind:
            return None
        view = _scratch.view if wanted <= _SCRATCH_BYTES else memoryview(bytearray(wanted))
        fd = self._enter()
        try:
            return bytes(view[: os.preadv(fd, [view[:wanted]], position, _NOWAIT)])
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise fault(error, "read", self.path) from error
            self.is_blind = True  # tmpfs, for example
            return None
        finally:
            self._leave()

    # --- writing ---------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """A commit is given: keep the descriptor open until `finish`. Return the commit's generation."""
        self._enter()
        self._given += 1
        return self.generation

    def finish(self) -> None:
        self._carried_out += 1
        self._leave()

    def admit(self, generation: int) -> None:
        """Refuse commits that were given before their caller knew of an earlier fault."""
        if not self.writable:
            raise ReadOnlyDisk(f"cannot write {self.path}: it could only be opened for reading; {_RIGHTS}")
        if self._fault is not None:
            raise StorageFault(f"cannot write {self.path}: an earlier fault left it unknown ({self._fault})")
        if generation <= self._refused_generation:
            raise DiskFull(f"cannot write {self.path}: the commit before this one found no room; {ROOM_REMEDY}")

    def refuse(self, generation: int) -> None:
        self._refused_generation = max(self._refused_generation, generation)

    def poison(self, fault: Exception) -> None:
        """Nobody knows what is on disk: accept no more writes."""
        self._fault = fault

    def write(self, parts: Sequence[Part]) -> int:
        """Write behind the end; return the new end, which counts only after `grow`. After `DiskFull` the file is cut
        back."""
        with self._room():
            return write_all(self._fd, parts, self._size)

    def write_synced(self, parts: Sequence[Part]) -> int | None:
        """`write` and `sync` in one system call; None if that is impossible and nothing was done.

        A thread that returns from a system call waits for the interpreter. With a busy loop that wait is a good part of
        a commit (bench/storage, 64 in flight: 0.7 of the time). On a full disk nobody can tell whether the write or the
        sync failed. Either way nothing before the old end was touched, and everything behind it is cut off again.
        """
        if _DSYNC is None or not self._can_dsync or len(parts) > _PARTS_MAX:
            return None
        size = sum(map(len, parts))
        try:
            with self._room():
                written = os.pwritev(self._fd, parts, self._size, _DSYNC) if size else 0
        except StorageFault as reason:
            if isinstance(reason.__cause__, OSError) and reason.__cause__.errno in _UNSUPPORTED:
                self._can_dsync = False
                return None
            raise
        return self._size + size if written == size else None  # cut short: rare, and `write` does the work again

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = fault(error, "write", self.path)
            if isinstance(reason, DiskFull):
                self._cut_back()
            raise reason from error

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            raise StorageFault(
                f"cannot cut {self.path} back to {self._size} bytes after it found no room: {error.strerror}; {_DEVICE}"
            ) from error
        self.sync_all()  # refused bytes must not come back after a power cut
        self.allocate(self._reserved_size)  # the cut released the reserved blocks

    def write_over(self, position: int, data: bytes) -> None:
        """Write other bytes over a place, synced; the file may grow. After `DiskFull` its length is unchanged."""
        with self._room():
            end = write_all(self._fd, [data], position)
        self.sync_all()
        self._size = max(self._size, end)

    def write_again(self, position: int) -> None:
        """Write the same bytes again from `position` to the end: that makes their pages dirty."""
        while data := self.read(position, _SCRATCH_BYTES):
            with faults("write", self.path):
                position = write_all(self._fd, [data], position)

    def sync(self) -> None:
        sync_data(self._fd, self.path)

    def grow(self, end: int) -> None:
        self._size = end

    def cut(self, size: int) -> None:
        """Shorten the file, without a sync; reserved space is released."""
        with faults("cut", self.path):
            os.ftruncate(self._fd, size)
        self._size = size
        self._reserved_size = 0

    def sync_all(self) -> None:
        """Sync also what fdatasync may leave out, such as a reduced size."""
        with _sync_faults(self.path):
            _sync_all(self._fd)

    # --- room ------------------------------------------------------------------------------------------------------

    def missing_room(self, size: int) -> int:
        """Bytes that the file system has yet to allocate for the file to grow to `size`."""
        with faults("look at", self.path):
            return max(0, size - os.fstat(self._fd).st_blocks * 512)

    def allocate(self, size: int) -> None:
        """Allocate the blocks up to `size` now, where the platform can; the file's size stays."""
        if _fallocate is None or size <= self._size:
            return
        while _fallocate(self._fd, _KEEP_SIZE, self._size, size - self._size) != 0:
            number = ctypes.get_errno()
            if number in _UNSUPPORTED:
                return
            if number != errno.EINTR:
                raise fault(OSError(number, os.strerror(number)), "reserve room for", self.path)
        self._reserved_size = max(self._reserved_size, size)

    # --- descriptor --------------------------------------------------------------------------------------------------

    def _enter(self) -> int:
        with self._guard:
            if self.opens == 0:
                raise Misuse(f"{self._name} was closed: open it again")
            self._users += 1
        return self._fd

    def _leave(self) -> None:
        with self._guard:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self._fd)

    def close(self) -> None:
        """Undo one `open`; after the last one the descriptor closes as soon as readers and commits are done with it."""
        with self._guard:
            if self.opens == 0:
                return
            self.opens -= 1
            last = self.opens == 0
        if last:
            self._forget(self)
            self._leave()

    def abandon(self) -> None:
        """The disk is closing: close the file, whoever still has it open."""
        self.opens = min(self.opens, 1)
        self.close()


_UNREACHABLE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
held_descriptors: set[int] = set()  # directories and locks of this process; only iterated to close them all


def _drop_inherited() -> None:
    """A forked child owns nothing: its copies would keep a lock, and a file system from being unmounted."""
    while held_descriptors:
        os.close(held_descriptors.pop())


os.register_at_fork(after_in_child=_drop_inherited)


class HeldDirectory:
    """One root and the directories below it. Names are relative to the root and use `/`; "" is the root.

    Threads: any thread may use it.
    """

    def __init__(self, root: str, *, is_below: bool = False) -> None:
        """`is_below`: the root is below a directory that the operator named, so it may be no link."""
        self.root = root
        self._is_below = is_below
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._fds: dict[str, int] = {}  # by directory; empty: nothing is held

    @property
    def is_held(self) -> bool:
        return bool(self._fds)

    def hold(self) -> None:
        """Make the root if it is absent, and hold it from now on."""
        if not self.is_held:
            self.make("")
            self._fds[""] = self._open(self.root, None)

    def close(self) -> None:
        with self._guard:
            fds, self._fds = self._fds, {}
        if self._pid == os.getpid():  # a forked child has closed its copies already
            for fd in fds.values():
                held_descriptors.discard(fd)
                os.close(fd)

    def check(self) -> None:
        """`DirectoryMoved` if a path no longer leads to the held directory."""
        with self._guard:
            held = list(self._fds.items())
        root_fd = dict(held).get("")
        for directory, fd in held:
            try:
                found = os.stat(directory, dir_fd=root_fd) if directory else os.stat(self.root)
            except OSError as error:
                if error.errno not in _UNREACHABLE:
                    continue  # a parent that may not be entered now: nothing is known, and the descriptors still hold
                raise self._moved(directory, fd, "nothing is there any more") from error
            if not os.path.samestat(found, os.fstat(fd)):
                raise self._moved(directory, fd, "another directory is in its place")

    def _moved(self, directory: str, fd: int, what: str) -> DirectoryMoved:
        if os.fstat(fd).st_nlink == 0:  # no directory has an entry of it: its files can never be reached again
            advice = (
                "it was removed, and what was acknowledged in it is gone with it. Restore it from a backup, or from "
                "another copy, and start again"
            )
        else:
            advice = (
                "it was moved or unmounted. Nothing is lost: everything that was acknowledged is in the directory that "
                "was locked. Put that one back, or name its new place, and start again"
            )
        return DirectoryMoved(
            f"{self.path(directory)} is no longer the directory that this process locked: {what}; {advice}"
        )

    # --- names -------------------------------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """The full path, for messages and for readers that never lock."""
        return os.path.join(self.root, name) if name else self.root

    def at(self, name: str) -> tuple[str, int | None]:
        """The arguments of a system call: a name, and the descriptor that it is relative to (`dir_fd`). `NoSuchFile` if
        its directory is absent."""
        if not self.is_held:
            return self.path(name), None
        directory, _, last = name.rpartition("/")
        return last, self._descriptor(directory)

    def has(self, directory: str) -> bool:
        """Whether the directory exists."""
        if not self.is_held:
            return os.path.isdir(self.path(directory))
        try:
            self._descriptor(directory)
        except NoSuchFile:
            return False
        return True

    def listing(self, directory: str) -> list[str]:
        """The names in the directory; `NoSuchFile` if it is absent."""
        with faults("list", self.path(directory)):
            return os.listdir(self._descriptor(directory) if self.is_held else self.path(directory))

    def free_bytes(self) -> int:
        """Free space on the directory's file system."""
        path = self.root
        while not self.is_held and not os.path.exists(path):  # before the first write it may not be there yet
            path = os.path.dirname(path)
        with faults("measure the room of", self.root):
            found = os.statvfs(self._descriptor("") if self.is_held else path)
        return found.f_bavail * found.f_frsize

    # --- making ------------------------------------------------------------------------------------------------------

    def make(self, directory: str) -> None:
        """Make a directory if it is absent. A held root is never made again."""
        if self.is_held:
            self.check()
            if not self.has(directory):
                with faults("create", self.path(directory)):
                    self._make_below(directory)
            return
        path, missing, above = self.path(directory), [], self.root
        while not os.path.isdir(above) and above != os.path.dirname(above):
            above = os.path.dirname(above)
            missing.append(above)
        with faults("create", path):
            make_private(path)
        for above in missing:  # sync the directories above the root now: nobody does so later
            sync_directory(above)

    def _make_below(self, directory: str) -> None:
        parts = directory.split("/")
        for count in range(1, len(parts) + 1):
            try:
                os.mkdir("/".join(parts[:count]), limits.DIRECTORY_MODE, dir_fd=self._descriptor(""))
            except FileExistsError:
                continue

    def sync(self, directory: str) -> None:
        """Sync the directory's entries."""
        if self.is_held:
            sync_descriptor(self._descriptor(directory), self.path(directory))
        else:
            sync_directory(self.path(directory))

    def _descriptor(self, directory: str) -> int:
        with self._guard:
            known = self._fds.get(directory)
            if known is None:
                known = self._fds[directory] = self._open(directory, self._fds[""])
            return known

    def _open(self, name: str, root_fd: int | None) -> int:
        path = self.path(name) if root_fd is not None else name
        with faults("open", path):
            # The directory that the operator named may be a link; nothing below it may be.
            follow = 0 if root_fd is None and not self._is_below else os.O_NOFOLLOW
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=root_fd)
        held_descriptors.add(fd)
        return fd


def make_private(path: str) -> None:
    """Make a directory and its absent parents, each for this user alone."""
    if not os.path.isdir(path):
        make_private(os.path.dirname(path))
        try:
            os.mkdir(path, limits.DIRECTORY_MODE)
        except FileExistsError:
            if not os.path.isdir(path):  # otherwise another process was quicker
                raise
