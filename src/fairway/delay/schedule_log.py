"""The schedule log: all buckets, and the manifest that says which ones there are. The truth about what is pending.

Three rules keep it safe at every step:

- A bucket counts once the manifest on disk names it. Until then what is in it counts as not moved, so the message log
  still has it, and a start deletes the file.
- A split writes private buckets, syncs them, and switches with one manifest that names them and no longer the old one.
  Messages that arrive meanwhile go into the private ones too: they count with the switch, and it counts on them.
- A bucket is deleted only after a manifest without it is on disk, and that manifest's `moved_end` covers all that was
  ever put into it: nothing of it can be moved a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from fairway.delay import bucket_file, manifest
from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import TimeRange
from fairway.delay.manifest import COPY, DIRECTORY, NAME, BucketEntry, Manifest
from fairway.errors import DiskFull, FairwayError, StorageFault
from fairway.storage import directory, segment
from fairway.storage.flusher import Defer
from fairway.storage.recovery import DamageVerdict, Finding
from fairway.storage.scan import Damage
from fairway.world.clock import Clock
from fairway.world.disk import TEMPORARY, Disk
from fairway.world.rng import Rng

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
        poison: Callable[[StorageFault], None],
        moved_end: Callable[[Iterable[int]], int],
        on_listed: Callable[[BucketFile], None],
        catalogue_messages: int,
    ) -> None:
        self.files: dict[int, BucketFile] = {}
        self.findings: list[Finding] = []
        self.manifests = 0  # written in this life
        self._disk = disk
        self._clock = clock
        self._rng = rng
        self._messages_id = messages_id
        self._defer = defer
        self._poison = poison
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
        """Open the buckets that there are; everything in the message log, which has those bounds, from the returned
        position on must be moved again. Every step may be killed and repeated."""
        found, why, self.is_full, name = manifest.read_or_make(self._disk, self._messages_id, messages_base)
        if why:
            self.findings.append(Finding(NAME, DamageVerdict.ROTTEN, Damage(0, 0, why)))
        # A killed process may have left a manifest that only the page cache has; what it doomed is deleted next.
        directory.secure(self._disk, name)
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
        self.stated_end = found.moved_end
        return found.moved_end

    def _sweep(self, listed: set[int]) -> None:
        for name in self._disk.listing(DIRECTORY):
            number = segment.base_of(name)
            if name.endswith(TEMPORARY) or (number is not None and number not in listed):
                self._next_number = max(self._next_number, (number or 0) + 1)
                self._disk.remove(f"{DIRECTORY}/{name}")

    def _open(self, bucket: BucketEntry) -> BucketFile:
        opened = BucketFile(
            self._disk,
            self._clock,
            bucket,
            defer=self._defer,
            poison=self._poison,
            catalogue_messages=self.catalogue_messages,
        )
        self.files[bucket.number] = opened
        return opened

    # --- writing -----------------------------------------------------------------------------------------------------

    def file_for(self, span: TimeRange) -> BucketFile:
        """The bucket that takes the messages of a stretch of time; a new one where there is none."""
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
        if self._fault is not None:
            return
        self._is_dirty = True
        if then is not None:
            self._when_listed.append(then)
        if not self._is_publishing:
            self._is_publishing = True
            self._defer(self._publish)  # at the end of the turn: one manifest for all its new buckets

    def state(self, position: int) -> None:
        """See to it that a manifest says that the message log is in buckets up to there, if it is."""
        if self.stated_end < position <= self._moved_end(()) and not self._is_publishing:
            self.publish()

    def end_with(self, files: Iterable[BucketFile]) -> int:
        """How far the message log is in the buckets that a manifest names, once it names these too."""
        return self._moved_end([each.number for each in files if not each.is_listed])

    def retry(self, now_ms: int) -> None:
        """Write again the manifest that found no room. To be called every tick."""
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
            if self.is_full:  # the one before it still holds
                self._is_publishing = False
                self._when_listed[:0] = waiting
                if self._closing is not None:
                    _settle(self._closing, fault)
                return
            if fault is not None:
                self._poison(fault)
                return
            self._is_publishing = False
            self.manifests += 1
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
                self._disk.publish_later(COPY, parts, done)
            else:
                done(fault)

        self._disk.publish_later(NAME, parts, copy)

    def __iter__(self) -> Iterator[BucketFile]:
        return iter(self.files.values())

    async def settle(self, now_ms: int) -> None:
        """Return once everything gathered so far is on disk, and a manifest says so."""
        loop = asyncio.get_running_loop()
        for each in (file for file in self.files.values() if not file.is_retired):
            each.catalogue(now_ms, self.catalogue_messages // 32)  # fewer are read as fast from their pieces
        for each in list(self.files.values()):
            self._check()
            synced: asyncio.Future[None] = loop.create_future()
            each.when_durable(each.end, partial(_settle, synced))
            await synced
        for _ in range(2):  # the first names every bucket, the second says that all of it is moved
            self._check()
            self._closing = listed = loop.create_future()
            self.publish(partial(_settle, listed))
            await listed

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def poison(self, fault: StorageFault) -> None:
        """Write nothing more, and tell everybody who waits: what is on disk is unknown."""
        if self._fault is None:
            self._fault = fault
            for each in list(self.files.values()):
                each.abandon(fault)
            if self._closing is not None:
                _settle(self._closing, fault)

    def abandon(self, fault: StorageFault) -> None:
        """Let go of the buckets as they are: nothing more is written."""
        self.poison(fault)
        self.close()

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
