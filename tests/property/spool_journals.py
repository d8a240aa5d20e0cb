"""The common parts of the worlds of a spool: journals on disks that lose power, through the lives of one process; and
what must be true in the end of each message that was sent."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from fairway import batch
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import Aside
from fairway.client.spool.spool import SpoolOptions
from fairway.errors import NotSent, OutcomeUnknown, Refused
from fairway.limits import GIB
from fairway.protocol.producer_session import ProducerOptions
from fairway.protocol.receipts import SpoolBatchReceipt
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from tests.property.producing_world import Sent

SEGMENT_BYTES = 3_000


class Journals:
    """The disks, and the timers that they need."""

    clock: ManualClock
    sent: list[Sent]

    def prepare(self) -> None:
        """Before the first life."""
        self.disks: dict[int, SimDisk] = {}  # by journal
        self.asides: list[tuple[Aside, list[bytes]]] = []
        self._timers: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()

    # --- lives

    def reopened(self) -> list[Journal]:
        """What earlier lives have left, the oldest first."""
        found = [self._reopened(number, disk) for number, disk in self.disks.items()]
        return sorted(found, key=lambda journal: journal.since_ms)

    def _reopened(self, number: int, disk: SimDisk) -> Journal:
        while True:
            try:
                return Journal.open(disk, number, self.clock, segment_bytes=SEGMENT_BYTES)
            except SimulatedPowerCut:
                disk = self.disks[number] = disk.crash(self.call_later)

    def new_journal(self, rng: SeededRng, number: int, small_bytes: int, *, is_cluster: bool) -> Journal:
        """On a disk of its own, which is full soon, or never."""
        capacity_bytes = (small_bytes, GIB)[rng.below(2)]
        self.disks[number] = SimDisk(rng.child("disk"), self.call_later, capacity_bytes=capacity_bytes)
        return Journal(self.disks[number], number, self.clock, segment_bytes=SEGMENT_BYTES, is_cluster=is_cluster)

    def hand_over(self, before: list[Journal], adopt: Callable[[list[Journal]], Any], rng: SeededRng) -> None:
        """To the spool of this life. To read them takes a while."""
        self.call_later(rng.below(3) * 0.1, adopt, [each for each in before if not each.is_empty])
        for each in before:
            if each.is_empty:
                self.finished(each)

    def finished(self, journal: Journal) -> None:
        self.look_aside(journal)
        del self.disks[journal.number]

    def look_aside(self, journal: Journal) -> None:
        for name in journal.disk.listing("aside"):
            if not name.endswith(".tmp"):
                note, data = journal.read_aside(name)
                self.asides.append((note, [bytes(each) for each in batch.decode(data).payloads]))

    def crash_disks(self, *, has_power: bool) -> None:
        for number, disk in self.disks.items():
            self.disks[number] = disk.crash_process(self.call_later) if has_power else disk.crash(self.call_later)
        self._timers.clear()

    # --- time

    def call_later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        due_ns = self.clock.monotonic_ns() + int(seconds * 1e9)
        heapq.heappush(self._timers, (due_ns, next(self._numbers), callback, args))

    def run_timers(self, *, is_whole: bool) -> None:
        while self._timers and (is_whole or self._timers[0][0] <= self.clock.monotonic_ns()):
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)

    # --- the end

    def check_receipts(self, stored: Counter[bytes], outcomes: Counter[str]) -> list[Sent]:
        """The promises, one by one, given what brokers have stored; which messages are there as a receipt says, in the
        order in which they were sent. Counts how often each kind of outcome came."""
        aside = {payload: note for note, payloads in self.asides for payload in payloads}
        assert stored.keys() <= {each.payload for each in self.sent}, "nothing is invented"
        assert stored.total() == len(stored), f"nothing is stored twice: {stored.most_common(3)}"
        there: list[Sent] = []
        for each in self.sent:
            assert each.batch.done(), "everything is settled in the end"
            error = each.batch.exception()
            outcomes[type(error).__name__] += 1
            if error is None:
                is_spooled = isinstance(each.batch.receipt(), SpoolBatchReceipt)
                outcomes["spooled"] += is_spooled
                if is_spooled and each.payload in aside:
                    outcomes["aside"] += 1
                    assert aside[each.payload].is_unknown or not stored[each.payload], "set aside: not stored"
                    continue
                assert stored[each.payload] == 1, f"a receipt: stored ({each.payload!r}, spooled: {is_spooled})"
                there.append(each)
            elif not isinstance(error, OutcomeUnknown):
                assert isinstance(error, (NotSent, Refused)), error
                if "the process died" not in str(error):  # nobody heard that
                    assert stored[each.payload] == 0, f"certainly not stored: {error}"
        return there


def producer_options(rng: SeededRng) -> ProducerOptions:
    return ProducerOptions(
        batch_messages_max=1 + rng.below(6),
        window=1 + rng.below(8),
        delivery_timeout_ms=(2_000, 60_000)[rng.below(2)],
        buffer_messages_max=200,
        when_full="spool",
    )


def spool_options(rng: SeededRng) -> SpoolOptions:
    return SpoolOptions(
        "spool",
        after_ms=(5, 40, 200)[rng.below(3)],
        buffer_messages=(5, 40, 1_000)[rng.below(3)],
        bytes_max=(6_000, 1_000_000)[rng.below(2)],
    )
