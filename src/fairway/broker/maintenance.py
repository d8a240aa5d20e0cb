"""Periodic maintenance: removes unused groups and subjects, and applies retention.

A round looks at every group, a few per turn of an actor of its own, and then acts:

    a group without members for too long     REMOVE in the action log, its inbox with it
    a subject without messages or groups     REMOVED in the message log, if every round of an hour found it so
    segments that the policy dooms           dropped, unless a group still has unacked messages in them
    segments above the ceiling               first forsaken by those groups: messages that were pulled go to dead
                                             letter, the others count as lost; dropped when the copies are made

On a full disk, the copies of forsaken messages need room that only retention can make. So retention waits for them for
30 rounds, not for ever.

`UnusedSubjects` removes subjects that a first use created and that nobody used afterwards. A join, a group
configuration or a read-only switch creates its subject, and so does a first batch that never becomes durable. A subject
goes if it has no message, no group and no switch, and if every look for an hour found it so. A restart begins the hour
again: a subject never goes early, and goes at last where a broker runs for an hour. The hour counts by the monotonic
clock. A step looks at some subjects; only the unused ones are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from fairway import limits
from fairway.broker.group_coordinator import BackgroundTask, GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.errors import FairwayError, Refused
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.storage.subjects import SubjectState

_LOOKED_AT_ONCE = 2_000  # a millisecond of the loop
_MS_NS = 1_000_000


class UnusedSubjects:
    """The unused subjects of one broker. `BrokerMaintenance` calls `look` in every round."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        # by number: since when a subject is unused, as far as this process has seen
        self._since_ns: dict[int, int] = {}
        self._pending: list[SubjectState] | None = None  # still to look at in this round; None: no round is under way
        self.removed = 0

    def look(self) -> bool:
        """Do a step of a round, and remove what has been unused for long enough. Returns whether the round is over."""
        subjects = self._coordinator.store.messages.views.subjects
        if self._pending is None:
            self._pending = [*subjects]
        now_ns = self._coordinator.clock.monotonic_ns()
        step, self._pending = self._pending[-_LOOKED_AT_ONCE:], self._pending[:-_LOOKED_AT_ONCE]
        gone: list[SubjectState] = []
        for state in step:
            if state.id not in subjects or not self._is_unused(state):
                self._since_ns.pop(state.id, None)
            elif now_ns - self._since_ns.setdefault(state.id, now_ns) >= limits.SUBJECT_UNUSED_MS * _MS_NS:
                gone.append(state)
        if gone:
            self._remove(gone)
        if self._pending:
            return False
        self._pending = None
        self._since_ns = {each: since for each, since in self._since_ns.items() if each in subjects}
        return True

    def _is_unused(self, state: SubjectState) -> bool:
        groups = self._coordinator.groups
        return (
            state.is_unwritten
            and state.removed_end is None
            and not groups.of_subject(state.id)
            and state.id not in groups.read_only
            and self._coordinator.store.messages.views.entries.first_sequence(state.id) is None
        )

    def _remove(self, gone: list[SubjectState]) -> None:
        try:
            self._coordinator.store.remove_subjects(gone)
        except Refused:
            return  # no room for the record now: try in the next round
        self.removed += len(gone)
        for state in gone:
            self._since_ns.pop(state.id, None)


_KEY = ("housekeeping",)
_GROUPS_PER_TURN = 20  # to know what a group owes, the broker looks at all its unacked messages
_PATIENCE_ROUNDS = 30
_IMPATIENT_S = 1.0


class _MaintenanceRound(BackgroundTask):
    def __init__(self, hosts: list[GroupHost], *, is_retaining: bool) -> None:
        self.hosts = hosts
        self.is_retaining = is_retaining
        self.owed_from: int | None = None


class BrokerMaintenance:
    """The maintenance of one broker. `removed` counts groups, `forsaken` messages that a group lost to retention, and
    `retired_segments` and `retired_bytes` what retention took."""

    def __init__(self, coordinator: GroupCoordinator, every_ms: int) -> None:
        self._coordinator = coordinator
        self._unused = UnusedSubjects(coordinator)
        self._every_s = every_ms / 1_000
        self._patience = _PATIENCE_ROUNDS
        self.removed = 0
        self.forsaken = 0
        self.retired_segments = 0
        self.retired_bytes = 0

    def start(self) -> None:
        self._coordinator.call_later(self._every_s, self._begin)

    def _begin(self) -> None:
        store = self._coordinator.store
        store.follow_clock()
        store.complete_old_segment()
        is_retaining = bool(self._coordinator.store.plan_retention().doomed)
        try:
            self._coordinator.scheduler.dispatch(
                _KEY, _MaintenanceRound(list(self._coordinator.groups), is_retaining=is_retaining), self
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
        self._coordinator.call_later(_IMPATIENT_S if is_waiting else self._every_s, self._begin)
        return TurnResult.DONE

    def expire(self, round_: _MaintenanceRound, expiry: Expiry) -> None:
        """Do nothing: the broker stops."""

    def fail(self, round_: _MaintenanceRound, error: Exception) -> None:
        if isinstance(error, FairwayError):
            self._coordinator.remark(f"housekeeping was put off: {error}")
        self.start()

    def _look_at(self, host: GroupHost, round_: _MaintenanceRound) -> None:
        removable_at_ms = host.state_machine.removable_at_ms
        if host.main is None and removable_at_ms is not None and removable_at_ms <= self._coordinator.store.aging_ms():
            self._coordinator.remove(host)
            self.removed += 1
        elif round_.is_retaining:
            self._coordinator.step_over_hole(host)  # while the log still knows why nothing is there
            if host.next_fresh > host.state_machine.cursor:  # otherwise skipped messages would count as owed
                now_ms = self._coordinator.clock.wall_ms()
                self._coordinator.carry_out(
                    host, host.state_machine.skip(host.next_fresh, host.next_fresh, now_ms=now_ms)
                )
            position = self._owed_position(host)
            if position is not None:
                round_.owed_from = position if round_.owed_from is None else min(round_.owed_from, position)

    def _owed_position(self, host: GroupHost) -> int | None:
        """The position of the oldest batch that the group still has to handle."""
        log = self._coordinator.store.messages
        entries = log.views.entries.entries(host.subject_id, host.state_machine.oldest_unacked, log.log.committed_end)
        return next((entry.position for entry in entries), None)

    # --- retention ---------------------------------------------------------------------------------------------------

    def _retain(self, owed_from: int | None) -> bool:
        """Drop what may go. False: the broker is still copying dead letters from it."""
        store = self._coordinator.store
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
        """Whether a group has messages below `position` on their way to dead letter."""
        copying = [host for host in list(self._coordinator.groups) if self._forsake(host, position)]
        return bool(copying)

    def _forsake(self, host: GroupHost, position: int) -> bool:
        log = self._coordinator.store.messages
        kept = log.views.entries.first_sequence_above(host.subject_id, position)
        first_kept = log.end_sequence(host.subject_id) if kept is None else kept
        if host.state_machine.oldest_unacked >= first_kept:
            return False
        decision = host.state_machine.forsake(first_kept, now_ms=self._coordinator.clock.wall_ms())
        if decision.events:
            count = _messages(each.ranges for each in decision.events)
            self.forsaken += count
            name = self._coordinator.name_of(host.subject_id)
            self._coordinator.remark(
                f"group {host.name} on {name} was too far behind: retention took {count} messages from it"
            )
        self._coordinator.carry_out(host, decision)
        return host.state_machine.oldest_unacked < first_kept


def _messages(ranges: Iterable[tuple[tuple[int, int], ...]]) -> int:
    return sum(count for each in ranges for _, count in each)
