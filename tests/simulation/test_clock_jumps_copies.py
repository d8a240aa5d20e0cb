"""Two copies of a store, each with a wall clock of its own that may be wrong, through restarts, failovers and lost
checkpoints: nothing becomes old too early, look-up by time misses nothing, and both copies say the same."""

from __future__ import annotations

import random

import pytest

from fairway.runtime.clock import SimClock
from fairway.simulation.disk import SimDisk
from fairway.storage import log as logs
from fairway.storage.log import Log
from fairway.storage.store import Store
from tests.unit.storage.copies import Pair, Side, bytes_of

YEAR_MS = 365 * 24 * 3_600_000
DAY_MS = 24 * 3_600_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
WRONG_MS_MAX = 30 * MINUTE_MS  # then a clock is put right, before ages follow it
LARGE_MS = (90_000, 20 * MINUTE_MS, DAY_MS, YEAR_MS, -DAY_MS, -YEAR_MS)
SMALL_MS = (*LARGE_MS, -90_000, -20 * MINUTE_MS)  # less than a broker may have been down: then nobody can tell


class Machines:
    """Both copies and their clocks. The simulation's own clock is the right one."""

    def __init__(self, seed: int | str, slack_ms: int = MINUTE_MS) -> None:
        self.slack_ms = slack_ms  # by how much a message may count as too old
        self.pair = Pair(seed, opened=False)
        self.now_ms = self.pair.sim.clock.wall_ms
        self.offsets = {"master": 0, "copy": 0}
        for side in (self.pair.master, self.pair.copy):
            side.clock = SimClock(self.pair.sim.loop.now_ns)
        self.pair.master.open(epoch=1)
        self.pair.master.store.hold()
        self.pair.copy.open(follows=True, adopt=self.pair.master.store.identity)
        self.epoch = 1
        self._wrong_since_ms: dict[str, int] = {}
        self.sent: list[int] = []  # by sequence: when that was, by the right clock

    @property
    def store(self) -> Store:
        return self.pair.master.store

    def set_clock(self, side: Side, offset_ms: int) -> None:
        """How far ahead that machine's clock is; negative: behind."""
        side.clock.jump(offset_ms - self.offsets[side.name])
        self.offsets[side.name] = offset_ms
        if offset_ms:
            self._wrong_since_ms.setdefault(side.name, self.now_ms())
        else:
            self._wrong_since_ms.pop(side.name, None)

    def put_right(self) -> None:
        """The clocks that have been wrong for long."""
        for side in (self.pair.master, self.pair.copy):
            if self.now_ms() - self._wrong_since_ms.get(side.name, self.now_ms()) > WRONG_MS_MAX:
                self.set_clock(side, 0)

    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent.append(self.now_ms())
            self.pair.send([b"%d" % len(self.sent) * 60])
            self.pair.act(len(self.sent))
        self.pair.settle()

    def wait(self, minutes: float) -> None:
        """As a broker does, the master looks at its clock now and then."""
        for _ in range(max(round(minutes * 6), 1)):
            self.pair.wait(10)
            self.store.follow_clock()
        self.pair.settle()

    def fail_over(self) -> None:
        pair = self.pair
        pair.settle()
        pair.master.end(SimDisk.crash_process)
        pair.master, pair.copy = pair.copy, pair.master
        self.epoch += 1
        pair.master.store.lead(self.epoch)
        pair.copy.open(follows=True)
        pair.settle()

    def restart(self, side: Side, *, without_views: bool, is_power_cut: bool) -> None:
        self.pair.settle()
        before = [_times(log) for log in _logs(side.store)]
        side.end(SimDisk.crash if is_power_cut else SimDisk.crash_process)
        if without_views:
            for directory in ("checkpoints", "index"):
                for name in side.disk.listing(directory):
                    side.disk.remove(f"{directory}/{name}")
        if side is self.pair.copy:
            side.open(follows=True)
        else:
            self.epoch += 1
            side.open(epoch=self.epoch)
            side.store.hold()
        after = [_times(log) for log in _logs(side.store)]
        for one, other in zip(before, after, strict=True):
            assert other[: len(one) - 1] == one[:-1]  # the last one may have an EPOCH record more
            assert (other[len(one) - 1][0], other[len(one) - 1][2]) == (one[-1][0], one[-1][2])
        self.pair.settle()

    def check(self) -> None:
        pair = self.pair
        assert bytes_of(pair.copy) == bytes_of(pair.master)
        for log, other in zip(_logs(pair.master.store), _logs(pair.copy.store), strict=True):
            assert _times(log) == _times(other)
            effective = logs.effective_ms(log.segments)
            assert effective == sorted(effective)
        assert self.store.aging_ms() <= self.now_ms() + 1_000
        assert pair.copy.store.aging_ms() <= max(log.newest_ms for log in _logs(pair.copy.store))
        self._check_ages()
        self._check_look_up()

    def _check_ages(self) -> None:
        """Nothing counts as older than the last message before it that was dated right."""
        log = self.store.messages
        times = [each.base for each in log.log.segments], logs.effective_ms(log.log.segments)
        effective = dict(zip(*times, strict=True))
        right_ms = 0
        for entry in log.readable(1, 0):
            sent_ms = self.sent[entry.first_sequence]
            if abs(entry.appended_ms - sent_ms) <= MINUTE_MS:
                right_ms = sent_ms
            effective_ms = min(entry.appended_ms, effective[log.log.segment_at(entry.position).base])
            assert effective_ms >= right_ms - self.slack_ms

    def _check_look_up(self) -> None:
        """Whatever is dated no later than it was sent is found by every time up to its own."""
        log = self.store.messages
        entries = list(log.readable(1, 0))
        assert [each.first_sequence for each in entries] == list(range(len(self.sent)))
        for entry in entries:
            for time_ms in (entry.appended_ms, entry.appended_ms + 1, self.sent[entry.first_sequence]):
                found = log.sequence_at(1, time_ms)
                right = [
                    each.first_sequence
                    for each in entries
                    if time_ms + self.slack_ms - MINUTE_MS <= each.appended_ms <= self.sent[each.first_sequence] + 1_000
                ]
                assert found == self.pair.copy.store.messages.sequence_at(1, time_ms)
                assert not right or (found is not None and found <= right[0])


def _logs(store: Store) -> tuple[Log, Log]:
    return store.messages.log, store.actions.log


def _times(log: Log) -> list[tuple[int, int, int]]:
    return [(each.base, each.newest_ms, each.set_back_ms) for each in log.segments]


@pytest.mark.parametrize("seed", range(16))
def test_clocks_jump_on_both_machines(seed: int) -> None:
    rng = random.Random(seed)
    offsets_ms, slack_ms = ((LARGE_MS, MINUTE_MS), (SMALL_MS, 22 * MINUTE_MS))[seed % 2]
    machines = Machines(f"machines {seed}", slack_ms)
    with machines.pair:
        machines.send(4)
        for _ in range(25):
            match rng.choice(["clock", "right", "copy's clock", "send", "wait", "restart", "failover", "checkpoint"]):
                case "clock":
                    machines.set_clock(machines.pair.master, rng.choice(offsets_ms))
                case "right":
                    machines.set_clock(machines.pair.master, 0)
                case "copy's clock":
                    machines.set_clock(machines.pair.copy, rng.choice((0, *offsets_ms)))
                case "send":
                    machines.send(rng.randrange(1, 12))
                case "restart":
                    side = rng.choice([machines.pair.master, machines.pair.copy])
                    machines.restart(side, without_views=rng.random() < 0.5, is_power_cut=rng.random() < 0.5)
                case "failover":
                    machines.fail_over()
                case "checkpoint":
                    machines.store.checkpoint()
                    machines.pair.copy.store.checkpoint()
                    machines.pair.settle()
            machines.wait(rng.choice([0.1, 0.5, 2, 15]))
            machines.put_right()
            machines.check()
        machines.set_clock(machines.pair.master, 0)
        machines.wait(70)
        machines.send(1)
        machines.check()
        newest = list(machines.store.messages.readable(1, 0))[-1]
        assert abs(newest.appended_ms - machines.sent[-1]) <= 61_000


@pytest.mark.parametrize("offset_ms", [DAY_MS, -DAY_MS])
def test_a_copy_that_leads_with_a_wrong_clock_deletes_nothing_for_an_hour(offset_ms: int) -> None:
    """Its clock has been wrong for long, and is put right when somebody sees that."""
    machines = Machines("leads")
    with machines.pair as pair:
        machines.set_clock(pair.copy, offset_ms)
        for _ in range(3):
            machines.send(10)
            pair.copy.store.checkpoint()  # looks at the clock, and so comes to believe it
            machines.wait(45)
        machines.send(1)
        machines.fail_over()
        machines.send(20)
        machines.wait(50)
        machines.check()
        assert machines.store.messages.log.segments[-1].set_back_ms == 0
        machines.set_clock(pair.master, 0)
        machines.wait(2)
        machines.send(20)
        newest = list(machines.store.messages.readable(1, 0))[-1]
        assert abs(newest.appended_ms - machines.sent[-1]) <= 1_000
        machines.wait(90)
        machines.check()


def test_a_copy_goes_on_with_what_its_master_knew_of_the_times() -> None:
    """A failover right after the clock was followed back: the copy finds and keeps what its master would have."""
    machines = Machines("right after")
    with machines.pair as pair:
        machines.send(10)
        machines.set_clock(pair.master, YEAR_MS)
        machines.wait(2)
        machines.send(10)
        machines.set_clock(pair.master, 0)
        machines.wait(2)
        machines.send(1)
        assert machines.store.messages.log.segments[-1].set_back_ms > 0
        machines.fail_over()
        machines.send(10)
        machines.check()
        entries = list(machines.store.messages.readable(1, 0))
        assert entries[20].appended_ms <= entries[21].appended_ms <= machines.sent[-1] + 1_000
        assert machines.store.messages.sequence_at(1, entries[21].appended_ms) == 21


def test_a_clock_that_is_behind_when_a_store_starts_without_a_checkpoint_moves_nothing_within_an_hour() -> None:
    machines = Machines("without a checkpoint")
    with machines.pair as pair:
        machines.send(5)
        machines.wait(120)
        machines.send(5)
        machines.set_clock(pair.master, -DAY_MS)
        machines.restart(pair.master, without_views=True, is_power_cut=False)
        machines.wait(5)
        machines.send(5)
        machines.wait(40)
        times = [each.appended_ms for each in machines.store.messages.readable(1, 0)]
        assert times == sorted(times)
        machines.set_clock(pair.master, 0)
        machines.wait(2)
        machines.send(1)
        machines.check()


def test_the_action_log_is_dated_right_again_though_nothing_happened_meanwhile() -> None:
    machines = Machines("actions")
    with machines.pair as pair:
        machines.send(5)
        machines.set_clock(pair.master, YEAR_MS)
        for _ in range(2):
            machines.send(5)
            machines.wait(2)
        assert machines.store.actions.log.newest_ms > machines.now_ms() + MINUTE_MS
        machines.set_clock(pair.master, 0)
        machines.wait(5)
        assert pair.master.store.act([]).appended_ms <= machines.now_ms() + 1_000
