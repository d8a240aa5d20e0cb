"""Large rounds are handed to the disk ahead of time, and undone together."""

from __future__ import annotations

import pytest

from fairway import limits
from fairway.errors import FairwayError, Refused, StorageFault
from fairway.storage.flusher import Flusher
from fairway.world.rng import SeededRng
from fairway.world.sim_disk import SimDisk
from tests.unit.world.timers import Timers

LARGE = bytes(limits.ROUND_BYTES_LARGE)


class Bench:
    """A flusher on a simulated disk whose time passes step by step."""

    def __init__(self, seed: int = 0) -> None:
        self.timers = Timers()
        self.disk = SimDisk(SeededRng(seed), self.timers.call_later)
        self.undone: list[int] = []
        self.answers: list[tuple[str, FairwayError | None]] = []
        self.flusher = Flusher(
            self.disk,
            0,
            defer=lambda callback: self.timers.call_later(0, callback),
            on_full=self.undone.append,
            on_progress=lambda: None,
        )
        self.file = self.disk.open("log", create=True)

    def add(self, name: str, data: bytes = LARGE) -> None:
        self.flusher.add(self.file, data)
        self.flusher.when_durable(
            self.flusher.gathered_end, lambda outcome: self.answers.append((name, outcome)), undos=len(self.undone)
        )

    @property
    def refused(self) -> list[str]:
        return [name for name, outcome in self.answers if isinstance(outcome, Refused)]


def test_rounds_are_answered_in_order() -> None:
    bench = Bench()
    for name in "abcd":
        bench.add(name)
    bench.add("e", b"12345678")
    bench.timers.ring_all()
    assert bench.answers == [(name, None) for name in "abcde"]
    assert bench.flusher.synced_end == 4 * len(LARGE) + 8
    assert bench.flusher.syncs == 3  # a, then b behind it, then what was gathered behind both


def test_a_large_round_of_another_file_waits_for_its_turn() -> None:
    bench = Bench()
    bench.add("a")
    bench.file = bench.disk.open("another", create=True)
    bench.add("b")
    bench.disk.fail_write()
    bench.timers.ring_all()
    assert bench.refused == ["a", "b"]
    assert bench.disk.open("another").size == 0


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_a_full_disk_undoes_the_rounds_ahead_and_the_log_goes_on(behind: int) -> None:
    bench = Bench()
    bench.add("before", b"12345678")
    bench.timers.ring_all()
    bench.disk.fail_write()
    for number in range(1 + behind):
        bench.add(f"refused {number}")
    while not bench.undone:
        bench.timers.ring_one()
    bench.add("after", b"87654321")
    bench.timers.ring_all()
    assert bench.refused == [f"refused {number}" for number in range(1 + behind)]
    assert bench.undone == [8]
    assert bench.answers[-1] == ("after", None)
    assert bench.disk.beside().open("log").read(0, 99) == b"1234567887654321"


def test_a_failed_sync_poisons_the_round_ahead_too() -> None:
    bench = Bench()
    bench.disk.fail_sync()
    for name in "abc":
        bench.add(name)
    bench.timers.ring_all()
    assert [name for name, _ in bench.answers] == ["a", "b", "c"]
    assert {outcome for _, outcome in bench.answers} == {bench.flusher.fault}
    assert isinstance(bench.flusher.fault, StorageFault)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_answered_survives_a_power_cut(seed: int) -> None:
    bench = Bench(seed)
    for number in range(6):
        bench.add(str(number), bytes([number]) * len(LARGE))
        for _ in range(seed % 4):
            bench.timers.ring_one()
    for _ in range(seed):
        bench.timers.ring_one()
    after = bench.disk.crash()
    content = after.open("log").read(0, 99 * len(LARGE)) if after.listing("") else b""
    for name, outcome in bench.answers:
        assert outcome is None
        assert content[int(name) * len(LARGE) :].startswith(bytes([int(name)]) * len(LARGE))
