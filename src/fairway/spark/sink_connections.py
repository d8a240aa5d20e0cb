"""Sends a task's batches, several at once, and finds the broker group of a cluster that they go to.

`Sending` keeps up to eight batches under way to one group of servers, and resends them in order after a refusal.

All rows of a task for one subject go to one broker group, so that a task that runs again finds its stored batches
there. On the first run the task chooses by rendezvous hashing: among the groups that take messages, the one with the
highest hash of stream and group. This spreads tasks evenly, and a new group takes only its share of them.

A later run must find the same group, although subjects are extended and groups drained meanwhile. So each run first
asks every group that holds the subject whether the group remembers the stream. The question is a batch of that stream
that leaves a gap, and can never be stored. A broker that remembers the stream refuses with SEQUENCE_GAP, another one
with UNKNOWN_PRODUCER. If a group remembers the stream, the rows go there. If none does, nothing of the stream was
stored, and the choice is free.

The question needs an answer from every group. The task waits for a group without a master, and names it when patience
runs out. The method fails only if two runs of one task choose different groups at the same moment. For that a
speculative copy, or a task that outlived its driver, must coincide with an extension of the subject between the two
questions.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from fairway.client import url as urls
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.names import Subject
from fairway.protocol.connection_states import ResponseReceived
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.route_messages import SubjectRoute
from fairway.runtime import host
from fairway.spark.connection import LATER, NS, BlockingClient, Ticket
from fairway.spark.server_groups import ServerGroupAddress, ServerGroups, caller_to, delay_places

IN_FLIGHT: Final = 8  # batches; the broker gathers them into one sync
# Why a broker refuses messages for one group alone.
_NOBODY: Final = {
    Code.NO_SUCH_SUBJECT: "no subject {subject!r}, so nobody is group {group!r} on it: correct the option subject",
    Code.NO_SUCH_GROUP: "there is no group {group!r} on {subject}: `fairway groups {subject}` lists those that are",
    Code.BAD_NAME: "this broker takes no messages for one group alone ({refused}): upgrade it, or write to a subject "
    "that only this group consumes",
}


class NotTheSame(FairwayError):
    """A task ran again with other rows."""


class Sending:
    """Sends batches to one group of servers, in order."""

    def __init__(self, place: ServerGroupAddress, *, is_pinned: bool = False) -> None:
        """`is_pinned`: an earlier run of the task has stored batches there, so the rest must go there too."""
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
        """Resend in order after a pause: the first batch was refused for now, so those behind it met a gap."""
        refusals = [ticket for ticket in self._under_way if isinstance(self._caller.outcome(ticket), Refused)]
        self._caller.pause(refused, since_ns)
        self._caller.resend(refusals)


def is_passing(refused: Refused) -> bool:
    """Whether a later attempt may succeed. A group with too few copies says when to ask again."""
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


PROBE_SEQUENCE: Final = 1 << 62  # beyond the end of any stream
_NAP_S: Final = 0.2
_REMEMBERED: Final = frozenset({Code.SEQUENCE_GAP, Code.SEQUENCE_CONFLICT})
_NOT_HERE: Final = frozenset({Code.NO_SUCH_SUBJECT, Code.NO_SUCH_GROUP, Code.BAD_NAME})


class GroupConnections:
    """The connections of one task: one for each group of servers that it sends to."""

    def __init__(self, url: str, patience_s: int) -> None:
        self._url = url
        self._patience_s = patience_s
        self._server_groups = ServerGroups(url, patience_s) if urls.parse_any(url).meta else None
        self._sendings: dict[tuple[ServerGroupAddress, bool], Sending] = {}  # the flag: an earlier run has sent there
        self._asked: dict[str, BlockingClient] = {}  # for the question whether a group remembers a stream

    def sending(self, stream_id: int, request: Produce, probe: Callable[[], bytes], *, is_due: bool) -> Sending:
        """The connection for a stream, to a broker or a delay server. `request` is the request of its batches."""
        is_pinned = False
        if self._server_groups is not None:
            pin = _Pin(self._server_groups, self._caller, stream_id, request, is_due)
            group, is_pinned = pin.find(probe, self._server_groups.now_ns + self._patience_s * NS)
            place = self._place(group)
        elif is_due:
            place = delay_places(self._url, self._patience_s)[0]
        else:
            place = ServerGroupAddress(self._url, self._patience_s)
        found = self._sendings.get((place, is_pinned))
        if found is None:
            found = self._sendings[place, is_pinned] = Sending(place, is_pinned=is_pinned)
        return found

    def _place(self, group: str) -> ServerGroupAddress:
        return ServerGroupAddress(self._url, self._patience_s, group)

    def _caller(self, group: str) -> BlockingClient:
        found = self._asked.get(group)
        if found is None:
            found = self._asked[group] = caller_to(self._place(group))
        return found

    def finish(self) -> tuple[int, int]:
        """Wait until everything is stored; returns the number of messages, and of those stored by an earlier run."""
        for each in self._sendings.values():
            each.finish()
        return (
            sum(each.messages for each in self._sendings.values()),
            sum(each.duplicates for each in self._sendings.values()),
        )

    def close(self) -> None:
        for sending in self._sendings.values():
            sending.close()
        for caller in self._asked.values():
            caller.close()
        if self._server_groups is not None:
            self._server_groups.close()


class _Pin:
    """Finds the broker group of one stream."""

    def __init__(
        self,
        server_groups: ServerGroups,
        caller: Callable[[str], BlockingClient],
        stream_id: int,
        request: Produce,
        is_due: bool,
    ) -> None:
        self._server_groups = server_groups
        self._caller = caller
        self._stream_id = stream_id
        self._request = request
        self._subject = request.subject
        self._is_due = is_due

    def find(self, probe: Callable[[], bytes], until_ns: int) -> tuple[str, bool]:
        """The group that remembers the stream, or else one that takes it; and whether the group remembers it."""
        while True:
            route = self._server_groups.receivers(self._subject, is_due=self._is_due)
            if len(route.groups) == 1 and route.writable:
                return route.groups[0], False
            if route.groups:
                found = self._among(route, probe())
                if found is not None:
                    return found
            self._wait(route, until_ns)

    def _among(self, route: SubjectRoute, probe: bytes) -> tuple[str, bool] | None:
        """The group, and whether it remembers the stream; None: no group takes messages now."""
        answers = {group: self._answer(self._caller(group), probe) for group in route.groups}
        remembering = [group for group, code in answers.items() if code in _REMEMBERED]
        if remembering:
            return remembering[0], True
        here = [group for group, code in answers.items() if code not in _NOT_HERE]
        if not here:  # every group will refuse the batches with its reason
            return route.groups[0], False
        able = [group for group in route.writable if group in here]
        return (chosen(self._stream_id, able), False) if able else None

    def _answer(self, caller: BlockingClient, probe: bytes) -> Code:
        since_ns = caller.now_ns
        request = Produce(self._subject, is_pinned=True, secret=self._request.secret)
        ticket = caller.put(request, [probe])  # pinned, so that a drained group answers too
        while True:
            outcome = caller.outcome(ticket)
            if not isinstance(outcome, Refused):
                raise FairwayError(f"a batch that leaves a gap was taken at {caller.where}: {outcome!r}")
            if outcome.code in _REMEMBERED | _NOT_HERE or outcome.code is Code.UNKNOWN_PRODUCER:
                return outcome.code
            if not is_passing(outcome):
                raise explained(outcome, ticket.message)
            caller.pause(outcome, since_ns)
            caller.resend([ticket])

    def _wait(self, route: SubjectRoute, until_ns: int) -> None:
        if self._server_groups.now_ns > until_ns:
            raise FairwayError(f"nobody takes messages to {self._subject} at {self._server_groups.where}: {route.why}")
        host.sleep(_NAP_S)


def chosen(stream_id: int, groups: Sequence[str]) -> str:
    """Rendezvous hashing: the same choice from the same groups, spread evenly over streams."""

    def weight(group: str) -> bytes:
        return hashlib.sha256(f"{stream_id:016x}\0{group}".encode()).digest()

    return max(groups, key=weight)
