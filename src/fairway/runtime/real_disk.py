"""The real disk: a directory of the machine behind the `Disk` port, with its writer and reader threads.

A commit goes from `commit` on the loop to the directory's queue, to its writer thread (write, sync, the first time also
a sync of the directory), through `post`, to `done` on the loop. Each directory that is committed to has one writer
thread. Only that thread writes behind a file's end, with one exception: where the device has proved fast and the thread
has nothing to do, the loop carries out small commits itself (`directory_writer`).

A fetch goes the same way, through a small pool of reader threads that all directories share (`threads.JobThreads`).

A process syncs a file's directory entry at its first commit to the file, even if it did not create the file. An earlier
process may have been killed between creating the file and syncing its entry.

A locked root is held open (`file_system.HeldDirectory`), so every call reaches the directory that was locked, whatever
becomes of its path. A commit notices within half a second that the path leads elsewhere, the creation of a file notices
at once, and `watch` notices even where nobody writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from fairway.errors import DirectoryLocked, DiskFull, Misuse, NoSuchFile, ReadOnlyDisk, StorageFault
from fairway.runtime.directory_writer import DirectoryWriter, DiskWork, InlineCommits
from fairway.runtime.disk import (
    LOCK_NAME,
    READERS,
    TEMPORARY,
    Completion,
    File,
    Part,
    ReadCompletion,
    check_cut,
    check_repair,
    check_room_to_fetch,
    checked,
    parent,
)
from fairway.runtime.file_system import (
    ROOM_REMEDY,
    HeldDirectory,
    RealFile,
    faults,
    held_descriptors,
    open_private,
    sync_data,
    sync_directory,
    write_all,
)
from fairway.runtime.threads import JobThreads

# 0.02 ms: how long a busy loop may keep a writer from the interpreter between two system calls. With Python's own 5 ms
# the disk idles while the loop gathers the next round (bench/storage: 1.25 times as long per append).
_SWITCH_S = 20e-6

POINTS = (  # the names that `at` is called with, for a campaign that kills the process at each of them
    "before-write",
    "after-write",
    "after-sync",
    "after-dirsync",
    "publish-created",
    "publish-written",
    "publish-synced",
    "publish-renamed",
    "publish-dirsynced",
    "after-truncate",
    "after-truncate-sync",
    "before-remove",
    "after-remove",
    "after-remove-dirsync",
)


_CHECK_S = 0.5  # between two checks of the path: five system calls, some microseconds
_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.01  # between tries: `owner` in another process holds the lock for some microseconds


class RealDisk:
    """A directory of the machine behind the `Disk` port.

    Threads: all calls come from one thread, the owner's; other threads may only read the files that it opens. `post`
    brings completions back to the owner (`loop.call_soon_threadsafe`). A disk does not cross a fork. `at` is called at
    named points, on the thread that is there, so that a crash campaign can kill the process at each of them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        post: Callable[..., object] | None = None,
        at: Callable[[str], None] | None = None,
        readers: int = READERS,
        is_guest: bool = False,
        is_below: bool = False,
        new_inline: Callable[[], InlineCommits] | None = InlineCommits,
    ) -> None:
        """`is_guest`: the disk is in a user's program. Its threads do not keep the program alive, it leaves the
        interpreter's switch interval alone, and its owner never waits for the device. `is_below`: the root is below a
        directory that the operator named, so it may be no link. `new_inline`: makes, for one directory, the object that
        decides which commits the owner carries out itself; None: the threads carry out all of them."""
        self._root = HeldDirectory(os.path.abspath(os.fspath(root)), is_below=is_below)
        self._checked_s = time.monotonic()
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None
        self._is_guest = is_guest
        self._new_inline = new_inline
        self._post = post
        self._at: Callable[[str], None] = at or (lambda _point: None)
        self._pid = os.getpid()
        self._lock_fd: int | None = None
        self._writers: dict[str, DirectoryWriter] = {}
        self._readers = JobThreads(readers, "disk-reader", is_daemon=is_guest)
        self._fetches = 0  # given and not answered
        self._answers: deque[tuple[Completion, StorageFault | None]] = deque()  # of work that the owner carried out
        self._guard = threading.Lock()  # over the two tables of files: writer threads remove names from them
        self._files: dict[str, RealFile] = {}  # what `open` of a name returns
        self._opened: dict[RealFile, None] = {}  # also files whose name is gone
        self._anchored: set[str] = set()  # directories whose own entry this process has synced
        self._closed = False

    # --- the root --------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        self._check_open()
        if self._lock_fd is not None:
            return
        self._root.hold()
        fd = -1
        try:
            fd = self._open_descriptor(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            self._take_lock(fd, self._root.path(LOCK_NAME))
            self._root.check()
        except BaseException:
            if fd >= 0:
                os.close(fd)
            self._root.close()
            raise
        held_descriptors.add(fd)
        self._lock_fd = fd

    def watch(self, moved: Callable[[StorageFault], None]) -> None:
        self._check_open()
        if self._watcher is None and self._post is not None:
            self._watcher = threading.Thread(target=self._watch, args=(moved,), name="disk-watch", daemon=True)
            self._watcher.start()

    def _watch(self, moved: Callable[[StorageFault], None]) -> None:
        """Check the root regularly, on a thread of its own."""
        while not self._ending.wait(_CHECK_S):
            try:
                self._root.check()
            except StorageFault as fault:
                self._tell(moved, fault)
                return

    def _check_root(self) -> None:
        """Check the root now and then, on whichever thread writes."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _CHECK_S:
            self._checked_s = now_s
            self._root.check()

    def owner(self) -> int | None:
        """The process that has locked this root, 0 if it left no id; None if nobody has. Changes nothing."""
        self._check_open()
        try:
            fd = self._open_descriptor(LOCK_NAME, os.O_RDONLY)
        except NoSuchFile:
            return None
        try:
            with faults("look at", self._root.path(LOCK_NAME)):
                return None if _try_lock(fd, fcntl.LOCK_SH) else int(_holder(fd) or 0)
        finally:
            os.close(fd)

    def _take_lock(self, fd: int, path: str) -> None:
        with faults("lock", path):
            for _ in range(_LOCK_TRIES):
                if _try_lock(fd, fcntl.LOCK_EX):
                    break
                time.sleep(_LOCK_PAUSE_S)
            else:
                raise DirectoryLocked(
                    f"cannot lock {self._root.root}: process {_holder(fd) or 'unknown'} is using it; "
                    "stop it or choose another directory"
                )
        with contextlib.suppress(OSError):  # the id only helps whoever is refused: a full disk must not stop us here
            os.pwrite(fd, f"{os.getpid():<15}\n".encode("ascii"), 0)

    def listing(self, directory: str) -> list[str]:
        self._check_open()
        try:
            names = self._root.listing(checked(directory) if directory else "")
        except NoSuchFile:
            return []
        return sorted(name for name in names if directory or name != LOCK_NAME)

    def free_bytes(self) -> int:
        self._check_open()
        return self._root.free_bytes()

    # --- files, blocking -------------------------------------------------------------------------------------------

    def open(self, name: str, *, create: bool = False) -> RealFile:
        self._check_open()
        checked(name, fresh=create)
        with self._guard:
            known = self._files.get(name)
        if known is not None:
            known.opens += 1
            return known
        if create:
            self._root.make(parent(name))
        fd, writable = self._open_file(name, create)
        file = RealFile(name, self._root.path(name), fd, writable=writable, forget=self._forget)
        with self._guard:
            self._files[name] = file
            self._opened[file] = None
        return file

    def truncate(self, file: File, size: int) -> None:
        mine = self._own(file)
        check_cut(mine.name, size, mine.size, is_growing=mine.under_way)
        mine.admit(mine.generation)
        try:
            mine.cut(size)
            self._at("after-truncate")
            mine.sync_all()
        except StorageFault as fault:
            mine.poison(fault)
            raise
        self._at("after-truncate-sync")

    def sync(self, file: File, position: int) -> None:
        mine = self._own(file)
        mine.admit(mine.generation)
        try:
            mine.write_again(position)
            mine.sync_all()
            self._name_durably(mine)
        except StorageFault as fault:
            mine.poison(fault)
            raise

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        self._check_open()
        self._publish(checked(name, fresh=True), parts)

    def remove(self, name: str) -> None:
        self._check_open()
        self._remove(checked(name))

    def move(self, old: str, new: str) -> None:
        self._check_open()
        self._root.make(parent(checked(new, fresh=True)))
        try:
            self._rename(checked(old), new)
        except NoSuchFile:
            if not self._root.has(parent(old)):
                return
        for name in (new, old):  # even if it was absent: an earlier process may have renamed and not synced
            self._forget_name(name)
            self._sync_directory(parent(name))

    def repair(self, file: File, position: int, data: bytes) -> None:
        mine = self._own(file)
        mine.admit(mine.generation)
        check_repair(mine.name, position, len(data), mine.size, is_growing=mine.under_way)
        try:
            mine.write_over(position, data)
            self._name_durably(mine)
        except DiskFull:
            raise
        except StorageFault as fault:
            mine.poison(fault)
            raise

    def reserve(self, file: File, size: int) -> None:
        mine = self._own(file)
        mine.admit(mine.generation)
        missing, free = mine.missing_room(size), self.free_bytes()
        if missing > free:
            raise DiskFull(
                f"cannot reserve {size} bytes for {mine.path}: {missing} more needed, {free} free; {ROOM_REMEDY}"
            )
        mine.allocate(size)

    # --- files, off the loop ---------------------------------------------------------------------------------------

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        mine = self._own(file)
        writer = self._writer(parent(mine.name))
        generation = mine.begin()
        work = functools.partial(self._commit, mine, list(parts), generation, sync)
        answer = functools.partial(_answer_commit, mine, generation, done)
        if parts:
            writer.commit(work, answer, size=sum(map(len, parts)), is_named=mine.named)
        else:  # a sync of everything written before, however much that is
            writer.give(work, answer)

    def fetch(self, file: File, position: int, size: int, done: ReadCompletion) -> None:
        mine = self._own(file)
        self._check_threads()
        check_room_to_fetch(self._fetches)
        read = mine.reading(position, size)
        self._fetches += 1
        self._readers.give(functools.partial(self._fetch, read, done))

    def publish_later(self, name: str, parts: Sequence[Part], done: Completion) -> None:
        writer = self._writer(parent(checked(name, fresh=True)))
        work = functools.partial(self._publish, name, list(parts))
        writer.give(work, done)

    def remove_later(self, name: str, done: Completion) -> None:
        writer = self._writer(parent(checked(name)))
        writer.give(functools.partial(self._remove, name), done)

    def deliver(self) -> None:
        for _ in range(len(self._answers)):
            self._answer_next()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ending.set()
        self._readers.close()
        for writer in self._writers.values():
            writer.stop()
        for writer in self._writers.values():
            writer.join()
        for file in list(self._opened):
            file.abandon()
        if self._watcher is not None:
            self._watcher.join()
        self._root.close()
        if self._lock_fd is not None and self._pid == os.getpid():  # a forked child has closed its copy already
            held_descriptors.remove(self._lock_fd)
            os.close(self._lock_fd)
        self._lock_fd = None

    # --- on the writer threads; small commits on a fast device on the owner's thread --------------------------------

    def _carry_out(self, work: DiskWork, done: Completion) -> None:
        """On the directory's writer thread."""
        self._tell(self._deliver, done, self._outcome(work))

    def _carry_out_here(self, work: DiskWork, done: Completion) -> None:
        """On the owner's thread. The loop delivers the answer, unless the owner asks for it before (`deliver`)."""
        self._answers.append((done, self._outcome(work)))
        self._tell(self._answer_next)

    def _outcome(self, work: DiskWork) -> StorageFault | None:
        try:
            work()
        except StorageFault as error:
            return error
        except Exception as error:  # a bug: the store must stop, not wait for an answer for ever
            return self._unexpected("writer", error)
        return None

    def _answer_next(self) -> None:
        if self._answers:
            self._deliver(*self._answers.popleft())

    def _unexpected(self, who: str, error: Exception) -> StorageFault:
        fault = StorageFault(f"a {who} of {self._root.root} failed unexpectedly: {error!r}; please report this")
        fault.__cause__ = error
        return fault

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if self._closed or self._post is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._post(callback, *args)

    def _deliver(self, done: Completion, fault: StorageFault | None) -> None:
        """Back on the owner's thread."""
        if not self._closed:
            done(fault)

    def _fetch(self, read: Callable[[], bytes], done: ReadCompletion) -> None:
        """On a reader's thread."""
        found: bytes | StorageFault
        try:
            found = read()
        except StorageFault as fault:
            found = fault
        except Exception as error:  # a bug, or no memory: the caller must learn of it
            found = self._unexpected("reader", error)
        self._tell(self._deliver_fetched, done, found)

    def _deliver_fetched(self, done: ReadCompletion, found: bytes | StorageFault) -> None:
        """Back on the owner's thread."""
        self._fetches -= 1
        if not self._closed:
            done(found)

    def _commit(self, file: RealFile, parts: Sequence[Part], generation: int, sync: bool) -> None:
        try:
            file.admit(generation)
            self._check_root()
            self._at("before-write")
            end = file.write_synced(parts) if sync and parts else None
            is_synced = end is not None
            if end is None:
                end = file.write(parts)
            self._at("after-write")
            if sync:
                if not is_synced:
                    file.sync()
                self._at("after-sync")
                self._name_durably(file)
            file.grow(end)
        except DiskFull:
            file.refuse(generation)
            raise
        except Exception as error:
            file.poison(error)
            raise
        finally:
            file.finish()

    def _name_durably(self, file: RealFile) -> None:
        if not file.named:
            self._sync_directory(parent(file.name))
            file.named = True
            self._at("after-dirsync")

    def _publish(self, name: str, parts: Sequence[Part]) -> None:
        self._root.make(parent(name))
        try:
            self._write_temporary(name + TEMPORARY, parts)
            self._rename(name + TEMPORARY, name)
        except DiskFull:
            with contextlib.suppress(NoSuchFile):
                self._unlink(name + TEMPORARY)
            raise
        self._forget_name(name)
        self._at("publish-renamed")
        self._sync_directory(parent(name))
        self._at("publish-dirsynced")

    def _write_temporary(self, name: str, parts: Sequence[Part]) -> None:
        fd, path = self._open_descriptor(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), self._root.path(name)
        try:
            self._at("publish-created")
            with faults("write", path):
                write_all(fd, parts, 0)
            self._at("publish-written")
            sync_data(fd, path)
            self._at("publish-synced")
        finally:
            os.close(fd)

    def _remove(self, name: str) -> None:
        self._at("before-remove")
        try:
            self._unlink(name)
        except NoSuchFile:
            if not self._root.has(parent(name)):
                return
        self._forget_name(name)
        self._at("after-remove")
        self._sync_directory(parent(name))  # even if it was absent: an earlier process may have unlinked and not synced
        self._at("after-remove-dirsync")

    # --- directories -----------------------------------------------------------------------------------------------

    def _open_descriptor(self, name: str, flags: int) -> int:
        where, dir_fd = self._root.at(name)
        return open_private(self._root.path(name), where, flags, dir_fd=dir_fd)

    def _open_file(self, name: str, create: bool) -> tuple[int, bool]:
        """The descriptor, and whether it is writable: inspection works on read-only files too."""
        try:
            return self._open_descriptor(name, os.O_RDWR | (os.O_CREAT if create else 0)), True
        except ReadOnlyDisk:
            if create:
                raise
        return self._open_descriptor(name, os.O_RDONLY), False

    def _rename(self, old: str, new: str) -> None:
        with faults("rename", self._root.path(old)):
            (source, source_fd), (target, target_fd) = self._root.at(old), self._root.at(new)
            os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def _unlink(self, name: str) -> None:
        with faults("remove", self._root.path(name)):
            where, dir_fd = self._root.at(name)
            os.unlink(where, dir_fd=dir_fd)

    def _sync_directory(self, directory: str) -> None:
        """Sync a directory's entries and, once in this process, the entries that lead to it."""
        self._root.sync(directory)
        while directory not in self._anchored:
            try:
                if directory:
                    self._root.sync(parent(directory))
                else:
                    sync_directory(os.path.dirname(self._root.root))
            except ReadOnlyDisk:
                if directory:
                    raise  # an unreadable directory above the root was made by somebody with more rights
            self._anchored.add(directory)
            directory = parent(directory)

    # --- tables ----------------------------------------------------------------------------------------------------

    def _own(self, file: File) -> RealFile:
        self._check_open()
        if not isinstance(file, RealFile) or file not in self._opened:
            raise Misuse(f"{file.name} is not an open file of this disk: open it here first")
        return file

    def _check_threads(self) -> None:
        """Check that this disk may use its threads."""
        self._check_open()
        if self._post is None:
            raise Misuse("this disk has no loop to answer to: pass post=loop.call_soon_threadsafe")
        if self._pid != os.getpid():
            raise Misuse("a disk does not cross a fork: open one of its own in the child")
        if not self._is_guest and sys.getswitchinterval() > _SWITCH_S:
            sys.setswitchinterval(_SWITCH_S)

    def _writer(self, directory: str) -> DirectoryWriter:
        self._check_threads()
        if directory not in self._writers:
            inline = None if self._is_guest or self._new_inline is None else self._new_inline()
            name = directory or "."
            self._writers[directory] = DirectoryWriter(
                name, self._carry_out, self._carry_out_here, inline, is_daemon=self._is_guest
            )
        return self._writers[directory]

    def _forget(self, file: RealFile) -> None:
        with self._guard:
            self._opened.pop(file, None)
            if self._files.get(file.name) is file:
                del self._files[file.name]

    def _forget_name(self, name: str) -> None:
        """The name leads to another file from now on, or to none; open files of the old name stay valid."""
        with self._guard:
            self._files.pop(name, None)

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse("the disk is closed")


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> str:
    """The process id that the lock's holder has written into it; "" if none."""
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else ""


def _answer_commit(file: RealFile, generation: int, done: Completion, fault: StorageFault | None) -> None:
    if isinstance(fault, DiskFull):  # callers of later commits know where the file ends
        file.generation = max(file.generation, generation + 1)
    done(fault)
