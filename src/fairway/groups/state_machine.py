"""The interface of a group on one subject: ask for decisions, apply their events.

    decision = group.pull(name, ...)      reads, and changes nothing that the log must know
    for event in decision.events:
        group.apply(event, now_ns)        now the state changes
    log.append(decision.events)           the log keeps the events; the answer follows

Apply a decision's events before asking for the next. After a restart: `GroupStateMachine.restore(snapshot)` or
`GroupStateMachine()`, then `apply` for each later event of the log, then `begin_life`. No I/O, no clock: `now_ns` is
monotonic and rules leases, `now_ms` is the wall clock and rules retries.

Decisions about outcomes, and those of operators and of the store, are here. Those about members and pulls have modules
of their own.

Of a consumer's outcomes (ack, retry, reject, release) only those of the holder count. If the member no longer holds a
message (its lease ended, another consumer has it), the message counts as stale. Repeating an outcome is harmless. An
outcome is stale too if the message went out in a response that had not arrived when the member set the outcome: it
belongs to an earlier handout, which a seek has undone.

There is one exception, after a crash. The broker does not wait for a PULL to be durable, so it may have forgotten a
handout. The group believes an ack for a message that nobody holds, if it lies below the end that was committed before
the crash. Messages between the cursor and such an ack may be with consumers too, so they become lots that wait. If
these would be too many lots, the group does not believe the ack, and hands its messages out once more. In an ordered
group the broker waits for the PULL, so there is nothing to believe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Self

import msgspec

from fairway import group_events, limits
from fairway.group_events import GroupEvent, Range
from fairway.groups import membership, pull, snapshot
from fairway.groups.attempts import Attempts
from fairway.groups.config import GroupConfig, Mode, Order, encode
from fairway.groups.decisions import (
    BUSY_RETRY_AFTER_MS,
    Dying,
    GroupDecision,
    GroupOutcome,
    Handout,
    JoinClaim,
    JoinDecision,
    PullDecision,
    SeekDecision,
    SettleDecision,
    SettleVerdict,
)
from fairway.groups.lots import mask_of, open_among, open_in, ranges_of
from fairway.groups.members import Member
from fairway.groups.snapshot import Description
from fairway.groups.state import GroupState
from fairway.names import ConsumerName

_RETENTION = "retention could keep it no longer"
_RANGES_PER_EVENT = 10_000  # an action counts its ranges in 16 bits
_UNKNOWN = "not a member of the group, or no longer: join"
_NUMBER_MAX = 2**53  # of a response; a member's numbers are checked before use
_BAD_NUMBER = "a response has a number from 1 on"
_NO_CLAIM = JoinClaim()


class GroupStateMachine:
    """The rules of a group. Not thread-safe: the instance belongs to the actor of its (subject, group)."""

    def __init__(self, state: GroupState | None = None) -> None:
        self._state = GroupState() if state is None else state

    # --- events

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        """Apply an event: the only way to change state that the log must know. A replay gives no time."""
        self._state.apply(event, now_ns)

    def expect_holes(self) -> None:
        """In a replay: some events have rotted. The messages that they handed out come again."""
        self._state.has_holes = True

    def apply_all(self, happened: Iterable[GroupEvent], now_ns: int = 0) -> None:
        for event in happened:
            self.apply(event, now_ns)

    def begin_life(self, end: int, now_ns: int) -> tuple[Dying, ...]:
        """After a replay: grant full leases to all. Returns the dying messages, to be copied to dead letter (again).

        `end` is the committed end. Acks for messages below `end` are believed, because their PULL may be lost.
        """
        self._state.begin_life(end, now_ns)
        return tuple(
            Dying(lot.base, lot.attempt, lot.ranges, lot.reason.decode(errors="replace"), lot.history)
            for lot in self._state.dying
        )

    def doubt(self, *, now_ms: int) -> GroupDecision:
        """After `begin_life`, if a crash may have taken acks that were answered: doubt everything that is held. A
        consumer does not come back to a message that it believes to be acked. So the group hands the message out again
        after a lease; until then the group believes an ack of the consumer that has it."""
        due_ms = now_ms + self._state.config.lease_ms
        happened = [
            group_events.doubted(member.id, lot.attempt, lot.base, lot.ranges, due_ms, now_ms)
            for member, lot in self._state.roster.held()
        ]
        return GroupDecision(GroupOutcome.DONE, tuple(happened))

    def members(self) -> list[tuple[int, ConsumerName]]:
        """Id and name of each member."""
        return [(member.id, member.name) for member in self._state.roster]

    def name_of(self, consumer_id: int) -> ConsumerName | None:
        """The name of a member; None if there is no such member now."""
        return self._state.roster.name_of(consumer_id)

    def has_member(self, name: ConsumerName) -> bool:
        return self._state.roster.get(name) is not None

    def verifier_of(self, name: ConsumerName) -> bytes:
        """The verifier of the member's session secret; empty: no secret, or not a member."""
        member = self._state.roster.get(name)
        return b"" if member is None else member.verifier

    def snapshot(self) -> bytes:
        return snapshot.write(self._state)

    @classmethod
    def restore(cls, data: bytes) -> Self:
        return cls(snapshot.read(data))

    # --- requests of members

    def join(
        self,
        name: ConsumerName,
        *,
        version: int,
        arrived: int,
        resume_at: int,
        now_ns: int,
        now_ms: int,
        aging_ms: int | None = None,
        claim: JoinClaim = _NO_CLAIM,
    ) -> JoinDecision:
        """Become a member, or come back as one. `version` 0 accepts any configuration. `aging_ms` is the time against
        which the absence of a broadcast consumer counts, if that is not now. `claim` decides who may resume a member
        (`membership`)."""
        if not 0 <= arrived <= _NUMBER_MAX:
            return JoinDecision(GroupOutcome.BAD_REQUEST, sentence=_BAD_NUMBER)
        return membership.decide_join(
            self._state,
            name,
            version,
            arrived,
            claim,
            resume_at=resume_at,
            now_ns=now_ns,
            now_ms=now_ms,
            aging_ms=now_ms if aging_ms is None else aging_ms,
        )

    def heartbeat(self, name: ConsumerName, *, arrived: int, now_ns: int) -> GroupDecision:
        """Renew the lease, and note what arrived. There is no event: a restart begins with full leases."""
        member = self._state.roster.get(name)
        if member is None:
            return GroupDecision(GroupOutcome.NOT_A_MEMBER, sentence=_UNKNOWN)
        if not 0 <= arrived <= _NUMBER_MAX:
            return GroupDecision(GroupOutcome.BAD_REQUEST, sentence=_BAD_NUMBER)
        self._state.roster.renew(member, now_ns)
        member.hear(arrived)
        return GroupDecision(GroupOutcome.DONE)

    def stop_lease(self, name: ConsumerName) -> None:
        """Let the member's lease last until `start_lease`: the caller learns at once when the consumer is gone."""
        member = self._state.roster.get(name)
        if member is not None:
            member.has_lasting_lease = True

    def has_lasting_lease(self, name: ConsumerName) -> bool:
        """Whether the member's lease stands still."""
        member = self._state.roster.get(name)
        return member is not None and member.has_lasting_lease

    def start_lease(self, name: ConsumerName, *, now_ns: int) -> None:
        """The consumer is gone: its lease runs from now on."""
        member = self._state.roster.get(name)
        if member is not None and member.has_lasting_lease:
            member.has_lasting_lease = False
            self._state.roster.renew(member, now_ns)

    def pull(
        self,
        name: ConsumerName,
        *,
        arrived: int,
        messages_max: int,
        fresh: Range | None,
        now_ns: int,
        now_ms: int,
        number_after: int = 0,
        keys: Sequence[int] = (),
        beside: Collection[int] = (),
        run_max: int = 1,
        extends_runs: bool = False,
        bytes_left: int | None = None,
    ) -> PullDecision:
        """Decide what this consumer gets; renews its lease.

        `fresh` is the contiguous (first, count) of wanted messages from the cursor on; None if there are none.
        Sequences between the cursor and `first` are skipped (filtered batches, holes); a count of 0 only skips. If the
        decision has too many bytes, ask again for fewer messages instead of applying it.

        A new response gets a number above `number_after`. A group and its inbox number the same consumer's responses,
        so each gets the other's `last_number`. The caller asks the one with the lower `first_unarrived` first.

        In a group by key, `keys` are of the fresh messages, and `beside` is the other's `keys_in_hand`. `run_max` is
        how many messages of one key the consumer handles one after another, giving back those behind a failed one. With
        `extends_runs` it does so even if these come in several responses.
        `bytes_left` bounds the growth of the group's memory (None: no limit); a group with little in hand may always
        grow a little.
        """
        member = self._state.roster.get(name)
        if member is None:
            return PullDecision(GroupOutcome.NOT_A_MEMBER, sentence=_UNKNOWN)
        if not 0 <= arrived <= _NUMBER_MAX:
            return PullDecision(GroupOutcome.BAD_REQUEST, sentence=_BAD_NUMBER)
        self._state.roster.renew(member, now_ns)
        member.hear(arrived)
        asked = pull.PullRequest(
            messages_max, fresh, now_ms, number_after, keys, beside, run_max, extends_runs, bytes_left
        )
        return pull.decide(self._state, member, asked)

    def has_unarrived(self, name: ConsumerName) -> bool:
        """Whether a response to this consumer did not arrive, by its last request: the next pull resends it."""
        return self.first_unarrived(name) is not None

    def first_unarrived(self, name: ConsumerName) -> int | None:
        """The number of the oldest response that did not arrive at this consumer, by its last request."""
        member = self._state.roster.get(name)
        if member is None:
            return None
        return next((number for number in member.unarrived if number in member.responses), None)

    def last_number(self, name: ConsumerName) -> int:
        """The number of the last response to this consumer; in an ordered group, to any consumer."""
        member = self._state.roster.get(name)
        return max(0 if member is None else member.number, self._state.number)

    def settle(
        self,
        name: ConsumerName,
        verdict: SettleVerdict,
        first: int,
        attempt: int,
        ranges: Sequence[Range],
        *,
        now_ms: int,
        arrived: int = 0,
        after_ms: int | None = None,
        draw: float = 0.0,
        reason: str = "",
        fence: int = 0,
        may_grow: bool = True,
    ) -> SettleDecision:
        """Decide one verdict on ranges of the lot named (first, attempt). `draw` in [0, 1) is the jitter of a retry.

        `arrived` is the last response that had reached the member when it set the outcome; 0: any. `fence`, of an
        ordered group, is the number of the response that handed the messages out; 0: any. Without `may_grow` no
        decision splits a lot; an ack, and a verdict on all of a lot, never do.

        The lease is not renewed, because a request may hold many verdicts: call `heartbeat` once for the request.
        """
        state = self._state
        member = state.roster.get(name)
        if member is None:
            return SettleDecision(GroupOutcome.NOT_A_MEMBER, sentence=_UNKNOWN, stale=sum(count for _, count in ranges))
        complaint = _complaint(first, ranges, after_ms)
        if complaint:
            return SettleDecision(GroupOutcome.BAD_REQUEST, sentence=complaint)
        said = mask_of(ranges, first)
        lot = member.lots.get((first, attempt))
        if lot is None:
            return _settle_unheld(state, member, verdict, first, attempt, said, now_ms, may_grow)
        settled = said & (lot.open_up_to(arrived) if arrived else lot.mask)
        if fence:
            settled &= lot.open_in_response(fence)
        stale = (said ^ settled).bit_count()
        if not settled:
            return SettleDecision(GroupOutcome.DONE, stale=stale)
        parts = ranges_of(settled, first)
        if verdict is SettleVerdict.ACK:
            event = group_events.acked(member.id, attempt, first, parts, now_ms)
            return SettleDecision(GroupOutcome.DONE, (event,), settled=settled.bit_count(), stale=stale)
        is_full = not may_grow or state.in_flight >= 2 * state.config.lots_max
        if is_full and settled != lot.mask:  # to split a lot makes more lots; a lot as a whole may always go
            sentence = "too many ranges in flight to split a lot"
            return SettleDecision(GroupOutcome.BUSY, sentence=sentence, retry_after_ms=BUSY_RETRY_AFTER_MS)
        due_ms = _due_ms(state, verdict, attempt, after_ms, draw, now_ms)
        why = reason.encode()[: limits.REASON_BYTES_MAX]
        event = group_events.returned(member.id, attempt, first, parts, due_ms, why, now_ms)
        is_last = due_ms > 0 and attempt >= state.config.attempts_max
        is_dying = due_ms == group_events.REJECTED or is_last
        dying = (Dying(parts[0][0], attempt, parts, reason),) if is_dying else ()
        return SettleDecision(GroupOutcome.DONE, (event,), dying, settled=settled.bit_count(), stale=stale)

    def leave(self, name: ConsumerName, *, now_ms: int) -> GroupDecision:
        """Remove the member. Other members get its unsettled messages at once, and no attempt counts."""
        member = self._state.roster.get(name)
        return GroupDecision(GroupOutcome.DONE, () if member is None else (group_events.left(member.id, now_ms),))

    # --- time

    def expire(self, *, now_ns: int, now_ms: int) -> GroupDecision:
        """Expire leases and lots held too long. Call this when `next_deadline_ns` has come; then look whether a waiting
        pull can be answered."""
        return membership.decide_expire(self._state, now_ns, now_ms)

    def next_deadline_ns(self, *, now_ns: int, now_ms: int) -> int | None:
        """When `expire` or a waiting pull has something to do, on the monotonic clock. In the past: at once."""
        return membership.next_deadline_ns(self._state, now_ns, now_ms)

    def has_ready(self, now_ms: int) -> bool:
        """Whether a pull finds lots that are not fresh: handed back, or due."""
        return not self._state.is_paused and any(True for _ in self._state.unheld_lots.ready(now_ms))

    @property
    def removable_at_ms(self) -> int | None:
        """When the group will have been without members for too long and is removed; None while it has members."""
        if len(self._state.roster):
            return None
        return self._state.absent_since_ms + self._state.config.absence_ms_max

    # --- requests of the broker and of operators

    def mark_dead(self, dying: Dying, *, is_lost: bool = False, now_ms: int) -> GroupDecision:
        """These messages are in the dead-letter subject, committed: all of a lot or a part of it. Only messages that
        are still dying count: a seek, or an earlier `mark_dead`, may have come in between. `is_lost`: there was nothing
        left to copy, so they count as lost."""
        detail = group_events.LOST if is_lost else b""
        named = self._state.dying.get((dying.first, dying.attempt))
        lots = list(self._state.dying) if named is None else [named]  # parts of a lot are renamed: rare, so search
        happened = [
            group_events.died(lot.attempt, lot.base, ranges_of(mask, lot.base), now_ms, detail)
            for lot in lots
            if lot.attempt == dying.attempt and (mask := open_among(lot, dying.ranges))
        ]
        return GroupDecision(GroupOutcome.DONE, tuple(happened))

    def history_of(self, dying: Dying) -> Attempts:
        """The failed attempts of dying messages; empty if a seek has come in between."""
        lot = self._state.dying.get((dying.first, dying.attempt))
        return () if lot is None else lot.history

    def drop(self, absent: Handout, *, is_lost: bool = False, now_ms: int) -> GroupDecision:
        """Drop unreadable messages of a lot that a pull chose. They count as lost if rot took them. Apply this instead
        of the pull's events; then pull again."""
        ranges = self._unheld(absent)
        detail = group_events.LOST if is_lost else b""
        event = group_events.acked(0, absent.attempt, absent.first, ranges, now_ms, detail)
        return GroupDecision(GroupOutcome.DONE, (event,) if ranges else ())

    def lose(self, name: ConsumerName, handout: Handout, *, now_ms: int) -> GroupDecision:
        """Count messages as lost, of a lot that went out to this consumer in a response that did not arrive: rot took
        them before they could be resent."""
        member = self._state.roster.get(name)
        lot = None if member is None else member.lots.get((handout.first, handout.attempt))
        mask = 0 if lot is None else open_among(lot, handout.ranges)
        if member is None or lot is None or not mask:
            return GroupDecision(GroupOutcome.DONE)
        ranges = ranges_of(mask, lot.base)
        event = group_events.acked(member.id, lot.attempt, lot.base, ranges, now_ms, group_events.LOST)
        return GroupDecision(GroupOutcome.DONE, (event,))

    def reject(self, lot: Handout, reason: str, *, now_ms: int) -> GroupDecision:
        """Reject a lot that a pull chose from the unheld ones and that cannot be handed out: it dies."""
        ranges = self._unheld(lot)
        if not ranges:
            return GroupDecision(GroupOutcome.DONE)
        event = group_events.returned(0, lot.attempt, lot.first, ranges, group_events.REJECTED, reason.encode(), now_ms)
        return GroupDecision(GroupOutcome.DONE, (event,), (Dying(ranges[0][0], lot.attempt, ranges, reason),))

    def _unheld(self, wanted: Handout) -> tuple[Range, ...]:
        """The requested messages that nobody holds, under this name."""
        lot = self._state.unheld_lots.get((wanted.first, wanted.attempt))
        return () if lot is None else ranges_of(open_among(lot, wanted.ranges), lot.base)

    def skip(self, first: int, to: int, *, is_lost: bool = False, now_ms: int) -> GroupDecision:
        """Skip from the cursor to `to`; with `is_lost`, the sequences from `first` on count as lost."""
        cursor, happened = self._state.cursor, []
        if not is_lost:
            first = max(first, to)
        if first > cursor:
            happened.append(group_events.skipped(cursor, first, group_events.SKIPPED, now_ms))
        if to > max(first, cursor):
            happened.append(group_events.skipped(max(first, cursor), to, group_events.LOST, now_ms))
        return GroupDecision(GroupOutcome.DONE, tuple(happened))

    def forsake(self, first_kept: int, *, now_ms: int) -> GroupDecision:
        """Retention takes everything below: pulled messages die (copy them first), others count as lost."""
        state, happened, dying = self._state, list[GroupEvent](), list[Dying]()
        owed = [(member.id, lot) for member, lot in state.roster.held()] + [(0, lot) for lot in state.unheld_lots]
        for consumer_id, lot in owed:
            ranges = ranges_of(open_in(lot, lot.base, first_kept - lot.base), lot.base)
            if ranges:
                reason = _RETENTION.encode()
                event = group_events.returned(
                    consumer_id, lot.attempt, lot.base, ranges, group_events.REJECTED, reason, now_ms
                )
                happened.append(event)
                dying.append(Dying(ranges[0][0], lot.attempt, ranges, _RETENTION))
        if state.keys is not None:
            ranges = pull.runs_of([each for each in state.keys.parked() if each < first_kept], 0)
            parts = [ranges[at : at + _RANGES_PER_EVENT] for at in range(0, len(ranges), _RANGES_PER_EVENT)]
            happened += [group_events.lost_parked(state.cursor, part, now_ms) for part in parts]
        if first_kept > state.cursor:
            happened.append(group_events.skipped(state.cursor, first_kept, group_events.LOST, now_ms))
        return GroupDecision(GroupOutcome.DONE, tuple(happened), tuple(dying))

    def configure(self, expected_version: int, config: GroupConfig, *, now_ms: int) -> GroupDecision:
        """Compare and set: the new version must follow the one that the caller expects. A group begins with version 0,
        and its creation is the step to version 1. A caller that expects no group and wants the configuration in force
        succeeds without an event."""
        current = self._state.config.version
        if expected_version == 0 and current and msgspec.structs.replace(config, version=current) == self.config:
            return GroupDecision(GroupOutcome.DONE)  # a program that asks for the same at each of its starts
        if expected_version != current:
            sentence = (
                f"the configuration is version {current} by now, and another one: to change it, configure version "
                f"{current + 1} with expected_version={current}"
            )
            return GroupDecision(GroupOutcome.OTHER_VERSION, sentence=sentence)
        if config.version != current + 1:
            sentence = f"the next version is {current + 1}, not {config.version}"
            return GroupDecision(GroupOutcome.BAD_REQUEST, sentence=sentence)
        return GroupDecision(GroupOutcome.DONE, (group_events.configured(encode(config), now_ms),))

    def pause(self, name: ConsumerName | None = None, *, now_ms: int) -> GroupDecision:
        """Pause the group, or one consumer by name, whether or not it is a member now."""
        if name is not None and name not in self._state.paused and len(self._state.paused) >= limits.MEMBERS_MAX:
            sentence = f"{len(self._state.paused)} consumers are paused, which is all that may be"
            return GroupDecision(GroupOutcome.BUSY, sentence=sentence)
        return self._switch(name, now_ms, is_paused=True)

    def resume(self, name: ConsumerName | None = None, *, now_ms: int) -> GroupDecision:
        return self._switch(name, now_ms, is_paused=False)

    def _switch(self, name: ConsumerName | None, now_ms: int, *, is_paused: bool) -> GroupDecision:
        event = group_events.paused(is_paused, name or "", now_ms)
        return GroupDecision(GroupOutcome.DONE, () if self.is_paused(name) == is_paused else (event,))

    def go_on(self, key: int = 0, *, now_ms: int) -> GroupDecision:
        """Let a halted key go on, by its hash; 0: all halted keys."""
        halted = set() if self._state.keys is None else self._state.keys.halted
        is_there = bool(halted) or self._state.is_halted if key == 0 else key in halted
        return GroupDecision(GroupOutcome.DONE, (group_events.gone_on(key, now_ms),) if is_there else ())

    def seek(self, to: int, *, now_ms: int) -> SeekDecision:
        """Move the cursor. The group forgets everything in flight, because a seek is a clean start. A new group gets
        its start so: the caller resolves `earliest` and `latest` once."""
        state = self._state
        if to < 0:
            return SeekDecision(GroupOutcome.BAD_REQUEST, sentence="a sequence is not negative")
        return SeekDecision(
            GroupOutcome.DONE,
            (group_events.sought(to, now_ms),),
            held=sum(lot.open_count for _, lot in state.roster.held()),
            waiting=sum(lot.open_count for lot in state.unheld_lots)
            + (0 if state.keys is None else state.keys.parked_count),
            dying_count=sum(lot.open_count for lot in state.dying),
        )

    # --- observation

    @property
    def held_bytes(self) -> int:
        """Memory that the group takes, as an estimate (`snapshot.weigh`)."""
        return snapshot.weigh(self._state)

    @property
    def bytes_per_fresh(self) -> int:
        """The most memory that one more message takes, once handed out."""
        return snapshot.bytes_per_fresh(self._state)

    @property
    def config(self) -> GroupConfig:
        return self._state.config

    def is_paused(self, name: ConsumerName | None = None) -> bool:
        """Whether the group is paused, or one consumer by its name."""
        return self._state.is_paused if name is None else name in self._state.paused

    @property
    def is_ordered(self) -> bool:
        return self._state.is_ordered

    def stands_by(self, name: ConsumerName) -> bool:
        """Whether the consumer is a member of a group in strict order, and another member is active."""
        state = self._state
        member = state.roster.get(name) if state.config.order is Order.STRICT else None
        return member is not None and member.id != state.roster.eldest_id

    def keys_in_hand(self) -> set[int]:
        """In a group by key: the keys of all messages that consumers hold. Walks over all of them."""
        keys = self._state.keys
        if keys is None or not self._state.held_count:
            return set()
        return set().union(*(keys.keys_of(lot.ranges) for _, lot in self._state.roster.held()))

    @property
    def cursor(self) -> int:
        """The next fresh sequence."""
        return self._state.cursor

    @property
    def oldest_unacked(self) -> int:
        """The first sequence that retention must keep for this group. Walks over everything in flight."""
        return snapshot.oldest_unacked(self._state)

    def describe(self, end: int, *, now_ns: int, now_ms: int) -> Description:
        return snapshot.describe(self._state, end, now_ns, now_ms)


# --- outcomes --------------------------------------------------------------------------------------------------------


def _complaint(first: int, ranges: Sequence[Range], after_ms: int | None) -> str:
    """Why the request can never be valid. This check comes before any shift by the request's numbers."""
    if not 1 <= len(ranges) <= limits.SETTLE_RANGES_MAX:
        return f"{len(ranges)} ranges in one settlement: it has 1 to {limits.SETTLE_RANGES_MAX}"
    if any(at < first or count < 1 or at + count > first + limits.LOT_MESSAGES_MAX for at, count in ranges):
        return f"a range outside its lot, which has at most {limits.LOT_MESSAGES_MAX} messages"
    if after_ms is not None and not 0 <= after_ms <= limits.RETRY_AFTER_MS_MAX:
        return f"a retry after {after_ms} ms: at most one day; send a delayed message instead"
    return ""


def _due_ms(
    state: GroupState, verdict: SettleVerdict, attempt: int, after_ms: int | None, draw: float, now_ms: int
) -> int:
    if verdict is SettleVerdict.REJECT:
        return group_events.REJECTED
    if verdict is SettleVerdict.RELEASE:
        return group_events.RELEASED
    wait_ms = state.config.backoff.delay_ms(attempt, draw) if after_ms is None else after_ms
    return max(1, now_ms + wait_ms)  # a time, not RELEASED


def _settle_unheld(
    state: GroupState,
    member: Member,
    verdict: SettleVerdict,
    first: int,
    attempt: int,
    said: int,
    now_ms: int,
    may_grow: bool,
) -> SettleDecision:
    believed = _believable(state, first, attempt, said) if verdict is SettleVerdict.ACK else 0
    if believed and not _has_room_below(state, ranges_of(believed, first), may_grow):
        believed &= (1 << max(state.cursor - first, 0)) - 1
    stale = (said & ~believed).bit_count()
    if not believed:
        return SettleDecision(GroupOutcome.DONE, stale=stale)
    event = group_events.acked(member.id, attempt, first, ranges_of(believed, first), now_ms)
    return SettleDecision(GroupOutcome.DONE, (event,), settled=believed.bit_count(), stale=stale, is_believed=True)


def _has_room_below(state: GroupState, ranges: Sequence[Range], may_grow: bool) -> bool:
    """Whether the group's bound leaves room for lots of the messages below these ranges."""
    lots, cursor = 0, state.cursor
    for first, count in ranges:
        lots += -(-max(first - cursor, 0) // limits.LOT_MESSAGES_MAX)
        cursor = max(cursor, first + count)
    return not lots or (may_grow and state.in_flight + lots <= 2 * state.config.lots_max)


def _believable(state: GroupState, first: int, attempt: int, said: int) -> int:
    """The messages that may have gone out in a lost PULL: nobody holds them, at this attempt."""
    known = state.recovered_end - first
    if known <= 0 or state.config.mode is Mode.AT_MOST_ONCE or state.is_ordered:
        return 0
    said &= (1 << min(known, limits.LOT_MESSAGES_MAX)) - 1
    open_ = 0
    for lot in state.unheld_lots.touching(first, limits.LOT_MESSAGES_MAX):
        if lot.attempt == attempt:
            bits = open_in(lot, first, limits.LOT_MESSAGES_MAX)
            shift = lot.base - first
            open_ |= bits << shift if shift >= 0 else bits >> -shift
    if attempt == 1 and first - state.cursor <= limits.BELIEF_MESSAGES_MAX:
        above = max(state.cursor - first, 0)
        if above < limits.LOT_MESSAGES_MAX:
            open_ |= ((1 << limits.LOT_MESSAGES_MAX) - 1) >> above << above
    return said & open_
