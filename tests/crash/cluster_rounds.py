"""A broker group of two or three copies and a ZooKeeper of three, to which everything is done, and the judgement of
what clients saw and of what is on the copies' disks.

Brokers, producers and consumers are processes; the programs are those of `clients_rounds`, and now and then one of them
is killed, too. What is done to the group is in `cluster_faults`. When the time is over everything is drained, the
master is killed once more, and all that the programs wrote down is told to the model. Then the copies stop, and their
logs are compared (`cluster_disk`).

A pull may be lost with a master: it is written and not awaited. So whatever was handed out before a change of masters
may be handed out again after it; whatever was acked, and the ack answered, may not.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fairway.errors import FairwayError
from tests.crash import clients_rounds, cluster_disk
from tests.crash.clients_diary import ClientTruth
from tests.crash.clients_rounds import ORDERS, ClientCounts, ClientStage, Part
from tests.crash.cluster_copies import PATIENCE_S, Copies
from tests.crash.cluster_disk import Compared
from tests.crash.cluster_faults import ABRUPT, DEEDS, HASTY, Field, deeds
from tests.crash.cluster_times import MS_NS, Spans, Successes, longest_gap
from tests.crash.cluster_view import Change
from tests.simulation.broker_truth import Holder, Owner
from tests.support.wires import ProxyWires, Wires
from tests.support.zookeeper import Ensemble

SESSION_MS = 2_000
CLIENT_KILLS_ONE_IN = 4  # deeds
HASTE_ONE_IN = 3  # deeds that do not wait until the group has recovered, if they need not
BEAT_S = 2.5  # within which a master shows in the registry how far its logs go

CAST: tuple[Part, ...] = (
    (ORDERS, "", "many", True),
    (ORDERS, "", "aio", True),
    (ORDERS, "g0", "sync", True),
    (ORDERS, "g0", "aio", False),
    (ORDERS, "g1", "app", True),
)
SMALL_CAST: tuple[Part, ...] = (CAST[0], CAST[2])


@dataclass
class Fault:
    """What was done, when, and when the group had recovered; 0: something else was done before."""

    kind: str
    began_ns: int
    epoch: int
    recovered_ns: int = 0
    epochs: int = 0  # that began meanwhile


@dataclass
class ClusterCounts(ClientCounts):
    """What the rounds came to."""

    runs: int = 0
    wires: Counter[str] = field(default_factory=Counter)  # runs by what lay between the copies
    faults: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    pauses: int = 0
    produce: dict[str, Spans] = field(default_factory=dict)  # by kind of fault: the longest time without a success
    consume: dict[str, Spans] = field(default_factory=dict)
    beyond: Spans = field(default_factory=Spans)  # from an abrupt end of a master to the next receipt, less the session
    disk: Compared = field(default_factory=Compared)

    @property
    def clean(self) -> bool:
        return super().clean and not self.disk.sentences

    def figures(self) -> dict[str, Any]:
        everything = Spans([ms for spans in self.produce.values() for ms in spans.ms])
        consumed = Spans([ms for spans in self.consume.values() for ms in spans.ms])
        return {
            "runs": self.runs,
            "links by": dict(self.wires),
            "faults": sum(self.faults.values()),
            "by kind": dict(sorted(self.faults.items())),
            "session ms": SESSION_MS,
            "changes of masters": self.epochs,
            "failover beyond the session": self.beyond.figures(),
            "without produce": everything.figures(),
            "without consume": consumed.figures(),
            "disturbed by a pause of the machine": self.pauses,
            **super().figures(),
            "log bytes compared": self.disk.bytes,
            "messages on disks": self.disk.messages,
            "duplicates in a log": self.disk.duplicates,
            "uncommitted tails kept aside": self.disk.kept_aside,
            "copies differ": len(self.disk.sentences),
        }


class ClusterTruth(ClientTruth):
    """The model, of a group whose master changes."""

    def __init__(self, changes: Sequence[Change], drained_ns: int) -> None:
        super().__init__()
        self._changes = changes
        self._drained_ns = drained_ns  # the group had nothing left to do then
        self._said: dict[tuple[str, str], set[int]] = {}  # by group and subject: what somebody has acked

    def note_acking(self, owner: Owner, sequences: Sequence[int]) -> None:
        super().note_acking(owner, sequences)
        self._said.setdefault((owner.group, owner.subject), set()).update(sequences)

    def check_drained(self) -> None:
        """An ack that a master took with it is said again to the next one, and believed there if nobody holds the
        message: also when it was handed out meanwhile."""
        for key, owner in self.owners.items():
            said = self._said.get(key, set()) - owner.acked
            owner.doubted |= {each for each in said if self._may_be_unheld(owner, each)}
        super().check_drained()

    def _may_be_unheld(self, owner: Owner, sequence: int) -> bool:
        """Whether the last one who was given it may have had it no more before everything was settled: it handed it
        back, or the master that knew of it was gone."""
        last = owner.handed.get(sequence)
        if last is None or last.reason:
            return True
        return any(last.asked_ns <= each.seen_ns and each.after_ns <= self._drained_ns for each in self._changes)

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None:
        """Within a change nobody outside knows which master gave what."""
        for change in self._changes:
            if change.after_ns <= now_ns:
                self.note_crash(max(self.crashed_ns, min(now_ns, change.seen_ns)))
        super().note_delivery(owner, holder, found, asked_ns=asked_ns, now_ns=now_ns)


class ClusterStage(ClientStage):
    """The processes of one run in one folder."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        counts: ClusterCounts,
        zookeeper: Ensemble,
        wires: Wires,
        copies: int,
        parts: Sequence[Part],
        flaw: str,
    ) -> None:
        super().__init__(folder, seed, counts)
        self._rng = random.Random(f"cluster/{seed}")
        self._tally = counts
        self._wires = wires
        least = max(1, copies - 1)
        self._copies = Copies(
            folder, copies, wires, zookeeper.hosts, session_ms=SESSION_MS, min_in_sync=least, flaw=flaw
        )
        self._parts = parts
        self._field = Field(self._copies, wires, zookeeper, self._rng)
        self._successes = Successes()
        self._faults: list[Fault] = []
        self._drained_ns = 0

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """All copies of it, and wait until they are one group."""
        self._field.heal()
        self._copies.await_whole()
        self._host, self._port = self._wires.client_address(self._copies.master().number)

    def kill_broker(self) -> None:
        self._field.kill_master()
        self._tally.faults["kill master"] += 1

    def start_clients(self) -> None:
        everybody = clients_rounds.cast(self._seed, self._port, self._parts)
        self.start([msgspec.structs.replace(orders, place=self._copies.url) for orders in everybody])

    def close(self) -> None:
        super().close()
        self._copies.close()

    # --- the run -----------------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        super().calm_down()
        self._drained_ns = self._clock.monotonic_ns()

    def play_deeds(self, seconds: float, planned: Iterator[str]) -> None:
        self.start_broker()
        self.start_clients()
        self.settle()
        deadline = time.monotonic() + seconds
        for kind in planned:
            if time.monotonic() > deadline:
                break
            if not (kind in HASTY and self._rng.randrange(HASTE_ONE_IN) == 0):
                self.settle()
            time.sleep(self._rng.random() * 0.5)
            if self._rng.randrange(CLIENT_KILLS_ONE_IN) == 0:
                self.kill_client(is_consumer=self._rng.randrange(2) == 0)
            self.commit(kind)
        self.settle()
        time.sleep(0.5)  # for a success after the last recovery

    def commit(self, kind: str) -> None:
        self._faults.append(Fault(kind, self._clock.monotonic_ns(), self._copies.view.epoch))
        self._tally.faults[kind] += 1
        DEEDS[kind](self._field)
        self._field.heal()

    def settle(self) -> None:
        """Until all copies are in sync and every program goes on. A master may find out only then that a replica which
        counts does not answer, and strike it. TCP repeats itself at ever longer intervals, also when the link works
        again. The test counts the copies that are in sync when programs go on."""
        self.start_broker()
        self.await_progress(self._faults[-1].kind if self._faults else "at first", self._clock.monotonic_ns())
        self._copies.await_whole()
        if self._faults and not self._faults[-1].recovered_ns:
            self._faults[-1].recovered_ns = self._clock.monotonic_ns()
            self._faults[-1].epochs = self._copies.view.epoch - self._faults[-1].epoch

    def await_progress(self, when: str, since_ns: int = 0) -> None:
        deadline = time.monotonic() + PATIENCE_S
        waiting = [process for _, process in self._playing.values()]
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            self._successes.read(self._paths)
            waiting = [each for each in waiting if self._successes.last_ns.get(each.said, 0) <= since_ns]
            if any(not each.is_alive for each in waiting):
                break
        if waiting:
            names = ", ".join(f"{each.name} {each.failure}" for each in waiting)
            raise FairwayError(f"after {when!r} these do not go on: {names}; {self._copies.told()}")

    def stop_copies(self) -> tuple[int, int]:
        """Replicas first, so that nothing is written that only one has; how far the logs went when all were in sync."""
        self._copies.await_whole()
        time.sleep(BEAT_S)
        ends = self._copies.master_ends()
        for copy in [*self._copies.replicas(), self._copies.master()]:
            copy.stop()
        return ends

    # --- the judgement -----------------------------------------------------------------------------------------------

    def judge(self) -> None:
        counts, changes = self._tally, self._copies.view.changes
        truth = ClusterTruth(changes, self._drained_ns)
        self.judge_diaries(truth)
        counts.runs += 1
        counts.wires[self._wires.name] += 1
        counts.epochs += len(changes) - 1  # the first one is the beginning
        self._measure()
        committed = self.stop_copies()
        roots = [copy.root for copy in self._copies.all]
        counts.disk.add(cluster_disk.compare(roots, committed, truth.names))
        counts.failures += self._copies.failures

    def _measure(self) -> None:
        self._successes.read(self._paths)
        counts, seen = self._tally, self._successes
        for fault in self._faults:
            if not fault.recovered_ns:
                continue
            if any(each.ended_ns > fault.began_ns and each.began_ns < fault.recovered_ns
                   for each in self._copies.view.pauses):  # fmt: skip
                counts.pauses += 1
                continue
            produce = longest_gap(seen.produced_ns, fault.began_ns, fault.recovered_ns)
            consume = longest_gap(seen.consumed_ns, fault.began_ns, fault.recovered_ns)
            for gap, spans in ((produce, counts.produce), (consume, counts.consume)):
                if gap is not None:
                    spans.setdefault(fault.kind, Spans()).ms.append(gap.ms)
            if fault.kind in ABRUPT and fault.epochs == 1 and produce is not None:
                counts.beyond.ms.append((produce.ended_ns - fault.began_ns) // MS_NS - SESSION_MS)


def run(
    seconds: float,
    seed: int,
    counts: ClusterCounts,
    zookeeper: Ensemble,
    *,
    copies: int = 2,
    lay: Callable[[int, Sequence[int]], Wires] = ProxyWires,
    planned: Iterator[str] | None = None,
    parts: Sequence[Part] = CAST,
    flaw: str = "",
    folder: Path | None = None,
) -> ClusterCounts:
    """One run of so many seconds, drained and judged. `folder`: where everything is kept for who wants to look."""
    planned = deeds(random.Random(f"deeds/{seed}")) if planned is None else planned
    with tempfile.TemporaryDirectory(prefix="fairway-cluster-") as name:
        wires = lay(copies, [server.port for server in zookeeper.servers])
        stage = ClusterStage(folder or Path(name), seed, counts, zookeeper, wires, copies, parts, flaw)
        try:
            stage.play_deeds(seconds, planned)
            stage.drain()
            stage.judge()
        except FairwayError as error:
            counts.failures.append(f"given up: {error}")
        finally:
            stage.close()
            wires.close()
    return counts
