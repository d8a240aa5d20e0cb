"""A consumer group on one subject, as a pure state machine: no I/O, no clock, no storage.

    state_machine the interface: `GroupStateMachine` makes decisions and applies events. Decisions about outcomes (ack,
                  retry, reject, release), and of operators and the store: configure, pause, seek, lost messages
    state         the state of a group, and `apply`, which changes it by events
    decisions     the results of decisions: an outcome, events, and work for the caller
    config        the versioned configuration of a group
    membership    decisions: join, leave, expire
    pull          decisions: what a pull gets, also where an order is kept
    members       members, with the lots that they hold and their numbered responses
    lots          a lot, and the lots that nobody holds
    keys          order by key: which keys have a message out, and which messages are parked
    attempts      the failed attempts of a message
    snapshot      the state as bytes, for people, and as an amount of memory

A request travels so: the caller asks `GroupStateMachine` for a decision, for example with `pull`. The module of that
decision reads the state and returns events (`fairway.group_events`). The caller applies the events, appends them to the
action log, and answers. After a restart the caller restores a snapshot and applies the later events of the log.
"""

from fairway.group_events import ActionKind, GroupEvent, Range
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
    SettleVerdict,
)
from fairway.groups.snapshot import ConsumerDescription, Description
from fairway.groups.state_machine import GroupStateMachine

__all__ = [
    "ActionKind",
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
