"""Bugs that copies of a broker might have, one at a time, so that the campaign can show that it would find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from fairway.broker.produce import ProduceProcessor
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.registry.port import AnswerLost, Exists, Missing, SessionOver, VersionMismatch
from fairway.replication import leadership
from fairway.replication.follower import Follower
from fairway.replication.leader import Leader
from fairway.replication.leadership import GroupNode
from fairway.scheduling import Actor, TurnResult
from fairway.serving.requests import ProduceRequest
from fairway.storage.flusher import OnDurable as Told
from fairway.storage.log import Log
from fairway.storage.replicated_store import ReplicatedStore
from tests.simulation import cluster_steps as steps
from tests.simulation.broker_truth import Promise
from tests.simulation.planted import swapped


@dataclass(frozen=True)
class Bug:
    """How to plant it, which short history loses something by it, and which promise must find it in drawn ones."""

    sentence: str
    plant: Callable[[], AbstractContextManager[None]]
    step: steps.Step
    caught_by: frozenset[Promise]
    copies: int = 2  # in the short one


def elect_a_lagging_replica() -> AbstractContextManager[None]:
    right = leadership.decide

    def decide(
        group: str,
        record: GroupRecord | None,
        living: Mapping[str, RegisteredCopy],
        me: leadership.Me,
        *,
        is_patient: bool = True,
    ) -> leadership.LeadershipDecision:
        if record is not None and me.directory not in record.in_sync:
            record = msgspec.structs.replace(record, in_sync=[*record.in_sync, me.directory])
        return right(group, record, living, me, is_patient=is_patient)

    return swapped(leadership, "decide", decide)


def answer_before_the_replica() -> AbstractContextManager[None]:
    def confirm(self: Leader) -> None:
        if self.is_certain():
            self._store.confirm(*self._store.ends())
            self._spread_the_word()

    return swapped(Leader, "_confirm", confirm)


def dedupe_without_epoch() -> AbstractContextManager[None]:
    """A batch that came before is answered at once, although the epoch that it came under may end without it."""
    right = ProduceProcessor.process

    def process(self: ProduceProcessor, request: ProduceRequest, actor: Actor) -> TurnResult:
        log = self._store.messages.log
        when_durable = log.flusher.when_durable

        def hasty(position: int, told: Told, undos: int | None = None) -> None:
            if position < log.end:  # it was appended before
                told(None)
            else:
                when_durable(position, told, undos)

        log.flusher.when_durable = hasty  # type: ignore[method-assign, assignment]
        try:
            return right(self, request, actor)
        finally:
            log.flusher.when_durable = when_durable  # type: ignore[method-assign]

    return swapped(ProduceProcessor, "process", process)


def lease_on_the_wall_clock() -> AbstractContextManager[None]:
    def is_certain(self: Leader) -> bool:
        clock = self._clock
        if self.is_over:
            return False
        known = vars(self)
        offset_ns = known.setdefault("offset_ns", clock.wall_ms() * 1_000_000 - clock.monotonic_ns())
        if clock.wall_ms() * 1_000_000 - offset_ns < self._registry.certain_until_ns():
            return True
        self._depose("the lease is over")
        return False

    return swapped(Leader, "is_certain", is_certain)


def serve_beyond_the_committed_end() -> AbstractContextManager[None]:
    return swapped(Log, "committed_end", property(lambda self: self.flusher.synced_end))


def shrink_before_the_registry() -> AbstractContextManager[None]:
    """A replica that is gone is waited for no more, and the registry is told afterwards."""
    right = Leader._confirm

    def confirm(self: Leader) -> None:
        waited, now_ns = self._waited, self._clock.monotonic_ns()
        self._waited = {each for each in waited if each == self.me or not self._is_lost(each, now_ns)}
        try:
            right(self)
        finally:
            self._waited = waited

    return swapped(Leader, "_confirm", confirm)


def acknowledge_before_the_sync() -> AbstractContextManager[None]:
    """A replica says that it has what it has received."""

    right = ReplicatedStore.ends

    def ends(self: ReplicatedStore) -> tuple[int, int]:
        return (self._logs[0].end, self._logs[1].end) if self.follows else right(self)

    return swapped(ReplicatedStore, "ends", ends)


def keep_what_was_never_committed() -> AbstractContextManager[None]:
    """A deposed master goes on with its own tail."""

    async def compare(self: Follower, wire: object, followed: Any) -> None:
        ends = self._store.ends()
        for log in (0, 1):
            if ends[log] > followed.logs[log].end:
                raise AnswerLost("it will have more soon")

    return swapped(Follower, "_compare", compare)


def lost_means_done() -> AbstractContextManager[None]:
    """A compare-and-set whose answer was lost is taken for one that was made."""

    async def change(self: GroupNode, to: GroupRecord) -> bool:
        value = msgspec.json.encode(to)
        try:
            if self.version is None:
                node = await self._registry.create(self.path, value)
            else:
                node = await self._registry.put(self.path, value, self.version)
            self.version = node.version
        except (VersionMismatch, Exists, Missing, SessionOver):
            await self._read_back()
            return self.record == to
        except AnswerLost:
            self.version = (self.version or 0) + 1
        self.record = to
        return True

    return swapped(GroupNode, "change", change)


def serve_before_all_is_committed() -> AbstractContextManager[None]:
    """A copy in the set is waited for only once it has connected."""
    right = Leader._confirm

    def confirm(self: Leader) -> None:
        waited = self._waited
        self._waited = {each for each in waited if each == self.me or each in self.peers}
        try:
            right(self)
        finally:
            self._waited = waited

    return swapped(Leader, "_confirm", confirm)


_P = Promise
_LOSS = frozenset({_P.LOST, _P.RENAMED, _P.REPEATED, _P.ACKED_AGAIN, _P.EVICTED, _P.TWICE, _P.STUCK})

BUGS: dict[str, Bug] = {
    "elect-a-lagging-replica": Bug("whoever lives takes over", elect_a_lagging_replica, steps.outrun, _LOSS),
    "answer-before-the-replica": Bug(
        "answered when the master has synced it", answer_before_the_replica, steps.marooned, _LOSS
    ),
    "dedupe-without-epoch": Bug("what came before is answered at once", dedupe_without_epoch, steps.impatient, _LOSS),
    "lease-on-the-wall-clock": Bug(
        "a clock that is set back makes a lease longer",
        lease_on_the_wall_clock,
        steps.set_back,
        frozenset({_P.RULED}),
    ),
    "serve-beyond-the-committed-end": Bug(
        "messages are shown before they are committed", serve_beyond_the_committed_end, steps.premature, _LOSS
    ),
    "shrink-before-the-registry": Bug(
        "waited for no more, then removed", shrink_before_the_registry, steps.marooned, _LOSS
    ),
    "acknowledge-before-the-sync": Bug(
        "a replica claims what it received", acknowledge_before_the_sync, steps.powerless, _LOSS
    ),
    "keep-what-was-never-committed": Bug(
        "a deposed master keeps its tail", keep_what_was_never_committed, steps.deposed, _LOSS | {_P.RULED}
    ),
    "lost-means-done": Bug("a lost answer is taken for a yes", lost_means_done, steps.unheard, _LOSS | {_P.RULED}),
    "serve-before-all-is-committed": Bug(
        "a new master waits for those alone who have come",
        serve_before_all_is_committed,
        steps.bereaved,
        _LOSS,
        copies=3,
    ),
}
