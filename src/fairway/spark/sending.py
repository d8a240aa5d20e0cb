"""Batches on their way to a server, several at once, and what it says of them."""

from __future__ import annotations

from collections import deque
from typing import Final

from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.names import Subject
from fairway.protocol.events import ResponseReceived
from fairway.protocol.messages import Produce, Produced
from fairway.spark.calling import LATER, Ticket
from fairway.spark.places import ServerGroupAddress, caller_to

IN_FLIGHT: Final = 8  # batches; the broker gathers them into one sync
# Why a broker takes nothing for one group alone.
_NOBODY: Final = {
    Code.NO_SUCH_SUBJECT: "no subject {subject!r}, so nobody is group {group!r} on it: correct the option subject",
    Code.NO_SUCH_GROUP: "there is no group {group!r} on {subject}: `fairway groups {subject}` lists those that are",
    Code.BAD_NAME: "this broker takes no messages for one group alone ({refused}): upgrade it, or write to a subject "
    "that only this group consumes",
}


class NotTheSame(FairwayError):
    """A task ran again and brought other rows."""


class Sending:
    """Batches under way to one group of servers, in order."""

    def __init__(self, place: ServerGroupAddress, *, is_pinned: bool = False) -> None:
        """`is_pinned`: an earlier run of the task has stored some of it there, so the rest goes there, too."""
        self._caller = caller_to(place)
        self._is_pinned = is_pinned
        self._under_way: deque[Ticket] = deque()
        self.messages = self.duplicates = 0

    def send(self, subject: str, data: bytes, secret: bytes) -> None:
        self._under_way.append(self._caller.put(Produce(subject, self._is_pinned, secret), [data]))
        if len(self._under_way) >= IN_FLIGHT:
            self._settle_first()

    def finish(self) -> None:
        while self._under_way:
            self._settle_first()

    def close(self) -> None:
        self._caller.close()

    def _settle_first(self) -> None:
        since_ns = self._caller.now_ns
        while True:
            outcome = self._caller.outcome(self._under_way[0])
            if isinstance(outcome, ResponseReceived) and isinstance(outcome.message, Produced):
                self._under_way.popleft()
                self.messages += outcome.message.count
                self.duplicates += outcome.message.count if outcome.message.is_duplicate else 0
                return
            if not isinstance(outcome, Refused) or not is_passing(outcome):
                raise explained(outcome, self._under_way[0].message)
            self._again(outcome, since_ns)

    def _again(self, refused: Refused, since_ns: int) -> None:
        """The first was refused for now, and so those behind it found a gap: wait, and send them all in order."""
        refusals = [ticket for ticket in self._under_way if isinstance(self._caller.outcome(ticket), Refused)]
        self._caller.pause(refused, since_ns)
        self._caller.resend(refusals)


def is_passing(refused: Refused) -> bool:
    """Whether the same may be granted later: a group that has too few copies says when to ask again."""
    return refused.code in LATER or (refused.code is Code.READ_ONLY and refused.retry_after_ms is not None)


def explained(outcome: object, message: object) -> FairwayError:
    subject = Subject(message.subject if isinstance(message, Produce) else "?")
    if not isinstance(outcome, Refused):
        return FairwayError(f"PRODUCE to {subject} was answered with {outcome!r}")
    if subject.is_inbox and outcome.code in _NOBODY:
        group, of = Subject.parse_inbox(subject)
        return Misuse(_NOBODY[outcome.code].format(group=group, subject=of, refused=outcome))
    if outcome.code is Code.FOREIGN_STREAM:
        return FairwayError(
            f"somebody else has taken a stream of this task in {subject}: nothing was added. A write with a writeId of "
            f"its own begins new streams. ({outcome})"
        )
    if outcome.code is Code.SEQUENCE_CONFLICT:
        return NotTheSame(
            f"this task ran before and stored other rows in {subject}: nothing was added. The query must give the same "
            "rows each time it runs: no random values, no current time of its own, no ordering that may vary; sort "
            f"within partitions, or write to a checkpointed table first. ({outcome})"
        )
    return FairwayError(f"the broker does not take messages to {subject}: {outcome}")
