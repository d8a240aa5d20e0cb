"""The simulated disk: in memory, on the simulated loop's time, with all the faults that a real disk can have.

Each job is a generator of steps. A blocking call runs its job to the end. The other calls advance their job by a timer,
one step at a time and one job at a time per directory, so that a crash can come between any two steps. `files` decides
what a crash leaves. A test holds the disk of one simulated process and asks for the next one: `disk = disk.crash()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fairway.errors import DirectoryLocked, DiskFull, Misuse, StorageFault
from fairway.limits import GIB
from fairway.runtime.disk import (
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
    readable,
)
from fairway.runtime.rng import Rng
from fairway.simulation.files import Countdown, Cut, Directory, Inode, Volume, Write, draw_chance

ScheduleCall: TypeAlias = Callable[..., object]  # (seconds, callback, *args), as a loop's call_later
_Steps: TypeAlias = Generator[None, None, None]


class SimulatedPowerCut(BaseException):
    """The power went in the middle of a blocking call. No Exception: no handler of the product may swallow it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The time of one step of a job: drawn between the two."""

    low_s: float = 0.000_02
    high_s: float = 0.000_5


class SimFile:
    """An open file of a simulated disk."""

    def __init__(self, disk: SimDisk, name: str, inode: Inode) -> None:
        self._disk = disk
        self.name = name
        self.inode = inode
        self.size = len(inode.cached)
        self.opens = 1
        self.under_way = 0
        self.named = False  # whether this process has synced the file's directory
        self.generation = 0
        self.refused_generation = -1

    def read(self, position: int, size: int) -> bytes:
        wanted = readable(position, size, self.size)
        self._disk.check_alive()
        self._check_open()
        return bytes(self.inode.cached[position : position + wanted])

    @property
    def is_blind(self) -> bool:
        return self._disk.is_blind

    def read_cached(self, position: int, size: int) -> bytes | None:
        data = self.read(position, size)
        if self.name in self._disk.evicted or self.is_blind:
            return None
        return data if self._disk.cold == 0 else self._disk.chill(data)

    def close(self) -> None:
        if self.opens > 0:
            self.opens -= 1
            if self.opens == 0:
                self._disk.forget(self)

    def belongs_to(self, disk: SimDisk) -> bool:
        return self._disk is disk and self.opens > 0

    def _check_open(self) -> None:
        if self.opens == 0:
            raise Misuse(f"{self.name} was closed: open it again")


@dataclass(slots=True)
class _DiskJob:
    steps: _Steps
    done: Completion


@dataclass(slots=True)
class _Fetch:
    file: SimFile
    position: int
    size: int
    done: ReadCompletion


class SimDisk:
    """The `Disk` port as one process uses it (its *life*). All chance comes from `rng`: one seed, one history.

    Switches may be set at any time, and carry over to the next life. `syncing`: False: syncs succeed and do nothing.
    `dir_syncing`: the same for directories. `cold`: the chance that a `read_cached` misses. `is_blind`: nobody can tell
    what is in memory, as on tmpfs. `slowness` multiplies every latency.

    Unlike the real disk it takes commits after a failed sync, as a kernel would, so that a caller that wrongly
    continues is found out. After the end of a life, every call but `close` raises `SimulatedPowerCut`.
    """

    def __init__(
        self,
        rng: Rng,
        call_later: ScheduleCall,
        *,
        capacity_bytes: int = GIB,
        latency: Latency | None = None,
        volume: Volume | None = None,
    ) -> None:
        self._rng = rng
        self._call_later = call_later
        self._latency = latency if latency is not None else Latency()
        self._volume = volume if volume is not None else Volume(capacity_bytes)
        self._files: dict[str, SimFile] = {}
        self._lanes: dict[str, deque[_DiskJob]] = {}  # per directory, the jobs that are not done
        self._fetches: deque[_Fetch] = deque()  # given, while no reader is free
        self._reading = 0
        self._anchored: set[str] = set()  # directories whose own entry was synced in this life; never iterated
        self.alive = True  # False after a power cut, or the death of the process
        self._closed = False
        self._stall_s = 0.0
        self._write_failure = Countdown()
        self._sync_failure = Countdown()
        self._power_cut = Countdown()
        self._fetch_failure = Countdown()
        self.operations = 0  # primitive ones so far: create, write, sync, truncate, rename, unlink, dirsync
        self.syncing = True
        self.dir_syncing = True
        self.cold = 0.0
        self.is_blind = False
        self.evicted: set[str] = set()  # never iterated
        self.slowness = 1.0
        self.on_moved: Callable[[StorageFault], None] = lambda _fault: None

    # --- lives -----------------------------------------------------------------------------------------------------

    def crash(self, call_later: ScheduleCall | None = None) -> SimDisk:
        """Cut the power: the next life has all synced bytes and, by the seed, any part of the unsynced ones."""
        self.alive = False
        return self._successor(self._volume.after_power_cut(self._rng), call_later)

    def crash_process(self, call_later: ScheduleCall | None = None) -> SimDisk:
        """Kill the process: the page cache stays, with a prefix of the work under way."""
        self._power_cut.plan(0)
        for stream in self._lanes.values():
            chance = draw_chance(self._rng)
            while self.alive and stream and self._rng.uniform() < chance:
                self._advance(stream)
        self.alive = False
        if self._volume.owner is self:
            self._volume.owner = None
        return self._successor(self._volume, call_later)

    def beside(self) -> SimDisk:
        """The same files as another process sees them."""
        return self._successor(self._volume, None)

    def _successor(self, volume: Volume, call_later: ScheduleCall | None) -> SimDisk:
        later = call_later if call_later is not None else self._call_later
        next_life = SimDisk(self._rng, later, latency=self._latency, volume=volume)
        next_life.syncing, next_life.dir_syncing = self.syncing, self.dir_syncing
        next_life.cold, next_life.is_blind, next_life.slowness = self.cold, self.is_blind, self.slowness
        return next_life

    # --- faults ----------------------------------------------------------------------------------------------------

    def crash_after(self, operations: int) -> None:
        """Cut the power in the n-th primitive operation from now: `SimulatedPowerCut`, then only `crash` is left.

        By then a change has reached the page cache, and a sync has had no effect: `crash` draws what was kept. If the
        operation belongs to a commit, the timer's callback raises; `alive` tells.
        """
        self._power_cut.plan(operations)

    def fail_sync(self, nth: int = 1) -> None:
        """Let the n-th sync of a file from now fail and drop its pages; later syncs succeed, and lie."""
        self._sync_failure.plan(nth)

    def fail_write(self, nth: int = 1) -> None:
        """Let the n-th write from now find no room, at a byte drawn from the seed."""
        self._write_failure.plan(nth)

    def fail_fetch(self, nth: int = 1) -> None:
        """Let the n-th fetch from now find a sector that cannot be read."""
        self._fetch_failure.plan(nth)

    def evict(self, name: str) -> None:
        """Drop the file's pages from memory for the rest of this life: every `read_cached` misses."""
        self.evicted.add(name)

    def stall(self, seconds: float) -> None:
        """Let the next step of a job take that much longer."""
        self._stall_s = seconds

    def flip(self, name: str, bit_index: int) -> None:
        """Flip one bit of the file, in memory and on the platter."""
        inode = self._volume.file(name)
        byte, bit = divmod(bit_index, 8)
        if not 0 <= byte < len(inode.cached):
            raise Misuse(f"bit {bit_index} is not in {name}, which has {len(inode.cached)} bytes")
        inode.cached[byte] ^= 1 << bit
        if byte < len(inode.durable):
            inode.durable[byte] ^= 1 << bit

    def rot(self, name: str, bits: int = 1, *, low: int = 0, high: int | None = None) -> list[int]:
        """Flip that many bits, drawn from bytes `low` to `high` of the file; return their indexes."""
        end = len(self._volume.file(name).cached) if high is None else high
        flipped = [low * 8 + self._rng.below((end - low) * 8) for _ in range(bits)]
        for bit_index in flipped:
            self.flip(name, bit_index)
        return flipped

    def chop(self, name: str, size: int) -> None:
        """Lose the end of the file, on the platter too."""
        inode = self._volume.file(name)
        inode.unsynced.clear()
        del inode.cached[size:]
        del inode.durable[size:]

    # --- the root --------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        self.check_alive()
        if self._volume.owner not in (None, self):
            raise DirectoryLocked("cannot lock the simulated disk: another process is using it; stop that process")
        self._volume.owner = self

    def watch(self, moved: Callable[[StorageFault], None]) -> None:
        self.on_moved = moved  # for tests to call: nobody else moves a simulated disk

    def listing(self, directory: str) -> list[str]:
        self.check_alive()
        found = self._volume.directory(checked(directory) if directory else "")
        return sorted(found.entries) if found is not None else []

    def free_bytes(self) -> int:
        self.check_alive()
        return self._volume.free_bytes

    # --- files, blocking -------------------------------------------------------------------------------------------

    def open(self, name: str, *, create: bool = False) -> SimFile:
        self.check_alive()
        checked(name, fresh=create)
        if name in self._files:
            self._files[name].opens += 1
            return self._files[name]
        inode = self._volume.find(name)
        if inode is None and create:
            inode = self._create(name)
        file = SimFile(self, name, inode if inode is not None else self._volume.file(name))
        self._files[name] = file
        return file

    def truncate(self, file: File, size: int) -> None:
        mine = self._own(file)
        check_cut(mine.name, size, mine.size, is_growing=mine.under_way > 0)
        mine.inode.change(Cut(size))
        mine.inode.reserved = 0
        mine.size = size
        self._count()
        self._sync(mine.inode, mine.name)

    def sync(self, file: File, position: int) -> None:
        mine = self._own(file)
        mine.inode.change(Write(position, bytes(mine.inode.cached[position : mine.size])))
        self._count()
        self._sync(mine.inode, mine.name)
        self._name_durably(mine)

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        self.check_alive()
        _run(self._publishing(checked(name, fresh=True), parts))

    def remove(self, name: str) -> None:
        self.check_alive()
        _run(self._removing(checked(name)))

    def move(self, old: str, new: str) -> None:
        """Make the new name durable before the old one goes."""
        self.check_alive()
        checked(new, fresh=True)
        inode = self._volume.find(checked(old))
        if inode is not None:
            self._make_directory(parent(new)).change({new.rpartition("/")[2]: inode})
            self._files.pop(new, None)
            self._count()
            self._sync_directory(parent(new))
        _run(self._removing(old))

    def repair(self, file: File, position: int, data: bytes) -> None:
        mine = self._own(file)
        check_repair(mine.name, position, len(data), mine.size, is_growing=mine.under_way > 0)
        _run(self._writing(mine.inode, mine.name, position, data, mine.size))
        self._sync(mine.inode, mine.name)
        mine.size = max(mine.size, position + len(data))
        self._name_durably(mine)

    def reserve(self, file: File, size: int) -> None:
        inode = self._own(file).inode
        missing = size - inode.room
        if missing > self._volume.free_bytes:
            raise DiskFull(f"cannot reserve {size} bytes for {file.name}: {missing} more are needed; free some room")
        inode.reserved = max(inode.reserved, size)

    # --- files, off the loop ---------------------------------------------------------------------------------------

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        mine = self._own(file)
        mine.under_way += 1
        self._give(mine.name, self._committing(mine, list(parts), mine.generation, sync), _answer(mine, done))

    def fetch(self, file: File, position: int, size: int, done: ReadCompletion) -> None:
        mine = self._own(file)
        check_room_to_fetch(len(self._fetches) + self._reading)
        self._fetches.append(_Fetch(mine, position, readable(position, size, mine.size), done))
        self._begin_fetches()

    def _begin_fetches(self) -> None:
        while self._fetches and self._reading < READERS:
            self._reading += 1
            self._call_later(self._draw_delay_s(), self._end_fetch, self._fetches.popleft())

    def _end_fetch(self, fetch: _Fetch) -> None:
        if not self.alive or self._closed:
            return  # a timer of a life that is over
        self._reading -= 1
        self._begin_fetches()
        if self._fetch_failure.strikes():
            fetch.done(StorageFault(f"cannot read {fetch.file.name}: Input/output error; check the device"))
        else:
            fetch.done(bytes(fetch.file.inode.cached[fetch.position : fetch.position + fetch.size]))

    def publish_later(self, name: str, parts: Sequence[Part], done: Completion) -> None:
        self._give(checked(name, fresh=True), self._publishing(name, list(parts)), done)

    def remove_later(self, name: str, done: Completion) -> None:
        self._give(checked(name), self._removing(name), done)

    def deliver(self) -> None:
        """No work ends before its time has come, so there is nothing to deliver."""

    def close(self) -> None:
        if not self.alive or self._closed:
            return
        for stream in self._lanes.values():
            while stream:
                self._advance(stream)
        self._closed = True
        if self._volume.owner is self:
            self._volume.owner = None

    def _give(self, name: str, steps: _Steps, done: Completion) -> None:
        self.check_alive()
        stream = self._lanes.setdefault(parent(name), deque())
        stream.append(_DiskJob(steps, done))
        if len(stream) == 1:
            self._schedule(stream)

    def _schedule(self, stream: deque[_DiskJob]) -> None:
        delay_s = self._draw_delay_s() + self._stall_s
        self._stall_s = 0.0
        self._call_later(delay_s, self._tick, stream)

    def _draw_delay_s(self) -> float:
        spread = self._latency.high_s - self._latency.low_s
        return (self._latency.low_s + spread * self._rng.uniform()) * self.slowness

    def _tick(self, stream: deque[_DiskJob]) -> None:
        if not self.alive or self._closed:
            return  # a timer of a life that is over
        job = stream[0]
        ended, fault = self._advance(stream)
        if stream:
            self._schedule(stream)
        if ended:
            job.done(fault)

    def _advance(self, stream: deque[_DiskJob]) -> tuple[bool, StorageFault | None]:
        """Run one step of the current job; return whether it has ended, and its fault."""
        try:
            next(stream[0].steps)
        except StopIteration:
            stream.popleft()
            return True, None
        except StorageFault as fault:
            stream.popleft()
            return True, fault
        return False, None

    # --- jobs, step by step ----------------------------------------------------------------------------------------

    def _committing(self, file: SimFile, parts: Sequence[Part], generation: int, sync: bool) -> _Steps:
        if generation <= file.refused_generation:
            raise DiskFull(f"cannot write {file.name}: the commit before this one found no room; free some room")
        data = b"".join(parts)
        try:
            yield from self._writing(file.inode, file.name, file.size, data)
        except DiskFull:
            file.refused_generation = max(file.refused_generation, generation)
            yield
            self._sync(file.inode, file.name)  # the cut: refused bytes must not come back after a power cut
            raise
        yield
        if not sync:
            file.size += len(data)
            return
        try:
            self._sync(file.inode, file.name)
        except StorageFault:
            file.size += len(data)  # it is in the page cache, and a caller that ignores the fault builds on it
            raise
        if not file.named:
            yield
            self._name_durably(file)
        file.size += len(data)

    def _publishing(self, name: str, parts: Sequence[Part]) -> _Steps:
        temporary = name + TEMPORARY
        inode = self._create(temporary)
        yield
        try:
            yield from self._writing(inode, temporary, 0, b"".join(parts))
        except DiskFull:
            self._unlink(temporary)
            raise
        yield
        self._sync(inode, temporary)
        yield
        self._rename(temporary, name)
        yield
        self._sync_directory(parent(name))

    def _removing(self, name: str) -> _Steps:
        yield
        if self._volume.find(name) is not None:
            self._unlink(name)
            yield
        if self._volume.directory(parent(name)) is not None:
            self._sync_directory(parent(name))

    def _writing(self, inode: Inode, name: str, position: int, data: bytes, end_before: int | None = None) -> _Steps:
        """Write in two pieces, so that a killed process leaves any prefix. Without room the file ends at `end_before`,
        or else at `position`."""
        end, whole = position + len(data), len(data)
        fits = whole - max(0, end - inode.room - self._volume.free_bytes)
        if data and self._write_failure.strikes():
            fits = self._rng.below(whole)
        middle = self._rng.below(max(fits, 0) + 1)
        if middle:
            inode.change(Write(position, data[:middle]))
        yield
        if middle < fits:
            inode.change(Write(position + middle, data[middle : max(fits, 0)]))
        self._count()
        if fits < whole:
            inode.change(Cut(position if end_before is None else end_before))
            self._count()
            raise DiskFull(f"cannot write {name}: No space left on device; free some room on the simulated disk")

    # --- primitive operations ----------------------------------------------------------------------------------------

    def _count(self) -> None:
        self.operations += 1
        if self._power_cut.strikes():
            self.alive = False
            raise SimulatedPowerCut(f"in operation {self.operations}")

    def _sync(self, inode: Inode, name: str) -> None:
        self._count()
        if self._sync_failure.strikes():
            inode.lose_dirt()
            raise StorageFault(f"cannot sync {name}: Input/output error; stop, and check the device")
        if self.syncing:
            inode.sync()

    def _name_durably(self, file: SimFile) -> None:
        if not file.named:
            self._sync_directory(parent(file.name))
            file.named = True

    def _sync_directory(self, directory: str) -> None:
        """Sync a directory's entries and, once in this life, the entries that lead to it."""
        self._sync_entries(directory)
        while directory and directory not in self._anchored:
            self._anchored.add(directory)
            directory = parent(directory)
            self._sync_entries(directory)

    def _sync_entries(self, directory: str) -> None:
        self._count()
        found = self._volume.directory(directory)
        if self.dir_syncing and found is not None:
            found.sync()

    def _create(self, name: str) -> Inode:
        """Make a new, empty file and its directories; replace a file of that name."""
        directory = self._make_directory(parent(name))
        inode = Inode()
        directory.change({name.rpartition("/")[2]: inode})
        self._count()
        return inode

    def _make_directory(self, path: str) -> Directory:
        found = self._volume.directory(path)
        if found is None:
            above = self._make_directory(parent(path))
            found = Directory()
            above.change({path.rpartition("/")[2]: found})
            self._count()
        return found

    def _rename(self, old: str, new: str) -> None:
        inode = self._volume.file(old)
        directory = self._make_directory(parent(new))
        directory.change({old.rpartition("/")[2]: None, new.rpartition("/")[2]: inode})
        self._files.pop(new, None)
        self._count()

    def _unlink(self, name: str) -> None:
        self._make_directory(parent(name)).change({name.rpartition("/")[2]: None})
        self._files.pop(name, None)
        self._count()

    # --- for its files -----------------------------------------------------------------------------------------------

    def chill(self, data: bytes) -> bytes | None:
        """The part of the data that memory holds, by the draw: all, a prefix or nothing."""
        if self._rng.uniform() >= self.cold:
            return data
        kept = self._rng.below(len(data) + 1) if self._rng.below(2) else 0
        return data[:kept] or None

    def check_alive(self) -> None:
        if not self.alive:
            raise SimulatedPowerCut("this life of the disk is over: use the one that crash() returned")
        if self._closed:
            raise Misuse("the disk is closed")

    def forget(self, file: SimFile) -> None:
        if self._files.get(file.name) is file:
            del self._files[file.name]

    def _own(self, file: File) -> SimFile:
        self.check_alive()
        if not isinstance(file, SimFile) or not file.belongs_to(self):
            raise Misuse(f"{file.name} is not an open file of this disk: open it here first")
        return file


def _run(steps: _Steps) -> None:
    for _ in steps:
        pass


def _answer(file: SimFile, done: Completion) -> Completion:
    generation = file.generation

    def answer(fault: StorageFault | None) -> None:
        file.under_way -= 1
        if isinstance(fault, DiskFull):  # callers of later commits know where the file ends
            file.generation = max(file.generation, generation + 1)
        done(fault)

    return answer
