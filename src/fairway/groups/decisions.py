"""What a decision says: an outcome for the asker, the events that make it so, and what the caller must see to.

Nothing has happened until the events are applied. The caller applies them before it asks for the next decision, writes
them to the action log, and answers when they are durable (`PullDecision` says whether its answer must wait for that).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from fairway.groups.attempts import Attempts
from fairway.groups.config import GroupConfig
from fairway.groups.events import GroupEvent
from fairway.groups.lot import Range


class GroupOutcome(enum.Enum):
    DONE = "done"
    EMPTY = "empty"  # nothing to hand out now: wait, or answer so
    BUSY = "busy"  # a bound is reached: later
    PAUSED = "paused"
    STANDBY = "standby"  # in a group of strict order another member is the active one
    NOT_A_MEMBER = "not_a_member"  # it never joined, or its lease ended: join (again)
    OTHER_VERSION = "other_version"  # the group's configuration is another: join again, with that one
    BAD_REQUEST = "bad_request"  # can never be granted; the sentence says why


class JoinClaim(NamedTuple):
    """What speaks for a JOIN under a consumer's id, beyond the id itself, which everybody can know."""

    verifier: bytes = b""  # of the secret that the JOIN shows; empty: it shows none
    is_taken: bool = False  # another connection has joined under the id, and is open
    is_granted: bool = False  # the caller has decided: the group has accepted the JOIN, and this is its inbox


class Handout(NamedTuple):
    """A lot as it is handed out: its name, and the messages that are meant."""

    first: int
    attempt: int
    ranges: tuple[Range, ...]
    is_behind: bool = False  # some of it comes after others of its key in the same response, and waits for them there


class Dying(NamedTuple):
    """Messages that have had their last attempt. First the events of the decision, then these to the dead-letter
    subject, and when that is committed `Group.bury`."""

    first: int
    attempt: int
    ranges: tuple[Range, ...]
    reason: str
    history: Attempts = ()  # empty in a decision: known when its events are applied (`Group.history_of`)


class GroupDecision(msgspec.Struct, frozen=True, gc=False):
    outcome: GroupOutcome
    events: tuple[GroupEvent, ...] = ()
    dying: tuple[Dying, ...] = ()
    sentence: str = ""
    retry_after_ms: int | None = None


class JoinDecision(GroupDecision, frozen=True, gc=False):
    config: GroupConfig | None = None  # the one in force, also where the member stated another
    is_gap: bool = False  # a broadcast consumer came back too late


class PullDecision(GroupDecision, frozen=True, gc=False):
    number: int = 0
    lots: tuple[Handout, ...] = ()
    is_again: bool = False  # this response went out before and did not arrive
    is_durable_first: bool = False  # answer only when the events are durable


class SettleDecision(GroupDecision, frozen=True, gc=False):
    settled: int = 0  # messages
    stale: int = 0  # messages that this consumer does not hold: their outcome is not its to say
    is_believed: bool = False  # though nobody held them: it may move the cursor, so apply it before the next decision


class SeekDecision(GroupDecision, frozen=True, gc=False):
    """How many messages the group no longer remembers: held, waiting, dying."""

    held: int = 0
    waiting: int = 0
    dying_count: int = 0


BUSY_RETRY_AFTER_MS = 200  # a lot is settled or expires in a while; asking five times a second costs nothing
