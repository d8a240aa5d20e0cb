"""A directory that is held open, so that its path cannot come to mean another directory.

Every call that uses a path looks it up again. If the directory is moved, or its file system is unmounted, the path
leads to nothing, or to another directory. A program that continues there loses what it wrote before. So the owner of a
directory holds a descriptor of it, and of each directory below that it uses. All later calls begin at these descriptors
and reach the directory that was locked, wherever it is now. `check` notices that a path leads elsewhere.

Before `hold`, and for readers that never lock, names are plain paths.
"""

from __future__ import annotations

import errno
import os
import threading

from fairway import limits
from fairway.errors import DirectoryMoved, NoSuchFile
from fairway.runtime.real_file import faults, sync_descriptor, sync_directory

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_held: set[int] = set()  # descriptors of this process; only iterated to close them all


def _drop_inherited() -> None:
    """A forked child owns nothing: its copies would keep a file system from being unmounted."""
    while _held:
        os.close(_held.pop())


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
                _held.discard(fd)
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
                if error.errno not in _ABSENT:
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
        _held.add(fd)
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
