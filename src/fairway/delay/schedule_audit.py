"""Is the schedule log what it was? The manifest and its copy, every record of every bucket. Nothing is changed.

For `fairway verify`: no lock is held, so a living owner may delete a bucket or write a manifest meanwhile; then the
audit looks again. What lies behind the end that the manifest vouches for is being written, or is cut by the next start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway import batch
from fairway.delay import bucket_file, catalogue, manifest, piece
from fairway.delay.manifest import BucketEntry, Manifest
from fairway.errors import FairwayError, NoSuchFile
from fairway.storage import scan, segment
from fairway.storage.record import Record, RecordKind
from fairway.storage.report import INVALID, ROTTEN, DamageReport, FlawReport
from fairway.storage.scan import MISSING, Damage, SegmentScan
from fairway.world.disk import Disk

_LOOKS_MAX = 5
_MANIFEST_REMEDY = "start the delay server: it goes on with the other one, and writes both anew"


@dataclass(slots=True)
class Audit:
    """What was found."""

    damages: list[DamageReport] = field(default_factory=list)
    flaws: list[FlawReport] = field(default_factory=list)
    records: int = 0
    bytes: int = 0


def audit(disk: Disk) -> Audit:
    """Look at the schedule log of a delay server; empty where the directory has none."""
    for _ in range(_LOOKS_MAX - 1):
        try:
            return _look(disk, is_last=False)
        except NoSuchFile:  # a living owner let it go meanwhile
            continue
    return _look(disk, is_last=True)


def _look(disk: Disk, *, is_last: bool) -> Audit:
    found = Audit()
    known = _manifest(disk, found)
    for bucket in () if known is None else known.buckets:
        name = bucket_file.file_name(bucket.number)
        try:
            _bucket(disk, name, bucket, found)
        except NoSuchFile:
            if not is_last:
                raise
            found.damages.append(DamageReport("schedule", name, 0, bucket.synced_end, ROTTEN, MISSING))
    return found


def _manifest(disk: Disk, found: Audit) -> Manifest | None:
    first, copy = manifest.read(disk, manifest.NAME), manifest.read(disk, manifest.COPY)
    for name, each in ((manifest.NAME, first), (manifest.COPY, copy)):
        if each is not None and each.manifest is None:
            found.flaws.append(FlawReport(name, each.why, _MANIFEST_REMEDY))
        found.bytes += 0 if each is None else len(each.data)
    if first is None and any(segment.base_of(name) is not None for name in disk.listing(manifest.DIRECTORY)):
        found.flaws.append(FlawReport(manifest.NAME, "it is missing", _MANIFEST_REMEDY))
    return next((each.manifest for each in (first, copy) if each is not None and each.manifest is not None), None)


def _bucket(disk: Disk, name: str, bucket: BucketEntry, found: Audit) -> None:
    file = disk.open(name)
    try:
        found.bytes += min(file.size, bucket.synced_end)
        header = scan.check_segment_header(file, 0, bucket.log_id) if bucket.synced_end else None
        if header is not None:
            found.flaws.append(
                FlawReport(name, f"its header: {header.why}", "none is needed: its records say the same")
            )
        if file.size < bucket.synced_end:
            found.damages.append(DamageReport("schedule", name, file.size, bucket.synced_end, ROTTEN, MISSING))
        for each in SegmentScan(file, 0, segment.HEADER_BYTES, bucket.log_id, limit=bucket.synced_end):
            if isinstance(each, Damage):
                found.damages.append(_damage(name, each))
            else:
                found.records += 1
                _record(name, each, found)
    finally:
        file.close()


def _damage(name: str, damage: Damage) -> DamageReport:
    report = DamageReport("schedule", name, damage.start, damage.end, ROTTEN, damage.why)
    if damage.header is not None and damage.header.kind == RecordKind.SCHEDULE:
        report.first_sequence, report.messages = damage.header.first_sequence, damage.header.count
    return report


def _record(name: str, record: Record, found: Audit) -> None:
    try:
        if record.header.kind == RecordKind.CATALOGUE:
            catalogue.unpack(record.body)
        else:
            batch.check(piece.unpack(record).data)
    except FairwayError as error:
        header = record.header
        found.damages.append(DamageReport("schedule", name, header.position, header.end, INVALID, str(error)))
