"""The schedule log: all buckets, and the manifest that says which ones there are. The truth about what is pending.

Three rules keep it safe at every step:

- A bucket counts once the manifest on disk names it. Until then what is in it counts as not moved, so the message log
  still has it, and a start deletes the file.
- A split writes private buckets, syncs them, and switches with one manifest that names them and no longer the old one.
  Messages that arrive meanwhile go into the private ones too: they count with the switch.
- A bucket is deleted only after a manifest without it is on disk, and that manifest's `moved_end` covers all that was
  ever put into it: nothing of it can be moved a second time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

from fairway import batch, limits
from fairway.batch import Batch
from fairway.delay import bucket_file, manifest
from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import Span
from fairway.delay.manifest import DIRECTORY, NAME, Bucket, Manifest
from fairway.delay.piece import Piece
from fairway.errors import FairwayError, StorageFault
from fairway.storage import directory, segment
from fairway.storage.flusher import Defer
from fairway.storage.recovery import Finding
from fairway.world.disk import TEMPORARY, Disk
from fairway.world.rng import Rng

_OPENED_BYTES_MAX = 32 * limits.MIB  # of decoded pieces: what falls due tick by tick lies in the same ones
_LOG_ID_BITS = 63


class ScheduleLog:
    """All buckets of one delay server. Lives on its loop."""

    def __init__(
        self,
        disk: Disk,
        rng: Rng,
        messages_id: int,
        *,
        defer: Defer,
        poison: Callable[[StorageFault], None],
        moved_end: Callable[[], int],
        on_listed: Callable[[BucketFile], None],
    ) -> None:
        self.files: dict[int, BucketFile] = {}
        self.findings: list[Finding] = []
        self.manifests = 0  # written in this life
        self._disk = disk
        self._rng = rng
        self._messages_id = messages_id
        self._defer = defer
        self._poison = poison
        self._moved_end = moved_end
        self._on_listed = on_listed
        self._by_span: dict[Span, BucketFile] = {}
        self._next_number = 1
        self._is_dirty = False
        self._is_publishing = False
        self._when_listed: list[Callable[[], None]] = []
        self._opened: OrderedDict[tuple[int, int], tuple[Piece, Batch]] = OrderedDict()
        self._opened_bytes = 0

    # --- a start -----------------------------------------------------------------------------------------------------

    def recover(self, messages_end: int) -> int:
        """Open the buckets that there are; everything in the message log from the returned position on must be moved
        again. Every step may be killed and repeated."""
        found = manifest.read_or_make(self._disk, self._messages_id)
        # A killed process may have left a manifest that only the page cache has; what it doomed is deleted next.
        directory.secure(self._disk, NAME)
        self._next_number = found.next_number
        self._sweep({each.number for each in found.buckets})
        for each in found.buckets:
            recovered, findings = bucket_file.recover(self._disk, each)
            opened = self._open(recovered)
            opened.is_listed = True
            opened.is_retired = bool(findings)  # what is damaged is read, and not written behind
            opened.source_end = messages_end
            self.findings += findings
            if not opened.is_retired:
                self._by_span[opened.span] = opened
        return found.moved_end

    def _sweep(self, listed: set[int]) -> None:
        for name in self._disk.listing(DIRECTORY):
            number = segment.base_of(name)
            if name.endswith(TEMPORARY) or (number is not None and number not in listed):
                self._next_number = max(self._next_number, (number or 0) + 1)
                self._disk.remove(f"{DIRECTORY}/{name}")

    def _open(self, bucket: Bucket) -> BucketFile:
        opened = BucketFile(self._disk, bucket, defer=self._defer, poison=self._poison)
        self.files[bucket.number] = opened
        return opened

    # --- writing -----------------------------------------------------------------------------------------------------

    def file_for(self, span: Span) -> BucketFile:
        """The bucket that takes the messages of a stretch of time; a new one where there is none."""
        return self._by_span.get(span) or self.create(span)

    def create(self, span: Span, *, of_split: bool = False) -> BucketFile:
        bucket = Bucket(self._next_number, self._rng.bits(_LOG_ID_BITS), *span, 0)
        self._next_number += 1
        created = self._open(bucket)
        created.is_of_split = of_split
        self._by_span.setdefault(span, created)
        if not of_split:
            self.publish()
        return created

    def retire(self, file: BucketFile) -> None:
        """It takes no more pieces."""
        file.is_retired = True
        if self._by_span.get(file.span) is file:
            del self._by_span[file.span]

    def switch(self, old: list[BucketFile], new: list[BucketFile], then: Callable[[], None]) -> None:
        """Name the new buckets and no longer the old ones, in one step; then delete those, and call `then`."""
        for each in new:
            each.is_of_split = False
        for each in old:
            self.retire(each)
            del self.files[each.number]

        def switched() -> None:
            for each in old:
                each.close()
                self._disk.remove_later(bucket_file.file_name(each.number), self._removed)
            then()

        self.publish(switched)

    def _removed(self, fault: StorageFault | None) -> None:
        if fault is not None:
            self._poison(fault)

    # --- the manifest ------------------------------------------------------------------------------------------------

    def publish(self, then: Callable[[], None] | None = None) -> None:
        """Write a manifest of what is there now, after the one that is under way."""
        self._is_dirty = True
        if then is not None:
            self._when_listed.append(then)
        if not self._is_publishing:
            self._is_publishing = True
            self._defer(self._publish)  # at the end of the turn: one manifest for all its new buckets

    def _publish(self) -> None:
        self._is_dirty = False
        listed = [each for each in self.files.values() if not each.is_of_split]
        waiting, self._when_listed = self._when_listed, []
        entries = [each.entry() for each in listed]
        parts = manifest.pack(Manifest(self._messages_id, self._moved_end(), self._next_number, entries))

        def done(fault: StorageFault | None) -> None:
            if fault is not None:
                self._poison(fault)
                return
            self._is_publishing = False
            self.manifests += 1
            for each in listed:
                if not each.is_listed:
                    each.is_listed = True
                    self._on_listed(each)
            for then in waiting:
                then()
            if self._is_dirty:
                self.publish()

        self._disk.publish_later(NAME, parts, done)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, number: int, position: int) -> tuple[Piece, Batch]:
        """A piece and its batch, decoded; `Damaged` if it is not intact."""
        key = number, position
        found = self._opened.get(key)
        if found is None:
            piece = self.files[number].read(position)
            found = self._opened[key] = piece, batch.decode(piece.data)
            self._opened_bytes += len(piece.data)
            while self._opened_bytes > _OPENED_BYTES_MAX and len(self._opened) > 1:
                self._opened_bytes -= len(self._opened.popitem(last=False)[1][0].data)
        else:
            self._opened.move_to_end(key)
        return found

    def __iter__(self) -> Iterator[BucketFile]:
        return iter(self.files.values())

    async def settle(self) -> None:
        """Return once everything gathered so far is on disk, and a manifest says so."""
        loop = asyncio.get_running_loop()
        for each in list(self.files.values()):
            synced: asyncio.Future[None] = loop.create_future()
            each.when_durable(each.end, partial(_settle, synced))
            await synced
        for _ in range(2):  # the first names every bucket, the second says that all of it is moved
            listed: asyncio.Future[None] = loop.create_future()
            self.publish(partial(_settle, listed))
            await listed

    def close(self) -> None:
        for each in self.files.values():
            each.close()


def _settle(future: asyncio.Future[None], outcome: FairwayError | None = None) -> None:
    if future.done():
        return
    if outcome is None:
        future.set_result(None)
    else:
        future.set_exception(outcome)
