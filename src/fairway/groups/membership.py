"""Decisions about members: join, leave, and leases that end.

A consumer has a stable id, and its session has a secret. A JOIN with the id and the secret of a member resumes the
member, and responses that did not arrive are resent. A JOIN that remembers no response (arrived = 0) comes from a new
process after a crash. Messages that the old process held count an attempt; otherwise a message that kills its handler
would come back for ever.

An id proves nothing, because others can read it. So the decision is:

    the member has                                  the JOIN shows          the JOIN
    a secret                                        the same                resumes the member
    a secret                                        another one, or none    waits
    no secret, and the connection that joined ended anything                resumes the member
    no secret, and the connection that joined lives anything                waits

A JOIN that waits is refused as BUSY until the lease of the member ends. Then the member expires, its unacked messages
count an attempt, and the JOIN begins a new member under the same id.

Clients of earlier versions show no secret. A JOIN with a secret that resumes a member without a secret gives the member
that secret.
"""

from __future__ import annotations

from fairway import group_events
from fairway.batch.identity import is_same
from fairway.group_events import GroupEvent
from fairway.groups.decisions import BUSY_RETRY_AFTER_MS, Dying, GroupDecision, GroupOutcome, JoinClaim, JoinDecision
from fairway.groups.lots import Lot, ranges_of
from fairway.groups.members import Member
from fairway.groups.state import GroupState
from fairway.names import ConsumerName

MS_NS = 1_000_000
EXPIRED_LOTS_PER_TURN = 250  # about 1 ms; the rest is still due, so the caller's timer fires again at once

RESTARTED = "the consumer restarted"

_ID_RETRY_AFTER_MS_MAX = 1_000  # the member may leave long before its lease ends: ask once a second


def decide_join(
    state: GroupState,
    name: ConsumerName,
    version: int,
    arrived: int,
    claim: JoinClaim,
    *,
    resume_at: int,
    now_ns: int,
    now_ms: int,
    aging_ms: int,
) -> JoinDecision:
    """Decide a JOIN. A broadcast consumer that has missed messages goes on at `resume_at`; `aging_ms` tells how long
    the consumer was away."""
    config = state.config
    if version not in (0, config.version):
        sentence = f"the group's configuration is version {config.version}, this member was written for {version}"
        return JoinDecision(GroupOutcome.OTHER_VERSION, sentence=sentence, config=config)
    member = state.roster.get(name)
    is_owner = member is not None and _is_owner(member, claim)
    if member is not None and not is_owner and not claim.is_granted:
        left_ms = _lease_left_ms(state, member, now_ns)
        if left_ms > 0:
            return _wait_for_lease(state, member, left_ms)
    if member is not None and is_owner and (arrived or not member.lots):
        state.roster.renew(member, now_ns)
        member.recall(arrived)
        return JoinDecision(
            GroupOutcome.DONE, _told_again(state, member, claim, now_ms), config=config, is_gap=state.has_gap
        )
    if member is None and len(state.roster) >= config.members_max:
        sentence = f"the group has {len(state.roster)} members, which is all it may have"
        return JoinDecision(GroupOutcome.BUSY, sentence=sentence, config=config, retry_after_ms=BUSY_RETRY_AFTER_MS)
    happened: list[GroupEvent] = []
    is_new_gap = _is_gap(state, arrived, aging_ms)
    is_gap = is_new_gap or state.has_gap  # reported again if the first report may have been lost
    if is_new_gap:
        happened.append(group_events.sought(max(resume_at, state.cursor), now_ms))
    if member is not None:
        happened.append(group_events.expired(member.id, now_ms))
    happened.append(group_events.joined(state.next_consumer_id, name, config.version, now_ms, is_gap=is_gap))
    if claim.verifier:
        happened.append(group_events.verified(state.next_consumer_id, claim.verifier, now_ms))
    reason = RESTARTED if is_owner else group_events.LEASE_ENDED
    dying = _last_attempts(state, member, reason) if member is not None else ()
    return JoinDecision(GroupOutcome.DONE, tuple(happened), dying, config=config, is_gap=is_gap)


def _is_owner(member: Member, claim: JoinClaim) -> bool:
    """Whether the JOIN comes from the session of this member, as far as the group can know."""
    if member.verifier:
        return is_same(member.verifier, claim.verifier)
    return not claim.is_taken


def _lease_left_ms(state: GroupState, member: Member, now_ns: int) -> int:
    """The rest of the lease, rounded up. 0: the lease has ended, though the member may still be on the roster."""
    if member.has_lasting_lease:
        return state.config.lease_ms
    left_ns = member.renewed_ns + state.config.lease_ms * MS_NS - now_ns
    return max(-(-left_ns // MS_NS), 0)


def _wait_for_lease(state: GroupState, member: Member, left_ms: int) -> JoinDecision:
    why = "this JOIN does not show its secret" if member.verifier else "its connection is open"
    sentence = (
        f"wait for the lease of consumer {member.name} to end, in {left_ms / 1_000:.1f} s unless it is renewed: "
        f"another session has joined with this id, and {why}"
    )
    retry_after_ms = min(left_ms, _ID_RETRY_AFTER_MS_MAX)
    return JoinDecision(GroupOutcome.BUSY, sentence=sentence, config=state.config, retry_after_ms=retry_after_ms)


def _told_again(state: GroupState, member: Member, claim: JoinClaim, now_ms: int) -> tuple[GroupEvent, ...]:
    """The events of a JOIN that resumes a member: only its changes."""
    happened = []
    if member.version != state.config.version:
        happened.append(group_events.joined(member.id, member.name, state.config.version, now_ms))
    if claim.verifier and not member.verifier:
        happened.append(group_events.verified(member.id, claim.verifier, now_ms))
    return tuple(happened)


def _is_gap(state: GroupState, arrived: int, aging_ms: int) -> bool:
    """Whether a broadcast consumer was away for too long, or so long that its group had been removed."""
    if not state.config.is_broadcast or len(state.roster):
        return False
    is_first = state.next_consumer_id == 1
    return bool(arrived) if is_first else aging_ms - state.absent_since_ms > state.config.broadcast_ms_max


def decide_expire(state: GroupState, now_ns: int, now_ms: int) -> GroupDecision:
    """Expire members whose lease has ended, and lots that are held too long."""
    happened: list[GroupEvent] = []
    dying: list[Dying] = []
    gone = set()
    lots_left = EXPIRED_LOTS_PER_TURN
    for member in state.roster.silent_since(now_ns - state.config.lease_ms * MS_NS):
        happened.append(group_events.expired(member.id, now_ms))
        dying += _last_attempts(state, member, group_events.LEASE_ENDED)
        gone.add(member.id)
        lots_left -= 1 + len(member.lots)
        if lots_left <= 0:
            break
    if state.config.max_handling_ms is not None:
        limit_ns = now_ns - state.config.max_handling_ms * MS_NS
        for lot, member in state.handling.items():
            if lot.handed_ns > limit_ns or lots_left <= 0:
                break
            if member.id not in gone:
                happened.append(group_events.held_too_long(member.id, lot.attempt, lot.base, lot.ranges, now_ms))
                dying += _dying_of(state, lot, group_events.HELD_TOO_LONG)
                lots_left -= 1
    return GroupDecision(GroupOutcome.DONE, tuple(happened), tuple(dying))


def next_deadline_ns(state: GroupState, now_ns: int, now_ms: int) -> int | None:
    """When a lease ends, a lot has been held too long, or a retry falls due: the time for the caller's one timer."""
    deadlines = []
    silent = state.roster.longest_silent()
    if silent is not None:
        deadlines.append(silent.renewed_ns + state.config.lease_ms * MS_NS)
    if state.config.max_handling_ms is not None and state.handling:
        deadlines.append(next(iter(state.handling)).handed_ns + state.config.max_handling_ms * MS_NS)
    due_ms = None if state.is_paused else state.unheld_lots.next_due_ms(now_ms)
    if due_ms is not None:
        deadlines.append(now_ns + (due_ms - now_ms) * MS_NS)
    return min(deadlines, default=None)


def _last_attempts(state: GroupState, member: Member, reason: str) -> tuple[Dying, ...]:
    return tuple(dying for lot in member.lots.values() for dying in _dying_of(state, lot, reason))


def _dying_of(state: GroupState, lot: Lot, reason: str) -> tuple[Dying, ...]:
    """The messages of the lot that have had their last attempt."""
    if lot.attempt < state.config.attempts_max:
        return ()
    ranges = ranges_of(state.begun(lot), lot.base)
    return (Dying(ranges[0][0], lot.attempt, ranges, reason),) if ranges else ()
