"""The model of a group of copies, beside the model of any broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.simulation.broker_truth import Holder, Owner, Promise, Truth

if TYPE_CHECKING:
    from tests.simulation.cluster_world import Cluster


class ClusterTruth(Truth):
    """The model of one broker, told of changes of masters: to clients they are crashes, and nothing more."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._epoch = 0
        self._led: dict[int, str] = {}  # by epoch
        self._void_until_ns: dict[str, int] = {}  # by copy

    @property
    def reigns(self) -> int:
        return len(self._led)

    def note_crash(self, now_ns: int) -> None:
        super().note_crash(max(now_ns, self.crashed_ns))

    def note_lease_void(self, name: str, until_ns: int) -> None:
        self._void_until_ns[name] = until_ns

    def look(self) -> None:
        """At who leads."""
        cluster = self._cluster
        now_ns = cluster.world.clock.monotonic_ns()
        serving = []
        for copy in cluster.copies.values():
            member = copy.member
            leader = None if member is None else member.copy_status.leader
            if member is None or leader is None or leader.is_over:
                continue
            led = self._led.setdefault(leader.epoch, leader.me)
            if led != leader.me:
                self.blame(Promise.RULED, f"{led} and {leader.me} lead under epoch {leader.epoch}")
            if member.copy_status.is_open:
                serving.append(copy.name)
                if now_ns <= (until_ns := self._void_until_ns.get(copy.name, 0)):
                    self.note_crash(until_ns)  # deposed, it goes on, and of what it hands out no other knows
            if leader.epoch > self._epoch:
                self._epoch = leader.epoch
                self.note_crash(now_ns)
        if len(serving) > 1 and now_ns > max(self._void_until_ns.values(), default=0):
            self.blame(Promise.RULED, f"{' and '.join(serving)} serve at the same time")

    def note_receipt(self, subject: str, first: int, payloads: Sequence[bytes]) -> None:
        self.look()
        super().note_receipt(subject, first, payloads)

    def note_scanned(self, subject: str, first: int, payloads: Sequence[bytes], host: str) -> None:
        """A copy has shown these."""
        for sequence, payload in enumerate(payloads, first):
            sent = self.sent.get(payload)
            if sent is None or sent.subject != subject:
                self.blame(Promise.PHANTOM, f"{payload[:24]!r} at {sequence} of {subject} on {host} was never sent")
            else:
                self._name(subject, sequence, payload, sent)

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None:
        self.look()
        super().note_delivery(owner, holder, found, asked_ns=asked_ns, now_ns=now_ns)
