"""The world of `producing_world` twice, under one client of a cluster with a spool.

Two broker groups and a meta server, a disk that loses power, a process that dies and lives again, and a subject that
moves from one group to the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

from fairway.client.cluster.client import ClusterClient
from fairway.client.core import Goal, Mute
from fairway.client.spool.cluster import ClusterSpool
from fairway.errors import BufferFull
from fairway.protocol import RequestReceived
from fairway.protocol.line import Line
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.route_messages import GroupRoute, Route, Routed, SubjectRoute
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimulatedPowerCut
from tests.property.producing_world import Sent, Wire, World
from tests.property.spool_journals import Journals, producer_options, spool_options

GROUPS = ("a", "b")
KEYS = ("k1", "k2", "k3", "k4")
ORDERED = "blue"  # its keys have their groups; it never moves


class Side(World):
    """One server and the line to it, which is another one in each life of the client."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.link: Any = SimpleNamespace(
            lock=nullcontext(), stir=lambda: None, pump=lambda: None, check=lambda: None, redirect=lambda *_: None
        )

    def begin(self, rng: SeededRng, clock: ManualClock, options: ProducerOptions, *, stores: bool) -> None:
        self.clock = clock
        self.line = Line(rng.child("line"), now_ns=self.now_ns, on_trouble=self._trouble)
        self.producing = ProducerSession(clock, rng.child("producer"), options, run_later=self.line.run_later)
        self.line.add(self.producing if stores else Mute(self.producing), self.now_ns)
        self.core: Any = SimpleNamespace(line=self.line, is_idle=False)

    def callbacks(self, *, is_dead: bool) -> bool:
        """Whether there were any. The dead tell those who wait, and do nothing else."""
        callbacks = self.line.callbacks()
        for callback in callbacks:
            with suppress(SimulatedPowerCut) if is_dead else nullcontext():
                callback()
        return bool(callbacks)

    def _learn(self) -> None:
        """Streams that may be forgotten: none, for what a spool sends begins at 0 again and again."""


class MetaSide(Side):
    """The meta server: it says where subjects are, and stores nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.version = 1
        self.red = [*GROUPS]  # that take messages of that subject
        self._waiting: list[tuple[Wire, int, Route]] = []

    def routed(self, asked: Route) -> Routed:
        subjects = [
            SubjectRoute(name, [*GROUPS], [*GROUPS] if name == ORDERED else [*self.red], is_ordered=name == ORDERED)
            for name in asked.subjects
        ]
        return Routed(self.version, subjects, [GroupRoute(name, "broker", 1, "h:1", [], True) for name in GROUPS])

    def serve(self, wire: Wire, *, is_whole: bool = False) -> None:
        for event in wire.server.feed(bytes(wire.up), self.now_ns):
            if isinstance(event, RequestReceived) and isinstance(event.message, Route):
                self._waiting.append((wire, event.correlation, event.message))
        wire.up.clear()
        for each in tuple(self._waiting):
            its_wire, correlation, asked = each
            if its_wire is wire and (not asked.wait_ms or asked.known != self.version):
                self._waiting.remove(each)
                wire.server.respond(correlation, self.routed(asked))
        wire.down += b"".join(wire.server.take())


class ClusterWorld(Journals):
    """One client, through as many lives as fate gives it."""

    def __init__(self, seed: int) -> None:
        self.rng = SeededRng(f"cluster {seed}")
        self.clock = ManualClock()
        self.meta = MetaSide(3 * seed)
        self.sides = {name: Side(3 * seed + 1 + at) for at, name in enumerate(GROUPS)}
        self.sent: list[Sent] = []
        self.keys: list[str | None] = []  # of each message in `sent`
        self.counts: Counter[str] = Counter()
        self.prepare()
        self.begin()

    # --- lives

    def begin(self) -> None:
        """The process starts, and finds what is there."""
        self.counts["lives"] += 1
        rng = self.rng.child(f"life {self.counts['lives']}")
        options = producer_options(rng)
        self.meta.begin(rng.child("meta"), self.clock, options, stores=False)
        self._ways: list[Side] = [self.meta]

        def new_way(goal: Goal) -> Side:
            side = self.sides[goal.name.rpartition(" ")[2]]
            side.begin(rng.child(goal.name), self.clock, options, stores=True)
            self._ways.append(side)
            return side

        self.cluster_client: ClusterClient[Any] = ClusterClient(self.meta, new_way, self.clock, rng.child("fleet"))
        number = rng.bits(64)
        before = self.reopened()
        own = self.new_journal(rng, number, 400_000, is_cluster=True)
        self.spool: ClusterSpool[Any] = ClusterSpool(
            spool_options(rng), own, self.cluster_client, self.clock, rng.child("spool"), on_finished=self.finished
        )
        self.hand_over(before, self.spool.adopt, rng)

    def die(self, *, has_power: bool) -> None:
        self.counts["power cuts"] += not has_power
        for side in self._ways:
            with suppress(SimulatedPowerCut):
                side.cut()
        self.crash_disks(has_power=has_power)
        for side in self._ways:
            side.producing.give_up("the process died")
        self._run_callbacks(is_dead=True)
        self.begin()

    # --- what happens

    def send(self) -> None:
        subject = ("red", "red", ORDERED)[self.rng.below(3)]
        for _ in range(1 + self.rng.below(4)):
            key = KEYS[self.rng.below(len(KEYS))] if subject == ORDERED else None
            payload = b"%d" % len(self.sent)
            _, _, add = self.cluster_client.adding(subject, (payload, key, (), None, None, 0), is_alone=False)
            try:
                pending = add()
            except BufferFull:
                return
            self.sent.append(Sent(payload, subject, pending.batch, pending.index))
            self.keys.append(key)

    def step(self) -> None:
        try:
            self._mischief()
            chance = self.rng.below(100)
            if chance < 30:
                self.send()
            elif chance < 55:
                self.clock.advance(self.rng.below(40))
            self.move()
        except SimulatedPowerCut:
            self.die(has_power=False)

    def _mischief(self) -> None:
        chance = self.rng.below(400)
        side = self.sides[GROUPS[self.rng.below(2)]]
        if chance < 3:
            self.die(has_power=True)
        elif chance < 6:
            self.die(has_power=False)
        elif chance < 10:
            next(reversed(self.disks.values())).crash_after(1 + self.rng.below(30))
        elif chance < 35:
            side.broker.is_away = not side.broker.is_away
        elif chance < 45:
            self.meta.broker.is_away = not self.meta.broker.is_away
        elif chance < 60:
            (side if side in self._ways else self.meta).cut()
        elif chance < 64:
            self.crash(side)
        elif chance < 75:
            self.meta.version += 1
            self.meta.red = ([*GROUPS], ["a"], ["b"], [])[self.rng.below(4)]
        elif chance < 80:
            self.clock.advance(500)

    def crash(self, side: Side) -> None:
        if side in self._ways:
            side.crash()
        else:
            side.ghosts.clear()
            side.broker.crash()

    def move(self, *, is_whole: bool = False) -> None:
        self.run_timers(is_whole=is_whole)
        for side in tuple(self._ways):
            side.move(is_whole=is_whole)
        self._run_callbacks()

    def _run_callbacks(self, *, is_dead: bool = False) -> None:
        for _ in range(20):
            if not sum(side.callbacks(is_dead=is_dead) for side in tuple(self._ways)):
                break

    @property
    def unsettled(self) -> int:
        return sum(side.producing.messages for side in self._ways)

    def heal(self) -> None:
        """From here on all goes well, until nothing is left anywhere."""
        self.meta.red = [*GROUPS]
        self.meta.version += 1
        for side in (self.meta, *self.sides.values()):
            side.broker.is_moody = side.broker.is_away = False
        for disk in self.disks.values():
            disk.crash_after(0)
        for _ in range(5_000):
            if not self.unsettled and self.spool.is_drained:
                break
            self.clock.advance(50)
            self.move(is_whole=True)
        for side in self.sides.values():
            while side.ghosts:
                side.haunt(side.ghosts[0])
        for journal in self.spool.journals:
            self.look_aside(journal)

    def logs(self) -> dict[str, Sequence[Any]]:
        return {name: side.broker.log for name, side in self.sides.items()}
