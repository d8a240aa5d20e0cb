"""A directory that several processes of one host share. Each has its own disks there, and takes over those of the dead.

    DIR/lock             held for moments, by a process that makes, claims or discards a disk
    DIR/<16 digits>/     one disk, with a lock of its own that ends with the process which holds it

Because of the first lock nobody finds a disk that is half made or half removed. The kernel releases the second lock
when its process ends in any way, so exactly one process at a time has a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator

from fairway.errors import DirectoryLocked, DirectoryMoved, Misuse, WrongDirectory
from fairway.runtime.disk import LOCK_NAME
from fairway.runtime.file_system import HeldDirectory, faults, open_private
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import Rng

_NAME = re.compile(r"[0-9a-f]{16}")


class SharedDirectory:
    """One process's view of the directory. `post` brings completions of its disks back to their owner."""

    def __init__(self, directory: str | os.PathLike[str], *, post: Callable[..., object] | None = None) -> None:
        self.directory = os.path.abspath(os.fspath(directory))
        self._post = post
        self._held = HeldDirectory(self.directory)  # from the first disk on: another directory is not ours to use
        self._guard = threading.Lock()  # the kernel's lock belongs to the whole process

    def disk(self, name: str) -> RealDisk:
        """A disk, present or future, without its lock: to read."""
        return RealDisk(self._path(name), post=self._post, is_guest=True, is_below=True)

    def exists(self) -> bool:
        return os.path.isdir(self.directory)

    def names(self) -> list[str]:
        """The disks in the directory, whoever owns them."""
        try:
            found = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise WrongDirectory(f"cannot list {self.directory}: {error.strerror or error}") from error
        return sorted(name for name in found if _NAME.fullmatch(name))

    def make(self, rng: Rng) -> tuple[int, RealDisk]:
        """A new, locked disk, and its number."""
        number = rng.bits(64) or 1
        with self._locked():
            disk = self.disk(f"{number:016x}")
            disk.lock()
        return number, disk

    def claim(self, name: str) -> RealDisk | None:
        """A disk whose owner is dead, locked; None: the owner lives, or the disk is gone."""
        with self._locked():
            if not os.path.isdir(self._path(name)):
                return None
            disk = self.disk(name)
            if disk.owner() is not None:
                return None
            try:
                disk.lock()
            except DirectoryLocked:
                return None
            return disk

    def discard(self, name: str, disk: RealDisk) -> bool:
        """Close this process's disk, and remove it if it is empty; False: it has contents and stays."""
        path = self._path(name)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked())
            except DirectoryMoved:  # the disk's files are in the directory that was moved, and stay there
                disk.close()
                return False
            disk.close()  # finishes its work; nobody can claim the disk while this process has the other lock
            with faults("look into", path):
                inner = [each for each in os.listdir(path) if each != LOCK_NAME]
                if any(os.listdir(os.path.join(path, each)) for each in inner):
                    return False
                for each in inner:
                    os.rmdir(os.path.join(path, each))
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, LOCK_NAME))
                os.rmdir(path)
        return True

    def close(self) -> None:
        """Release the directory; its disks are closed one by one."""
        with self._guard:
            self._held.close()

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise Misuse(f"{name!r} is no disk of {self.directory}: their names have 16 digits")
        return os.path.join(self.directory, name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = os.path.join(self.directory, LOCK_NAME)
        with self._guard:
            self._held.hold()
            self._held.check()
            name, dir_fd = self._held.at(LOCK_NAME)
            fd = open_private(path, name, os.O_RDWR | os.O_CREAT, dir_fd=dir_fd)
            try:
                with faults("lock", path):
                    fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a close is not enough if a child was forked meanwhile
                os.close(fd)
