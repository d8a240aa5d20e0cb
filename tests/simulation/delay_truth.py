"""The model of delayed messages, whichever copy leads: a message that was taken is sent once, not before its time,
unless it was cancelled. Answers about it stay true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fairway.batch import MessageId
from fairway.protocol.delay_messages import Fate
from tests.simulation.broker_truth import Breach, Promise
from tests.simulation.delay_world import DelayCluster


@dataclass(slots=True)
class Letter:
    """One message, and what its sender was told."""

    payload: bytes
    id: MessageId
    subject: str
    least_ms: int  # it may not be sent before this
    is_far: bool  # it is not due before the history ends
    is_taken: bool = False
    fate: Fate | None = None  # the last answer about it
    is_in_doubt: bool = False  # somebody asked to cancel it, and heard nothing


class Arrival(NamedTuple):
    """A message as a broker has it."""

    payload: bytes
    id: MessageId
    appended_ms: int


class DelayTruth:
    """The model, and what contradicts it."""

    def __init__(self, cluster: DelayCluster) -> None:
        self.breaches: list[Breach] = []
        self.letters: dict[bytes, Letter] = {}
        self._lease_void_until_ns = 0
        self.ahead_ms = 0  # how far the clock of any copy was ahead of the others' at any time
        self._cluster = cluster
        self._led: dict[int, str] = {}

    @property
    def is_refuted(self) -> bool:
        return bool(self.breaches)

    @property
    def reigns(self) -> int:
        return len(self._led)

    @property
    def acknowledged(self) -> int:
        return sum(each.is_taken for each in self.letters.values())

    def blame(self, promise: Promise, sentence: str) -> None:
        self.breaches.append(Breach(promise, sentence))

    def note_crash(self, _now_ns: int) -> None:
        """A crash excuses nothing."""

    def note_lease_void(self, name: str, until_ns: int) -> None:
        self._lease_void_until_ns = until_ns

    def look(self) -> None:
        """At who leads, and at the clocks."""
        serving = []
        wall_ms = self._cluster.world.clock.wall_ms()
        for copy in self._cluster.copies.values():
            self.ahead_ms = max(self.ahead_ms, copy.clock.wall_ms() - wall_ms)
            leader = None if copy.member is None else copy.member.copy_status.leader
            if copy.member is None or leader is None or leader.is_over:
                continue
            led = self._led.setdefault(leader.epoch, leader.me)
            if led != leader.me:
                self.blame(Promise.RULED, f"{led} and {leader.me} lead under epoch {leader.epoch}")
            if copy.member.copy_status.is_open:
                serving.append(copy.name)
        if len(serving) > 1 and self._cluster.world.clock.monotonic_ns() > self._lease_void_until_ns:
            self.blame(Promise.RULED, f"{' and '.join(serving)} serve at the same time")

    # --- the reckoning -----------------------------------------------------------------------------------------------

    def awaited(self) -> list[Letter]:
        """What must have arrived once its time has come."""
        return [each for each in self.letters.values() if each.is_taken and not each.is_far and not _is_off(each)]

    def reckon(self, arrived: Iterable[Arrival], pending: set[MessageId]) -> None:
        found = list(arrived)
        for payload, count in Counter(each.payload for each in found).items():
            if count > 1:
                self.blame(Promise.REPEATED, f"{payload!r} was sent {count} times")
        for each in found:
            self._check_arrival(each)
        there = {each.payload for each in found}
        for letter in self.letters.values():
            if not letter.is_taken or _is_off(letter):
                continue
            if letter.payload not in there and (not letter.is_far or letter.id not in pending):
                where = "pending nowhere" if letter.id not in pending else "still pending"
                self.blame(Promise.LOST, f"{letter.payload!r}, due at {letter.least_ms}, is {where}: {letter.fate}")

    def _check_arrival(self, each: Arrival) -> None:
        letter = self.letters.get(each.payload)
        if letter is None or letter.id != each.id:
            self.blame(Promise.PHANTOM, f"{each.payload!r} was never scheduled as {each.id}")
        elif letter.fate is Fate.CANCELLED:
            self.blame(Promise.RISEN, f"{each.payload!r} was sent, and had been cancelled")
        elif each.appended_ms < letter.least_ms - self.ahead_ms:
            early_ms = letter.least_ms - each.appended_ms
            self.blame(
                Promise.EARLY, f"{each.payload!r} was sent {early_ms} ms early, clocks differ by {self.ahead_ms}"
            )


def _is_off(letter: Letter) -> bool:
    """Whether it may be missing: it was cancelled, or perhaps it was, and that is forgotten."""
    return letter.fate is Fate.CANCELLED or (letter.is_in_doubt and letter.fate is Fate.UNKNOWN)
