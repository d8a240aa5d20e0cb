"""The journal of a spool on a simulated disk: what a crash, rot and a full disk do to it, and what it says of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest

from fairway import batch
from fairway.client.spool.journal import SEGMENT_BYTES as SPOOL_SEGMENT_BYTES
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import KEPT, PlacementRecord, SpoolEntry
from fairway.errors import DiskFull, StorageFault
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut

NUMBER = 0xFA12
SEGMENT_BYTES = 2_000


class Stage:
    """A disk on a time of its own, and the journal on it."""

    def __init__(self, *, capacity_bytes: int = 1 << 30) -> None:
        self.clock = ManualClock()
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self.disk = SimDisk(SeededRng(7), self._call_later, capacity_bytes=capacity_bytes)
        self.journal = Journal(self.disk, NUMBER, self.clock, segment_bytes=SEGMENT_BYTES)

    def _call_later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._timers, (seconds, next(self._numbers), callback, args))

    def settle(self) -> None:
        """Let the disk finish."""
        while self._timers:
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)

    def keep(self, *payloads: bytes) -> StorageFault | None:
        outcomes: list[StorageFault | None] = []
        self.journal.keep([Handed("orders", 1, False, each) for each in payloads], outcomes.append)
        self.settle()
        [outcome] = outcomes
        return outcome

    def load(self) -> list[SpoolEntry]:
        """All that is to be had."""
        found: list[SpoolEntry] = []
        while self.journal.has_more:
            self.journal.load(found.extend)
            self.settle()
        return found

    def reopen(self, *, has_power: bool = False) -> None:
        self._timers.clear()
        self.disk = self.disk.crash_process() if has_power else self.disk.crash()
        self.journal = Journal.open(self.disk, NUMBER, self.clock, segment_bytes=SEGMENT_BYTES)

    def segments(self) -> list[str]:
        return self.disk.listing("log")


@pytest.fixture
def stage() -> Stage:
    return Stage()


def data(entries: list[SpoolEntry]) -> list[bytes]:
    return [entry.data for entry in entries]


def test_what_is_kept_comes_back_in_order_also_after_a_power_cut(stage: Stage) -> None:
    assert stage.keep(b"a", b"b") is None
    assert stage.keep(b"c" * 5_000) is None
    assert data(stage.load()) == [b"a", b"b", b"c" * 5_000]
    stage.reopen()
    assert [(entry.number, entry.subject) for entry in stage.load()] == [(0, "orders"), (1, "orders"), (2, "orders")]


def test_what_is_done_does_not_come_back_and_segments_go(stage: Stage) -> None:
    for number in range(60):
        stage.keep(b"%d" % number * 50)
    assert len(stage.segments()) > 2
    for number in range(50):
        stage.journal.note_done(number)
    stage.settle()
    assert len(stage.segments()) < 3
    stage.journal.mark_sent(55, lambda _: None)  # with it, all that is done is noted
    stage.settle()
    stage.reopen()
    assert [entry.number for entry in stage.load()] == list(range(50, 60))
    assert stage.journal.sent_before == 55
    for number in range(50, 60):
        stage.journal.note_done(number)
    stage.settle()
    assert stage.journal.is_empty
    assert stage.segments() == []


def test_an_empty_journal_goes_on(stage: Stage) -> None:
    stage.keep(b"a")
    stage.journal.note_done(0)
    stage.settle()
    stage.keep(b"b")
    assert data(stage.load()) == [b"b"]
    stage.reopen()
    assert data(stage.load()) == [b"b"]


def test_streams_that_were_begun_anew_are_remembered(stage: Stage) -> None:
    stage.keep(b"a" * SEGMENT_BYTES)
    stage.journal.restream(7, 10, 8, lambda _: None)
    stage.journal.restream(8, 5, 9, lambda _: None)
    stage.keep(b"b")  # in the next segment, whose head says it again
    stage.settle()
    stage.reopen()
    found = [stage.journal.identity(7, sequence) for sequence in (9, 10, 14, 15, 20)]
    assert found == [(7, 9), (8, 0), (8, 4), (9, 0), (9, 5)]


def test_a_torn_tail_is_cut_and_kept_aside(stage: Stage) -> None:
    stage.keep(b"a")
    stage.keep(b"b")
    [segment] = stage.segments()
    stage.disk.chop(f"log/{segment}", stage.disk.open(f"log/{segment}").size - 9)
    stage.reopen()
    assert data(stage.load()) == [b"a"]
    [damage] = stage.journal.damages
    assert damage.kind == "torn"
    assert [f"{KEPT}/{name}" for name in stage.journal.disk.listing(KEPT)] == [damage.file]
    assert stage.keep(b"c") is None
    stage.reopen()
    assert data(stage.load()) == [b"a", b"c"]
    assert stage.journal.damages == []


def test_rot_costs_one_entry_and_is_reported(stage: Stage) -> None:
    for each in (b"a", b"b", b"c"):
        stage.keep(each * 100)
    [segment] = stage.segments()
    content = stage.disk.open(f"log/{segment}").read(0, 10_000)
    stage.disk.flip(f"log/{segment}", content.index(b"b" * 100) * 8)
    stage.reopen()
    assert data(stage.load()) == [b"a" * 100, b"c" * 100]
    [damage] = stage.journal.damages
    assert damage.kind == "rotten"
    [kept] = [f"{KEPT}/{name}" for name in stage.journal.disk.listing(KEPT)]
    assert b"b" * 99 in stage.disk.open(kept).read(0, 10_000)


def test_rot_that_comes_while_it_is_in_use_stops_it_with_a_sentence(stage: Stage) -> None:
    stage.keep(b"a" * 100)
    stage.disk.rot(f"log/{stage.segments()[0]}", 3, low=200, high=240)
    stage.journal.load(lambda _: None)
    stage.settle()
    assert "damaged at" in str(stage.journal.fault)


def test_a_full_disk_refuses_entries_and_lets_the_drain_go_on() -> None:
    stage = Stage(capacity_bytes=150_000)
    kept = 0
    while not isinstance(stage.keep(b"%d" % kept * 200), DiskFull):
        kept += 1
    assert kept > 5
    noted: list[StorageFault | None] = []
    stage.journal.mark_sent(kept, noted.append)
    stage.settle()
    assert noted == [None]
    stage.reopen()
    assert [entry.number for entry in stage.load()] == list(range(kept))
    assert stage.journal.sent_before == kept, "room for it was claimed"
    for number in range(kept):
        stage.journal.note_done(number)
    stage.settle()
    assert stage.keep(b"there is room again") is None


def test_a_full_disk_has_room_for_where_the_smallest_entries_are_sent() -> None:
    """In a cluster nothing is sent before that is written down: without room for it the drain would never make any."""
    stage = Stage()
    journal = Journal(stage.disk, NUMBER, stage.clock, is_cluster=True)
    smallest = batch.encode((b"",), producer_id=1 << 63, first_sequence=0, created_ms=1)
    handed = Handed("orders", 1, False, smallest, "broker-1")
    while journal.size_bytes < SPOOL_SEGMENT_BYTES:
        journal.keep([handed] * 1_000, lambda _: None)
        stage.settle()
    stage.disk.reserve(stage.disk.open("other", create=True), stage.disk.free_bytes())
    noted: list[StorageFault | None] = []
    all_of_them = range(journal.entries)
    for first in range(0, len(all_of_them), 300):
        numbers = all_of_them[first : first + 300]
        journal.place([PlacementRecord(each, "broker-1", 1 << 63, each) for each in numbers], noted.append)
        stage.settle()
        for each in numbers[1:]:  # one stays, and with it the segment
            journal.note_done(each)
            stage.settle()
    assert len(noted) > 50
    assert not any(noted)


def test_a_failed_sync_ends_it(stage: Stage) -> None:
    stage.keep(b"a")
    stage.disk.fail_sync()
    fault = stage.keep(b"b")
    assert fault is not None
    assert not isinstance(fault, DiskFull)
    assert stage.keep(b"c") is fault
    stage.reopen()
    assert data(stage.load()) == [b"a"]


def test_what_is_set_aside_is_found_again_with_its_reason(stage: Stage) -> None:
    stage.keep(b"a", b"b")
    entry = stage.load()[0]
    stage.journal.set_aside(entry, "TOO_LARGE: no", 7, True, lambda _: None)
    stage.settle()
    stage.reopen()
    assert data(stage.load())[-1] == b"b"
    [aside] = stage.journal.asides()
    assert (aside.subject, aside.reason, aside.is_unknown) == ("orders", "TOO_LARGE: no", True)
    assert stage.journal.read_aside(f"{entry.number:016x}")[1] == b"a"
    assert stage.journal.murky == {7}


@pytest.mark.parametrize("seed", range(25))
def test_nothing_that_was_confirmed_is_lost_at_whatever_operation_the_power_goes(seed: int) -> None:
    """Also while it is mended, again and again."""
    rng = SeededRng(seed)
    stage = Stage()
    stage.disk = SimDisk(rng, stage._call_later)
    stage.journal = Journal(stage.disk, NUMBER, stage.clock, segment_bytes=SEGMENT_BYTES)
    confirmed: list[bytes] = []
    given: list[bytes] = []
    for life in range(6):
        stage.disk.crash_after(1 + rng.below(60))
        while stage.disk.alive:
            payload = b"%d/%d " % (life, len(given)) * (1 + rng.below(60))
            given.append(payload)
            with suppress(SimulatedPowerCut):
                if stage.keep(payload) is None:
                    confirmed.append(payload)
        stage.reopen(has_power=False)
        found = data(stage.load())
        assert [each for each in found if each in set(confirmed)] == confirmed, "all of it, in order"
        assert found == [each for each in given if each in set(found)], "and nothing that nobody gave"
