"""One history of the copies of a delay server, its registry and those who schedule, all from one seed.

The same faults happen to its copies as to those of a broker (`cluster_trouble`). More often a copy comes back with an
empty disk, or was away. Logs are dropped within a second, so both are filled from a snapshot. In the end all is calm.
Every message that was taken has been sent once, in its time, unless it was cancelled or is due much later; and then
every copy knows of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from fairway import batch
from fairway.batch import MessageId
from fairway.delay import maintenance
from fairway.delay.schedule.pending_rows import RowState
from fairway.errors import Refused
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.simulation import Simulation
from tests.simulation.broker_clients import PORT
from tests.simulation.broker_truth import Promise
from tests.simulation.cluster_trouble import DRAWN, Incident
from tests.simulation.copies_history import FOLLOWER, LEADER, MEMBER, CopiesHistory, Outcome
from tests.simulation.delay_clients import Patron
from tests.simulation.delay_truth import Arrival, DelayTruth
from tests.simulation.delay_world import OPTIONS, SUBJECTS, DelayCluster
from tests.simulation.planted import swapped
from tests.support.client import Client

STEPS_MAX = 3_000_000
DRAIN_S_MAX = 90.0  # a clock may be behind by 20 s
_EVERY_MS = 300  # between two rounds of housekeeping: a minute would be longer than a history
_INCIDENTS = (*DRAWN, *(Incident.WIPE,) * 10)


class DelayHistory(CopiesHistory):
    """The life of one delay group."""

    look_s = 0.02
    rests_ms = (50, 300, 1_000)
    cluster: DelayCluster
    truth: DelayTruth

    def __init__(self, world: Simulation) -> None:
        rng = world.rng.child("options")
        copies = 2 + rng.below(2)
        membership = replace(
            MEMBER,
            min_in_sync=1 + (rng.below(4) == 0),
            leader=replace(LEADER, lag_ms=(150, 500)[rng.below(2)]),
            follower=replace(FOLLOWER, catch_up_bytes=(8 << 20, 2_000)[rng.below(2)]),
        )
        options = replace(OPTIONS, hold_ms=(0, 20, 200)[rng.below(3)], remembered_max=(30, 10_000)[rng.below(2)])
        cluster = DelayCluster(world, copies, membership=membership, options=options)
        super().__init__(world, cluster, DelayTruth(cluster), is_choppy=rng.below(4) == 0)
        self.patrons: list[Patron] = []
        self.delivered = 0

    async def _run(self) -> None:
        await self.cluster.found()
        await self._rise()
        for number in range(3):
            subject = list(SUBJECTS)[number % len(SUBJECTS)]
            patron = Patron(self.cluster, self.truth, number, subject, (40, 100, 250)[self.rng.below(3)])
            self.patrons.append(patron)
            self.start_task(patron.run(lambda: self.mood.is_calm))
        await self._suffer(_INCIDENTS)
        await self._conclude(self._drain, self._examine)

    @property
    def clients(self) -> list[str]:
        return [each.name for each in self.patrons]

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Due messages are sent, and every client has an answer to each of its requests."""
        deadline = self.world.loop.time() + DRAIN_S_MAX
        missing = 0
        while self.world.loop.time() < deadline and not self.truth.is_refuted:
            if all(each.is_done for each in self.patrons):
                arrived = {each.payload for each in await self._arrived()}
                missing = sum(each.payload not in arrived for each in self.truth.awaited())
                if not missing:
                    break
            await asyncio.sleep(0.5)
        if not all(each.is_done for each in self.patrons):
            self.truth.blame(Promise.STUCK, f"questions are left: {self.cluster.why()}")
        await asyncio.sleep(2.0)

    async def _examine(self) -> None:
        await self._end_tasks()
        for each in self.patrons:
            each.hang_up()
            self.counts["cancelled"] += each.cancelled
        arrived = await self._arrived()
        self.delivered = len(arrived)
        engines = self.cluster.engines
        known = {name: _pending(engine) for name, engine in engines.items()}
        self.truth.reckon(arrived, next(iter(known.values()), set()))
        self.counts["snapshots"] += self._refilled()
        if len(engines) != len(self.cluster.copies) or len({frozenset(each) for each in known.values()}) != 1:
            sizes = {name: len(each) for name, each in known.items()}
            self.truth.blame(Promise.LOST, f"copies do not know the same messages: {sizes}; {self.cluster.why()}")
        lacking = {name: [*engine.damaged, *engine.stuck] for name, engine in engines.items()}
        damaged = {name: each for name, each in lacking.items() if each}
        if damaged:
            self.truth.blame(Promise.BROKE, f"buckets are damaged, and nothing was: {damaged}")

    def _refilled(self) -> int:
        members: list[Any] = [copy.member for copy in self.cluster.copies.values() if copy.member is not None]
        return sum("begins anew" in each for member in members for each in member.findings)

    async def _arrived(self) -> list[Arrival]:
        """All that the brokers have."""
        found: list[Arrival] = []
        for host in self.cluster.brokers:
            client = await Client.connect(self.world.net.host("auditor"), self.world.clock, host, PORT)
            for subject in SUBJECTS:
                found += await _scanned(client, subject)
            client.close()
        return found


def _pending(engine: Any) -> set[MessageId]:
    rows = engine.rows
    found = [row for state in (RowState.PENDING, RowState.INTENDED) for row in rows.in_state(state).tolist()]
    return {MessageId(int(rows.index_columns.id_high[row]), int(rows.index_columns.id_low[row])) for row in found}


async def _scanned(client: Client, subject: str) -> list[Arrival]:
    found: list[Arrival] = []
    at = 0
    while True:
        try:
            scanned, batches = await client.ask(Scan(subject, Whence.SEQUENCE, at, None, 1 << 20), Scanned)
        except Refused:  # it has no such subject yet
            return found
        for attached, opened in zip(scanned.batches, map(batch.decode, batches), strict=True):
            found += [Arrival(*each, attached.appended_ms) for each in zip(opened.payloads, opened.ids(), strict=True)]
        at = scanned.next_sequence
        if not scanned.batches or at >= scanned.committed_end:
            return found


def run(seed: int) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash."""
    world = Simulation(seed, steps_max=STEPS_MAX)
    history = DelayHistory(world)
    with swapped(maintenance, "EVERY_MS", _EVERY_MS):
        history.live()
    truth = history.truth
    return Outcome(
        seed,
        history.incidents,
        truth.reigns,
        truth.acknowledged,
        history.delivered,
        history.counts["cancelled"],
        Counter(),
        history.counts,
        truth.breaches,
        world.trace_hash(),
    )
