"""Where decisions of the law become facts: applied, written to the action log, and seen to.

One desk for all groups of a broker. It also keeps each group's one timer (a lease ends, a retry falls due), and wakes
the actors of a subject when it has something new to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from fairway import limits
from fairway.broker.groups import WEIGHT_UNIT, GroupHost, Groups
from fairway.broker.parking import PausedPullList
from fairway.broker.watching import ScanWaitList
from fairway.errors import Code, FairwayError, Refused
from fairway.groups import Dying, GroupConfig, GroupDecision, GroupEventKind, GroupOutcome, Range
from fairway.groups.events import LOST
from fairway.names import GroupName, Subject
from fairway.protocol import ControlMessage
from fairway.scheduling import Scheduler
from fairway.serving.memory import SharedMemory
from fairway.serving.requests import Requester, ServedRequest
from fairway.storage.action_log import Action, ActionKind
from fairway.storage.flusher import OnDurable as Told
from fairway.storage.hole import lost_ranges
from fairway.storage.record import RecordHeader
from fairway.storage.store import Store
from fairway.storage.subjects import SubjectState
from fairway.world.clock import Clock

_NS = 1_000_000_000
_BUSY_NS = 5_000_000  # groups count as at work so long after the last decision: their consumers are about to ask again
_TIMER_SLACK_S = 0.001  # uvloop rounds to milliseconds: without it a timer would ring early, and again at once

_FULL_RETRY_MS = 60_000  # a group goes when nobody has used it for days
_FULL_MEMORY_RETRY_MS = 1_000  # members and what they hold go with their leases
_NO_MEMORY = "the memory for groups is full, and there is no room for {}: give the broker more (--memory-mib)"
_REMARKS_MAX = 1_000

CallLater = Callable[..., asyncio.TimerHandle]

# In an ordered group something that waited behind these may go out now.
_FREEING = frozenset(
    {
        GroupEventKind.ACK,
        GroupEventKind.DEAD,
        GroupEventKind.RETRY,
        GroupEventKind.EXPIRE,
        GroupEventKind.LEAVE,
        GroupEventKind.GO_ON,
        GroupEventKind.CURSOR,
    }
)

_PARTING = frozenset({GroupEventKind.EXPIRE, GroupEventKind.LEAVE})

_CODES = {
    GroupOutcome.BUSY: Code.BUSY,
    GroupOutcome.NOT_A_MEMBER: Code.NOT_A_MEMBER,
    GroupOutcome.OTHER_VERSION: Code.STALE_CONFIG,
    GroupOutcome.BAD_REQUEST: Code.BAD_REQUEST,
}


class DeadLetterPort(Protocol):
    """Whoever brings messages to dead letter."""

    def bury(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool = False) -> None:
        """These have had their last attempt; `is_again` if in the life before, which may have begun to."""


class GroupCoordinator:
    """Carries out what the groups' laws decide."""

    def __init__(
        self,
        groups: Groups,
        store: Store,
        scheduler: Scheduler,
        clock: Clock,
        call_later: CallLater,
        groups_bytes_max: int = limits.GROUPS_BYTES_MAX,
    ) -> None:
        self.groups = groups
        self.memory: SharedMemory[GroupHost, Requester] = SharedMemory(groups_bytes_max, limits.GROUP_RESERVE_BYTES)
        self.store = store
        self.scheduler = scheduler
        self.clock = clock
        self._call_later = call_later
        self._timers: dict[asyncio.TimerHandle, None] = {}
        self._is_closed = False
        self._busy_ns = -_BUSY_NS  # when a decision was last carried out
        self._known: dict[tuple[str, str], GroupHost] = {}  # by names as they come: each request brings them anew
        self.parking = PausedPullList(scheduler, self.call_later)
        self.watches = ScanWaitList(scheduler, self.call_later)
        self.undertaker: DeadLetterPort | None = None  # works at this desk, so it comes after it
        self.is_off: Callable[[Subject, GroupName], bool] = lambda _subject, _group: False  # by the registry's word

    # --- looking -----------------------------------------------------------------------------------------------------

    def subject(self, name: str) -> SubjectState:
        """The subject, which must exist here."""
        parsed = Subject.parse_any(name)
        state = self.store.messages.views.subjects.find(parsed)
        if state is None:
            raise Refused(Code.NO_SUCH_SUBJECT, f"nothing was ever sent to {parsed} here, or it was removed")
        return state

    def name_of(self, subject_id: int) -> Subject:
        subjects = self.store.messages.views.subjects
        if subject_id not in subjects:
            raise Refused(Code.NO_SUCH_SUBJECT, "the subject was removed")
        return subjects.by_id(subject_id).name

    def is_switched_off(self, host: GroupHost) -> bool:
        """Whether the group is off on all brokers; to pause it here is another matter."""
        return self.is_off(self.name_of(host.subject_id), host.name)

    def host(self, subject: str, group: str) -> GroupHost:
        """The group on the subject, which must exist here."""
        known = self._known.get((subject, group))
        if known is not None and self.groups.has(known):
            return known
        parsed = GroupName.parse(group)
        host = self.groups.find(self.subject(subject).id, parsed)
        if host is None:
            raise Refused(Code.NO_SUCH_GROUP, f"nobody has joined group {parsed} on {subject} here, or it was removed")
        self._known[subject, group] = host
        return host

    # --- making it so ------------------------------------------------------------------------------------------------

    def carry_out(self, host: GroupHost, decision: GroupDecision) -> RecordHeader | None:
        """Apply the events, write them, bring to dead letter what dies. The record, if there is one to wait for."""
        return self.carry_out_all([(host, decision)])

    def carry_out_all(self, decisions: Sequence[tuple[GroupHost, GroupDecision]]) -> RecordHeader | None:
        """Several decisions that do not depend on one another, in one record: all of them or none."""
        actions = [host.action(event) for host, decision in decisions for event in decision.events]
        written = self.store.act(actions) if actions else None
        now_ns = self._busy_ns = self.clock.monotonic_ns()
        for host, decision in decisions:
            host.law.apply_all(decision.events, now_ns)
            if decision.events:
                self.memory.note(host, host.law.held_bytes)
            self.rearm(host)
            if host.law.is_ordered:
                self._wake_next(host, decision)
            if decision.dying and self.undertaker is not None:
                self.undertaker.bury(host, decision.dying)
        return written

    def _wake_next(self, host: GroupHost, decision: GroupDecision) -> None:
        """In an ordered group: who waited behind something, or stood by, may have it now."""
        kinds = {event.kind for event in decision.events}
        if not kinds.isdisjoint(_FREEING):
            self.scheduler.wake(host.key)
        if not kinds.isdisjoint(_PARTING):
            self.parking.release(host.key)

    def is_busy(self, now_ns: int) -> bool:
        """Whether groups are at work: something was decided for one of them just now."""
        return now_ns - self._busy_ns < _BUSY_NS

    def when_durable(self, written: RecordHeader | None, told: Told) -> None:
        """Call `told` once the record is durable. Where there was nothing to write, once all before it is: an ack that
        is repeated is stale because of the first one, and that may still be on its way to the disk."""
        log = self.store.actions.log
        log.flusher.when_durable(log.end if written is None else written.end, told)

    def refuse(self, request: ServedRequest[ControlMessage], refused: Refused) -> None:
        """No sooner than what it follows from is durable: whoever is told that its lease has ended forgets what it
        held, and a crash must not give that back to it."""

        def told(outcome: FairwayError | None) -> None:
            if outcome is None:
                request.refuse(refused)
            elif isinstance(outcome, Refused):
                request.refuse(outcome)
            else:
                request.end()

        self.when_durable(None, told)

    def ensure(
        self, subject_id: int, name: GroupName, config: GroupConfig, start: int, session: Requester | None = None
    ) -> GroupHost:
        """The group on the subject; made, configured and set to `start` where it is new. `session`: who wants it."""
        host = self.groups.find(subject_id, name)
        if host is None:
            if len(self.groups) >= limits.GROUPS_MAX and not self.name_of(subject_id).is_inbox:
                sentence = f"there are {limits.GROUPS_MAX:,} groups on this broker, and there is room for no more"
                raise Refused(Code.BUSY, sentence, retry_after_ms=_FULL_RETRY_MS)
            has_room = self.memory.has_room_for_another(limits.GROUP_BYTES, session)
            if not has_room and not self.name_of(subject_id).is_inbox:
                raise Refused(Code.BUSY, _NO_MEMORY.format("one more group"), retry_after_ms=_FULL_RETRY_MS)
            host = self.groups.introduce(subject_id, name)
            now_ms = self.store.time.ages_from_ms()  # a group without members ages from now on
            try:
                configured = host.law.configure(0, config, now_ms=now_ms)
                self.carry_out_all([(host, configured), (host, host.law.seek(start, now_ms=now_ms))])
            except FairwayError:
                self.groups.remove(host)
                self.memory.forget(host)
                raise
            if session is not None:
                self.memory.charge(host, session)
        return host

    def admit_member(self, host: GroupHost, session: Requester) -> None:
        """`Refused` where memory is full, unless the group has hardly any members."""
        size = limits.MEMBER_BYTES * (1 if host.inbox is None else 2)
        if self.memory.room(host, session, is_small=True) >= size:
            self.memory.charge(host, session)
        elif len(host.law.members()) >= limits.GROUP_MEMBERS_MIN:
            sentence = _NO_MEMORY.format(f"one more member of group {host.name}")
            raise Refused(Code.BUSY, sentence, retry_after_ms=_FULL_MEMORY_RETRY_MS)

    def admit_name(self, host: GroupHost, session: Requester) -> None:
        """`Refused` where there is no memory to keep one more consumer paused."""
        if self.memory.room(host, session, is_small=True) < limits.PAUSED_NAME_BYTES:
            sentence = _NO_MEMORY.format(f"one more paused consumer of group {host.name}")
            raise Refused(Code.BUSY, sentence, retry_after_ms=_FULL_MEMORY_RETRY_MS)
        self.memory.charge(host, session)

    def remove(self, host: GroupHost) -> None:
        """Forget a group, its inbox with it. Whoever joins it later finds a new one."""
        gone = [host] if host.inbox is None else [host, host.inbox]
        self._write_removal(gone)
        self._forget(gone)

    def remove_all(self, gone: Sequence[GroupHost]) -> None:
        """Forget the groups of subjects that are gone. Where there is no room for the actions the groups go all the
        same: the next start finds them without a subject."""
        if gone:
            with suppress(Refused):
                self._write_removal(gone)
            self._forget(gone)

    def _write_removal(self, gone: Sequence[GroupHost]) -> None:
        now_ms = self.clock.wall_ms()
        self.store.act([Action(ActionKind.REMOVE, each.id, each.subject_id, now_ms) for each in gone])

    def _forget(self, gone: Sequence[GroupHost]) -> None:
        self._known.clear()
        for each in gone:
            self.scheduler.set_weight(each.key, 1)
            self.groups.remove(each)
            self.memory.forget(each)
            if each.timer is not None:
                each.timer.cancel()
                each.timer = None
        for each in gone:
            self.parking.release(each.key)
            self.scheduler.wake(each.key)

    def set_weight(self, host: GroupHost, weight: float) -> RecordHeader:
        self.scheduler.set_weight(host.key, weight)
        host.weight = weight
        return self._note(ActionKind.WEIGHT, host.id, host.subject_id, round(weight * WEIGHT_UNIT))

    def set_rate(self, host: GroupHost, rate_per_s: int) -> RecordHeader | None:
        if host.rate_per_s == rate_per_s:
            return None
        written = self._note(ActionKind.RATE, host.id, host.subject_id, rate_per_s)
        host.rate_per_s = rate_per_s
        return written

    def set_read_only(self, subject_id: int, *, is_on: bool) -> RecordHeader:
        self.groups.note_read_only(subject_id, is_on=is_on)
        return self._note(ActionKind.READ_ONLY, 0, subject_id, int(is_on))

    def _note(self, kind: ActionKind, group_id: int, subject_id: int, value: int) -> RecordHeader:
        return self.store.act([Action(kind, group_id, subject_id, self.clock.wall_ms(), lot=value)])

    # --- news and time -----------------------------------------------------------------------------------------------

    def wake_subject(self, subject_id: int) -> None:
        """Something new was committed to the subject."""
        for host in self.groups.of_subject(subject_id).values():
            self.scheduler.wake(host.key)
        self.watches.release(subject_id)

    def begin_life(self, *, is_lazy: bool = False) -> None:
        """After a restart: every group has its inbox, full leases for all members, and what was dying is seen to.

        `is_lazy`: a power cut may have taken acks that were answered.
        """
        for host in self.groups:
            self._link_inbox(host)
        for host in self.groups:
            self._revive(host)
            if is_lazy:
                self.carry_out(host, host.law.doubt(now_ms=self.clock.wall_ms()))

    def _link_inbox(self, host: GroupHost) -> None:
        inbox = self.store.messages.views.subjects.find(Subject.inbox(host.name, self.name_of(host.subject_id)))
        if inbox is not None:
            host.take_inbox(self.groups.find(inbox.id, host.name))
            host.is_inbox_open = host.inbox is not None

    def _revive(self, host: GroupHost) -> None:
        host.is_revived = True
        self.memory.note(host, host.law.held_bytes)
        if host.weight != 1:
            self.scheduler.set_weight(host.key, host.weight)
        end = self.store.messages.end_sequence(host.subject_id)
        dying = host.law.begin_life(end, self.clock.monotonic_ns())
        self.step_over_hole(host)
        self.rearm(host)
        if dying and self.undertaker is not None:
            self.undertaker.bury(host, dying, is_again=True)

    def step_over_hole(self, host: GroupHost) -> None:
        """Where damage or a power cut has left a hole of sequences behind the cursor, nothing in it is owed. What was
        in it counts as lost."""
        entry = next(self.store.messages.readable(host.subject_id, host.law.cursor), None)
        to = self.store.messages.end_sequence(host.subject_id) if entry is None else entry.first_sequence
        self.count_lost(host, to)
        if to > host.law.cursor:
            self.carry_out(host, host.law.skip(to, to, now_ms=self.clock.wall_ms()))

    def lost_ranges(self, host: GroupHost, first: int, end: int) -> list[Range]:
        """What the group may want in [first, end) and the disk has lost."""
        tags = host.law.config.tags
        store = self.store
        return lost_ranges(
            store.messages, store.rotten, host.subject_id, first, end, lambda entry: tags.may_match(entry.tag_filter)
        )

    def count_lost(self, host: GroupHost, to: int) -> None:
        """The group is about to pass over everything from its cursor to `to`: what the disk has lost of it is written
        down as lost."""
        for first, count in self.lost_ranges(host, host.law.cursor, to):
            self.lose(host, host.law.skip(first, first + count, is_lost=True, now_ms=self.clock.wall_ms()))

    def lose(self, host: GroupHost, decision: GroupDecision) -> None:
        """Carry out a decision by which the group misses messages that the disk has lost, and tell the operator."""
        self.carry_out(host, decision)
        lost = [each for event in decision.events if event.detail == LOST for each in event.ranges]
        if lost and len(self.store.remarks) < _REMARKS_MAX:
            count = sum(count for _, count in lost)
            self.store.remarks.append(
                f"group {host.name} on {self.name_of(host.subject_id)} lost {count:,} messages from {lost[0][0]} on: "
                "the disk has lost them, and no other copy could bring them back"
            )

    def call_later(self, delay_s: float, what: Callable[..., None], *args: object) -> Callable[[], None]:
        """Once, unless the broker has stopped or failed by then. The answer cancels it."""
        if self._is_closed:
            return lambda: None

        def ring() -> None:
            del self._timers[timer]
            if self.store.fault is None:
                what(*args)

        def cancel() -> None:
            timer.cancel()
            self._timers.pop(timer, None)

        timer = self._call_later(delay_s, ring)
        self._timers[timer] = None
        return cancel

    def rearm(self, host: GroupHost) -> None:
        """Set the group's timer, unless it rings early enough: what is due later is looked at when it rings."""
        now_ns = self.clock.monotonic_ns()
        due_ns = host.law.next_deadline_ns(now_ns=now_ns, now_ms=self.clock.wall_ms())
        if due_ns is None or self._is_closed or (host.timer is not None and host.timer_ns <= due_ns):
            return
        if host.timer is not None:
            host.timer.cancel()
        host.timer_ns = due_ns
        host.timer = self._call_later(max(due_ns - now_ns, 0) / _NS + _TIMER_SLACK_S, self._on_time, host)

    def _on_time(self, host: GroupHost) -> None:
        host.timer = None
        if self._is_closed or self.store.fault is not None:
            return
        try:
            now_ms = self.store.time.ages_from_ms()  # the last member may go
            decision = host.law.expire(now_ns=self.clock.monotonic_ns(), now_ms=now_ms)
            self.carry_out(host, decision)
            host.sessions.prune()
        except FairwayError:
            self.rearm(host)  # no room for the action now: the lease has ended all the same, and ends again later
        self.scheduler.wake(host.key)

    def close(self) -> None:
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.parking.close()
        self.watches.close()
        for host in self.groups:
            if host.timer is not None:
                host.timer.cancel()
                host.timer = None


def refusal(decision: GroupDecision) -> Refused | None:
    """What to tell the asker, where the law says no."""
    code = _CODES.get(decision.outcome)
    if code is None:
        return None
    return Refused(code, decision.sentence or decision.outcome.value, retry_after_ms=decision.retry_after_ms)
