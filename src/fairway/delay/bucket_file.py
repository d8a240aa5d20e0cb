"""One bucket on disk: a segment of its own (base 0, its own log id) whose records are pieces.

It is written through a flusher like every log, but all buckets lie in one directory, so that one thread of the disk
serves them all. It never rolls: a bucket is one file, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Callable

from fairway.batch import checksum
from fairway.delay import piece
from fairway.delay.buckets import Span
from fairway.delay.manifest import DIRECTORY, Bucket
from fairway.delay.piece import Piece, Sequences
from fairway.errors import RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.storage import record, scan, segment
from fairway.storage.flusher import Defer, Flusher, Outcome
from fairway.storage.log import Damaged
from fairway.storage.record import BadRecord, Kind, Record
from fairway.storage.recovery import Finding, Verdict, judge
from fairway.storage.scan import Damage, Scan
from fairway.world.disk import Disk


def file_name(number: int) -> str:
    return segment.file_name(DIRECTORY, number)


class BucketFile:
    """An open bucket. `is_listed`: the manifest on disk names it. `source_end`: the message log up to here is in it."""

    def __init__(self, disk: Disk, bucket: Bucket, *, defer: Defer, poison: Callable[[StorageFault], None]) -> None:
        self.number = bucket.number
        self.log_id = bucket.log_id
        self.span: Span = bucket.span
        self.end = bucket.synced_end
        self.is_listed = False
        self.is_of_split = False  # not to be listed before the split is done
        self.is_retired = False  # takes no more pieces
        self.source_end = 0
        self._poison = poison
        self._file = disk.open(file_name(bucket.number), create=True)
        self._flusher = Flusher(disk, self.end, defer=defer, on_full=self._is_full, on_progress=self._progressed)
        if self.end == 0:
            self._flusher.add(self._file, segment.pack_header(self.log_id, 0, 0))
            self.end = segment.HEADER_BYTES

    @property
    def synced_end(self) -> int:
        return self._flusher.synced_end

    def append(self, subject: Subject, subject_id: int, sequences: Sequences, data: bytes, now_ms: int) -> int:
        """Gather a piece; its position. It is durable once `when_durable(self.end)` says so."""
        body = piece.pack(subject, sequences, data)
        position = self.end
        head = record.pack(
            Kind.SCHEDULE,
            subject_id,
            self.log_id,
            position,
            self._flusher.synced_end,
            0,
            int(sequences[0]),
            now_ms,
            len(sequences),
            len(body),
            checksum(body),
        )
        self._flusher.add(self._file, head, body)
        self.end = position + len(head) + len(body)
        return position

    def when_durable(self, position: int, outcome: Outcome) -> None:
        self._flusher.when_durable(position, outcome)

    def read(self, position: int) -> Piece:
        """The piece at a position, verified; `Damaged` if it is not intact."""
        try:
            head = self._file.read(position, record.HEADER_BYTES)
            header = record.parse_header(head, 0, position, self.log_id)
            body = self._file.read(header.body_at, header.body_bytes)
            record.check_body(header, body)
            return piece.unpack(Record(header, body))
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad
        except RemoteProtocolError as bad:
            raise Damaged(position, str(bad)) from bad

    def scan(self, limit: int) -> Scan:
        """All records below `limit`, read as they are asked for."""
        return Scan(self._file, 0, segment.HEADER_BYTES, self.log_id, limit=limit)

    def entry(self) -> Bucket:
        """For the manifest."""
        return Bucket(
            self.number, self.log_id, self.span.grain, self.span.start_ms, self.span.end_ms, self._flusher.synced_end
        )

    def close(self) -> None:
        self._file.close()

    def _is_full(self, _position: int) -> None:
        self._poison(StorageFault("the disk is full, and messages wait for their buckets: make room, restart"))

    def _progressed(self) -> None:
        if self._flusher.fault is not None:
            self._poison(self._flusher.fault)


def recover(disk: Disk, bucket: Bucket) -> tuple[Bucket, list[Finding]]:
    """Cut what a crash has torn, sync what is left, and say where the bucket ends. What lies below its synced end in
    the manifest is not read here: the loader reports what has rotted there."""
    file = disk.open(file_name(bucket.number), create=True)
    findings: list[Finding] = []
    try:
        start = max(bucket.synced_end, segment.HEADER_BYTES)
        synced_end, damages = bucket.synced_end, list[Damage]()
        if file.size < bucket.synced_end:
            findings.append(_rot(bucket, Damage(file.size, bucket.synced_end, "missing")))
        elif bucket.synced_end == 0 and scan.check_segment_header(file, 0, bucket.log_id) is not None:
            damages.append(Damage(0, file.size, "unreadable header"))
        for found in Scan(file, 0, start, bucket.log_id):
            if isinstance(found, Damage):
                damages.append(found)
            if found.header is not None:
                synced_end = max(synced_end, found.header.synced_end)
        judgement = judge(synced_end, damages)
        findings += [_rot(bucket, each) for each in judgement.rotten]
        if judgement.cut_at is not None and judgement.cut_at < file.size:
            disk.truncate(file, judgement.cut_at)  # nothing was answered on its behalf: the message log still has it
        disk.sync(file, min(synced_end, file.size))
        end = file.size
    finally:
        file.close()
    return Bucket(bucket.number, bucket.log_id, bucket.grain, bucket.start_ms, bucket.end_ms, end), findings


def _rot(bucket: Bucket, damage: Damage) -> Finding:
    return Finding(file_name(bucket.number), Verdict.ROTTEN, damage)
