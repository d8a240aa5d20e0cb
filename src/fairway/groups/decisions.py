"""The results of decisions: an outcome for the caller's client, the events, and work for the caller.

A decision changes nothing until its events are applied. The caller applies them before it asks for the next decision,
writes them to the action log, and answers when they are durable. `PullDecision` says whether its answer must wait for
that.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from fairway.group_events import GroupEvent, Range
from fairway.groups.attempts import Attempts
from fairway.groups.config import GroupConfig


class GroupOutcome(enum.Enum):
    DONE = "done"
    EMPTY = "empty"  # nothing to hand out now: wait, or answer so
    BUSY = "busy"  # a bound is reached: try later
    PAUSED = "paused"
    STANDBY = "standby"  # in strict order another member is the active one
    NOT_A_MEMBER = "not_a_member"  # never joined, or its lease ended: join (again)
    OTHER_VERSION = "other_version"  # the group's configuration has another version: join again with that version
    BAD_REQUEST = "bad_request"  # can never be granted; the sentence says why


class SettleVerdict(enum.IntEnum):
    """The outcomes, with the numbers of the protocol."""

    ACK = 1
    RETRY = 2
    REJECT = 3  # a dead letter at once
    RELEASE = 4  # handed back untouched: counts no attempt


class JoinClaim(NamedTuple):
    """The evidence for a JOIN under a consumer's id. The id itself proves nothing, because everybody can know it."""

    verifier: bytes = b""  # of the secret that the JOIN shows; empty: no secret
    is_taken: bool = False  # another connection has joined under the id, and is open
    is_granted: bool = False  # already decided: the group has accepted the JOIN, and this is the group's inbox


class Handout(NamedTuple):
    """A lot as it is handed out: its name, and its messages."""

    first: int
    attempt: int
    ranges: tuple[Range, ...]
    is_behind: bool = False  # some messages follow others of their keys in the same response, and wait for them there


class Dying(NamedTuple):
    """Messages after their last attempt. The caller applies the decision's events, copies these messages to the
    dead-letter subject, and calls `GroupStateMachine.mark_dead` when the copies are committed."""

    first: int
    attempt: int
    ranges: tuple[Range, ...]
    reason: str
    history: Attempts = ()  # empty in a decision: known when its events are applied (`GroupStateMachine.history_of`)


class GroupDecision(msgspec.Struct, frozen=True, gc=False):
    outcome: GroupOutcome
    events: tuple[GroupEvent, ...] = ()
    dying: tuple[Dying, ...] = ()
    sentence: str = ""
    retry_after_ms: int | None = None


class JoinDecision(GroupDecision, frozen=True, gc=False):
    config: GroupConfig | None = None  # the one in force, also if the member stated another
    is_gap: bool = False  # a broadcast consumer came back too late


class PullDecision(GroupDecision, frozen=True, gc=False):
    number: int = 0
    lots: tuple[Handout, ...] = ()
    is_again: bool = False  # this response went out before and did not arrive
    is_durable_first: bool = False  # answer only when the events are durable


class SettleDecision(GroupDecision, frozen=True, gc=False):
    settled: int = 0  # messages
    stale: int = 0  # messages that this consumer does not hold: their outcome does not count
    is_believed: bool = False  # although no member held them; may move the cursor: apply before the next decision


class SeekDecision(GroupDecision, frozen=True, gc=False):
    """The counts of messages that the group forgets: held, waiting, dying."""

    held: int = 0
    waiting: int = 0
    dying_count: int = 0


BUSY_RETRY_AFTER_MS = 200  # a lot is settled or expires in a while; asking five times a second costs little
