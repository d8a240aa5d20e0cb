"""What became of a message in a group: the states, and which event leads to which state.

`fairway trace` and the Spark jobs read the same events (`action_log_reader` has their words), and take the states and
these rules from here. The states:

    waiting           not handed out yet; or to come again, because the cursor was moved back or it was redriven
    in hand           with a consumer
    returned          handed back, or taken from a consumer: the next pull gets it
    retrying          failed, and waits for `due_at`
    acked             done
    handed out        done, too: the group is at-most-once
    dying, dead       on its way to dead letters, and there
    skipped           not for this group: without its tags, before its beginning, or the cursor was moved past it
    lost              retention took it before the group had it
    unknown           below the group's cursor, and older than the action log

Most events name their messages, and `STATE_AFTER` has the state that the last of them leaves. Three rules stand beside
the table:

- A consumer that leaves, or whose lease ends, returns what it holds.
- A moved cursor decides about every message: those from the new cursor on are to come, and the rest is skipped unless
  it is done. The removal of a group is a cursor beyond all messages.
- A message without events is to come from the group's cursor on. The broker notes what a filter passes over only when
  it hands out something behind it, so below the cursor such a message is skipped. If the message is older than the
  action log, nobody knows.

`MessageHistory` applies the events of one message one by one. Spark applies the same rules to all messages at once
(`fairway.spark.jobs.message_lifecycle`); `tests/spark/test_job_trace.py` holds both to the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fairway.client.action_log_reader import SOUGHT, detail_of
from fairway.client.idempotence import REPLAY_ID
from fairway.storage.action_log import ActionHeader

WAITING, IN_HAND, RETURNED, RETRYING, ACKED, HANDED_OUT = (
    "waiting", "in hand", "returned", "retrying", "acked", "handed out",
)  # fmt: skip
DYING, DEAD, SKIPPED, LOST, UNKNOWN = "dying", "dead", "skipped", "lost", "unknown"
STATES: Final = (
    WAITING, IN_HAND, RETURNED, RETRYING, ACKED, HANDED_OUT, DYING, DEAD, SKIPPED, LOST, UNKNOWN,
)  # fmt: skip  # in the order of a lifecycle
DONE: Final = frozenset({ACKED, HANDED_OUT, DEAD, SKIPPED, LOST})
HELD: Final = frozenset({IN_HAND, RETURNED, RETRYING, DYING})  # handed out, and not done
OPEN: Final = HELD | {WAITING}

STATE_AFTER: Final = {
    "pulled": IN_HAND, "acked": ACKED, "retried": RETRYING, "doubted": RETRYING, "released": RETURNED,
    "expired": RETURNED, "left": RETURNED, "rejected": DYING, "dead": DEAD, "declined": SKIPPED, "skipped": SKIPPED,
    "lost": LOST, "parked": WAITING,
}  # fmt: skip
DONE_BY: Final = tuple(event for event, state in STATE_AFTER.items() if state in DONE)
ENDS_CONSUMER: Final = ("left", "expired")  # without a range: all that the consumer held
MOVES_CURSOR: Final = (SOUGHT, "removed")

# Headers of a copy that was redriven, or replayed to one group: where the original is.
DEAD_SUBJECT: Final = "fairway.dead.subject"
DEAD_SEQUENCE: Final = "fairway.dead.sequence"
DEAD_ATTEMPTS: Final = "fairway.dead.attempts"  # before the copy was redriven
REPLAY_SUBJECT: Final = "fairway.replay.subject"
REPLAY_SEQUENCE: Final = "fairway.replay.sequence"
REPLAY_GROUP: Final = "fairway.replay.broker_group"  # in a cluster


def copied_by(headers: Mapping[str, str]) -> str:
    """The event that brought a copy into the inbox of a group."""
    if DEAD_SEQUENCE in headers:
        return "redriven"
    return "replayed" if REPLAY_ID in headers else "sent again"


def state_without_events(sequence: int, cursor: int | None, appended_ms: int, told_from_ms: int) -> str:
    """The state of a message that no event names. `told_from_ms`: since when the action log has events."""
    if cursor is None or cursor <= sequence:
        return WAITING
    return SKIPPED if appended_ms >= told_from_ms else UNKNOWN


class MessageLocation(NamedTuple):
    """The place of a message, or of a copy in an inbox."""

    subject: str
    sequence: int


@dataclass(frozen=True)
class MessageEvent:
    """An event that changed the state of a message."""

    at_ms: int
    event: str
    group_id: int
    consumer_id: int
    attempt: int
    due_ms: int
    detail: str | None


@dataclass
class MessageHistory:
    """The state of a message, or of one copy, in one group, and the events that led there. A group that was removed and
    made again has another number, and goes on under its name."""

    place: MessageLocation
    group: str | None
    state: str = WAITING
    named_state: str = WAITING  # after the last event that named the message
    holder: int = 0  # the number of a consumer
    due_ms: int = 0
    pulls: int = 0
    acks: int = 0
    acked_ms: int = 0  # the first time
    events: list[MessageEvent] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.state in DONE

    def apply(self, event: str, action: ActionHeader, detail: bytes, *, is_at_most_once: bool = False) -> None:
        """Apply an event that names the message."""
        self.named_state = HANDED_OUT if event == "pulled" and is_at_most_once else STATE_AFTER[event]
        self.state = self.named_state
        self.holder = action.consumer_id if self.state == IN_HAND else 0
        self.due_ms = max(action.due_ms, 0)
        self.pulls += event == "pulled"
        if event == "acked":
            self.acks += 1
            self.acked_ms = self.acked_ms or action.time_ms
        self._note(event, action, detail_of(action.kind, action.lot, detail))

    def end_consumer(self, event: str, action: ActionHeader) -> None:
        """Apply the end of a consumer: it has left, or its lease has expired."""
        if self.holder == action.consumer_id and self.state == IN_HAND:
            self.state, self.holder = STATE_AFTER[event], 0
            self._note(event, action, None)

    def move_cursor(self, event: str, action: ActionHeader) -> None:
        """Apply a move of the group's cursor, or the removal of the group: in-flight messages are forgotten."""
        is_to_come = event == SOUGHT and action.lot <= self.place.sequence
        after = WAITING if is_to_come else self.named_state if self.named_state in DONE else SKIPPED
        if after != self.state:
            self.state, self.holder, self.due_ms = after, 0, 0
            self._note(event, action, None)

    def _note(self, event: str, action: ActionHeader, detail: str | None) -> None:
        due_ms = max(action.due_ms, 0)
        self.events.append(
            MessageEvent(action.time_ms, event, action.group_id, action.consumer_id, action.attempt, due_ms, detail)
        )
