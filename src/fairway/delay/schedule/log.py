"""Schedule log: all buckets, and the manifest that names them. It is the truth about pending messages.

Three rules keep the log safe at every step:

- A bucket counts once the manifest on disk names it. Until then its messages count as not moved, so the message log
  still has them, and a start deletes the file.
- A split writes private buckets, syncs them, and switches with one manifest that names them and not the old bucket.
  Messages that arrive meanwhile go into the private buckets, too. They count once the switch is on disk.
- A bucket is deleted only after a manifest without it is on disk. The `moved_end` of that manifest covers everything
  that was ever put into the bucket, so nothing can be moved a second time.

`BucketRecordCache` holds open bucket records: a bounded number of bytes, the most recently used ones. A caller asks
`get`, and asks `want` for missing records. The cache reads them off the loop, neighbours in one read, and calls
`on_arrival`. So the loop waits for the disk only in `read`, and to repair a damaged record.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.delay.schedule import bucket_file, manifest
from fairway.delay.schedule.batch_arrays import BatchArrays
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.bucket_record import BucketRecord
from fairway.delay.schedule.manifest import COPY, DIRECTORY, NAME, BucketEntry, Manifest, TimeRange
from fairway.delay.schedule.repair import BucketRepair
from fairway.errors import DiskFull, StorageFault
from fairway.names import Subject
from fairway.runtime.clock import Clock
from fairway.runtime.disk import TEMPORARY, Disk, settles
from fairway.runtime.rng import Rng
from fairway.storage import directory, record, segment
from fairway.storage.flusher import Defer
from fairway.storage.log import Damaged
from fairway.storage.recovery import DamageVerdict, Finding
from fairway.storage.segment import Damage

BucketRecordKey: TypeAlias = tuple[int, int]  # number of a bucket, position of a record

_BYTES_MAX = 64 * limits.MIB
_FETCHES_MAX = 8
_FETCH_BYTES = 256 * limits.KIB  # of neighbours; holds a record of usual size as a whole
_DAMAGED_MAX = 10_000  # remembered; damaged records beyond that are read again


class OpenBucketRecord(NamedTuple):
    """A bucket record with its columns."""

    subject: Subject
    sheet: BatchArrays
    is_there: NDArray[np.bool_] | None = None  # by message; None: none is lost. A lost message is empty in the sheet

    def lacks(self, messages: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these messages are lost."""
        return np.zeros(len(messages), np.bool_) if self.is_there is None else ~self.is_there[messages]


class BucketRecordCache:
    """All open bucket records of one delay server. Lives on its loop."""

    def __init__(
        self,
        files: dict[int, BucketFile],
        repairs: BucketRepair,
        *,
        on_damage: Callable[[Damaged], None],
        on_fault: Callable[[StorageFault], None],
        on_arrival: Callable[[], None],
    ) -> None:
        self.bytes = 0
        self._repairs = repairs
        self._files = files
        self._on_damage = on_damage
        self._on_fault = on_fault
        self._on_arrival = on_arrival
        self._opened: OrderedDict[BucketRecordKey, OpenBucketRecord] = OrderedDict()
        self._damaged: dict[BucketRecordKey, None] = {}
        self._wanted: dict[BucketRecordKey, None] = {}  # not yet asked for
        self._awaited: set[BucketRecordKey] = set()  # wanted or on their way
        self._fetches = 0
        self._fault: StorageFault | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._awaited)

    def get(self, record_key: BucketRecordKey) -> OpenBucketRecord | None:
        """The record, if it is open."""
        found = self._opened.get(record_key)
        if found is not None:
            self._opened.move_to_end(record_key)
        return found

    def is_damaged(self, record_key: BucketRecordKey) -> bool:
        """Whether the record was found to be unreadable."""
        return record_key in self._damaged

    def put(self, record_key: BucketRecordKey, piece: BucketRecord, is_there: NDArray[np.bool_] | None = None) -> None:
        """Add a record that was just read or written. `is_there`: of a salvaged record."""
        if record_key in self._opened:
            return
        self._opened[record_key] = OpenBucketRecord(piece.subject, BatchArrays(piece.data), is_there)
        self.bytes += len(piece.data)
        while self.bytes > _BYTES_MAX and len(self._opened) > 1:
            self.bytes -= len(self._opened.popitem(last=False)[1].sheet.data)

    def read(self, record_key: BucketRecordKey) -> OpenBucketRecord | None:
        """The record, read at once if necessary. None if it is damaged. For starts and for rare decisions."""
        found = self.get(record_key)
        if found is None and record_key not in self._damaged:
            try:
                self._read(self._files[record_key[0]], record_key)
                found = self._opened[record_key]
            except Damaged as damaged:
                self._note_damage(record_key, damaged)
        return found

    def _read(self, file: BucketFile, record_key: BucketRecordKey) -> None:
        """Open a record, repaired or salvaged if necessary; `Damaged` if nothing of it is left."""
        try:
            self.put(record_key, file.read(record_key[1]))
        except Damaged as damaged:
            if self._repairs.repair(file, record_key[1]):
                self.put(record_key, file.read(record_key[1]))
                return
            found, is_news = self._repairs.salvage(file, record_key[1])
            if found is None:
                raise
            self.put(record_key, found.piece, found.is_there)
            if is_news:
                self._on_damage(damaged)

    async def obtain(self, record_key: BucketRecordKey) -> OpenBucketRecord | None:
        """The record, as soon as it is open; None if it is damaged or its bucket is deleted. Raises if the disk
        fails."""
        while (
            (found := self.get(record_key)) is None and record_key not in self._damaged and record_key[0] in self._files
        ):
            if self._fault is not None:
                raise self._fault
            self.want([record_key])
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(arrival)
            await arrival
        return found

    # --- fetching ----------------------------------------------------------------------------------------------------

    def want(self, spots: Iterable[BucketRecordKey]) -> None:
        """Fetch the records that are neither open nor on their way."""
        for record_key in spots:
            if record_key not in self._opened and record_key not in self._awaited and record_key not in self._damaged:
                self._wanted[record_key] = None
                self._awaited.add(record_key)
        self._fetch_more()

    def _fetch_more(self) -> None:
        while self._wanted and self._fetches < _FETCHES_MAX:
            first = min(self._wanted)
            near = sorted(each for each in self._wanted if first <= each < (first[0], first[1] + _FETCH_BYTES // 2))
            for each in near:
                del self._wanted[each]
            self._fetch(near, first[1], _FETCH_BYTES)

    def _fetch(self, spots: list[BucketRecordKey], start: int, size: int, *, is_whole: bool = False) -> None:
        file = self._files.get(spots[0][0])
        if file is None:  # deleted meanwhile
            self._awaited.difference_update(spots)
            return
        self._fetches += 1

        def fetched(data: bytes | StorageFault) -> None:
            self._fetches -= 1
            if isinstance(data, StorageFault):
                self._fault = data
                self._on_fault(data)
                self._tell()
                return
            for record_key in spots:
                self._take(file, record_key, data, record_key[1] - start, is_whole=is_whole)
            self._fetch_more()
            self._tell()

        file.fetch(start, size, fetched)

    def _take(self, file: BucketFile, record_key: BucketRecordKey, data: bytes, offset: int, *, is_whole: bool) -> None:
        try:
            is_head_there = offset + record.HEADER_BYTES <= len(data)
            if offset and not is_head_there:  # once more, by itself
                self._fetch([record_key], record_key[1], _FETCH_BYTES)
                return
            size = record.HEADER_BYTES + file.body_bytes(data, offset, record_key[1])
            if offset + size > len(data) and not is_whole:
                self._fetch([record_key], record_key[1], size, is_whole=True)
                return
            self.put(record_key, file.parse(data, offset, record_key[1]))
        except Damaged:
            self._take_again(file, record_key)
        self._awaited.discard(record_key)

    def _take_again(self, file: BucketFile, record_key: BucketRecordKey) -> None:
        """The fetched bytes are damaged: read the record again, and have it repaired."""
        try:
            self._read(file, record_key)
        except StorageFault as fault:
            self._on_fault(fault)
        except Damaged as damaged:
            self._note_damage(record_key, damaged)

    def _note_damage(self, record_key: BucketRecordKey, damaged: Damaged) -> None:
        while len(self._damaged) >= _DAMAGED_MAX:
            del self._damaged[next(iter(self._damaged))]
        self._damaged[record_key] = None
        self._on_damage(damaged)

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for each in waiters:
            if not each.done():
                each.set_result(None)
        self._on_arrival()


_LOG_ID_BITS = 63
_RETRY_MS = 1_000  # after a full disk


class ScheduleLog:
    """All buckets of one delay server. Lives on its loop."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        rng: Rng,
        messages_id: int,
        *,
        defer: Defer,
        on_fault: Callable[[StorageFault], None],
        moved_end: Callable[[Iterable[int]], int],
        on_listed: Callable[[BucketFile], None],
        catalogue_messages: int,
    ) -> None:
        self.files: dict[int, BucketFile] = {}
        self.findings: list[Finding] = []
        self.disk = disk
        self.clock = clock
        self._rng = rng
        self._messages_id = messages_id
        self.defer = defer
        self.on_fault = on_fault
        self._moved_end = moved_end
        self._on_listed = on_listed
        self.catalogue_messages = catalogue_messages
        self._by_span: dict[TimeRange, BucketFile] = {}
        self._next_number = 1
        self._is_dirty = False
        self._is_publishing = False
        self._when_listed: list[Callable[[], None]] = []
        self.stated_end = 0  # the message log up to here is in buckets that the manifest on disk names
        self._closing: asyncio.Future[None] | None = None
        self._tried_ms = 0
        self.is_full = False  # the last manifest found no room: it is written again when there is some
        self._fault: StorageFault | None = None  # from then on nothing is written, and nobody waits

    # --- a start -----------------------------------------------------------------------------------------------------

    def recover(self, messages_base: int, messages_end: int) -> int:
        """Open the buckets. The message log has these bounds; from the returned position on, its messages must be moved
        again. Every step may be interrupted and repeated."""
        found, why, self.is_full, name = manifest.read_or_make(self.disk, self._messages_id, messages_base)
        if why:
            self.findings.append(Finding(NAME, DamageVerdict.ROTTEN, Damage(0, 0, why)))
        # A killed process may have left a manifest only in the page cache; the files it does not name are deleted next.
        directory.secure(self.disk, name)
        self._next_number = found.next_number
        self._sweep({each.number for each in found.buckets})
        for each in found.buckets:
            recovered, findings = bucket_file.recover(self.disk, each)
            opened = self._open(recovered)
            opened.is_listed = True
            opened.is_retired = bool(findings)  # a damaged bucket is read, and not appended to
            opened.source_end = messages_end
            self.findings += findings
            if not opened.is_retired:
                self._by_span[opened.span] = opened
        self.stated_end = found.moved_end
        return found.moved_end

    def _sweep(self, listed: set[int]) -> None:
        for name in self.disk.listing(DIRECTORY):
            number = segment.base_of(name)
            if name.endswith(TEMPORARY) or (number is not None and number not in listed):
                self._next_number = max(self._next_number, (number or 0) + 1)
                self.disk.remove(f"{DIRECTORY}/{name}")

    def _open(self, bucket: BucketEntry) -> BucketFile:
        opened = BucketFile(self, bucket)
        self.files[bucket.number] = opened
        return opened

    # --- writing -----------------------------------------------------------------------------------------------------

    def file_for(self, span: TimeRange) -> BucketFile:
        """The bucket for a span of time, created if there is none."""
        return self._by_span.get(span) or self.create(span)

    def create(self, span: TimeRange, *, of_split: bool = False) -> BucketFile:
        bucket = BucketEntry(self._next_number, self._rng.bits(_LOG_ID_BITS), *span, 0)
        self._next_number += 1
        created = self._open(bucket)
        created.is_of_split = of_split
        self._by_span.setdefault(span, created)
        if not of_split:
            self.publish()
        return created

    def retire(self, file: BucketFile) -> None:
        """The bucket takes no more records."""
        file.is_retired = True
        if self._by_span.get(file.span) is file:
            del self._by_span[file.span]

    def switch(self, old: list[BucketFile], new: list[BucketFile], then: Callable[[], None]) -> None:
        """Name the new buckets and not the old ones, in one manifest; then delete the old ones, and call `then`."""
        for each in new:
            each.is_of_split = False
        for each in old:
            self.retire(each)
            del self.files[each.number]

        def switched() -> None:
            for each in old:
                each.close()
                self.disk.remove_later(bucket_file.file_name(each.number), self._removed)
            then()

        self.publish(switched)

    def _removed(self, fault: StorageFault | None) -> None:
        if fault is not None:
            self.on_fault(fault)

    # --- the manifest ------------------------------------------------------------------------------------------------

    def publish(self, then: Callable[[], None] | None = None) -> None:
        """Write a manifest of the current buckets, after any manifest that is being written."""
        if self._fault is not None:
            return
        self._is_dirty = True
        if then is not None:
            self._when_listed.append(then)
        if not self._is_publishing:
            self._is_publishing = True
            self.defer(self._publish)  # at the end of the turn: one manifest for all its new buckets

    def state(self, position: int) -> None:
        """Write a manifest if it can state that the message log is in buckets up to this position."""
        if self.stated_end < position <= self._moved_end(()) and not self._is_publishing:
            self.publish()

    def end_with(self, files: Iterable[BucketFile]) -> int:
        """How far the message log is in buckets, once a manifest names these, too."""
        return self._moved_end([each.number for each in files if not each.is_listed])

    def retry(self, now_ms: int) -> None:
        """Write again a manifest that found no room. Maintenance calls this in every turn."""
        if self.is_full and not self._is_publishing and not 0 <= now_ms - self._tried_ms < _RETRY_MS:
            self._tried_ms = now_ms
            self.publish()

    def _publish(self) -> None:
        if self._fault is not None:
            return
        self._is_dirty = False
        listed = [each for each in self.files.values() if not each.is_of_split]
        waiting, self._when_listed = self._when_listed, []
        entries = [each.entry() for each in listed]
        moved_end = self.end_with(listed)
        parts = manifest.pack(Manifest(self._messages_id, moved_end, self._next_number, entries))

        def done(fault: StorageFault | None) -> None:
            self.is_full = isinstance(fault, DiskFull)
            if self.is_full:  # the previous manifest still holds
                self._is_publishing = False
                self._when_listed[:0] = waiting
                if self._closing is not None:
                    settles(self._closing)(fault)
                return
            if fault is not None:
                self.on_fault(fault)
                return
            self._is_publishing = False
            self.stated_end = moved_end
            for each in listed:
                if not each.is_listed:
                    each.is_listed = True
                    self._on_listed(each)
            for then in waiting:
                then()
            if self._is_dirty:
                self.publish()

        def copy(fault: StorageFault | None) -> None:
            if fault is None:
                self.disk.publish_later(COPY, parts, done)
            else:
                done(fault)

        self.disk.publish_later(NAME, parts, copy)

    def __iter__(self) -> Iterator[BucketFile]:
        return iter(self.files.values())

    async def settle(self, now_ms: int) -> None:
        """Return once everything gathered so far is on disk, and a manifest says so."""
        loop = asyncio.get_running_loop()
        for each in (file for file in self.files.values() if not file.is_retired):
            each.catalogue(now_ms, self.catalogue_messages // 32)  # fewer are read as fast from their records
        for each in list(self.files.values()):
            self._check()
            synced: asyncio.Future[None] = loop.create_future()
            each.when_durable(each.end, settles(synced))
            await synced
        for _ in range(2):  # the first names every bucket, the second says that everything is moved
            self._check()
            self._closing = listed = loop.create_future()
            self.publish(partial(settles(listed), None))
            await listed

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def poison(self, fault: StorageFault) -> None:
        """Write nothing more, and tell everybody who waits: the state of the disk is unknown."""
        if self._fault is None:
            self._fault = fault
            for each in list(self.files.values()):
                each.abandon(fault)
            if self._closing is not None:
                settles(self._closing)(fault)

    def abandon(self, fault: StorageFault) -> None:
        """Release the buckets as they are. Nothing more is written."""
        self.poison(fault)
        self.close()

    def close(self) -> None:
        for each in self.files.values():
            each.close()
