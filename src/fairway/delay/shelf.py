"""Pieces that are open: a bounded number of bytes, the ones used last. What is not here is fetched off the loop.

Whoever needs a piece asks `get`, and `want`s what is not there; it is told (`on_arrival`) when something has come. The
loop itself never waits for the disk. Places that lie near each other are fetched in one go.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.delay.bucket_file import BucketFile
from fairway.delay.bucket_repair import BucketRepair
from fairway.delay.piece import BucketRecord
from fairway.delay.sheet import BatchArrays
from fairway.errors import StorageFault
from fairway.names import Subject
from fairway.storage import record
from fairway.storage.log import Damaged

BucketRecordKey: TypeAlias = tuple[int, int]  # number of a bucket, position of a piece

_BYTES_MAX = 64 * limits.MIB
_FETCHES_MAX = 8
_FETCH_BYTES = 256 * limits.KIB  # of neighbours; a piece of usual size is in it as a whole
_DAMAGED_MAX = 10_000  # remembered; beyond that they are read again


class OpenBucketRecord(NamedTuple):
    """A piece, its columns within reach."""

    subject: Subject
    sheet: BatchArrays
    is_there: NDArray[np.bool_] | None = None  # by message, where some are lost: the sheet has empty ones for these

    def lacks(self, messages: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these messages are lost."""
        return np.zeros(len(messages), np.bool_) if self.is_there is None else ~self.is_there[messages]


class BucketRecordCache:
    """All open pieces of one delay server. Lives on its loop."""

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

    def get(self, spot: BucketRecordKey) -> OpenBucketRecord | None:
        """The piece, if it is here."""
        found = self._opened.get(spot)
        if found is not None:
            self._opened.move_to_end(spot)
        return found

    def is_damaged(self, spot: BucketRecordKey) -> bool:
        """Whether it was found to be unreadable."""
        return spot in self._damaged

    def put(self, spot: BucketRecordKey, piece: BucketRecord, is_there: NDArray[np.bool_] | None = None) -> None:
        """A piece that has just been read or written. `is_there`: of one that was salvaged."""
        if spot in self._opened:
            return
        self._opened[spot] = OpenBucketRecord(piece.subject, BatchArrays(piece.data), is_there)
        self.bytes += len(piece.data)
        while self.bytes > _BYTES_MAX and len(self._opened) > 1:
            self.bytes -= len(self._opened.popitem(last=False)[1].sheet.data)

    def read(self, spot: BucketRecordKey) -> OpenBucketRecord | None:
        """The piece, read here and now if it must be: for a start. None if it is damaged."""
        found = self.get(spot)
        if found is None and spot not in self._damaged:
            try:
                self._read(self._files[spot[0]], spot)
                found = self._opened[spot]
            except Damaged as damaged:
                self._note_damage(spot, damaged)
        return found

    def _read(self, file: BucketFile, spot: BucketRecordKey) -> None:
        """Open a piece, repaired or salvaged if it must be; `Damaged` if nothing of it is left."""
        try:
            self.put(spot, file.read(spot[1]))
        except Damaged as damaged:
            if self._repairs.repair(file, spot[1]):
                self.put(spot, file.read(spot[1]))
                return
            found, is_news = self._repairs.salvage(file, spot[1])
            if found is None:
                raise
            self.put(spot, found.piece, found.is_there)
            if is_news:
                self._on_damage(damaged)

    async def obtain(self, spot: BucketRecordKey) -> OpenBucketRecord | None:
        """The piece, as soon as it is here; None if it is damaged, or its bucket gone. A disk that fails is raised."""
        while (found := self.get(spot)) is None and spot not in self._damaged and spot[0] in self._files:
            if self._fault is not None:
                raise self._fault
            self.want([spot])
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(arrival)
            await arrival
        return found

    # --- fetching ----------------------------------------------------------------------------------------------------

    def want(self, spots: Iterable[BucketRecordKey]) -> None:
        """Fetch what is neither here nor on its way."""
        for spot in spots:
            if spot not in self._opened and spot not in self._awaited and spot not in self._damaged:
                self._wanted[spot] = None
                self._awaited.add(spot)
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
            for spot in spots:
                self._take(file, spot, data, spot[1] - start, is_whole=is_whole)
            self._fetch_more()
            self._tell()

        file.fetch(start, size, fetched)

    def _take(self, file: BucketFile, spot: BucketRecordKey, data: bytes, offset: int, *, is_whole: bool) -> None:
        try:
            is_head_there = offset + record.HEADER_BYTES <= len(data)
            if offset and not is_head_there:  # once more, by itself
                self._fetch([spot], spot[1], _FETCH_BYTES)
                return
            size = record.HEADER_BYTES + file.body_bytes(data, offset, spot[1])
            if offset + size > len(data) and not is_whole:
                self._fetch([spot], spot[1], size, is_whole=True)
                return
            self.put(spot, file.parse(data, offset, spot[1]))
        except Damaged:
            self._take_again(file, spot)
        self._awaited.discard(spot)

    def _take_again(self, file: BucketFile, spot: BucketRecordKey) -> None:
        """What was fetched is damaged: read it once more, and have it repaired."""
        try:
            self._read(file, spot)
        except StorageFault as fault:
            self._on_fault(fault)
        except Damaged as damaged:
            self._note_damage(spot, damaged)

    def _note_damage(self, spot: BucketRecordKey, damaged: Damaged) -> None:
        while len(self._damaged) >= _DAMAGED_MAX:
            del self._damaged[next(iter(self._damaged))]
        self._damaged[spot] = None
        self._on_damage(damaged)

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for each in waiters:
            if not each.done():
                each.set_result(None)
        self._on_arrival()
