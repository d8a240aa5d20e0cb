"""The group coordinator: applies the decisions of the group state machines and makes them durable.

A group's state machine (`fairway.groups`) only decides. `GroupCoordinator` carries the decisions out, for all groups of
a broker. It writes the events to the action log and applies them to the state machine. It passes messages after their
last attempt to the dead-letter writer. It also keeps one timer per group (a lease ends, a retry falls due), and wakes
the actors of a subject's groups when the subject has new messages.

A `WaitList` holds long polls outside of the mailboxes of actors, until an event lets them look again. The broker has
two wait lists, and both of them hold requests that a mailbox cannot:

- Scans wait for the first message behind the end of a subject. An actor for scans serves many subjects: a wake-up
  that the actor spends on a scan of one subject is lost to the scans of another. The event is the subject.
- Pulls wait while their consumer is paused, or stands by in a group of strict order. In a mailbox the actor tries the
  oldest pull on behalf of all: the pull of a consumer that may take nothing would hold up the others. The event is the
  actor of the group.

Many requests may wait for one event. They go back to their actors a few in each turn of the loop, because the loop has
other work meanwhile. Each request has one timer, however often it looks in vain.

`BackgroundTask` is work of the broker itself in an actor's mailbox. The scheduler gives it its share of the time like
any request, and nobody waits for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from fairway import limits
from fairway.broker.groups import WEIGHT_UNIT, GroupHost, Groups
from fairway.errors import Code, FairwayError, Refused
from fairway.group_events import LOST, ActionKind, GroupEvent
from fairway.groups import GroupConfig, GroupDecision, GroupOutcome, Range
from fairway.names import GroupName, Subject
from fairway.protocol import ControlMessage
from fairway.runtime.clock import Clock
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.memory_plan import SharedMemory
from fairway.serving.requests import Requester, ServedRequest, hand_to
from fairway.storage.action_log import Action
from fairway.storage.flusher import OnDurable as Told
from fairway.storage.record import RecordHeader
from fairway.storage.repair import lost_ranges
from fairway.storage.store import Store
from fairway.storage.subjects import SubjectState

if TYPE_CHECKING:
    from fairway.broker.dead_letters import DeadLetterWriter

_NEVER_NS = 1 << 62


class BackgroundTask:
    """A request of the broker itself, without a deadline."""

    deadline_ns = _NEVER_NS
    wait_until_ns = 0
    is_cancelled = False
    account = None


RELEASED_PER_TURN = 64  # requests of a wait list, about 0.3 ms, where the mailbox is full and refuses each
_Request = ServedRequest[ControlMessage]
CancellableTimer = Callable[..., Callable[[], None]]


class _WaitingRequest(NamedTuple):
    """What a request waits for, and the actor that handles the request."""

    event: Hashable
    key: Hashable
    processor: Processor[_Request]


class WaitList:
    """Requests by the event that they wait for. A request is answered at the end of its wait at the latest."""

    def __init__(self, scheduler: Scheduler, call_later: CancellableTimer) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._waiting: dict[Hashable, dict[_Request, _WaitingRequest]] = {}
        self._released: dict[_Request, _WaitingRequest] = {}  # about to look again
        self._is_called = False
        self._timed: set[_Request] = set()

    def add(
        self, event: Hashable, key: Hashable, request: _Request, processor: Processor[_Request], now_ns: int
    ) -> None:
        """Keep the request until the event, or the end of its wait; after the event it goes back to its actor."""
        self._waiting.setdefault(event, {})[request] = _WaitingRequest(event, key, processor)
        request.wait_at(partial(self._end, event, request, Expiry.GONE))
        if request not in self._timed:
            self._timed.add(request)
            wait_s = max(request.wait_until_ns - now_ns, 0) / 1e9
            cancel = self._call_later(wait_s, self._end, event, request, Expiry.WAITED)
            request.wait_until(partial(self._forget_timer, request, cancel))

    def release(self, event: Hashable) -> None:
        """The event has happened: requests that wait for it look again, a few in each turn of the loop."""
        waiting = self._waiting.pop(event, None)
        if waiting:
            self._released.update(waiting)
            if not self._is_called:
                self._release_some()

    def release_all(self) -> None:
        """Any of the events may have happened."""
        for event in list(self._waiting):
            self.release(event)

    def withdraw(self, event: Hashable, is_meant: Callable[[_Request], bool]) -> list[_Request]:
        """Take requests out; the caller answers them."""
        released = [request for request, each in self._released.items() if each.event == event]
        taken = [request for request in (*self._waiting.get(event, ()), *released) if is_meant(request)]
        for request in taken:
            self._take(event, request, is_released_too=True)
        return taken

    def close(self) -> None:
        waiting, self._waiting = [*self._waiting.values(), self._released], {}
        self._released = {}
        for of_event in waiting:
            for request, each in of_event.items():
                each.processor.expire(request, Expiry.STOPPED)

    def _release_some(self) -> None:
        self._is_called = False
        for request in list(islice(self._released, RELEASED_PER_TURN)):
            each = self._released.pop(request)
            try:
                hand_to(self._scheduler, each.key, request, each.processor)
            except Refused as full:
                each.processor.fail(request, full)
        if self._released:
            self._is_called = True
            self._call_later(0, self._release_some)

    def _end(self, event: Hashable, request: _Request, expiry: Expiry) -> None:
        """End a wait. A request whose time is up, and which is about to look again, looks first."""
        if expiry is Expiry.WAITED:
            self._timed.discard(request)
        found = self._take(event, request, is_released_too=expiry is Expiry.GONE)
        if found is not None:
            found.processor.expire(request, expiry)

    def _take(self, event: Hashable, request: _Request, *, is_released_too: bool) -> _WaitingRequest | None:
        waiting = self._waiting.get(event, {})
        found = waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(event, None)
        return self._released.pop(request, None) if found is None and is_released_too else found

    def _forget_timer(self, request: _Request, cancel: Callable[[], None]) -> None:
        self._timed.discard(request)
        cancel()


_NS = 1_000_000_000
_BUSY_NS = 5_000_000  # a group counts as busy for so long after its last decision: its consumers are about to send more
_TIMER_SLACK_S = 0.001  # uvloop rounds to milliseconds: without the slack a timer would fire early, and again at once

_FULL_RETRY_MS = 60_000  # maintenance removes a group only after days without use
_FULL_MEMORY_RETRY_MS = 1_000  # members and their lots go when their leases end
_NO_MEMORY = "the memory for groups is full, and there is no room for {}: give the broker more (--memory-mib)"
_REMARKS_MAX = 1_000

CallLater = Callable[..., asyncio.TimerHandle]
IsOff = Callable[[Subject, GroupName], bool]

# After these events an ordered group may hand out messages that waited behind others.
_FREEING = frozenset(
    {
        ActionKind.ACK,
        ActionKind.DEAD,
        ActionKind.RETRY,
        ActionKind.EXPIRE,
        ActionKind.LEAVE,
        ActionKind.GO_ON,
        ActionKind.CURSOR,
    }
)

_PARTING = frozenset({ActionKind.EXPIRE, ActionKind.LEAVE})

_CODES = {
    GroupOutcome.BUSY: Code.BUSY,
    GroupOutcome.NOT_A_MEMBER: Code.NOT_A_MEMBER,
    GroupOutcome.OTHER_VERSION: Code.STALE_CONFIG,
    GroupOutcome.BAD_REQUEST: Code.BAD_REQUEST,
}


class GroupCoordinator:
    """Carries out what the state machines of the groups decide."""

    def __init__(
        self,
        groups: Groups,
        store: Store,
        scheduler: Scheduler,
        clock: Clock,
        call_later: CallLater,
        groups_bytes_max: int,
        dead_letters: Callable[[GroupCoordinator], DeadLetterWriter],
        is_off: IsOff | None = None,
    ) -> None:
        """`is_off`: whether a group is switched off on all brokers; None: nobody can switch groups off."""
        self.groups = groups
        self.memory: SharedMemory[GroupHost, Requester] = SharedMemory(groups_bytes_max, limits.GROUP_RESERVE_BYTES)
        self.store = store
        self.scheduler = scheduler
        self.clock = clock
        self._call_later = call_later
        self._timers: dict[asyncio.TimerHandle, None] = {}
        self._is_closed = False
        self._busy_ns = -_BUSY_NS  # when a decision was last carried out
        self._known: dict[tuple[str, str], GroupHost] = {}  # by the names as requests carry them, to avoid parsing
        self.paused_pulls = WaitList(scheduler, self.call_later)
        self.watches = WaitList(scheduler, self.call_later)
        self._is_off = is_off
        self.dead_letter_writer = dead_letters(self)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def subject(self, name: str) -> SubjectState:
        """The subject of this name; `Refused` if it does not exist here."""
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
        """Whether the group is switched off on all brokers. A pause on this broker does not count."""
        return self._is_off is not None and self._is_off(self.name_of(host.subject_id), host.name)

    def host(self, subject: str, group: str) -> GroupHost:
        """The group on the subject; `Refused` if it does not exist here."""
        known = self._known.get((subject, group))
        if known is not None and self.groups.has(known):
            return known
        parsed = GroupName.parse(group)
        host = self.groups.find(self.subject(subject).id, parsed)
        if host is None:
            raise Refused(Code.NO_SUCH_GROUP, f"nobody has joined group {parsed} on {subject} here, or it was removed")
        self._known[subject, group] = host
        return host

    # --- decisions ---------------------------------------------------------------------------------------------------

    def carry_out(self, host: GroupHost, decision: GroupDecision) -> RecordHeader | None:
        """Write the events of the decision, apply them, and pass dying messages on. Returns the record, if there is
        one."""
        return self.carry_out_all([(host, decision)])

    def carry_out_all(self, decisions: Sequence[tuple[GroupHost, GroupDecision]]) -> RecordHeader | None:
        """Carry out several independent decisions in one record: all of them or none."""
        actions = [host.action(event) for host, decision in decisions for event in decision.events]
        written = self.store.act(actions) if actions else None
        now_ns = self._busy_ns = self.clock.monotonic_ns()
        for host, decision in decisions:
            host.state_machine.apply_all(decision.events, now_ns)
            if decision.events:
                self.memory.note(host, host.state_machine.held_bytes)
            self.rearm(host)
            if host.state_machine.is_ordered:
                self._wake_next(host, decision)
            if decision.dying:
                self.dead_letter_writer.mark_dead(host, decision.dying)
        return written

    def _wake_next(self, host: GroupHost, decision: GroupDecision) -> None:
        """In an ordered group, wake the pulls that waited for an earlier message or stood by."""
        kinds = {event.kind for event in decision.events}
        if not kinds.isdisjoint(_FREEING):
            self.scheduler.wake(host.key)
        if not kinds.isdisjoint(_PARTING):
            self.paused_pulls.release(host.key)

    def is_busy(self, now_ns: int) -> bool:
        """Whether any group has decided something within the last 5 ms."""
        return now_ns - self._busy_ns < _BUSY_NS

    def when_durable(self, written: RecordHeader | None, told: Told) -> None:
        """Call `told` once the record is durable. Without a record, call `told` once all earlier records are durable. A
        repeated ack is stale because of the first ack, and that may still be on its way to the disk."""
        log = self.store.actions.log
        log.flusher.when_durable(log.end if written is None else written.end, told)

    def refuse(self, request: ServedRequest[ControlMessage], refused: Refused) -> None:
        """Refuse the request once the events that caused the refusal are durable. A consumer whose lease has ended
        forgets its messages, and a crash must not give them back to it."""
        self.when_durable(None, lambda outcome: request.settle(outcome, refused))

    def ensure(
        self, subject_id: int, name: GroupName, config: GroupConfig, start: int, session: Requester | None = None
    ) -> GroupHost:
        """The group on the subject. Creates and configures a new group and sets its cursor to `start`. `session` asks
        for it."""
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
                configured = host.state_machine.configure(0, config, now_ms=now_ms)
                self.carry_out_all([(host, configured), (host, host.state_machine.seek(start, now_ms=now_ms))])
            except FairwayError:
                self.groups.remove(host)
                self.memory.forget(host)
                raise
            if session is not None:
                self.memory.charge(host, session)
        return host

    def admit_member(self, host: GroupHost, session: Requester) -> None:
        """`Refused` where memory is full, unless the group has fewer than `GROUP_MEMBERS_MIN` members."""
        size = limits.MEMBER_BYTES * (1 if host.inbox is None else 2)
        if self.memory.room(host, session, is_small=True) >= size:
            self.memory.charge(host, session)
        elif len(host.state_machine.members()) >= limits.GROUP_MEMBERS_MIN:
            sentence = _NO_MEMORY.format(f"one more member of group {host.name}")
            raise Refused(Code.BUSY, sentence, retry_after_ms=_FULL_MEMORY_RETRY_MS)

    def admit_name(self, host: GroupHost, session: Requester) -> None:
        """`Refused` where there is no memory to keep one more consumer paused."""
        if self.memory.room(host, session, is_small=True) < limits.PAUSED_NAME_BYTES:
            sentence = _NO_MEMORY.format(f"one more paused consumer of group {host.name}")
            raise Refused(Code.BUSY, sentence, retry_after_ms=_FULL_MEMORY_RETRY_MS)
        self.memory.charge(host, session)

    def remove(self, host: GroupHost) -> None:
        """Remove a group and its inbox. A later join creates a new group."""
        self._write_removal(host.with_inbox)
        self._forget(host.with_inbox)

    def remove_all(self, gone: Sequence[GroupHost]) -> None:
        """Remove the groups of removed subjects. Where there is no room for the actions, the groups go all the same:
        the next start finds them without a subject."""
        if gone:
            with suppress(Refused):
                self._write_removal(gone)
            self._forget(gone)

    def _write_removal(self, gone: Sequence[GroupHost]) -> None:
        now_ms = self.clock.wall_ms()
        self.store.act([each.action(GroupEvent(ActionKind.REMOVE, now_ms)) for each in gone])

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
            self.paused_pulls.release(each.key)
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
        return self.store.act([Action(group_id, subject_id, GroupEvent(kind, self.clock.wall_ms(), lot=value))])

    # --- wake-ups and timers -----------------------------------------------------------------------------------------

    def wake_subject(self, subject_id: int) -> None:
        """Wake all groups of the subject: something new was committed to it."""
        for host in self.groups.of_subject(subject_id).values():
            self.scheduler.wake(host.key)
        self.watches.release(subject_id)

    def begin_life(self, *, is_lazy: bool = False) -> None:
        """After a restart, link each group to its inbox, give all members full leases, and resume dead letters.

        `is_lazy`: a power cut may have taken acks that the broker had answered.
        """
        for host in self.groups:
            self._link_inbox(host)
        for host in self.groups:
            self._revive(host)
            if is_lazy:
                self.carry_out(host, host.state_machine.doubt(now_ms=self.clock.wall_ms()))

    def _link_inbox(self, host: GroupHost) -> None:
        inbox = self.store.messages.views.subjects.find(Subject.inbox(host.name, self.name_of(host.subject_id)))
        if inbox is not None:
            host.take_inbox(self.groups.find(inbox.id, host.name))
            host.is_inbox_open = host.inbox is not None

    def _revive(self, host: GroupHost) -> None:
        host.is_revived = True
        self.memory.note(host, host.state_machine.held_bytes)
        if host.weight != 1:
            self.scheduler.set_weight(host.key, host.weight)
        end = self.store.messages.end_sequence(host.subject_id)
        dying = host.state_machine.begin_life(end, self.clock.monotonic_ns())
        self.step_over_hole(host)
        self.rearm(host)
        if dying:
            self.dead_letter_writer.mark_dead(host, dying, is_again=True)

    def step_over_hole(self, host: GroupHost) -> None:
        """Move the cursor over a hole of sequences that damage or a power cut has left. The group counts its messages
        as lost."""
        entry = next(self.store.messages.readable(host.subject_id, host.state_machine.cursor), None)
        to = self.store.messages.end_sequence(host.subject_id) if entry is None else entry.first_sequence
        self.count_lost(host, to)
        if to > host.state_machine.cursor:
            self.carry_out(host, host.state_machine.skip(to, to, now_ms=self.clock.wall_ms()))

    def lost_ranges(self, host: GroupHost, first: int, end: int) -> list[Range]:
        """The ranges in [first, end) that the disk has lost and that the group's tags may match."""
        tags = host.state_machine.config.tags
        store = self.store
        return lost_ranges(
            store.messages, store.rotten, host.subject_id, first, end, lambda entry: tags.may_match(entry.tag_filter)
        )

    def count_lost(self, host: GroupHost, to: int) -> None:
        """Record as lost what the disk has lost between the group's cursor and `to`. The group is about to skip that
        range."""
        for first, count in self.lost_ranges(host, host.state_machine.cursor, to):
            self.lose(host, host.state_machine.skip(first, first + count, is_lost=True, now_ms=self.clock.wall_ms()))

    def lose(self, host: GroupHost, decision: GroupDecision) -> None:
        """Carry out a decision by which the group misses messages that the disk has lost, and remark on it for the
        operator."""
        self.carry_out(host, decision)
        lost = [each for event in decision.events if event.detail == LOST for each in event.ranges]
        if lost:
            count = sum(count for _, count in lost)
            self.remark(
                f"group {host.name} on {self.name_of(host.subject_id)} lost {count:,} messages from {lost[0][0]} on: "
                "the disk has lost them, and no other copy could bring them back"
            )

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the operator."""
        if len(self.store.remarks) < _REMARKS_MAX:
            self.store.remarks.append(sentence)

    def call_later(self, delay_s: float, what: Callable[..., None], *args: object) -> Callable[[], None]:
        """Call `what` once after the delay, unless the broker has stopped or failed by then. Returns a function that
        cancels."""
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
        """Set the group's timer, unless it already fires early enough. `_on_time` looks at later deadlines."""
        now_ns = self.clock.monotonic_ns()
        due_ns = host.state_machine.next_deadline_ns(now_ns=now_ns, now_ms=self.clock.wall_ms())
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
            decision = host.state_machine.expire(now_ns=self.clock.monotonic_ns(), now_ms=now_ms)
            self.carry_out(host, decision)
            host.sessions.prune()
        except FairwayError:
            self.rearm(host)  # no room for the action now: the lease has ended all the same, and the timer tries again
        self.scheduler.wake(host.key)

    def close(self) -> None:
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.paused_pulls.close()
        self.watches.close()
        for host in self.groups:
            if host.timer is not None:
                host.timer.cancel()
                host.timer = None


def refusal(decision: GroupDecision) -> Refused | None:
    """The refusal to send for a decision, or None where the state machine did not refuse."""
    code = _CODES.get(decision.outcome)
    if code is None:
        return None
    return Refused(code, decision.sentence or decision.outcome.value, retry_after_ms=decision.retry_after_ms)
