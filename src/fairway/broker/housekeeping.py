"""What has to be done once in a while: groups that nobody uses go, and so does what retention may take.

A round looks at every group, a few per turn of an actor of its own, and then acts:

    a group without members for too long     REMOVE in the action log, its inbox with it
    a subject without messages or groups     REMOVED in the message log, once it was so in every round of an hour
    segments that the policy dooms           dropped, unless a group still owes something in them
    segments above the ceiling               first forsaken by the groups that owe them: what was pulled goes to dead
                                             letter, what was not is counted as lost; dropped when the copies are made

The copies of what is forsaken need room that only retention can make, on a full disk: so they are waited for a while,
not for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from fairway.broker.desk import GroupCoordinator
from fairway.broker.errands import BackgroundTask
from fairway.broker.groups import GroupHost
from fairway.broker.unused_subjects import UnusedSubjects
from fairway.errors import FairwayError, Refused
from fairway.scheduling import Actor, Expiry, TurnResult

_KEY = ("housekeeping",)
_GROUPS_PER_TURN = 20  # to know what a group owes, all that it has in flight is looked at
_PATIENCE_ROUNDS = 30
_IMPATIENT_S = 1.0
_REMARKS_MAX = 1_000


class _MaintenanceRound(BackgroundTask):
    def __init__(self, hosts: list[GroupHost], *, is_retaining: bool) -> None:
        self.hosts = hosts
        self.is_retaining = is_retaining
        self.owed_from: int | None = None


class BrokerMaintenance:
    """Keeps house for one broker. `removed` counts groups, `forsaken` messages that some group lost, `retired` what
    retention took."""

    def __init__(self, desk: GroupCoordinator, every_ms: int) -> None:
        self._desk = desk
        self._unused = UnusedSubjects(desk)
        self._every_s = every_ms / 1_000
        self._patience = _PATIENCE_ROUNDS
        self.removed = 0
        self.forsaken = 0
        self.retired_segments = 0
        self.retired_bytes = 0

    def start(self) -> None:
        self._desk.call_later(self._every_s, self._begin)

    def _begin(self) -> None:
        store = self._desk.store
        store.follow_clock()
        store.complete_old_segment()
        is_retaining = bool(self._desk.store.plan_retention().doomed)
        try:
            self._desk.scheduler.dispatch(
                _KEY, _MaintenanceRound(list(self._desk.groups), is_retaining=is_retaining), self
            )
        except Refused:
            self.start()

    # --- a round -----------------------------------------------------------------------------------------------------

    def process(self, round_: _MaintenanceRound, actor: Actor) -> TurnResult:
        if round_.hosts:
            turn, round_.hosts = round_.hosts[:_GROUPS_PER_TURN], round_.hosts[_GROUPS_PER_TURN:]
            for host in turn:
                self._look_at(host, round_)
            return TurnResult.AGAIN
        if not self._unused.look():
            return TurnResult.AGAIN
        is_waiting = round_.is_retaining and not self._retain(round_.owed_from)
        self._desk.call_later(_IMPATIENT_S if is_waiting else self._every_s, self._begin)
        return TurnResult.DONE

    def expire(self, round_: _MaintenanceRound, expiry: Expiry) -> None:
        """The broker stops."""

    def fail(self, round_: _MaintenanceRound, error: Exception) -> None:
        if isinstance(error, FairwayError):
            self._remark(f"housekeeping was put off: {error}")
        self.start()

    def _look_at(self, host: GroupHost, round_: _MaintenanceRound) -> None:
        removable_at_ms = host.law.removable_at_ms
        if host.main is None and removable_at_ms is not None and removable_at_ms <= self._desk.store.aging_ms():
            self._desk.remove(host)
            self.removed += 1
        elif round_.is_retaining:
            self._desk.step_over_hole(host)  # while it is known why nothing is there
            if host.next_fresh > host.law.cursor:  # or what nobody wants would be taken for owed
                now_ms = self._desk.clock.wall_ms()
                self._desk.carry_out(host, host.law.skip(host.next_fresh, host.next_fresh, now_ms=now_ms))
            position = self._owed_position(host)
            if position is not None:
                round_.owed_from = position if round_.owed_from is None else min(round_.owed_from, position)

    def _owed_position(self, host: GroupHost) -> int | None:
        """Where the oldest batch lies that the group still owes somebody."""
        log = self._desk.store.messages
        entries = log.views.entries.entries(host.subject_id, host.law.oldest_unacked, log.log.committed_end)
        return next((entry.position for entry in entries), None)

    # --- retention ---------------------------------------------------------------------------------------------------

    def _retain(self, owed_from: int | None) -> bool:
        """Drop what may go; False where dead letters are being copied out of it."""
        store = self._desk.store
        plan = store.plan_retention(owed_from)
        segments = {segment.base: segment.end for segment in store.messages.log.segments}
        if plan.lost_to_groups:
            is_copying = self._forsake_below(segments[plan.doomed[-1]])
            self._patience -= 1
            if is_copying and self._patience > 0:
                return False
        self._patience = _PATIENCE_ROUNDS
        retired = store.retain(owed_from).doomed
        self.retired_segments += len(retired)
        self.retired_bytes += sum(segments[base] - base for base in retired)
        return True

    def _forsake_below(self, position: int) -> bool:
        """Whether a group has messages there that are on their way to dead letter."""
        copying = [host for host in list(self._desk.groups) if self._forsake(host, position)]
        return bool(copying)

    def _forsake(self, host: GroupHost, position: int) -> bool:
        log = self._desk.store.messages
        kept = log.views.entries.first_sequence_above(host.subject_id, position)
        first_kept = log.end_sequence(host.subject_id) if kept is None else kept
        if host.law.oldest_unacked >= first_kept:
            return False
        decision = host.law.forsake(first_kept, now_ms=self._desk.clock.wall_ms())
        if decision.events:
            count = _messages(each.ranges for each in decision.events)
            self.forsaken += count
            name = self._desk.name_of(host.subject_id)
            self._remark(f"group {host.name} on {name} was too far behind: retention took {count} messages from it")
        self._desk.carry_out(host, decision)
        return host.law.oldest_unacked < first_kept

    def _remark(self, sentence: str) -> None:
        remarks = self._desk.store.remarks
        if len(remarks) < _REMARKS_MAX:
            remarks.append(sentence)


def _messages(ranges: Iterable[tuple[tuple[int, int], ...]]) -> int:
    return sum(count for each in ranges for _, count in each)
