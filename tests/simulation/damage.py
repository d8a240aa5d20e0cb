"""Damage on top: bits that flip and ends that vanish on a disk that swore to have them.

The disk rots while the store is closed. Everything that the damage did not hit must still be there, and nothing wrong
may be returned. The damage must be reported: by recovery where it reads, by the reader who runs into it where it does
not.
"""

from __future__ import annotations

from dataclasses import dataclass

from fairway.names import Subject
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage import checkpoint, index_file, message_log, record, segment
from fairway.storage.message_log import StoredBatch
from fairway.storage.store import Store
from tests.simulation import checks
from tests.simulation.truth import Invariant, Sent, Truth


@dataclass(frozen=True)
class Hit:
    """What was damaged: bytes [start, end) of a file, and whether start-up has to read all of the log by itself."""

    name: str
    start: int
    end: int
    is_chop: bool
    without_views: bool
    is_newest: bool

    @property
    def log(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_log(self) -> bool:
        return self.log in checks.LOGS

    @property
    def is_provable(self) -> bool:
        """The end of a log can vanish without a trace if no checkpoint knows of it."""
        return not (self.is_chop and self.is_newest and self.without_views)

    def touches(self, sent: Sent) -> bool:
        base = segment.base_of(self.name.partition("/")[2])
        if self.log != message_log.DIRECTORY or base is None:
            return False
        start = sent.end - len(sent.data) - record.HEADER_BYTES
        return start < base + self.end and sent.end > base + self.start

    def __str__(self) -> str:
        what = "chopped" if self.is_chop else "flipped"
        return f"{self.name} {what} at {self.start}{', without views' if self.without_views else ''}"


def strike(disk: SimDisk, rng: SeededRng, truth: Truth) -> Hit:
    """Damage one file; perhaps the views are gone, too."""
    without_views = bool(rng.below(2))
    if without_views:
        _remove_views(disk)
    stored = [sent for sent in truth.names.values() if sent.end > truth.floor]
    if stored and rng.below(2):
        return _strike_header(disk, rng, stored[rng.below(len(stored))], without_views)
    return _strike_anywhere(disk, rng, without_views)


def _strike_header(disk: SimDisk, rng: SeededRng, sent: Sent, without_views: bool) -> Hit:
    """One bit of the 80 bytes in front of a batch: there are few of them, and each says something that matters."""
    names = _files(disk, message_log.DIRECTORY)
    position = sent.end - len(sent.data) - record.HEADER_BYTES + rng.below(record.HEADER_BYTES)
    base, name = max((base, name) for name in names if (base := segment.base_of(name)) is not None and base <= position)
    name = f"{message_log.DIRECTORY}/{name}"
    disk.flip(name, (position - base) * 8 + rng.below(8))
    return Hit(name, position - base, position - base + 1, False, without_views, name.endswith(names[-1]))


def _strike_anywhere(disk: SimDisk, rng: SeededRng, without_views: bool) -> Hit:
    directories = [each for each in (*checks.LOGS, *checks.DERIVED) if _files(disk, each)]
    weighted = directories + [message_log.DIRECTORY] * 4
    directory = weighted[rng.below(len(weighted))]
    names = _files(disk, directory)
    at = rng.below(len(names))
    name = f"{directory}/{names[at]}"
    size = _size(disk, name)
    offset = rng.below(size)
    is_chop = rng.below(4) == 0
    if is_chop:
        disk.chop(name, offset)
    else:
        disk.flip(name, offset * 8 + rng.below(8))
    return Hit(name, offset, size if is_chop else offset + 1, is_chop, without_views, at == len(names) - 1)


def _remove_views(disk: SimDisk) -> None:
    for directory in (checkpoint.DIRECTORY, index_file.DIRECTORY):
        for name in disk.listing(directory):
            disk.remove(f"{directory}/{name}")


def _files(disk: SimDisk, directory: str) -> list[str]:
    names = disk.listing(directory)
    return [name for name in names if "." in name and _size(disk, f"{directory}/{name}")]


def _size(disk: SimDisk, name: str) -> int:
    file = disk.open(name)
    try:
        return file.size
    finally:
        file.close()


def subject_names(store: Store) -> dict[int, Subject]:
    return {subject.id: subject.name for subject in store.messages.views.subjects}


def check_served(truth: Truth, hit: Hit, found: dict[int, list[StoredBatch]], names: dict[int, Subject]) -> int:
    """Everything that was not hit is there, and nothing else; how many batches are missing."""
    present: set[int] = set()
    for subject_id, batches in found.items():
        for stored in batches:
            sent = truth.see(names.get(subject_id, Subject("nobody")), stored)
            if sent is not None:
                present.add(id(sent))
    missing = [sent for sent in truth.names.values() if id(sent) not in present and sent.end > truth.floor]
    for sent in missing:
        if not hit.touches(sent):
            truth.blame(Invariant.LOST, f"{sent} at {sent.end} was not hit: {hit}")
    return len(missing)


def is_reported(disk: SimDisk, store: Store, hit: Hit) -> bool:
    """Whether recovery said so, or the last checkpoint of the store, which is closed by now."""
    known, _ = checkpoint.newest(disk, store.identity)
    logs = [each.log for each in store.findings] + [each.log for each in (known.rotten if known else [])]
    return hit.log in logs


def check_reported(truth: Truth, disk: SimDisk, store: Store, hit: Hit, missing: int) -> None:
    must_show = missing > 0 or (hit.is_log and hit.without_views)
    if must_show and hit.is_provable and not is_reported(disk, store, hit):
        truth.blame(Invariant.UNREPORTED, f"{missing} batches are missing: {hit}")
