"""The pure law of a consumer group on one subject: no I/O, no clock, no storage.

    config        how a group behaves, versioned
    events        what can happen, as it stands in the action log
    attempts      which attempts of a message have failed, and why
    lot           a span of messages with a mask; (first sequence, attempt) names it
    member        who holds which lots, in which numbered response
    stock         lots that nobody holds
    keys          order by key: which keys have a message out, and who is parked behind it
    state         all of it, and `apply`
    pulling, settling, membership, steering    decisions: state and request in, events and answer out
    choosing, choosing_ordered, ordering, runs what a pull takes, also where an order is kept
    snapshot, describe, weight                 the state as bytes, for people, and as memory
    group         the door

A pull comes from `broker` here, and its lots go to the reader of the message log.
"""

from fairway.groups.attempts import Attempt, Attempts
from fairway.groups.config import AfterDead, Backoff, Coalesce, GroupConfig, Mode, Order, TagFilter
from fairway.groups.decisions import (
    Dying,
    GroupDecision,
    GroupOutcome,
    Handout,
    JoinClaim,
    JoinDecision,
    PullDecision,
    SeekDecision,
    SettleDecision,
)
from fairway.groups.describe import ConsumerDescription, Description
from fairway.groups.events import GroupEvent, GroupEventKind
from fairway.groups.group import GroupStateMachine
from fairway.groups.lot import Range
from fairway.groups.settling import SettleVerdict

__all__ = [
    "AfterDead",
    "Attempt",
    "Attempts",
    "Backoff",
    "Coalesce",
    "ConsumerDescription",
    "Description",
    "Dying",
    "GroupConfig",
    "GroupDecision",
    "GroupEvent",
    "GroupEventKind",
    "GroupOutcome",
    "GroupStateMachine",
    "Handout",
    "JoinClaim",
    "JoinDecision",
    "Mode",
    "Order",
    "PullDecision",
    "Range",
    "SeekDecision",
    "SettleDecision",
    "SettleVerdict",
    "TagFilter",
]
