"""A group as slow and plain as can be: one record per message. What `fairway.groups` must agree with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

from fairway.groups import GroupConfig

MS_NS = 1_000_000


@dataclass
class Held:
    """One message below the cursor that is neither done nor dead."""

    place: str  # held, stock, dying
    attempt: int
    owner: str = ""
    lot: int = 0
    number: int = 0
    handed_ns: int = 0
    due_ms: int = 0


@dataclass
class Membership:
    renewed_ns: int
    version: int
    arrived: int = 0


@dataclass
class Model:
    """The same group. Every sequence below `cursor` is in `open`, `done`, `dead`, or was skipped."""

    config: GroupConfig
    cursor: int = 0
    recovered_end: int = 0
    is_paused: bool = False
    paused: set[str] = field(default_factory=set)
    members: dict[str, Membership] = field(default_factory=dict)
    open: dict[int, Held] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def held_by(self, name: str) -> dict[int, Held]:
        return {at: each for at, each in self.open.items() if each.place == "held" and each.owner == name}

    def ready(self, now_ms: int) -> set[int]:
        return {at for at, each in self.open.items() if each.place == "stock" and each.due_ms <= now_ms}

    def unarrived(self, name: str) -> set[int]:
        arrived = self.members[name].arrived
        return {each.number for each in self.held_by(name).values() if each.number > arrived}

    # --- membership

    def hear(self, name: str, arrived: int, now_ns: int) -> None:
        member = self.members[name]
        member.renewed_ns = now_ns
        member.arrived = max(member.arrived, arrived)

    def join(self, name: str, arrived: int, now_ns: int) -> None:
        if name in self.members and not arrived and self.held_by(name):
            self.part(name, counts=True)
        self.members[name] = Membership(now_ns, self.config.version, arrived)

    def part(self, name: str, *, counts: bool) -> None:
        for at in self.held_by(name):
            self.fail(at, counts=counts, due_ms=0)
        del self.members[name]

    def fail(self, at: int, *, counts: bool, due_ms: int) -> None:
        message = self.open[at]
        if counts and message.attempt >= self.config.attempts_max:
            self.open[at] = Held("dying", message.attempt)
        else:
            self.open[at] = Held("stock", message.attempt + counts, due_ms=due_ms)

    def expire(self, now_ns: int) -> None:
        for name, member in list(self.members.items()):
            if member.renewed_ns <= now_ns - self.config.lease_ms * MS_NS:
                self.part(name, counts=True)
        limit_ms = self.config.max_handling_ms
        for at, message in self.open.items():
            is_held = message.place == "held"
            if limit_ms is not None and is_held and message.handed_ns <= now_ns - limit_ms * MS_NS:
                self.fail(at, counts=True, due_ms=0)

    def begin_life(self, end: int, now_ns: int) -> None:
        self.recovered_end = end
        for member in self.members.values():
            member.renewed_ns = now_ns
            member.arrived = 0
        for message in self.open.values():
            message.handed_ns = now_ns

    # --- handing out and settling

    def skip(self, to: int) -> None:
        self.skipped.update(range(self.cursor, to))
        self.cursor = max(self.cursor, to)

    def hand_out(self, name: str, lot: int, attempt: int, sequences: Iterable[int], number: int, now_ns: int) -> None:
        for at in sequences:
            if at >= self.cursor:
                assert at == self.cursor
                self.cursor += 1
            self.open[at] = Held("held", attempt, name, lot, number, now_ns)
        for message in self.held_by(name).values():
            if (message.lot, message.attempt) == (lot, attempt):  # the rest of the same lot has more time
                message.handed_ns = now_ns

    def holds(self, name: str, lot: int, attempt: int, sequences: Iterable[int], arrived: int) -> set[int]:
        """Of what had arrived when it was said; with 0, of all."""
        held = {
            at
            for at, each in self.held_by(name).items()
            if (each.lot, each.attempt) == (lot, attempt) and (not arrived or each.number <= arrived)
        }
        return held & set(sequences)

    def has_lot(self, name: str, lot: int, attempt: int) -> bool:
        return any((each.lot, each.attempt) == (lot, attempt) for each in self.held_by(name).values())

    def believable(self, attempt: int, sequences: Iterable[int]) -> set[int]:
        found = set()
        for at in sequences:
            message = self.open.get(at)
            is_stock = message is not None and message.place == "stock" and message.attempt == attempt
            if at < self.recovered_end and (is_stock or (at >= self.cursor and attempt == 1)):
                found.add(at)
        return found

    def believe(self, sequences: set[int], due_ms: int) -> None:
        for at in sequences:
            self.open.pop(at, None)
            self.done.add(at)
        for at in range(self.cursor, max(sequences) + 1):
            self.cursor = at + 1
            if at not in sequences:
                self.open[at] = Held("stock", 1, due_ms=due_ms)

    def ack(self, sequences: Iterable[int]) -> None:
        for at in sequences:
            del self.open[at]
            self.done.add(at)

    def reject(self, sequences: Iterable[int]) -> None:
        for at in sequences:
            self.open[at] = Held("dying", self.open[at].attempt)

    def bury(self, sequences: Iterable[int]) -> None:
        for at in sequences:
            if at in self.open and self.open[at].place == "dying":
                del self.open[at]
                self.dead.add(at)

    def seek(self, to: int) -> None:
        for part in (self.open, self.done, self.dead, self.skipped):
            part.clear()
        self.skipped.update(range(to))
        self.cursor = to
        self.recovered_end = 0
