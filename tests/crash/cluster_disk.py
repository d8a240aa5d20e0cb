"""The disks of the copies of a broker group, compared once all of them have stopped.

Below the committed end their logs must be the same files with the same bytes. A sequence of a subject must name one
payload on all of them, the one that producers and consumers know. No payload may be in a log twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairway.batch import decode
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage import segment
from fairway.storage.recovery import ASIDE, DamageVerdict
from fairway.storage.store import Store
from tests.crash.broker_server import STORE
from tests.crash.ledger import batches

LOGS = ("messages", "actions")

Named = dict[str, dict[int, bytes]]  # by subject and sequence: payloads


@dataclass
class Compared:
    """What was found."""

    bytes: int = 0  # of each copy that were compared
    messages: int = 0  # in all copies together
    duplicates: int = 0  # payloads that are in a log twice
    kept_aside: int = 0  # files of uncommitted tails
    sentences: list[str] = field(default_factory=list)

    def add(self, other: Compared) -> None:
        self.bytes += other.bytes
        self.messages += other.messages
        self.duplicates += other.duplicates
        self.kept_aside += other.kept_aside
        self.sentences += other.sentences


def compare(roots: Sequence[Path], committed: tuple[int, int], known: Named) -> Compared:
    """All copies, with one another and with what is known of every sequence that was acknowledged or seen."""
    found = Compared()
    for log, end in zip(LOGS, committed, strict=True):
        _compare_logs(roots, log, end, found)
    for root in roots:
        found.kept_aside += sum(1 for _ in (root / ASIDE).glob("*"))
        _compare_names(root, asyncio.run(_stored(root, found)), known, found)
    return found


def _compare_logs(roots: Sequence[Path], log: str, committed_end: int, found: Compared) -> None:
    logs = [segments(root / log, committed_end) for root in roots]
    first = max((min(each, default=0) for each in logs), default=0)  # a wiped one may begin later than the others
    for number, other in enumerate(logs[1:], 1):
        bases, others = ({base for base in each if base >= first} for each in (logs[0], other))
        if bases != others:
            found.sentences.append(f"{log}: copies 0 and {number} have other segments: {sorted(bases ^ others)}")
        for base in sorted(bases & others):
            if (why := difference(logs[0][base], other[base], base, committed_end)) is not None:
                found.sentences.append(f"{log}: copies 0 and {number} differ: {why}")
    found.bytes += max(committed_end - first, 0)


def segments(folder: Path, end: int) -> dict[int, Path]:
    """Those that begin below the end, by base."""
    named = {segment.base_of(path.name): path for path in folder.iterdir()}
    return {base: path for base, path in named.items() if base is not None and base < end}


def difference(one: Path, other: Path, base: int, end: int) -> str | None:
    """Where two files of the same segment part, below that position of the log; None: nowhere."""
    ours, theirs = one.read_bytes()[: end - base], other.read_bytes()[: end - base]
    if ours == theirs:
        return None
    length = min(len(ours), len(theirs))
    at = next((at for at in range(length) if ours[at] != theirs[at]), length)
    return f"at {base + at:,} of {one.name}, {len(ours):,} and {len(theirs):,} bytes long below {end:,}"


async def _stored(root: Path, found: Compared) -> Named:
    """Every message in a directory, opened as one that follows, so that nothing is written."""
    loop = asyncio.get_running_loop()
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    store = Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=STORE, follows=True)
    try:
        store.confirm(*store.ends())
        found.sentences += [
            f"{root.name}: rotten: {each.damage}" for each in store.findings if each.verdict is DamageVerdict.ROTTEN
        ]
        return {
            state.name: {
                stored.entry.first_sequence + index: bytes(payload)
                for stored in batches(store, state.id)
                for index, payload in enumerate(decode(stored.data).payloads)
            }
            for state in store.messages.views.subjects
        }
    finally:
        store.abandon()


def _compare_names(root: Path, stored: Mapping[str, Mapping[int, bytes]], known: Named, found: Compared) -> None:
    for subject, names in stored.items():
        found.messages += len(names)
        twice = len(names) - len(set(names.values()))
        if twice:
            found.duplicates += twice
            found.sentences.append(f"{root.name}: {twice} payloads are twice in {subject}")
    for subject, names in known.items():
        there = stored.get(subject, {})
        wrong = sorted(sequence for sequence, payload in names.items() if there.get(sequence) != payload)
        if wrong:
            found.sentences.append(
                f"{root.name}: {len(wrong)} of {len(names)} are missing or another's in {subject}: {wrong[:5]}"
            )
